"""The figure of a run: its curves by step.

:func:`draw` chooses by the recorded metrics: reward, KL, entropy, value loss, clip fraction and
time of PPO, GRPO and others (:func:`draw_run`), the same after SFT and a reward model
(:func:`draw_stages`), or loss and accuracy of transformers' Trainer (:func:`draw_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for readers with and without colour blindness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY, FAINT = "#CC79A7", "#56B4E9", "#6B6B6B", "#D9D9D9"

# Phases of a step in their order: name, timers, colour.
PHASES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("rollout", ("time/rollout",), SKY),
    ("reward", ("time/reward",), PURPLE),
    ("forward", ("time/ppo/forward_pass",), GREEN),
    (
        "statistics",
        ("time/ppo/compute_rewards", "time/ppo/compute_advantages", "time/ppo/calc_stats"),
        GREY,
    ),
    ("update", ("time/ppo/optimize_step",), ORANGE),
)


@dataclass(frozen=True)
class Series:
    """The steps at which a metric was recorded, and its finite values there."""

    steps: list[float]
    values: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)


def series(rows: Sequence[dict[str, Any]], key: str) -> Series:
    """The finite values of one metric, and their steps."""
    steps, values = [], []
    for index, row in enumerate(rows):
        value = row.get(key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            steps.append(float(row.get("step", index)))
            values.append(float(value))
    return Series(steps, values)


def draw(
    rows: Sequence[dict[str, Any]],
    stages: Mapping[str, Sequence[dict[str, Any]]],
    *,
    title: str,
    kl_ceiling: float | None = None,
) -> Figure:
    """Draws a run's curves; a panel whose metrics are missing says so.

    Args:
        rows: of metrics.jsonl.
        stages: rows of the run's earlier stages, by name.
        kl_ceiling: drawn into the KL panel, in nats per sequence.
    """
    if {"sft", "reward"} <= set(stages):
        return draw_stages(rows, stages, title=title, kl_ceiling=kl_ceiling)
    if series(rows, "reward/mean") or series(rows, "eval/reward_mean"):
        return draw_run(rows, title=title, kl_ceiling=kl_ceiling)
    return draw_fit(rows, title=title)


def draw_run(
    rows: Sequence[dict[str, Any]], *, title: str = "PPO", kl_ceiling: float | None = None
) -> Figure:
    """Draws PPO, GRPO and others.

    Args:
        rows: one dict of metrics per step; rows of evaluations may stand between them.
        kl_ceiling: drawn into the KL panel, in nats per sequence.
    """
    figure, panels = _new_figure(title, 2, 3)
    _draw_reward(panels[0], rows)
    _draw_kl(panels[1], rows, kl_ceiling)
    _draw_line(panels[2], rows, "ppo/policy/entropy", "Policy entropy", "nats per token", GREEN)
    if series(rows, "groups/no_spread"):
        shared = ("groups/no_spread", "Groups whose rewards are equal", "share of groups")
        _draw_line(panels[3], rows, *shared, PURPLE)
    else:
        _draw_line(panels[3], rows, "ppo/loss/value", "Value loss", "", PURPLE)
    _draw_clip_fraction(panels[4], rows)
    _draw_phases(panels[5], rows)
    return figure


def draw_stages(
    rows: Sequence[dict[str, Any]],
    stages: Mapping[str, Sequence[dict[str, Any]]],
    *,
    title: str,
    kl_ceiling: float | None = None,
) -> Figure:
    """Draws SFT, reward model and PPO in one figure.

    Args:
        rows: of PPO.
        stages: rows of "sft" and "reward", as transformers' Trainer logs them.
    """
    figure, panels = _new_figure(title, 2, 3)
    _draw_pair(panels[0], stages["sft"], ("loss", "eval_loss"), "1. SFT loss", "nats per token")
    _draw_pair(
        panels[1], stages["reward"], ("", "eval_accuracy"), "2. Reward model", "share of pairs"
    )
    _draw_reward(panels[2], rows)
    panels[2].set_title("3. PPO reward", loc="left", fontweight="bold", fontsize=11, pad=22)
    _draw_kl(panels[3], rows, kl_ceiling)
    _draw_line(panels[4], rows, "ppo/policy/entropy", "Policy entropy", "nats per token", GREEN)
    _draw_phases(panels[5], rows)
    return figure


# The first of these metrics that a run has is drawn beside the loss.
_FIT_PANELS = (
    (("accuracy", "eval_accuracy"), "Accuracy", "share of pairs"),
    (("rewards/mean", "eval_reward"), "Reward", ""),
    (("win_rate", "eval_win_rate"), "Win rate against the start", "share of prompts"),
    (("rewards/accuracies", "eval_rewards/accuracies"), "Accuracy", "share of samples"),
)


def draw_fit(rows: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draws a run of transformers' Trainer from its logs."""
    figure, panels = _new_figure(title, 2, 2)
    _draw_pair(panels[0], rows, ("loss", "eval_loss"), "Loss", "nats")
    second = next((pair for pair in _FIT_PANELS if series(rows, pair[0][1])), None)
    if second is not None:
        _draw_pair(panels[1], rows, *second)
    else:
        _draw_line(panels[1], rows, "epoch", "Epoch", "", SKY)
    _draw_line(panels[2], rows, "learning_rate", "Learning rate", "", GREEN)
    _draw_line(panels[3], rows, "grad_norm", "Gradient norm", "", PURPLE)
    return figure


