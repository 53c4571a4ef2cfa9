"""The KL penalty: its estimate per token, where it acts, and its coefficient."""

from __future__ import annotations

import math
import warnings
from typing import Protocol

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.ref_model import RefModel

Rewards = tuple[Tensor, Tensor, Tensor]


class KLPenalty(Protocol):
    """The KL of the policy to the reference per token, and the rewards that contain it."""

    needs_logits: bool  # whether it needs both models' logits

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """The penalty of each token, fp32 [...]."""

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> Rewards:
        """Rewards, their part without the score, and KL penalties, [B, T-1] each."""


class SampledKLPenalty:
    """The KL estimated from the log-probs of the sampled tokens."""

    needs_logits = False

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """From log-probs of the sampled tokens [...]."""
        return fastrl_kernels.kl_penalty(logprobs, ref_logprobs, self.kind)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> Rewards:
        rewards, kls, _ = fastrl_kernels.kl_rewards(
            logprobs, ref_logprobs, scores, mask, coef=coef, kind=self.kind
        )
        return rewards, -coef * kls, kls


class FullKLPenalty:
    """The KL over the whole vocabulary."""

    needs_logits = True

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Σ_v p·(log p - log ref) of each token, [...], from log-probs of the vocabulary,
        [..., V]."""
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> Rewards:
        """From log-probs of the vocabulary, [B, T-1, V], or from the KL itself and zeros."""
        if logprobs.dim() == 3:
            logprobs = self(logprobs, ref_logprobs)
            ref_logprobs = torch.zeros_like(logprobs)
        return SampledKLPenalty("kl").rewards(scores, logprobs, ref_logprobs, mask, coef)


class NoPenalty:
    """No reference model: the score is the reward, and the KL is unknown (NaN)."""

    needs_logits = False

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return torch.full_like(logprobs, torch.nan, dtype=torch.float32)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> Rewards:
        rewards, zeros, _ = SampledKLPenalty("kl").rewards(scores, logprobs, logprobs, mask, 0.0)
        return rewards, zeros, torch.where(mask, torch.nan, zeros)


def make_kl_penalty(kind: str, reference: RefModel) -> KLPenalty:
    """The penalty by its name: "kl", "abs", "mse" or "full"."""
    if reference.mode == "none":
        return NoPenalty()
    return FullKLPenalty() if kind == "full" else SampledKLPenalty(kind)


class KLPlace(Protocol):
    """Where the KL penalty acts: on the rewards or in the loss."""

    def reward_coef(self, coef: float) -> float:
        """β of the penalty in the rewards."""

    def term(self, ref_logprobs: Tensor, coef: float) -> fastrl_kernels.KLTerm | None:
        """The term that is added to the loss."""


class KLInReward:
    """Each token's reward is less by β times its KL penalty, as in classic PPO."""

    def reward_coef(self, coef: float) -> float:
        return coef

    def term(self, ref_logprobs: Tensor, coef: float) -> None:
        return None


class KLInLoss:
    """β·(exp(-d) - 1 + d) is added to each token's loss, d = log π - log ref: "k3"."""

    def reward_coef(self, coef: float) -> float:
        return 0.0

    def term(self, ref_logprobs: Tensor, coef: float) -> fastrl_kernels.KLTerm:
        return fastrl_kernels.KLTerm(ref_logprobs, coef, "k3")


class AdaptiveKLController:
    """β ← β·(1 + clip(kl/target - 1, ±0.2)·n/horizon) after n samples (Ziegler et al., 2019)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        if math.isnan(current):  # nothing was measured
            return
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """A constant β."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        pass


def warn_of_negative_kl(kl: float) -> None:
    """Warns of an estimate that responses of the policy itself hardly have."""
    if kl < -1.0:
        warnings.warn(
            f"the KL estimate is negative ({kl:.2f}): the responses are unlikely under the "
            "policy. Were they generated by it, with top_k=0, top_p=1 and no other change to "
            "its distribution?",
            stacklevel=3,
        )
