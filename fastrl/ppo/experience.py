"""What PPO learns from: log-probs and values of a batch, KL penalties, rewards, advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.config import PPOConfig
from fastrl.data.batch import TokenBatch, to_host
from fastrl.models.scoring import ScoringRequest, TokenScores
from fastrl.ref_model import RefModel
from fastrl.rollout import RolloutOutput


@dataclass(frozen=True)
class Scored:
    """The policy's and the reference's view of a batch, each [B, T-1] fp32, zero where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kls: Tensor | None = None  # over the whole vocabulary; None where estimated from samples


@dataclass(frozen=True)
class Experience:
    """What an update reads, each [B, T-1] fp32, zero where masked; of the response tokens alone,
    each [N]."""

    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    kl: fastrl_kernels.KLTerm | None = None  # to add to the loss
    weights: Tensor | None = None  # [B], of each sample's tokens; None: 1

    def of_tokens(self, samples: Sequence[int], columns: slice, mask: Tensor) -> Experience:
        """Of some samples' response tokens, each [N].

        Args:
            columns: of [B, T-1], those that the samples need.
            mask: [b, t] bool on the CPU, which of these samples' tokens in these columns count.
        """
        index, kl, weights = list(samples), self.kl, self.weights
        where = mask.flatten().nonzero()[:, 0].to(self.logprobs.device)

        def flat(x: Tensor) -> Tensor:
            return x[index, columns].flatten()[where]

        return Experience(
            flat(self.logprobs),
            flat(self.values),
            flat(self.advantages),
            flat(self.returns),
            None if kl is None else kl._replace(ref_logprobs=flat(kl.ref_logprobs)),
            None if weights is None else weights[index],
        )


# ------------------------------------------------------------------ the KL penalty


