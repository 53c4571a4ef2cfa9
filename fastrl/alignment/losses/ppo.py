"""Proximal policy optimisation, as a loss of the framework."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fastrl.alignment.batch import Batch
from fastrl.alignment.losses.base import Loss, LossOutput, register
from fastrl.alignment.tasks import Task
from fastrl.config import PPOConfig
from fastrl.learn.engine import Engine
from fastrl.learn.experience import Experience
from fastrl.learn.kl_penalty import make_kl_penalty
from fastrl.learn.loss import UpdateLoss
from fastrl.learn.ref_model.none import NoRefModel
from fastrl.learn.scorer import Scorer
from fastrl.learn.update import UpdateRecord
from fastrl.models.scoring import PassLimit
from fastrl.models.utils import evaluating
from fastrl.rollout import SamplingParams
from fastrl.run.processes import processes_of
from fastrl.run.random_state import seed_at
from fastrl.trainers.ppo import method

# Fields of the loss that are settings of PPOConfig under the same names.
_SHARED_SETTINGS = (
    *("gamma", "lam", "cliprange", "cliprange_value", "vf_coef", "temperature"),
    *("ratio_threshold", "early_stopping", "target_kl"),
)


@register
@dataclass(frozen=True)
class PPO(Loss):
    """max(-A·ρ, -A·clip(ρ)) + c·value loss, with a KL penalty in the rewards: PPO.

    Policy and reference score a batch once; the advantages are generalised advantage estimates,
    whitened. Then the policy is trained on the batch ``epochs`` times, in mini-batches. A sample's
    weight multiplies the loss of its tokens. A mini-batch whose loss is not finite or whose mean
    ratio is too large is left out of its optimizer step. This is the update of
    :class:`fastrl.PPOTrainer`, which has more options. Batches and mini-batches are over all
    processes; each process computes its share of them.

    Args:
        epochs: how often the policy is trained on each batch.
        mini_batches: mini-batches in each epoch, an optimizer step each unless gradients are
            accumulated.
        kl_coef: β of the penalty -β·(log π - log ref) on every token's reward; 0: no reference.
        gamma, lam: discount and λ of the advantages.
        cliprange: clip range of the ratio ρ.
        cliprange_value: clip range of the value function's change.
        vf_coef: c.
        temperature: T of the policy softmax(logits / T), at which responses are sampled.
        ratio_threshold: mini-batches whose mean ratio exceeds this are left out.
        early_stopping: begin the next batch once mean(log π_old - log π) exceeds 1.5·``target_kl``.
        target_kl: nats per token, for ``early_stopping``.
    """

    name: ClassVar[str] = "ppo"
    tasks: ClassVar[tuple[str, ...]] = ("reinforcement-learning",)
    learns: ClassVar[str] = "policy with values"
    reads_all: ClassVar[bool] = True
    epochs: int = 4
    mini_batches: int = 1
    kl_coef: float = 0.05
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    temperature: float = 1.0
    ratio_threshold: float = 10.0
    early_stopping: bool = False
    target_kl: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "mini_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self._settings  # noqa: B018 - PPOConfig checks the rest

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.kl_coef > 0

    @property
    def _settings(self) -> PPOConfig:
        shared = {name: getattr(self, name) for name in _SHARED_SETTINGS}
        return PPOConfig(init_kl_coef=self.kl_coef, **shared)

    @property
    def _update_loss(self) -> UpdateLoss:
        return method.loss_of(self._settings)

    def check(self, task: Task, batch_size: int) -> None:
        super().check(task, batch_size)
        if batch_size % self.mini_batches:
            raise ValueError(
                f"batch_size ({batch_size}, of all processes) must be a multiple of mini_batches "
                f"({self.mini_batches}): change one of the two"
            )

    def check_sampling(self, params: SamplingParams) -> None:
        if params.temperature != self.temperature:
            raise ValueError(
                f"responses are sampled at temperature={params.temperature}, the loss ppo learns "
                f"softmax(logits / {self.temperature:g}): give both the same, PPO(temperature=...)"
            )
        changes = params.changes_of_the_draw()
        if changes:
            changed = ", ".join(f"{name}={value}" for name, value in changes.items())
            warnings.warn(
                f"{changed}: responses are not drawn from softmax(logits / temperature), which "
                "the ratio and the KL assume, so both are approximate; leave it out to make them "
                "exact",
                stacklevel=3,
            )

    @property
    def minibatches_per_batch(self) -> int:
        return self.epochs * self.mini_batches

    def minibatches(self, batch: Batch, policy: Any, reference: Any) -> Iterator[Batch]:
        """Computes the batch's experience once; then yields mini-batches of its samples, which are
        shuffled anew every epoch."""
        batch = batch.whole
        experience = self._experience(batch, policy, reference)
        size = batch.size // self.mini_batches
        for epoch in range(self.epochs):
            draws = torch.Generator().manual_seed(seed_at(batch.seed, "order", epoch))
            order = torch.randperm(batch.size, generator=draws).tolist()
            for start in range(0, size * self.mini_batches, size):
                chosen = order[start : start + size]
                part = batch.select(chosen)
                part.experience = experience.select(chosen)
                part.tokens = part.experience.tokens
                yield part

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        if batch.experience is None:  # the batch does not come from minibatches()
            batch.experience = self._experience(batch, policy, reference)
        loss, minibatch = self._update_loss, batch.experience
        (denominator,) = loss.denominators([minibatch])
        model_pass = minibatch.tokens.model_pass
        request = loss.request(minibatch, model_pass, denominator)
        scores = policy.model(**model_pass.inputs, scoring=request)
        terms = loss(minibatch, request, scores)
        return LossOutput(terms.loss, terms.stats)

    def backward(
        self, minibatches: Sequence[Batch], model: Any, accelerator: Any, optimizer: Any
    ) -> tuple[LossOutput, bool]:
        """Leaves the gradient of an optimizer step in the weights; see :class:`Loss`."""
        loss, processes = self._update_loss, processes_of(accelerator)
        engine = Engine(accelerator, model, optimizer, processes=processes)
        gradient = method.gradient_of(self._settings, engine, loss)
        outcome = gradient([part.experience for part in minibatches])  # type: ignore[misc]
        if accelerator.scaler is not None and not outcome.taken:
            # A GradScaler needs gradients, and skips steps whose gradients are infinite.
            weight = next(p for p in model.parameters() if p.requires_grad)
            weight.grad = torch.full_like(weight, torch.inf)
        record = UpdateRecord(loss.names)
        record.add(outcome)
        record.gather(processes)
        record.warn(self.ratio_threshold)
        device = accelerator.device
        means = record.means(device)
        counts = {
            "ppo/skipped_minibatches": record.skipped,
            "ppo/nonfinite_minibatches": record.nonfinite,
            "ppo/nonfinite_steps": record.nonfinite_steps,
            "ppo/early_stopped": record.stopped_early,
        }
        metrics = means | {k: torch.tensor(float(x), device=device) for k, x in counts.items()}
        return LossOutput(means["ppo/loss/total"], metrics), outcome.moved_too_far

    @torch.no_grad()
    def _experience(self, batch: Batch, policy: Any, reference: Any) -> Experience:
        """Scores a batch; makes its rewards, with the KL penalty, and from them its advantages."""
        tokens, config = policy.tokens(batch), self._settings
        compared = NoRefModel() if reference is None else reference.reference
        penalty = make_kl_penalty("kl", compared)
        scorer = Scorer(
            policy.model,
            compared,
            penalty,
            PassLimit(batch.size),
            temperature=self.temperature,
            processes=policy.processes,
        )
        with evaluating(policy.model):
            scored = scorer(tokens)
        rewards, _, _ = penalty.rewards(
            batch.rewards(1).to(tokens.mask.device),
            *scored.kl_operands,
            tokens.mask,
            self.kl_coef,
        )
        values, advantages, returns = method.advantages_of(config)(
            scored.values, rewards, tokens.mask
        )
        weights = batch.weights().to(values.device)
        learned = replace(scored, values=values, advantages=advantages, returns=returns)
        return replace(learned, ref_logprobs=None, weights=weights, of_samples=weights).counted()
