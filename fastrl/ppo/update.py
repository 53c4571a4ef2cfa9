"""The PPO update: epochs over a batch of experience, in optimizer steps of mini-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import ModuleList

from fastrl.config import PPOConfig
from fastrl.data.token_batch import TokenBatch
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.models.activation_offloading import activation_offloading
from fastrl.models.scoring import PassLimit
from fastrl.ppo.experience import Experience, scoring_request, shares_of
from fastrl.ppo.loss import Minibatch, MinibatchLoss, UpdateLoss, ValueLoss
from fastrl.ppo.memory import MicroBatches, PositionCount
from fastrl.ppo.nonfinite import NonFiniteExperience, NonFiniteNumbers
from fastrl.ppo.warmup import ALL_LEARNS, Learning
from fastrl.run.processes import OneProcess, Processes

if TYPE_CHECKING:
    from fastrl.ppo.critic import CriticLearner


class Blame(NamedTuple):
    """Samples that make a loss or a gradient not finite."""

    left_out: tuple[int, ...] = ()  # their indices, where they alone are to be left out
    because: str = ""  # their names, for a warning that is yet to come


class StepOutcome(NamedTuple):
    """The result of a gradient: which mini-batches it contains, and whether to step along it."""

    minibatches: Sequence[MinibatchLoss] = ()  # whose loss is finite
    nonfinite: int = 0  # mini-batches whose loss is not
    skipped: int = 0  # mini-batches whose mean ratio exceeds the threshold
    finite_gradient: bool = True
    moved_too_far: bool = False  # early stopping: no more steps are to be taken
    taken: bool = False  # whether there is a gradient for the optimizer
    norm: float = math.nan  # of the gradient, before clipping; NaN where a GradScaler scales it
    max_ratio: float = math.nan  # of the mini-batches' mean ratios
    blame: Blame = Blame()
    finite_experience: bool = True  # else nothing was done


class Gradient(NamedTuple):
    """A gradient that lies in the weights, and what was read with it."""

    losses: list[MinibatchLoss]
    totals: list[float]  # of each mini-batch its loss
    ratios: list[float]  # its mean ratio
    kls: list[float]  # its mean(old - new log-prob)
    norm: float
    experience: float  # not finite where a number of the experience is not

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (*self.totals, self.norm)))


class GradientStep:
    """The gradient of one optimizer step, without mini-batches that are not to be learned from.

    Decided by one small read after the backward passes. A mini-batch is left out where its mean
    ratio exceeds ``ratio_threshold`` or its loss is not finite: the gradient of the others is then
    computed once more without it, divided by their tokens, samples or number. There is no gradient
    where no mini-batch is left, where it is not finite, or where with early stopping
    mean(old - new log-prob) exceeds 1.5·target_kl. With ``on_nonfinite="zero-sample"`` the samples
    that make a loss or the gradient not finite are found, by halving, and left out alone.

    Where memory runs out, mini-batches are computed in parts, with the same denominators, and the
    gradient is begun again.

    The owner of the optimizer takes the step: :class:`PPOUpdate`, or transformers' Trainer.

    Args:
        config: its ``max_grad_norm`` clips the gradient; None leaves that to the owner.
        optimizer: whose gradients are zeroed; as accelerate has wrapped it, like the model.
        nonfinite: handles numbers that are not finite; by default as the configuration says,
            without a look for the samples that make them so.
        processes: each of which computes its share of every mini-batch. All have the same
            mini-batches, and read the same numbers, and so decide the same.

    Attributes:
        learning: what learns, policy and value function or one of them.
    """

    def __init__(
        self,
        config: PPOConfig,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: UpdateLoss | ValueLoss,
        nonfinite: NonFiniteNumbers | None = None,
        processes: Processes | None = None,
    ):
        self.config = config
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.nonfinite = nonfinite or NonFiniteNumbers(config.on_nonfinite)
        self.processes = processes or OneProcess()
        self.learning: Learning = ALL_LEARNS
        self.positions = PositionCount()
        self.micro_batches = MicroBatches(
            "the update",
            "lower mini_batch_size (and raise gradient_accumulation_steps), or set "
            "gradient_checkpointing",
        )

    def __call__(
        self, minibatches: Sequence[Minibatch], experience: Tensor | None = None
    ) -> StepOutcome:
        """Adds up the gradient of the mini-batches' mean loss, clipped.

        Args:
            experience: [], read along: where it is not finite, there is no gradient.
        """
        kept = list(minibatches)
        found = self._gradient(kept, experience)
        if not math.isfinite(found.experience):
            self.zero()
            return StepOutcome(finite_experience=False)

        wrong = [kept[i] for i, total in enumerate(found.totals) if not math.isfinite(total)]
        blame = self._blame(wrong, f"non-finite loss in {len(wrong)} mini-batch(es)")
        if blame.left_out:
            kept = _without(kept, blame.left_out)
            found = self._again(kept)
        finite = [i for i, total in enumerate(found.totals) if math.isfinite(total)]
        near = [i for i in finite if found.ratios[i] <= self.config.ratio_threshold]
        used = [kept[i] for i in near]
        # The gradient contains the others already, perhaps as NaN.
        gradient = found if len(used) in (0, len(kept)) else self._again(used)
        if used and not math.isfinite(gradient.norm):
            more = self._blame(used, "non-finite gradient norm")
            blame = Blame((*blame.left_out, *more.left_out), blame.because or more.because)
            if more.left_out:
                used = _without(used, more.left_out)
                gradient = self._again(used)
        finite_gradient = not used or math.isfinite(gradient.norm)
        policy_kl = sum(found.kls[i] for i in finite) / len(finite) if finite else math.nan
        too_far = self.config.early_stopping and policy_kl > 1.5 * self.config.target_kl
        taken = bool(used) and finite_gradient and not too_far
        if not taken:
            self.zero()
        return StepOutcome(
            [found.losses[i] for i in finite],
            nonfinite=len(kept) - len(finite),
            skipped=len(finite) - len(near),
            finite_gradient=finite_gradient,
            moved_too_far=too_far,
            taken=taken,
            norm=gradient.norm if self.accelerator.scaler is None else math.nan,
            max_ratio=max((found.ratios[i] for i in finite), default=math.nan),
            blame=blame,
        )

    def of_loss(self, loss: Tensor) -> StepOutcome:
        """The gradient of a loss that has been computed."""
        with self._accumulating(last=True):
            self.add(loss, of=self.processes.count)
        value, norm = torch.stack([loss.detach().float(), self._gradient_norm()]).tolist()
        finite = math.isfinite(value)
        finite_gradient = not finite or math.isfinite(norm)
        if not finite:
            self.nonfinite.update("non-finite loss in 1 mini-batch(es)")
        elif not finite_gradient:
            self.nonfinite.update("non-finite gradient norm")
        taken = finite and finite_gradient
        if not taken:
            self.zero()
        return StepOutcome(
            nonfinite=int(not finite), finite_gradient=finite_gradient, taken=taken, norm=norm
        )

    def add(self, loss: Tensor, of: int) -> None:
        """Adds the gradient of loss / of, of which each process has its part; accelerate divides by
        a fixed number of mini-batches, and by that of the processes."""
        scale = self.accelerator.gradient_accumulation_steps * self.processes.count / of
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

    def _gradient(
        self, minibatches: Sequence[Minibatch], experience: Tensor | None = None
    ) -> Gradient:
        """Adds up the gradient of all mini-batches, in parts that fit into memory, where no
        gradient is yet."""
        largest = max((minibatch.size for minibatch in minibatches), default=1)
        tokens = self.config.micro_batch_tokens
        losses = self.micro_batches(
            lambda size: self._backward(minibatches, PassLimit(size, tokens)),
            largest,
            self.discard,
        )
        self.learning.keep(self.accelerator.unwrap_model(self.model))
        return self._read(losses, experience)

    def _again(self, minibatches: Sequence[Minibatch]) -> Gradient:
        """The gradient of other mini-batches, in place of what lies in the weights."""
        self.zero()
        return self._gradient(minibatches)

    def _backward(self, minibatches: Sequence[Minibatch], limit: PassLimit) -> list[MinibatchLoss]:
        """Forward and backward passes of this process's share of all mini-batches."""
        losses = []
        denominators = self.loss.denominators(minibatches)
        for minibatch, denominator in zip(minibatches, denominators, strict=True):
            own, parts, counts = self._share(minibatch, limit)
            parts = self._with_chosen(parts, counts)
            found = []
            for i, part in enumerate(parts):
                model_pass = part.tokens.model_pass
                self.positions.add(part.tokens)
                request = self.loss.request(part, model_pass, denominator)
                last = minibatch is minibatches[-1] and i == len(parts) - 1
                with self._accumulating(last):
                    scores = self.model(**model_pass.inputs, scoring=request)
                    coef = self.learning.policy_coef
                    found.append(self.loss(part.old, request, scores, coef))
                    loss = found[-1].loss
                    self.add(loss if i < counts else loss * 0, len(minibatches))
            joined = self.loss.joined(found[: counts or 1], own.old)
            if self.processes.count > 1:
                joined = self.loss.share(joined, own.old, minibatch.old, float(counts > 0))
            losses.append(joined)
        return losses

    @torch.no_grad()
    def _with_chosen(self, parts: list[Minibatch], counts: int) -> list[Minibatch]:
        """The parts; where ``top_entropy_quantile`` chooses tokens and no forward sees them all,
        those of the mini-batch's, by one more forward of each.

        Args:
            counts: how many of the parts are not there for nothing.
        """
        alone = len(parts) == 1 and self.processes.count == 1
        if self.loss.top_entropy == 1 or alone:
            return parts
        assert isinstance(self.loss, UpdateLoss)
        entropies = []
        for part in parts:
            model_pass = part.tokens.model_pass
            self.positions.add(part.tokens)
            temperature = self.loss.temperature
            request = scoring_request(
                part.tokens, model_pass, temperature=temperature, entropy=True
            )
            entropies.append(self.model(**model_pass.inputs, scoring=request).entropies)
        own = torch.cat([entropies[0][:0], *entropies[:counts]])
        every = self.processes.joined(own, self.processes.objects(len(own)))
        return self.loss.with_chosen(parts, entropies, every)

    def _share(
        self, minibatch: Minibatch, limit: PassLimit
    ) -> tuple[Minibatch, list[Minibatch], int]:
        """This process's part of a mini-batch, the parts of it that a forward runs at a time, and
        how many of these count. The others are a sample that takes part for nothing: all processes
        have as many forwards, because they wait for each other in them."""
        if self.processes.count == 1:
            parts = minibatch.split(limit)
            return minibatch, parts, len(parts)
        tokens = minibatch.tokens
        shares = shares_of(tokens, range(minibatch.size), self.processes)
        passes = max(len(tokens.parts(share, limit)) for share in shares)
        chosen = shares[self.processes.index]
        own = minibatch.select(chosen or [0])
        parts = own.split(limit) if chosen else []
        return own, parts + [minibatch.select([0])] * (passes - len(parts)), len(parts)

    def _blame(self, minibatches: Sequence[Minibatch], what: str) -> Blame:
        """Handles mini-batches whose loss or gradient is not finite.

        Where samples are to be blamed for that, they are those whose own loss or gradient is not
        finite, found by halving. No gradient is left then.
        """
        if not minibatches:
            return Blame()
        causes: list[Minibatch] = []  # each of one sample
        left = list(minibatches) if self.nonfinite.searches else []
        while left:
            part = left.pop()
            if self._again([part]).is_finite:
                continue
            if part.size == 1:
                causes.append(part)
            else:
                half = -(-part.size // 2)
                left += [part.select(range(half)), part.select(range(half, part.size))]
        self.zero()
        causes.sort(key=lambda part: part.samples[0])
        because = self.nonfinite.update(what, causes)
        alone = self.nonfinite.leaves_out_causes
        return Blame(tuple(part.samples[0] for part in causes) if alone else (), because)

    def _read(self, losses: Sequence[MinibatchLoss], experience: Tensor | None) -> Gradient:
        """Losses, mean ratios and policy KLs of mini-batches, and the gradient's norm: the step's
        one host read. Every process reads the same numbers, and so decides the same."""
        norm = self._gradient_norm()
        of_each = [(each.loss.detach(), each.mean_ratio, each.policy_kl) for each in losses]
        also = norm.new_zeros(()) if experience is None else experience
        shares = torch.stack([norm.new_zeros(()), *(x for each in of_each for x in each)])
        numbers = torch.cat([self.processes.sums(shares)[1:], torch.stack([also, norm])])
        *read, experience_read, norm_read = numbers.tolist()
        return Gradient(list(losses), read[::3], read[1::3], read[2::3], norm_read, experience_read)

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
    norms: list[float] = field(default_factory=list)  # of the gradients that were stepped along
    max_ratio: float = math.nan  # the largest mean ratio of a mini-batch
    left_out: set[int] = field(default_factory=set)  # samples, with on_nonfinite="zero-sample"
    because: str = ""  # names of samples that made a loss or gradient not finite
    optimizer_steps: int = 0
    skipped: int = 0  # mini-batches whose mean ratio exceeded the threshold
    nonfinite: int = 0  # mini-batches whose loss is not finite
    nonfinite_steps: int = 0  # optimizer steps left out for their gradient
    stopped_early: bool = False
    critic: UpdateRecord | None = None  # of a critic of its own

    def add(self, outcome: StepOutcome) -> None:
        for minibatch in outcome.minibatches:
            self.minibatches.append(torch.stack([minibatch.stats[name] for name in self.names]))
            self.ratios.append(minibatch.ratios)
            self.advantages.append(minibatch.advantages)
        if outcome.taken:
            self.norms.append(outcome.norm)
        if not self.max_ratio >= outcome.max_ratio:  # nor where one of them is NaN
            self.max_ratio = outcome.max_ratio
        self.left_out.update(outcome.blame.left_out)
        self.because = self.because or outcome.blame.because
        self.skipped += outcome.skipped
        self.nonfinite += outcome.nonfinite
        self.nonfinite_steps += not outcome.finite_gradient
        self.stopped_early |= outcome.moved_too_far

    def gather(self, processes: Processes) -> None:
        """Adds up the processes' shares of the statistics; ratios become those of all."""
        if processes.count == 1 or not self.minibatches:
            return
        self.minibatches = list(processes.sums(torch.stack(self.minibatches)))
        lengths = processes.objects([len(ratios) for ratios in self.ratios])
        if not any(map(any, lengths)):  # of a critic
            return
        self.ratios = [
            processes.joined(own, list(of_each))
            for own, of_each in zip(self.ratios, zip(*lengths, strict=True), strict=True)
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


class PPOUpdate:
    """Minimises the loss over a batch's experience, in ``ppo_epochs`` passes.

    The model stays in evaluation mode: dropout would make the ratio differ from 1 where nothing
    changed. Samples without response tokens are not run. :class:`GradientStep` says which
    mini-batches and steps are left out.

    An exception leaves no gradient behind, and the order of the samples as it was before the call;
    optimizer steps that were taken stay.

    Args:
        critic: learns the values, from the same mini-batches after the policy, by steps of its own.
    """

    def __init__(
        self, config: PPOConfig, gradient: GradientStep, critic: CriticLearner | None = None
    ):
        self.config = config
        self.gradient, self.critic = gradient, critic
        self.accelerator = gradient.accelerator
        self.offloading = activation_offloading(
            config.activation_offloading, self.accelerator.device, self.accelerator.is_fsdp2
        )
        self.shuffle = np.random.RandomState(config.seed)
        self.optimizer_steps = 0  # begun so far

    def __call__(
        self, batch: TokenBatch, experience: Experience, learning: Learning = ALL_LEARNS
    ) -> UpdateRecord:
        """
        Args:
            learning: what learns in this step.

        Raises:
            NonFiniteExperience: a number of the experience is not finite; nothing has changed then.
            FloatingPointError: with ``on_nonfinite="raise"``, a loss or gradient is not; with
                "zero-sample" those of all samples are not.
        """
        order = self.shuffle.get_state()
        record = UpdateRecord(self.gradient.loss.names)
        learners: list[tuple[PPOUpdate | CriticLearner, UpdateRecord]] = [(self, record)]
        if self.critic is None:
            self.gradient.learning = learning
        else:
            # Samples that either leaves out are left out by both.
            names = self.critic.gradient.loss.names
            record.critic = UpdateRecord(names, left_out=record.left_out)
            learners = [*(learners if learning.policy_learns else []), (self.critic, record.critic)]
        unread: Tensor | None = (experience.logprobs + experience.returns).sum()
        try:
            with self._memory_saved():
                for indices in self._optimizer_steps(set(batch.counting()), record.left_out):
                    minibatches = [Minibatch.of(batch, experience, sorted(i)) for i in indices]
                    for learner, own in learners:
                        outcome = learner.gradient(minibatches, unread)
                        if not outcome.finite_experience:
                            raise NonFiniteExperience
                        unread = None
                        own.add(outcome)
                        if outcome.moved_too_far:
                            break
                        if outcome.taken:
                            self._optimizer_step(own, learner)
                    if record.stopped_early:
                        break
        except BaseException:
            self.shuffle.set_state(order)
            for each in self.learners:
                each.gradient.discard()
            raise
        for _, own in learners:
            own.gather(self.gradient.processes)
            own.warn(self.config.ratio_threshold)
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

    def _optimizer_steps(self, counting: set[int], left_out: set[int]) -> Iterator[list[list[int]]]:
        """The samples of each mini-batch of each optimizer step, but those that do not count, and
        those that are in ``left_out`` by then.

        Raises:
            FloatingPointError: none is left.
        """
        count = self.gradient.processes.count  # the sizes are those of each
        size = self.config.mini_batch_size * count
        all_of_a_step = self.config.backward_batch_size * count
        for _ in range(self.config.ppo_epochs):
            order = self._order(self.config.batch_size * count)
            for begin in range(0, len(order), all_of_a_step):
                minibatches = [
                    [i for i in order[start : start + size] if i in counting - left_out]
                    for start in range(begin, begin + all_of_a_step, size)
                ]
                minibatches = [indices for indices in minibatches if indices]
                if minibatches:
                    yield minibatches
                if left_out and left_out >= counting:
                    raise FloatingPointError(
                        f"the loss or gradient of each of {len(counting)} samples is not finite: "
                        "nothing is left to learn from. The model is broken: load a sound "
                        "checkpoint; where training broke it, lower learning_rate or set "
                        "max_grad_norm"
                    )

    def _order(self, samples: int) -> list[int]:
        """A permutation; of whole groups, whose prompt is then paid once."""
        size = self.config.group_size
        groups = self.shuffle.permutation(samples // size).tolist()
        return [group * size + i for group in groups for i in range(size)]

    def _optimizer_step(
        self, record: UpdateRecord, learner: PPOUpdate | CriticLearner | None = None
    ) -> None:
        """A step of the policy, or of the critic."""
        learner = learner or self
        gradient = learner.gradient
        if self.accelerator.scaler is not None and self.config.max_grad_norm is not None:
            gradient.clip()
        optimizer = gradient.optimizer
        learner.optimizer_steps += 1
        optimizer.step()
        record.optimizer_steps += not getattr(optimizer, "step_was_skipped", False)
        gradient.zero()

    @property
    def learners(self) -> list[PPOUpdate | CriticLearner]:
        """What steps along gradients: the policy, and a critic of its own."""
        return [self] if self.critic is None else [self, self.critic]

    @property
    def steps_begun(self) -> int:
        """Of all optimizers."""
        return sum(learner.optimizer_steps for learner in self.learners)

    def _memory_saved(self) -> ExitStack:
        """Context in which activations are recomputed, and wait in host memory, where
        ``gradient_checkpointing`` and ``activation_offloading`` ask for it."""
        models = [self.accelerator.unwrap_model(each.gradient.model) for each in self.learners]
        saved = ExitStack()
        if self.config.gradient_checkpointing:
            for unwrapped in models:
                saved.enter_context(checkpointed(all_layers(unwrapped.pretrained_model)))
        # One context: of two, the inner one alone would see what is saved.
        saved.enter_context(self.offloading(models[0] if len(models) == 1 else ModuleList(models)))
        return saved


def _without(minibatches: Sequence[Minibatch], samples: Sequence[int]) -> list[Minibatch]:
    """Mini-batches without some samples, but those that have no other."""
    kept = []
    for minibatch in minibatches:
        places = [place for place, i in enumerate(minibatch.samples) if i not in samples]
        if places:
            kept.append(minibatch if len(places) == minibatch.size else minibatch.select(places))
    return kept
