"""Plots of curves: panels, two in a row, with what their colours mean above them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.plots import text

LEFT, TOP, WIDE, HIGH, NEXT, BELOW = 40, 44, 296, 170, 372, 236


class Line(NamedTuple):
    """A curve of a panel."""

    colour: str
    points: list[tuple[float, float]]


class Panel(NamedTuple):
    """What a panel shows, above the unit of its horizontal axis."""

    title: str
    unit: str
    lines: list[Line]
    logarithmic: bool = False


def grid(panels: Sequence[Panel]) -> tuple[list[str], float]:
    """The panels as elements of an SVG, and its height."""
    drawn = []
    for i, panel in enumerate(panels):
        drawn += _panel(LEFT + i % 2 * NEXT, TOP + i // 2 * BELOW, *panel)
    return drawn, TOP + math.ceil(len(panels) / 2) * BELOW


def legend(colours: Mapping[str, str]) -> list[str]:
    """Words for colours, in a line above the panels."""
    drawn, x = [], LEFT
    for words, colour in colours.items():
        drawn.append(f'<circle cx="{x + 4}" cy="8" r="4.5" fill="{colour}"/>')
        drawn.append(text(x + 14, 12, words))
        x += 190
    return drawn


def spread(values: Sequence[float], digits: str) -> str:
    """The mean, and the least and the most."""
    low, high = (format(x, digits) for x in (min(values), max(values)))
    return f"{statistics.mean(values):{digits}} ({low} to {high})"


def _panel(
    left: float, top: float, title: str, unit: str, lines: list[Line], logarithmic: bool
) -> list[str]:
    scale = math.log10 if logarithmic else float
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    wide, low, high = max(xs), scale(min(ys)), scale(max(ys))
    if logarithmic:
        ticks = [x * 10.0**e for e in range(-4, 4) for x in (1, 2, 5)]
        inside = [x for x in ticks if low <= scale(x) <= high]
    else:
        step = 10 ** math.floor(math.log10(max(high - low, 1e-9)))
        step = step / 5 if high - low < 2 * step else step / 2
        low, high = step * math.floor(low / step), step * math.floor(high / step + 1)
        inside = [low + step * i for i in range(round((high - low) / step) + 1)]

    def at(x: float, y: float) -> tuple[float, float]:
        return left + WIDE * x / wide, top + HIGH * (high - scale(y)) / (high - low)

    drawn = [text(left, top - 12, title, "bold")]
    for value in inside:
        y = at(0, value)[1]
        drawn.append(f'<path class="grid" d="M{left} {y:.1f}h{WIDE}"/>')
        drawn.append(text(left - 6, y + 4, f"{value:.4g}", "faint", "end"))
    for i in range(5):
        x = wide * i / 4
        drawn.append(text(at(x, ys[0])[0], top + HIGH + 16, f"{x:.0f}", "faint", "middle"))
    drawn.append(text(left + WIDE / 2, top + HIGH + 30, unit, "faint", "middle"))
    for line in lines:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in line.points))
        style = f'fill="none" stroke="{line.colour}" stroke-width="1.5"'
        drawn.append(f'<path d="M{path}" {style}/>')
    return drawn
