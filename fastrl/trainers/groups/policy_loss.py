"""The losses of GRPO, RLOO and their kin, by the kernels' table of policy losses.

Tokens of the B responses of a mini-batch lie one after the other, [N].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.learn.aggregate import Aggregate
from fastrl.learn.experience import Minibatch
from fastrl.learn.loss import TokenLoss
from fastrl.learn.objective import TokenObjective, loss_of_logprobs
from fastrl.models.scoring import PolicyObjective, TokenScores
from fastrl.registry import POLICY_LOSS_NAMES, policy_loss
from fastrl.run.metric_means import MetricMeans, mean_of
from fastrl.trainers.groups.passes import Pass
from fastrl_kernels.kl import kl_value
from fastrl_kernels.policy_losses import POLICY_LOSSES, LossRow, PolicyLoss
from fastrl_kernels.sequence_ratios import log_gamma_weights

LEVELS = ("token", "sequence")


class Ratios(NamedTuple):
    """Probability ratios to the old policy, of tokens or of whole responses."""

    units: Tensor  # [N] or [B]
    advantages: Tensor  # of the units
    by_sequence: bool


def ratios_of(part: Minibatch, logprobs: Tensor, level: str) -> Ratios:
    """ρ_t = π(y_t)/π_old(y_t), or (GSPO) a response's geometric mean exp(mean_t log ρ_t), or (RLOO)
    its product Π_t ρ_t."""
    log_ratio = part.differences(logprobs)
    if level == "token":
        return Ratios(log_ratio.exp(), part.old.advantages, False)
    units = (part.sums if level == "product" else part.means)(log_ratio).exp()
    assert part.old.of_responses is not None
    return Ratios(units, part.old.of_responses, True)


class LossType(NamedTuple):
    """A row of the table of losses.

    Attributes:
        kind: ℓ_t, by its name in ``fastrl_kernels.POLICY_LOSSES``.
        aggregate: of the ℓ_t, by its name in :class:`fastrl.learn.aggregate.Aggregate`.
        formula: for the documents.
        of_step: whether the tokens that the sum is divided by are those of the optimizer step.
        sums_tokens: whether a ratio of whole responses would weigh each by its length.
        level: the ``importance_sampling_level`` that it is meant for; None: any.
    """

    kind: str
    aggregate: str
    formula: str
    of_step: bool = False
    sums_tokens: bool = False
    level: str | None = None

    @property
    def clips(self) -> bool:
        """Whether shares of ratios that PPO's clip would cut are logged."""
        return self.kind == "clip" or PolicyLoss(self.kind).is_registered


_MEAN, _SUM, _NORM = "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
LOSS_TYPES = {
    "grpo": LossType("clip", _MEAN, "mean over responses of mean_t ℓ_t"),
    "bnpo": LossType("clip", "token-mean", "Σ ℓ_t / tokens of the batch", sums_tokens=True),
    "dr_grpo": LossType(
        "clip", _NORM, "Σ ℓ_t / (responses·max_completion_length)", sums_tokens=True
    ),
    "dapo": LossType("clip", "token-mean", "Σ ℓ_t / tokens of the optimizer step", True, True),
    "luspo": LossType("clip", _SUM, "mean over responses of Σ_t ℓ_t", level="sequence"),
    "cispo": LossType(
        "cispo", "token-mean", "as dapo, ℓ_t = -sg[min(ρ, ε_high)]·A·log π", True, True
    ),
    "sapo": LossType("sapo", _MEAN, "as grpo, ℓ_t = -4·σ(τ(ρ - 1))/τ·A"),
    "vespo": LossType("vespo", "token-mean", "as dapo, ℓ_t = -sg[φ(w)]·A·log π, w = Π_t ρ_t", True),
}


