"""How PPOTrainer generates, and what it remembers of that until the next update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastrl.data.prompt_ids import check_tensors
from fastrl.ppo.batches import JoinedBatches
from fastrl.ppo.reuse import RolloutMemory, told_by
from fastrl.ppo.rollouts import GenerateRollouts, Request
from fastrl.ppo.sampling import SamplingArguments
from fastrl.ref_model import RefModel
from fastrl.rollout import RolloutOutput

if TYPE_CHECKING:
    from accelerate import Accelerator

    from fastrl.config import PPOConfig


class Generation:
    """Responses of the policy and of the reference."""

    config: PPOConfig
    accelerator: Accelerator
    model: Any
    tokenizer: Any
    reference: RefModel
    current_device: torch.device
    _batches: JoinedBatches
    _rollouts: GenerateRollouts
    _memory: RolloutMemory
    _sampling: SamplingArguments

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Responses to one query or several; keyword arguments as in ``model.generate``.

        As there, what they leave out is taken from the model's generation_config: a warning names
        each field that makes the draw another one than softmax(logits / T) with T
        ``PPOConfig.temperature``, which is what ``step()`` scores. That temperature is the default
        here where it is not 1. ``stop`` is beside them: token sequences that end a response.

        Args:
            query_tensor: 1-D token ids, or a list of such.
            length_sampler: draws max_new_tokens, once per call of the model.
            batch_size: queries per call of the model.
            return_prompt: whether the responses begin with their query; those of an
                encoder–decoder never do, nor with its start token.
            generate_ref_response: return the reference's responses as well, as a second result.

        Returns:
            for a list, a list of 1-D tensors, each cut after the first EOS of its response; for one
            query a tensor [1, L].
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        single = isinstance(query_tensor, Tensor)
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        check_tensors(queries)
        generation_kwargs = self._sampling.of_generate(generation_kwargs)
        contexts: list[AbstractContextManager[Any]] = [contextlib.nullcontext(self.model)]
        if generate_ref_response:
            contexts.append(self.reference.as_policy())
        results = []
        for reference, context in zip((False, True), contexts, strict=False):
            limits = None
            if length_sampler is not None:
                drawn = [length_sampler() for _ in range(0, len(queries), batch_size)]
                limits = [drawn[i // batch_size] for i in range(len(queries))]
            with context as model:
                request = Request(queries, generation_kwargs, batch_size, limits, reference)
                output = self._generate(model, request)
            responses = [r.to(self.current_device) for r in output.sequences]
            if return_prompt:
                responses = [
                    self._batches.layout.with_prompt(q.to(r.device), r)
                    for q, r in zip(queries, responses, strict=True)
                ]
            results.append(responses[0].unsqueeze(0) if single else responses)
        return tuple(results) if generate_ref_response else results[0]

    def rollout(
        self, prompts: Sequence[Tensor], generation_kwargs: dict, samples: int = 1
    ) -> RolloutOutput:
        """Responses of the policy, without their prompts, with reasons of ending and timings;
        ``samples`` to each prompt, one after the other.

        They are sampled from softmax(logits / T), T being ``PPOConfig.temperature``, but for what
        ``generation_kwargs`` says; of the model's generation_config only the tokens that end a
        response act.

        Raises:
            ValueError: another temperature in ``generation_kwargs``.
        """
        size = self.config.batch_size
        kwargs = self._sampling.of_the_policy(generation_kwargs)
        return self._generate(self.model, Request(prompts, kwargs, size, samples=samples))

    def decode_response(self, prompt: Tensor, response: Tensor) -> str:
        """A response as text, without special tokens."""
        return self._batches.layout.decode(self.tokenizer, prompt, response)

    def _generate(self, model: nn.Module, request: Request) -> RolloutOutput:
        output = self._rollouts(self.accelerator.unwrap_model(model), request)
        if not request.reference:
            self._memory.keep(request.repeated(), output)
        return output

    def _known(
        self, queries: Any, responses: Any, rollout: RolloutOutput | None
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Log-probs and values of the responses that are known from where they were generated."""
        if rollout is not None:
            policy, temperature = self._memory.policy, self.config.temperature
            return told_by(rollout, responses, policy, temperature)
        return self._memory.find(queries, responses)
