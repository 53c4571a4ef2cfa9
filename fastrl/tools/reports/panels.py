"""The panels of a report: their metrics and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastrl.tools.reports.curves import RunCurves

# Okabe and Ito's palette, for readers with and without colour blindness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#6B6B6B"
COLOURS = (
    *(BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY),
    *("#332288", "#882255", "#999933", "#E7298A", "#8C564B", "#1B5E20"),  # colours of further runs
)


@dataclass(frozen=True)
class Line:
    """A metric in a panel.

    Args:
        keys: the metric's names; of several the first that a run has recorded is drawn.
        name: the name in the legend.
        held_out: whether the metric is of held-out data, and drawn with a point per evaluation.
        sem: the names of the metric's standard errors, in the order of ``keys``.
    """

    keys: tuple[str, ...]
    name: str
    colour: str
    held_out: bool = False
    sem: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """Metrics in one unit, drawn over the steps.

    Args:
        zero: "always": the axis shows 0; "near": it does, unless that would squeeze the curves into
            less than half of the panel.
        level: a value to compare with, and its name.
        ceiling: whether the runs' KL ceilings are drawn.
        stage: the stage of the runs that has the metric; None: the run itself.
    """

    title: str
    unit: str
    lines: tuple[Line, ...]
    zero: str = "always"
    level: tuple[float, str] | None = None
    ceiling: bool = False
    stage: str | None = None

    def recorded(self, run: RunCurves) -> bool:
        """Whether a run has any of the metrics."""
        return any(run.read(line.keys, self.stage) for line in self.lines)


@dataclass(frozen=True)
class Phase:
    """A part of a step, and its timers, in seconds."""

    name: str
    keys: tuple[str, ...]
    colour: str


@dataclass(frozen=True)
class TimePanel:
    """The time of each step, by phase."""

    title: str = "Time per step"
    unit: str = "seconds"
    phases: tuple[Phase, ...] = (
        Phase("whole step", ("step_time",), SKY),
        Phase("rollout", ("time/rollout",), SKY),
        Phase("reward", ("time/reward",), PURPLE),
        Phase("forward", ("time/ppo/forward_pass",), GREEN),
        Phase(
            "statistics",
            ("time/ppo/compute_rewards", "time/ppo/compute_advantages", "time/ppo/calc_stats"),
            GREY,
        ),
        Phase("update", ("time/ppo/optimize_step",), ORANGE),
    )

    @property
    def keys(self) -> list[str]:
        return [key for phase in self.phases for key in phase.keys]

    def recorded(self, run: RunCurves) -> bool:
        return bool(run.read(self.keys))


def _pair(
    title: str,
    unit: str,
    training: tuple[str, ...],
    held_out: str,
    level: tuple[float, str] | None = None,
    stage: str | None = None,
) -> Panel:
    """A panel with a metric on training batches, and on held-out data."""
    lines = [Line((held_out,), "held out", VERMILION, held_out=True, sem=(f"{held_out}_sem",))]
    if training:
        lines.insert(0, Line(training, "training batches", BLUE))
    return Panel(title, unit, tuple(lines), zero="near", level=level, stage=stage)


def _one(title: str, unit: str, *keys: str, colour: str = GREEN) -> Panel:
    return Panel(title, unit, (Line(keys, "", colour),))


_CHANCE = (0.5, "chance")
_REWARD = Panel(
    "Reward",
    "",
    (
        Line(("reward/mean", "rewards/mean", "ppo/mean_scores"), "training batches", BLUE),
        Line(
            ("eval/reward_mean", "eval_reward"),
            "held out ± s.e.",
            VERMILION,
            held_out=True,
            sem=("eval/reward_sem", "eval_reward_sem"),
        ),
    ),
    zero="near",
)
PANELS: tuple[Panel | TimePanel, ...] = (
    _pair("SFT: loss", "nats per token", ("loss",), "eval_loss", stage="sft"),
    _pair("Reward model: accuracy", "share of pairs", (), "eval_accuracy", _CHANCE, "reward"),
    _REWARD,
    _pair("Divergence from the teacher", "nats per token", ("divergence",), "eval_divergence"),
    _pair("Loss", "nats", ("loss",), "eval_loss"),
    _pair("Accuracy", "share of pairs", (), "eval_accuracy", _CHANCE),
    _pair(
        "Preference accuracy",
        "share of examples",
        ("rewards/accuracies",),
        "eval_rewards/accuracies",
        _CHANCE,
    ),
    _pair("Wins against the start", "share of prompts", (), "eval_win_rate", _CHANCE),
    Panel(
        "KL to the reference",
        "nats per sequence",
        (
            Line(("objective/kl",), "training batches", BLUE),
            Line(("eval/kl",), "held out", VERMILION, held_out=True),
        ),
        ceiling=True,
    ),
    _one(
        "KL to the reference, of a token", "nats per token", "objective/kl_per_token", colour=BLUE
    ),
    _one("Deviation of the rewards", "", "reward/std", "ppo/std_scores", colour=BLUE),
    _one("Policy entropy", "nats per token", "ppo/policy/entropy"),
    Panel(
        "Implicit rewards",
        "",
        (
            Line(("rewards/chosen",), "chosen", GREEN),
            Line(("rewards/rejected",), "rejected", VERMILION),
        ),
    ),
    _one("Response length", "tokens", "tokens/responses_len_mean", "tokens/responses", colour=SKY),
    _one("Responses that end with EOS", "share", "tokens/eos_share", colour=SKY),
    _one("Groups whose rewards are equal", "share of groups", "groups/no_spread", colour=PURPLE),
    Panel(
        "Clip fraction",
        "share of tokens",
        (
            Line(("ppo/policy/clipfrac",), "policy ratio", BLUE),
            Line(("ppo/val/clipfrac",), "value", PURPLE),
        ),
    ),
    _one("Value loss", "", "ppo/loss/value", colour=PURPLE),
    _one(
        "Explained variance of the returns",
        "",
        "ppo/val/explained_variance",
        "ppo/val/var_explained",
        colour=PURPLE,
    ),
    _one("Gradient norm", "", "ppo/grad_norm", "grad_norm", colour=PURPLE),
    _one("Learning rate", "", "learning_rate"),
    TimePanel(),
)


def panels_of(runs: Sequence[RunCurves]) -> list[Panel | TimePanel]:
    """The panels with a metric that a run has recorded; without any, the reward's panel."""
    panels = []
    for panel in PANELS:
        if any(panel.recorded(run) for run in runs):
            panels.append(panel)
        if panel is _REWARD:
            panels += _by_function(runs)
    return panels or [_REWARD]


def _by_function(runs: Sequence[RunCurves]) -> list[Panel]:
    """One panel with each reward function's mean reward; none for fewer than two functions."""
    keys = dict.fromkeys(key for run in runs for key in run.metrics())
    names = [key[len("reward/") : -len("/mean")] for key in keys if _is_of_function(key)]
    if len(names) < 2:
        return []
    lines = (
        Line((f"reward/{name}/mean",), name, COLOURS[i % len(COLOURS)])
        for i, name in enumerate(names)
    )
    return [Panel("Reward by function", "", tuple(lines), zero="near")]


def _is_of_function(key: str) -> bool:
    return key.startswith("reward/") and key.endswith("/mean") and key != "reward/mean"
