"""Working memory, kept for the next call on CPUs, where new memory costs as much as the work in
it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from .dispatch import device_kind

KEPT_BYTES = 96 << 20  # the most that is kept
_ALIGNED = 64  # elements: rows of a workspace begin at a multiple of it
_idle: list[Tensor] = []
_FRESH_BYTES = 8 << 20  # larger blocks may be new memory from the system each time
_REMEMBERED_BYTES = 512 << 20  # the most that results are remembered of
_ALIGNED_BYTES = 64
_UNSHARED = 2  # references to remembered memory where no tensor has it
_results: dict[int, bytearray] = {}  # by the bytes of the result
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_borrowing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def _find_glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


_glibc = _find_glibc()


@functools.cache
def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next tensor.

    Its malloc takes blocks above a limit from the system, page by page, and gives them back when
    they are freed. The limit, 128 KiB at first, becomes the size of the largest such block that was
    freed, up to 32 MiB: one block of nearly that size, of which no page is touched, raises it.
    """
    torch.empty(31 << 20, dtype=torch.uint8)


@functools.cache
def keep_all_freed_memory() -> None:
    """Has glibc keep freed memory for good, as torch keeps that of a GPU: for training, where each
    step takes the same memory again, and new pages may cost a fifth of it. :func:`clear` gives it
    back.

    Settings of malloc in the environment are left as they are.
    """
    settings = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if _glibc is None or any(name in os.environ for name in settings):
        keep_freed_memory()
        return
    _glibc.mallopt(_TRIM_THRESHOLD, -1)  # never
    _glibc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # the largest that it takes


def borrow(like: Tensor, nbytes: int) -> Tensor:
    """Memory of at least ``nbytes``, of any content, uint8, on the device of ``like``."""
    if device_kind(like) == "cpu":
        keep_freed_memory()
        large = [i for i, memory in enumerate(_idle) if memory.numel() >= nbytes]
        if large:
            return _idle.pop(large[-1])
        _idle.clear()  # a larger one takes their place
    with _borrowing():
        return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def give_back(memory: Tensor) -> None:
    """Returns borrowed memory, which must not be read any more."""
    if device_kind(memory) == "cpu" and sum(map(len, _idle)) + len(memory) <= KEPT_BYTES:
        _idle.append(memory)


def clear() -> None:
    """Frees kept memory, and gives what was freed back to the system."""
    _idle.clear()
    _results.clear()
    if _glibc is not None:
        _glibc.malloc_trim(0)


@contextlib.contextmanager
def torchs_own(
    borrowing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[None]:
    """Context in which all memory comes from torch's allocator, where a profiler of memory sees it:
    results are not in remembered memory, and what is kept now is left alone.

    Args:
        borrowing: makes a context in which new workspaces are allocated.
    """
    global _REMEMBERED_BYTES, _borrowing
    before = _REMEMBERED_BYTES, _borrowing, _idle[:]
    _REMEMBERED_BYTES, _borrowing = 0, borrowing
    _idle.clear()
    try:
        yield
    finally:
        _REMEMBERED_BYTES, _borrowing, _idle[:] = before


def result_like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of any content for a result with the shape of x.

    On a CPU the last large result of each size is remembered. Once nobody else holds it, its memory
    serves the next: else a gradient of a vocabulary's size would be new memory in each step.
    """
    nbytes = x.numel() * dtype.itemsize
    if x.device.type != "cpu" or not _FRESH_BYTES <= nbytes <= _REMEMBERED_BYTES:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    memory = _results.pop(nbytes, None)
    # Each tensor over it has a reference, and its own storage, to which autograd adds in place.
    if memory is None or sys.getrefcount(memory) > _UNSHARED:
        memory = bytearray(nbytes + _ALIGNED_BYTES)
    _results[nbytes] = memory  # the newest last
    while sum(_results) > _REMEMBERED_BYTES:
        del _results[next(iter(_results))]
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _ALIGNED_BYTES
    flat = torch.frombuffer(memory, dtype=dtype, count=x.numel(), offset=start)
    return flat.resize_(x.shape)  # a view would keep flat, and so a second reference to the storage


_pinned: weakref.WeakSet[Workspace] = weakref.WeakSet()
_pinning = threading.Lock()


class Workspace:
    """Memory for one chunk of logits at a time, on the device of ``like``."""

    def __init__(self, like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.columns, self.dtype = columns, dtype
        # What is needed counts, whatever memory is idle.
        self.nbytes = rows * self._stride(columns) * dtype.itemsize
        self._memory: Tensor | None = borrow(like, self.nbytes)

    @staticmethod
    def _stride(columns: int) -> int:
        return -(-columns // _ALIGNED) * _ALIGNED

    def chunk(self, rows: int, columns: int | None = None) -> Tensor:
        """Memory [rows, columns] whose rows all begin at a 16-byte boundary, also where V is
        odd."""
        assert self._memory is not None
        stride = self._stride(self.columns)
        flat = self._memory[: rows * stride * self.dtype.itemsize].view(self.dtype)
        return flat.view(rows, stride)[:, : self.columns if columns is None else columns]

    def pieces(self, rows: int, columns: list[slice]) -> list[Tensor]:
        """Memory [rows, C] for each range of columns, each a piece of its own without gaps."""
        assert self._memory is not None
        flat = self._memory[: rows * self.columns * self.dtype.itemsize].view(self.dtype)
        return [flat[rows * c.start : rows * c.stop].view(rows, -1) for c in columns]

    def pin(self, budget: int) -> bool:
        """Whether a graph may keep the workspace until backward: where no other has one, or all
        that live graphs have is within a budget of bytes. It is pinned then, until it is released
        or its graph is gone."""
        with _pinning:
            others = sum(x.nbytes for x in _pinned)
            may = not others or others + self.nbytes <= budget
            if may:
                _pinned.add(self)
            return may

    def release(self) -> None:
        """Returns the memory; chunks must not be read any more."""
        with _pinning:
            _pinned.discard(self)
        memory, self._memory = self._memory, None
        if memory is not None:
            give_back(memory)
