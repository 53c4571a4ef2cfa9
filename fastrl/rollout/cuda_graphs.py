"""Runners of decode steps: they call a step, or capture it in CUDA graphs and replay them."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastrl.models.adapters import acting_adapters
from fastrl.rollout.decode_step import DecodeStep, LogitsProcessors


class StepRunner:
    """Runs the decode steps of calls of ``generate``: it calls each step as it is.

    Attributes:
        stats: statistics of the call in progress.
    """

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}

    def begin(self, step: DecodeStep) -> None:
        """Begins a call of ``generate`` with this step."""

    def run(self, step: DecodeStep, bucket: int, span: int, steps: int) -> None:
        """Runs ``steps`` decode steps on the first ``bucket`` slots, of up to ``span`` tokens."""
        for _ in range(steps):
            step(bucket, span)

    def free(self) -> None:
        """Frees the captured graphs; here, where none is captured, it does nothing."""

    def another(self) -> StepRunner:
        """A new runner of the same kind, for another KV cache."""
        return StepRunner()


KINDS = 8  # kinds of calls whose graphs are kept


class GraphRunner(StepRunner):
    """Captures the step once per bucket, a number of slots, as it is first run, in one memory pool,
    and replays the graphs. The runner's device must be torch's current one.

    A graph contains addresses and numbers: calls with other logits processors are of another kind,
    and have other graphs. The graphs of the last :data:`KINDS` kinds are kept. All are captured
    anew after a parameter or the KV cache has moved, or other adapters act.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        # One stream for all captures: libraries keep a workspace for each stream.
        self.stream = stream or torch.cuda.Stream(device)
        self.free()

    def another(self) -> GraphRunner:
        return GraphRunner(self.device, self.stream)

    def free(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.failed = False  # after a failure no capture is tried until the next free()
        self.stats: dict[str, float] = {}
        self._graphs: dict[int, Any] = {}  # the present kind's graphs, by bucket
        # Graphs by kind, the latest last, with the logits processors whose memory they contain.
        self._kinds: dict[tuple, tuple[dict[int, Any], LogitsProcessors]] = {}
        self._memory: tuple = ()

    def begin(self, step: DecodeStep) -> None:
        self.stats = {"captures": 0.0, "replays": 0.0, "capture_seconds": 0.0}
        memory, kind = _memory(step), _kind(step)
        if memory != self._memory:
            self._kinds.clear()
            # torch refuses a pool whose graphs are gone as long as one of its tensors exists.
            self.pool = torch.cuda.graph_pool_handle()
            self._memory = memory
        self._graphs, _ = self._kinds.pop(kind, ({}, None))
        self._kinds[kind] = self._graphs, step.processors
        if len(self._kinds) > KINDS:
            del self._kinds[next(iter(self._kinds))]

    def run(self, step: DecodeStep, bucket: int, span: int, steps: int) -> None:
        if bucket not in self._graphs and not self.failed:
            try:
                self._graphs[bucket] = self._capture(step, bucket)
            except RuntimeError as error:
                self.failed = True
                warnings.warn(
                    f"the decode step cannot be captured ({error}): it runs kernel by kernel, "
                    "which is slower; set cuda_graphs=False to avoid the attempt",
                    stacklevel=3,
                )
        if self.failed:
            super().run(step, bucket, span, steps)
            return
        for _ in range(steps):
            self._graphs[bucket].replay()
        self.stats["replays"] += steps

    def _capture(self, step: DecodeStep, bucket: int) -> Any:
        begin = time.perf_counter()
        # Kernels read live tokens only, so that one graph with the largest span serves all lengths.
        span = step.kv_cache.length
        graph = torch.cuda.CUDAGraph()
        with _unchanged(step.slots.tensors()), self._ended_after_an_error(graph):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                step(bucket, span)  # warms up: compiles kernels, allocates workspaces
            torch.cuda.current_stream().wait_stream(self.stream)
            # The outer context leaves the stream even if ending a broken capture fails.
            with (
                torch.cuda.stream(self.stream),
                # Other threads, such as those that load data, must not break this thread's capture.
                torch.cuda.graph(
                    graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
                ),
            ):
                step(bucket, span)
        torch.cuda.synchronize()
        self.stats["captures"] += 1
        self.stats["capture_seconds"] += time.perf_counter() - begin
        return graph

    @contextlib.contextmanager
    def _ended_after_an_error(self, graph: Any) -> Iterator[None]:
        """Context that ends a capture for torch's allocator where an error breaks it off.

        torch itself does not end it: its allocator would go on as in a capture, free no memory when
        there is too little, and fail at ``empty_cache``.
        """
        try:
            yield
        except BaseException:
            _broken_off.append(graph)
            with contextlib.suppress(RuntimeError):  # the capture has not begun, or has ended
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, self.pool)  # type: ignore[attr-defined]
                torch._C._cuda_releasePool(device, self.pool)  # type: ignore[attr-defined]
            self.pool = torch.cuda.graph_pool_handle()
            raise


# Graphs of broken captures stay: torch's allocator of pinned memory goes on asking them.
_broken_off: list[Any] = []


def _memory(step: DecodeStep) -> tuple:
    """The addresses that all captured steps contain, and which adapters act in them."""
    model = step.model_runner.model
    weights = hash(tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers())))
    tensors = [*step.slots.state, *step.kv_cache.keys, *step.kv_cache.values]
    tensors += step.model_runner.copies()
    return weights, tuple(x.data_ptr() for x in tensors), acting_adapters(model)


def _kind(step: DecodeStep) -> tuple:
    """The numbers and addresses that the captured steps of one kind of calls contain."""
    processors = step.processors
    tensors = [*step.slots.tensors(), *(x for x in processors if isinstance(x, Tensor))]
    return processors.numbers(), tuple(x.data_ptr() for x in tensors)


@contextlib.contextmanager
def _unchanged(tensors: list[Tensor]) -> Iterator[None]:
    """Context that restores tensors at its end, after an error too."""
    before = [x.clone() for x in tensors]
    try:
        yield
    finally:
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)
