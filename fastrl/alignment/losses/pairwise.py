"""Losses on pairs of responses, of which one is preferred."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastrl.alignment.batch import Batch
from fastrl.alignment.losses.base import Loss, LossOutput, register, share_ahead, weighted_mean
from fastrl.learn.preferences import (
    PAIR_LOSSES,
    PairObjective,
    Side,
    losses_by_preference,
    try_on_a_pair,
)


@dataclass(frozen=True)
class PairwiseLoss(Loss):
    """A loss ℓ(preferred, other) of each pair of responses.

    A pair's rewards say which response is preferred: with p the reward of the first, the loss is
    p·ℓ(first, second) + (1-p)·ℓ(second, first), and p is 1, 0, ½ for a tie, or between.
    """

    tasks: ClassVar[tuple[str, ...]] = ("offline-pairwise", "online-pairwise")

    def __post_init__(self) -> None:
        """Checks the coefficients, by computing the loss of a few pairs.

        Raises:
            ValueError: a coefficient out of range; a loss without a gradient.
        """
        super().__post_init__()
        try_on_a_pair(self.name, self.losses)

    @abstractmethod
    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        """ℓ of each pair, [B]."""

    @abstractmethod
    def implicit_reward(self, side: Side) -> Tensor:
        """The reward that the policy's log-probs imply, [B]; for metrics."""

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        # The reference scores first, while no activations of the policy take memory.
        refs = [side.sums for side in reference.logprobs(batch)] if self.compares else (None, None)
        first, second = (
            side._replace(ref_sums=ref)
            for side, ref in zip(policy.logprobs(batch), refs, strict=True)
        )
        losses, *sides = losses_by_preference(self.losses, first, second, batch.rewards(1))
        return LossOutput(weighted_mean(losses, batch), self._metrics(*sides))

    @torch.no_grad()
    def _metrics(self, chosen: Side, rejected: Side) -> dict[str, Tensor]:
        good, bad = self.implicit_reward(chosen), self.implicit_reward(rejected)
        return {
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/margins": good - bad,
            "rewards/accuracies": share_ahead(good, bad),
            "logps/chosen": chosen.sums.detach(),
            "logps/rejected": rejected.sums.detach(),
        }


@dataclass(frozen=True)
class RowLoss(PairwiseLoss):
    """The loss of a row of :data:`fastrl.learn.preferences.PAIR_LOSSES`, with the row's options."""

    row: ClassVar[PairObjective]

    def losses(self, chosen: Side, rejected: Side) -> Tensor:
        return self.row(chosen, rejected, **self._options)

    def implicit_reward(self, side: Side) -> Tensor:
        return self.row.reward(side, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.row.options}


def loss_of_row(row: PairObjective, class_name: str | None = None) -> Any:
    """Makes a row's subclass of :class:`RowLoss`: a dataclass whose fields are the row's options.

    Raises:
        ValueError: the row compares the pairs of a batch, so that weights cannot multiply losses.
    """
    if row.reads == "batch":
        raise ValueError(
            f"the loss {row.name} compares the pairs of a batch with each other, and samples have "
            f"weights here: use fastrl.DPOConfig(loss_type={row.name!r})"
        )
    fields = [(name, type(default), default) for name, default in row.options.items()]
    body = {"row": row, "name": row.name, "compares": row.reads != "p", "__module__": __name__}
    body["__doc__"] = f"{row.formula}: {row.source}."
    name = class_name or row.name
    return dataclasses.make_dataclass(name, fields, bases=(RowLoss,), namespace=body, frozen=True)


DPO = register(loss_of_row(PAIR_LOSSES["dpo"], "DPO"))
ConservativeDPO = register(loss_of_row(PAIR_LOSSES["cdpo"], "ConservativeDPO"))
RobustDPO = register(loss_of_row(PAIR_LOSSES["robust"], "RobustDPO"))
Hinge = register(loss_of_row(PAIR_LOSSES["hinge"], "Hinge"))
IPO = register(loss_of_row(PAIR_LOSSES["ipo"], "IPO"))
SimPO = register(loss_of_row(PAIR_LOSSES["simpo"], "SimPO"))
ORPO = register(loss_of_row(PAIR_LOSSES["orpo"], "ORPO"))
SLiC = register(loss_of_row(PAIR_LOSSES["slic"], "SLiC"))
