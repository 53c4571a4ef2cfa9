"""How a trainer generates: through the engine where that can, through ``model.generate`` else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fastrl.config import PPOConfig
from fastrl.rollout import (
    GenerateEngine,
    RolloutEngine,
    RolloutOutput,
    choose_engine,
    sampling_params,
)

Autocast = Callable[[], AbstractContextManager]


class Request(NamedTuple):
    """Responses to some prompts."""

    prompts: Sequence[Tensor]
    generation_kwargs: dict[str, Any]  # of ``model.generate``
    batch_size: int  # prompts per call of that
    limits: Sequence[int] | None = None  # max_new_tokens of each; the same within a batch
    reference: bool = False  # the model stands for the reference policy
    samples: int = 1  # responses to each prompt, one after the other

    def repeated(self) -> list[Tensor]:
        """The prompt of each response."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


class GenerateRollouts:
    """``model.generate``, a batch of prompts at a time, with any of its keywords."""

    def __init__(self, tokenizer: Any, autocast: Autocast):
        self.tokenizer, self.autocast = tokenizer, autocast

    def before_update(self) -> None:
        """Nothing is held that an update could use."""

    def __call__(self, model: Any, request: Request) -> RolloutOutput:
        prompts, kwargs, size, limits = request.repeated(), *request[1:4]
        engine = GenerateEngine(model, self.tokenizer, size, self.autocast)
        if limits is None:
            return engine.generate_with(prompts, kwargs)
        whole = RolloutOutput(sequences=[], finish_reasons=[])
        for start in range(0, len(prompts), size):
            limited = {**kwargs, "max_new_tokens": limits[start]}
            part = engine.generate_with(prompts[start : start + size], limited)
            whole.sequences += part.sequences
            whole.finish_reasons += part.finish_reasons
        return whole


class EngineRollouts(GenerateRollouts):
    """The engine, which also says how likely each token was; what it cannot honour goes to
    ``model.generate``, with a warning that names the argument.

    Args:
        slots, kv_cache_bytes: of the engine.
        sleep: free its memory before updates.
    """

    def __init__(
        self,
        tokenizer: Any,
        autocast: Autocast,
        slots: int,
        kv_cache_bytes: int | None = None,
        sleep: bool = False,
    ):
        super().__init__(tokenizer, autocast)
        self.slots, self.kv_cache_bytes, self.sleep = slots, kv_cache_bytes, sleep
        self._engines: dict[tuple[int, bool], RolloutEngine | GenerateEngine] = {}
        self._warned: set[str] = set()

    def __call__(self, model: Any, request: Request) -> RolloutOutput:
        engine = self._engine(model, request.reference)
        if not isinstance(engine, RolloutEngine):
            return super().__call__(model, request)
        params = sampling_params(request.generation_kwargs, model)
        if isinstance(params, str):
            self._warn(params)
            return super().__call__(model, request)
        if request.limits is not None:
            params = replace(params, max_new_tokens=list(request.limits))
        # A prompt's samples share its prefill.
        params = replace(params, n=request.samples)
        return engine.generate(request.prompts, params)

    def _engine(self, model: Any, reference: bool) -> RolloutEngine | GenerateEngine:
        # A PEFT model is the policy or, with its adapter off, the reference.
        key = (id(model), reference)
        if key not in self._engines:
            self._engines[key] = choose_engine(
                model,
                self.tokenizer,
                autocast=self.autocast,
                max_slots=self.slots,
                kv_cache_bytes=self.kv_cache_bytes,
            )
        return self._engines[key]

    def before_update(self) -> None:
        if self.sleep:
            for engine in self._engines.values():
                engine.sleep()

    def _warn(self, argument: str) -> None:
        if argument not in self._warned:
            self._warned.add(argument)
            warnings.warn(
                f"the rollout engine does not know the argument {argument} of generate: rollouts "
                "go through model.generate, which is slower",
                stacklevel=5,
            )


def make_rollouts(config: PPOConfig, tokenizer: Any, autocast: Autocast) -> GenerateRollouts:
    """By ``PPOConfig.rollout_backend``."""
    if config.rollout_backend == "generate":
        return GenerateRollouts(tokenizer, autocast)
    budget = config.rollout_kv_cache_gib
    return EngineRollouts(
        tokenizer,
        autocast,
        config.rollout_slots,
        None if budget is None else int(budget * 2**30),
        config.rollout_sleep,
    )
