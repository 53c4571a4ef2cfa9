"""Cases with goals, and what is computed from the entry of a measured case.

An entry is one case of a result file:
{"benchmark", "name", "label", "what", "main", "goals": [Goal], "absent": {side: reason},
 "baseline": the side that others are compared with, None for fastrl,
 "red": None or why the gate failed; then there are no sides,
 "work": None or {"bytes", "flops", "what"}, "units": None or [word, count], "remarks": [text],
 "roofs": [{"product": "m×k · k×n", "dtype", "count", "flop/s": {provider: number},
            "absent": {provider: why it has none}}],
 "sides": {name: {"note", "calls": per turn, "seconds": {phase: [one per turn]},
                  "limit": [seconds of the least work, one per turn], "limited": its phase,
                  "memory": {kind: bytes}, "facts": {name: number}}}}
Where no phase is named, the first one is meant.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OURS, EAGER = "fastrl", "eager"
AT_LEAST = ("speedup", "roofline", "slots used")  # figures whose goal is a lower bound

Entry = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on one figure of a case, on devices whose name begins with one of `devices`.

    Args:
        figure: "seconds" (of a phase), "speedup" over `against`, "roofline" (share of it), "memory"
            (the peak in bytes), "memory share" (of the peak of `against`), or the name of a fact.
        bound: a lower bound for the figures in `AT_LEAST`, an upper bound for the others.
    """

    figure: str
    bound: float
    devices: tuple[str, ...] = ("cpu",)
    side: str = OURS
    against: str = EAGER
    phase: str | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured piece of work.

    Args:
        benchmark: names the result file.
        name: of what is measured; several cases may share it.
        label: distinguishes cases of one name.
        what: the work in words.
        of: its sizes, in the benchmark's own type.
        main: whether it stands in the short tables and plots.
        seconds: how long it takes, roughly.
    """

    benchmark: str
    name: str
    label: str
    what: str = ""
    of: Any = None
    goals: tuple[Goal, ...] = ()
    main: bool = True
    seconds: float = 60.0

    def __str__(self) -> str:
        return f"{self.name}: {self.label}"

    def entry(self) -> Entry:
        """An entry without results."""
        named = {k: getattr(self, k) for k in ("benchmark", "name", "label", "what", "main")}
        goals = [dataclasses.asdict(goal) for goal in self.goals]
        return {
            **named, "goals": goals, "baseline": None, "red": None, "absent": {}, "work": None,
            "units": None, "remarks": [], "roofs": [], "sides": {},
        }  # fmt: skip


def own(entry: Entry) -> str:
    """The side that the others are compared with."""
    return entry["baseline"] or OURS


def phase_of(side: Mapping[str, Any], phase: str | None = None) -> list[float]:
    """The seconds of a phase, one per turn."""
    return side["seconds"][phase or next(iter(side["seconds"]))]


def ratios(entry: Entry, side: str, base: str = OURS, phase: str | None = None) -> list[float]:
    """Seconds of a side over those of the base, per turn: above 1, the base is faster."""
    theirs, ours = (phase_of(entry["sides"][name], phase) for name in (side, base))
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def faster(entry: Entry, side: str, phase: str | None = None) -> list[float]:
    """The ratio that is shown for a side: by how much fastrl is faster than it or, with a baseline,
    by how much the side is faster than the baseline."""
    if entry["baseline"]:
        return ratios(entry, entry["baseline"], side, phase)
    return ratios(entry, side, OURS, phase)


def rooflines(entry: Entry, side: str = OURS) -> list[float]:
    """The least time of the case's work over the time taken, per turn; 1 is the limit."""
    found = entry["sides"][side]
    taken = phase_of(found, found["limited"])
    return [least / seconds for least, seconds in zip(found["limit"], taken, strict=True)]


def verdicts(entry: Entry, device: str) -> list[tuple[str, bool]]:
    """Each goal for this device in words, and whether it is reached; goals whose figure was not
    measured are left out."""
    found = []
    for goal in (Goal(**goal) for goal in entry["goals"]):
        if entry["red"] or not device.lower().startswith(tuple(goal.devices)):
            continue
        value = _figure(entry, goal)
        if value is not None:
            reached = value >= goal.bound if goal.figure in AT_LEAST else value <= goal.bound
            found.append((_words(entry, goal), reached))
    return found


def _figure(entry: Entry, goal: Goal) -> float | None:
    side, base = (entry["sides"].get(name) for name in (goal.side, goal.against))
    if not side or (goal.figure in ("speedup", "memory share") and not base):
        return None
    if goal.figure == "speedup":
        return statistics.median(ratios(entry, goal.against, goal.side, goal.phase))
    if goal.figure == "seconds":
        return statistics.median(phase_of(side, goal.phase))
    if goal.figure == "roofline":
        return statistics.median(rooflines(entry, goal.side))
    if goal.figure == "memory":
        return side["memory"]["peak"]
    if goal.figure == "memory share":
        return side["memory"]["peak"] / base["memory"]["peak"]
    return side["facts"].get(goal.figure)


def _words(entry: Entry, goal: Goal) -> str:
    bound, phase = goal.bound, goal.phase
    words = {
        "speedup": f"{phase + ', ' if phase else ''}≥ {bound:g}× {goal.against}",
        "seconds": f"≤ {duration(bound)}" + (f" of {phase}" if phase else ""),
        "memory": f"≤ {size(bound)}",
        "memory share": f"memory ≤ {bound:.3g} of {goal.against}'s",
    }.get(goal.figure)
    if words is None:
        bounded = f"≥ {bound:.0%}" if goal.figure in AT_LEAST else f"≤ {bound:g}"
        words = f"{goal.figure} {bounded}"
    limit = entry["sides"][goal.side]["limit"]
    if goal.figure == "speedup" and limit:  # no implementation is faster than the machine
        theirs = phase_of(entry["sides"][goal.against])
        most = statistics.median(a / b for a, b in zip(theirs, limit, strict=True))
        words += f" (at the limit: {most:.2f}×)" if most < bound else ""
    return words if goal.side == OURS else f"{goal.side}: {words}"


def duration(seconds: float) -> str:
    """`12.3 ms`, in the unit that leaves one to three digits before the point."""
    unit, scale = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"


def durations(seconds: Sequence[float]) -> str:
    """`median (lowest–highest)` in one unit."""
    unit, scale = _unit(statistics.median(seconds))
    return spread([x / scale for x in seconds], ".3g", f" {unit}")


def _unit(seconds: float) -> tuple[str, float]:
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    return next((unit for unit in units if seconds >= unit[1]), units[-1])


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """`median (lowest–highest)`, the unit after the median."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


def size(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
