"""Weights of tokens in the PPO loss, and its gradient where ratios are those of sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from .kl import kl_slope, masked_difference
from .policy_losses import sequence_means
from .types import PPOConstants, PPOSettings


def token_weights(constants: PPOConstants, settings: PPOSettings) -> Tensor | None:
    """Weights of tokens, [..., T] or [..., 1], without the denominator; None where all are 1."""
    mask, given = constants.mask, constants.token_weights
    weights = None if given is None else torch.where(mask, given.float(), 0.0)
    if settings.aggregate != "seq-mean-token-mean":
        return weights
    by_rows = mask.sum(-1, keepdim=True).clamp(min=1).to(torch.float32).reciprocal()
    return by_rows if weights is None else by_rows * weights


def with_sequences(
    logprobs: Tensor, constants: PPOConstants, settings: PPOSettings
) -> PPOConstants:
    """The constants with the log-ratios of sequences, where the objective reads them."""
    if settings.objective.ratio_level == "token":
        return constants
    with torch.no_grad():
        own = masked_difference(logprobs, constants.old_logprobs, constants.mask)
        means = sequence_means(own, constants.mask, constants.lengths)
    return constants._replace(sequence_log_ratios=means)


def kl_slopes(logprobs: Tensor, constants: PPOConstants, settings: PPOSettings) -> Tensor | None:
    """The derivative of the KL term by log-probs, with its coefficient."""
    if constants.ref_logprobs is None:
        return None
    d = masked_difference(logprobs, constants.ref_logprobs, constants.mask)
    return settings.kl_coef * kl_slope(d, settings.kl_kind)


def over_sequences(
    slopes: Tensor,
    logprobs: Tensor,
    weights: Tensor | None,
    constants: PPOConstants,
    settings: PPOSettings,
) -> Tensor:
    """The gradient by log-probs where a sequence has one ratio: Σ_u ∂ℓ_u/∂(log ρ) · 1/n for each of
    its n tokens, and the KL term's.

    Args:
        slopes: [..., T] ∂ℓ_t/∂(log ρ), weighted.
        weights: of tokens, for the KL term.
    """
    means = sequence_means(slopes, constants.mask, constants.lengths)
    of_kl = kl_slopes(logprobs, constants, settings)
    if of_kl is not None:
        means = means + (of_kl if weights is None else of_kl * weights)
    return torch.where(constants.mask, means, 0.0)
