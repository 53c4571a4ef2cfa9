"""Markdown for the results of `ppo`: a PPO iteration, for each way of keeping the reference."""

from __future__ import annotations

from typing import Any

from benchmarks import ppo
from benchmarks.timing import spread

Entry = dict[str, Any]
Result = dict[str, Any]

SHORT = ("generate", "step", "iteration")


def short_table(result: Result, where: str) -> str:
    """Three phases with the first reference that has figures, the whole iteration with others."""
    rows, phases = [], SHORT
    for entry in ppo.entries(result):
        if entry["phases"]:
            rows += [_row(result, entry, name) for name in phases]
            phases = ("iteration",)
        else:
            rows.append(_row(result, entry, "iteration"))
    return "\n".join(
        [caption(result, where), "", *_head(result), *rows, "", *_legend(result)]
    ).rstrip()


def full_tables(result: Result, where: str) -> str:
    """Every phase with every reference."""
    parts = [caption(result, where)]
    for entry in ppo.entries(result):
        if _several(result):
            parts.append(f"Reference `{entry['reference']}`: {_what(entry)}")
        if entry["phases"]:
            parts.append("\n".join([*_head(result), *_rows(result, entry)]))
    return "\n\n".join(parts)


def caption(result: Result, where: str) -> str:
    """What was measured, where, when, and by which command."""
    found = ppo.timed(result)
    runs = f"{len(found[0]['phases']['iteration']['fastrl'])} paired runs, " if found else ""
    names = " ".join(entry["reference"] for entry in ppo.entries(result))
    asked = "" if names == "copy" else f" --reference {names}"
    return (
        f"One PPO iteration against {result['peer']} on {where}, "
        f"{ppo.describe(result['shape'])} ({runs}{result['date']}, commit {result['commit']}; "
        f"`python -m benchmarks ppo --peer {result['peer']}{asked}`):"
    )


def _head(result: Result) -> list[str]:
    peer = result["peer"]
    return [f"| phase | fastrl [s] | {peer} [s] | {peer} / fastrl |", "| --- | --: | --: | --: |"]


def _rows(result: Result, entry: Entry) -> list[str]:
    return [_row(result, entry, name, named=False) for name in entry["phases"]]


def _row(result: Result, entry: Entry, name: str, *, named: bool = True) -> str:
    """A phase's median seconds on both sides and the ratio, or why there are none."""
    title = ppo.PHASES[name]
    if named and _several(result):
        title += f"; reference `{entry['reference']}`"
    if not entry["phases"]:
        return f"| {title} | – | – | {ppo.why_none(entry)} |"
    phase = entry["phases"][name]
    return (
        f"| {title} | {spread(phase['fastrl'], '.3g')} "
        f"| {spread(phase['peer'], '.3g')} | {spread(ppo.ratios(phase), '.2f')} |"
    )


def _legend(result: Result) -> list[str]:
    """What each reference means, where there are others than the usual copy."""
    if not _several(result):
        return []
    return [
        f"- Reference `{entry['reference']}`: {ppo.REFERENCES[entry['reference']]}."
        for entry in ppo.entries(result)
    ]


def _what(entry: Entry) -> str:
    what = ppo.REFERENCES[entry["reference"]]
    if not entry["phases"]:
        return f"{what}; {ppo.why_none(entry)}."
    trained = entry["trained"]
    return f"{what}; {trained:,} parameters are trained."


def _several(result: Result) -> bool:
    """Whether there is anything but the usual copy."""
    return [entry["reference"] for entry in ppo.entries(result)] != ["copy"]
