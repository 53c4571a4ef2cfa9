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
        learns_other: whether what is learned is another thing then.
    """

    flags: str
    cost: str
    apply: Callable[[Any], Any]
    learns_other: bool = False


def what_to_change(run: Planned, plan: Plan, gpu_gib: float) -> str:
    """The cheapest change that makes a run fit: the first that does by itself, else the first few
    that do together. What is learned changes only where nothing else is enough."""
    remedies = list(run.changes())
    same = [remedy for remedy in remedies if not remedy.learns_other]
    others = [remedy for remedy in remedies if remedy.learns_other]
    least, used = plan, ""
    for singles, several in ((same, same), (others, remedies)):
        for remedy in singles:
            changed = remedy.apply(run)
            found = None if changed is None else changed.plan()
            if found is not None and found.fits(gpu_gib):
                return f"{remedy.flags} ({remedy.cost}): {gib(found.peak)}"
        together: Any = run
        used_now: dict[str, str] = {}  # by the flag: of one, the last value
        for remedy in several:
            changed = remedy.apply(together)
            if changed is None:
                continue
            together, found = changed, changed.plan()
            used_now[remedy.flags.split()[0]] = remedy.flags
            flags = " ".join(used_now.values())
            if found.fits(gpu_gib):
                return f"{flags} together: {gib(found.peak)}"
            if found.peak < least.peak:
                least, used = found, f"; {flags} leaves {gib(found.peak)}"
    return f"nothing known{used}: a smaller model, shorter sequences or a larger GPU"


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
