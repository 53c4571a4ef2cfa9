"""The PPO update: epochs over a batch, in mini-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.config import PPOConfig
from fastrl.data.batch import TokenBatch
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.ppo.experience import Experience, scoring_request
from fastrl.ppo.losses import MINIBATCH_FIELDS, UpdateLoss, make_denominator
from fastrl.ppo.nonfinite import make_nonfinite

_JUDGED = ("loss", "mean_ratio", "policy_kl")


@dataclass
class UpdateRecord:
    """What an update leaves behind, on the device; of mini-batches whose loss is finite."""

    names: dict[str, str]  # of the statistics, by MINIBATCH_FIELDS
    minibatches: list[Tensor] = field(default_factory=list)  # each [len(MINIBATCH_FIELDS)]
    ratios: list[Tensor] = field(default_factory=list)  # each [counted tokens]
    advantages: list[Tensor] = field(default_factory=list)  # each [counted tokens]
    optimizer_steps: int = 0
    skipped: int = 0  # mini-batches whose mean ratio exceeded the threshold
    nonfinite: int = 0  # mini-batches whose loss is not finite
    nonfinite_steps: int = 0  # optimizer steps left out for their gradient
    stopped_early: bool = False

    def add(self, minibatch: _Minibatch) -> None:
        self.minibatches.append(minibatch.vector)
        self.ratios.append(minibatch.ratios)
        self.advantages.append(minibatch.advantages)


class _Minibatch(NamedTuple):
    """What a mini-batch says once its gradient has been added."""

    vector: Tensor  # [len(MINIBATCH_FIELDS)]
    ratios: Tensor  # [counted tokens]
    advantages: Tensor  # [counted tokens]


class _Verdict(NamedTuple):
    """What the host knows of mini-batches and of their gradients' sum."""

    losses: list[float]
    ratios: list[float]  # means
    policy_kls: list[float]
    gradient_norm: float


