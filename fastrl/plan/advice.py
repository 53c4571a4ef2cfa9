"""What to change where a plan does not fit, and what more there is room for where it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrl.plan.report import Plan, gib

_MOST_DOUBLINGS = 4


class Planned(Protocol):
    """A run that can be planned, and changed."""

    def plan(self) -> Plan:
        """Its memory."""

    def changes(self) -> Sequence[Remedy]:
        """Ways to need less, the one that costs the least time or quality first."""

    def larger(self) -> tuple[str, Any] | None:
        """The flags of a larger micro-batch, and the run with it; None where it is the largest."""


@dataclass(frozen=True)
class Remedy:
    """A change of a run's settings.

    Args:
        flags: as a command takes them.
        cost: what it costs, in words.
        apply: the changed run; None where it changes nothing.
    """

    flags: str
    cost: str
    apply: Callable[[Any], Any]


def what_to_change(run: Planned, plan: Plan, gpu_gib: float) -> str:
    """The cheapest change that makes a run fit: the first that does by itself, else the first few
    that do together."""
    tried: list[tuple[Remedy, Plan]] = []
    for change in run.changes():
        changed = change.apply(run)
        if changed is None:
            continue
        found = changed.plan()
        if found.fits(gpu_gib):
            return f"{change.flags} ({change.cost}): {gib(found.peak)}"
        tried.append((change, found))
    together: Any = run
    used: list[Remedy] = []
    for change, _ in tried:
        changed = change.apply(together)
        if changed is None:
            continue
        together, used = changed, [*used, change]
        found = together.plan()
        if len(used) > 1 and found.fits(gpu_gib):
            return f"{' '.join(x.flags for x in used)} together: {gib(found.peak)}"
    flags = " ".join(x.flags for x in used)
    least = f"; {flags} leaves {gib(found.peak)}" if used else ""
    return f"nothing known{least}: a smaller model, shorter sequences or a larger GPU"


def what_fits(run: Planned, gpu_gib: float) -> Iterator[str]:
    """What of a run can be larger on a GPU where it fits."""
    largest = None
    for _ in range(_MOST_DOUBLINGS):
        more = run.larger()
        if more is None:
            break
        flags, run = more
        found = run.plan()
        if not found.fits(gpu_gib):
            break
        largest = f"{flags} ({gib(found.peak)})"
    if largest is not None:
        yield f"there is room for {largest}"
