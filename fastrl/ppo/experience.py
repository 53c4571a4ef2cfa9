"""What PPO learns from: log-probs and values of a batch, from forwards or from its rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastrl_kernels
from fastrl.data.batch import TokenBatch
from fastrl.models.scoring import ScoringRequest
from fastrl.ppo.kl import KLPenalty
from fastrl.ref_model import RefModel
from fastrl.rollout import RolloutOutput

# Largest difference in fp32, mean difference in lower precision, of log-probs and of values, with
# which those of a rollout are reused.
TOLERANCES = {torch.float32: ("max", 1e-4), torch.float64: ("max", 1e-4)}
LOW_PRECISION = ("mean", 5e-3)
AUDITED = 4  # samples per step that are scored again


@dataclass(frozen=True)
class Scored:
    """Log-probs and values of a batch by the policy and the reference, each [B, T-1] fp32, zero
    where masked."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    kls: Tensor | None = None  # over the whole vocabulary; None where estimated from samples

    @property
    def kl_operands(self) -> tuple[Tensor, Tensor]:
        """What ``KLPenalty.rewards`` takes: both log-probs, or the KL itself and zeros."""
        if self.kls is None:
            return self.logprobs, self.ref_logprobs
        return self.kls, torch.zeros_like(self.kls)


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


class LogprobsAndValues(NamedTuple):
    """Log-probs and values of tokens under the policy that generated them."""

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
    def __call__(self, batch: TokenBatch, rollout: LogprobsAndValues | None = None) -> Scored:
        """With ``rollout``, of the response tokens, the policy itself is not run."""
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
    def policy_scores(self, part: TokenBatch) -> LogprobsAndValues:
        """Scores a few samples by a forward of the policy."""
        scored = self.policy(**part.model_inputs, scoring=self._request(part))
        return LogprobsAndValues(scored.logprobs, scored.values)

    def _score_reference(self, part: TokenBatch) -> dict[str, Tensor]:
        request = self._request(part, values=False)
        return {"ref_logprobs": self.reference.score(part.model_inputs, request).logprobs}

    def _score(self, part: TokenBatch) -> dict[str, Tensor]:
        request = self._request(part, logits=self.penalty.needs_logits)
        policy = self.policy(**part.model_inputs, scoring=request)
        reference = self.reference.score(part.model_inputs, request._replace(values=False))
        scored = {
            "logprobs": policy.logprobs,
            "values": policy.values,
            "ref_logprobs": reference.logprobs,
        }
        if self.penalty.needs_logits:
            assert reference.logits is not None
            scored["kls"] = fastrl_kernels.full_kl(
                policy.logits, reference.logits, temperature=self.temperature
            )
        return scored

    def _request(self, part: TokenBatch, **options: Any) -> ScoringRequest:
        return scoring_request(part, temperature=self.temperature, **options)


def scoring_request(batch: TokenBatch, **options: Any) -> ScoringRequest:
    """The batch's response tokens, each predicted by the position before it."""
    rows = batch.rows()
    return ScoringRequest(rows=rows, labels=batch.input_ids.flatten()[rows + 1], **options)


class OldLogprobs:
    """Where a step's old log-probs and values come from.

    Args:
        kind: of ``PPOConfig.old_logprobs``: "recompute" always runs the policy; "rollout" takes
            what the rollout returned; "auto" does where a few samples that are scored again agree.
        scorer: runs policy and reference.
    """

    def __init__(self, kind: str, scorer: Scorer):
        self.kind, self.scorer = kind, scorer

    def check(self, rollout: Sequence[LogprobsAndValues] | None) -> None:
        """
        Raises:
            ValueError: log-probs of the rollout are required and not known.
        """
        if self.kind == "rollout" and rollout is None:
            raise ValueError(
                "old_logprobs='rollout', but not all responses come from this trainer's generate() "
                "under the current weights: pass what generated them as rollout=, or set "
                "old_logprobs to 'auto'"
            )

    def __call__(
        self, batch: TokenBatch, rollout: Sequence[LogprobsAndValues] | None
    ) -> tuple[Scored, dict[str, float]]:
        """The scored batch, and statistics.

        Args:
            rollout: of each response, where they are known from its generation.
        """
        if self.kind == "recompute" or rollout is None:
            return self.scorer(batch), {"rollout/reused": 0.0}
        taken = {"rollout/reused": 1.0}
        statistics = taken if self.kind == "rollout" else self._audit(batch, rollout)
        reused = _joined(batch, rollout) if statistics["rollout/reused"] else None
        return self.scorer(batch, reused), statistics

    def _audit(self, batch: TokenBatch, rollout: Sequence[LogprobsAndValues]) -> dict[str, float]:
        """Compares a few samples with a forward of the policy."""
        samples = batch.counting() or range(len(batch))
        chosen = samples[:: max(1, len(samples) // AUDITED)][:AUDITED]
        part = batch.select(chosen)
        expected = torch.stack(self.scorer.policy_scores(part))
        difference = (torch.stack(_joined(part, [rollout[i] for i in chosen])) - expected).abs()
        kind, tolerance = TOLERANCES.get(self.scorer.precision, LOW_PRECISION)
        # Values have a scale of their own.
        relative = difference / expected.abs().clamp(min=1)
        numbers = torch.stack([relative.max(), relative.mean(), difference[0].max()])
        worst, mean, logprobs = numbers.tolist()
        return {
            "rollout/audit_max": worst,
            "rollout/audit_mean": mean,
            "rollout/audit_logprobs_max": logprobs,
            # NaN does not agree.
            "rollout/reused": float((worst if kind == "max" else mean) <= tolerance),
        }


def rollout_logprobs(
    rollout: RolloutOutput, policy: nn.Module, temperature: float
) -> list[LogprobsAndValues] | None:
    """Log-probs and values of a rollout's sequences; None where it lacks one of them."""
    logprobs, values = rollout.logprobs_at(temperature), rollout.values
    if values is None and logprobs is not None and getattr(policy, "v_head", None) is None:
        values = [torch.zeros_like(x) for x in logprobs]  # every value of such a policy
    if logprobs is None or values is None:
        return None
    return list(map(LogprobsAndValues, logprobs, values))


def zero_left_out(
    rollout: Sequence[LogprobsAndValues] | None,
    responses: Sequence[Tensor],
    left_out: Sequence[int],
) -> list[LogprobsAndValues] | None:
    """Log-probs and values of each response, zeros for samples of which no token counts."""
    if rollout is None:
        return None
    zeros = {i: torch.zeros(len(responses[i])) for i in left_out}
    return [
        LogprobsAndValues(zeros[i], zeros[i]) if i in zeros else x for i, x in enumerate(rollout)
    ]


def _joined(batch: TokenBatch, rollout: Sequence[LogprobsAndValues]) -> LogprobsAndValues:
    """Of all responses, [N], in the order of ``batch.rows()``."""
    mask = batch.mask_of_responses()

    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)).float().to(mask.device)[mask].to(batch.input_ids.device)

    return LogprobsAndValues(*map(join, zip(*rollout, strict=True)))