class KLPenalty(Protocol):
    """The KL of the policy to the reference, per token, and the rewards that it makes."""

    needs_logits: bool  # whether both models' logits are read

    def per_row(self, policy: TokenScores, reference: TokenScores) -> Tensor | None:
        """KL of the scored rows [N] where it needs their logits, else None."""

    def operands(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """What :meth:`rewards` takes, from a scored batch."""

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards, their part without the score, and KL penalties, [B, T-1]."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """The penalty of each token, fp32 [...]."""


class SampledKLPenalty:
    """The penalty is a function of the sampled tokens' log-probs."""

    needs_logits = False

    def __init__(self, kind: str):
        self.kind = kind

    def per_row(self, policy: TokenScores, reference: TokenScores) -> Tensor | None:
        return None

    def operands(self, scored: Scored) -> tuple[Tensor, Tensor]:
        return scored.logprobs, scored.ref_logprobs

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rewards, kls, _ = fastrl_kernels.kl_rewards(
            logprobs, ref_logprobs, scores, mask, coef=coef, kind=self.kind
        )
        return rewards, -coef * kls, kls

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """From log-probs of the sampled tokens [...]."""
        return fastrl_kernels.kl_penalty(logprobs, ref_logprobs, self.kind)


class FullKLPenalty:
    """The penalty is the KL over the whole vocabulary, computed while both logits are there."""

    needs_logits = True

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature

    def per_row(self, policy: TokenScores, reference: TokenScores) -> Tensor | None:
        assert policy.logits is not None
        assert reference.logits is not None
        return fastrl_kernels.full_kl(policy.logits, reference.logits, temperature=self.temperature)

    def operands(self, scored: Scored) -> tuple[Tensor, Tensor]:
        assert scored.kls is not None
        return scored.kls, torch.zeros_like(scored.kls)

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the vocabulary, [B, T-1, V], are summed up first."""
        if logprobs.dim() == 3:
            logprobs = self(logprobs, ref_logprobs)
            ref_logprobs = torch.zeros_like(logprobs)
        return SampledKLPenalty("kl").rewards(scores, logprobs, ref_logprobs, mask, coef)

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Σ_v p·(log p - log ref) of each token, [...], from log-probs of the vocabulary,
        [..., V]."""
        return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


class NoPenalty:
    """There is no reference: the score is the reward, and the KL is not known (NaN)."""

    needs_logits = False

    def per_row(self, policy: TokenScores, reference: TokenScores) -> Tensor | None:
        return None

    def operands(self, scored: Scored) -> tuple[Tensor, Tensor]:
        return scored.logprobs, scored.ref_logprobs

    def rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, coef: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rewards, nothing, _ = SampledKLPenalty("kl").rewards(scores, logprobs, logprobs, mask, 0.0)
        return rewards, nothing, torch.where(mask, torch.nan, nothing)

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return torch.full_like(logprobs, torch.nan, dtype=torch.float32)


def make_kl_penalty(kind: str, reference: RefModel, temperature: float = 1.0) -> KLPenalty:
    """By ``PPOConfig.kl_penalty``; the policies are softmax(logits / temperature)."""
    if reference.mode == "none":
        return NoPenalty()
    return FullKLPenalty(temperature) if kind == "full" else SampledKLPenalty(kind)


# ------------------------------------------------------------------ log-probs and values


class TokenFigures(NamedTuple):
    """Log-probs and values of tokens under the policy that wrote them."""

    logprobs: Tensor  # [N], or [L] of one response
    values: Tensor  # the same


class Scorer:
    """Runs policy and reference over a batch, without gradients, in slices of some samples; both
    are softmax(logits / temperature)."""

    def __init__(
        self,
        policy: nn.Module,
        reference: RefModel,
        penalty: KLPenalty,
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
    def __call__(self, batch: TokenBatch, rollout: TokenFigures | None = None) -> Scored:
        """With ``rollout``, of the response tokens, the policy's own figures are taken from
        there."""
        score = self._score if rollout is None else self._score_reference
        columns: dict[str, list[Tensor]] = {}
        samples = batch.counting() or range(len(batch))
        for start in range(0, len(samples), self.samples_per_pass):
            part = batch.select(samples[start : start + self.samples_per_pass])
            for name, per_row in score(part).items():
                columns.setdefault(name, []).append(per_row)
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        joined |= {} if rollout is None else rollout._asdict()
        rows = batch.rows()
        return Scored(**{k: batch.scatter(v, rows) for k, v in joined.items()})

    @torch.no_grad()
    def policy_scores(self, part: TokenBatch) -> TokenFigures:
        """Of a few samples, by a forward of the policy."""
        scored = self.policy(**part.model_inputs, scoring=self._request(part))
        return TokenFigures(scored.logprobs, scored.values)

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
    """The batch's response tokens, each predicted by the position before it."""
    rows = batch.rows()
    return ScoringRequest(rows=rows, labels=batch.input_ids.flatten()[rows + 1], **options)


# ------------------------------------------------------------------ old log-probs


AUDITED = 4  # samples per step
# Largest difference in fp32, mean difference in lower precision, of log-probs and of values.
TOLERANCES = {torch.float32: ("max", 1e-4), torch.float64: ("max", 1e-4)}
LOW_PRECISION = ("mean", 5e-3)


class OldLogprobs(Protocol):
    """Where a step's old log-probs and values come from."""

    def check(self, rollout: Sequence[TokenFigures] | None) -> None:
        """
        Raises:
            ValueError: what the rollout says of the responses does not do.
        """

    def __call__(
        self, batch: TokenBatch, rollout: Sequence[TokenFigures] | None
    ) -> tuple[Scored, dict[str, float]]:
        """The scored batch, and statistics; ``rollout`` is what is known of each response from
        where it was generated."""


class Recomputed:
    """Always another forward of the policy."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def check(self, rollout: Sequence[TokenFigures] | None) -> None:
        """Anything does."""

    def __call__(
        self, batch: TokenBatch, rollout: Sequence[TokenFigures] | None
    ) -> tuple[Scored, dict[str, float]]:
        return self.scorer(batch), {"rollout/reused": 0.0}


class OfRollout:
    """What the rollout said, without a look."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def check(self, rollout: Sequence[TokenFigures] | None) -> None:
        if rollout is None:
            raise ValueError(
                "old_logprobs='rollout', but not all responses come from this trainer's generate() "
                "under the current weights: pass what generated them as rollout=, or set "
                "old_logprobs to 'auto'"
            )

    def __call__(
        self, batch: TokenBatch, rollout: Sequence[TokenFigures] | None
    ) -> tuple[Scored, dict[str, float]]:
        assert rollout is not None
        return self.scorer(batch, _joined(batch, rollout)), {"rollout/reused": 1.0}


class AuditedRollout:
    """What the rollout said, where a few samples scored anew agree with it."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def check(self, rollout: Sequence[TokenFigures] | None) -> None:
        """Anything does."""

    def __call__(
        self, batch: TokenBatch, rollout: Sequence[TokenFigures] | None
    ) -> tuple[Scored, dict[str, float]]:
        if rollout is None:
            return self.scorer(batch), {"rollout/reused": 0.0}
        samples = batch.counting() or range(len(batch))
        chosen = samples[:: max(1, len(samples) // AUDITED)][:AUDITED]
        part = batch.select(chosen)
        expected = torch.stack(self.scorer.policy_scores(part))
        told = torch.stack(_joined(part, [rollout[i] for i in chosen]))
        difference = (told - expected).abs()
        kind, tolerance = TOLERANCES.get(self.scorer.precision, LOW_PRECISION)
        # Values have a scale of their own.
        relative = difference / expected.abs().clamp(min=1)
        figures = torch.stack([relative.max(), relative.mean(), difference[0].max()]).tolist()
        worst, mean, logprobs = figures
        agrees = (worst if kind == "max" else mean) <= tolerance  # NaN does not
        statistics = {
            "rollout/audit_max": worst,
            "rollout/audit_mean": mean,
            "rollout/audit_logprobs_max": logprobs,
            "rollout/reused": float(agrees),
        }
        return self.scorer(batch, _joined(batch, rollout) if agrees else None), statistics


def make_old_logprobs(kind: str, scorer: Scorer) -> OldLogprobs:
    """By ``PPOConfig.old_logprobs``."""
    kinds: dict[str, Callable[[Scorer], OldLogprobs]] = {
        "auto": AuditedRollout,
        "rollout": OfRollout,
        "recompute": Recomputed,
    }
    return kinds[kind](scorer)


def rollout_logprobs(
    rollout: RolloutOutput, policy: nn.Module, temperature: float
) -> list[TokenFigures] | None:
    """What a rollout of the policy says of its sequences; None where it lacks log-probs or
    values."""
    logprobs, values = rollout.logprobs_at(temperature), rollout.values
    if values is None and logprobs is not None and getattr(policy, "v_head", None) is None:
        values = [torch.zeros_like(x) for x in logprobs]  # every value of such a policy
    if logprobs is None or values is None:
        return None
    return list(map(TokenFigures, logprobs, values))


def without_figures(
    rollout: Sequence[TokenFigures] | None, responses: Sequence[Tensor], left_out: Sequence[int]
) -> list[TokenFigures] | None:
    """What is known of each response, with zeros for samples of which no token counts."""
    if rollout is None:
        return None
    nothing = {i: torch.zeros(len(responses[i])) for i in left_out}
    return [
        TokenFigures(nothing[i], nothing[i]) if i in nothing else x for i, x in enumerate(rollout)
    ]


def _joined(batch: TokenBatch, rollout: Sequence[TokenFigures]) -> TokenFigures:
    """[N], as ``batch.rows()`` has the response tokens."""
    mask = batch.mask_of_responses()

    def join(figures: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(figures)).float().to(mask.device)[mask].to(batch.input_ids.device)

    return TokenFigures(*map(join, zip(*rollout, strict=True)))


# ------------------------------------------------------------------ advantages


EPS = 1e-4  # beside a group's standard deviation


class Advantages(Protocol):
    """What makes a token better than expected: estimated by a value function, or from a group."""

    def check(self, queries: Sequence[Tensor]) -> None:
        """
        Raises:
            ValueError: samples that do not lie as the estimate needs them.
        """

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (zero where masked), advantages and returns, each [B, T-1]."""

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        """What there is to say of a batch's scores [B], NaN where there is none; 0-d tensors."""


class GAE:
    """Generalised advantage estimates, whitened over the batch (Schulman et al., 2016)."""

    def __init__(self, config: PPOConfig):
        self.gamma, self.lam = config.gamma, config.lam
        self.whiten_rewards = config.whiten_rewards

    def check(self, queries: Sequence[Tensor]) -> None:
        """Any order does."""

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.where(mask, values, 0.0)
        if self.whiten_rewards:
            rewards = fastrl_kernels.masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = fastrl_kernels.gae(
            rewards, values, mask, gamma=self.gamma, lam=self.lam, whiten=True
        )
        return values, advantages, returns

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        return {}


class GroupBaseline:
    """The other responses to the same prompt are the baseline; no values are learnt.

    R is the sum of a response's rewards, and all its tokens have the same advantage, a function of
    the group's R. It is not whitened; where all R of a group are equal it is exactly 0. A response
    of which no token counts is in no baseline; where fewer than two are left, the advantage is 0.

    Args:
        size: responses per prompt, which lie one after the other.
        advantages_of: R less that of the group's first response that counts, and which count, both
            [groups, size] -> [groups, size]; R is 0 where a response does not count, and what comes
            out there is not read.
    """

    def __init__(self, size: int, advantages_of: Callable[[Tensor, Tensor], Tensor]):
        self.size, self.advantages_of = size, advantages_of

    def check(self, queries: Sequence[Tensor]) -> None:
        """
        Raises:
            ValueError: queries of a group differ.
        """
        host = to_host(queries)
        for start in range(0, len(host), self.size):
            for i in range(start + 1, start + self.size):
                if not torch.equal(host[start], host[i]):
                    raise ValueError(
                        f"group {start // self.size}: queries[{i}] is not queries[{start}]; with "
                        f"group_size={self.size} the responses to a prompt lie one after the "
                        "other: repeat each query that many times in a row"
                    )

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros for values, advantages, and R for returns, each [B, T-1], zero where masked."""
        if len(rewards) % self.size:
            raise ValueError(
                f"{len(rewards)} samples are not whole groups of {self.size}: pass all responses "
                "to each prompt"
            )
        totals = torch.where(mask, rewards, 0.0).sum(-1)
        groups, counts = totals.view(-1, self.size), mask.any(-1).view(-1, self.size)
        first = groups.gather(-1, counts.int().argmax(-1, keepdim=True))
        advantages = self.advantages_of(torch.where(counts, groups - first, 0.0), counts)
        return (
            torch.zeros_like(rewards),
            torch.where(mask, advantages.view(-1, 1), 0.0),
            torch.where(mask, totals[:, None], 0.0),
        )

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        """Share of groups whose scores are all equal, and the mean deviation within groups."""
        groups = scores.view(-1, self.size)
        counts = ~groups.isnan()
        first = groups.gather(-1, counts.int().argmax(-1, keepdim=True))
        differences = torch.where(counts, groups - first, 0.0)
        return {
            "groups/no_spread": (differences == 0).all(-1).float().mean(),
            "groups/reward_std": _deviation(differences, counts).mean(),
        }


def centred(rewards: Tensor, counts: Tensor) -> Tensor:
    """R - mean R (Liu et al., "Understanding R1-Zero-like training", 2025: Dr. GRPO)."""
    return rewards - rewards.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)


def standardised(rewards: Tensor, counts: Tensor) -> Tensor:
    """(R - mean R) / (std R + EPS), std unbiased (Shao et al., "DeepSeekMath", 2024: GRPO)."""
    return centred(rewards, counts) / (_deviation(rewards, counts) + EPS)


def left_out(rewards: Tensor, counts: Tensor) -> Tensor:
    """R less the mean of the others' (Ahmadian et al., "Back to basics", 2024: RLOO)."""
    others = (counts.sum(-1, keepdim=True) - 1).clamp(min=1)
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / others


def _deviation(x: Tensor, counts: Tensor) -> Tensor:
    """Unbiased standard deviation of the last dimension's elements that count, kept as one; 0 of
    fewer than two."""
    squares = torch.where(counts, centred(x, counts), 0.0).square().sum(-1, keepdim=True)
    return (squares / (counts.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()


_GROUP_BASELINES = {"grpo": standardised, "dr_grpo": centred, "rloo": left_out}


def make_advantages(config: PPOConfig) -> Advantages:
    """By ``PPOConfig.advantage``."""
    if config.advantage == "gae":
        return GAE(config)
    return GroupBaseline(config.group_size, _GROUP_BASELINES[config.advantage])
