"""A plan: what a run needs of memory, phase by phase and kind by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastrl.trainers.plan.memory import KINDS, REFERENCE, Peak
from fastrl.trainers.plan.rehearsal import OTHER, PHASES, SCORING, UPDATE, Rehearsal

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30
# A GPU's memory that no tensor can have: the driver's context and libraries, and this share of the
# rest for gaps between torch's blocks. Both are assumed, not measured.
CONTEXT_BYTES, GAPS = 0.75 * GIB, 0.03


def usable(gib: float) -> int:
    """Bytes of a GPU that tensors can have."""
    return int((gib * GIB - CONTEXT_BYTES) * (1 - GAPS))


@dataclass(repr=False)
class Plan:
    """The memory of a run.

    Attributes:
        title: the model and the method.
        device: the kind of device that memory is counted for, "cpu" or "cuda".
        phases: the peak of each phase, in the order of ``PHASES``.
        settings: lengths and settings that the plan depends on.
        guesses: in words, what is guessed or left out.
    """

    title: str
    device: str
    phases: dict[str, Peak]
    settings: dict[str, Any] = field(default_factory=dict)
    guesses: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, title: str, device: str, rehearsed: Rehearsal, settings: Mapping[str, Any]) -> Plan:
        phases = {name: rehearsed.log.peaks[name] for name in PHASES if name in rehearsed.log.peaks}
        runs_in = phases.get(SCORING) or phases.get(UPDATE)
        if rehearsed.visiting and runs_in is not None:
            runs_in.total += rehearsed.visiting
            runs_in.by_kind[REFERENCE] += rehearsed.visiting
        return cls(title, device, phases, dict(settings), list(rehearsed.notes))

    @property
    def peak(self) -> int:
        """The most bytes of all phases."""
        return max((phase.total for phase in self.phases.values()), default=0)

    @property
    def widest(self) -> str:
        """The phase that needs most memory."""
        return max(self.phases, key=lambda name: self.phases[name].total)

    def fits(self, gpu_gib: float) -> bool:
        return self.peak <= usable(gpu_gib)

    def __repr__(self) -> str:
        return f"<Plan of {self.title} on {self.device}: {self.line()}>"

    def line(self) -> str:
        parts = self.phases[self.widest].by_kind
        largest = sorted(parts, key=lambda kind: -parts[kind])[:3]
        shown = ", ".join(f"{kind} {gib(parts[kind])}" for kind in largest if parts[kind])
        return f"planned memory: {gib(self.peak)} at most, in {self.widest} ({shown})"

    def table(self) -> Table:
        """The plan as a table for a terminal: a row for each kind that has memory, a column for
        each phase; ``OTHER`` has one only where it needs most."""
        from rich.table import Table

        table = Table(title=self.title)
        table.add_column("GiB")
        shown = {n: x for n, x in self.phases.items() if n != OTHER or n == self.widest}
        for name in shown:
            table.add_column(name, justify="right")
        for kind in KINDS:
            row = [phase.by_kind.get(kind, 0) for phase in shown.values()]
            if any(row):
                table.add_row(kind, *(_cell(x) for x in row))
        table.add_section()
        table.add_row("peak", *(_cell(phase.total) for phase in shown.values()))
        return table

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "peak": self.peak}


def gib(nbytes: float) -> str:
    """Bytes as a text in MiB or GiB."""
    if abs(nbytes) < 0.1 * GIB:
        return f"{nbytes / 2**20:.0f} MiB"
    return f"{nbytes / GIB:.2f} GiB" if nbytes < 100 * GIB else f"{nbytes / GIB:.0f} GiB"


def _cell(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}" if nbytes else ""