class PPOUpdate:
    """Runs ``ppo_epochs`` over an experience and leaves the policy improved.

    The model stays in evaluation mode: dropout would make the ratio differ from 1 where nothing
    changed. Samples of which no token counts are not run.

    One small read per optimizer step, after its backward passes, decides what becomes of it. A
    mini-batch takes no part where its mean ratio exceeds ``ratio_threshold`` or its loss is not
    finite: the gradient of the others is then computed once more without it, divided by what is
    left (the others' tokens or samples, or their number). Where nothing is left, or the gradient is
    not finite, the step is not taken; with early stopping no more are once mean(old - new log-prob)
    exceeds 1.5·target_kl.

    An exception leaves no gradient behind, and the order of the samples as it was before the call;
    optimizer steps that were taken stay.
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
        self.denominator = make_denominator(config, loss.aggregate)
        self.nonfinite = make_nonfinite(config)
        self.shuffle = np.random.RandomState(config.seed)

    def __call__(self, batch: TokenBatch, experience: Experience) -> UpdateRecord:
        order = self.shuffle.get_state()
        try:
            with self._memory_saved():
                record = self._epochs(batch, experience)
        except BaseException:
            self.shuffle.set_state(order)
            self.discard()
            raise
        self._warn(record)
        return record

    def minimise(self, loss: Tensor) -> bool:
        """One optimizer step on a loss; not taken, with a warning, where the loss or its gradient
        is not finite."""
        record = UpdateRecord({})
        try:
            with self._accumulating(last=True):
                self._add_gradient(loss, of=1)
            value, norm = torch.stack([loss.detach().float(), self._gradient_norm()]).tolist()
            if not math.isfinite(value):
                record.nonfinite = 1
                self.nonfinite.losses(1)
            finite = math.isfinite(value) and self._has_finite_gradient(norm, record)
            self._optimizer_step(finite, record)
        except BaseException:
            self.discard()
            raise
        self._warn(record)
        return finite

    def discard(self) -> None:
        """Gradients that were not learned from, and a GradScaler's note that they were unscaled."""
        self.accelerator.sync_gradients = True
        self._zero_gradients()
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.accelerator.device))  # it may be unused yet
            scaler.update(scaler.get_scale())

    def _zero_gradients(self) -> None:
        """As the optimizer does it; and of weights that it, a user's own say, does not have: their
        gradients would add up, and what is NaN would stay."""
        self.optimizer.zero_grad()
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in own:
                parameter.grad = None

    def _memory_saved(self) -> AbstractContextManager[None]:
        """Activations of layers are not kept, where ``gradient_checkpointing`` asks for it."""
        if not self.config.gradient_checkpointing:
            return nullcontext()
        unwrapped: Any = self.accelerator.unwrap_model(self.model)
        return checkpointed(all_layers(unwrapped.pretrained_model))

    def _epochs(self, batch: TokenBatch, experience: Experience) -> UpdateRecord:
        record = UpdateRecord(self.loss.stats)
        counting = set(batch.counting())
        for _ in range(self.config.ppo_epochs):
            for parts in self._backward_batches(counting):
                keep, policy_kl = self._accumulate(batch, experience, parts, record)
                if self._moved_too_far(policy_kl):
                    self._zero_gradients()
                    record.stopped_early = True
                    return record
                self._optimizer_step(keep, record)
        return record

    def _backward_batches(self, counting: set[int]) -> Iterator[list[list[int]]]:
        """The samples of each mini-batch of an optimizer step; those that do not count are none."""
        order = self.shuffle.permutation(self.config.batch_size).tolist()
        size, all_of_a_step = self.config.mini_batch_size, self.config.backward_batch_size
        for begin in range(0, len(order), all_of_a_step):
            end = begin + all_of_a_step
            parts = [
                [i for i in order[start : start + size] if i in counting]
                for start in range(begin, end, size)
            ]
            parts = [part for part in parts if part]
            if parts:
                yield parts

    def _accumulate(
        self,
        batch: TokenBatch,
        experience: Experience,
        parts: list[list[int]],
        record: UpdateRecord,
    ) -> tuple[bool, float]:
        """The gradient of one optimizer step; (whether it is to be taken, mean policy KL)."""
        minibatches, verdict = self._backward(batch, experience, parts)
        finite = [i for i, loss in enumerate(verdict.losses) if math.isfinite(loss)]
        kept = [i for i in finite if verdict.ratios[i] <= self.config.ratio_threshold]
        record.skipped += len(finite) - len(kept)
        if len(finite) < len(parts):
            record.nonfinite += len(parts) - len(finite)
            self.nonfinite.losses(len(parts) - len(finite))
        for i in finite:
            record.add(minibatches[i])
        kls = [verdict.policy_kls[i] for i in finite]
        policy_kl = sum(kls) / len(kls) if kls else math.nan
        if 0 < len(kept) < len(parts):
            # What is left out is in the gradient already, and may be NaN there.
            self._zero_gradients()
            _, verdict = self._backward(batch, experience, [parts[i] for i in kept])
        keep = bool(kept) and self._has_finite_gradient(verdict.gradient_norm, record)
        return keep, policy_kl

    def _backward(
        self, batch: TokenBatch, experience: Experience, parts: list[list[int]]
    ) -> tuple[list[_Minibatch], _Verdict]:
        """Adds up the gradient of some mini-batches' mean loss, clipped, and reads what there is to
        know; every process reads the same."""
        denominator = self.denominator(batch.mask, experience.weights, parts)
        minibatches = []
        for i, part in enumerate(parts):
            with self._accumulating(last=i + 1 == len(parts)):
                tokens, old = minibatch_of(batch, experience, part)
                if denominator is not None:
                    old = replace(old, denominator=denominator)
                loss, *told = minibatch_loss(self.model, self.loss, tokens, old)
                self._add_gradient(loss, of=len(parts))
                minibatches.append(_Minibatch(*told))
        vectors = torch.stack([minibatch.vector for minibatch in minibatches])
        figures = [vectors[:, MINIBATCH_FIELDS.index(name)] for name in _JUDGED]
        judged = torch.cat([*figures, self._gradient_norm().view(1)])
        # The step's one host read; every process comes to the same decision.
        if self.accelerator.num_processes > 1:
            judged = self.accelerator.reduce(judged, reduction="mean")
        numbers, n = judged.tolist(), len(parts)
        verdict = _Verdict(numbers[:n], numbers[n : 2 * n], numbers[2 * n : 3 * n], numbers[-1])
        return minibatches, verdict

    def _add_gradient(self, loss: Tensor, of: int) -> None:
        """That of loss / of; accelerate divides by a number of mini-batches that is fixed."""
        scale = self.accelerator.gradient_accumulation_steps / of
        self.accelerator.backward(loss if scale == 1 else loss * scale)

    @contextmanager
    def _accumulating(self, last: bool) -> Iterator[None]:
        """A backward pass, the last of an optimizer step or not.

        ``Accelerator.accumulate`` counts its calls instead, and would be out of step after an
        exception, and with a step that has fewer mini-batches.
        """
        self.accelerator.sync_gradients = last
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    def _gradient_norm(self) -> Tensor:
        """Of all weights' gradient before it is clipped to ``max_grad_norm``, which happens here;
        [] fp32.

        With a GradScaler, whose gradients overflow now and then and which leaves such steps out by
        itself, it is taken for 0.
        """
        nothing = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.scaler is not None:
            return nothing
        if self.config.max_grad_norm is not None:
            clipped = self._clip()
            return nothing if clipped is None else clipped.float()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return nothing
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        # On CPUs foreach takes twice as long as one norm after the other.
        foreach = False if nothing.device.type == "cpu" else None
        norm: Any = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of sharded weights
        return norm.float().to(nothing.device)

    def _clip(self) -> Tensor | None:
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)

    def _has_finite_gradient(self, norm: float, record: UpdateRecord) -> bool:
        if math.isfinite(norm):
            return True
        record.nonfinite_steps += 1
        self.nonfinite.gradients()
        return False

    def _moved_too_far(self, policy_kl: float) -> bool:
        return self.config.early_stopping and policy_kl > 1.5 * self.config.target_kl

    def _optimizer_step(self, keep: bool, record: UpdateRecord) -> None:
        if keep:
            if self.accelerator.scaler is not None and self.config.max_grad_norm is not None:
                self._clip()
            self.optimizer.step()
            record.optimizer_steps += not getattr(self.optimizer, "step_was_skipped", False)
        self._zero_gradients()

    def _warn(self, record: UpdateRecord) -> None:
        """One warning for each kind of what took no part."""
        if record.skipped:
            warnings.warn(
                f"{record.skipped} mini-batch(es) skipped: their mean probability ratio exceeds "
                f"ratio_threshold={self.config.ratio_threshold}",
                stacklevel=4,
            )
        if record.nonfinite:
            warnings.warn(
                f"non-finite loss in {record.nonfinite} mini-batch(es): they are left out",
                stacklevel=4,
            )
        if record.nonfinite_steps:
            warnings.warn(
                f"non-finite gradient norm: {record.nonfinite_steps} optimizer step(s) left out",
                stacklevel=4,
            )


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
