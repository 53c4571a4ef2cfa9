"""The figures of a report: panels of metrics by step, of one run or of several overlaid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from fastrl.run.terminal import visible
from fastrl.tools.reports.curves import RunCurves, Series
from fastrl.tools.reports.panels import COLOURS, GREY, Panel, TimePanel, panels_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#1F2328", "#D9D9D9"
DPI = 120
# In inches: a panel's axes, their margins, and rows: of a legend, the title, the runs' names.
WIDTH, HEIGHT = 3.35, 2.3
LEFT, RIGHT, BELOW, HEADING = 0.82, 0.16, 0.56, 0.44
LEGEND_ROW, TITLE, RUNS = 0.18, 0.42, 0.24
_PER_ROW = 3  # panels
_LEGEND_WIDTH = 52  # characters in a row of a legend
_DASHES = ("-", "--", ":", "-.")
_SIGNS = {"-": "—", "--": "- -", ":": "···", "-.": "-·-", "o-": "●"}


class Name(NamedTuple):
    """An entry of a legend: a name, and before it a sign in a colour."""

    text: str
    colour: str
    sign: str = "—"


def draw(runs: Sequence[RunCurves], *, title: str) -> Figure:
    """Draws all panels that the runs have metrics for: a colour per run; of one run, per metric."""
    panels = panels_of(runs)
    columns = 2 if len(panels) == 4 else min(_PER_ROW, len(panels))
    rows = -(-len(panels) // columns)
    with _style():
        figure = _new_figure()
        all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
        legends = [
            _legend_rows(draw_panel(axes, panel, runs))
            for axes, panel in zip(all_axes, panels, strict=False)
        ]
        for axes, panel, legend in zip(all_axes, panels, legends, strict=False):
            _set_heading(axes, panel.title, legend)
        for axes in all_axes[len(panels) :]:
            axes.axis("off")
        names = _legend_rows(run_names(runs), columns * _LEGEND_WIDTH) if len(runs) > 1 else []
        above = TITLE + RUNS * len(names)
        _place(figure, rows, columns, above, HEADING + LEGEND_ROW * max(map(len, legends)))
        height = figure.get_figheight()
        x = LEFT / figure.get_figwidth()
        shown = visible(title)
        figure.text(x, 1 - 0.12 / height, shown, va="top", fontsize=14, fontweight="bold")
        if names:
            box = _packed(names, 10, "upper left", (x, 1 - TITLE / height), figure.transFigure)
            figure.add_artist(box)
    return figure


def draw_alone(panel: Panel | TimePanel, runs: Sequence[RunCurves]) -> tuple[Figure, list[Name]]:
    """Draws one panel without its heading; returns the figure and the entries of its legend."""
    with _style():
        figure = _new_figure()
        names = draw_panel(figure.subplots(), panel, runs)
        _place(figure, 1, 1, 0.0, 0.12)
    return figure, names


def run_names(runs: Sequence[RunCurves]) -> list[Name]:
    """An entry of a legend for each run, with its name and colour."""
    return [Name(visible(run.name), COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]


def draw_panel(axes: Axes, panel: Panel | TimePanel, runs: Sequence[RunCurves]) -> list[Name]:
    """Draws a panel's curves and axes; returns the entries of its legend."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    if not any(panel.recorded(run) for run in runs):
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color=GREY)
        axes.set(xticks=[], yticks=[])
        return []
    names = _draw_times(axes, panel, runs) if isinstance(panel, TimePanel) else None
    if isinstance(panel, Panel):
        names = _draw_lines(axes, panel, runs)
    axes.set(xlabel="step", ylabel=panel.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(_plain_numbers())
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    if axes.dataLim.width < 1:  # a single step
        axes.set_xlim(axes.dataLim.x0 - 1, axes.dataLim.x1 + 1)
    return names or []


def _draw_lines(axes: Axes, panel: Panel, runs: Sequence[RunCurves]) -> list[Name]:
    names = {}
    for run, (_, run_colour, _) in zip(runs, run_names(runs), strict=True):
        for i, line in enumerate(panel.lines):
            curve = run.read(line.keys, panel.stage)
            if not curve:
                continue
            alone = len(runs) == 1
            style = "o-" if line.held_out else "-" if alone else _DASHES[i % len(_DASHES)]
            colour = line.colour if alone else run_colour
            _draw_line(axes, curve, run.read(line.sem, panel.stage), style, colour)
            names[line.name] = Name(line.name, colour if alone else GREY, _SIGNS[style])
    lowest, highest = axes.dataLim.y0, axes.dataLim.y1
    if panel.level is not None:
        axes.axhline(panel.level[0], color=GREY, linestyle=(0, (4, 3)), linewidth=1.0)
        names["level"] = Name(panel.level[1], GREY, "- -")
    ceilings = {run.kl_ceiling for run in runs if run.kl_ceiling is not None}
    for ceiling in ceilings if panel.ceiling else ():
        axes.axhline(ceiling, color=GREY, linestyle=(0, (4, 3)), linewidth=1.0)
        names[f"ceiling {ceiling}"] = Name(f"ceiling {ceiling:g}", GREY, "- -")
    _show_zero(axes, panel.zero, lowest, highest)
    return [name for name in names.values() if name.text]


def _draw_line(axes: Axes, curve: Series, sems: Series, style: str, colour: str) -> None:
    if len(curve.steps) == 1:  # a line would not show a single step
        style = "o"
    if sems:
        sem_at = dict(zip(sems.steps, sems.values, strict=True))
        bars = [sem_at.get(step, 0.0) for step in curve.steps]
        axes.errorbar(curve.steps, curve.values, bars, fmt="none", ecolor=colour, capsize=3)
    axes.plot(curve.steps, curve.values, style, color=colour, markersize=5)


def _show_zero(axes: Axes, zero: str, lowest: float, highest: float) -> None:
    """Lets the axis begin at 0, or draws a line there, if 0 is near or ``zero`` is "always"."""
    shown = zero == "always" or min(abs(lowest), abs(highest)) < highest - lowest
    if not shown and not lowest < 0 < highest:
        return
    if lowest > 0.05 * highest > 0:
        axes.set_ylim(0, max(1.05 * highest, axes.get_ylim()[1]))
    else:  # an axis that began at 0 would hide a curve there
        axes.axhline(0, color=GREY, linewidth=1.0, zorder=1)


def _draw_times(axes: Axes, panel: TimePanel, runs: Sequence[RunCurves]) -> list[Name]:
    """Draws the phases of one run as layers, or the whole steps of several runs as lines."""
    names, points = [], []
    for run, (_, run_colour, _) in zip(runs, run_names(runs), strict=True):
        timed = [row for row in run.rows if any(key in row for key in panel.keys)]
        steps = [float(row.get("step", index)) for index, row in enumerate(timed)]
        layers = {
            phase: [sum(float(row.get(key) or 0.0) for key in phase.keys) for row in timed]
            for phase in panel.phases
        }
        totals = [sum(seconds) for seconds in zip(*layers.values(), strict=True)]
        points += [(seconds, step) for seconds, step in zip(totals, steps, strict=True)]
        if len(runs) > 1:
            axes.plot(steps, totals, color=run_colour)
            continue
        base = [0.0] * len(steps)
        for phase, seconds in layers.items():
            if any(seconds):
                _draw_layer(axes, steps, base, seconds, phase.colour)
                base = [x + y for x, y in zip(base, seconds, strict=True)]
                names.append(Name(phase.name, phase.colour, "■"))
    return names + _cut_slow_steps(axes, sorted(points))


def _draw_layer(
    axes: Axes, steps: list[float], base: list[float], seconds: list[float], colour: str
) -> None:
    top = [x + y for x, y in zip(base, seconds, strict=True)]
    if len(steps) == 1:
        axes.bar(steps, seconds, bottom=base, color=colour, width=0.6)
    else:
        axes.fill_between(steps, base, top, color=colour, linewidth=0)


def _cut_slow_steps(axes: Axes, points: list[tuple[float, float]]) -> list[Name]:
    """Ends the axis above all but the few slowest steps, such as the first, which would squeeze the
    others: they get a mark at the edge, and the slowest its time. ``points``: sorted (s, step)."""
    usual, (slowest, slowest_step) = points[int(0.95 * (len(points) - 1))][0], points[-1]
    if slowest <= 2.5 * usual:
        axes.set_ylim(0, 1.08 * slowest or None)
        return []
    top = 1.3 * usual
    axes.set_ylim(0, top)
    above = [step for seconds, step in points if seconds > top]
    edge = 0.96 * top
    axes.plot(above, [edge] * len(above), "^", color=INK, markersize=6, zorder=5)
    middle = (min(step for _, step in points) + max(step for _, step in points)) / 2
    axes.annotate(
        f"{slowest:.3g} s",
        (slowest_step, edge),
        (6 if slowest_step <= middle else -6, 0),
        textcoords="offset points",
        ha="left" if slowest_step <= middle else "right",
        va="center",
        fontsize=9,
    )
    return [Name("above the scale", INK, "▲")]


def _plain_numbers() -> Any:
    """A formatter of ticks as numbers without an offset, with as many digits as they need; large
    and small ones with an exponent, such as 1e+04."""
    from matplotlib.ticker import Formatter

    class PlainNumbers(Formatter):
        def __call__(self, x: float, pos: Any = None) -> str:
            return f"{x:g}"

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            gap = abs(values[1] - values[0]) if len(values) > 1 else 0.0
            for digits in range(4, 17):
                texts = [f"{value + 0.0:.{digits}g}" for value in values]
                errors = [abs(float(t) - v) for t, v in zip(texts, values, strict=True)]
                if max(errors, default=0.0) <= 0.01 * gap:
                    break
            return texts

    return PlainNumbers()


def _legend_rows(names: Sequence[Name], width: int = _LEGEND_WIDTH) -> list[list[Name]]:
    """The names, in as many rows as they need."""
    rows: list[list[Name]] = []
    room = 0
    for name in names:
        if room < len(name.text) + 2:
            rows.append([])
            room = width
        rows[-1].append(name)
        room -= len(name.text) + 5
    return rows


def _set_heading(axes: Axes, title: str, legend: list[list[Name]]) -> None:
    """Draws a panel's title, and below it the legend: lines' names, each behind a coloured sign."""
    pad = 9 + 72 * LEGEND_ROW * max(len(legend), 1)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=pad)
    if legend:
        axes.add_artist(_packed(legend, 9, "lower left", (0, 1.02), axes.transAxes))