class LossTypes(Mapping[str, LossType]):
    """Rows by name; a policy loss that was registered, or is named as "file.py:function", is one
    whose tokens are averaged as "dapo" has it."""

    def __getitem__(self, name: str) -> LossType:
        if name in LOSS_TYPES:
            return LOSS_TYPES[name]
        if name not in self:
            raise KeyError(name)
        return LossType(name, "token-mean", f"as dapo, ℓ_t = {POLICY_LOSSES[name].formula}", True)

    def __iter__(self) -> Iterator[str]:
        registered = (name for name, row in POLICY_LOSSES.items() if row.function is not None)
        return iter([*LOSS_TYPES, *registered])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """
        Raises:
            ValueError: TRL's name of another loss than the one that is registered by it.
        """
        if name in LOSS_TYPES:
            if LOSS_TYPES[str(name)].kind != name and name in POLICY_LOSSES:
                raise ValueError(
                    f"loss_type {name!r} is TRL's {LOSS_TYPES[str(name)].formula}, and a policy "
                    "loss of yours has that name: register yours by another"
                )
            return True
        return name in POLICY_LOSS_NAMES and PolicyLoss(str(name)).is_registered


ALL_LOSS_TYPES = LossTypes()
RLOO = LossType("clip", _MEAN, "mean over responses of ℓ, ρ = Π_t ρ_t")


def high_of(args: Any) -> float:
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


