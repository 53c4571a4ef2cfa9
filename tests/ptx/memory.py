"""The memory that a launch may touch: tensors anywhere in the process, and shared memory."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.ptx.faults import Fault
from tests.ptx.formats import BITS, Array
from tests.ptx.races import Order, Shadow, same_bytes

Span = tuple[int, int]  # the first address and the one after the last
# A load may reach over a tensor's end as far as the memory comes with it anyway: allocators give
# out whole multiples of this. Kernels load a row's last vector so.
SECTOR = 32
_START = 4096  # of the addresses that the views begin with; no process has lower ones


def _whole_process(dtype: Any) -> Array:
    """All memory as one array: the caller checks what it touches."""
    kind = np.dtype(dtype)
    interface = {
        "data": (_START, False),
        "shape": ((1 << 48) // kind.itemsize,),
        "typestr": kind.str,
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


_PROCESS = {size: _whole_process(bits) for size, bits in BITS.items()}


class GlobalMemory:
    """The spans that tensors of a launch take up."""

    def __init__(self, spans: Iterable[Span], order: Order) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(set(spans)):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self._starts = np.array([start for start, _ in merged], np.int64)
        self._ends = np.array([end for _, end in merged], np.int64)
        rooms = np.cumsum(self._ends - self._starts + SECTOR)
        self._shadow_at = np.concatenate([[0], rooms]).astype(np.int64)
        self._shadow = Shadow(int(self._shadow_at[-1]), order)

    def load(self, addresses: Array, size: int, count: int, by: Array) -> list[Array]:
        """``count`` numbers of ``size`` bytes from each address."""
        at = self._checked(addresses, size * count, writes=False)
        self._shadow.reads(*_bytes(at, by, size * count))
        return [_PROCESS[size][(addresses + i * size - _START) // size] for i in range(count)]

    def store(self, addresses: Array, values: list[Array], by: Array) -> None:
        size = values[0].dtype.itemsize
        at = self._checked(addresses, size * len(values), writes=True)
        shared = self._shadow.writes(*_bytes(at, by, size * len(values)))
        shared = shared.reshape(len(at), -1).any(1)
        places = (addresses - _START) // size
        for i, each in enumerate(values):
            _PROCESS[size][places + i] = each
        for i, each in enumerate(values):
            same_bytes(shared, at, by, each, _PROCESS[size][places + i])

    def add(self, addresses: Array, values: Array, by: Array) -> Array:
        """Adds integers one lane after the other; what was there before each."""
        size = values.dtype.itemsize
        at = self._checked(addresses, size, writes=True)
        self._shadow.writes(*_bytes(at, by, size), atomic=True)
        before = np.empty_like(values)
        for i, address in enumerate(addresses):
            place = (address - _START) // size
            before[i] = _PROCESS[size][place]
            _PROCESS[size][place] = before[i] + values[i]
        return before

    def _checked(self, addresses: Array, size: int, *, writes: bool) -> Array:
        """Places of the shadow."""
        if (addresses % size).any():
            raise Fault(f"misaligned: {size} bytes at {hex(addresses[addresses % size > 0][0])}")
        span = np.searchsorted(self._starts, addresses, "right") - 1
        if not len(self._starts):
            raise Fault("out of bounds: no tensor was given")
        ends = self._ends[span]
        if not writes:
            ends = -(-ends // SECTOR) * SECTOR
        if (outside := (span < 0) | (addresses + size > ends)).any():
            first = int(addresses[outside][0])
            beyond = [first - int(end) for end in self._ends if first >= end]
            near = f", {min(beyond)} bytes behind the end of a tensor" if beyond else ""
            raise Fault(f"out of bounds: {outside.sum()} lanes, the first at {hex(first)}{near}")
        return self._shadow_at[span] + addresses - self._starts[span]


class SharedMemory:
    """That of each program of a batch."""

    def __init__(self, size: int, programs: int, order: Order) -> None:
        self._size = size
        self._each = (size + 31) // 16 * 16
        words = np.full(self._each // 8 * programs, 0xA5A5A5A5A5A5A5A5, np.uint64)
        self._views = {size: words.view(bits) for size, bits in BITS.items()}
        self._shadow = Shadow(self._each * programs, order)

    def load(
        self, addresses: Array, size: int, count: int, program: Array, by: Array
    ) -> list[Array]:
        at = self._checked(addresses, size * count, size * count, program)
        self._shadow.reads(*_bytes(at, by, size * count))
        return [self._views[size][at // size + i] for i in range(count)]

    def store(self, addresses: Array, values: list[Array], program: Array, by: Array) -> None:
        at, shared = self.claim(addresses, values, program, by)
        self.settle(at, shared, values, by)

    def claim(
        self, addresses: Array, values: list[Array], program: Array, by: Array
    ) -> tuple[Array, Array]:
        """Places for a store that comes later, by :meth:`settle`; which of them are others' too."""
        size = values[0].dtype.itemsize * len(values)
        at = self._checked(addresses, size, size, program)
        shared = self._shadow.writes(*_bytes(at, by, size))
        return at, shared.reshape(len(at), -1).any(1)

    def settle(self, at: Array, shared: Array, values: list[Array], by: Array) -> None:
        size = values[0].dtype.itemsize
        places = at // size
        for i, each in enumerate(values):
            self._views[size][places + i] = each
        for i, each in enumerate(values):
            same_bytes(shared, at, by, each, self._views[size][places + i])

    def load_rows(self, addresses: Array, program: Array, by: Array) -> Array:
        """Eight numbers of 16 bits from each address: [n, 8]."""
        at = self._checked(addresses, 16, 16, program)
        self._shadow.reads(*_bytes(at, by, 16))
        return self._views[2][(at // 2)[:, None] + np.arange(8)]

    def store_rows(self, addresses: Array, rows: Array, program: Array, by: Array) -> None:
        at, shared = self.claim(addresses, list(rows.T), program, by)
        self.settle(at, shared, list(rows.T), by)

    def _checked(self, addresses: Array, size: int, alignment: int, program: Array) -> Array:
        """Places among all programs' bytes."""
        if (addresses % alignment).any():
            raise Fault(f"misaligned: {size} bytes of shared memory")
        if ((addresses < 0) | (addresses + size > self._size)).any():
            last = int(addresses.max()) + size
            raise Fault(f"out of bounds: byte {last} of {self._size} of shared memory")
        return addresses + program * self._each


def _bytes(at: Array, by: Array, size: int) -> tuple[Array, Array]:
    """Each byte of accesses, and who touches it."""
    return (at[:, None] + np.arange(size)).ravel(), np.repeat(by, size)
