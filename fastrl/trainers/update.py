"""The PPO update: epochs over a batch, in mini-batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.config import PPOConfig
from fastrl.models.checkpointing import all_layers, checkpointed
from fastrl.trainers.data import TokenBatch
from fastrl.trainers.experience import Experience, scoring_request
from fastrl.trainers.losses import MINIBATCH_FIELDS, UpdateLoss


@dataclass
class UpdateRecord:
    """What an update leaves behind, on the device."""

    names: dict[str, str]  # of the statistics, by MINIBATCH_FIELDS
    minibatches: list[Tensor] = field(default_factory=list)  # each [len(MINIBATCH_FIELDS)]
    ratios: list[Tensor] = field(default_factory=list)  # each [counted tokens]
    advantages: list[Tensor] = field(default_factory=list)  # each [counted tokens]
    optimizer_steps: int = 0
    skipped: int = 0  # mini-batches whose mean ratio exceeded the threshold
    stopped_early: bool = False


class PPOUpdate:
    """Runs ``ppo_epochs`` over an experience and leaves the policy improved.

    The model stays in evaluation mode: dropout would make the ratio differ from 1 where nothing
    changed. One small read per optimizer step decides whether it is taken: not where every
    mini-batch's mean ratio exceeds ``ratio_threshold``, and with early stopping no more once
    mean(old - new log-prob) exceeds 1.5·target_kl.
    """

    def __init__(
        self,
        config: PPOConfig,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: UpdateLoss,
    ):
        self.config = config
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.shuffle = np.random.RandomState(config.seed)

    def __call__(self, batch: TokenBatch, experience: Experience) -> UpdateRecord:
        with self._memory_saved():
            return self._epochs(batch, experience)

    def _memory_saved(self) -> AbstractContextManager[None]:
        """Activations of layers are not kept, where ``gradient_checkpointing`` asks for it."""
        if not self.config.gradient_checkpointing:
            return nullcontext()
        unwrapped: Any = self.accelerator.unwrap_model(self.model)
        return checkpointed(all_layers(unwrapped.pretrained_model))

    def _epochs(self, batch: TokenBatch, experience: Experience) -> UpdateRecord:
        record = UpdateRecord(self.loss.stats)
        for _ in range(self.config.ppo_epochs):
            for indices in self._backward_batches():
                keep, policy_kl = self._accumulate(batch, experience, indices, record)
                if self._moved_too_far(policy_kl):
                    self.optimizer.zero_grad()
                    record.stopped_early = True
                    return record
                self._optimizer_step(keep, record)
        return record

    def _backward_batches(self) -> Iterator[np.ndarray]:
        order = self.shuffle.permutation(self.config.batch_size)
        for start in range(0, len(order), self.config.backward_batch_size):
            yield order[start : start + self.config.backward_batch_size]

    def _accumulate(
        self, batch: TokenBatch, experience: Experience, indices: np.ndarray, record: UpdateRecord
    ) -> tuple[bool, float]:
        """Add the gradients of one optimizer step; (whether any is left, mean policy KL)."""
        size = self.config.mini_batch_size
        ratio_field = MINIBATCH_FIELDS.index("mean_ratio")
        kl_field = MINIBATCH_FIELDS.index("policy_kl")
        verdicts = []
        for start in range(0, len(indices), size):
            with self.accelerator.accumulate(self.model):
                loss, vector = self._minibatch(
                    batch, experience, indices[start : start + size].tolist(), record
                )
                keep = (vector[ratio_field] <= self.config.ratio_threshold).float()
                self.accelerator.backward(loss * keep)
                verdicts.append(torch.stack([keep, vector[kl_field]]))
        # The step's one host read; every process comes to the same decision.
        verdict = torch.stack(verdicts)
        total = torch.stack([verdict[:, 0].sum(), verdict[:, 1].mean()])
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, reduction="mean")
        kept, policy_kl = total.tolist()
        if kept < len(verdicts):
            skipped = len(verdicts) - round(kept)
            record.skipped += skipped
            warnings.warn(
                f"{skipped} mini-batch(es) skipped: their mean probability ratio exceeds "
                f"ratio_threshold={self.config.ratio_threshold}",
                stacklevel=5,
            )
        return kept > 0, policy_kl

    def _minibatch(
        self,
        batch: TokenBatch,
        experience: Experience,
        indices: Sequence[int],
        record: UpdateRecord,
    ) -> tuple[Tensor, Tensor]:
        part, old = minibatch_of(batch, experience, indices)
        loss, vector, ratios, advantages = minibatch_loss(self.model, self.loss, part, old)
        record.ratios.append(ratios)
        record.advantages.append(advantages)
        record.minibatches.append(vector)
        return loss, vector

    def _moved_too_far(self, policy_kl: float) -> bool:
        return self.config.early_stopping and policy_kl > 1.5 * self.config.target_kl

    def _optimizer_step(self, keep: bool, record: UpdateRecord) -> None:
        if keep:
            if self.config.max_grad_norm is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
            self.optimizer.step()
            record.optimizer_steps += 1
        self.optimizer.zero_grad()


def minibatch_of(
    batch: TokenBatch, experience: Experience, indices: Sequence[int]
) -> tuple[TokenBatch, Experience]:
    """Some samples, without the padding that none of them needs."""
    columns = batch.columns(indices)
    shifted = slice(columns.start, columns.stop - 1)
    return batch.select(indices), experience.select(indices, shifted)


def minibatch_loss(
    model: nn.Module, loss: UpdateLoss, part: TokenBatch, old: Experience
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of a mini-batch under the model as it is now, its statistics as one vector of
    MINIBATCH_FIELDS, and of the counted tokens the ratios and the advantages."""
    counted = part.counted.flatten().nonzero()[:, 0].to(part.mask.device)
    objective = loss.objective(old, part.mask, counted)
    request = scoring_request(part, entropy=True, objective=objective, temperature=loss.temperature)
    new = model(**part.model_inputs, scoring=request)
    value, vector = loss(
        old,
        part.spread(new.logprobs, request.rows),
        part.spread(new.values, request.rows),
        part.spread(new.entropies, request.rows),
        part.mask,
    )
    # The log-probs have no gradient here: the policy's comes with its own loss, which counts in the
    # value of this one already.
    value = value + (new.loss - new.loss.detach())
    ratios = (new.logprobs - objective.old_logprobs).exp()
    return value, vector, ratios, objective.advantages
