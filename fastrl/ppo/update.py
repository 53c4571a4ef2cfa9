"""The PPO update: epochs over a batch of experience, in mini-batches of the clipped loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastrl.config import PPOConfig
from fastrl.data.batch import TokenBatch
from fastrl.models.activation_checkpointing import all_layers, checkpointed
from fastrl.models.scoring import PolicyObjective, ScoringRequest, TokenScores
from fastrl.ppo.experience import Experience, scoring_request
from fastrl.ppo.nonfinite import make_nonfinite
from fastrl_kernels import KLTerm

# ------------------------------------------------------------------ what the loss is made of


class KLPlace(Protocol):
    """Where the KL penalty acts: on rewards or in the loss."""

    def reward_coef(self, coef: float) -> float:
        """β of the penalty in the rewards."""

    def term(self, ref_logprobs: Tensor, coef: float) -> KLTerm | None:
        """What is added to the loss."""


class KLInReward:
    """Each token's reward is less by β times its KL penalty, as in classic PPO."""

    def reward_coef(self, coef: float) -> float:
        return coef

    def term(self, ref_logprobs: Tensor, coef: float) -> KLTerm | None:
        return None


class KLInLoss:
    """β·(exp(-d) - 1 + d) is added to each token's loss, d = log π - log ref: "k3"."""

    def reward_coef(self, coef: float) -> float:
        return 0.0

    def term(self, ref_logprobs: Tensor, coef: float) -> KLTerm | None:
        return KLTerm(ref_logprobs, coef, "k3")


def make_kl_place(config: PPOConfig) -> KLPlace:
    """By ``PPOConfig.kl_in``."""
    return KLInLoss() if _kl_in_loss(config) else KLInReward()


def _kl_in_loss(config: PPOConfig) -> bool:
    # A coefficient that is 0 stays 0, and there need not be a reference.
    return config.kl_in == "loss" and config.init_kl_coef > 0


@dataclass(frozen=True)
class Aggregate:
    """How a loss sums over tokens: Σ_t w_t·ℓ_t / denominator.

    Attributes:
        sample_weights: from the numbers of response tokens [B], what each token of a sample weighs,
            [B]; None: 1.
        denominator: of some samples, from their numbers of response tokens and their weights or
            None, [b] each; that of several mini-batches is that of all their samples.
    """

    sample_weights: Callable[[Tensor], Tensor | None]
    denominator: Callable[[Tensor, Tensor | None], Tensor]

    def weights(self, mask: Tensor, given: Tensor | None) -> Tensor | None:
        """What each token of a sample weighs, [B], times what is ``given``; None: 1."""
        own = self.sample_weights(mask.sum(-1))
        return given if own is None else own if given is None else own * given


def _unweighted(lengths: Tensor) -> None:
    return None


def _over_length(lengths: Tensor) -> Tensor:
    return lengths.clamp(min=1).reciprocal()


def _over_fixed_length(lengths: Tensor, length: int | None) -> Tensor:
    norm = lengths.max().clamp(min=1) if length is None else length
    return torch.ones_like(lengths) / norm


def _tokens(lengths: Tensor, weights: Tensor | None) -> Tensor:
    return lengths.sum() if weights is None else (weights * lengths).sum()


def _samples_with_tokens(lengths: Tensor, weights: Tensor | None) -> Tensor:
    counts = lengths > 0 if weights is None else (lengths > 0) & (weights > 0)
    return counts.sum().clamp(min=1)


def _weighted_samples(lengths: Tensor, weights: Tensor | None) -> Tensor:
    assert weights is not None
    return (weights > 0).sum().clamp(min=1)


def make_aggregate(config: PPOConfig) -> Aggregate:
    """By ``PPOConfig.loss_aggregate``, one of the kernels' AGGREGATES; sums over flat rows, whose
    sequences a kernel cannot see, come out the same."""
    by_norm = partial(_over_fixed_length, length=config.loss_norm_length)
    return {
        # all tokens of a mini-batch weigh the same
        "token-mean": Aggregate(_unweighted, _tokens),
        # Σ over tokens / samples that have a response token, and a weight above 0
        "seq-mean-token-sum": Aggregate(_unweighted, _samples_with_tokens),
        # the mean over such samples of the means over their tokens
        "seq-mean-token-mean": Aggregate(_over_length, _samples_with_tokens),
        # Σ over tokens / (samples of a weight above 0 × length), a length that is the same for all
        "seq-mean-token-sum-norm": Aggregate(by_norm, _weighted_samples),
    }[config.loss_aggregate]


