"""Losses on pairs of responses, of which one is preferred."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.alignment.batch import Batch
from fastrl.alignment.logprobs import ResponseLogprobs
from fastrl.alignment.losses.base import (
    Loss,
    LossOutput,
    register,
    share_ahead,
    weighted_mean,
)


@dataclass(frozen=True)
class PairwiseLoss(Loss):
    """A loss ℓ(preferred, other) of each pair of responses.

    A pair's rewards say which is preferred: with p that of the first, the loss is
    p·ℓ(first, second) + (1-p)·ℓ(second, first), and p is 1, 0, or ½ for a tie.
    """

    tasks: ClassVar[tuple[str, ...]] = ("offline-pairwise", "online-pairwise")

    def __post_init__(self) -> None:
        """Checks the coefficients, by the op that takes them.

        Raises:
            ValueError: a coefficient out of range.
        """
        super().__post_init__()
        one = torch.ones(1)
        side = ResponseLogprobs(-one, one.long(), -one)
        self.losses(side, side)

    @abstractmethod
    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        """ℓ of each pair, [B]."""

    @abstractmethod
    def implicit_reward(self, side: ResponseLogprobs) -> Tensor:
        """The reward that the policy's log-probs imply, [B]; for metrics."""

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        # The reference first, while no activations of the policy take memory.
        refs = [side.sums for side in reference.logprobs(batch)] if self.compares else (None, None)
        first, second = (
            side._replace(ref_sums=ref)
            for side, ref in zip(policy.logprobs(batch), refs, strict=True)
        )
        preferred = batch.rewards(1)  # on the host, where reading it does not wait for the device
        undecided = bool(((preferred > 0) & (preferred < 1)).any())
        preferred = preferred.to(first.sums.device)
        ahead = preferred >= 0.5
        chosen, rejected = first.where(ahead, second), second.where(ahead, first)
        losses = self.losses(chosen, rejected)
        if undecided:
            share = torch.where(ahead, preferred, 1.0 - preferred)
            both = share * losses + (1.0 - share) * self.losses(rejected, chosen)
            losses = torch.where(share < 1, both, losses)
        return LossOutput(weighted_mean(losses, batch), self._metrics(chosen, rejected))

    @torch.no_grad()
    def _metrics(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> dict[str, Tensor]:
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
class ReferenceLoss(PairwiseLoss):
    """A loss that is a function of r = log π - log ref of both responses."""

    compares: ClassVar[bool] = True
    beta: float = 0.1

    def implicit_reward(self, side: ResponseLogprobs) -> Tensor:
        return self.beta * side.ratio


@dataclass(frozen=True)
class MarginLoss(ReferenceLoss):
    """A loss that is a function of the margin h = β(r_w - r_l).

    See :func:`fastrl_kernels.dpo_loss`.

    Args:
        label_smoothing: ε, the share of swapped labels.
    """

    kind: ClassVar[str] = "sigmoid"
    label_smoothing: float = 0.0

    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        return fastrl_kernels.dpo_loss(
            chosen.sums,
            rejected.sums,
            chosen.ref_sums,
            rejected.ref_sums,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            kind=self.kind,
        )


@register
@dataclass(frozen=True)
class DPO(MarginLoss):
    """-log σ(β(r_w - r_l)): direct preference optimisation (Rafailov et al., 2023)."""

    name: ClassVar[str] = "dpo"


@register
@dataclass(frozen=True)
class ConservativeDPO(MarginLoss):
    """DPO where a share ε of the labels is swapped: (1-ε)·ℓ(h) + ε·ℓ(-h)."""

    name: ClassVar[str] = "cdpo"
    label_smoothing: float = 0.1


@register
@dataclass(frozen=True)
class RobustDPO(MarginLoss):
    """DPO without the bias of swapped labels: [(1-ε)·ℓ(h) - ε·ℓ(-h)]/(1-2ε)."""

    name: ClassVar[str] = "robust"
    kind: ClassVar[str] = "robust"
    label_smoothing: float = 0.1


@register
@dataclass(frozen=True)
class Hinge(ReferenceLoss):
    """max(0, 1 - β(r_w - r_l)). See :func:`fastrl_kernels.dpo_loss`."""

    name: ClassVar[str] = "hinge"

    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        sums = (chosen.sums, rejected.sums, chosen.ref_sums, rejected.ref_sums)
        return fastrl_kernels.dpo_loss(*sums, beta=self.beta, kind="hinge")


@register
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

    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        logprobs = (chosen.sums, rejected.sums, chosen.ref_sums, rejected.ref_sums)
        if self.length_means:
            logprobs = (chosen.means, rejected.means, chosen.ref_means, rejected.ref_means)
        return fastrl_kernels.ipo_loss(*logprobs, beta=self.beta)


@dataclass(frozen=True)
class LengthNormalizedLoss(PairwiseLoss):
    """A loss that is a function of p̄, the mean log-prob of a response's tokens, without a
    reference."""

    beta: float = 1.0

    def implicit_reward(self, side: ResponseLogprobs) -> Tensor:
        return self.beta * side.means


@register
@dataclass(frozen=True)
class SimPO(LengthNormalizedLoss):
    """-log σ(β·(p̄_w - p̄_l) - γ): simple preference optimisation.

    See :func:`fastrl_kernels.simpo_loss`.
    """

    name: ClassVar[str] = "simpo"
    beta: float = 2.0
    gamma: float = 1.0

    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        means = chosen.means, rejected.means
        return fastrl_kernels.simpo_loss(*means, beta=self.beta, gamma=self.gamma)


@register
@dataclass(frozen=True)
class ORPO(LengthNormalizedLoss):
    """-p̄_w - β·log σ(log-odds of p̄_w less those of p̄_l): odds-ratio preference optimisation.

    See :func:`fastrl_kernels.orpo_loss`.
    """

    name: ClassVar[str] = "orpo"
    beta: float = 0.1

    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        means = chosen.means, rejected.means
        return fastrl_kernels.orpo_loss(*means, beta=self.beta) - chosen.means


@register
@dataclass(frozen=True)
class SLiC(PairwiseLoss):
    """max(0, β - log p_w + log p_l) - λ·log p_w: sequence likelihood calibration.

    See :func:`fastrl_kernels.slic_loss`.
    """

    name: ClassVar[str] = "slic"
    beta: float = 1.0
    lam: float = 0.1

    def losses(self, chosen: ResponseLogprobs, rejected: ResponseLogprobs) -> Tensor:
        sums = chosen.sums, rejected.sums
        return fastrl_kernels.slic_loss(*sums, beta=self.beta, lam=self.lam)

    def implicit_reward(self, side: ResponseLogprobs) -> Tensor:
        return side.sums
