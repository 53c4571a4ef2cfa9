"""From a padded batch to what PPO learns from: log-probs, values, KL, rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.data.batch import TokenBatch
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.ref_model import RefModel


@dataclass(frozen=True)
class Scored:
    """The policy's and the reference's view of a batch, each [B, T-1] fp32, zero where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kls: Tensor | None = None  # over the whole vocabulary; None where estimated from samples


@dataclass(frozen=True)
class Experience:
    """What an update reads, each [B, T-1] fp32, zero where masked."""

    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    kl: fastrl_kernels.KLTerm | None = None  # to add to the loss
    weights: Tensor | None = None  # [B], of each sample's tokens; None: 1
    denominator: Tensor | None = None  # of the loss, []; None: that of these samples

    def select(self, indices: Sequence[int], columns: slice) -> Experience:
        """Some samples, and of their tokens some columns."""
        index = list(indices)
        kl, weights = self.kl, self.weights
        if kl is not None:
            kl = kl._replace(ref_logprobs=kl.ref_logprobs[index, columns])
        return Experience(
            self.logprobs[index, columns],
            self.values[index, columns],
            self.advantages[index, columns],
            self.returns[index, columns],
            kl,
            None if weights is None else weights[index],
        )


class SampledKL:
    """The penalty is a function of the sampled tokens' log-probs."""

    needs_logits = False

    def __init__(self, kind: str):
        self.kind = kind

    def per_row(self, policy: TokenScores, reference: TokenScores) -> Tensor | None:
        """KL of the scored rows [N] where it needs their logits, else None."""
        return None

    def operands(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """What :meth:`rewards` takes, from a scored batch."""
        return scored.logprobs, scored.ref_logprobs

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """The penalty of each token, fp32 [...], from log-probs of the sampled tokens [...]."""
        return fastrl_kernels.kl_penalty(logprobs, ref_logprobs, self.kind)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards, their part without the score, and KL penalties, [B, T-1]."""
        rewards, kls, _ = fastrl_kernels.kl_rewards(
            logprobs, ref_logprobs, scores, mask, coef=coef, kind=self.kind
        )
        return rewards, -coef * kls, kls


class FullKL(SampledKL):
    """The penalty is the KL over the whole vocabulary, computed while both logits are there."""

    needs_logits = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__("kl")
        self.temperature = temperature

    def per_row(self, policy: TokenScores, reference: TokenScores) -> Tensor | None:
        assert policy.logits is not None
        assert reference.logits is not None
        return fastrl_kernels.full_kl(policy.logits, reference.logits, temperature=self.temperature)

    def operands(self, scored: Scored) -> tuple[Tensor, Tensor]:
        assert scored.kls is not None
        return scored.kls, torch.zeros_like(scored.kls)

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Σ_v p·(log p - log ref) of each token, [...], from log-probs of the vocabulary,
        [..., V]."""
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base class; log-probs of the vocabulary, [B, T-1, V], are summed up first."""
        if logprobs.dim() == 3:
            logprobs = self(logprobs, ref_logprobs)
            ref_logprobs = torch.zeros_like(logprobs)
        return super().rewards(scores, logprobs, ref_logprobs, mask, coef)


class NoPenalty(SampledKL):
    """There is no reference: the score is the reward, and the KL is not known (NaN)."""

    def __init__(self) -> None:
        super().__init__("kl")

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return torch.full_like(logprobs, torch.nan, dtype=torch.float32)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rewards, nothing, _ = super().rewards(scores, logprobs, logprobs, mask, 0.0)
        return rewards, nothing, torch.where(mask, torch.nan, nothing)


def make_kl_penalty(kind: str, reference: RefModel, temperature: float = 1.0) -> SampledKL:
    """By ``PPOConfig.kl_penalty``; the policies are softmax(logits / temperature)."""
    if reference.mode == "none":
        return NoPenalty()
    return FullKL(temperature) if kind == "full" else SampledKL(kind)


class Known(NamedTuple):
    """What a rollout said of the counted tokens, [N] each."""

    logprobs: Tensor
    values: Tensor


class Scorer:
    """Runs policy and reference over a batch, without gradients, in slices of some samples; both
    are softmax(logits / temperature)."""

    def __init__(
        self,
        policy: nn.Module,
        reference: RefModel,
        penalty: SampledKL,
        samples_per_pass: int,
        precision: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ):
        self.policy = policy
        self.reference = reference
        self.penalty = penalty
        self.samples_per_pass = samples_per_pass
        self.precision = precision
        self.temperature = temperature

    @torch.no_grad()
    def __call__(self, batch: TokenBatch, known: Known | None = None) -> Scored:
        """With ``known``, the policy's own figures are taken from there."""
        score = self._score if known is None else self._score_reference
        columns: dict[str, list[Tensor]] = {}
        samples = batch.counting() or range(len(batch))
        for start in range(0, len(samples), self.samples_per_pass):
            part = batch.select(samples[start : start + self.samples_per_pass])
            for name, per_row in score(part).items():
                columns.setdefault(name, []).append(per_row)
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        joined |= {} if known is None else known._asdict()
        rows = batch.rows()
        return Scored(**{k: batch.spread(v, rows) for k, v in joined.items()})

    @torch.no_grad()
    def policy_scores(self, part: TokenBatch) -> Known:
        """Of a few samples, by a forward of the policy."""
        scored = self.policy(**part.model_inputs, scoring=self._request(part))
        return Known(scored.logprobs, scored.values)

    def _score_reference(self, part: TokenBatch) -> dict[str, Tensor]:
        request = self._request(part, values=False)
        return {"ref_logprobs": self.reference.score(part.model_inputs, request).logprobs}

    def _score(self, part: TokenBatch) -> dict[str, Tensor]:
        request = self._request(part, logits=self.penalty.needs_logits)
        inputs = part.model_inputs
        policy = self.policy(**inputs, scoring=request)
        reference = self.reference.score(inputs, request._replace(values=False))
        scored = {
            "logprobs": policy.logprobs,
            "values": policy.values,
            "ref_logprobs": reference.logprobs,
        }
        kls = self.penalty.per_row(policy, reference)
        return scored if kls is None else {**scored, "kls": kls}

    def _request(self, part: TokenBatch, **options: Any) -> ScoringRequest:
        return scoring_request(part, temperature=self.temperature, **options)


def scoring_request(batch: TokenBatch, **options: Any) -> ScoringRequest:
    """The batch's counted tokens, each predicted by the position before it."""
    rows = batch.rows()
    return ScoringRequest(rows=rows, labels=batch.input_ids.flatten()[rows + 1], **options)
