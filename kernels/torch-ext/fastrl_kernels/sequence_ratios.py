"""Weights of tokens in the PPO loss, and its gradient where ratios are those of sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .kl import kl_slope, masked_difference
from .policy_losses import PolicyLoss, at_tokens, joined_over_sequences, sequence_sums
from .types import LOG_RATIO_LIMIT, PPOConstants, PPOSettings

_LEAST_LOG_WEIGHT = math.log(1e-8)


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
    """The constants with each token's log-ratio or log φ of its sequence, where these are read."""
    objective = settings.objective
    if not objective.reads_sequences:
        return constants
    mask, lengths = constants.mask, constants.lengths
    with torch.no_grad():
        own = masked_difference(logprobs, constants.old_logprobs, mask)
        if objective.row.of_response:
            found = log_gamma_weights(own, constants.advantages, mask, lengths, objective)
        else:
            found = joined_over_sequences(own, mask, lengths, objective.ratio_level)
    return constants._replace(of_sequences=found)


def log_gamma_weights(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, lengths: Tensor | None, loss: PolicyLoss
) -> Tensor:
    """log φ(w) = λ + k·log w - λ·w of each token's sequence, log w = Σ_t log ρ_t.

    A token's log ρ is clamped to ±20, log w to [log 1e-8, 20], as in TRL 1.16.

    Args:
        log_ratio: [..., T] fp32, log ρ of the tokens.
        advantages: [..., T], whose sign chooses k and λ.
        mask, lengths: as for :func:`fastrl_kernels.policy_losses.sequence_means`.

    Returns:
        [..., T].
    """
    near = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_w = sequence_sums(near, mask, lengths).clamp(_LEAST_LOG_WEIGHT, LOG_RATIO_LIMIT)
    (k_above, k_below), (above, below) = loss.vespo_powers, loss.vespo_decays
    good = at_tokens(above + k_above * log_w - above * log_w.exp(), log_ratio, lengths)
    bad = at_tokens(below + k_below * log_w - below * log_w.exp(), log_ratio, lengths)
    return torch.where(advantages >= 0, good, bad)


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
    """The gradient by log-probs where a sequence has one ratio, with the KL term's. Each of the
    sequence's n tokens gets Σ_u ∂ℓ_u/∂(log ρ), divided by n if the ratio is a geometric mean.

    Args:
        slopes: [..., T] ∂ℓ_t/∂(log ρ), weighted.
        weights: the tokens' weights, for the KL term.
    """
    level, mask = settings.objective.ratio_level, constants.mask
    joined = joined_over_sequences(slopes, mask, constants.lengths, level)
    of_kl = kl_slopes(logprobs, constants, settings)
    if of_kl is not None:
        joined = joined + (of_kl if weights is None else of_kl * weights)
    return torch.where(mask, joined, 0.0)
