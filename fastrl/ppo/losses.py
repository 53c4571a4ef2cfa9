"""What an update minimises, chosen once: clip range, value term, KL term and aggregation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.config import PPOConfig
from fastrl.models.scoring import PolicyObjective
from fastrl.ppo.experience import Experience

# One vector per mini-batch holds LossStats' fields, then these.
MINIBATCH_EXTRAS = (
    "entropy",
    "advantages_mean",
    "returns_mean",
    "returns_var",
    "values_mean",
    "values_var",
)
MINIBATCH_FIELDS = (*fastrl_kernels.LossStats.NAMES, *MINIBATCH_EXTRAS)

# The classic names of what one mini-batch reports, averaged over mini-batches and epochs.
_STATS = {
    "ppo/loss/policy": "policy_loss",
    "ppo/loss/total": "loss",
    "ppo/policy/entropy": "entropy",
    "ppo/policy/approxkl": "approx_kl",
    "ppo/policy/policykl": "policy_kl",
    "ppo/policy/clipfrac": "clipfrac",
    "ppo/policy/advantages_mean": "advantages_mean",
    "ppo/returns/mean": "returns_mean",
    "ppo/returns/var": "returns_var",
    "ppo/policy/clamped_ratios": "clamped_ratios",
}
_VALUE_STATS = {
    "ppo/loss/value": "value_loss",
    "ppo/val/vpred": "value_mean",
    "ppo/val/error": "value_error",
    "ppo/val/clipfrac": "value_clipfrac",
    "ppo/val/mean": "values_mean",
    "ppo/val/var": "values_var",
}
_KL_STATS = {"ppo/loss/kl": "kl_loss"}


class KLInReward:
    """Each token's reward is less by β times its KL penalty, as in classic PPO."""

    stats: ClassVar[dict[str, str]] = {}

    def reward_coef(self, coef: float) -> float:
        """Of the penalty in the rewards."""
        return coef

    def term(self, ref_logprobs: Tensor, coef: float) -> fastrl_kernels.KLTerm | None:
        """What is added to the loss."""
        return None


class KLInLoss(KLInReward):
    """β·(exp(-d) - 1 + d) is added to each token's loss, d = log π - log ref: "k3"."""

    stats = _KL_STATS

    def reward_coef(self, coef: float) -> float:
        return 0.0

    def term(self, ref_logprobs: Tensor, coef: float) -> fastrl_kernels.KLTerm | None:
        return fastrl_kernels.KLTerm(ref_logprobs, coef, "k3")


def make_kl_place(config: PPOConfig) -> KLInReward:
    """By ``PPOConfig.kl_in``."""
    # A coefficient that is 0 stays 0, and there need not be a reference.
    return KLInLoss() if config.kl_in == "loss" and config.init_kl_coef > 0 else KLInReward()


class TokenMean:
    """Σ over tokens / tokens: all tokens of a mini-batch weigh the same, or Σ w / Σ w."""

    def sample_weights(self, mask: Tensor, given: Tensor | None) -> Tensor | None:
        """What each token of a sample weighs, [B], times what is ``given``; None: 1."""
        return given

    def denominator(self, mask: Tensor, weights: Tensor | None) -> Tensor | None:
        """What the sum over the tokens [b, T-1] of some samples is divided by, where those of a
        sample weigh ``weights`` [b]; None: their number. That of a union is the sum of those of
        its parts."""
        return None if weights is None else (weights * mask.sum(-1)).sum()


class SequenceSum(TokenMean):
    """Σ over tokens / samples that count: that have a counted token, and a weight above 0."""

    def denominator(self, mask: Tensor, weights: Tensor | None) -> Tensor | None:
        counts = mask.any(-1)
        if weights is not None:
            counts = counts & (weights > 0)
        return counts.sum().clamp(min=1)


class SequenceMean(SequenceSum):
    """The mean over samples that count of the means over their tokens."""

    def sample_weights(self, mask: Tensor, given: Tensor | None) -> Tensor | None:
        return _times(mask.sum(-1).clamp(min=1).reciprocal(), given)


class SequenceSumNorm(TokenMean):
    """Σ over tokens / (samples of a weight above 0 × length), a length that is the same for all."""

    def __init__(self, length: int | None):
        self.length = length

    def sample_weights(self, mask: Tensor, given: Tensor | None) -> Tensor | None:
        lengths = mask.sum(-1)
        norm = lengths.max().clamp(min=1) if self.length is None else self.length
        return _times(torch.ones_like(lengths) / norm, given)

    def denominator(self, mask: Tensor, weights: Tensor | None) -> Tensor | None:
        assert weights is not None  # 1 / length
        return (weights > 0).sum().clamp(min=1)


def make_aggregate(config: PPOConfig) -> TokenMean:
    """By ``PPOConfig.loss_aggregate``, one of the kernels' AGGREGATES; sums over flat rows, whose
    sequences a kernel cannot see, come out the same."""
    if config.loss_aggregate == "seq-mean-token-sum-norm":
        return SequenceSumNorm(config.loss_norm_length)
    kinds = {
        "token-mean": TokenMean,
        "seq-mean-token-sum": SequenceSum,
        "seq-mean-token-mean": SequenceMean,
    }
    return kinds[config.loss_aggregate]()


