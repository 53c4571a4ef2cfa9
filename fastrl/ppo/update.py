"""The PPO update: epochs over a batch of experience, in optimizer steps of mini-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.config import PPOConfig
from fastrl.data.batch import TokenBatch
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.ppo.experience import Experience
from fastrl.ppo.loss import Minibatch, MinibatchLoss, UpdateLoss
from fastrl.ppo.nonfinite import NonFiniteNumbers


class StepOutcome(NamedTuple):
    """The result of a gradient: which mini-batches it contains, and whether to step along it."""

    minibatches: list[MinibatchLoss]  # whose loss is finite
    nonfinite: int  # mini-batches whose loss is not
    skipped: int  # mini-batches whose mean ratio exceeds the threshold
    finite_gradient: bool
    moved_too_far: bool  # early stopping: no more steps are to be taken
    taken: bool  # whether there is a gradient for the optimizer


class GradientStep:
    """The gradient of one optimizer step, without mini-batches that are not to be learned from.

    Decided by one small read after the backward passes. A mini-batch is left out where its mean
    ratio exceeds ``ratio_threshold`` or its loss is not finite: the gradient of the others is then
    computed once more without it, divided by their tokens, samples or number. There is no gradient
    where no mini-batch is left, where it is not finite, or where with early stopping
    mean(old - new log-prob) exceeds 1.5·target_kl.

    The owner of the optimizer takes the step: :class:`PPOUpdate`, or transformers' Trainer.

    Args:
        config: its ``max_grad_norm`` clips the gradient; None leaves that to the owner.
        optimizer: whose gradients are zeroed; as accelerate has wrapped it, like the model.
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
        self.nonfinite = NonFiniteNumbers(config.on_nonfinite)

    def __call__(self, minibatches: Sequence[Minibatch]) -> StepOutcome:
        """Adds up the gradient of the mini-batches' mean loss, clipped."""
        first: list[MinibatchLoss] = []
        kept = list(minibatches)
        while True:
            losses = []
            denominators = self.loss.denominators(kept)
            for i, (tokens, old) in enumerate(kept):
                request = self.loss.request(kept[i], denominators[i])
                with self._accumulating(last=i + 1 == len(kept)):
                    scores = self.model(**tokens.model_inputs, scoring=request)
                    losses.append(self.loss(old, request, scores))
                    self.add(losses[-1].loss, of=len(kept))
            totals, ratios, kls, norm = self._read(losses)
            if first:
                break
            first = losses
            finite = [i for i, total in enumerate(totals) if math.isfinite(total)]
            near = [i for i in finite if ratios[i] <= self.config.ratio_threshold]
            if len(finite) < len(first):
                self.nonfinite.losses(len(first) - len(finite))
            policy_kl = sum(kls[i] for i in finite) / len(finite) if finite else math.nan
            if len(near) in (0, len(first)):
                break
            # The gradient contains them already, perhaps as NaN.
            self.zero()
            kept = [minibatches[i] for i in near]
        finite_gradient = not near or math.isfinite(norm)
        if not finite_gradient:
            self.nonfinite.gradients()
        too_far = self.config.early_stopping and policy_kl > 1.5 * self.config.target_kl
        taken = bool(near) and finite_gradient and not too_far
        if not taken:
            self.zero()
        return StepOutcome(
            [first[i] for i in finite],
            len(first) - len(finite),
            len(finite) - len(near),
            finite_gradient,
            too_far,
            taken,
        )

    def of_loss(self, loss: Tensor) -> StepOutcome:
        """The gradient of a loss that has been computed."""
        with self._accumulating(last=True):
            self.add(loss, of=1)
        value, norm = torch.stack([loss.detach().float(), self._gradient_norm()]).tolist()
        finite = math.isfinite(value)
        if not finite:
            self.nonfinite.losses(1)
        finite_gradient = not finite or math.isfinite(norm)
        if not finite_gradient:
            self.nonfinite.gradients()
        taken = finite and finite_gradient
        if not taken:
            self.zero()
        return StepOutcome([], int(not finite), 0, finite_gradient, False, taken)

    def add(self, loss: Tensor, of: int) -> None:
        """Adds the gradient of loss / of; accelerate divides by a fixed number of mini-batches."""
        scale = self.accelerator.gradient_accumulation_steps / of
        self.accelerator.backward(loss if scale == 1 else loss * scale)

    def clip(self) -> Tensor | None:
        """Clips the gradient to ``max_grad_norm``; returns its norm before that."""
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)

    def zero(self) -> None:
        """Zeroes the optimizer's gradients, and those of weights that a user's own optimizer leaves
        out: they would add up, and NaN would stay."""
        self.optimizer.zero_grad()
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in own:
                parameter.grad = None

    def discard(self) -> None:
        """Drops the gradient after an error, and a GradScaler's record that it was unscaled."""
        self.accelerator.sync_gradients = True
        self.zero()
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.accelerator.device))  # it may be unused yet
            scaler.update(scaler.get_scale())

    @contextmanager
    def _accumulating(self, last: bool) -> Iterator[None]:
        """Context of one backward pass; processes exchange gradients in the last one.

        accelerate's own ``accumulate()`` counts mini-batches, wrongly after an exception and where
        a step has fewer of them.
        """
        self.accelerator.sync_gradients = last
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    def _read(
        self, losses: Sequence[MinibatchLoss]
    ) -> tuple[list[float], list[float], list[float], float]:
        """Losses, mean ratios and policy KLs of mini-batches, and the gradient's norm: the step's
        one host read. Every process reads the same numbers, and so decides the same."""
        of_each = [
            (each.loss.detach(), each.mean_ratio, each.stats["ppo/policy/policykl"])
            for each in losses
        ]
        numbers = torch.stack([*(x for each in of_each for x in each), self._gradient_norm()])
        if self.accelerator.num_processes > 1:
            numbers = self.accelerator.reduce(numbers, reduction="mean")
        *per_minibatch, norm = numbers.tolist()
        return per_minibatch[::3], per_minibatch[1::3], per_minibatch[2::3], norm

    def _gradient_norm(self) -> Tensor:
        """Clips the gradient to ``max_grad_norm``; returns its norm before that, [] fp32.

        0 with a GradScaler, whose gradients overflow now and then and which leaves out such steps
        by itself.
        """
        nothing = torch.zeros((), device=self.accelerator.device)
        if self.accelerator.scaler is not None:
            return nothing
        if self.config.max_grad_norm is not None:
            clipped = self.clip()
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


