"""Where a step's old log-probs and values come from: the rollout, or another forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.data.batch import TokenBatch
from fastrl.ppo.experience import Known, Scored, Scorer
from fastrl.rollout import RolloutOutput

AUDITED = 4  # samples per step
REMEMBERED = 1 << 14  # samples, the latest
# Largest difference in fp32, mean difference in lower precision, of log-probs and of values.
TOLERANCES = {torch.float32: ("max", 1e-4), torch.float64: ("max", 1e-4)}
LOW_PRECISION = ("mean", 5e-3)


def weights_version(model: nn.Module) -> tuple[int, int]:
    """Differs where a parameter has been written to or replaced, but for fused optimizers."""
    parameters = list(model.parameters())
    places = hash(tuple(p.data_ptr() for p in parameters))
    return sum(p._version for p in parameters), places


class RolloutMemory:
    """What the policy, softmax(logits / temperature), said of the tokens that it generated, for as
    long as its weights stay."""

    def __init__(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, temperature: float = 1.0
    ):
        self.policy, self.temperature = policy, temperature
        # Fused steps raise no parameter's version. One may fail halfway: the hook is in front.
        optimizer.register_step_pre_hook(lambda *_: self._known.clear())
        self._version: tuple[int, int] | None = None
        self._known: dict[tuple[bytes, bytes], tuple[Tensor, Tensor]] = {}

    def keep(self, prompts: Sequence[Tensor], output: RolloutOutput) -> None:
        """Remembers samples, one per prompt."""
        figures = _figures_of(output, self.policy, self.temperature)
        if figures is None:
            return
        self._forget_other_weights()
        for prompt, sequence, told in zip(prompts, output.sequences, figures, strict=True):
            self._known[_key(prompt, sequence)] = told
        for oldest in list(self._known)[: max(0, len(self._known) - REMEMBERED)]:
            del self._known[oldest]

    def find(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Log-probs and values of each response; None unless all came from here, token
        for token, under the current weights."""
        self._forget_other_weights()
        found = [self._known.get(_key(q, r)) for q, r in zip(queries, responses, strict=True)]
        return None if None in found else found  # type: ignore[return-value]

    def _forget_other_weights(self) -> None:
        version = weights_version(self.policy)
        if version != self._version:
            self._known.clear()
            self._version = version


class Recompute:
    """Always another forward of the policy."""

    def __init__(self, scorer: Scorer):
        self.scorer = scorer

    def check(self, known: list[tuple[Tensor, Tensor]] | None) -> None:
        """
        Raises:
            ValueError: what is known does not do.
        """

    def __call__(
        self, batch: TokenBatch, known: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Scored, dict[str, float]]:
        return self.scorer(batch), {"rollout/reused": 0.0}


class Reuse(Recompute):
    """What the rollout said, without a look."""

    def check(self, known: list[tuple[Tensor, Tensor]] | None) -> None:
        if known is None:
            raise ValueError(
                "old_logprobs='rollout', but not all responses come from this trainer's generate() "
                "under the current weights: pass what generated them as rollout=, or set "
                "old_logprobs to 'auto'"
            )

    def __call__(
        self, batch: TokenBatch, known: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Scored, dict[str, float]]:
        assert known is not None
        return self.scorer(batch, _joined(batch, known)), {"rollout/reused": 1.0}


class Audited(Recompute):
    """What the rollout said, where a few samples scored anew agree with it."""

    def __call__(
        self, batch: TokenBatch, known: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Scored, dict[str, float]]:
        if known is None:
            return super().__call__(batch, known)
        samples = batch.counting() or range(len(batch))
        chosen = samples[:: max(1, len(samples) // AUDITED)][:AUDITED]
        part = batch.select(chosen)
        again = self.scorer.policy_scores(part)
        expected = torch.stack([again.logprobs, again.values])
        told = _joined(part, [known[i] for i in chosen])
        difference = (torch.stack([told.logprobs, told.values]) - expected).abs()
        kind, tolerance = TOLERANCES.get(self.scorer.precision, LOW_PRECISION)
        # Values have a scale of their own.
        relative = difference / expected.abs().clamp(min=1)
        figures = torch.stack([relative.max(), relative.mean(), difference[0].max()]).tolist()
        worst, mean, logprobs = figures
        agrees = (worst if kind == "max" else mean) <= tolerance  # NaN does not
        statistics = {"rollout/audit_max": worst, "rollout/audit_mean": mean}
        statistics["rollout/audit_logprobs_max"] = logprobs
        if not agrees:
            return self.scorer(batch), {**statistics, "rollout/reused": 0.0}
        return self.scorer(batch, _joined(batch, known)), {**statistics, "rollout/reused": 1.0}


def make_reuse(kind: str, scorer: Scorer) -> Recompute:
    """By ``PPOConfig.old_logprobs``."""
    return {"auto": Audited, "rollout": Reuse, "recompute": Recompute}[kind](scorer)


def told_by(
    rollout: RolloutOutput, responses: Sequence[Tensor], policy: nn.Module, temperature: float
) -> list[tuple[Tensor, Tensor]] | None:
    """What a rollout of the policy says of its own sequences.

    Raises:
        ValueError: the responses are not its sequences.
    """
    if len(rollout.sequences) != len(responses):
        raise ValueError(
            f"rollout holds {len(rollout.sequences)} samples for {len(responses)} responses: pass "
            "the one that generated them"
        )
    for i, (sequence, response) in enumerate(zip(rollout.sequences, responses, strict=True)):
        if not torch.equal(sequence.cpu(), response.cpu()):
            raise ValueError(f"rollout.sequences[{i}] is not responses[{i}]: pass both unchanged")
    return _figures_of(rollout, policy, temperature)


def without_figures(
    known: list[tuple[Tensor, Tensor]] | None, responses: Sequence[Tensor], left_out: Sequence[int]
) -> list[tuple[Tensor, Tensor]] | None:
    """What is known of each response, with zeros for samples of which no token counts."""
    if known is None:
        return None
    nothing = {i: torch.zeros(len(responses[i])) for i in left_out}
    return [(nothing[i], nothing[i]) if i in nothing else each for i, each in enumerate(known)]


def _figures_of(
    rollout: RolloutOutput, policy: nn.Module, temperature: float
) -> list[tuple[Tensor, Tensor]] | None:
    """Log-probs and values of each response; None where the rollout lacks them."""
    logprobs, values = rollout.logprobs_at(temperature), rollout.values
    if values is None and logprobs is not None and getattr(policy, "v_head", None) is None:
        values = [torch.zeros_like(x) for x in logprobs]  # every value of such a policy
    if logprobs is None or values is None:
        return None
    return list(zip(logprobs, values, strict=True))


def _joined(batch: TokenBatch, known: list[tuple[Tensor, Tensor]]) -> Known:
    """[N], as ``batch.rows()`` has the counted tokens."""
    counted = batch.counted_of_responses()
    device = batch.input_ids.device

    def join(which: int) -> Tensor:
        whole = torch.cat([figures[which] for figures in known]).float()
        return whole.to(counted.device)[counted].to(device)

    return Known(join(0), join(1))


def _key(*sequences: Any) -> tuple[bytes, bytes]:
    prompt, response = (x.cpu().long().numpy().tobytes() for x in sequences)
    return prompt, response
