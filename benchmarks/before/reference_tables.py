"""What an entry on references says, in figures: for a terminal, for Markdown, for its goal."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.before import timing
from benchmarks.before.measure import size, spread_of_durations
from benchmarks.before.reference_cases import CHECKPOINTING, COPY, HALF

Entry = dict[str, Any]
Result = dict[str, Any]

PHASES = ("scores", "update")
COLUMNS = (
    "scores", "faster by", "update", "faster by", "weights", "Adam's state", "boundaries",
    "peak of an update", "largest |Δ|",
)  # fmt: skip


def timed(result: Result) -> list[Entry]:
    """The entries with figures."""
    return [entry for entry in result["references"] if not entry["red"]]


def speedups(entry: Entry, name: str, phase: str, base: str = COPY) -> list[float]:
    """Seconds of `base` over a side's, round by round."""
    return timing.ratios(entry["sides"][base][phase], entry["sides"][name][phase])


def verdicts(entry: Entry, device_name: str) -> list[tuple[str, bool]]:
    """The goal in words, and whether it is reached; none where there is no goal."""
    goal = entry["goal"]
    if not goal or entry["red"] or not device_name.lower().startswith(tuple(goal["devices"])):
        return []
    faster = statistics.median(speedups(entry, goal["side"], "update"))
    words = f"{goal['side']}, update ≥ {goal['speedup']:g}× {COPY}"
    return [(words, faster >= goal["speedup"])]


def render(entry: Entry, device_name: str) -> str:
    """A case's lines for a terminal."""
    head = f"{entry['label']}\n  {entry['work']}"
    if entry["red"]:
        return f"{head}\n  RED, no figures: {entry['red']}"
    widths = (26, 18, 26, 18, 11, 14, 12, 19, 13)
    line = "".join(f"{c:>{w}}" for c, w in zip(COLUMNS, widths, strict=True))
    lines = [head, f"  {'':<25}{line}"]
    for name in entry["sides"]:
        cells = figures(entry, name)
        lines.append(
            f"  {name:<25}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        )
    lines += [f"  {line}" for line in details(entry)]
    for goal, reached in verdicts(entry, device_name):
        lines.append(f"  goal {goal}: {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def figures(entry: Entry, name: str) -> list[str]:
    """A side's cells, in the order of `COLUMNS`."""
    side = entry["sides"][name]
    cells = []
    for phase in PHASES:
        cells.append(spread_of_durations(side[phase]))
        ours = speedups(entry, name, phase)
        cells.append("" if name == COPY else timing.spread(ours, ".2f"))
    weights = size(side["weights"])
    if side["weights_on_host"]:
        weights += f" + {size(side['weights_on_host'])} on the host"
    boundaries = size(side["boundaries"]) if side["boundaries"] else "–"
    difference = "–" if side["difference"] is None else f"{side['difference']:.1e}"
    return [*cells, weights, size(side["optimizer"]), boundaries, size(side["peak"]), difference]


def details(entry: Entry) -> list[str]:
    """Lines on what sides are, on trunks under checkpointing, and on who is absent."""
    lines = [f"{name}: {side['note']}" for name, side in entry["sides"].items() if side["note"]]
    lines = [line for line in lines if CHECKPOINTING not in line]
    base = COPY + CHECKPOINTING
    for name in entry["sides"]:
        if name.endswith(CHECKPOINTING) and name != base:
            faster = timing.spread(speedups(entry, name, "update", base), ".2f")
            lines.append(f"{name}: update faster than {base} by {faster}")
    return [*lines, *(f"absent, {name}: {reason}" for name, reason in entry["absent"].items())]


def short_table(result: Result) -> str:
    """A row for each main case: the copy, and a trunk of half the layers."""
    rows = [
        f"| reference: {HALF} beside a copy | scores faster by | update faster by | weights "
        "| copy's | peak of an update | copy's | goal |",
        "| --- | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for entry in timed(result):
        if not entry["case"]["main"]:
            continue
        ours, copy = entry["sides"][HALF], entry["sides"][COPY]
        cells = [entry["label"]]
        cells += [timing.spread(speedups(entry, HALF, p), ".2f") for p in PHASES]
        cells += [size(side[key]) for key in ("weights", "peak") for side in (ours, copy)]
        rows.append("| " + " | ".join([*cells, _goals(result, entry)]) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def full_table(result: Result) -> str:
    """Every side of every case, and below it what they are."""
    rows = [
        "| case | reference | " + " | ".join(COLUMNS) + " | goal |",
        "| --- | --- | " + "--: | " * len(COLUMNS) + "--- |",
    ]
    remarks = []
    for entry in result["references"]:
        if entry["red"]:
            remarks.append(f"- No figures for {entry['label']}: {entry['red']}")
            continue
        for name in entry["sides"]:
            label, goal = (entry["label"], _goals(result, entry)) if name == COPY else ("", "")
            rows.append("| " + " | ".join([label, name, *figures(entry, name), goal]) + " |")
        remarks.append(f"- {entry['label']}: {entry['work']}.")
        remarks += [f"  - {line}." for line in details(entry)]
    if len(rows) == 2:
        rows = []
    return "\n".join([*rows, "", *remarks])


def versions_line(result: Result) -> str:
    """When, of which commit, on what versions, and what is counted."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['date']}, commit {result['commit']}, {result['threads']} threads; {versions}. "
        "Faster than a copy. *Scores*: old and reference log-probs of a batch, and a trunk's pass "
        "over it. *Weights* of policy and reference, each storage counted once. *Boundaries*: what "
        "a trunk made of a batch. *Peak of an update*: activations and gradients, beyond weights, "
        "Adam's state and boundaries. *|Δ|* of reference log-probs in fp32, once the policy has "
        "moved, against a separate full copy's."
    )


def _goals(result: Result, entry: Entry) -> str:
    name = result["machine"].get("accelerator", "cpu")
    found = verdicts(entry, name)
    return "; ".join(f"{goal}: {'reached' if ok else '**missed**'}" for goal, ok in found)
