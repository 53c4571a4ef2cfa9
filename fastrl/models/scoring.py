"""The one path from hidden states to log-probs, entropies and values.

Old policy, new policy and reference are all scored by it: two paths would round differently, and
the probability ratio would not be 1 where nothing changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels

_LOGITS_AT_A_TIME = 1 << 23  # of predictions


class PolicyObjective(NamedTuple):
    """The clipped objective of the requested rows, as a mean over them unless weighted.

    Other aggregates, over sequences, are weights of tokens and a denominator.
    """

    old_logprobs: Tensor  # [N]
    advantages: Tensor  # [N]
    cliprange: float | tuple[float, float]  # (low, high)
    kl: fastrl_kernels.KLTerm | None = None  # its reference's log-probs [N]
    token_weights: Tensor | None = None  # [N]
    denominator: Tensor | float | None = None  # None: N

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels' losses."""
        return dict(zip(self._fields[2:], self[2:], strict=True))


class TokenNLL(NamedTuple):
    """-Σ log π / denominator of the requested rows."""

    denominator: Tensor  # []


class Predictions(NamedTuple):
    """What a model predicts where tokens are scored, without a gradient."""

    entropies: Tensor  # [N], nats
    correct: Tensor  # [N] bool: the label is the likeliest token


class ScoringRequest(NamedTuple):
    """Tokens to score, and the results wanted of them.

    A model scores N positions of a batch [B, T]: position i is ``rows[i] = b·T + t``, and its
    hidden state predicts ``labels[i]``. The LM head runs on these rows alone.
    """

    rows: Tensor  # [N] int64
    labels: Tensor  # [N] int64
    temperature: float = 1.0
    entropy: bool = False
    values: bool = True
    logits: bool = False
    objective: PolicyObjective | TokenNLL | None = None
    predictions: bool = False


class TokenScores(NamedTuple):
    """Scores of the requested tokens, fp32 but for the logits; None where not asked for.

    With an objective only the loss has a gradient, log-probs and entropies have none. The loss of a
    :class:`PolicyObjective` comes with its statistics.
    """

    logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]
    values: Tensor | None  # [N]
    logits: Tensor | None  # [N, V], before the temperature
    loss: Tensor | None = None  # []
    stats: fastrl_kernels.LossStats | None = None
    predictions: Predictions | None = None


class PassLimit(NamedTuple):
    """The most that a forward runs at a time; a sample that has more tokens has one to itself."""

    samples: int
    tokens: int | None = None


@torch.no_grad()
def predictions(logits_of: Callable[[slice], Tensor], labels: Tensor, width: int) -> Predictions:
    """From the logits of a few rows at a time.

    Args:
        logits_of: [n, width] of a slice of the N rows.
        labels: [N].
    """
    entropies, correct = [], []
    some = max(1, _LOGITS_AT_A_TIME // width)
    for begin in range(0, len(labels), some):
        part = slice(begin, begin + some)
        logits, targets = logits_of(part), labels[part]
        entropies.append(fastrl_kernels.token_logprobs(logits, targets, entropy=True)[1])
        correct.append(logits.argmax(-1) == targets)
    if not correct:
        return Predictions(labels.new_empty(0, dtype=torch.float32), labels.bool())
    return Predictions(torch.cat(entropies), torch.cat(correct))


def score_logits(logits: Tensor, request: ScoringRequest) -> TokenScores:
    """Scores from a model's own logits [N, V] of the requested rows, without values."""
    scored: Any = fastrl_kernels.token_logprobs(
        logits, request.labels, temperature=request.temperature, entropy=request.entropy
    )
    logprobs, entropies = scored if request.entropy else (scored, None)
    objective, loss, stats = request.objective, None, None
    if isinstance(objective, TokenNLL):
        loss = -logprobs.sum() / objective.denominator
    elif objective is not None:
        every = torch.ones_like(request.labels, dtype=torch.bool)
        loss, stats = fastrl_kernels.ppo_loss(
            logprobs, objective.old_logprobs, objective.advantages, every, **objective.options
        )
        entropies = entropies if entropies is None else entropies.detach()
    if loss is not None:
        logprobs = logprobs.detach()
    found = None
    if request.predictions:
        found = predictions(lambda part: logits[part], request.labels, logits.shape[-1])
    kept = logits if request.logits else None
    return TokenScores(logprobs, entropies, None, kept, loss, stats, found)
