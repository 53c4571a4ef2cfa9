"""What a result of `ppo` says, in figures: for a terminal, for Markdown, and against its goals."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.before import timing
from benchmarks.before.ppo_cases import describe, described, what
from benchmarks.before.timing import spread

Case = dict[str, Any]
Entry = dict[str, Any]
Result = dict[str, Any]

PHASES = {
    "generate": "generate",
    "forward_pass": "old and reference scores",
    "rewards_advantages": "rewards, advantages",
    "optimize_step": "update",
    "calc_stats": "statistics",
    "step": "step(), whole",
    "iteration": "iteration, whole",
}
SHORT = ("generate", "step", "iteration")
MEMORY = {"peak": "peak memory", "at_rest": "memory at rest"}


def cases_of(result: Result) -> list[Case]:
    """A result's shapes with their references. Older files have one shape, and from before there
    were several references they mean a copy."""
    if "cases" in result:
        return result["cases"]
    copied = {"reference": "copy", "absent": None, "red": None, "phases": result.get("phases")}
    return [
        {
            "shape": result["shape"],
            "goal": None,
            "references": result.get("references", [copied]),
        }
    ]


def timed(case: Case) -> list[Entry]:
    """A case's references with figures."""
    return [entry for entry in case["references"] if entry["phases"]]


def ratios(phase: dict[str, Any]) -> list[float]:
    """Peer's seconds over fastrl's, pair by pair."""
    return timing.ratios(phase["peer"], phase["fastrl"])


def verdicts(result: Result, case: Case, entry: Entry) -> list[tuple[str, bool]]:
    """The goal of an iteration in words, and whether it is reached; none where there is no goal."""
    goal = case["goal"]
    device = result["machine"].get("accelerator", "cpu")
    if (
        not goal
        or not entry["phases"]
        or entry["reference"] != goal["reference"]
        or not device.lower().startswith(tuple(goal["devices"]))
    ):
        return []
    faster = statistics.median(ratios(entry["phases"]["iteration"]))
    return [(f"≥ {goal['speedup']:g}× {result['peer']}", faster >= goal["speedup"])]


def render_head(result: Result) -> str:
    """The machine, for a terminal."""
    machine = result["machine"]
    where = machine.get("accelerator", f"{machine['cores']} cores, threads: {result['threads']}")
    return f"on {machine['cpu']} ({where}), beside {described(result['peer'])}"


def render(result: Result, case: Case, entry: Entry) -> str:
    """A reference's table for a terminal: medians, and their range in brackets."""
    peer = result["peer"]
    lines = [
        f"{case['shape']['name']}: {describe(case['shape'])}",
        f"reference {entry['reference']}: {what(entry['reference'], case['shape'])}",
    ]
    if not entry["phases"]:
        return "\n".join([*lines, why_none(entry)])
    lines.append(f"{'seconds, median (range)':<26}{'fastrl':>28}{peer:>28}{peer + ' / fastrl':>28}")
    rows = [_cells(entry, name) for name in entry["phases"]] + _memory(entry)
    lines += [
        f"{title:<26} {ours:>27} {theirs:>27} {ratio:>27}" for title, ours, theirs, ratio in rows
    ]
    lines += [apart(entry)] if apart(entry) else []
    lines += [
        f"goal {goal}: {'reached' if reached else 'MISSED'}"
        for goal, reached in verdicts(result, case, entry)
    ]
    return "\n".join(lines)


def short_table(result: Result, where: str) -> str:
    """For each shape three phases and the peak memory with the first reference that has figures,
    the whole iteration with others."""
    parts = []
    for case in cases_of(result):
        rows, phases = [], SHORT
        for entry in case["references"]:
            if not entry["phases"]:
                rows.append(_row(result, case, entry, "iteration"))
                continue
            rows += [_row(result, case, entry, name) for name in phases]
            if phases is SHORT:
                rows += _memory_rows(result, case, entry, ("peak",))
            phases = ("iteration",)
        parts += [caption(result, case, where), "\n".join([*_head(result, case), *rows])]
        parts.append("\n".join([*_legend(case), *_remarks(result, case)]))
    return "\n\n".join(part for part in [*parts, left(result)] if part)


def full_tables(result: Result, where: str) -> str:
    """Every phase with every reference of every shape."""
    parts = []
    for case in cases_of(result):
        parts.append(caption(result, case, where))
        for entry in case["references"]:
            if _several(case):
                parts.append(f"Reference `{entry['reference']}`: {_what(case, entry)}")
            if entry["phases"]:
                rows = [_row(result, case, entry, name, named=False) for name in entry["phases"]]
                rows += _memory_rows(result, case, entry, tuple(MEMORY), named=False)
                parts.append("\n".join([*_head(result, case), *rows]))
        parts.append("\n".join(_remarks(result, case)))
    return "\n\n".join(part for part in [*parts, left(result)] if part)