class GroupLoss(TokenLoss):
    """The loss of a batch, -c·mean_t H_t among it.

    v and D are by ``args.loss_type``'s aggregate of the batch's responses, or D is the tokens that
    were generated, so that the mean over the batches of an optimizer step is the step's loss.
    KL_t is the estimator k3 of :func:`fastrl_kernels.kl_penalty`, times ρ_t where
    ``args.use_bias_correction_kl`` says so (DeepSeek-V3.2), the token's own ratio also beside
    ratios of sequences: by another one its gradient would be no KL's. Weights of another sampler
    are factors of u, those of "vespo" of its ratio w in their place.

    Args:
        corrects_kl: ``use_bias_correction_kl``.
    """

    def __init__(
        self,
        args: Any,
        loss_type: LossType,
        objective: TokenObjective,
        corrects_kl: bool = False,
    ):
        self.type, self.beta, self.corrects_kl = loss_type, args.beta, corrects_kl
        aggregate = Aggregate(loss_type.aggregate, args.max_completion_length, True)
        super().__init__(objective, aggregate, temperature=args.temperature)
        # The fused loss's gradients are rounded before GradScaler's factor reaches them.
        self.fuses = not args.fp16
        self.threshold = args.off_policy_mask_threshold

    @classmethod
    def of_grpo(cls, args: Any) -> GroupLoss:
        """The loss of a :class:`fastrl.trainers.groups.grpo_config.GRPOConfig`.

        Raises:
            ValueError: a ``delta``, temperatures, powers or decays out of range.
        """
        loss_type, high = ALL_LOSS_TYPES[args.loss_type], high_of(args)
        kind, level = loss_type.kind, args.importance_sampling_level
        row = policy_loss(kind)
        objective = TokenObjective.of(
            args,
            kind,
            "token" if row.of_response else level,
            # A single bound is ε_high itself, not how far it lies above 1.
            (args.epsilon, high - 1 if row.bounded_above else high),
        )
        return cls(args, loss_type, objective, args.use_bias_correction_kl)

    @classmethod
    def of_rloo(cls, args: Any) -> GroupLoss:
        """The loss of an :class:`~fastrl.trainers.groups.rloo_config.RLOOConfig`, whose KL is in
        the rewards."""
        product = PolicyLoss("clip", "product")
        return cls(args, RLOO, TokenObjective(product, (args.epsilon, high_of(args))))

    @property
    def row(self) -> LossRow:
        """What the kernels' table says of the loss."""
        return self.objective.loss.row

    def denominator(self, part: Minibatch, generated: float) -> float:
        """D of a batch.

        Args:
            generated: tokens of a batch, in the mean over those that were generated together.
        """
        if self.type.of_step:
            return max(generated, 1e-9)
        return float(self.aggregate.denominator(part.tokens.response_mask.sum(-1)))

    def in_one_pass(
        self, given: Pass, entropy_coef: float, processes: int
    ) -> PolicyObjective | None:
        """The loss of a pass as the LM head computes it with its gradient; None where it needs
        something else.

        That is a KL times a ratio other than 1, which the kernels do not have; the mask of
        responses that are off the policy, and thresholds of entropy over several processes, which
        are known behind all log-probs; a mean of entropies that weighs tokens otherwise than the
        loss; and a loss that is scaled.

        Args:
            entropy_coef: c, as it is now.
            processes: how many there are.
        """
        part, denominator, count = given.part, given.denominator, len(given.whole.old.advantages)
        on_policy, kl = part.old.logprobs is None, part.old.kl
        weights = self.aggregate.weights(part.counts)
        no_kl = on_policy and part.old.sampled is None
        masks = self.threshold is not None and not (no_kl and self.threshold >= 0)
        top = self.top_entropy < 1 and part.old.chosen is None
        bonus = entropy_coef != 0 and (self.top_entropy < 1 or weights is not None)
        if (
            not self.fuses
            or not len(part.old.advantages)
            or masks
            or bonus
            or (top and processes > 1)
        ):
            return None
        if kl is not None and self.corrects_kl:
            if not on_policy:
                return None
            kl = kl._replace(kind="k3+")  # the derivative of ρ·KL at ρ = 1 is log π - log π_ref
        coef = entropy_coef * denominator / count
        found = self.policy_objective(part, denominator, weights, kl=kl, entropy_coef=coef)
        if on_policy:  # a sequence's ratio is 1, too
            loss = found.objective._replace(ratio_level="token")
            reads = loss.reads_sequences
            found = found._replace(objective=loss, lengths=found.lengths if reads else None)
        return found

    def __call__(
        self, part: Minibatch, scores: TokenScores, chosen: Tensor | None, denominator: float
    ) -> Tensor:
        """The same from log-probs, without entropies.

        Args:
            scores: the policy's.
            chosen: [N] 1 or 0, the tokens that ℓ is of; None: all.
        """
        weights = self.aggregate.weights(part.counts)
        objective = self.policy_objective(part, denominator, weights, kl=None, chosen=chosen)
        loss, _ = loss_of_logprobs(scores.logprobs, objective)
        if part.old.kl is not None:
            kl = self.kl(part, scores.logprobs)
            kl = kl if weights is None else kl * part.at_tokens(weights)
            loss = loss + self.beta * kl.sum() / denominator
        return loss

    def kl(self, part: Minibatch, logprobs: Tensor) -> Tensor:
        """KL_t, [N]."""
        assert part.old.kl is not None
        kl = kl_value(logprobs - part.old.kl.ref_logprobs, "k3")
        return kl * part.differences(logprobs).exp() if self.corrects_kl else kl

    def gammas(self, part: Minibatch, logprobs: Tensor) -> Tensor:
        """φ(w) of "vespo" at each token of a response, [N]."""
        old, _ = self.objective.beside_sampler(part.old.logprobs, part.old.sampler_weights)
        log_ratio = logprobs - (logprobs if old is None else old)
        every, advantages = torch.ones_like(log_ratio, dtype=torch.bool), part.old.advantages
        found = log_gamma_weights(log_ratio, advantages, every, part.counts, self.objective.loss)
        return found.exp()


def note_clips(
    metrics: MetricMeans,
    ratio: Tensor,
    advantages: Tensor,
    args: Any,
    per_response: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Logs the shares of ratios that are clipped, by TRL's names.

    Args:
        ratio, advantages: of tokens, or of responses.
        per_response: means of what tokens have over each response, [B].
    """
    low = ((ratio < 1 - args.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + high_of(args)) & (advantages > 0)).float()
    parts = {"low": low, "high": high, "region": low + high}
    means = {f"clip_ratio/{name}_mean": mean_of(cut) for name, cut in parts.items()}
    metrics.add(means)
    for name, cut, most in (("low_min", low, False), ("high_max", high, True)):
        of_each = cut if per_response is None else per_response(cut)
        metrics.add_extreme(f"clip_ratio/{name}", of_each, most)
