"""TRL with fastrl's rollouts, as a library of trainers."""

from __future__ import annotations

from typing import Any

import trl
from trl import GRPOConfig

import fastrl

__all__ = ["GRPOConfig", "GRPOTrainer"]


def GRPOTrainer(*args: Any, **kwargs: Any) -> trl.GRPOTrainer:
    """TRL's own trainer; its responses come from fastrl's engine."""
    return trl.GRPOTrainer(*args, **kwargs, rollout_func=fastrl.TRLRollouts())
