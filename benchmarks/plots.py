"""Plots of results: the time that each side takes, and its peak memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.cases import EAGER, OURS, Entry, duration, faster, own, phase_of, size
from benchmarks.results import Result

# Of each library or way, in every plot; all are legible on white and on black.
COLOURS = {
    "fastrl": "#2f81d6",
    "trl": "#cf4f86",
    "eager": "#8b949e",
    "torch.compile": "#e08a2b",
    "sdpa": "#b0733f",
    "product": "#6e7f57",
    "liger-kernel": "#9a6fd0",
    "cut-cross-entropy": "#1f9e94",
    "torchrl": "#5da13c",
    "vllm": "#bd9a00",
    "generate": "#8b949e",
    "continuous batching": "#b0733f",
}
STYLE = """svg { color: #1f2328; font: 11px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { color: #d8dee6; } }
text { fill: currentColor; } .bold { font-weight: 600; } .faint { opacity: 0.65; }
.grid { stroke: currentColor; opacity: 0.15; }"""
WIDTH, LABELS, VALUES, ROW = 720, 176, 92, 16
_COMPARABLE = 40  # lengths differ by no more where bars can be compared by eye


class Case(NamedTuple):
    """A group of rows."""

    title: str
    entry: Entry
    sides: list[str]


class Row(NamedTuple):
    case: Case
    side: str
    top: float

    def __hash__(self) -> int:
        return hash(self.top)


class Panel(NamedTuple):
    """A column of a plot.

    Attributes:
        values: of a side of a case; None where there is none.
        words: a value with its unit.
        steps: where a logarithmic axis has ticks, and the units of one from 0.
        note: what is written behind a value.
    """

    title: str
    values: Callable[[Case, str], float | None]
    words: Callable[[float], str]
    steps: tuple[float, ...]
    note: Callable[[Case, str], str]


def plots(
    folder: Path, results: list[Result], titles: dict[str, str], headlines: Iterable[str]
) -> list[tuple[Path, str]]:
    """An SVG of the headlines and one of each benchmark, the same from the same figures, each with
    its description; files that are there and no longer made go."""
    found = {
        benchmark: [
            entry
            for result in results
            if result["benchmark"] == benchmark
            for entry in result["entries"]
            if entry["main"] and not entry["red"] and len(entry["sides"]) > 1
        ]
        for benchmark in titles
    }
    shown = {
        name: [Case(f"{e['name']}, {e['label']}", e, list(e["sides"])) for e in entries]
        for name, entries in found.items()
    }
    first = [(titles[name], found[name][0]) for name in headlines if found.get(name)]
    shown["headlines"] = [
        Case(f"{title}: {e['name']}, {e['label']}", e, list(e["sides"])[:2]) for title, e in first
    ]
    made = []
    for name, cases in shown.items():
        if cases:
            path = folder / f"{name}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            sides = list(dict.fromkeys(side for case in cases for side in case.sides))
            said = f"{titles.get(name, 'fastrl beside others')}, on {folder.name}: time and peak "
            said += f"memory of {', '.join(sides[:-1])} and {sides[-1]}"
            path.write_text(plot(cases, said), encoding="utf-8")
            made.append((path, said))
    for old in folder.glob("*.svg"):
        if old not in dict(made):
            old.unlink()
    return made


def plot(cases: list[Case], said: str) -> str:
    """The SVG: a row for each side of each case, a column for the time and one for the memory."""
    panels = [Panel("time", _seconds, duration, tuple(10.0**i for i in range(-6, 4)), _speedup)]
    if any(_memory(case, side) for case in cases for side in case.sides):
        steps = tuple(2.0**i for i in range(0, 41, 5))
        panels.append(Panel("peak memory", _memory, size, steps, lambda case, side: ""))
    drawn, rows, y = [], [], 24.0
    for case in cases:
        drawn.append(text(0, y + 12, case.title, "bold"))
        for i, side in enumerate(case.sides, start=1):
            rows.append(Row(case, side, y + i * ROW + 2))
            drawn.append(text(LABELS - 8, rows[-1].top + 12, side, anchor="end"))
        y += (len(case.sides) + 1) * ROW + 10
    wide = (WIDTH - LABELS) / len(panels)
    for i, panel in enumerate(panels):
        drawn += _column(panel, rows, LABELS + i * wide, wide - VALUES - 20, y)
    base = own(cases[0].entry)
    meant = "speed-up of fastrl" if base == OURS else f"speed-up over {base}"
    drawn.append(text(0, y + 14, f"×: {meant}", "faint"))
    return document(y + 20, said, drawn)


def _column(panel: Panel, rows: list[Row], left: float, wide: float, bottom: float) -> list[str]:
    """Bars from 0 where their lengths can be compared, dots on a logarithmic axis elsewhere."""
    found = {row: v for row in rows if (v := panel.values(row.case, row.side)) is not None}
    low, high = min(found.values()), max(found.values())
    bars = high <= _COMPARABLE * low
    if bars:
        unit = max(step for step in panel.steps if step <= high)
        step = next(unit * k for k in (0.5, 1, 2, 4, 5, 10, 20) if unit * k * 3.5 >= high)
        ticks = [step * i for i in range(int(high / step) + 1)]
    else:  # from the one below all to the one above
        ticks = [x for x in panel.steps if x * panel.steps[1] > low * panel.steps[0]]
        ticks = ticks[: sum(x < high for x in ticks) + 1]

    def place(value: float) -> float:
        share = value / high if bars else math.log(value / ticks[0], ticks[-1] / ticks[0])
        return left + wide * share

    drawn = [text(left, 12, f"{panel.title}{'' if bars else ' (log scale)'}", "bold")]
    for tick in ticks[:: math.ceil(len(ticks) * 38 / wide)]:
        x = place(tick)
        lines = "".join(f"M{x:.1f} {row.top:g}v{ROW}" for row in rows)
        drawn.append(f'<path class="grid" d="{lines}"/>')
        drawn.append(text(x, bottom + 14, panel.words(tick) if tick else "0", "faint", "middle"))
    for row, value in found.items():
        x, colour = place(value), colour_of(row.case.entry, row.side)
        drawn.append(
            f'<path d="M{left:g} {row.top + 3:g}H{x:.1f}v10H{left:g}z" fill="{colour}"/>'
            if bars
            else f'<circle cx="{x:.1f}" cy="{row.top + 8:g}" r="4.5" fill="{colour}"/>'
        )
        words = panel.words(value) + panel.note(row.case, row.side)
        drawn.append(text(x + 8, row.top + 12, words))
    return drawn


def colour_of(entry: Entry, side: str) -> str:
    """The colour of a side's library, whose name it begins with; ways beside a baseline are
    fastrl's own."""
    name = OURS if entry["baseline"] else side
    return next((c for key, c in COLOURS.items() if name.startswith(key)), COLOURS[EAGER])


def _seconds(case: Case, side: str) -> float:
    return statistics.median(phase_of(case.entry["sides"][side]))


def _memory(case: Case, side: str) -> float | None:
    return case.entry["sides"][side]["memory"].get("peak")


def _speedup(case: Case, side: str) -> str:
    if side == own(case.entry):
        return ""
    ratio = statistics.median(faster(case.entry, side))
    return f", {ratio:.0f}×" if ratio >= 1000 else f", {ratio:.3g}×"


def document(high: float, said: str, drawn: list[str]) -> str:
    """An SVG of the width of all, whose text has the colour that the reader's scheme asks for."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high:g}" role="img">'
    parts = [head, f"<title>{escape(said)}</title>", f"<style>{STYLE}</style>", *drawn, "</svg>"]
    return "\n".join(parts) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text from, to or around a point, of a class of the style."""
    named = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:g}"{named}{placed}>{escape(words)}</text>'
