"""What a terminal shows: a measured case, and how the ratios of two results differ."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.cases import (
    Entry,
    duration,
    durations,
    faster,
    own,
    phase_of,
    rooflines,
    size,
    spread,
    verdicts,
)
from benchmarks.results import Result


def render(entry: Entry, device: str) -> str:
    """A case's lines: a block for each phase, medians and their range."""
    head = f"{entry['name']}: {entry['label']}"
    if entry["red"]:
        return f"{head}\n  RED, no figures: {entry['red']}"
    lines = [head, f"  {entry['what']}"] if entry["what"] else [head]
    base = own(entry)
    than = f"faster than {base} by" if entry["baseline"] else "fastrl faster by"
    for phase in entry["sides"][base]["seconds"]:
        lines.append(f"  {phase:<34}{'seconds':>26}{than:>24}")
        for name, side in entry["sides"].items():
            if phase in side["seconds"]:
                ratio = "" if name == base else spread(faster(entry, name, phase), ".2f")
                taken = durations(phase_of(side, phase))
                lines.append(f"    {name:<32}{taken:>26}{ratio:>24}")
    lines += [f"  {line}" for line in details(entry)]
    for goal, reached in verdicts(entry, device):
        lines.append(f"  goal {goal}: {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def details(entry: Entry) -> list[str]:
    """Lines on what each side needs, on remarks, and on who is absent."""
    lines = []
    for name, side in entry["sides"].items():
        parts = [side["note"]] if side["note"] else []
        parts += [f"memory, {kind} {size(nbytes)}" for kind, nbytes in side["memory"].items()]
        parts += [f"{fact} {value:.3g}" for fact, value in side["facts"].items()]
        if side["limit"]:
            parts.append(f"{statistics.median(rooflines(entry, name)):.0%} of the roofline")
        lines += [f"{name}: {'; '.join(parts)}"] if parts else []
    least = entry["sides"][own(entry)]["limit"]
    lines += [f"the roofline: {duration(statistics.median(least))}"] if least else []
    lines += [f"GFLOP/s of {speeds(roof)}" for roof in entry["roofs"]]
    lines += entry["remarks"]
    return [*lines, *(f"absent, {name}: {why}" for name, why in entry["absent"].items())]


def speeds(roof: dict[str, Any]) -> str:
    """`192×256 · 256×50257 in fp32: mm 146, oneDNN 222`."""
    found = ", ".join(f"{name} {speed / 1e9:.0f}" for name, speed in roof["flop/s"].items())
    lacking = "; ".join(f"no {name}: {why}" for name, why in roof.get("absent", {}).items())
    return f"{roof['product']} in {roof['dtype']}: {found}" + (f" ({lacking})" if lacking else "")


def compared(old: Result, new: Result) -> Iterator[str]:
    """How the ratios of two results differ, case by case. Times are no gate: a machine has slow
    minutes, which a ratio of neighbours does not see."""
    before = {(e["name"], e["label"]): e for e in old["entries"] if not e["red"]}
    for entry in new["entries"]:
        was = before.get((entry["name"], entry["label"]))
        if was is None or entry["red"]:
            continue
        for name in entry["sides"].keys() & was["sides"].keys() - {own(entry)}:
            ratios = faster(was, name), faster(entry, name)
            middle = [statistics.median(found) for found in ratios]
            yield (
                f"{entry['name']} {entry['label']}, {name}: {spread(ratios[0], '.2f')} → "
                f"{spread(ratios[1], '.2f')}, {middle[1] / middle[0]:.3f}×"
            )
