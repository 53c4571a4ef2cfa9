"""What to change where a plan does not fit its GPU, and what can be larger where it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastrl.trainers.plan.memory import KV_CACHE
from fastrl.trainers.plan.report import GIB, Plan, gib, usable

_LARGEST_FACTOR = 64  # by which a size is tried: what a plan has to walk through grows with it


class Planned(Protocol):
    """A run that can be planned, and changed."""

    @property
    def kv_cache_flag(self) -> str | None:
        """The flag of the GiB that keys and values may take; None where there is no such flag."""

    def plan(self) -> Plan:
        """The plan of the run's memory."""

    def changes(self) -> Sequence[Remedy]:
        """Changes by which the run needs less memory, the cheapest in time or quality first."""

    def dials(self) -> Sequence[Dial]:
        """Sizes that can grow into free memory; a grown run has the same ones, in this order."""


@dataclass(frozen=True)
class Remedy:
    """A change of a run's settings, by which it needs less memory.

    Args:
        flags: the flags, as a command takes them.
        cost: what it costs, in words.
        leaves: the share that is left, at best, of each kind of memory that the change lessens: a
            change that cannot be enough is not tried.
        apply: makes the changed run from a run; None where nothing would change. A ValueError, here
            or from the changed run's plan, means that the run refuses the change.
        learns_other: whether the changed run learns something else.
    """

    flags: str
    cost: str
    leaves: Mapping[str, float]
    apply: Callable[[Any], Any]
    learns_other: bool = False


@dataclass(frozen=True)
class Dial:
    """A size of a run.

    Args:
        kind: the kind of memory that grows with the size, at most in proportion.
        most: the factor by which it can grow.
        turned: returns, for a factor, the flags of the larger size, and the run with that size;
            raises ValueError like the ``apply`` of a :class:`Remedy`.
    """

    kind: str
    most: float
    turned: Callable[[int], tuple[str, Any]]


def what_to_change(run: Planned, plan: Plan, gpu_gib: float) -> str:
    """Returns, in words, the cheapest change that makes a run fit: the first remedy that is enough
    alone, else the first few that are enough together, without those that are not needed. Remedies
    that change what is learned are tried only where the others are not enough. Where no remedies
    are enough, the text says so."""
    remedies = list(run.changes())
    same = [remedy for remedy in remedies if not remedy.learns_other]
    others = [remedy for remedy in remedies if remedy.learns_other]
    tried = ""
    for singles, several in ((same, same), (others, remedies)):
        for remedy in singles:
            changed = _tried(run, plan, [remedy], gpu_gib)
            if changed is not None and changed.fits(gpu_gib):
                return f"{remedy.flags} ({remedy.cost}): {gib(changed.peak)}"
        used: dict[str, Remedy] = {}  # by flag: the last remedy of each flag counts
        changed = None
        for remedy in several:
            if _unless_refused(remedy.apply, _changed(run, used.values())) is None:
                continue
            used[remedy.flags.split()[0]] = remedy
            changed = _tried(run, plan, used.values(), gpu_gib)
            if changed is not None and changed.fits(gpu_gib):
                needed, changed = _needed(run, plan, list(used.values()), changed, gpu_gib)
                return f"{_flags(needed)} together: {gib(changed.peak)}"
        changed = changed or _unless_refused(_changed(run, used.values()).plan)
        if used and changed is not None:
            tried = f"; {_flags(used.values())} leaves {gib(changed.peak)}"
    return f"nothing known{tried}: a smaller model, shorter sequences or a larger GPU"


def _tried(run: Planned, plan: Plan, remedies: Iterable[Remedy], gpu_gib: float) -> Plan | None:
    """The plan of a changed run; None where it cannot fit, is not changed, or is refused."""
    remedies = list(remedies)
    if _at_best(plan, remedies) > usable(gpu_gib):
        return None
    changed = _changed(run, remedies)
    return None if changed is run else _unless_refused(changed.plan)


def _unless_refused(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what the call returns; None where settings or a trainer raise a ValueError in it."""
    try:
        return call(*arguments)
    except ValueError:
        return None


def _needed(
    run: Planned, plan: Plan, used: list[Remedy], smallest: Plan, gpu_gib: float
) -> tuple[list[Remedy], Plan]:
    """Leaves out of ``used``, which is enough together, the remedies that are not needed, the most
    costly first; returns the rest and the plan with them."""
    for remedy in reversed(list(used)):
        fewer = [other for other in used if other is not remedy]
        without = _tried(run, plan, fewer, gpu_gib)
        if without is not None and without.fits(gpu_gib):
            used, smallest = fewer, without
    return used, smallest


def _changed(run: Any, remedies: Iterable[Remedy]) -> Any:
    """The run after all remedies, without those that it refuses or that change nothing."""
    for remedy in remedies:
        run = _unless_refused(remedy.apply, run) or run
    return run


def what_fits(run: Planned, plan: Plan, gpu_gib: float) -> Iterator[str]:
    """Yields what can be larger in a run that fits its GPU: each size, one after the other, by the
    largest power of two that fits, and the memory of keys and values."""
    grown: list[str] = []
    for number in range(len(run.dials())):
        dial = run.dials()[number]
        grows = int(min(dial.most, _LARGEST_FACTOR, _growth(plan, dial.kind, gpu_gib)))
        factor = 1 << max(grows, 1).bit_length() - 1  # a power of two
        while factor > 1:
            turned = _unless_refused(dial.turned, factor)
            planned = None if turned is None else _unless_refused(turned[1].plan)
            if planned is not None and planned.fits(gpu_gib):
                grown.append(turned[0])
                run, plan = turned[1], planned
                break
            factor //= 2
    if grown:
        yield f"there is room for {' '.join(grown)} ({gib(plan.peak)})"
    with_keys = [phase for phase in plan.phases.values() if phase.by_kind.get(KV_CACHE)]
    if with_keys and run.kv_cache_flag is not None:
        left = min(usable(gpu_gib) - phase.total for phase in with_keys)
        now = max(phase.by_kind[KV_CACHE] for phase in with_keys)
        most = int((now + left) / GIB * 10) / 10  # rounded down
        if most * GIB > now:
            then = " then" if grown else ""
            yield (
                f"keys and values{then} take {gib(now)}; {run.kv_cache_flag} can be up to "
                f"{most:g}, for longer responses or more of them at a time"
            )


def _growth(plan: Plan, kind: str, gpu_gib: float) -> float:
    """The factor by which a kind of memory can grow until a phase is full; 1 if no phase has it."""
    limit = usable(gpu_gib)
    growing = [phase for phase in plan.phases.values() if phase.by_kind.get(kind)]
    return min((1 + (limit - p.total) / p.by_kind[kind] for p in growing), default=1.0)


def _at_best(plan: Plan, remedies: Iterable[Remedy]) -> float:
    """The peak if each remedy lessens memory as much as it can."""
    peak = 0.0
    for phase in plan.phases.values():
        left: dict[str, float] = dict(phase.by_kind)
        for remedy in remedies:
            for kind, share in remedy.leaves.items():
                left[kind] = left.get(kind, 0) * share
        peak = max(peak, phase.total - sum(phase.by_kind.values()) + sum(left.values()))
    return peak


def _flags(remedies: Iterable[Remedy]) -> str:
    return " ".join(remedy.flags for remedy in remedies)
