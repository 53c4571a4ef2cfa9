"""How decode steps are run: called one by one, or captured in CUDA graphs and replayed."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.rollout.decode_step import DecodeStep


class EagerRunner:
    """Calls the step."""

    def __init__(self, step: DecodeStep):
        self.step = step
        self.stats: dict[str, float] = {}

    def run(self, bucket: int, span: int, steps: int) -> None:
        for _ in range(steps):
            self.step(bucket, span)


class GraphRunner(EagerRunner):
    """Captures the step once per bucket, lazily, in one memory pool, and replays it.

    A graph holds addresses and numbers: it is captured anew where a parameter has moved or a number
    of the rules is another.
    """

    def __init__(self, step: DecodeStep, graphs: Graphs):
        super().__init__(step)
        self.graphs, self.key = graphs, graphs.key(step)
        self.stats = {"captures": 0.0, "replays": 0.0, "capture_seconds": 0.0}

    def run(self, bucket: int, span: int, steps: int) -> None:
        # Live tokens alone are read whatever the span, so that one graph serves all lengths.
        graph = None if self.graphs.failed else self._graph(bucket)
        if graph is None:
            super().run(bucket, span, steps)
            return
        for _ in range(steps):
            graph.replay()
        self.stats["replays"] += steps

    def _graph(self, bucket: int) -> Any:
        try:
            return self.graphs.get((self.key, bucket), lambda: self._capture(bucket))
        except RuntimeError as error:
            self.graphs.failed = True
            warnings.warn(
                f"the decode step cannot be captured ({error}): it runs kernel by kernel, which is "
                "slower; cuda_graphs=False says so beforehand",
                stacklevel=6,
            )
            return None

    def _capture(self, bucket: int) -> Any:
        begin = time.perf_counter()
        length = self.step.arena.length
        graph = torch.cuda.CUDAGraph()
        with _unmoved(self.step.slots.tensors()):
            stream = self.graphs.stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(bucket, length)  # compiles kernels, makes libraries' workspaces
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self.graphs.pool, stream=stream):
                self.step(bucket, length)
        torch.cuda.synchronize()
        self.stats["captures"] += 1
        self.stats["capture_seconds"] += time.perf_counter() - begin
        return graph


class Graphs:
    """Captured steps by their key, and the memory pool that they share."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # one for all: libraries keep a workspace for each
        self.failed = False  # once is enough: another try would fail alike
        self._captured: dict[tuple, Any] = {}
        self._key: tuple = ()

    @staticmethod
    def key(step: DecodeStep) -> tuple:
        """Every number and every address that a captured step holds."""
        rules = step.rules
        tensors = [*step.slots.tensors(), *step.arena.keys, *step.arena.values]
        tensors += [x for x in rules if isinstance(x, Tensor)]
        return (rules.numbers(), addresses(step.policy.model), tuple(x.data_ptr() for x in tensors))

    def get(self, key: tuple, capture: Any) -> Any:
        if key[0] != self._key:  # of other weights or rules: never to be replayed again
            self._captured.clear()
            self._key = key[0]
        if key not in self._captured:
            self._captured[key] = capture()
        return self._captured[key]


@contextlib.contextmanager
def _unmoved(tensors: list[Tensor]) -> Iterator[None]:
    """What is written to them while open is undone, after an error too."""
    before = [x.clone() for x in tensors]
    try:
        yield
    finally:
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)


def addresses(model: nn.Module) -> int:
    """A hash of where parameters and buffers lie."""
    return hash(tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers())))
