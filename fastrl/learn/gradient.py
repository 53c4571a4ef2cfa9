"""The gradient of one optimizer step, without what is not to be learned from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.learn.engine import Engine
from fastrl.learn.experience import Experience
from fastrl.learn.loss import MinibatchLoss, UpdateLoss, ValueLoss
from fastrl.learn.memory import MicroBatches, PositionCount
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.learn.scorer import scoring_request, shares_of
from fastrl.learn.warmup import ALL_LEARNS, Learning
from fastrl.models.scoring import PassLimit


class StepRules(NamedTuple):
    """What a gradient leaves out, and how much of it is computed at a time."""

    ratio_threshold: float = math.inf  # mini-batches whose mean ratio exceeds it are left out
    most_kl: float | None = None  # no step is taken beyond this mean(old - new log-prob)
    micro_batch_tokens: int | None = None  # the most tokens of a pass; None: no limit


class Blame(NamedTuple):
    """Samples that make a loss or a gradient not finite."""

    left_out: tuple[int, ...] = ()  # their indices, where they alone are to be left out
    because: str = ""  # their names, for a warning that is yet to come


class StepOutcome(NamedTuple):
    """The result of a gradient: what it leaves out, and whether to step along it."""

    minibatches: Sequence[MinibatchLoss] = ()  # those with a finite loss
    nonfinite: int = 0  # mini-batches whose loss is not finite
    skipped: int = 0  # mini-batches whose mean ratio exceeds the threshold
    finite_gradient: bool = True
    moved_too_far: bool = False  # early stopping: no more steps are to be taken
    taken: bool = False  # whether there is a gradient for the optimizer
    norm: float = math.nan  # the gradient's norm before clipping; unknown under a GradScaler
    max_ratio: float = math.nan  # the largest of the mini-batches' mean ratios
    blame: Blame = Blame()
    finite_experience: bool = True  # False: the gradient was dropped, and nothing else is known


class Gradient(NamedTuple):
    """A gradient that lies in the weights' ``grad``, and numbers that were read with it."""

    losses: list[MinibatchLoss]
    totals: list[float]  # each mini-batch's loss
    ratios: list[float]  # each mini-batch's mean ratio
    kls: list[float]  # each mini-batch's mean(old - new log-prob)
    norm: float  # before clipping; 0 where a GradScaler scales it
    experience: float  # not finite where a number of the experience is not

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (*self.totals, self.norm)))


