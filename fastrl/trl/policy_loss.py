"""The losses of GRPO and its kin, by the kernels' table of policy losses.

Tokens of B responses lie one after the other, [N]; ``of`` says which response each is of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.learn.aggregate import Aggregate
from fastrl.learn.objective import TokenObjective, loss_of_logprobs
from fastrl.models.host_memory import to_device
from fastrl.models.scoring import PolicyObjective, TokenScores
from fastrl.trl.metric_means import MetricMeans, mean_of
from fastrl.trl.sampled import SampledResponses
from fastrl_kernels.sequence_ratios import log_gamma_weights

LEVELS = ("token", "sequence")


class LearnedTokens(NamedTuple):
    """Response tokens that are learned from, before the policy scores them."""

    advantages: Tensor  # [B]
    counts: Tensor  # [B] int64, tokens of each response
    host_counts: Tensor  # the same on the host
    of: Tensor  # [N] int64
    old: Tensor | None  # [N], log-probs of the policy that sampled them; None: of this one
    ref: Tensor | None  # [N], log-probs of the reference model
    generated: float  # tokens of a batch, in the mean over those that were generated together
    sampler_weights: Tensor | None = None  # [N], of another sampler; None: all 1
    sampled: Tensor | None = None  # [N], log-probs of another sampler; None: old is the sampler's

    @classmethod
    def of_responses(
        cls, part: SampledResponses, generated: float, device: torch.device
    ) -> LearnedTokens:
        """On a device, in one upload of integers and one of numbers."""
        counts = torch.tensor(part.counts)
        of = torch.arange(len(part)).repeat_interleave(counts)
        given = (part.old, part.ref, part.sampler_weights, part.sampled)
        columns = [x if x is None else part.learned(x) for x in given]
        there = [part.advantages, *(x for x in columns if x is not None)]
        numbers = to_device(torch.cat(there), device).split([len(x) for x in there])
        integers = to_device(torch.cat([counts, of]), device)
        behind = iter(numbers[1:])
        old, ref, weights, sampled = (None if x is None else next(behind) for x in columns)
        first = len(part)
        return cls(
            numbers[0],
            integers[:first],
            counts,
            integers[first:],
            old,
            ref,
            generated,
            weights,
            sampled,
        )

    def mean(self, x: Tensor) -> Tensor:
        """Means [B] over the tokens of each response; 0 of none."""
        return self.sum(x) / self.counts.clamp(min=1)

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(self.counts)).index_add(0, self.of, x)

    def differences(self, logprobs: Tensor) -> Tensor:
        """log π - log π_old, [N]."""
        return logprobs - (logprobs.detach() if self.old is None else self.old)


class Ratios(NamedTuple):
    """Probability ratios to the old policy, of tokens or of whole responses."""

    tokens: Tensor  # ρ of each token, [N]; of all tokens of a response the same at "sequence"
    units: Tensor  # [N] or [B]
    advantages: Tensor  # of the units
    by_sequence: bool


def ratios_of(tokens: LearnedTokens, logprobs: Tensor, level: str) -> Ratios:
    """ρ_t = π(y_t)/π_old(y_t), or (GSPO) a response's geometric mean, exp(mean_t log ρ_t)."""
    log_ratio = tokens.differences(logprobs)
    if level == "token":
        ratio = log_ratio.exp()
        return Ratios(ratio, ratio, tokens.advantages[tokens.of], False)
    units = tokens.mean(log_ratio).exp()
    return Ratios(units[tokens.of], units, tokens.advantages, True)


class LossType(NamedTuple):
    """A row of the table of losses.

    Attributes:
        kind: ℓ_t, by its name in ``fastrl_kernels.POLICY_LOSSES``.
        aggregate: of the ℓ_t, by its name in :class:`fastrl.learn.aggregate.Aggregate`.
        formula: for the documents.
        of_step: whether the tokens that the sum is divided by are those of the optimizer step.
    """

    kind: str
    aggregate: str
    formula: str
    of_step: bool = False

    @property
    def clips(self) -> bool:
        """Whether shares of clipped ratios are logged."""
        return self.kind == "clip"


