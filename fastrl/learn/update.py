"""An update: epochs over a batch of experience, in optimizer steps of mini-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fastrl.learn.experience import Experience
from fastrl.learn.gradient import GradientStep, StepOutcome
from fastrl.learn.memory import Activations
from fastrl.learn.nonfinite import NonFiniteExperience
from fastrl.learn.warmup import ALL_LEARNS, Learning
from fastrl.run.processes import Processes


class Epochs:
    """The samples of each mini-batch of each optimizer step, epoch after epoch.

    Args:
        samples, mini_batch, step: the number of samples, of all processes, in a batch, a mini-batch
            and an optimizer step.
        group: how many samples stay together, since they share a prompt, which is then run once.
        seed: the seed of the samples' order.
    """

    def __init__(
        self, epochs: int, samples: int, mini_batch: int, step: int, group: int, seed: int
    ):
        self.epochs, self.samples, self.group = epochs, samples, group
        self.mini_batch, self.step = mini_batch, step
        self.shuffle = np.random.RandomState(seed)

    def steps(self, counting: set[int], left_out: set[int]) -> Iterator[list[list[int]]]:
        """Yields each optimizer step's mini-batches of samples, without those that are not in
        ``counting``, or are in ``left_out`` by then.

        Raises:
            FloatingPointError: no sample is left.
        """
        for _ in range(self.epochs):
            groups = self.shuffle.permutation(self.samples // self.group).tolist()
            order = [group * self.group + i for group in groups for i in range(self.group)]
            for begin in range(0, len(order), self.step):
                minibatches = [
                    [i for i in order[start : start + self.mini_batch] if i in counting - left_out]
                    for start in range(begin, begin + self.step, self.mini_batch)
                ]
                minibatches = [sorted(indices) for indices in minibatches if indices]
                if minibatches:
                    yield minibatches
                if left_out and left_out >= counting:
                    raise FloatingPointError(
                        f"the loss or gradient of each of {len(counting)} samples is not finite: "
                        "nothing is left to learn from. The model is broken: load a sound "
                        "checkpoint; where training broke it, lower learning_rate or set "
                        "max_grad_norm"
                    )


class HasGradient(Protocol):
    """What steps along its gradient: the policy's update, or a separate critic."""

    gradient: GradientStep


@dataclass
class UpdateRecord:
    """Statistics of an update; its tensors, on the device, are of mini-batches with finite loss."""

    names: Sequence[str] = ()  # of the statistics
    minibatches: list[Tensor] = field(default_factory=list)  # each [len(names)]
    ratios: list[Tensor] = field(default_factory=list)  # each [N]
    advantages: list[Tensor] = field(default_factory=list)  # each [N]
    norms: list[float] = field(default_factory=list)  # of the gradients that were stepped along
    max_ratio: float = math.nan  # the largest mean ratio of a mini-batch
    left_out: set[int] = field(default_factory=set)  # samples, with on_nonfinite="zero-sample"
    because: str = ""  # names of samples that made a loss or gradient not finite
    optimizer_steps: int = 0
    skipped: int = 0  # mini-batches whose mean ratio exceeded the threshold
    nonfinite: int = 0  # mini-batches whose loss is not finite
    nonfinite_steps: int = 0  # optimizer steps left out for their gradient
    stopped_early: bool = False
    critic: UpdateRecord | None = None  # of a separate critic

    def add(self, outcome: StepOutcome) -> None:
        for minibatch in outcome.minibatches:
            self.minibatches.append(torch.stack([minibatch.stats[name] for name in self.names]))
            self.ratios.append(minibatch.ratios)
            self.advantages.append(minibatch.advantages)
        if outcome.taken:
            self.norms.append(outcome.norm)
        if not self.max_ratio >= outcome.max_ratio and not math.isnan(outcome.max_ratio):
            self.max_ratio = outcome.max_ratio
        self.left_out.update(outcome.blame.left_out)
        self.because = self.because or outcome.blame.because
        self.skipped += outcome.skipped
        self.nonfinite += outcome.nonfinite
        self.nonfinite_steps += not outcome.finite_gradient
        self.stopped_early |= outcome.moved_too_far

    def gather(self, processes: Processes) -> None:
        """Adds up the processes' shares of the statistics, and joins all processes' ratios."""
        if processes.count == 1 or not self.minibatches:
            return
        self.minibatches = list(processes.sums(torch.stack(self.minibatches)))
        lengths = processes.objects([len(ratios) for ratios in self.ratios])
        if not any(map(any, lengths)):  # a critic has no ratios
            return
        self.ratios = [
            processes.joined(ratios, list(counts))
            for ratios, counts in zip(self.ratios, zip(*lengths, strict=True), strict=True)
        ]

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
                f"non-finite loss in {self.nonfinite} mini-batch(es): they are left "
                f"out{self.because}",
                stacklevel=4,
            )
        if self.nonfinite_steps:
            warnings.warn(
                f"non-finite gradient norm: {self.nonfinite_steps} optimizer step(s) left out"
                f"{self.because}",
                stacklevel=4,
            )


