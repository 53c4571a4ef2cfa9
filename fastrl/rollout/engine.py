"""Responses from the policy, through ``model.generate``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl.models.modes import evaluating
from fastrl.rollout.prompts import check_prompts, need_pad_token


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Args:
        max_new_tokens: at most this many tokens per response.
        temperature: 0 is greedy.
        top_k, top_p, min_p: truncations; 0, 1 and 0 switch them off.
        n: samples per prompt.
        seed: of torch's generators during this call, which are put back afterwards; None draws on.

    Raises:
        ValueError: a value out of range.
    """

    max_new_tokens: int = 32
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, at_least in (("max_new_tokens", 1), ("n", 1), ("top_k", 0), ("temperature", 0)):
            if not getattr(self, name) >= at_least:
                raise ValueError(f"{name} must be at least {at_least}, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise ValueError(f"top_p must lie in (0, 1] and min_p in [0, 1), got {self}")

    def generation_kwargs(self) -> dict[str, Any]:
        """The same as arguments of ``model.generate``."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        truncation = {"min_p": self.min_p} if self.min_p else {}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            **truncation,
        }


@dataclass
class RolloutOutput:
    """Samples in the order prompt 0 sample 0 … prompt 0 sample n-1, prompt 1 …, a list per field.

    ``model.generate`` reports tokens alone: log-probs, entropies and values are None here.
    """

    sequences: list[Tensor]  # generated tokens without the prompt, the EOS included
    finish_reasons: list[str]  # "eos" or "length"
    logprobs: list[Tensor] | None = None
    logprobs_t1: list[Tensor] | None = None
    truncated_logprobs: list[Tensor] | None = None
    entropies: list[Tensor] | None = None
    values: list[Tensor] | None = None
    stats: dict[str, float] = field(default_factory=dict)


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
        ends = self._end_tokens(kwargs)
        for tokens in generated[:, width:].cpu():
            stops = torch.isin(tokens, ends).nonzero()
            ended = len(stops) > 0
            output.sequences.append(tokens[: int(stops[0]) + 1] if ended else tokens)
            output.finish_reasons.append("eos" if ended else "length")

    def _end_tokens(self, kwargs: dict[str, Any]) -> Tensor:
        """The tokenizer's EOS and those that ``generate`` itself stops at."""
        config = getattr(self.model, "pretrained_model", self.model).generation_config
        asked = kwargs.get("eos_token_id", config.eos_token_id)
        ids = [
            *(asked if isinstance(asked, (list, tuple)) else [asked]),
            self.tokenizer.eos_token_id,
        ]
        return torch.tensor(sorted({i for i in ids if i is not None and i >= 0}), dtype=torch.long)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
