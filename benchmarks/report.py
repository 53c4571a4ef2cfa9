"""What result files say: for a terminal, in tables, in plots."""

from __future__ import annotations

import statistics

from benchmarks.harness import (
    OURS,
    Entry,
    duration,
    durations,
    faster,
    phase_of,
    rooflines,
    size,
    spread,
    verdicts,
)


def render(entry: Entry, device: str) -> str:
    """A case's lines for a terminal: a block for each phase, medians and their range."""
    head = f"{entry['name']}: {entry['label']}"
    if entry["red"]:
        return f"{head}\n  RED, no figures: {entry['red']}"
    lines = [head, f"  {entry['what']}"] if entry["what"] else [head]
    own, than = entry["baseline"] or OURS, "faster by" if entry["baseline"] else "fastrl faster by"
    for phase in entry["sides"][own]["seconds"]:
        lines.append(f"  {phase:<34}{'seconds':>26}{than:>22}")
        for name, side in entry["sides"].items():
            if phase not in side["seconds"]:
                continue
            ratio = "" if name == own else spread(faster(entry, name, phase), ".2f")
            taken = durations(phase_of(side, phase))
            lines.append(f"    {name:<32}{taken:>26}{ratio:>22}")
    lines += [f"  {line}" for line in details(entry)]
    for goal, reached in verdicts(entry, device):
        lines.append(f"  goal {goal}: {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def details(entry: Entry) -> list[str]:
    """Lines on what each side needs, on who is absent, and remarks."""
    lines = []
    for name, side in entry["sides"].items():
        parts = [side["note"]] if side["note"] else []
        parts += [f"memory, {kind} {size(nbytes)}" for kind, nbytes in side["memory"].items()]
        parts += [f"{fact} {value:.3g}" for fact, value in side["facts"].items()]
        if side["limit"]:
            parts.append(f"{statistics.median(rooflines(entry, name)):.0%} of the roofline")
        lines += [f"{name}: {'; '.join(parts)}"] if parts else []
    least = entry["sides"][entry["baseline"] or OURS]["limit"]
    lines += [f"the roofline: {duration(statistics.median(least))}"] if least else []
    lines += entry["remarks"]
    return [*lines, *(f"absent, {name}: {why}" for name, why in entry["absent"].items())]
