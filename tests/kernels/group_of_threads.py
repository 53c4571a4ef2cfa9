"""A process group whose processes are threads of this one, for ops that talk to others: as quick as
a call, and with the kernels' interpreter. ``tests/processes`` has real ones."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from tests.patience import PATIENCE

Result = TypeVar("Result")


class GroupOfThreads:
    """Stands for ``torch.distributed``. One thread runs at a time, and the next one takes over
    where it has to wait for what others send: what is patched and global, such as the
    interpreter's ``triton.language``, is its own while it runs.

    ``sent`` has the bytes that each process has sent, by collective.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.group = SimpleNamespace(WORLD=self)
        self.sent: list[tuple[str, int]] = []
        self._here = threading.local()
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._slots: list[Any] = [None] * size

    def run(self, function: Callable[[int], Result]) -> list[Result]:
        """What the function of a rank gives on each; the first error of a thread is raised."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._here.rank = rank
            # Backward passes of a GPU's tensors run in a thread of the device, which has no rank.
            torch.autograd.set_multithreading_enabled(False)
            # inf - inf is silent on a GPU; the interpreter's numpy would warn, in each thread.
            with self._turn, numpy.errstate(all="ignore"):
                try:
                    results[rank] = function(rank)
                except BaseException as error:
                    errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (said or errors)[0]
        return results

    def _exchanged(self, x: Tensor, name: str) -> list[Tensor]:
        rank = self._here.rank
        if rank == 0:
            self.sent.append((name, x.nbytes))
        self._slots[rank] = x.detach().clone()
        self._wait()
        found = list(self._slots)
        self._wait()
        assert all(y.shape == x.shape and y.dtype == x.dtype for y in found), "sizes differ"
        return found

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    # As torch.distributed has them.
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def get_rank(self, group: Any = None) -> int:
        return self._here.rank

    def get_world_size(self, group: Any = None) -> int:
        return self.size

    def get_backend_config(self, group: Any = None) -> str:
        return "cpu:threads,cuda:threads"

    def all_gather(self, out: list[Tensor], x: Tensor, group: Any = None) -> None:
        assert x.is_contiguous()
        for to, each in zip(out, self._exchanged(x, "all_gather"), strict=True):
            to.copy_(each)

    def all_reduce(self, x: Tensor, group: Any = None) -> None:
        assert x.is_contiguous()
        x.copy_(torch.stack(self._exchanged(x, "all_reduce")).sum(0))