class Update:
    """Minimises the loss over a batch's experience, in several epochs.

    The model stays in evaluation mode: dropout would make the ratio differ from 1 where nothing
    changed. Samples of which no token counts are not run. :class:`GradientStep` says which
    mini-batches and steps are left out.

    An exception leaves no gradient behind, and the order of the samples as it was before the call;
    optimizer steps that were taken stay.

    Args:
        epochs: the optimizer steps of all epochs over a batch.
        activations: how the backward pass gets at the forward's activations.
        critic: learns the values, from the same mini-batches after the policy, by steps of its own.
    """

    def __init__(
        self,
        gradient: GradientStep,
        epochs: Epochs,
        activations: Activations,
        critic: HasGradient | None = None,
    ):
        self.gradient, self.epochs = gradient, epochs
        self.activations, self.critic = activations, critic

    def __call__(self, experience: Experience, learning: Learning = ALL_LEARNS) -> UpdateRecord:
        """Learns from a batch's experience; returns statistics.

        Args:
            learning: what learns in this step.

        Raises:
            NonFiniteExperience: a number of the experience is not finite; nothing has changed then.
            FloatingPointError: a loss or gradient is not finite, with ``on_nonfinite="raise"``;
                those of all samples are not, with "zero-sample".
        """
        order = self.epochs.shuffle.get_state()
        record = UpdateRecord(self.gradient.loss.names)
        learners: list[tuple[HasGradient, UpdateRecord]] = [(self, record)]
        if self.critic is None:
            self.gradient.learning = learning
        else:
            # Samples that policy or critic leaves out are left out by both.
            names = self.critic.gradient.loss.names
            record.critic = UpdateRecord(names, left_out=record.left_out)
            learners = [*(learners if learning.policy_learns else []), (self.critic, record.critic)]
        whole, counting = experience.counted(), set(experience.tokens.counting())
        unread: Tensor | None = (experience.logprobs + experience.returns).sum()
        models = [each.gradient.engine.unwrapped for each in self.learners]
        try:
            with self.activations(models):
                for step in self.epochs.steps(counting, record.left_out):
                    minibatches = list(map(whole.select, step))
                    for learner, learner_record in learners:
                        outcome = learner.gradient(minibatches, unread)
                        if not outcome.finite_experience:
                            raise NonFiniteExperience
                        unread = None
                        learner_record.add(outcome)
                        if outcome.moved_too_far:
                            break
                        if outcome.taken:
                            learner_record.optimizer_steps += learner.gradient.engine.step()
                    if record.stopped_early:
                        break
        except BaseException:
            self.epochs.shuffle.set_state(order)
            for each in self.learners:
                each.gradient.engine.discard()
            raise
        for learner, learner_record in learners:
            learner_record.gather(learner.gradient.engine.processes)
            learner_record.warn(learner.gradient.rules.ratio_threshold)
        return record

    def minimise(self, loss: Tensor) -> bool:
        """Takes an optimizer step on a loss [], and returns True. Where loss or gradient are not
        finite, returns False with a warning, or raises FloatingPointError by ``on_nonfinite``."""
        record, engine = UpdateRecord(), self.gradient.engine
        try:
            outcome = self.gradient.of_loss(loss)
            record.add(outcome)
            if outcome.taken:
                record.optimizer_steps += engine.step()
        except BaseException:
            engine.discard()
            raise
        record.warn(self.gradient.rules.ratio_threshold)
        return outcome.taken

    @property
    def learners(self) -> list[HasGradient]:
        """What steps along gradients: this update of the policy, and a separate critic."""
        return [self] if self.critic is None else [self, self.critic]

    @property
    def steps_begun(self) -> int:
        """How many optimizer steps of policy and critic have begun, added up."""
        return sum(learner.gradient.engine.steps for learner in self.learners)
