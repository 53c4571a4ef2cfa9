"""The page of a report: one HTML file with the figures, results and samples of runs in it.

It asks for nothing from the network, and what comes from runs is escaped.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.run.folder import RunFolder
from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.doctor import Diagnosis, Finding, examine
from fastrl.tools.reports.figures import FAINT, INK, Name, draw_alone, run_names
from fastrl.tools.reports.notable_samples import NotableSamples, notable_samples
from fastrl.tools.reports.panels import COLOURS, GREY, Panel, TimePanel, panels_of

if TYPE_CHECKING:
    from markupsafe import Markup

# The figures' colours on a dark page, in the order of COLOURS.
_DARK = (
    *("#5AB1F0", "#FF8A4C", "#33CC9F", "#E7A6CB", "#F3BE4B", "#93D4F8"),
    *("#8F86E8", "#D1679B", "#C5C56A", "#FF6BB5", "#C79A8E", "#5FAE6A"),
)
_THEME = {
    **{
        light: (f"--c{i}", dark) for i, (light, dark) in enumerate(zip(COLOURS, _DARK, strict=True))
    },
    GREY: ("--grey", "#9BA1A8"),
    FAINT: ("--faint", "#3A4048"),
}
_NOT_SETTINGS = {"output", "output_dir", "logging_dir", "run_name"}
# Names of settings that a trainer derives from others, or that name a run or its trackers.
_DERIVED = re.compile(
    "exp_name|task_name|model_name|query_dataset|reward_model|log_with|report_to|track|project"
    "|push_to_hub|hub_|world_size|is_encoder_decoder|is_peft_model|backward_batch_size|global_"
    "|total_ppo_epochs"
)
Defaults = Callable[[RunFolder], Mapping[str, Any]]  # gives a run's default settings by name


@dataclass
class ReportedRun:
    """A run on the page."""

    folder: RunFolder
    curves: RunCurves
    colour: str

    @classmethod
    def all_of(cls, folders: Sequence[RunFolder]) -> list[ReportedRun]:
        """The runs of ``folders``, with the names that :func:`short_names` makes of their paths."""
        names = short_names([folder.name for folder in folders])
        curves = [RunCurves.of(f, name) for f, name in zip(folders, names, strict=True)]
        return [
            cls(folder, curve, css_colour(name.colour))
            for folder, curve, name in zip(folders, curves, run_names(curves), strict=True)
        ]

    @property
    def name(self) -> str:
        return self.curves.name

    @cached_property
    def diagnosis(self) -> Diagnosis:
        return examine(self.curves)

    @cached_property
    def samples(self) -> NotableSamples | None:
        return notable_samples(self.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """Command, settings without names of folders and runs, and hashes of users' code."""
        config = self.folder.config
        settings = {"command": config.get("command")}
        for part in ("job", "settings", "code"):
            settings |= config.get(part, {})
        if settings["command"] == "train":  # PPOConfig's steps count samples; nothing reads them
            settings.pop("steps", None)
        return {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}


@dataclass(frozen=True)
class Figure:
    """A panel on the page."""

    id: str
    panel: Panel | TimePanel
    svg: Markup
    legend: list[Name]


def page(
    folders: Sequence[RunFolder],
    results: Mapping[str, Sequence[str]],
    defaults: Defaults = lambda folder: {},
) -> str:
    """The HTML of the report.

    Args:
        results: each run's value as text, by the result's name.
        defaults: gives a run's default settings; a setting that some runs lack is left out where
            the other runs have it at its default.
    """
    import jinja2

    runs = ReportedRun.all_of(folders)
    curves = [run.curves for run in runs]
    figures = [
        Figure(f"figure-{i}", panel, *_svg(panel, curves))
        for i, panel in enumerate(panels_of(curves))
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    title = str(folders[0].config.get("title", runs[0].name))
    html = environment.get_template("page.html").render(
        title=title if len(runs) == 1 else " · ".join(run.name for run in runs),
        runs=runs,
        figures=figures,
        results=results,
        settings=_settings(runs, defaults),
        theme=_THEME.values(),
        light={name: colour for colour, (name, _) in _THEME.items()},
        colour=css_colour,
        shows=lambda finding: _shows(figures, finding),
    )
    # A lone surrogate, which JSON may hold, is not text that a file can have.
    return html.encode("utf-8", "replace").decode("utf-8")


def short_names(paths: Sequence[str]) -> list[str]:
    """Paths without the folders that all of them begin with."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while all(len(each) > shared + 1 for each in parts) and len({e[shared] for e in parts}) == 1:
        shared += 1
    return [str(Path(*each[shared:])) for each in parts]


def css_colour(colour: str) -> str:
    """A figure's colour as the page names it."""
    return "currentColor" if colour == INK else f"var({_THEME[colour][0]})"


def _svg(panel: Panel | TimePanel, runs: Sequence[RunCurves]) -> tuple[Markup, list[Name]]:
    """A panel as SVG in the page's colours and fonts, and its legend."""
    import matplotlib
    from markupsafe import Markup

    figure, legend = draw_alone(panel, runs)
    buffer = io.StringIO()
    # Texts stay texts; ids depend on the panel, so that no two on a page are the same.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        none = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure
    for colour in (INK, *_THEME):
        svg = re.sub(colour, css_colour(colour), svg, flags=re.IGNORECASE)
    return Markup(svg), legend


def _shows(figures: Sequence[Figure], finding: Finding) -> Figure | None:
    """The first figure with a metric of the finding; None: there is none."""
    for figure in figures:
        panel = figure.panel
        if isinstance(panel, Panel) and panel.stage == finding.stage:
            keys = {key for line in panel.lines for key in line.keys}
            if keys & set(finding.metrics):
                return figure
    return None


def _settings(runs: Sequence[ReportedRun], defaults: Defaults) -> dict[str, list[str]]:
    """Settings as texts: all of a single run, or those in which several runs differ. A setting that
    a run lacks differs where another run's is not at its default."""
    of_runs = [run.settings for run in runs]
    names = dict.fromkeys(name for settings in of_runs for name in settings)
    texts = {name: [_text(settings.get(name)) for settings in of_runs] for name in names}
    if len(runs) == 1:
        return texts
    texts = {name: x for name, x in texts.items() if len(set(x)) > 1 and not _DERIVED.match(name)}
    lacking = {name for name in texts if any(name not in settings for settings in of_runs)}
    if lacking:
        bases = [defaults(run.folder) for run in runs]
        for name in lacking:
            values = [(x[name], base) for x, base in zip(of_runs, bases, strict=True) if name in x]
            same = len({_text(value) for value, _ in values}) == 1
            if same and all(value == base.get(name, value is None) for value, base in values):
                del texts[name]
    return texts


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)
