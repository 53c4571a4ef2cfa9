"""The one path from hidden states to log-probs, entropies and values.

Old policy, new policy and reference all come through here: two paths would round differently, and
the probability ratio would not be 1 where nothing changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl_kernels.types import LogitTransform


class PolicyObjective(NamedTuple):
    """The clipped objective of the requested rows, as a mean over them unless weighted.

    Over sequences a sum is one over tokens with weights of their own, and a denominator.
    """

    old_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    cliprange: float | tuple[float, float]  # (low, high)
    kl: fastrl_kernels.KLTerm | None = None  # its reference's log-probs [N]
    token_weights: Tensor | None = None  # [N]
    denominator: Tensor | float | None = None  # None: N


class NLLObjective(NamedTuple):
    """-Σ log π / denominator of the requested rows."""

    denominator: Tensor  # []


class ScoringRequest(NamedTuple):
    """Which tokens to score, and what to return for them.

    A model scores N positions of a batch [B, T]: position i is ``rows[i] = b·T + t``, and its
    hidden state predicts ``labels[i]``. The LM head runs on these rows alone.
    """

    rows: Tensor  # [N] int64
    labels: Tensor  # [N] int64
    temperature: float = 1.0
    entropy: bool = False
    values: bool = True
    logits: bool = False
    objective: PolicyObjective | NLLObjective | None = None


class TokenScores(NamedTuple):
    """What a model says of the requested tokens, fp32 but for the logits; None where not asked.

    With an objective its gradient is in the loss: log-probs and entropies have none.
    """

    logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]
    values: Tensor | None  # [N]
    logits: Tensor | None  # [N, V], before the temperature
    loss: Tensor | None = None  # []


def score_logits(logits: Tensor, request: ScoringRequest) -> TokenScores:
    """Scores from a model's own logits [N, V] of the requested rows; values apart."""
    scored: Any = fastrl_kernels.token_logprobs(
        logits, request.labels, temperature=request.temperature, entropy=request.entropy
    )
    logprobs, entropies = scored if request.entropy else (scored, None)
    loss = None
    if isinstance(request.objective, NLLObjective):
        loss = -logprobs.sum() / request.objective.denominator
        logprobs = logprobs.detach()
    elif request.objective is not None:
        old, advantages, *_ = request.objective
        every = torch.ones_like(request.labels, dtype=torch.bool)
        terms = _terms_of(request.objective)
        loss, _ = fastrl_kernels.ppo_loss(logprobs, old, advantages, every, **terms)
        logprobs, entropies = (
            logprobs.detach(),
            entropies if entropies is None else entropies.detach(),
        )
    return TokenScores(logprobs, entropies, None, logits if request.logits else None, loss)


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transform: LogitTransform,
    request: ScoringRequest,
) -> TokenScores:
    """The same from what the LM head would be given, [N, H], and its weight: no logits are kept."""
    options: dict[str, Any] = {
        "bias": bias,
        "temperature": request.temperature,
        "entropy": request.entropy,
        **transform._asdict(),
    }
    if request.objective is None:
        scored: Any = fastrl_kernels.linear_logprobs(hidden, weight, request.labels, **options)
        logprobs, entropies = scored if request.entropy else (scored, None)
        return TokenScores(logprobs, entropies, None, None)
    if isinstance(request.objective, NLLObjective):
        loss, logprobs = fastrl_kernels.linear_nll_loss(
            hidden,
            weight,
            request.labels,
            bias=bias,
            denominator=request.objective.denominator,
            **transform._asdict(),
        )
        return TokenScores(logprobs, None, None, None, loss)
    old, advantages, *_ = request.objective
    every = torch.ones_like(request.labels, dtype=torch.bool)
    options |= _terms_of(request.objective)
    loss, stats = fastrl_kernels.linear_ppo_loss(
        hidden, weight, request.labels, old, advantages, every, **options
    )
    return TokenScores(stats.logprobs, stats.entropies, None, None, loss)


def _terms_of(objective: PolicyObjective) -> dict[str, Any]:
    """What the kernels' losses take by name."""
    names = ("cliprange", "kl", "token_weights", "denominator")
    return {name: getattr(objective, name) for name in names}
