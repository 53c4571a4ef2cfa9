"""What a rollout's entry says, in figures: for a terminal, for Markdown, and against its goals."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.before import timing
from benchmarks.before.measure import duration, size, spread_of_durations
from benchmarks.before.rollout_sides import GENERATE, OURS

Entry = dict[str, Any]
Result = dict[str, Any]


def timed(result: Result) -> list[Entry]:
    """The entries with figures."""
    return [entry for entry in result["rollouts"] if not entry["red"]]


def tokens_per_second(entry: Entry, name: str) -> list[float]:
    """Useful tokens per second, round by round."""
    return [entry["useful"] / seconds for seconds in entry["sides"][name]["seconds"]]


def speedups(entry: Entry, name: str) -> list[float]:
    """A side's seconds over the engine's, round by round."""
    sides = entry["sides"]
    return timing.ratios(sides[name]["seconds"], sides[OURS]["seconds"])


def peers_of(entry: Entry) -> list[str]:
    """All sides but the engine."""
    return [name for name in entry["sides"] if name != OURS]


def step_seconds(entry: Entry, name: str) -> list[float]:
    """Seconds of a decode step, the mean of each round."""
    taken = entry["sides"][name]
    return [seconds / taken["steps"] for seconds in taken["decode"]]


def floor_bytes(entry: Entry, name: str) -> int:
    """That a round's decode steps read at least: all weights in each, live keys and values."""
    return entry["weight_bytes"] * entry["sides"][name]["steps"] + entry["kv_bytes"]


def floor_shares(entry: Entry, name: str) -> list[float]:
    """The time of a copy that moves as many bytes over the time of decoding, round by round."""
    least = floor_bytes(entry, name)
    decode = entry["sides"][name]["decode"]
    return [least / copy / taken for copy, taken in zip(entry["copy"], decode, strict=True)]


def verdicts(entry: Entry, device_name: str) -> list[tuple[str, bool]]:
    """Each part of the goal in words, and whether it is reached; none where there is no goal."""
    goal = entry["goal"]
    if not goal or entry["red"] or not device_name.lower().startswith(tuple(goal["devices"])):
        return []
    found = []
    if goal["speedup"] is not None and GENERATE in entry["sides"]:
        faster = statistics.median(speedups(entry, GENERATE))
        found.append((f"≥ {goal['speedup']:g}× {GENERATE}", faster >= goal["speedup"]))
    if goal["step_seconds"] is not None:
        step = statistics.median(step_seconds(entry, OURS))
        words = f"≤ {duration(goal['step_seconds'])} per step"
        found.append((words, step <= goal["step_seconds"]))
    if goal["floor_share"] is not None:
        share = statistics.median(floor_shares(entry, OURS))
        found.append((f"≥ {goal['floor_share']:.0%} of the floor", share >= goal["floor_share"]))
    if goal["utilisation"] is not None:
        used = entry["sides"][OURS]["utilisation"]
        found.append((f"slots used ≥ {goal['utilisation']:.0%}", used >= goal["utilisation"]))
    return found


