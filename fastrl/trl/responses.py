"""The rewards of all processes' responses, and what is logged of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.trl.metric_means import MetricMeans


class Judged(NamedTuple):
    """The rewards of the responses of all processes."""

    by_function: Tensor  # [B, K]; NaN where a function does not apply
    rewards: Tensor  # [B], weighted sums; NaN where none applies


def note_lengths(metrics: MetricMeans, lengths: Tensor, cut: Tensor) -> None:
    """Logs the lengths of all processes' responses [B].

    Args:
        cut: bool [B], those without an end.
    """
    whole = lengths[~cut] if bool((~cut).any()) else torch.zeros(1)
    for name, of in (("", lengths), ("terminated_", whole)):
        metrics.add_number(f"completions/mean_{name}length", float(of.float().mean()))
        metrics.add_number(f"completions/min_{name}length", float(of.min()))
        metrics.add_number(f"completions/max_{name}length", float(of.max()))
    metrics.add_number("completions/clipped_ratio", float(cut.float().mean()))


def note_rewards(
    metrics: MetricMeans, names: Sequence[str], judged: Judged, spreadless: Tensor
) -> None:
    """Logs rewards.

    Args:
        names: of the reward functions.
        spreadless: bool, groups whose rewards are all the same.
    """
    for name, column in zip(names, judged.by_function.t(), strict=True):
        metrics.add_number(f"rewards/{name}/mean", float(column.nanmean()))
        metrics.add_number(f"rewards/{name}/std", nanstd(column))
    metrics.add_number("reward", float(judged.rewards.nanmean()))
    metrics.add_number("reward_std", nanstd(judged.rewards))
    metrics.add_number("frac_reward_zero_std", float(spreadless.float().mean()))


def nanstd(values: Tensor) -> float:
    """The unbiased deviation of the numbers that are not NaN; NaN of fewer than two."""
    known = values[~values.isnan()]
    return float(known.std()) if len(known) > 1 else float("nan")
