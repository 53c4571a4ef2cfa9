"""The losses of GRPO and its kin, from the log-probs of response tokens.

Tokens of B responses lie one after the other, [N]; ``of`` says which response each is of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEVELS = ("token", "sequence")


class PolicyTokens(NamedTuple):
    """Response tokens that are learned from."""

    logprobs: Tensor  # [N], of the policy
    entropies: Tensor  # [N]
    old: Tensor  # [N], log-probs of the policy that sampled them
    advantages: Tensor  # [B]
    of: Tensor  # [N] int64
    counts: Tensor  # [B] int64, tokens of each response
    ref: Tensor | None = None  # [N], log-probs of the reference model

    def mean(self, x: Tensor) -> Tensor:
        """Means [B] over the tokens of each response; 0 of none."""
        return self.sum(x) / self.counts.clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(self.counts)).index_add(0, self.of, x)


class Ratios(NamedTuple):
    """Probability ratios to the old policy, of tokens or of whole responses."""

    tokens: Tensor  # ρ of each token, [N]; of all tokens of a response the same at "sequence"
    units: Tensor  # [N] or [B]
    advantages: Tensor  # of the units
    by_sequence: bool


def ratios_of(tokens: PolicyTokens, level: str) -> Ratios:
    """ρ_t = π(y_t)/π_old(y_t), or (GSPO) a response's geometric mean, exp(mean_t log ρ_t)."""
    log_ratio = tokens.logprobs - tokens.old
    if level == "token":
        ratio = log_ratio.exp()
        return Ratios(ratio, ratio, tokens.advantages[tokens.of], False)
    units = tokens.mean(log_ratio).exp()
    return Ratios(units[tokens.of], units, tokens.advantages, True)


def clipped(ratio: Tensor, advantages: Tensor, tokens: PolicyTokens, args: Any) -> Tensor:
    """-min(ρ·A, clip(ρ, 1 - ε, 1 + ε_high)·A); with ``delta`` the first ρ is at most that."""
    near = ratio.clamp(1 - args.epsilon, 1 + high_of(args))
    first = ratio if args.delta is None else ratio.clamp(max=args.delta)
    return -torch.min(first * advantages, near * advantages)


def cispo(ratio: Tensor, advantages: Tensor, tokens: PolicyTokens, args: Any) -> Tensor:
    """-sg[min(ρ, ε_high)]·A·log π (MiniMax-M1, 2025)."""
    return -ratio.clamp(max=high_of(args)).detach() * advantages * tokens.logprobs


def sapo(ratio: Tensor, advantages: Tensor, tokens: PolicyTokens, args: Any) -> Tensor:
    """-4·σ(τ(ρ - 1))/τ·A, τ by the sign of A (soft adaptive policy optimisation, 2025)."""
    warm, cold = args.sapo_temperature_pos, args.sapo_temperature_neg
    tau = torch.where(advantages > 0, warm, cold)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


class LossType(NamedTuple):
    """A row of the table of losses.

    Attributes:
        of_token: ℓ_t from ρ_t, A_t, the tokens and the configuration.
        aggregate: how the ℓ_t become one number, see :func:`aggregated`.
        clips: whether shares of clipped ratios are logged.
        formula: for the documents.
    """

    of_token: Callable[[Tensor, Tensor, PolicyTokens, Any], Tensor]
    aggregate: str
    clips: bool
    formula: str


LOSS_TYPES = {
    "grpo": LossType(clipped, "sequence-mean", True, "mean over responses of mean_t ℓ_t"),
    "bnpo": LossType(clipped, "batch-mean", True, "Σ ℓ_t / tokens of the batch"),
    "dr_grpo": LossType(clipped, "constant", True, "Σ ℓ_t / (responses·max_completion_length)"),
    "dapo": LossType(clipped, "generation-mean", True, "Σ ℓ_t / tokens of the optimizer step"),
    "luspo": LossType(clipped, "sequence-sum", True, "mean over responses of Σ_t ℓ_t"),
    "cispo": LossType(
        cispo, "generation-mean", False, "as dapo, ℓ_t = -sg[min(ρ, ε_high)]·A·log π"
    ),
    "sapo": LossType(sapo, "sequence-mean", False, "as grpo, ℓ_t = -4·σ(τ(ρ - 1))/τ·A"),
}


def high_of(args: Any) -> float:
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


def kl_of(tokens: PolicyTokens, ratio: Tensor, corrected: bool) -> Tensor:
    """exp(r) - r - 1 of r = log π_ref - log π, [N]; ``corrected``, times ρ (DeepSeek-V3.2)."""
    assert tokens.ref is not None
    r = tokens.ref - tokens.logprobs
    kl = r.exp() - r - 1
    return kl * ratio if corrected else kl


def aggregated(
    per_token: Tensor, tokens: PolicyTokens, kind: str, longest: int, generated: Tensor
) -> Tensor:
    """The loss of a batch of B responses, whose mean over the batches of an optimizer step is the
    step's.

    Args:
        kind: "sequence-mean": mean over the B of the means over tokens; "sequence-sum": of the
            sums; "batch-mean": mean over all tokens; "constant": sum over B·longest;
            "generation-mean": sum over ``generated``.
        generated: learned tokens of a batch, in the mean over those that were generated together.
    """
    if kind == "sequence-mean":
        return tokens.mean(per_token).mean()
    if kind == "sequence-sum":
        return tokens.sum(per_token).mean()
    if kind == "batch-mean":
        return per_token.sum() / tokens.counts.sum().clamp(min=1)
    if kind == "constant":
        return per_token.sum() / (len(tokens.counts) * longest)
    return per_token.sum() / generated.clamp(min=1e-9)