def _packed(
    rows: list[list[Name]], size: float, corner: str, place: tuple[float, float], unit: Any
) -> Artist:
    """Rows of a legend's entries, whose ``corner`` is at ``place`` in the transform ``unit``."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea, VPacker

    texts: list[list[Artist]] = [
        [
            HPacker(
                children=[
                    TextArea(name.sign, textprops={"color": name.colour, "fontsize": size}),
                    TextArea(name.text, textprops={"fontsize": size}),
                ],
                pad=0,
                sep=3,
            )
            for name in row
        ]
        for row in rows
    ]
    lines: list[Artist] = [HPacker(children=row, pad=0, sep=10) for row in texts]
    return AnchoredOffsetbox(
        corner,
        child=VPacker(children=lines, pad=0, sep=2),
        bbox_to_anchor=place,
        bbox_transform=unit,
        frameon=False,
        pad=0,
        borderpad=0,
    )


def _new_figure() -> Figure:
    # Without pyplot, which would choose a GUI backend and keep the figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def _place(figure: Figure, rows: int, columns: int, above: float, heading: float) -> None:
    """Sets the figure's size and the panels' places, in inches: matplotlib's own layouts draw
    everything once more to measure it."""
    width = columns * (LEFT + WIDTH + RIGHT)
    height = above + rows * (heading + HEIGHT + BELOW)
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=LEFT / width,
        right=1 - RIGHT / width,
        bottom=BELOW / height,
        top=1 - (above + heading) / height,
        wspace=(LEFT + RIGHT) / WIDTH,
        hspace=(heading + BELOW) / HEIGHT,
    )


@contextmanager
def _style() -> Iterator[None]:
    """Context of our style of texts and axes; a $ in a name begins no formula."""
    import matplotlib

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: Any = {"text.parse_math": False, **{name: INK for name in inked}}
    with matplotlib.rc_context(settings):
        yield