class GradientStep:
    """The gradient of one optimizer step, without mini-batches that are not to be learned from.

    One small read after the backward passes decides what is left out. A mini-batch is left out
    where its mean ratio exceeds ``rules.ratio_threshold`` or its loss is not finite: the gradient
    of the others is computed again, divided by their number of tokens, samples or mini-batches. No
    gradient is kept where no mini-batch is left, the gradient is not finite, or mean(old - new
    log-prob) exceeds ``rules.most_kl``. With ``on_nonfinite="zero-sample"`` the samples that make a
    loss or the gradient not finite are found, by halving, and left out alone.

    Where memory runs out, mini-batches are computed in parts, with the same denominators, and the
    gradient is begun again.

    The owner of the optimizer takes the step: :class:`fastrl.learn.update.Update`, or transformers'
    Trainer.

    Args:
        engine: its processes have the same mini-batches, and compute their shares of each; they
            read the same numbers, and so decide the same.
        nonfinite: handles numbers that are not finite.
        micro_batches: splits mini-batches where memory runs out.

    Attributes:
        learning: what learns, policy and value function or one of them.
    """

    def __init__(
        self,
        engine: Engine,
        loss: UpdateLoss | ValueLoss,
        rules: StepRules,
        nonfinite: NonFiniteNumbers,
        micro_batches: MicroBatches,
    ):
        self.engine, self.loss, self.rules = engine, loss, rules
        self.nonfinite, self.micro_batches = nonfinite, micro_batches
        self.learning: Learning = ALL_LEARNS
        self.positions = PositionCount()

    def __call__(
        self, minibatches: Sequence[Experience], experience: Tensor | None = None
    ) -> StepOutcome:
        """Adds up the gradient of the mini-batches' mean loss, clipped. Raises FloatingPointError
        where a loss or the gradient is not finite, with ``on_nonfinite="raise"``.

        Args:
            experience: [], a sum of log-probs and returns; if it is not finite, no gradient stays.
        """
        kept = list(minibatches)
        result = self._gradient(kept, experience)
        if not math.isfinite(result.experience):
            self.engine.zero()
            return StepOutcome(finite_experience=False)

        wrong = [kept[i] for i, total in enumerate(result.totals) if not math.isfinite(total)]
        blame = self._blame(wrong, f"non-finite loss in {len(wrong)} mini-batch(es)")
        if blame.left_out:
            kept = _without(kept, blame.left_out)
            result = self._again(kept)
        finite = [i for i, total in enumerate(result.totals) if math.isfinite(total)]
        near = [i for i in finite if result.ratios[i] <= self.rules.ratio_threshold]
        used = [kept[i] for i in near]
        # The gradient contains the mini-batches left out as well, perhaps as NaN.
        gradient = result if len(used) in (0, len(kept)) else self._again(used)
        if used and not math.isfinite(gradient.norm):
            blamed = self._blame(used, "non-finite gradient norm")
            blame = Blame((*blame.left_out, *blamed.left_out), blame.because or blamed.because)
            if blamed.left_out:
                used = _without(used, blamed.left_out)
                gradient = self._again(used)
        finite_gradient = not used or math.isfinite(gradient.norm)
        policy_kl = sum(result.kls[i] for i in finite) / len(finite) if finite else math.nan
        too_far = self.rules.most_kl is not None and policy_kl > self.rules.most_kl
        taken = bool(used) and finite_gradient and not too_far
        if not taken:
            self.engine.zero()
        return StepOutcome(
            [result.losses[i] for i in finite],
            nonfinite=len(kept) - len(finite),
            skipped=len(finite) - len(near),
            finite_gradient=finite_gradient,
            moved_too_far=too_far,
            taken=taken,
            norm=math.nan if self.engine.is_scaled else gradient.norm,
            max_ratio=max((result.ratios[i] for i in finite), default=math.nan),
            blame=blame,
        )

    def of_loss(self, loss: Tensor) -> StepOutcome:
        """The clipped gradient of a loss [], kept if both are finite; raises as ``__call__``."""
        with self.engine.accumulating(last=True):
            self.engine.add(loss, of=self.engine.processes.count)
        value, norm = torch.stack([loss.detach().float(), self.engine.norm()]).tolist()
        finite = math.isfinite(value)
        finite_gradient = not finite or math.isfinite(norm)
        if not finite:
            self.nonfinite.update("non-finite loss in 1 mini-batch(es)")
        elif not finite_gradient:
            self.nonfinite.update("non-finite gradient norm")
        taken = finite and finite_gradient
        if not taken:
            self.engine.zero()
        return StepOutcome(nonfinite=int(not finite), finite_gradient=finite_gradient, taken=taken)

    def _gradient(
        self, minibatches: Sequence[Experience], experience: Tensor | None = None
    ) -> Gradient:
        """Adds all mini-batches' gradient to empty ``grad``, in parts that fit into memory."""
        largest = max((minibatch.size for minibatch in minibatches), default=1)
        tokens = self.rules.micro_batch_tokens
        for attempt in self.micro_batches(largest, self.engine.discard):
            with attempt as size:
                losses = self._backward(minibatches, PassLimit(size, tokens))
        self.learning.keep(self.engine.unwrapped)
        return self._read(losses, experience)

    def _again(self, minibatches: Sequence[Experience]) -> Gradient:
        """The gradient of some mini-batches, in place of the one in the weights' ``grad``."""
        self.engine.zero()
        return self._gradient(minibatches)

    def _backward(self, minibatches: Sequence[Experience], limit: PassLimit) -> list[MinibatchLoss]:
        """Forward and backward passes of this process's share of all mini-batches."""
        losses = []
        denominators = self.loss.denominators(minibatches)
        for minibatch, denominator in zip(minibatches, denominators, strict=True):
            local, parts, counts = self._share(minibatch, limit)
            parts = self._with_chosen(parts, counts)
            results = []
            for i, part in enumerate(parts):
                model_pass = part.tokens.model_pass
                self.positions.add(part.tokens)
                request = self.loss.request(part, model_pass, denominator)
                last = minibatch is minibatches[-1] and i == len(parts) - 1
                with self.engine.accumulating(last):
                    scores = self.engine.model(**model_pass.inputs, scoring=request)
                    coef = self.learning.policy_coef
                    part_loss = self.loss(part, request, scores, coef)
                    routing, router = model_pass.inputs.get("routing"), self.loss.router
                    if routing is not None and router is not None:
                        share = part.size / minibatch.size
                        part_loss = router.added(part_loss, routing, share, coef)
                    results.append(part_loss)
                    loss = results[-1].loss
                    self.engine.add(loss if i < counts else loss * 0, len(minibatches))
            joined = MinibatchLoss.joined(results[: counts or 1], local)
            if self.engine.processes.count > 1:
                joined = joined.share(local, minibatch, float(counts > 0))
            losses.append(joined)
        return losses

    @torch.no_grad()
    def _with_chosen(self, parts: list[Experience], counts: int) -> list[Experience]:
        """The parts, with ``chosen`` by one more forward pass of each where scores decide what is
        learned.

        Args:
            counts: how many of the parts, the first ones, count.
        """
        alone = len(parts) == 1 and self.engine.processes.count == 1
        if not self.loss.chooses_by_scores(alone):
            return parts
        assert isinstance(self.loss, UpdateLoss)
        scores = []
        for part in parts:
            model_pass = part.tokens.model_pass
            self.positions.add(part.tokens)
            temperature = self.loss.temperature
            request = scoring_request(
                part.tokens, model_pass, temperature=temperature, entropy=True
            )
            scores.append(self.engine.model(**model_pass.inputs, scoring=request))
        entropies = torch.cat([scores[0].entropies[:0], *(x.entropies for x in scores[:counts])])
        processes = self.engine.processes
        joined = processes.joined(entropies, processes.objects(len(entropies)))
        return self.loss.with_chosen(parts, scores, joined)

    def _share(
        self, minibatch: Experience, limit: PassLimit
    ) -> tuple[Experience, list[Experience], int]:
        """This process's part of a mini-batch, the parts of it that a forward runs at a time, and
        how many of these, the first ones, count. Each other part is a sample that is not learned
        from: processes wait for each other in forwards, and so all need the same number of them."""
        if self.engine.processes.count == 1:
            parts = minibatch.split(limit)
            return minibatch, parts, len(parts)
        tokens = minibatch.tokens
        shares = shares_of(tokens, range(minibatch.size), self.engine.processes)
        passes = max(len(tokens.parts(share, limit)) for share in shares)
        chosen = shares[self.engine.processes.index]
        share = minibatch.select(chosen or [0])
        parts = share.split(limit) if chosen else []
        return share, parts + [minibatch.select([0])] * (passes - len(parts)), len(parts)

    def _blame(self, minibatches: Sequence[Experience], what: str) -> Blame:
        """Handles mini-batches whose loss or gradient is not finite.

        Where samples are to be blamed, halving finds those whose own loss or gradient is not
        finite. If there are any mini-batches, no gradient is left in the weights.
        """
        if not minibatches:
            return Blame()
        causes: list[Experience] = []  # each of one sample
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
        self.engine.zero()
        causes.sort(key=lambda part: part.tokens.samples[0])
        because = self.nonfinite.update(what, causes)
        alone = self.nonfinite.leaves_out_causes
        return Blame(tuple(part.tokens.samples[0] for part in causes) if alone else (), because)

    def _read(self, losses: Sequence[MinibatchLoss], experience: Tensor | None) -> Gradient:
        """Losses, mean ratios and policy KLs of mini-batches, and the gradient's norm, in one host
        read. Every process reads the same numbers, and so decides the same."""
        norm = self.engine.norm()
        of_each = [(each.loss.detach(), each.mean_ratio, each.policy_kl) for each in losses]
        checked = norm.new_zeros(()) if experience is None else experience
        shares = torch.stack([norm.new_zeros(()), *(x for each in of_each for x in each)])
        numbers = torch.cat([self.engine.processes.sums(shares)[1:], torch.stack([checked, norm])])
        *read, experience_read, norm_read = numbers.tolist()
        return Gradient(list(losses), read[::3], read[1::3], read[2::3], norm_read, experience_read)


def _without(minibatches: Sequence[Experience], samples: Sequence[int]) -> list[Experience]:
    """Mini-batches without some samples; a mini-batch of these samples alone is dropped."""
    kept = []
    for minibatch in minibatches:
        places = [place for place, i in enumerate(minibatch.tokens.samples) if i not in samples]
        if places:
            kept.append(minibatch if len(places) == minibatch.size else minibatch.select(places))
    return kept