def _new_figure(title: str, rows: int, columns: int) -> tuple[Figure, Any]:
    """A figure and its panels."""
    # Without pyplot, which would choose a GUI backend and keep the figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15)
    figure = Figure(figsize=(13 / 3 * columns, 3.5 * rows), dpi=120, layout=layout)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure, figure.subplots(rows, columns).ravel()


def _plot(
    panel: Axes, rows: Sequence[dict[str, Any]], lines: Sequence[tuple[str, str, str, str]]
) -> list[tuple[str, str]]:
    """Plots metrics, each given by key, name, colour and line style; returns names and colours of
    those that were recorded."""
    names = []
    for key, name, colour, style in lines:
        line = series(rows, key)
        if line:
            panel.plot(line.steps, line.values, style, color=colour, markersize=5)
            names.append((name, colour))
    return names


def _draw_pair(
    panel: Axes, rows: Sequence[dict[str, Any]], keys: tuple[str, str], title: str, unit: str
) -> None:
    """Draws a metric of the training batches and of held-out data."""
    training, evaluated = keys
    lines = ((training, "training batches", BLUE, "-"), (evaluated, "held out", VERMILION, "o-"))
    _finish_panel(panel, title, unit, _plot(panel, rows, lines))


def _draw_reward(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = []
    training = series(rows, "reward/mean") or series(rows, "ppo/mean_scores")
    if training:
        panel.plot(training.steps, training.values, color=BLUE)
        names.append(("training batches", BLUE))
    evaluated = series(rows, "eval/reward_mean")
    if evaluated:
        sems = series(rows, "eval/reward_sem")
        sem_at = dict(zip(sems.steps, sems.values, strict=True))
        panel.errorbar(
            evaluated.steps,
            evaluated.values,
            yerr=[sem_at.get(step, 0.0) for step in evaluated.steps],
            color=VERMILION,
            marker="o",
            markersize=5,
            capsize=3,
        )
        names.append(("held out ± s.e.", VERMILION))
    _finish_panel(panel, "Reward", "", names)


def _draw_kl(panel: Axes, rows: Sequence[dict[str, Any]], ceiling: float | None) -> None:
    batches = ("objective/kl", "training batches", BLUE, "-")
    names = _plot(panel, rows, [batches, ("eval/kl", "held out", VERMILION, "o")])
    if names and ceiling is not None:
        panel.set_ylim(top=1.08 * max(ceiling, panel.dataLim.y1))
        panel.axhline(ceiling, color=GREY, linestyle=(0, (4, 3)))
        names.append((f"ceiling {ceiling:g}", GREY))
    _finish_panel(panel, "KL to the reference", "nats per sequence", names)


def _draw_clip_fraction(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    policy = ("ppo/policy/clipfrac", "policy ratio", BLUE, "-")
    names = _plot(panel, rows, [policy, ("ppo/val/clipfrac", "value", PURPLE, "-")])
    panel.set_ylim(bottom=0)
    _finish_panel(panel, "Clip fraction", "share of tokens", names)


def _draw_phases(panel: Axes, rows: Sequence[dict[str, Any]]) -> None:
    timed = [row for row in rows if any(key in row for _, keys, _ in PHASES for key in keys)]
    steps = [float(row.get("step", index)) for index, row in enumerate(timed)]
    layers = []
    for name, keys, colour in PHASES:
        seconds = [sum(float(row.get(key) or 0.0) for key in keys) for row in timed]
        if any(seconds):
            layers.append((name, colour, seconds))
    if layers:
        colours = [colour for _, colour, _ in layers]
        panel.stackplot(steps, *(seconds for _, _, seconds in layers), colors=colours, linewidth=0)
        # One slow step, such as the first, must not set the scale.
        totals = sorted(map(sum, zip(*(seconds for _, _, seconds in layers), strict=True)))
        panel.set_ylim(0, 1.15 * totals[int(0.95 * (len(totals) - 1))])
    _finish_panel(panel, "Time per step", "seconds", [(f"■ {n}", c) for n, c, _ in layers])


def _draw_line(
    panel: Axes, rows: Sequence[dict[str, Any]], key: str, title: str, unit: str, colour: str
) -> None:
    names = _plot(panel, rows, [(key, "", colour, "-")])
    if names:
        panel.set_ylim(bottom=min(0.0, panel.dataLim.y0))
    _finish_panel(panel, title, unit, names)


def _finish_panel(panel: Axes, title: str, unit: str, names: Sequence[tuple[str, str]]) -> None:
    """Draws the panel's title and axes, and above them each line's name in its colour, in place of
    a legend."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea
    from matplotlib.ticker import MaxNLocator

    panel.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=22)
    panel.spines[["top", "right"]].set_visible(False)
    if not names:
        panel.text(0.5, 0.5, "not recorded", transform=panel.transAxes, ha="center", color=GREY)
        panel.set(xticks=[], yticks=[])
        return
    panel.set(xlabel="step", ylabel=unit)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.margins(x=0.02)
    words: list[Artist] = [
        TextArea(name, textprops={"color": c, "fontsize": 9}) for name, c in names
    ]
    panel.add_artist(
        AnchoredOffsetbox(
            "lower left",
            child=HPacker(children=words, pad=0, sep=10),
            bbox_to_anchor=(0, 1.01),
            bbox_transform=panel.transAxes,
            frameon=False,
            pad=0,
            borderpad=0,
        )
    )
