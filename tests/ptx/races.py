"""Who touched each byte of a memory last, and whether that is in an order.

Within a program, accesses of one warp are in the program's order, those of two warps where a
barrier lies between them. Accesses of two programs are in an order where the first program has
released what it wrote, by an atomic operation after it, and the second has acquired it by one on
the same address.
"""

from __future__ import annotations

import mmap
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.faults import Race
from tests.ptx.formats import Array

# An access is one number: the program, its barriers so far, and the warp.
_WARP_BITS, _EPOCH_BITS = 8, 24
_WARP, _EPOCH = (1 << _WARP_BITS) - 1, (1 << _EPOCH_BITS) - 1
_PROGRAM_AT = _WARP_BITS + _EPOCH_BITS
_SEVERAL_WARPS = _WARP
_SEVERAL_PROGRAMS = (1 << 30) - 1
_NOBODY = 0


def accesses(program: Array, epoch: Array, warp: Array) -> Array:
    return (program.astype(np.int64) + 1 << _PROGRAM_AT) | (epoch << _WARP_BITS) | warp


class _Access(NamedTuple):
    program: int
    epoch: int
    warp: int

    @classmethod
    def of(cls, code: int) -> _Access:
        return cls(code >> _PROGRAM_AT, code >> _WARP_BITS & _EPOCH, code & _WARP)

    def precedes(self, other: _Access) -> bool:
        """Within one program."""
        return self.epoch < other.epoch or (self.epoch == other.epoch and self.warp == other.warp)


class Order:
    """What programs of a launch have released and acquired."""

    def __init__(self) -> None:
        self._released: dict[int, list[_Access]] = defaultdict(list)  # by address
        # By who acquired: as what, and how much of an address's list.
        self._acquired: dict[int, list[tuple[_Access, int, int]]] = defaultdict(list)

    def atomic(self, code: int, address: int, *, acquires: bool, releases: bool) -> None:
        access = _Access.of(code)
        if acquires:
            seen = len(self._released[address])
            self._acquired[access.program].append((access, address, seen))
        if releases:
            self._released[address].append(access)

    def holds(self, first: int, second: int) -> bool:
        """Whether an access comes before one of another program."""
        early, late = _Access.of(first), _Access.of(second)
        return any(
            acquired.precedes(late)
            and any(
                release.program == early.program and early.precedes(release)
                for release in self._released[address][:seen]
            )
            for acquired, address, seen in self._acquired[late.program]
        )


def _zeros(size: int, dtype: Any) -> Array:
    """Memory that is taken when it is touched: tensors may be larger than what there is."""
    count = max(size, 1) * np.dtype(dtype).itemsize
    if sys.platform != "linux":
        return np.zeros(max(size, 1), dtype)
    no_reserve = 0x4000  # mmap has a name for it from Python 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, count, flags), dtype)


def same_bytes(shared: Array, at: Array, by: Array, written: Array, left: Array) -> None:
    """Checks accesses that share places ``at`` with others: what each warp has written is what is
    left. Of lanes of one warp the last one's number counts: on a GPU too one of them wins, the same
    one in each warp. Their numbers may differ in the last bit, where a sum of products over lanes
    rounds one of the two.

    Raises:
        Race: it is not.
    """
    if not (shared & (written != left)).any():
        return
    lanes = np.flatnonzero(shared)
    last = {(int(at[i]), int(by[i])): i for i in lanes}  # the first ones are replaced
    chosen = np.fromiter(last.values(), np.int64)
    if (written[chosen] != left[chosen]).any():
        raise Race("race: two warps write different numbers to one place at once")


class Shadow:
    """The last accesses of each byte."""

    def __init__(self, size: int, order: Order) -> None:
        self._order = order
        self._written = _zeros(size, np.int64)
        self._read = _zeros(size, np.int64)
        self._atomic = _zeros(size, bool)  # the last write

    def reads(self, at: Array, by: Array) -> None:
        self._check(self._written[at], by, "read after a write")
        before = self._read[at]
        now = np.where(self._together(before, by), by | _SEVERAL_WARPS, by)
        apart = (before != _NOBODY) & (before >> _PROGRAM_AT != by >> _PROGRAM_AT)
        if apart.any():
            apart[apart] = ~self._ordered(before[apart], by[apart])
            now = np.where(apart, _SEVERAL_PROGRAMS << _PROGRAM_AT, now)
        self._read[at] = now
        left = self._read[at]
        if (beside := left != now).any():  # of these lanes, several read a byte
            same = left >> _PROGRAM_AT == now >> _PROGRAM_AT
            several = np.where(same, now | _SEVERAL_WARPS, _SEVERAL_PROGRAMS << _PROGRAM_AT)
            self._read[at[beside]] = several[beside]

    def writes(self, at: Array, by: Array, atomic: bool = False) -> Array:
        """Which accesses share a byte with one that another warp makes at once. Triton has every
        warp that holds a copy of a number store it, so these are no race if they write the same
        (:func:`same_bytes`)."""
        before = self._written[at]
        if atomic:
            before = np.where(self._atomic[at], _NOBODY, before)
        self._check(before, by, "write after a write")
        self._check(self._read[at], by, "write after a read")
        self._written[at], self._atomic[at] = by, atomic
        left = self._written[at]
        if not atomic and (left >> _PROGRAM_AT != by >> _PROGRAM_AT).any():
            raise Race("race: two programs write one byte at once")
        return left != by

    def _together(self, before: Array, by: Array) -> Array:
        """Of one program, with no barrier between them, and of two warps."""
        return (before >> _WARP_BITS == by >> _WARP_BITS) & (before != by)

    def _check(self, before: Array, by: Array, what: str) -> None:
        if not (suspect := (before != _NOBODY) & (before != by)).any():
            return
        before, by = before[suspect], by[suspect]
        if self._together(before, by).any():
            raise Race(f"race: {what} by another warp, with no barrier between them")
        apart = before >> _PROGRAM_AT != by >> _PROGRAM_AT
        if apart.any() and not self._ordered(before[apart], by[apart]).all():
            raise Race(f"race: {what} by another program")

    def _ordered(self, before: Array, by: Array) -> Array:
        pairs, which = np.unique(np.stack([before, by]), axis=1, return_inverse=True)
        found = [self._order.holds(int(first), int(second)) for first, second in pairs.T]
        return np.array(found)[which.reshape(-1)]
