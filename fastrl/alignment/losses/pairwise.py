"""Losses on pairs of responses, of which one is preferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.alignment.batch import Batch
from fastrl.alignment.logprobs import ResponseLogprobs
from fastrl.alignment.losses.base import Loss, LossOutput, weighted_mean


class PairSide(NamedTuple):
    """One response of every pair."""

    policy: ResponseLogprobs
    reference: ResponseLogprobs | None

    def where(self, condition: Tensor, other: PairSide) -> PairSide:
        mine, theirs = self.reference, other.reference
        return PairSide(
            self.policy.where(condition, other.policy),
            None if mine is None or theirs is None else mine.where(condition, theirs),
        )

    @property
    def ratio(self) -> Tensor:
        """r = Σ log π - Σ log ref, [B]."""
        assert self.reference is not None
        return self.policy.sums - self.reference.sums


@dataclass(frozen=True)
class PairwiseLoss(Loss):
    """ℓ(preferred, other) per pair.

    A pair's rewards say which is preferred: with p that of the first, the loss is
    p·ℓ(first, second) + (1-p)·ℓ(second, first), and p is 1, 0, or ½ for a tie.
    """

    tasks: ClassVar[tuple[str, ...]] = ("offline-pairwise", "online-pairwise")

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        """[B]."""
        raise NotImplementedError

    def implicit_reward(self, side: PairSide) -> Tensor:
        """What the policy's log-probs say a response is worth, [B]."""
        raise NotImplementedError

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        first, second = self._sides(batch, policy, reference)
        preferred = batch.rewards(1)  # on the host, where to look costs nothing
        undecided = bool(((preferred > 0) & (preferred < 1)).any())
        preferred = preferred.to(first.policy.sums.device)
        ahead = preferred >= 0.5
        chosen, rejected = first.where(ahead, second), second.where(ahead, first)
        losses = self.losses(chosen, rejected)
        if undecided:
            share = torch.where(ahead, preferred, 1.0 - preferred)
            both = share * losses + (1.0 - share) * self.losses(rejected, chosen)
            losses = torch.where(share < 1, both, losses)
        return LossOutput(weighted_mean(losses, batch), self._metrics(chosen, rejected))

    def _sides(self, batch: Batch, policy: Any, reference: Any) -> tuple[PairSide, PairSide]:
        # The reference first: the policy's activations are not there yet.
        of_both = reference.logprobs(batch) if self.compares else (None, None)
        one, two = map(PairSide, policy.logprobs(batch), of_both)
        return one, two

    @torch.no_grad()
    def _metrics(self, chosen: PairSide, rejected: PairSide) -> dict[str, Tensor]:
        good, bad = self.implicit_reward(chosen), self.implicit_reward(rejected)
        return {
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/margins": good - bad,
            "rewards/accuracies": (good > bad).float(),
            "logps/chosen": chosen.policy.sums.detach(),
            "logps/rejected": rejected.policy.sums.detach(),
        }


@dataclass(frozen=True)
class ReferenceLoss(PairwiseLoss):
    """A function of r = log π - log ref of both sides."""

    compares: ClassVar[bool] = True
    beta: float = 0.1

    def implicit_reward(self, side: PairSide) -> Tensor:
        return self.beta * side.ratio


@dataclass(frozen=True)
class MarginLoss(ReferenceLoss):
    """A function of the margin h = β(r_w - r_l), see :func:`fastrl_kernels.dpo_loss`.

    Args:
        label_smoothing: ε, the share of swapped labels.
    """

    kind: ClassVar[str] = "sigmoid"
    label_smoothing: float = 0.0

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        assert chosen.reference is not None
        assert rejected.reference is not None
        return fastrl_kernels.dpo_loss(
            chosen.policy.sums,
            rejected.policy.sums,
            chosen.reference.sums,
            rejected.reference.sums,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            kind=self.kind,
        )


@dataclass(frozen=True)
class DPO(MarginLoss):
    """-log σ(β(r_w - r_l)): direct preference optimisation."""

    name: ClassVar[str] = "dpo"


@dataclass(frozen=True)
class ConservativeDPO(MarginLoss):
    """DPO where a share ε of the labels is swapped: (1-ε)·ℓ(h) + ε·ℓ(-h)."""

    name: ClassVar[str] = "cdpo"
    label_smoothing: float = 0.1


@dataclass(frozen=True)
class RobustDPO(MarginLoss):
    """DPO without the bias of swapped labels: [(1-ε)·ℓ(h) - ε·ℓ(-h)]/(1-2ε)."""

    name: ClassVar[str] = "robust"
    kind: ClassVar[str] = "robust"
    label_smoothing: float = 0.1


@dataclass(frozen=True)
class Hinge(MarginLoss):
    """max(0, 1 - β(r_w - r_l))."""

    name: ClassVar[str] = "hinge"
    kind: ClassVar[str] = "hinge"


@dataclass(frozen=True)
class IPO(ReferenceLoss):
    """(h - 1/(2β))², h = r_w - r_l: identity preference optimisation.

    See :func:`fastrl_kernels.ipo_loss`.

    Args:
        beta: β.
        length_means: r are means over a response's tokens, in place of sums as in the paper.
    """

    name: ClassVar[str] = "ipo"
    length_means: bool = False

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        assert chosen.reference is not None
        assert rejected.reference is not None
        figure = "means" if self.length_means else "sums"
        sides = (chosen.policy, rejected.policy, chosen.reference, rejected.reference)
        return fastrl_kernels.ipo_loss(*(getattr(side, figure) for side in sides), beta=self.beta)


@dataclass(frozen=True)
class LengthNormalizedLoss(PairwiseLoss):
    """A function of p̄, the mean log-prob of a response's tokens; there is no reference."""

    beta: float = 1.0

    def implicit_reward(self, side: PairSide) -> Tensor:
        return self.beta * side.policy.means


@dataclass(frozen=True)
class SimPO(LengthNormalizedLoss):
    """-log σ(β·(p̄_w - p̄_l) - γ): simple preference optimisation.

    See :func:`fastrl_kernels.simpo_loss`.
    """

    name: ClassVar[str] = "simpo"
    beta: float = 2.0
    gamma: float = 1.0

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        means = chosen.policy.means, rejected.policy.means
        return fastrl_kernels.simpo_loss(*means, beta=self.beta, gamma=self.gamma)


@dataclass(frozen=True)
class ORPO(LengthNormalizedLoss):
    """-p̄_w - β·log σ(log-odds of p̄_w less those of p̄_l): odds-ratio preference optimisation.

    See :func:`fastrl_kernels.orpo_loss`.
    """

    name: ClassVar[str] = "orpo"
    beta: float = 0.1

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        means = chosen.policy.means, rejected.policy.means
        return fastrl_kernels.orpo_loss(*means, beta=self.beta) - chosen.policy.means


@dataclass(frozen=True)
class SLiC(PairwiseLoss):
    """max(0, β - log p_w + log p_l) - λ·log p_w: sequence likelihood calibration.

    See :func:`fastrl_kernels.slic_loss`.
    """

    name: ClassVar[str] = "slic"
    beta: float = 1.0
    lam: float = 0.1

    def losses(self, chosen: PairSide, rejected: PairSide) -> Tensor:
        sums = chosen.policy.sums, rejected.policy.sums
        return fastrl_kernels.slic_loss(*sums, beta=self.beta, lam=self.lam)

    def implicit_reward(self, side: PairSide) -> Tensor:
        return side.policy.sums
