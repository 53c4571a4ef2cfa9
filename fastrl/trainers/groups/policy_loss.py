"""The losses of GRPO and RLOO by TRL's names, and what TRL logs of their ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fastrl.learn.aggregate import Aggregate
from fastrl.learn.objective import TokenLoss, TokenObjective
from fastrl.registry import POLICY_LOSS_NAMES, policy_loss
from fastrl.run.metric_means import MetricMeans, mean_of
from fastrl_kernels.policy_losses import POLICY_LOSSES, PolicyLoss

LEVELS = ("token", "sequence")


class LossType(NamedTuple):
    """A row of the table of losses.

    Attributes:
        kind: the name of ℓ_t, the loss of a token, in ``fastrl_kernels.POLICY_LOSSES``.
        aggregate: the name of what joins all ℓ_t in :class:`fastrl.learn.aggregate.Aggregate`.
        formula: the loss as the documents show it.
        of_step: whether a sum is divided by the mean tokens of the mini-batches generated together.
        sums_tokens: whether to warn that ratios of whole responses weigh responses by length.
        level: the ``importance_sampling_level`` that it is meant for; None: any.
    """

    kind: str
    aggregate: str
    formula: str
    of_step: bool = False
    sums_tokens: bool = False
    level: str | None = None


_MEAN, _SUM, _NORM = "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
GRPO_LOSSES = {
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
_KINDS = {row.kind for row in GRPO_LOSSES.values()}


class LossTypes(Mapping[str, LossType]):
    """The rows of the table by name. Other policy losses, which are registered or named as
    "file.py:function", have rows that average tokens as "dapo" does."""

    def __getitem__(self, name: str) -> LossType:
        if name in GRPO_LOSSES:
            return GRPO_LOSSES[name]
        if name not in self:
            raise KeyError(name)
        return LossType(name, "token-mean", f"as dapo, ℓ_t = {POLICY_LOSSES[name].formula}", True)

    def __iter__(self) -> Iterator[str]:
        return iter([*GRPO_LOSSES, *(x for x in POLICY_LOSSES if x not in {*GRPO_LOSSES, *_KINDS})])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        """Whether ``name`` is a loss; raises ValueError for a policy loss of yours that has the
        name of one of TRL's losses."""
        if name in GRPO_LOSSES:
            if GRPO_LOSSES[str(name)].kind != name and name in POLICY_LOSSES:
                raise ValueError(
                    f"loss_type {name!r} is TRL's {GRPO_LOSSES[str(name)].formula}, and a policy "
                    "loss of yours has that name: register yours by another"
                )
            return True
        return name in POLICY_LOSS_NAMES and name not in _KINDS


LOSSES_BY_NAME = LossTypes()
RLOO = LossType("clip", _MEAN, "mean over responses of ℓ, ρ = Π_t ρ_t")


def high_of(args: Any) -> float:
    return args.epsilon if args.epsilon_high is None else args.epsilon_high


def loss_of_grpo(args: Any) -> TokenLoss:
    """The loss of a :class:`fastrl.trainers.groups.grpo_config.GRPOConfig`.

    Raises:
        ValueError: a ``delta``, temperatures, powers or decays out of range.
    """
    loss_type, high = LOSSES_BY_NAME[args.loss_type], high_of(args)
    row = policy_loss(loss_type.kind)
    objective = TokenObjective.of(
        args,
        loss_type.kind,
        "token" if row.of_response else args.importance_sampling_level,
        # Where a loss has an upper bound alone, ε_high is that bound, not its distance from 1.
        (args.epsilon, high - 1 if row.bounded_above else high),
    )
    return _loss_of(args, loss_type, objective, corrects_kl=args.use_bias_correction_kl)


def loss_of_rloo(args: Any) -> TokenLoss:
    """The loss of an :class:`~fastrl.trainers.groups.rloo_config.RLOOConfig`, whose KL is in the
    rewards."""
    product = PolicyLoss("clip", "product")
    return _loss_of(args, RLOO, TokenObjective(product, (args.epsilon, high_of(args))))


def _loss_of(args: Any, row: LossType, objective: TokenObjective, **options: Any) -> TokenLoss:
    return TokenLoss(
        objective,
        Aggregate(row.aggregate, args.max_completion_length, True),
        temperature=args.temperature,
        per_step=row.of_step,
        off_policy=args.off_policy_mask_threshold,
        is_scaled=args.fp16,
        **options,
    )


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
        per_response: averages the tokens of each response, [B]; None: ``ratio`` is of responses.
    """
    low = ((ratio < 1 - args.epsilon) & (advantages < 0)).float()
    high = ((ratio > 1 + high_of(args)) & (advantages > 0)).float()
    parts = {"low": low, "high": high, "region": low + high}
    means = {f"clip_ratio/{name}_mean": mean_of(cut) for name, cut in parts.items()}
    metrics.add(means)
    for name, cut, most in (("low_min", low, False), ("high_max", high, True)):
        of_each = cut if per_response is None else per_response(cut)
        metrics.add_extreme(f"clip_ratio/{name}", of_each, most)