def render(entry: Entry, device_name: str) -> str:
    """A case's lines for a terminal."""
    head = f"{entry['label']}\n  {entry['lengths']}"
    if entry["red"]:
        return f"{head}\n  RED, no figures: {entry['red']}"
    lines = [
        f"{head}: {entry['useful']} useful tokens",
        f"  {'':<22}{'seconds':>28}{'useful tokens/s':>28}{'fastrl faster by':>22}",
    ]
    for name, taken in entry["sides"].items():
        faster = timing.spread(speedups(entry, name), ".2f") if name != OURS else ""
        lines.append(
            f"  {name:<22}{spread_of_durations(taken['seconds']):>28}"
            f"{timing.spread(tokens_per_second(entry, name), '.0f'):>28}{faster:>22}"
            f"  {taken['note']}"
        )
    lines += [f"  {line}" for line in details(entry)]
    for goal, reached in verdicts(entry, device_name):
        lines.append(f"  goal {goal}: {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def details(entry: Entry) -> list[str]:
    """Lines on what the engine did, on its floor, on its audit, and on who is absent."""
    lines = []
    for name, taken in entry["sides"].items():
        if "steps" not in taken:
            continue
        steps = taken["steps"]
        lines.append(
            f"{name}: prefill {duration(statistics.median(taken['prefill']))}, decode "
            f"{duration(statistics.median(taken['decode']))} in {steps} steps of "
            f"{spread_of_durations(step_seconds(entry, name))}; slots used "
            f"{taken['utilisation']:.1%}; {statistics.median(floor_shares(entry, name)):.0%} of "
            f"the floor"
        )
        least = floor_bytes(entry, name)
        lines.append(
            f"{name}, floor: {size(least / steps)} per step ({size(entry['weight_bytes'])} of "
            f"weights, {size(entry['kv_bytes'] / steps)} of live keys and values) at "
            f"{statistics.median(entry['copy']) / 1e9:.3g} GB/s, a copy's"
        )
        audit = taken["audit"]
        lines.append(
            f"{name}, log-probs against a plain forward over {audit['tokens']} tokens: mean |Δ| "
            f"{audit['mean']:.1e}, largest {audit['largest']:.1e}"
        )
        if taken["graphs"]:
            first, later = taken["graphs"]["first"], taken["graphs"]["later"]
            lines.append(
                f"{name}, graphs: {first['captures']:.0f} captures in the uncounted first rollout "
                f"took {duration(first['capture_seconds'])}; {later['captures']:.0f} in the "
                f"counted ones took {duration(later['capture_seconds'])}, for "
                f"{later['replays']:.0f} replays"
            )
    return [*lines, *(f"absent, {name}: {reason}" for name, reason in entry["absent"].items())]


def short_table(result: Result) -> str:
    """A row for each main case: tokens per second, the ratio, slots used, and the goal."""
    rows = [
        "| rollout | fastrl, useful tokens/s | generate's | faster by | slots used | goal |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for entry in timed(result):
        if not entry["case"]["main"]:
            continue
        cells = [entry["label"], _rate(entry, OURS)]
        if GENERATE in entry["sides"]:
            cells += [_rate(entry, GENERATE), timing.spread(speedups(entry, GENERATE), ".2f")]
        else:
            cells += ["–", "–"]
        cells += [f"{entry['sides'][OURS]['utilisation']:.1%}", _goals(result, entry)]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def full_table(result: Result) -> str:
    """Every side of every case, and below it what each case's engine did."""
    rows = [
        "| case | side | seconds | useful tokens/s | fastrl faster by | goal |",
        "| --- | --- | --: | --: | --: | --- |",
    ]
    remarks = []
    for entry in result["rollouts"]:
        if entry["red"]:
            remarks.append(f"- No figures for {entry['label']}: {entry['red']}")
            continue
        for name, taken in entry["sides"].items():
            ours = name == OURS
            cells = [
                entry["label"] if ours else "",
                name,
                spread_of_durations(taken["seconds"]),
                timing.spread(tokens_per_second(entry, name), ".0f"),
                "" if ours else timing.spread(speedups(entry, name), ".2f"),
                _goals(result, entry) if ours else "",
            ]
            rows.append("| " + " | ".join(cells) + " |")
        remarks.append(f"- {entry['label']}: {entry['lengths']}, {entry['useful']} useful tokens.")
        notes = [f"{n}: {taken['note']}" for n, taken in entry["sides"].items() if taken["note"]]
        remarks += [f"  - {line}." for line in (*notes, *details(entry))]
    if len(rows) == 2:
        rows = []
    return "\n".join([*rows, "", *remarks])


def versions_line(result: Result) -> str:
    """When, of which commit, and on what versions."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['date']}, commit {result['commit']}, {result['threads']} threads; sampling at "
        f"temperature 1, no end-of-sequence token; {versions}."
    )


def _rate(entry: Entry, name: str) -> str:
    return f"{statistics.median(tokens_per_second(entry, name)):.0f}"


def _goals(result: Result, entry: Entry) -> str:
    name = result["machine"].get("accelerator", "cpu")
    found = verdicts(entry, name)
    return "; ".join(f"{goal}: {'reached' if ok else '**missed**'}" for goal, ok in found)