_MEAN, _SUM, _NORM = "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
LOSS_TYPES = {
    "grpo": LossType("clip", _MEAN, "mean over responses of mean_t ℓ_t"),
    "bnpo": LossType("clip", "token-mean", "Σ ℓ_t / tokens of the batch"),
    "dr_grpo": LossType("clip", _NORM, "Σ ℓ_t / (responses·max_completion_length)"),
    "dapo": LossType("clip", "token-mean", "Σ ℓ_t / tokens of the optimizer step", True),
    "luspo": LossType("clip", _SUM, "mean over responses of Σ_t ℓ_t"),
    "cispo": LossType("cispo", "token-mean", "as dapo, ℓ_t = -sg[min(ρ, ε_high)]·A·log π", True),
    "sapo": LossType("sapo", _MEAN, "as grpo, ℓ_t = -4·σ(τ(ρ - 1))/τ·A"),
    "vespo": LossType("vespo", "token-mean", "as dapo, ℓ_t = -sg[φ(w)]·A·log π, w = Π_t ρ_t", True),
}


def high_of(args: Any) -> float:
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


class GroupLoss:
    """Σ_t v_t·(u_t·ℓ_t + β·KL_t) / D - c·mean_t H_t over the tokens of a batch.

    ℓ is the kernels' policy loss. v and D are by ``args.loss_type``'s aggregate of the batch's
    responses, or D is ``generated``, so that the mean over the batches of an optimizer step is the
    step's loss. KL_t = exp(r) - r - 1 of r = log π_ref - log π, times ρ_t where
    ``args.use_bias_correction_kl`` says so (DeepSeek-V3.2). Weights of another sampler are factors
    of u, those of "vespo" of its ratio w in their place.

    Args:
        args: a :class:`fastrl.trl.grpo_config.GRPOConfig`.

    Raises:
        ValueError: a ``delta``, temperatures, powers or decays out of range.
    """

    def __init__(self, args: Any):
        self.type = LOSS_TYPES[args.loss_type]
        self.aggregate = Aggregate(self.type.aggregate, args.max_completion_length, True)
        self.level, self.beta = args.importance_sampling_level, args.beta
        self.corrects_kl = args.use_bias_correction_kl
        kind, high = self.type.kind, high_of(args)
        self.objective = TokenObjective.of(
            args,
            kind,
            "token" if kind == "vespo" else self.level,  # whose ratio is the response's anyway
            # CISPO's ratios have one bound, ε_high itself.
            (args.epsilon, high - 1 if kind == "cispo" else high),
        )
        # The fused loss's gradients are rounded before GradScaler's factor reaches them.
        self.fuses = not args.fp16
        self.threshold = args.off_policy_mask_threshold
        self.top_entropy = args.top_entropy_quantile

    def in_one_pass(
        self, tokens: LearnedTokens, entropy_coef: float, processes: int
    ) -> PolicyObjective | None:
        """The loss as the LM head computes it together with its gradient; None where it needs
        something else.

        That is a KL times a ratio other than 1, which the kernels do not have; the mask of
        responses that are off the policy, and thresholds of entropy over several processes, which
        are known behind all log-probs; a mean of entropies that weighs tokens otherwise than the
        loss; and a loss that is scaled.

        Args:
            entropy_coef: c, as it is now.
            processes: how many there are.
        """
        on_policy, kl = tokens.old is None, None
        weights, denominator, count = *self._aggregate(tokens), len(tokens.of)
        no_kl = on_policy and tokens.sampled is None
        masks = self.threshold is not None and not (no_kl and self.threshold >= 0)
        top = self.top_entropy < 1
        bonus = entropy_coef != 0 and (top or weights is not None)
        if not self.fuses or not count or masks or bonus or (top and processes > 1):
            return None
        objective = self.objective
        if on_policy:  # a sequence's ratio is 1, too
            objective = objective._replace(loss=objective.loss._replace(ratio_level="token"))
        if self.beta:
            assert tokens.ref is not None
            kind = "k3"
            if self.corrects_kl:
                if not on_policy or self.level != "token":
                    return None
                kind = "k3+"  # the derivative of ρ·KL at ρ = 1 is log π - log π_ref
            kl = fastrl_kernels.KLTerm(tokens.ref, self.beta, kind)
        return objective(
            tokens.old,
            tokens.advantages[tokens.of],
            tokens.counts,
            token_weights=weights,
            denominator=denominator,
            kl=kl,
            sampler_weights=tokens.sampler_weights,
            entropy_coef=entropy_coef * denominator / count,
        )

    def __call__(
        self, tokens: LearnedTokens, scores: TokenScores, weights: Tensor | None
    ) -> Tensor:
        """The same from log-probs, without entropies.

        Args:
            scores: the policy's.
            weights: u, [N].
        """
        logprobs = scores.logprobs
        of_tokens, denominator = self._aggregate(tokens)
        objective = self.objective(
            tokens.old,
            tokens.advantages[tokens.of],
            tokens.counts,
            token_weights=of_tokens,
            denominator=denominator,
            sampler_weights=tokens.sampler_weights,
            chosen=weights,
        )
        loss, _ = loss_of_logprobs(logprobs, objective)
        if self.beta:
            kl = self.kl(tokens, logprobs)
            kl = kl if of_tokens is None else kl * of_tokens
            loss = loss + self.beta * kl.sum() / denominator
        return loss

    def kl(self, tokens: LearnedTokens, logprobs: Tensor) -> Tensor:
        """KL_t, [N]."""
        assert tokens.ref is not None
        r = tokens.ref - logprobs
        kl = torch.expm1(r) - r
        return kl * ratios_of(tokens, logprobs, self.level).tokens if self.corrects_kl else kl

    def gammas(self, tokens: LearnedTokens, logprobs: Tensor) -> Tensor:
        """φ(w) of "vespo" at each token of a response, [N]."""
        old, _ = self.objective.beside_sampler(tokens.old, tokens.sampler_weights)
        log_ratio = logprobs - (logprobs if old is None else old)
        every = torch.ones_like(tokens.of, dtype=torch.bool)
        advantages = tokens.advantages[tokens.of]
        found = log_gamma_weights(log_ratio, advantages, every, tokens.counts, self.objective.loss)
        return found.exp()

    def _aggregate(self, tokens: LearnedTokens) -> tuple[Tensor | None, float]:
        """v [N], None where all are 1; and D."""
        weights = self.aggregate.weights(tokens.counts)
        of_tokens = None if weights is None else weights[tokens.of]
        if self.type.of_step:
            return of_tokens, max(tokens.generated, 1e-9)
        return of_tokens, float(self.aggregate.denominator(tokens.host_counts))


def note_clips(
    metrics: MetricMeans,
    ratio: Tensor,
    advantages: Tensor,
    args: Any,
    per_response: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Logs the shares of ratios that are clipped, by TRL's names.

    Args:
        ratio, advantages: of tokens, or of responses.
        per_response: means of what tokens have over each response, [B].
    """
    low = ((ratio < 1 - args.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + high_of(args)) & (advantages > 0)).float()
    parts = {"low": low, "high": high, "region": low + high}
    means = {f"clip_ratio/{name}_mean": mean_of(cut) for name, cut in parts.items()}
    metrics.add(means, of_none=0.0)
    for name, cut, most in (("low_min", low, False), ("high_max", high, True)):
        of_each = cut if per_response is None else per_response(cut)
        metrics.add_extreme(f"clip_ratio/{name}", of_each, most)
