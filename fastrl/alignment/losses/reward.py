"""The loss of a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import fastrl_kernels
from fastrl.alignment.batch import Batch
from fastrl.alignment.losses.base import Loss, LossOutput, register, share_ahead, weighted_mean


@register
@dataclass(frozen=True)
class BradleyTerry(Loss):
    """-log σ(r₁ - r₂): a reward model from pairs whose first response is the preferred one.

    See :func:`fastrl_kernels.reward_loss`.

    Args:
        center_coef: weight of (r₁ + r₂)², which keeps rewards around 0.
    """

    name: ClassVar[str] = "bradley-terry"
    tasks: ClassVar[tuple[str, ...]] = ("reward-modelling",)
    learns: ClassVar[str] = "reward model"
    center_coef: float = 0.0

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        chosen, rejected = policy.rewards(batch)
        losses = fastrl_kernels.reward_loss(chosen, rejected, center_coef=self.center_coef)
        with torch.no_grad():
            metrics = {
                "rewards/chosen": chosen.detach(),
                "rewards/rejected": rejected.detach(),
                "rewards/margins": chosen.detach() - rejected.detach(),
                "rewards/accuracies": share_ahead(chosen, rejected),
            }
        return LossOutput(weighted_mean(losses, batch), metrics)
