"""The figures of `python -m benchmarks distilled`: a plot, and tables in `docs/distillation.md`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.markdown import table
from benchmarks.plots import COLOURS, document, text

NAME, START = "distilled", "start"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"
ARM_COLOURS = {START: COLOURS["eager"], "distillation": COLOURS["fastrl"], "SFT": COLOURS["trl"]}
ARM_COLOURS |= {"no teacher": COLOURS["torch.compile"]}
LEARNED = {"distillation": "; sums that are learned", "SFT": "; sums held out"}
LEFT, TOP, WIDE, HIGH, NEXT, BELOW = 40, 44, 296, 170, 372, 236


def write(folder: Path, docs: Path) -> None:
    """Writes `plots/distilled.svg` and the figures of `distillation.md` by the newest result file,
    if there is one."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*/*-{NAME}.json"))]
    if not found:
        return
    newest = max(found, key=lambda result: (result["date"], result["time"]))
    (docs / "plots" / f"{NAME}.svg").write_text(curves(newest), encoding="utf-8")
    page = docs / "distillation.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n{figures(newest)}\n{END}{after}", encoding="utf-8")


def figures(result: dict[str, Any]) -> str:
    """The tables: means over the seeds, and the least and the most of them."""
    seeds, arms = result["teacher"], []
    for name in result["rates"]:
        first, last = ([seed[name][i] for seed in seeds] for i in (0, -1))
        fell = [1 - y["kl"] / x["kl"] for x, y in zip(first, last, strict=True)]
        cells = [_spread([row["kl"] for row in last], ".3f"), _spread(fell, ".0%")]
        cells += [_spread([row[x] for row in last], digits) for x, digits in _BESIDE]
        arms.append([f"{name}, {result['rates'][name]:g}", *cells])
    first = [seed[START][-1] for seed in seeds]
    before = [_spread([row["kl"] for row in first], ".3f"), ""]
    before += [_spread([row[x] for row in first], digits) for x, digits in _BESIDE]
    arms.insert(0, ["before", *before])
    head = ("learned by, at a learning rate of", "KL [nats per response]", "fallen by")
    parts = [table((*head, "reward", "tokens"), arms)]
    rows = [
        [str(i), *(f"{row[x]:.2f}" for x in ("learned", "held_out") for row in (rows[0], rows[-1]))]
        for i, rows in enumerate(result["hints"])
    ]
    head = ("seed", "learned sums, before", "after", "held out, before", "after")
    parts.append(table(head, rows))
    said = f"{result['machine']['cpu']}, one thread, {result['seconds']['arm']:g} seconds of the "
    said += f"processor for each arm; means of {len(seeds)} seeds, and their range."
    return "\n\n".join([parts[0], said, parts[1]])


_BESIDE = ("reward", ".2f"), ("tokens", ".1f")


def _spread(values: list[float], digits: str) -> str:
    low, high = (format(x, digits) for x in (min(values), max(values)))
    return f"{statistics.mean(values):{digits}} ({low} to {high})"


def curves(result: dict[str, Any]) -> str:
    """The SVG: KL of the SFT that all begin with, KL and reward of the arms, answers with hints."""
    seeds, arms = result["teacher"], list(result["rates"])

    def lines(names: Sequence[str], x: str, y: str) -> Iterator[Line]:
        for name in names:
            for seed in seeds:
                rows = seed[name][1:] if name == START else seed[name]  # new weights: no samples
                yield Line(ARM_COLOURS[name], [(row[x], row[y]) for row in rows])

    hints = [
        Line(ARM_COLOURS[colour], [(row["step"], row[name]) for row in rows])
        for name, colour in (("learned", "distillation"), ("held_out", "SFT"))
        for rows in result["hints"]
    ]
    kl = "KL(student‖teacher), nats per response"
    panels = (
        ("SFT from new weights: " + kl, "seconds", list(lines([START], "seconds", "kl")), True),
        ("from there: " + kl, "seconds", list(lines(arms, "seconds", "kl")), True),
        ("reward", "seconds", list(lines(arms, "seconds", "reward")), False),
        ("right answers, learned from hints", "step", hints, False),
    )
    drawn = []
    for i, (title, unit, shown, logarithmic) in enumerate(panels):
        place = LEFT + i % 2 * NEXT, TOP + i // 2 * BELOW
        drawn += _panel(*place, title, unit, shown, logarithmic)
    x = LEFT
    for name in result["rates"]:
        drawn.append(f'<circle cx="{x + 4}" cy="8" r="4.5" fill="{ARM_COLOURS[name]}"/>')
        drawn.append(text(x + 14, 12, name + LEARNED.get(name, "")))
        x += 190
    said = "What a student learns of a teacher by distillation, SFT and neither, and of itself"
    return document(TOP + 2 * BELOW, said, drawn)


class Line(NamedTuple):
    """A curve of a panel."""

    colour: str
    points: list[tuple[float, float]]


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
        drawn.append(text(left - 6, y + 4, f"{value:.3g}", "faint", "end"))
    for i in range(5):
        x = wide * i / 4
        drawn.append(text(at(x, ys[0])[0], top + HIGH + 16, f"{x:.0f}", "faint", "middle"))
    drawn.append(text(left + WIDE / 2, top + HIGH + 30, unit, "faint", "middle"))
    for line in lines:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in line.points))
        style = f'fill="none" stroke="{line.colour}" stroke-width="1.5"'
        drawn.append(f'<path d="M{path}" {style}/>')
    return drawn
