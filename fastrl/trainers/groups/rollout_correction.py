"""Importance weights of responses that a ``rollout_func`` drew with another engine."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fastrl.config import SAMPLER_CORRECTIONS
from fastrl.learn.correction import SamplerStats, sampler_weights
from fastrl.learn.samples import learned_counts, of_learned, to_column
from fastrl.registry import policy_loss
from fastrl.run.metric_means import MetricMeans
from fastrl.run.processes import Processes
from fastrl.samples import Samples

# TRL's names of the corrections.
MODES = tuple(kind.replace("-", "_") for kind in SAMPLER_CORRECTIONS if kind != "off")
_NAME = "vllm_importance_sampling_"


def check_correction(args: Any) -> None:
    """Raises ValueError for an unknown mode, a missing bound, or bounds that no weight can meet."""
    mode = args.vllm_importance_sampling_mode
    if mode not in MODES:
        raise ValueError(f"unknown {_NAME}mode {mode!r}: choose one of {', '.join(MODES)}")
    least, most = (getattr(args, f"{_NAME}clip_{end}") for end in ("min", "max"))
    if most is not None and not most > 0:
        raise ValueError(f"{_NAME}clip_max must be positive, got {most}: no response would count")
    if least is not None and most is not None and not least < most:
        raise ValueError(f"{_NAME}clip_min ({least}) must be less than {_NAME}clip_max ({most})")
    corrects = args.vllm_importance_sampling_correction
    if corrects and mode.endswith("truncate") and least is None and most is None:
        raise ValueError(f"{_NAME}mode={mode!r} without a bound: set {_NAME}clip_max (3 is usual)")


def of_all_or_none(logprobs: list[Tensor] | None, processes: Processes) -> list[Tensor] | None:
    """Returns a sampler's log-probs; raises ValueError where only some processes have them."""
    has_logprobs = logprobs is not None
    if processes.any(has_logprobs) and processes.any(not has_logprobs):
        raise ValueError(
            "rollout_func returned logprobs in one process and None in another: return them in "
            "all, or in none"
        )
    return logprobs


class RolloutCorrection:
    """Weights w = π_old/π_sampler of the policy's loss, see
    :func:`fastrl.learn.correction.sampler_weights`.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.

    Raises:
        ValueError: see :func:`check_correction`; scripts may change arguments after their check.
    """

    def __init__(self, args: Any):
        check_correction(args)
        mode = args.vllm_importance_sampling_mode
        self.kind = mode.replace("_", "-")
        self.least = args.vllm_importance_sampling_clip_min
        self.most = args.vllm_importance_sampling_clip_max
        self._has_warned = False

    def __call__(
        self, responses: Samples, sampled: list[Tensor], metrics: MetricMeans, loss: str
    ) -> None:
        """Sets the responses' ``sampler_weights``, and logs statistics of them by TRL's names.

        Args:
            responses: with ``old_logprobs``, those of the policy before its update.
            sampled: the engine's log-probs of all tokens of each response; NaN: unknown.
            loss: the policy loss, by its name.

        Raises:
            ValueError: weights of whole responses with a loss whose ratio is of whole responses.
        """
        if self.kind.startswith("sequence") and policy_loss(loss).of_response:
            raise ValueError(
                f"{_NAME}mode='{self.kind.replace('-', '_')}' with loss_type={loss!r}, whose ratio "
                "of whole responses takes the weights of its tokens: choose token_truncate or "
                f"token_mask, or set {_NAME}correction=False"
            )
        assert responses.old_logprobs is not None
        counts = torch.tensor(learned_counts(responses))
        old, drawn = of_learned(responses, responses.old_logprobs), of_learned(responses, sampled)
        if len(drawn) and not drawn.any() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "rollout_func returned logprobs that are all 0, and the loss is weighted by "
                "π_old/π_sampler of them: return None where the sampler gives none, or set "
                f"{_NAME}correction=False",
                stacklevel=2,
            )
        everywhere = torch.ones_like(old, dtype=torch.bool)
        weights, stats = sampler_weights(
            old, drawn, everywhere, self.kind, self.least, self.most, counts
        )
        responses.sampler_weights = to_column(responses, weights, elsewhere=1.0)
        units = (counts > 0).sum() if self.kind.startswith("sequence") else counts.sum()
        _note(metrics, stats, units, (~drawn.isnan()).sum())


def _note(metrics: MetricMeans, stats: SamplerStats, units: Tensor, measured: Tensor) -> None:
    """Adds statistics of importance weights to the metrics: ``units`` tokens or responses have
    weights, ``measured`` tokens a log-prob of the sampler."""
    difference, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
    means = {
        f"{difference}/mean": (stats.difference_mean.nan_to_num() * measured, measured),
        f"{ratio}/mean": (stats.weight_mean.nan_to_num() * units, units),
    }
    metrics.add(means)
    for name, value, most in (
        (f"{difference}/max", stats.difference_max, True),
        (f"{ratio}/min", stats.weight_min, False),
        (f"{ratio}/max", stats.weight_max, True),
    ):
        metrics.add_extreme(name, value[None], most)