def caption(result: Result, case: Case, where: str) -> str:
    """What was measured, where, when, and by which command."""
    found = timed(case)
    runs = f"{len(found[0]['phases']['iteration']['fastrl'])} paired runs, " if found else ""
    names = " ".join(entry["reference"] for entry in case["references"])
    asked = "" if names == "copy" else f" --reference {names}"
    return (
        f"One PPO iteration against {described(result['peer'])} on {where}, "
        f"{describe(case['shape'])} ({runs}{result['date']}, commit {result['commit']}; "
        f"`python -m benchmarks ppo --peer {result['peer']}{asked}`):"
    )


def why_none(entry: Entry) -> str:
    """Why a reference has no figures."""
    return f"red: {entry['red']}" if entry["red"] else f"absent: {entry['absent']}"


def apart(entry: Entry) -> str:
    """How far the sides' statistics lie apart where they are not held to a tolerance."""
    if not entry.get("differences"):
        return ""
    each = ", ".join(
        f"{key} {found['difference']:.1e} (of {found['of']:.2g})"
        for key, found in entry["differences"].items()
    )
    return f"Mean |Δ| of two steps' statistics, of the peer's own: {each}."


def left(result: Result) -> str:
    """What there was no time for."""
    return "\n".join(f"- Left: {name}: {why}." for name, why in result.get("left", {}).items())


def _head(result: Result, case: Case) -> list[str]:
    peer = result["peer"]
    head = f"| phase | fastrl [s] | {peer} [s] | {peer} / fastrl |"
    rule = "| --- | --: | --: | --: |"
    return [f"{head} goal |", f"{rule} --- |"] if case["goal"] else [head, rule]


def _row(result: Result, case: Case, entry: Entry, name: str, *, named: bool = True) -> str:
    """A phase's median seconds on both sides and the ratio, or why there are none."""
    if entry["phases"]:
        cells = _cells(entry, name)
    else:
        cells = [PHASES[name], "–", "–", why_none(entry)]
    found = verdicts(result, case, entry) if name == "iteration" else []
    goal = "; ".join(f"{words}: {'reached' if ok else '**missed**'}" for words, ok in found)
    return _line(case, entry, cells, goal, named)


def _memory_rows(
    result: Result, case: Case, entry: Entry, names: tuple[str, ...], *, named: bool = True
) -> list[str]:
    return [_line(case, entry, cells, "", named) for cells in _memory(entry, names)]


def _line(case: Case, entry: Entry, cells: list[str], goal: str, named: bool) -> str:
    title, *rest = cells
    if named and _several(case):
        title += f"; reference `{entry['reference']}`"
    return "| " + " | ".join([title, *rest, *([goal] if case["goal"] else [])]) + " |"


def _cells(entry: Entry, name: str) -> list[str]:
    """A phase's name, both sides' seconds, and the ratio."""
    phase = entry["phases"][name]
    sides = [spread(phase[side], ".3g") for side in ("fastrl", "peer")]
    return [PHASES[name], *sides, spread(ratios(phase), ".2f")]


def _memory(entry: Entry, names: tuple[str, ...] = tuple(MEMORY)) -> list[list[str]]:
    """The same of memory, where the device keeps count of it."""
    rows = []
    for name in names if entry.get("memory") else ():
        found = entry["memory"][name]
        sides = [f"{spread([n / 2**30 for n in found[s]], '.3g')} GiB" for s in ("fastrl", "peer")]
        rows.append([MEMORY[name], *sides, spread(ratios(found), ".2f")])
    return rows


def _remarks(result: Result, case: Case) -> list[str]:
    """How figures came about that are not what they seem."""
    lines = []
    entries = timed(case)
    if any(entry.get("differences") for entry in entries):
        lines.append(
            "- Before it is timed in bf16, every statistic of two steps in fp32 agrees. "
            "Neither side's generate is left to its own precision: the peer's would be fp32."
        )
    for entry in entries:
        if apart(entry):
            which = f"reference `{entry['reference']}`: " if _several(case) else ""
            lines.append(f"- In bf16, {which}{apart(entry)[0].lower()}{apart(entry)[1:]}")
    if any(entry.get("memory") for entry in entries):
        lines.append(
            "- Peak memory: the most that is allocated in an iteration, of weights, the reference, "
            "Adam's state and all else; at rest: the same between two steps, before there was a "
            "rollout. Phases are by each side's own clock"
            + (", and the peer's does not wait for the device" if _is_trl(result) else "")
            + "; generate, step() and iteration by one that does."
        )
    return lines


def _is_trl(result: Result) -> bool:
    return result["peer"].startswith("trl")


def _legend(case: Case) -> list[str]:
    """What each reference means, where there are others than the usual copy."""
    if not _several(case):
        return []
    return [
        f"- Reference `{entry['reference']}`: {what(entry['reference'], case['shape'])}."
        for entry in case["references"]
    ]


def _what(case: Case, entry: Entry) -> str:
    words = what(entry["reference"], case["shape"])
    if not entry["phases"]:
        return f"{words}; {why_none(entry)}."
    return f"{words}; {entry['trained']:,} parameters are trained."


def _several(case: Case) -> bool:
    """Whether there is anything but the usual copy."""
    return [entry["reference"] for entry in case["references"]] != ["copy"]
