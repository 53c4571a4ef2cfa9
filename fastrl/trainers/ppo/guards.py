"""Limits of a step's statistics beyond which training is to end."""

from __future__ import annotations

from collections.abc import Mapping

from fastrl.config import PPOConfig

# Settings, the statistic that each limits, its meaning, and what to change.
_LIMITS = (
    (
        "max_kl",
        "objective/kl",
        "the KL to the reference, in nats per sequence",
        "raise init_kl_coef (or lower target), lower learning_rate, or take fewer ppo_epochs",
    ),
    (
        "max_ratio",
        "ppo/policy/ratio_max",
        "the largest mean probability ratio of a mini-batch",
        "lower learning_rate, take fewer ppo_epochs, or set max_grad_norm or early_stopping",
    ),
)


class TrainingDiverged(RuntimeError):
    """A statistic of a step exceeds its limit, ``PPOConfig.max_kl`` or ``max_ratio``. The
    step itself is complete: its optimizer steps are taken."""


def check_divergence(config: PPOConfig, step: int, statistics: Mapping[str, float]) -> None:
    """Checks a step's statistics, as ``PPOTrainer.step`` returns them. NaN, such as a KL without a
    reference, exceeds nothing.

    Raises:
        TrainingDiverged: names the statistic, its limit, and what to change.
    """
    for name, key, meaning, remedy in _LIMITS:
        limit = getattr(config, name)
        if limit is not None and statistics[key] > limit:
            raise TrainingDiverged(
                f"step {step}: {key}, {meaning}, is {statistics[key]:.4g} and exceeds "
                f"{name}={limit:g}: {remedy}; or raise {name}"
            )
