"""Old log-probs and values of an update: of the rollout, or of another forward of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fastrl.data.token_batch import TokenBatch
from fastrl.learn.experience import Experience
from fastrl.learn.scorer import Scorer
from fastrl.models.host_memory import to_device
from fastrl.samples import Samples

# A rollout's log-probs and values are reused if they differ from those of another forward by no
# more than this: the largest difference in fp32 and fp64, the mean one in lower precision.
_TOLERANCES = {torch.float32: ("max", 1e-4), torch.float64: ("max", 1e-4)}
_LOW_PRECISION = ("mean", 5e-3)
_AUDITED = 4  # samples per step that are scored again, at most


class OldLogprobs:
    """Where a step's old log-probs and values come from.

    Args:
        kind: the setting ``PPOConfig.old_logprobs``: "recompute" always runs the policy; "rollout"
            takes what the rollout returned; "auto" does so where a few samples that are scored
            again agree.
        scorer: runs policy and reference.
    """

    def __init__(self, kind: str, scorer: Scorer):
        self.kind, self.scorer = kind, scorer

    def check(self, samples: Samples) -> None:
        """Raises ValueError where log-probs of the rollout are required and not known."""
        if self.kind == "rollout" and samples.old_logprobs is None:
            raise ValueError(
                "old_logprobs='rollout', but not all responses come from this trainer's generate() "
                "under the current weights: pass what generated them as rollout=, or set "
                "old_logprobs to 'auto'"
            )

    def __call__(self, batch: TokenBatch, samples: Samples) -> tuple[Experience, dict[str, float]]:
        """The scored batch, and statistics.

        Args:
            samples: with old log-probs and values, where they are known from the generation.
        """
        if self.kind == "recompute" or samples.old_logprobs is None:
            return self.scorer(batch), {"rollout/reused": 0.0}
        taken = {"rollout/reused": 1.0}
        statistics = taken if self.kind == "rollout" else self._audit(batch, samples)
        reused = _joined(batch, samples) if statistics["rollout/reused"] else None
        return self.scorer(batch, reused), statistics

    def _audit(self, batch: TokenBatch, samples: Samples) -> dict[str, float]:
        """Compares a few samples with a forward of the policy."""
        chosen = audited(batch.counting() or range(len(batch)))
        part = batch.select(chosen)
        counting = part.response_mask.flatten().nonzero()[:, 0]
        where = to_device(counting, part.input_ids.device)
        expected = torch.stack([x.flatten()[where] for x in self.scorer.policy_scores(part)])
        difference = (torch.stack(_joined(part, samples.select(chosen))) - expected).abs()
        # Values have a scale of their own.
        relative = difference / expected.abs().clamp(min=1)
        numbers = torch.stack([relative.max(), relative.mean(), difference[0].max()])
        worst, mean, logprobs = self.scorer.processes.from_main(numbers.tolist())
        return {
            "rollout/audit_max": worst,
            "rollout/audit_mean": mean,
            "rollout/audit_logprobs_max": logprobs,
            "rollout/reused": float(agrees(worst, mean, self.scorer.precision)),
        }


def audited(samples: Sequence[int]) -> list[int]:
    """Chooses a few of a step's samples, evenly, that are scored again."""
    number = min(_AUDITED, len(samples))
    return [samples[i * len(samples) // number] for i in range(number)]


def agrees(largest: float, mean: float, precision: torch.dtype) -> bool:
    """Whether a rollout's numbers agree with those of another forward: in fp32 (and fp64) by their
    ``largest`` difference, in lower precision by the ``mean`` one; NaN does not agree.

    Args:
        precision: the lowest precision in which the model computes.
    """
    kind, tolerance = _TOLERANCES.get(precision, _LOW_PRECISION)
    return (largest if kind == "max" else mean) <= tolerance


def known_of(rollout: Samples, policy: nn.Module, temperature: float) -> Samples:
    """A rollout's columns that an update of ``policy``, which drew it, reads: log-probs and values
    (0 without a value head) become the old ones; where either is unknown, both are None."""
    logprobs, values = rollout.logprobs_at(temperature), rollout.values
    if values is None and logprobs is not None and getattr(policy, "v_head", None) is None:
        values = [torch.zeros_like(x) for x in logprobs]  # a policy without a value head
    if logprobs is None or values is None:
        logprobs = values = None
    return replace(rollout.to_learn(), old_logprobs=logprobs, values=values)


def _joined(batch: TokenBatch, samples: Samples) -> tuple[Tensor, Tensor]:
    """Old log-probs and values, [N] each, of the tokens that ``batch.rows()`` predict, in order."""
    assert samples.old_logprobs is not None
    assert samples.values is not None
    mask = batch.mask_of_responses()

    def join(tensors: Sequence[Tensor]) -> Tensor:
        on_host = torch.cat(list(tensors)).float().to(mask.device)[mask]
        return to_device(on_host, batch.input_ids.device)

    return join(samples.old_logprobs), join(samples.values)