class Minibatch(NamedTuple):
    """Some samples of a batch, without the padding that none of them needs."""

    tokens: TokenBatch
    old: Experience  # of their response tokens, [N]

    @classmethod
    def of(cls, batch: TokenBatch, experience: Experience, indices: Sequence[int]) -> Minibatch:
        """Samples ``indices`` of a batch with their experience [B, T-1]."""
        columns = batch.columns(indices)
        shifted = slice(columns.start, columns.stop - 1)
        tokens = batch.select(indices)
        return cls(tokens, experience.of_tokens(indices, shifted, tokens.response_mask))


class MinibatchLoss(NamedTuple):
    """The loss of a mini-batch under the policy as it is now."""

    loss: Tensor  # []
    stats: dict[str, Tensor]  # [] each, by their classic names
    mean_ratio: Tensor  # []
    ratios: Tensor  # [N], of the response tokens
    advantages: Tensor  # [N]


# Statistics of the policy's loss, and the fields of the kernels' LossStats that they are.
_POLICY_STATS = {
    "ppo/loss/policy": "policy_loss",
    "ppo/policy/approxkl": "approx_kl",
    "ppo/policy/policykl": "policy_kl",
    "ppo/policy/clipfrac": "clipfrac",
    "ppo/policy/clamped_ratios": "clamped_ratios",
}
_OTHER_STATS = (
    "ppo/loss/total",
    "ppo/policy/entropy",
    "ppo/policy/advantages_mean",
    "ppo/returns/mean",
    "ppo/returns/var",
)
_VALUE_STATS = (
    "ppo/loss/value",
    "ppo/val/vpred",
    "ppo/val/error",
    "ppo/val/clipfrac",
    "ppo/val/mean",
    "ppo/val/var",
)


