"""Markdown for the results of `ops` and `gpu`."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.before import timing
from benchmarks.before.launches import in_words
from benchmarks.before.measure import (
    EAGER,
    OURS,
    duration,
    share_of_roofline,
    size,
    speedups,
    spread_of_durations,
    verdicts,
)
from benchmarks.before.sanitizer import TOOLS

Entry = dict[str, Any]
Result = dict[str, Any]


def device_of(result: Result) -> str:
    """As goals name it: the accelerator's name, or `cpu`."""
    return result["machine"].get("accelerator", "cpu")


def timed(result: Result) -> list[Entry]:
    """The cases with figures."""
    found = result.get("cases", ())
    return [entry for entry in found if "op" in entry and not entry["red"]]  # PPO's are none


def short_table(results: list[Result]) -> str:
    """A row for each main case of a device that has a goal: times, memory, and the goal."""
    rows = [
        "| op, forward + backward | fastrl | eager PyTorch | faster by | memory | eager's | goal |",
        "| --- | --: | --: | --: | --: | --: | --- |",
    ]
    for result in results:
        for entry in timed(result):
            goals = verdicts(entry, device_of(result))
            if not goals:
                continue
            ours, eager = (entry["implementations"].get(name) for name in (OURS, EAGER))
            cells = [f"`{entry['op']}` {entry['label']}", _middle(ours)]
            cells += [_middle(eager), _faster(entry, EAGER)] if eager else ["–", "–"]
            cells += [_memory(ours), _memory(eager) if eager else "–", _goals(goals)]
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def full_table(result: Result) -> str:
    """Every case of a result, and below it who was absent, red or skipped."""
    on_gpu = any(entry["implementations"][OURS].get("launches") for entry in timed(result))
    rows = [
        "| case | fastrl | whole call | of the roofline | memory | eager's | error | faster than |"
        f"{' launches |' if on_gpu else ''} goal |",
        f"| --- | --: | --: | --: | --: | --: | --: | --- |{' --: |' if on_gpu else ''} --- |",
    ]
    for entry in timed(result):
        taken = entry["implementations"]
        ours = taken[OURS]
        peers = ", ".join(f"{name} {_faster(entry, name)}" for name in taken if name != OURS)
        eager = _memory(taken[EAGER]) if EAGER in taken else "–"
        name = f"`{entry['op']}` " if result["benchmark"] == "gpu" else ""
        cells = [
            f"{name}{entry['label']}",
            spread_of_durations(ours["seconds"]),
            duration(statistics.median(ours["call_seconds"])),
            f"{share_of_roofline(entry):.0%}",
            _memory(ours),
            eager,
            f"{ours['error']:.2f}",
            peers,
            *([in_words(ours["launches"]) if ours.get("launches") else "–"] if on_gpu else []),
            _goals(verdicts(entry, device_of(result))),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join([*rows, "", *notes(result)])


def notes(result: Result) -> list[str]:
    """Lines on what a table does not show: what counts as work, notes, absentees, red gates."""
    counted, remarks, absent, lines = {}, {}, {}, []
    for entry in result["cases"]:
        if entry["red"]:
            lines.append(f"- No figures for {entry['op']} {entry['label']}: {entry['red']}")
            continue
        counted[entry["work"]["what"]] = None
        for name, taken in entry["implementations"].items():
            if taken["note"]:
                remarks.setdefault(f"{name}: {taken['note']}")
        for name, reason in entry["absent"].items():
            absent.setdefault(f"{name}: {reason}")
    if counted:
        lines.append(f"- Least work: {'; '.join(counted)}.")
    lines += [f"- {remark}." for remark in remarks]
    lines += [f"- Absent, {reason}." for reason in absent]
    skipped: dict[str, list[str]] = {}
    for case in result.get("skipped", ()):
        skipped.setdefault(case["reason"].split(" about ")[0], []).append(case["label"])
    lines += [f"- Skipped, {why} too much: {'; '.join(labels)}." for why, labels in skipped.items()]
    return lines


def gates_section(result: Result) -> str:
    """How many gates were green, which were not, and what there was no time for."""
    gates = result["gates"]
    green = sum(not gate["wrong"] for gate in gates)
    ops = ", ".join(dict.fromkeys(f"`{gate['op']}`" for gate in gates))
    lines = [f"{green} of {len(gates)} gates are green, on {ops}."]
    lines += [
        f"- Red: `{gate['op']}`, {gate['check']}: {gate['wrong']}"
        for gate in gates
        if gate["wrong"]
    ]
    lines += [
        f"- compute-sanitizer, {found['tool']} ({TOOLS[found['tool']]}): {found['errors']} errors "
        "in one pass of every kernel."
        for found in result.get("sanitizer", ())
    ]
    for what in ("failed", "left"):
        lines += [f"- {what.capitalize()}: {k}: {why}" for k, why in result.get(what, {}).items()]
    return "\n".join(lines)


def bytes_table(result: Result) -> str:
    """Counted bytes beside the least; empty where nothing was counted."""
    least = {(e["op"], e["label"]): e["work"]["bytes"] for e in timed(result)}
    rows = []
    for counted in result["bytes"]:
        key = (counted["op"], counted["label"])
        if key in least:
            moved = counted["read"] + counted["written"]
            rows.append(
                f"| `{key[0]}` {key[1]} | {counted['kernels']} | {size(counted['read'])} "
                f"| {size(counted['written'])} | {moved / least[key]:.3f} |"
            )
    if not rows:
        return ""
    head = (
        "| case | kernels | read | written | of the least bytes |\n| --- | --: | --: | --: | --: |"
    )
    return "\n".join([head, *rows])


def roofline_line(result: Result) -> str:
    """What the machine can do, and on what versions."""
    roof = result["roofline"]
    gemm = ", ".join(f"{flops / 1e12:.3g} in {dtype}" for dtype, flops in roof["gemm"].items())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['date']}, commit {result['commit']}, {result['threads']} threads; copies "
        f"{roof['copy'] / 1e9:.3g} GB/s, matrix products [TFLOP/s] {gemm}; {versions}."
    )


def _middle(taken: dict[str, Any]) -> str:
    return duration(statistics.median(taken["seconds"]))


def _memory(taken: dict[str, Any]) -> str:
    return size(taken["memory"]["peak"])


def _faster(entry: Entry, name: str) -> str:
    return timing.spread(speedups(entry, name), ".2f")


def _goals(goals: list[tuple[str, bool]]) -> str:
    return "; ".join(f"{goal}: {'reached' if reached else '**missed**'}" for goal, reached in goals)
