"""The preference and reward losses in plain PyTorch, as `reference` has the other ops.

Written term by term from the papers, in whatever dtype they are given; in float64 they judge the
public ops.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CERTAIN = -(2.0**-24)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Tensor:
    """-log σ(βh) with h = log π_w/π_l - log ref_w/ref_l, its mixtures with -log σ(-βh); a hinge."""
    h = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    right, swapped = F.softplus(-beta * h, threshold=50), F.softplus(beta * h, threshold=50)
    if kind == "sigmoid":
        return (1 - label_smoothing) * right + label_smoothing * swapped
    if kind == "robust":
        unbiased = (1 - label_smoothing) * right - label_smoothing * swapped
        return unbiased / (1 - 2 * label_smoothing)
    if kind == "hinge":
        return torch.relu(1 - beta * h)
    raise ValueError(f"unknown kind {kind!r}")


def ipo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """(h - 1/(2β))²."""
    h = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    return (h - 0.5 / beta) ** 2


def simpo_loss(
    mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 10.0, gamma: float = 3.0
) -> Tensor:
    """-log σ(β(p̄_w - p̄_l - γ/β))."""
    return F.softplus(-beta * (mean_chosen - mean_rejected - gamma / beta), threshold=50)


def orpo_loss(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """-β·log σ(log odds_w - log odds_l), odds = p/(1 - p), p at most 1 - 2⁻²⁴ and differentiated
    there."""

    def log_odds(logprobs: Tensor) -> Tensor:
        at_most = logprobs + (logprobs.clamp(max=CERTAIN) - logprobs).detach()
        return at_most - (-torch.expm1(at_most)).log()

    return beta * F.softplus(log_odds(mean_rejected) - log_odds(mean_chosen), threshold=50)


def slic_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, *, beta: float = 1.0, lam: float = 0.1
) -> Tensor:
    """max(0, β - log p_w + log p_l) - λ·log p_w."""
    return torch.relu(beta - policy_chosen + policy_rejected) - lam * policy_chosen


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D(1 - σ(β(r - z))) where desirable, λ_U(1 - σ(β(z - r))) elsewhere, z = max(0, KL)."""
    r, z = policy - reference, torch.as_tensor(kl).detach().to(policy).clamp(min=0)
    gains = desirable_weight * (1 - torch.sigmoid(beta * (r - z)))
    losses = undesirable_weight * (1 - torch.sigmoid(beta * (z - r)))
    return torch.where(desirable, gains, losses)


def reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, center_coef: float = 0.0
) -> Tensor:
    """-log σ(r_c - r_r - margin) + c·(r_c + r_r)²."""
    above = chosen - rejected
    if margin is not None:
        above = above - margin
    return F.softplus(-above, threshold=50) + center_coef * (chosen + rejected) ** 2