class UpdateLoss:
    """The loss of a mini-batch, and its statistics.

    Σ_t w_t·[max(-A·ρ, -A·clip(ρ, 1 - low, 1 + high)) + vf_coef·½·max((v-R)², (clip(v, v_old ±
    c) - R)²) + KL term] / denominator over the response tokens; without a value function the second
    is not there. The policy's part, with the KL term, is computed by the LM head's kernel.

    Attributes:
        aggregate: gives w and the denominator.
        per_step: whether all mini-batches of an optimizer step have one denominator.
        temperature: T of the policy softmax(logits / T).
        names: the classic names of its statistics.
    """

    def __init__(self, config: PPOConfig, aggregate: Aggregate):
        high = config.cliprange if config.cliprange_high is None else config.cliprange_high
        self.cliprange = (config.cliprange, high)
        self.aggregate = aggregate
        self.has_values = config.needs_values
        self.cliprange_value, self.vf_coef = config.cliprange_value, config.vf_coef
        kind = config.loss_denominator  # "auto" is TRL's for GAE
        self.per_step = kind == "step" or (kind == "auto" and not config.needs_values)
        self.temperature = config.temperature
        self.names = (
            *_POLICY_STATS,
            *_OTHER_STATS,
            *(_VALUE_STATS if self.has_values else ()),
            *(("ppo/loss/kl",) if _kl_in_loss(config) else ()),
        )

    def denominators(self, minibatches: Sequence[Minibatch]) -> list[Tensor]:
        """What the losses of an optimizer step's mini-batches are divided by; the step's loss is
        their mean.

        Each by its own tokens (or samples), as in TRL: tokens of a short mini-batch weigh more. Or,
        ``per_step``, by those of all n mini-batches over n: Σ_j S_j / D is the mean of
        S_j / (D / n), so that the step does not depend on how many mini-batches there are.
        """
        lengths = [minibatch.tokens.mask.sum(-1) for minibatch in minibatches]
        weights = [minibatch.old.weights for minibatch in minibatches]
        if self.per_step and len(minibatches) > 1:
            joined = None if weights[0] is None else torch.cat(weights)  # type: ignore[arg-type]
            whole = self.aggregate.denominator(torch.cat(lengths), joined)
            return [whole / len(minibatches)] * len(minibatches)
        return list(map(self.aggregate.denominator, lengths, weights))

    def request(self, minibatch: Minibatch, denominator: Tensor) -> ScoringRequest:
        """What the model has to compute: the policy's part of the loss, log-probs and values."""
        tokens, old = minibatch
        weights = old.weights
        if weights is not None:  # of tokens; told how many, it need not wait for the device
            lengths = tokens.mask.sum(-1)
            weights = weights.repeat_interleave(lengths, output_size=len(old.logprobs))
        objective = PolicyObjective(
            old.logprobs,
            old.advantages,
            self.cliprange,
            old.kl,
            weights,
            denominator,
        )
        return scoring_request(
            tokens,
            temperature=self.temperature,
            entropy=True,
            values=self.has_values,
            objective=objective,
        )

    def __call__(self, old: Experience, request: ScoringRequest, new: TokenScores) -> MinibatchLoss:
        """Of a mini-batch's experience, what was requested for it, and what the model said."""
        objective = request.objective
        assert isinstance(objective, PolicyObjective)
        assert new.loss is not None
        assert new.stats is not None
        value_loss, stats = self.value_loss(new, objective, old.values, old.returns)
        loss = new.loss + self.vf_coef * value_loss
        stats["ppo/loss/total"] = loss.detach()
        ratios = (new.logprobs - old.logprobs).exp()
        return MinibatchLoss(loss, stats, new.stats.mean_ratio, ratios, old.advantages)

    def value_loss(
        self, new: TokenScores, objective: PolicyObjective, old_values: Tensor, returns: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ_t w_t·½·max((v-R)², (clip(v, v_old ± c) - R)²) / denominator, 0 without a value
        function; and all statistics but the whole loss.

        Args:
            new: with the policy's loss and its statistics.
            objective: which that is of; its denominator is a tensor, where 0 gives 0.
            old_values, returns: [N].
        """
        assert new.stats is not None
        assert new.entropies is not None
        returns_mean, returns_var = _moments(returns)
        stats = {name: getattr(new.stats, field) for name, field in _POLICY_STATS.items()}
        stats |= {
            "ppo/policy/entropy": new.entropies.mean(),
            "ppo/policy/advantages_mean": objective.advantages.mean(),
            "ppo/returns/mean": returns_mean,
            "ppo/returns/var": returns_var,
        }
        if objective.kl is not None:
            stats["ppo/loss/kl"] = new.stats.kl_loss
        if not self.has_values:
            return torch.zeros_like(returns_mean), stats
        values, weights, denominator = new.values, objective.token_weights, objective.denominator
        assert isinstance(values, Tensor)
        assert isinstance(denominator, Tensor)
        c = self.cliprange_value
        near = torch.clamp(values, old_values - c, old_values + c)
        error, near_error = (values - returns).square(), (near - returns).square()
        clips = near_error > error
        losses = 0.5 * torch.where(clips, near_error, error)
        total = (losses if weights is None else weights * losses).sum()
        loss = total * torch.where(denominator == 0, 0.0, 1.0 / denominator)
        values_mean, values_var = _moments(old_values)
        return loss, stats | {
            "ppo/loss/value": loss.detach(),
            "ppo/val/vpred": values.detach().mean(),
            "ppo/val/error": error.detach().mean(),
            "ppo/val/clipfrac": clips.float().mean(),
            "ppo/val/mean": values_mean,
            "ppo/val/var": values_var,
        }


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of [N]; that of one number is 0."""
    variance, mean = torch.var_mean(x, correction=0)
    return mean, variance * (len(x) / max(len(x) - 1, 1))


# ------------------------------------------------------------------ one optimizer step


class StepOutcome(NamedTuple):
    """What became of an optimizer step's mini-batches."""

    minibatches: list[MinibatchLoss]  # whose loss is finite
    nonfinite: int  # mini-batches whose loss is not
    skipped: int  # mini-batches whose mean ratio exceeds the threshold
    finite_gradient: bool
    moved_too_far: bool  # early stopping: no more steps are to be taken
    taken: bool  # whether the gradient is there to be stepped along; else there is none


class GradientStep:
    """The gradient of one optimizer step, without what must not be learned from.

    One small read, after the backward passes, decides what becomes of it. A mini-batch takes no
    part where its mean ratio exceeds ``ratio_threshold`` or its loss is not finite: the gradient of
    the others is then computed once more without it, divided by what is left (the others' tokens or
    samples, or their number). Where nothing is left, or the gradient is not finite, or with early
    stopping mean(old - new log-prob) exceeds 1.5·target_kl, there is none.

    The step itself is taken by whoever owns the optimizer: :class:`PPOUpdate`, or transformers'
    Trainer.

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
        self.nonfinite = make_nonfinite(config)

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
            # What is left out is in the gradient already, and may be NaN there.
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
        """The gradient of a loss that is there already."""
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
        """The gradient of loss / of; accelerate divides by a number of mini-batches that is
        fixed."""
        scale = self.accelerator.gradient_accumulation_steps / of
        self.accelerator.backward(loss if scale == 1 else loss * scale)

    def clip(self) -> Tensor | None:
        """Clips to ``max_grad_norm``; the norm before that."""
        return self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)

    def zero(self) -> None:
        """As the optimizer does it; and of weights that it, a user's own say, does not have: their
        gradients would add up, and what is NaN would stay."""
        self.optimizer.zero_grad()
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in self.model.parameters():
            if id(parameter) not in own:
                parameter.grad = None

    def discard(self) -> None:
        """Gradients that were not learned from, and a GradScaler's note that they were unscaled."""
        self.accelerator.sync_gradients = True
        self.zero()
        scaler = self.accelerator.scaler
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.accelerator.device))  # it may be unused yet
            scaler.update(scaler.get_scale())

    @contextmanager
    def _accumulating(self, last: bool) -> Iterator[None]:
        """Gradients add up in the weights; other processes' come in with the last of them.

        accelerate counts mini-batches by itself for ``accumulate()``, which would be off after an
        exception, and with a step that has fewer mini-batches.
        """
        self.accelerator.sync_gradients = last
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            yield

    def _read(
        self, losses: Sequence[MinibatchLoss]
    ) -> tuple[list[float], list[float], list[float], float]:
        """Losses, mean ratios and policy KLs of mini-batches, and the gradient's norm: the step's
        one host read. Every process reads the same, and comes to the same decision."""
        judged = [
            (each.loss.detach(), each.mean_ratio, each.stats["ppo/policy/policykl"])
            for each in losses
        ]
        figures = torch.stack([*(x for each in judged for x in each), self._gradient_norm()])
        if self.accelerator.num_processes > 1:
            figures = self.accelerator.reduce(figures, reduction="mean")
        *numbers, norm = figures.tolist()
        return numbers[::3], numbers[1::3], numbers[2::3], norm

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


