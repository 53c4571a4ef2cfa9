"""The one path from hidden states to log-probs, entropies and values.

Old policy, new policy and reference are all scored by it: two paths would round differently, and
the probability ratio would not be 1 where nothing changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl_kernels.policy_losses import PPO_CLIP, of_top_entropy
from fastrl_kernels.ppo_loss import inverse_of
from fastrl_kernels.types import Extras


class PolicyObjective(NamedTuple):
    """The policy's objective of the requested rows, as a mean over them unless weighted.

    Other aggregates, over sequences, are weights of tokens and a denominator.
    """

    old_logprobs: Tensor | None  # [N]; None: those of the policy that is scored
    advantages: Tensor  # [N]
    cliprange: float | tuple[float, float]  # (low, high)
    kl: fastrl_kernels.KLTerm | None = None  # the KL to the reference, with its log-probs [N]
    token_weights: Tensor | None = None  # [N]
    denominator: Tensor | float | None = None  # None: N
    objective: fastrl_kernels.PolicyLoss = PPO_CLIP
    lengths: Tensor | None = None  # [S], responses' lengths, where ratios are of sequences
    weights: Tensor | None = None  # [N], importance weights of the policy loss, not of the KL
    entropy_coef: float = 0.0  # coefficient of an entropy bonus in each token's loss
    top_entropy: float = 1.0  # the share of tokens that learn, those of the highest entropies

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels' losses."""
        return dict(zip(self._fields[2:-2], self[2:-2], strict=True))

    @property
    def linear_options(self) -> dict[str, Any]:
        """Keyword arguments of the kernels' loss that computes entropies itself."""
        return dict(zip(self._fields[2:], self[2:], strict=True))


class TokenNLL(NamedTuple):
    """-Σ log π / denominator of the requested rows."""

    denominator: Tensor  # []


class TeacherTerm(NamedTuple):
    """coef·Σ v·D / denominator of some of the requested rows, D the divergence from a teacher."""

    # A head with its hidden states [M, H'], or K tokens at each of the M rows.
    head: fastrl_kernels.TeacherHead | fastrl_kernels.TeacherTokens
    coef: float
    beta: float  # which divergence, see ``fastrl_kernels.linear_kl``
    weights: Tensor | None  # v [M]; None: 1
    denominator: Tensor | float
    vocabulary: int | None = None  # the number of tokens, where heads have rows of padding
    rows: Tensor | None = None  # [M] int64, which of the N rows; None: all


class TeacherScores(NamedTuple):
    """What terms with teachers gave."""

    loss: Tensor  # [], their sum, with its gradient
    divergences: Tensor  # [N], without a gradient; 0 for rows without a teacher


class ScoringRequest(NamedTuple):
    """Tokens to score, and the results wanted of them.

    A model scores N positions of a batch [B, T]: position i is ``rows[i] = b·T + t``, and its
    hidden state predicts ``labels[i]``. Where a model allows it, the LM head runs on these alone.

    Terms with teachers have a loss of their own beside the objective's. Where they are all there is
    to learn (``only_teachers``), log-probs and entropies come from their pass, without a gradient.
    """

    rows: Tensor  # [N] int64
    labels: Tensor  # [N] int64
    temperature: float = 1.0
    entropy: bool = False
    values: bool = True
    logits: bool = False
    objective: PolicyObjective | TokenNLL | None = None
    extras: tuple[str, ...] = ()  # names of fastrl_kernels' Extras; not with a PolicyObjective
    teachers: tuple[TeacherTerm, ...] = ()
    only_teachers: bool = False
    as_teacher: bool = False  # only what a teacher is to others is wanted
    # What log-probs, entropies, losses and logits are over, N sets; None: the whole vocabulary.
    support: fastrl_kernels.TokenSets | None = None


class TokenScores(NamedTuple):
    """Scores of the requested tokens, fp32 but for logits and extras; None where not asked for.

    With an objective the loss has a gradient, log-probs and entropies have none. The loss of a
    :class:`PolicyObjective` comes with its statistics.
    """

    logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]
    values: Tensor | None  # [N]
    logits: Tensor | None  # [N, V], before the temperature
    loss: Tensor | None = None  # []
    stats: fastrl_kernels.LossStats | None = None
    extras: Extras | None = None  # [N] each, without gradients
    teacher: TeacherScores | None = None
    head: fastrl_kernels.TeacherHead | None = None  # its states [N, H] and weights, as a teacher's


class PassLimit(NamedTuple):
    """The most that a forward runs at a time; a sample of more tokens has a forward to itself."""

    samples: int
    tokens: int | None = None


def score_logits(logits: Tensor, request: ScoringRequest) -> TokenScores:
    """Scores from a model's own logits [N, V] of the requested rows, without values. Raises
    ValueError for requests with a teacher, which take hidden states and a head's weights."""
    if request.teachers or request.as_teacher:
        raise ValueError(
            "a teacher, and a student beside one, need an LM head that is a plain nn.Linear, "
            "without an adapter or quantisation, whose logits the model changes by a scale or a "
            "soft cap alone"
        )
    if request.support is not None:
        logits = logits.masked_fill(~request.support.mask(), -torch.inf)
    scored: Any = fastrl_kernels.token_logprobs(
        logits, request.labels, temperature=request.temperature, entropy=request.entropy
    )
    logprobs, entropies = scored if request.entropy else (scored, None)
    objective, loss, stats = request.objective, None, None
    if isinstance(objective, TokenNLL):
        loss = -logprobs.sum() / objective.denominator
    elif objective is not None:
        loss, stats = policy_loss_of(logprobs, entropies, objective)
    if loss is not None:
        logprobs = logprobs.detach()
        entropies = entropies if entropies is None else entropies.detach()
    kept = logits if request.logits else None
    extras = _extras(logits.detach(), request) if request.extras else None
    return TokenScores(logprobs, entropies, None, kept, loss, stats, extras)


def policy_loss_of(
    logprobs: Tensor, entropies: Tensor | None, objective: PolicyObjective
) -> tuple[Tensor, fastrl_kernels.LossStats]:
    """An objective's loss from log-probs [N] with their gradient, and its statistics.

    Args:
        entropies: [N], where the objective reads them.
    """
    all_tokens, options = torch.ones_like(logprobs, dtype=torch.bool), objective.options
    if objective.top_entropy < 1:
        assert entropies is not None
        top = of_top_entropy(entropies.detach(), all_tokens, objective.top_entropy).float()
        options["weights"] = top if objective.weights is None else top * objective.weights
    old = objective.old_logprobs
    loss, stats = fastrl_kernels.ppo_loss(
        logprobs,
        logprobs.detach() if old is None else old,
        objective.advantages,
        all_tokens,
        **options,
    )
    if objective.entropy_coef:
        assert entropies is not None
        weights, denominator = objective.token_weights, objective.denominator
        total = (entropies if weights is None else entropies * weights).sum()
        count = torch.as_tensor(max(len(logprobs), 1) if denominator is None else denominator)
        loss = loss - objective.entropy_coef * total * inverse_of(count)
    return loss, stats


def _extras(logits: Tensor, request: ScoringRequest) -> Extras:
    """The requested extras from logits [N, V], where the head cannot compute them as it goes."""
    x = logits.float() / request.temperature
    formulas = {
        "log_sum_sq_probs": lambda: (2 * x.log_softmax(-1)).logsumexp(-1),
        "mean_logit": lambda: x.mean(-1),
        "is_top1": lambda: x.argmax(-1) == request.labels,
    }
    wanted = {name: formulas[name]() for name in request.extras}
    return Extras(*map(wanted.get, Extras._fields))