@dataclass
class UpdateRecord:
    """Statistics of an update, on the device, of mini-batches whose loss is finite."""

    names: Sequence[str] = ()  # of the statistics
    minibatches: list[Tensor] = field(default_factory=list)  # each [len(names)]
    ratios: list[Tensor] = field(default_factory=list)  # each [N]
    advantages: list[Tensor] = field(default_factory=list)  # each [N]
    optimizer_steps: int = 0
    skipped: int = 0  # mini-batches whose mean ratio exceeded the threshold
    nonfinite: int = 0  # mini-batches whose loss is not finite
    nonfinite_steps: int = 0  # optimizer steps left out for their gradient
    stopped_early: bool = False

    def add(self, outcome: StepOutcome) -> None:
        for minibatch in outcome.minibatches:
            self.minibatches.append(torch.stack([minibatch.stats[name] for name in self.names]))
            self.ratios.append(minibatch.ratios)
            self.advantages.append(minibatch.advantages)
        self.skipped += outcome.skipped
        self.nonfinite += outcome.nonfinite
        self.nonfinite_steps += not outcome.finite_gradient
        self.stopped_early |= outcome.moved_too_far

    def means(self, device: torch.device) -> dict[str, Tensor]:
        """Each statistic's mean over the mini-batches, [] each; NaN where there are none."""
        if not self.minibatches:
            return dict.fromkeys(self.names, torch.tensor(math.nan, device=device))
        return dict(zip(self.names, torch.stack(self.minibatches).mean(0), strict=True))

    def warn(self, ratio_threshold: float) -> None:
        """Warns once for each reason why mini-batches or steps were left out."""
        if self.skipped:
            warnings.warn(
                f"{self.skipped} mini-batch(es) skipped: their mean probability ratio exceeds "
                f"ratio_threshold={ratio_threshold}",
                stacklevel=4,
            )
        if self.nonfinite:
            warnings.warn(
                f"non-finite loss in {self.nonfinite} mini-batch(es): they are left out",
                stacklevel=4,
            )
        if self.nonfinite_steps:
            warnings.warn(
                f"non-finite gradient norm: {self.nonfinite_steps} optimizer step(s) left out",
                stacklevel=4,
            )