# ------------------------------------------------------------------ the whole update


@dataclass
class UpdateRecord:
    """What an update leaves behind, on the device; of mini-batches whose loss is finite."""

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
        """One warning for each kind of what took no part."""
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
    """Runs ``ppo_epochs`` over an experience and leaves the policy improved.

    The model stays in evaluation mode: dropout would make the ratio differ from 1 where nothing
    changed. Samples without response tokens are not run. Which mini-batches and steps are left out
    :class:`GradientStep` says.

    An exception leaves no gradient behind, and the order of the samples as it was before the call;
    optimizer steps that were taken stay.
    """

    def __init__(self, config: PPOConfig, gradient: GradientStep):
        self.config = config
        self.gradient = gradient
        self.accelerator = gradient.accelerator
        self.shuffle = np.random.RandomState(config.seed)

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
        """The samples of each mini-batch of an optimizer step, epoch after epoch; those that do not
        count are none."""
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
        optimizer.step()
        record.optimizer_steps += not getattr(optimizer, "step_was_skipped", False)
        self.gradient.zero()

    def _memory_saved(self) -> AbstractContextManager[None]:
        """Activations of layers are not kept, where ``gradient_checkpointing`` asks for it."""
        if not self.config.gradient_checkpointing:
            return nullcontext()
        unwrapped: Any = self.accelerator.unwrap_model(self.gradient.model)
        return checkpointed(all_layers(unwrapped.pretrained_model))
