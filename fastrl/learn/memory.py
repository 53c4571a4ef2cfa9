"""Passes over samples in parts that fit into memory, and activations that are not kept in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch.nn import ModuleList

from fastrl.data.token_batch import TokenBatch
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.models.activation_offloading import activation_offloading


class MicroBatches:
    """Runs passes over samples; where memory runs out, again with half as many samples at a time.

    The smaller size stays, so that memory runs out once, not at every step; a warning says so.
    With several processes nothing is run again: the others would wait for this one.

    Args:
        what: the pass, for messages, such as "the update".
        remedy: what to set so that memory does not run out, for messages.

    Attributes:
        size: samples at a time, at most; None: as many as are asked for.
    """

    def __init__(self, what: str, remedy: str):
        self.what, self.remedy = what, remedy
        self.size: int | None = None

    def __call__(self, samples: int, undo: Callable[[], None] = lambda: None) -> Iterator[_Attempt]:
        """Yields a context of each attempt, which gives the number of samples to run at a time;
        another attempt follows where memory has run out.

        Args:
            samples: the most samples to run at a time.
            undo: called after an attempt that failed.

        Raises:
            torch.OutOfMemoryError: a single sample does not fit.
        """
        halved = False
        while True:
            attempt = _Attempt(self, min(samples, self.size or samples))
            yield attempt
            if not attempt.failed:
                break
            self.size, halved = -(-attempt.size // 2), True
            undo()
            clear_device_cache(garbage_collection=True)
        if halved:
            warnings.warn(
                f"out of memory in {self.what}: it goes on with {self.size} sample(s) at a time, "
                f"to the same result but for rounding. To avoid that, {self.remedy}",
                stacklevel=5,
            )


class _Attempt:
    """Context that ends without an error where memory has run out and fewer samples may fit; behind
    it the error is gone, and with it the frames that hold tensors."""

    def __init__(self, owner: MicroBatches, size: int):
        self.owner, self.size, self.failed = owner, size, False

    def __enter__(self) -> int:
        return self.size

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> bool:
        if not isinstance(error, RuntimeError) or not _is_out_of_memory(error) or _has_peers():
            return False
        if self.size == 1:
            raise torch.OutOfMemoryError(
                f"out of memory in {self.owner.what}, with one sample at a time: "
                f"{self.owner.remedy}, shorten prompts or responses, or take a smaller model"
            ) from error
        self.failed = True
        return True


class Activations:
    """How a backward pass gets at the activations of the forward.

    Args:
        recomputed: they are computed again, layer by layer.
        offloaded: they wait in host memory.
        spread: weights are spread over processes, by FSDP2.
    """

    def __init__(self, recomputed: bool, offloaded: bool, device: torch.device, spread: bool):
        self.recomputed = recomputed
        self.offloading = activation_offloading(offloaded, device, spread)

    def __call__(self, models: Sequence[Any]) -> ExitStack:
        """Context of the passes of some policies and critics."""
        saved = ExitStack()
        if self.recomputed:
            for model in models:
                saved.enter_context(checkpointed(all_layers(model.pretrained_model)))
        # One context for all models: of nested ones the innermost alone would see what is saved.
        saved.enter_context(self.offloading(models[0] if len(models) == 1 else ModuleList(models)))
        return saved


@dataclass
class PositionCount:
    """Positions that forwards ran, and the tokens of the samples that they were for."""

    positions: int = 0
    tokens: int = 0

    def add(self, batch: TokenBatch) -> None:
        """Counts a forward over a batch."""
        self.positions += batch.padding.tokens(batch, range(len(batch)))
        self.tokens += sum(batch.prompt_lengths) + sum(batch.response_lengths)

    def taken(self) -> PositionCount:
        """What was counted since this was called last."""
        counts = PositionCount(self.positions, self.tokens)
        self.positions = self.tokens = 0
        return counts


def _is_out_of_memory(error: RuntimeError) -> bool:
    # accelerate's function fails at errors whose arguments are no text
    is_known = should_reduce_batch_size(RuntimeError(str(error)))
    return is_known or isinstance(error, torch.OutOfMemoryError)


def _has_peers() -> bool:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1