class PPOUpdate:
    """Minimises the loss over a batch's experience, in ``ppo_epochs`` passes.

    The model stays in evaluation mode: dropout would make the ratio differ from 1 where nothing
    changed. Samples without response tokens are not run. :class:`GradientStep` says which
    mini-batches and steps are left out.

    An exception leaves no gradient behind, and the order of the samples as it was before the call;
    optimizer steps that were taken stay.
    """

    def __init__(self, config: PPOConfig, gradient: GradientStep):
        self.config = config
        self.gradient = gradient
        self.accelerator = gradient.accelerator
        self.shuffle = np.random.RandomState(config.seed)
        self.optimizer_steps = 0  # begun so far

    def __call__(self, batch: TokenBatch, experience: Experience) -> UpdateRecord:
        order = self.shuffle.get_state()
        record = UpdateRecord(self.gradient.loss.names)
        try:
            with self._memory_saved():
                for indices in self._optimizer_steps(set(batch.counting())):
                    outcome = self.gradient([Minibatch.of(batch, experience, i) for i in indices])
                    record.add(outcome)
                    if outcome.moved_too_far:
                        break
                    if outcome.taken:
                        self._optimizer_step(record)
        except BaseException:
            self.shuffle.set_state(order)
            self.gradient.discard()
            raise
        record.warn(self.config.ratio_threshold)
        return record

    def minimise(self, loss: Tensor) -> bool:
        """One optimizer step on a loss; not taken, with a warning, where the loss or its gradient
        is not finite."""
        record = UpdateRecord()
        try:
            outcome = self.gradient.of_loss(loss)
            record.add(outcome)
            if outcome.taken:
                self._optimizer_step(record)
        except BaseException:
            self.gradient.discard()
            raise
        record.warn(self.config.ratio_threshold)
        return outcome.taken

    def _optimizer_steps(self, counting: set[int]) -> Iterator[list[list[int]]]:
        """The samples of each mini-batch of each optimizer step, but those that do not count."""
        size, all_of_a_step = self.config.mini_batch_size, self.config.backward_batch_size
        for _ in range(self.config.ppo_epochs):
            order = self.shuffle.permutation(self.config.batch_size).tolist()
            for begin in range(0, len(order), all_of_a_step):
                minibatches = [
                    [i for i in order[start : start + size] if i in counting]
                    for start in range(begin, begin + all_of_a_step, size)
                ]
                minibatches = [indices for indices in minibatches if indices]
                if minibatches:
                    yield minibatches

    def _optimizer_step(self, record: UpdateRecord) -> None:
        if self.accelerator.scaler is not None and self.config.max_grad_norm is not None:
            self.gradient.clip()
        optimizer = self.gradient.optimizer
        self.optimizer_steps += 1
        optimizer.step()
        record.optimizer_steps += not getattr(optimizer, "step_was_skipped", False)
        self.gradient.zero()

    def _memory_saved(self) -> AbstractContextManager[None]:
        """Context in which activations are recomputed, where ``gradient_checkpointing`` asks for
        it."""
        if not self.config.gradient_checkpointing:
            return nullcontext()
        unwrapped: Any = self.accelerator.unwrap_model(self.gradient.model)
        return checkpointed(all_layers(unwrapped.pretrained_model))
