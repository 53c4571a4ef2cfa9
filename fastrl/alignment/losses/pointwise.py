"""Losses on single responses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastrl.alignment.batch import Batch
from fastrl.alignment.losses.base import Loss, LossOutput, register, share_ahead, weighted_mean
from fastrl.alignment.tasks import Task
from fastrl.learn.preferences import UNPAIRED_LOSSES, Side, UnpairedObjective, mismatched_kl
from fastrl.settings import is_number


@register
@dataclass(frozen=True)
class SFT(Loss):
    """The mean -log π over the tokens of all responses: supervised fine-tuning.

    With weights w per response: -Σ w·log π / Σ w. Both sums are over the tokens of all processes.
    """

    name: ClassVar[str] = "sft"
    tasks: ClassVar[tuple[str, ...]] = ("sft",)

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        (scores,) = policy.logprobs(batch)
        weights = batch.weights().to(scores.sums.device)
        # The trainer multiplies the loss by batch.fraction, and adds up all processes' losses.
        tokens = policy.processes.sums((weights * scores.tokens).sum()) * batch.fraction
        total = torch.where(weights > 0, weights * scores.sums, 0.0).sum()
        metrics = {"logps/response": scores.sums.detach()}
        return LossOutput(-total / torch.where(tokens > 0, tokens, 1.0), metrics)


@register
@dataclass(frozen=True)
class KTO(Loss):
    """λ·(1 - σ(±β(r - KL))), + where a response is desired: Kahneman–Tversky optimisation.

    r = log π - log ref; KL is the mean r of mismatched pairs, prompt i with response i+1, of all
    processes' samples, but at least 0. See :func:`fastrl_kernels.kto_loss`.

    Args:
        beta: β.
        desirable_weight, undesirable_weight: λ of desired and of undesired responses.
        threshold: the reward above which a response is desired; None: ½ where all rewards of the
            batch, over all processes, are 0 or 1, and else the mean of these rewards.
    """

    name: ClassVar[str] = "kto"
    tasks: ClassVar[tuple[str, ...]] = ("offline-pointwise", "online-pointwise")
    compares: ClassVar[bool] = True
    reads_all: ClassVar[bool] = True
    row: ClassVar[UnpairedObjective] = UNPAIRED_LOSSES["kto"]
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    threshold: float | None = None

    def __post_init__(self) -> None:
        """Checks the coefficients by a call of the op; raises ValueError for one out of range."""
        super().__post_init__()
        threshold = self.threshold
        if threshold is not None and not (is_number(threshold) and math.isfinite(threshold)):
            raise ValueError(f"threshold must be a number or None, got {self.threshold!r}")
        zero = torch.zeros(1)
        self.row(Side(zero, zero, zero), zero == 0, zero[0], **self._options)

    @property
    def _options(self) -> dict[str, float]:
        names = ("beta", "desirable_weight", "undesirable_weight")
        return {name: getattr(self, name) for name in names}

    def check(self, task: Task, batch_size: int) -> None:
        super().check(task, batch_size)
        if self.row.has_kl and batch_size < 2:
            raise ValueError(
                f"the loss {self.name} pairs every prompt with the response to another one: "
                f"batch_size must be at least 2, got {batch_size}"
            )

    def reference_batches(self, batch: Batch) -> tuple[Batch, ...]:
        return (batch, batch.mismatched()) if self.row.has_kl else (batch,)

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        rewards = batch.rewards(1)
        # The parts without a gradient come first, while no activations of the policy take memory.
        kl = self._kl(batch, policy, reference)
        (ref,), (scores,) = reference.logprobs(batch), policy.logprobs(batch)
        side = scores._replace(ref_sums=ref.sums)
        desirable = (rewards > self._threshold(batch.whole.rewards(1))).to(side.sums.device)
        losses = self.row(side, desirable, kl, **self._options)
        with torch.no_grad():
            implied = self.beta * side.ratio
            ahead = share_ahead(implied, self.beta * kl.clamp(min=0.0))
            metrics = {
                "kl": kl.clamp(min=0.0),
                "rewards/chosen": implied[desirable],
                "rewards/rejected": implied[~desirable],
                # Implied rewards should lie above β·KL where desired, and below it elsewhere.
                "rewards/accuracies": torch.where(desirable, ahead, 1.0 - ahead),
                "logps/response": side.sums.detach(),
            }
        return LossOutput(weighted_mean(losses, batch), metrics)

    def _threshold(self, rewards: Tensor) -> float:
        """The reward, on the host, above which a response is desired."""
        if self.threshold is not None:
            return self.threshold
        binary = bool(((rewards == 0) | (rewards == 1)).all())
        return 0.5 if binary else float(rewards.mean())

    @torch.no_grad()
    def _kl(self, batch: Batch, policy: Any, reference: Any) -> Tensor:
        """The mean of log π - log ref over mismatched pairs, [], of either sign; 0 where the loss
        has no KL or the batch one prompt."""
        if not self.row.has_kl or batch.total == 1:  # an epoch's last batch may have one prompt
            return torch.zeros((), device=policy.tokens.device)
        other = batch.mismatched()
        (scores,), (ref,) = policy.logprobs(other), reference.logprobs(other)
        side = scores._replace(ref_sums=ref.sums)
        return mismatched_kl(side, policy.processes, batch.fraction)


@register
@dataclass(frozen=True)
class APOZeroUnpaired(KTO):
    """λ·(1 - σ(±βr)): anchored preference optimisation, :class:`KTO` without a KL."""

    name: ClassVar[str] = "apo_zero_unpaired"
    row: ClassVar[UnpairedObjective] = UNPAIRED_LOSSES["apo_zero_unpaired"]
