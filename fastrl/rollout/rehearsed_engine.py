"""The rollout engine in a plan of memory: rehearses a call's KV cache, prefill and decode step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl.rollout.bandwidth import copied_bytes
from fastrl.rollout.decode_step import DecodeStep
from fastrl.rollout.engine import RolloutEngine, _samples
from fastrl.rollout.sampling_params import RolloutRequest, SamplingParams, end_tokens
from fastrl.rollout.scheduler import Scheduler
from fastrl.samples import Samples
from fastrl.timing import start_clock
from fastrl_kernels.dispatch import device_kind


class RehearsedEngine(RolloutEngine):
    """An engine on tensors without memory, which cannot be compared with plain forwards."""

    has_copied = False
    keeps: Callable[[list[Any], list[Any]], None] | None = None  # gets memory() after a call

    def _check(self) -> None: ...

    def rehearse(self, prompts: Sequence[Tensor], params: SamplingParams) -> None:
        """Makes the tensors that ``generate(prompts, params)`` would make: fills the slots, and
        runs one decode step at the full length of the longest sample."""
        request = RolloutRequest.of(prompts, params, None, self.model, self.tokenizer)
        samples = _samples(request, params.n, 0)
        kv_cache, slots = self._make_room(request, len(samples))
        scheduler = Scheduler(samples, kv_cache.slots)
        clock = start_clock(self.model_runner.device)
        with self.model_runner.opened():
            ends = end_tokens(self.model, self.tokenizer, params.eos_token_ids)
            processors = self._begin_call(params, ends, slots)
            step = DecodeStep(self.model_runner, kv_cache, slots, processors)
            with clock("prefill"):
                self._admit(request, step, scheduler)
            whole = max(len(p) + n for p, n in zip(request.prompts, request.limits, strict=True))
            with clock("decode"):
                step(scheduler.bucket, min(whole, kv_cache.length))
            if not self.has_copied:  # the bandwidth for the statistics is measured once, by a copy
                self.has_copied = True
                with clock("decode"):
                    numbers = copied_bytes(device_kind(kv_cache.keys[0])) // 4
                    torch.ones_like(torch.ones(numbers))
        if self.keeps is not None:
            self.keeps(*self.memory())

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | None = None,
        sample_ids: Sequence[int] | None = None,
    ) -> Samples:
        """Rehearses a call with token ids; returns responses of ``params.longest`` equal tokens."""
        assert params is not None
        self.rehearse(prompts, params)
        count = params.n * len(prompts)
        return Samples([torch.full((params.longest,), 2)] * count, ["length"] * count)

    def memory(self) -> tuple[list[Any], list[Any]]:
        """The tensors that stay between two calls: keys and values, and copies of weights."""
        stored = [] if self._kv_cache is None else self._kv_cache.tensors()
        return stored, self.model_runner.stored()
