"""A kernel's statements on the lanes of some programs at a time."""

from collections.abc import Iterable, Sequence

import numpy as np

# Their instructions enter themselves into the table.
from tests.ptx import arithmetic, transfers, warps  # noqa: F401
from tests.ptx.faults import Fault, UnknownInstruction
from tests.ptx.formats import Array
from tests.ptx.instructions import Execute, instruction, known
from tests.ptx.lanes import Lanes, Launch
from tests.ptx.memory import GlobalMemory, Span
from tests.ptx.program import Name, Statement, parse
from tests.ptx.races import Order

# Lanes that are worth their arrays: NumPy takes as long for one as for some thousands.
LANES = 4096
MOST_STEPS = 3_000_000  # of a batch of programs; a kernel that takes more has no end


class Kernel:
    """A compiled kernel.

    Args:
        ptx: the text of a module with one kernel.
        shared_bytes: how much shared memory a launch gives to a program.

    Raises:
        UnknownInstruction: an instruction that is not in the table.
    """

    def __init__(self, ptx: str, shared_bytes: int = 0) -> None:
        self.program = parse(ptx)
        self.shared_bytes = shared_bytes
        self.steps: list[Execute] = [known(s) for s in self.program.statements]
        # Copies that come late are those of a batch: a batch is a program then.
        copies = any(s.words[:2] == ("cp", "async") for s in self.program.statements)
        self._programs_at_once = 1 if copies else max(1, LANES // self.program.threads)

    @property
    def name(self) -> str:
        return self.program.name

    def launch(
        self, programs: int, arguments: Sequence[int | float], spans: Iterable[Span]
    ) -> None:
        """Runs ``programs`` programs.

        Args:
            arguments: numbers and addresses, in the order of the kernel's parameters.
            spans: the memory that it may touch.

        Raises:
            Fault: what it may not do; the message tells the statement.
        """
        order = Order()
        memory = GlobalMemory(spans, order)
        named = dict(zip(self.program.parameters, arguments, strict=True))
        launch = Launch(self.program, programs, named, self.shared_bytes, memory, order)
        with np.errstate(all="ignore"):
            for first in range(0, programs, self._programs_at_once):
                count = min(self._programs_at_once, programs - first)
                _Execution(self, Lanes(launch, first, count)).run()


class _Execution:
    """Lanes in lockstep: those that are furthest behind go on, until others are at the same
    statement."""

    def __init__(self, kernel: Kernel, lanes: Lanes) -> None:
        self._kernel, self._program, self._lanes = kernel, kernel.program, lanes
        self._end = len(kernel.steps)
        self._next = np.zeros(lanes.count, np.int64)  # each lane's statement
        self._waiting = np.zeros(lanes.count, bool)  # at a barrier
        self._steps = 0

    def run(self) -> None:
        while True:
            ready = ~self._waiting & (self._next < self._end)
            if ready.any():
                behind = self._next[ready].min()
                group = ready & (self._next == behind)
                others = self._next[ready & ~group]
                self._go(int(behind), group, int(others.min()) if len(others) else self._end)
            elif self._waiting.any():
                self._pass_barrier()
            else:
                return

    def _go(self, at: int, group: Array, until: int) -> None:
        """A group of lanes, until they part, wait, or are at the statement of others."""
        whole = bool(group.all())
        while at < until:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise Fault(f"{self._kernel.name}: no end after {MOST_STEPS} statements")
            s = self._program.statements[at]
            taking = group if s.guard is None else group & (self._holds(s))
            kind = s.words[0]
            if kind == "bra":
                target = self._target(s)
                if taking.any() and not (taking == group).all():
                    self._next[group] = at + 1
                    self._next[taking] = target
                    return
                at = target if taking.any() else at + 1
                continue
            if kind in ("ret", "exit"):
                self._next[group] = at + 1
                self._next[taking] = self._end
                return
            if kind in ("bar", "barrier") and "warp" not in s.words:
                if whole and (taking == group).all():
                    self._lanes.barriers += 1
                    at += 1
                    continue
                self._next[group] = at + 1
                self._waiting |= taking
                return
            if self._lanes.activate(taking):
                self._execute(at, s)
            at += 1
        self._next[group] = at

    def _holds(self, s: Statement) -> Array:
        assert s.guard is not None
        holds = self._lanes.read(s.guard, "pred")
        return ~holds if s.negated else holds

    def _target(self, s: Statement) -> int:
        (label,) = s.operands
        assert isinstance(label, Name), s.text
        return self._program.labels[label.text]

    def _execute(self, at: int, s: Statement) -> None:
        try:
            self._kernel.steps[at](self._lanes, s)
        except (Fault, UnknownInstruction) as error:
            where = f"{self._kernel.name}, statement {at}: {s.text}"
            raise type(error)(f"{where}: {error}") from None

    def _pass_barrier(self) -> None:
        """No lane can go on but by the barrier: all of each program that waits have to be there."""
        lanes = self._lanes
        waiting = lanes.place[self._waiting]
        missing = np.isin(lanes.place, waiting) & ~self._waiting
        places = {int(at) - 1 for at in np.unique(self._next[self._waiting])}
        where = "; ".join(f"statement {at}: {self._program.statements[at].text}" for at in places)
        if missing.any():
            raise Fault(
                f"{self._kernel.name}, {where}: {missing.sum()} threads never come to the barrier "
                "that others of their program wait at"
            )
        for program in np.unique(waiting):
            if len(np.unique(self._next[lanes.place == program])) > 1:
                raise Fault(f"{self._kernel.name}: a program waits at several barriers: {where}")
        lanes.barriers[self._waiting] += 1
        self._waiting[:] = False


def _is_by_execution(lanes: Lanes, s: Statement) -> None:
    raise AssertionError(f"{s.text} is executed by what counts the lanes' statements")


instruction("bra", "uni")(_is_by_execution)
instruction("ret", "uni")(_is_by_execution)
instruction("exit", "")(_is_by_execution)


@instruction("bar", "sync warp")
@instruction("barrier", "sync cta aligned")
def _barrier(lanes: Lanes, s: Statement) -> None:
    """Of a warp, whose lanes are in lockstep."""


@instruction("fence", "acq_rel sc gpu cta sys proxy async shared")
@instruction("membar", "gl cta sys")
def _fence(lanes: Lanes, s: Statement) -> None:
    """Statements are in order here. No access of two programs is taken to be in an order by it."""
