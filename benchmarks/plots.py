"""Plots of results: by how much fastrl is faster, and the peak memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases import Entry, faster, own
from benchmarks.results import Result

COLOURS = ("#999999", "#cc7722", "#669944", "#aa4466", "#8866bb", "#33aaaa", "#555555", "#ccaa33")
OUR_COLOUR = "#2266aa"


def plots(folder: Path, results: list[Result], benchmarks: Iterable[str]) -> list[Path]:
    """An SVG of each benchmark that comes out the same from the same figures: by how much fastrl is
    the faster, and the peak memory; files that are there and no longer made go."""
    import matplotlib

    made = []
    # Ids from the content and text as text: nothing depends on the run.
    style = {"svg.hashsalt": "fastrl", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style | {"axes.axisbelow": True}):
        for benchmark in benchmarks:
            found = [
                entry
                for result in results
                if result["benchmark"] == benchmark
                for entry in result["entries"]
                if entry["main"] and not entry["red"] and len(entry["sides"]) > 1
            ]
            if found:
                made.append(_plot(folder / f"{benchmark}.svg", found))
    for path in folder.glob("*.svg"):
        if path not in made:
            path.unlink()
    return made


def _plot(path: Path, entries: list[Entry]) -> Path:
    from matplotlib.figure import Figure  # no pyplot: nothing is shown, nothing stays open

    base = own(entries[0])
    names = list(dict.fromkeys(name for e in entries for name in e["sides"] if name != base))
    colours = dict(zip(names, COLOURS * len(names), strict=False)) | {base: OUR_COLOUR}
    speed, memory = [], []
    for entry in entries:
        title = f"{entry['name']}\n{entry['label']}"
        others = [name for name in entry["sides"] if name != base]
        speed.append((title, {n: statistics.median(faster(entry, n)) for n in others}))
        peaks = {n: s["memory"].get("peak", 0) / 2**20 for n, s in entry["sides"].items()}
        memory.append((title, {n: max(peak, 1e-3) for n, peak in peaks.items() if peak}))
    panels = [(speed, f"faster than {base} by" if entries[0]["baseline"] else "fastrl faster by")]
    panels += [(memory, "peak memory [MiB]")] if any(bars for _, bars in memory) else []
    heights = [0.8 + sum(0.3 * len(bars) + 0.2 for _, bars in groups) for groups, _ in panels]
    figure = Figure(figsize=(8, sum(heights) + 0.9 * len(panels)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.15)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    # Bars of a ratio begin where both are as fast: those to the left are of the faster peers.
    for axis, (groups, label), begin in zip(axes, panels, (1.0, None), strict=False):
        _bars(axis, groups, colours, begin)
        axis.set_xlabel(label)
    axes[0].axvline(1.0, color=OUR_COLOUR)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": "fastrl"}
    )
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    return path


def _bars(
    axes: Any,
    groups: list[tuple[str, dict[str, float]]],
    colours: dict[str, str],
    begin: float | None,
) -> None:
    """A group of horizontal bars for each title, from the top down, each with its name's colour,
    from ``begin`` or the axis on."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ticks, row, named = [], 0.0, set()
    for title, bars in groups:
        ticks.append((row + (len(bars) - 1) / 2, title))
        for name, value in bars.items():
            label = name if name not in named else None
            named.add(name)
            width = value if begin is None else value - begin
            axes.barh(row, width, left=begin or 0, height=0.8, color=colours[name], label=label)
            written = f" {value:.0f}" if value >= 1000 else f" {value:.3g}"
            axes.annotate(written, (max(value, begin or 0), row), va="center", fontsize=8)
            row += 1
        row += 0.7
    axes.set_yticks([y for y, _ in ticks], [title for _, title in ticks])
    axes.invert_yaxis()
    values = [value for _, bars in groups for value in bars.values()]
    low, high = min(*values, 1.0) / 1.5, max(*values, 1.0) * 2
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    steps = (1.0, 2.0, 5.0) if high / low < 1000 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=100))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
