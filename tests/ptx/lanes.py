"""The threads of some programs of a launch, side by side: their registers and what they share."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tests.ptx.faults import UnknownInstruction
from tests.ptx.formats import BITS, DTYPES, SIZES, Array, as_stored
from tests.ptx.memory import GlobalMemory, SharedMemory
from tests.ptx.program import (
    NOWHERE,
    Address,
    Name,
    Number,
    Operand,
    Pair,
    Program,
    Register,
    Special,
    Vector,
)
from tests.ptx.races import Order, accesses

WARP = 32
_LANE = np.arange(WARP)


class Launch(NamedTuple):
    """What all programs of a launch have in common."""

    program: Program
    programs: int
    arguments: Mapping[str, int | float]
    shared_bytes: int
    memory: GlobalMemory
    order: Order


class Lanes:
    """One lane per thread.

    Attributes:
        active: the lanes that execute the current instruction. What others compute is not kept.
    """

    def __init__(self, launch: Launch, first: int, programs: int) -> None:
        threads = launch.program.threads
        self.launch = launch
        self.count = threads * programs
        lane = np.arange(self.count)
        self.place = lane // threads  # of the program in this batch
        self.program = self.place + first
        self.thread = (lane % threads).astype(np.uint32)
        self.warp = (self.thread // WARP).astype(np.int64)
        self.barriers = np.zeros(self.count, np.int64)  # that each has passed
        self.active = np.ones(self.count, bool)
        self.all_active = True
        self.shared = SharedMemory(launch.shared_bytes, programs, launch.order)
        self.copies = AsynchronousCopies()
        self._registers: dict[str, Array] = {}
        self._constants: dict[tuple[str, str], Array] = {}
        none = np.zeros(self.count, np.uint32)
        self._special = {
            **{f"%{name}.{axis}": none for name in ("tid", "ctaid") for axis in "yz"},
            **{f"%{name}.{axis}": none + 1 for name in ("ntid", "nctaid") for axis in "yz"},
            "%tid.x": self.thread, "%ntid.x": none + np.uint32(threads),
            "%laneid": self.thread % WARP, "%ctaid.x": self.program.astype(np.uint32),
            "%nctaid.x": none + np.uint32(launch.programs),
        }  # fmt: skip

    def activate(self, lanes: Array) -> bool:
        """Whether there are any."""
        self.active = lanes
        self.all_active = bool(lanes.all())
        return self.all_active or bool(lanes.any())

    def accesses(self) -> Array:
        """What the active lanes' accesses of memory are known by."""
        mine = self.active
        return accesses(self.program[mine], self.barriers[mine], self.warp[mine])

    def read(self, operand: Operand, kind: str) -> Array:
        """An operand's number in each lane, by PTX's name of a type."""
        if isinstance(operand, Register):
            bits = self._registers.get(operand.name)
            if bits is None:  # it is set where no lane has come to
                bits = np.zeros(self.count, bool if operand.type == "pred" else BITS[SIZES[kind]])
        elif isinstance(operand, Special):
            if operand.name not in self._special:
                raise UnknownInstruction(operand.name)
            bits = self._special[operand.name]
        elif isinstance(operand, (Number, Name)):
            return self._constant(operand.text, kind)
        else:
            raise UnknownInstruction(f"{operand} as a number")
        if kind == "pred":
            return bits
        size = SIZES[kind]
        if bits.dtype.itemsize != size:
            bits = bits.astype(BITS[size])
        return bits.view(DTYPES[kind])

    def write(self, result: Operand, values: Array) -> None:
        """Sets a register in the active lanes."""
        if result == NOWHERE:
            return
        assert isinstance(result, Register), result
        values = np.asarray(values)
        if result.type == "pred":
            values = values.astype(bool)
        else:
            values = as_stored(values, SIZES[result.type])
        if values.shape != (self.count,):
            values = np.broadcast_to(values, (self.count,))
        if not self.all_active:
            before = self._registers.get(result.name)
            if before is None or before.dtype != values.dtype:
                before = np.zeros(self.count, values.dtype)
            values = np.where(self.active, values, before)
        self._registers[result.name] = values

    def address(self, operand: Operand, kind: str) -> Array:
        """Of the active lanes."""
        assert isinstance(operand, Address), operand
        return self.read(operand.base, kind)[self.active].astype(np.int64) + operand.offset

    def spread(self, values: Array) -> Array:
        """Values of the active lanes among those of all."""
        spread = np.zeros(self.count, values.dtype)
        spread[self.active] = values
        return spread

    def _constant(self, text: str, kind: str) -> Array:
        found = self._constants.get((text, kind))
        if found is None:
            number = _constant(text, kind)
            found = self._constants[text, kind] = np.broadcast_to(number, (self.count,))
        return found


def _constant(text: str, kind: str) -> Array:
    if kind == "pred":
        return np.array(text in ("true", "-1", "1"))
    if text == "global_smem":  # where shared memory begins
        text = "0"
    # Floats are told by their bits.
    number = int(text[2:], 16) if text[:2].lower() in ("0f", "0d") else int(text.rstrip("U"), 0)
    size = SIZES[kind]
    return np.array(number % (1 << 8 * size), BITS[size]).view(DTYPES[kind])


class AsynchronousCopies:
    """Copies from global to shared memory, which come when they are waited for."""

    def __init__(self) -> None:
        self._started: list[Callable[[], None]] = []
        self._groups: list[list[Callable[[], None]]] = []

    def start(self, copy: Callable[[], None]) -> None:
        self._started.append(copy)

    def commit(self) -> None:
        self._groups.append(self._started)
        self._started = []

    def wait(self, but: int) -> None:
        """Until all groups but the last ``but`` have come."""
        while len(self._groups) > but:
            for copy in self._groups.pop(0):
                copy()


def parts(operand: Operand) -> tuple[Operand, ...]:
    """Of a vector, or the operand alone."""
    if isinstance(operand, Vector):
        return operand.parts
    if isinstance(operand, Pair):
        return (operand.first, operand.second)
    return (operand,)
