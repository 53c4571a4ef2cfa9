"""Responses of the policy to a trainer's prompts: by the rollout engine or ``model.generate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from fastrl.models.sharding import whole_weights, wrapped_by_fsdp
from fastrl.rollout import RolloutOutput
from fastrl.rollout.backends import GenerateBackend, Request, make_backend

_GENERATE = GenerationMixin.generate


class PolicySampler:
    """Samples responses of a policy that is being trained.

    Where ``model.generate`` is not transformers' own, that is called, for all prompts at once.

    Args:
        args: an :class:`fastrl.trl.online_config.OnlineConfig`.
        ends: ids of the tokens that end a response.
        autocast: makes the context in which the model runs.
        process: the number of this process.
    """

    def __init__(
        self,
        args: Any,
        tokenizer: Any,
        ends: Sequence[int],
        autocast: Callable[[], AbstractContextManager],
        process: int,
    ):
        self.tokenizer = tokenizer
        self.arguments = {**args.generation_arguments, "pad_token_id": tokenizer.pad_token_id}
        self.arguments.setdefault("eos_token_id", list(ends))
        self._backend = make_backend(args, tokenizer, autocast, process)
        self._plain = GenerateBackend(tokenizer, autocast, process)

    def __call__(
        self,
        wrapped: Any,
        model: Any,
        prompts: Sequence[Tensor],
        group: int,
        first: int,
        seed: int | None = None,
    ) -> RolloutOutput:
        """A response to each prompt; those of a group share a prefill.

        Args:
            wrapped: the model as accelerate has prepared it.
            group: how many prompts in a row may be the same.
            first: the number of the first prompt, in the batch of all processes.
            seed: of the draws; None: from torch's own generator.
        """
        size = samples_per_prompt(prompts, group)
        request = Request(
            prompts[::size],
            [(first + i) // size for i in range(0, len(prompts), size)],
            self.arguments,
            len(prompts),
            samples=size,
            seed=seed,
        )
        return self._run(wrapped, model, request)

    def further(
        self,
        wrapped: Any,
        model: Any,
        prompts: Sequence[Tensor],
        numbers: Sequence[int],
        limits: Sequence[int],
        seed: int,
    ) -> RolloutOutput:
        """What responses go on with, each behind a prompt of its own.

        Args:
            numbers: of the responses, in the batch of all processes.
            limits: most tokens of each.
            seed: of the draws; another one than of earlier turns, so that no draw comes twice.
        """
        most = self.arguments.get("max_new_tokens")
        limits = [limit if most is None else min(limit, most) for limit in limits]
        request = Request(prompts, numbers, self.arguments, len(prompts), limits, seed=seed)
        return self._run(wrapped, model, request)

    def _run(self, wrapped: Any, model: Any, request: Request) -> RolloutOutput:
        with whole_weights(wrapped):
            backend = self._plain if _own_generate(model) else self._backend
            return backend(model, request)

    def before_update(self) -> None:
        self._backend.before_update()

    def state(self) -> dict[str, Any]:
        """What the bits of later responses depend on besides the weights."""
        return {"rooms": self._backend.rooms()}

    def resume(self, state: Mapping[str, Any]) -> None:
        self._backend.reserve(state["rooms"])


def samples_per_prompt(prompts: Sequence[Tensor], group: int) -> int:
    """``group`` where that many prompts in a row are always the same, so that their responses can
    share a prefill; else 1."""
    same = len(prompts) % group == 0 and all(
        torch.equal(prompts[i], prompts[i - i % group]) for i in range(len(prompts))
    )
    return group if same else 1


def _own_generate(model: Any) -> bool:
    """Whether a model's ``generate`` was replaced, on it or on its class."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for owner in (model, inner):
        found = vars(owner).get("generate")
        if found is not None and not wrapped_by_fsdp(found):
            return True
    return getattr(type(inner), "generate", None) is not _GENERATE
