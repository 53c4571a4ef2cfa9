"""Responses from the policy, through ``model.generate``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.models.modes import evaluating
from fastrl.rollout.params import RolloutOutput, SamplingParams
from fastrl.rollout.prompts import check_prompts, end_tokens, need_pad_token


class GenerateEngine:
    """Samples responses with the trained model's own ``generate``: any model, any keyword.

    Args:
        model: a causal LM, or a value-head model around one.
        tokenizer: gives the pad and EOS tokens.
        batch_size: prompts per call of ``generate``.
        autocast: makes the context in which ``generate`` runs.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        batch_size: int = 64,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ):
        self.model = model
        self.autocast = autocast
        self.tokenizer = tokenizer
        self.batch_size = batch_size

    def generate(
        self, prompts: Sequence[Tensor | Sequence[int]], params: SamplingParams
    ) -> RolloutOutput:
        """``params.n`` responses per prompt.

        Raises:
            ValueError: an empty prompt or one as long as the model's context, named by its index.
        """
        repeated = [torch.as_tensor(p) for p in prompts for _ in range(params.n)]
        with _seeded(params.seed):
            return self.generate_with(repeated, params.generation_kwargs())

    def generate_with(
        self, prompts: Sequence[Tensor], generation_kwargs: dict[str, Any]
    ) -> RolloutOutput:
        """One response per prompt, with keyword arguments of ``model.generate`` as they are."""
        kwargs = {"pad_token_id": self.tokenizer.pad_token_id, **generation_kwargs}
        for name in ("num_return_sequences", "return_dict_in_generate"):
            if kwargs.pop(name, None) not in (None, 1, False):
                raise ValueError(f"{name} is not supported here: repeat the prompts instead")
        check_prompts(prompts, self.model, kwargs.get("max_new_tokens"))
        for start in range(0, len(prompts), self.batch_size):
            lengths = [len(p) for p in prompts[start : start + self.batch_size]]
            need_pad_token(lengths, kwargs["pad_token_id"], self.tokenizer)
        begin = time.perf_counter()
        output = RolloutOutput(sequences=[], finish_reasons=[])
        with evaluating(self.model), self.autocast():
            for start in range(0, len(prompts), self.batch_size):
                self._extend(output, prompts[start : start + self.batch_size], kwargs)
        seconds = time.perf_counter() - begin
        tokens = sum(len(s) for s in output.sequences)
        output.stats = {
            "time/rollout": seconds,
            "perf/rollout_tokens_per_second": tokens / seconds,
        }
        return output

    @torch.no_grad()
    def _extend(
        self, output: RolloutOutput, prompts: Sequence[Tensor], kwargs: dict[str, Any]
    ) -> None:
        device = self.model.device
        width = max(len(p) for p in prompts)
        input_ids = torch.full((len(prompts), width), kwargs["pad_token_id"] or 0)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = prompt
            attention_mask[row, width - len(prompt) :] = 1
        generated = self.model.generate(
            input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), **kwargs
        )
        ends = end_tokens(self.model, self.tokenizer, kwargs.get("eos_token_id"))
        for tokens in generated[:, width:].cpu():
            stops = torch.isin(tokens, ends).nonzero()
            ended = len(stops) > 0
            output.sequences.append(tokens[: int(stops[0]) + 1] if ended else tokens)
            output.finish_reasons.append("eos" if ended else "length")


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
