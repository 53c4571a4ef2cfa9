"""Runners of decode steps: call after call, or captured in CUDA graphs and replayed."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastrl.rollout.decode_step import DecodeStep


class StepRunner(Protocol):
    """Runs decode steps, for call after call of ``generate``."""

    stats: dict[str, float]  # of the call in progress

    def begin(self, step: DecodeStep) -> None:
        """Begins a call, whose step this is."""
        ...

    def run(self, step: DecodeStep, bucket: int, span: int, steps: int) -> None:
        """Runs the step so many times on the first ``bucket`` slots."""
        ...

    def free(self) -> None:
        """Gives memory back."""
        ...


class EagerRunner:
    """Calls the step."""

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}

    def begin(self, step: DecodeStep) -> None:
        pass

    def run(self, step: DecodeStep, bucket: int, span: int, steps: int) -> None:
        for _ in range(steps):
            step(bucket, span)

    def free(self) -> None:
        pass


class GraphRunner:
    """Captures the step once per bucket, lazily, in one memory pool, and replays it.

    A graph holds addresses and numbers: it is captured anew where a parameter has moved or a number
    of the logits processors is another.
    """

    def __init__(self) -> None:
        self.free()

    def free(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # one for all: libraries keep a workspace for each
        self.failed = False  # once is enough: another try would fail alike
        self.stats: dict[str, float] = {}
        self._graphs: dict[int, Any] = {}  # by bucket
        self._key: tuple = ()

    def begin(self, step: DecodeStep) -> None:
        self.stats = {"captures": 0.0, "replays": 0.0, "capture_seconds": 0.0}
        key = _baked_in(step)
        if key != self._key:  # of other weights or processors: never to be replayed again
            self._graphs.clear()
            self._key = key

    def run(self, step: DecodeStep, bucket: int, span: int, steps: int) -> None:
        if bucket not in self._graphs and not self.failed:
            try:
                self._graphs[bucket] = self._capture(step, bucket)
            except RuntimeError as error:
                self.failed = True
                warnings.warn(
                    f"the decode step cannot be captured ({error}): it runs kernel by kernel, "
                    "which is slower; cuda_graphs=False says so beforehand",
                    stacklevel=3,
                )
        if self.failed:
            EagerRunner().run(step, bucket, span, steps)
            return
        for _ in range(steps):
            self._graphs[bucket].replay()
        self.stats["replays"] += steps

    def _capture(self, step: DecodeStep, bucket: int) -> Any:
        begin = time.perf_counter()
        # Live tokens alone are read whatever the span, so that one graph serves all lengths.
        span = step.kv_cache.length
        graph = torch.cuda.CUDAGraph()
        with _unchanged(step.slots.tensors()):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                step(bucket, span)  # compiles kernels, makes libraries' workspaces
            torch.cuda.current_stream().wait_stream(self.stream)
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                step(bucket, span)
        torch.cuda.synchronize()
        self.stats["captures"] += 1
        self.stats["capture_seconds"] += time.perf_counter() - begin
        return graph


def _baked_in(step: DecodeStep) -> tuple:
    """Every number and every address that a captured step holds."""
    processors = step.processors
    tensors = [*step.slots.tensors(), *step.kv_cache.keys, *step.kv_cache.values]
    tensors += [x for x in processors if isinstance(x, Tensor)]
    where = _addresses(step.model_runner.model)
    return processors.numbers(), where, tuple(x.data_ptr() for x in tensors)


@contextlib.contextmanager
def _unchanged(tensors: list[Tensor]) -> Iterator[None]:
    """Context that undoes what is written to tensors in it, after an error too."""
    before = [x.clone() for x in tensors]
    try:
        yield
    finally:
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)


def _addresses(model: nn.Module) -> int:
    """A hash of where parameters and buffers lie."""
    return hash(tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers())))