class MinibatchDenominator:
    """Each mini-batch's loss is divided by its own tokens (or samples), and an optimizer step's is
    the mean over its mini-batches, as in TRL: tokens of a short mini-batch weigh more."""

    def __call__(
        self, mask: Tensor, weights: Tensor | None, parts: Sequence[Sequence[int]]
    ) -> Tensor | None:
        """What each of an optimizer step's mini-batches is divided by; None: its own.

        Args:
            mask, weights: [B, T-1] and [B] or None, of the whole batch.
            parts: the samples of each mini-batch.
        """
        return None


class StepDenominator(MinibatchDenominator):
    """The loss of an optimizer step is divided by the tokens (or samples) of all its mini-batches,
    so that it does not depend on how many there are.

    Σ_j S_j / D is the mean over n mini-batches of S_j / (D / n): each has the same denominator.
    """

    def __init__(self, aggregate: TokenMean):
        self.aggregate = aggregate

    def __call__(
        self, mask: Tensor, weights: Tensor | None, parts: Sequence[Sequence[int]]
    ) -> Tensor | None:
        if len(parts) == 1:
            return None
        chosen = [i for part in parts for i in part]
        counted = mask[chosen]
        whole = self.aggregate.denominator(counted, None if weights is None else weights[chosen])
        return (counted.sum() if whole is None else whole) / len(parts)


def make_denominator(config: PPOConfig, aggregate: TokenMean) -> MinibatchDenominator:
    """By ``PPOConfig.loss_denominator``; "auto" is TRL's for GAE."""
    kind = config.loss_denominator
    if kind == "auto":
        kind = "minibatch" if config.needs_values else "step"
    return MinibatchDenominator() if kind == "minibatch" else StepDenominator(aggregate)


class UpdateLoss:
    """The loss of a mini-batch, and its statistics.

    Σ_t w_t·[max(-A·ρ, -A·clip(ρ, 1 - low, 1 + high)) + vf_coef·½·max((v-R)², (clip(v, v_old ±
    c) - R)²) + KL term] / denominator over the counted tokens; without a value function the second
    is not there.

    Attributes:
        stats: the classic names of its statistics, with their MINIBATCH_FIELDS.
        temperature: T of the policy softmax(logits / T).
    """

    def __init__(self, config: PPOConfig, aggregate: TokenMean, kl_place: KLInReward):
        high = config.cliprange if config.cliprange_high is None else config.cliprange_high
        self.cliprange = (config.cliprange, high)
        self.aggregate = aggregate
        self.temperature = config.temperature
        self.value_term = self._classic_value_term if config.needs_values else _no_value_term
        self.value_options = config.cliprange_value, config.vf_coef
        self.stats = _STATS | (_VALUE_STATS if config.needs_values else {}) | kl_place.stats

    def objective(self, old: Experience, mask: Tensor, counted: Tensor) -> PolicyObjective:
        """The policy's part for the LM head: of the rows ``counted`` of [b, T-1], flattened."""

        def flat(x: Tensor) -> Tensor:
            return x.flatten()[counted]

        weights = self._token_weights(old, mask)
        return PolicyObjective(
            flat(old.logprobs),
            flat(old.advantages),
            self.cliprange,
            None if old.kl is None else old.kl._replace(ref_logprobs=flat(old.kl.ref_logprobs)),
            None if weights is None else flat(weights),
            self._denominator(old, mask),
        )

    def __call__(
        self, old: Experience, logprobs: Tensor, values: Tensor, entropies: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss, and its statistics as one vector of MINIBATCH_FIELDS; tensors [b, T-1]."""
        loss, stats = fastrl_kernels.ppo_loss(
            logprobs,
            old.logprobs,
            old.advantages,
            mask,
            cliprange=self.cliprange,
            value=self.value_term(values, old),
            kl=old.kl,
            token_weights=self._token_weights(old, mask),
            denominator=self._denominator(old, mask),
        )
        with torch.no_grad():
            returns = fastrl_kernels.masked_moments(old.returns, mask)
            old_values = fastrl_kernels.masked_moments(old.values, mask)
            extras = (
                fastrl_kernels.masked_mean(entropies, mask),
                fastrl_kernels.masked_mean(old.advantages, mask),
                returns.mean,
                returns.m2 / (returns.count - 1).clamp(min=1),
                old_values.mean,
                old_values.m2 / (old_values.count - 1).clamp(min=1),
            )
            vector = torch.cat([stats.tensor, torch.stack([e.float() for e in extras])])
        return loss, vector

    def _denominator(self, old: Experience, mask: Tensor) -> Tensor | None:
        if old.denominator is not None:
            return old.denominator
        return self.aggregate.denominator(mask, old.weights)

    def _token_weights(self, old: Experience, mask: Tensor) -> Tensor | None:
        return None if old.weights is None else old.weights[:, None].expand(mask.shape)

    def _classic_value_term(self, values: Tensor, old: Experience) -> fastrl_kernels.ValueTerm:
        return fastrl_kernels.ValueTerm(values, old.values, old.returns, *self.value_options)


def _no_value_term(values: Tensor, old: Experience) -> None:
    return None


def _times(weights: Tensor, given: Tensor | None) -> Tensor:
    return weights if given is None else weights * given
