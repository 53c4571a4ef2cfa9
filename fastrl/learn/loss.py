"""The loss of a mini-batch: the policy's objective, the value loss, and statistics of both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.core import entropy_from_logits
from fastrl.data.token_batch import ModelPass
from fastrl.learn.aggregate import Aggregate
from fastrl.learn.correction import on_policy
from fastrl.learn.experience import Experience
from fastrl.learn.objective import TokenLoss, TokenObjective
from fastrl.learn.scorer import scoring_request
from fastrl.models.host_memory import to_device
from fastrl.models.routing import Routing
from fastrl.models.scoring import (
    PolicyObjective,
    ScoringRequest,
    TeacherScores,
    TokenScores,
    policy_loss_of,
)


class MinibatchLoss(NamedTuple):
    """The loss of a mini-batch under the policy as it is now."""

    loss: Tensor  # []
    stats: dict[str, Tensor]  # [] each, by their classic names
    mean_ratio: Tensor  # [], 0 for a critic
    ratios: Tensor  # [N], of the response tokens; [0] for a critic
    advantages: Tensor  # [N]

    @property
    def policy_kl(self) -> Tensor:
        """Mean of old - new log-prob, []; 0 for a critic."""
        return self.stats.get("ppo/policy/policykl", torch.zeros_like(self.mean_ratio))

    @staticmethod
    def joined(parts: Sequence[MinibatchLoss], old: Experience) -> MinibatchLoss:
        """The loss of a mini-batch that was computed in parts, all with its denominator.

        Args:
            old: the whole mini-batch's experience.
        """
        if len(parts) == 1:
            return parts[0]
        loss = parts[0].loss
        counts = torch.tensor([len(part.advantages) for part in parts], dtype=loss.dtype)
        tokens = to_device(counts, loss.device)

        def mean(of_parts: Sequence[Tensor]) -> Tensor:
            return (tokens * torch.stack(list(of_parts))).sum() / tokens.sum()

        stats = {}
        for name in parts[0].stats:
            of_parts = [part.stats[name] for part in parts]
            stats[name] = torch.stack(of_parts).sum() if name in _SUMS else mean(of_parts)
        return MinibatchLoss(
            torch.stack([part.loss.detach() for part in parts]).sum(),
            stats | _variances(stats, old),
            mean([part.mean_ratio for part in parts]),
            torch.cat([part.ratios for part in parts]),
            torch.cat([part.advantages for part in parts]),
        )

    def share(self, old: Experience, whole: Experience, counts: float) -> MinibatchLoss:
        """What a part of a mini-batch, with the mini-batch's denominator, contributes to its loss
        and statistics, which are the sums over the parts.

        Args:
            old, whole: experience of the part, and of the mini-batch.
            counts: 1; 0 for a part that runs only because other processes wait for it.
        """
        part = counts * len(old.logprobs) / len(whole.logprobs)
        stats = {k: x * (counts if k in _SUMS else part) for k, x in self.stats.items()}
        # The parts' shares of the tokens add up to 1.
        stats |= {name: x * part for name, x in _variances(stats, whole).items()}
        ratios = self.ratios if counts else self.ratios[:0]
        loss = self.loss.detach() * counts
        return MinibatchLoss(loss, stats, self.mean_ratio * part, ratios, whole.advantages)


# Statistics that add up over the parts of a mini-batch: sums over one denominator, and counts.
_SUMS = (
    "ppo/loss/policy",
    "ppo/loss/value",
    "ppo/loss/kl",
    "ppo/loss/teacher",
    "ppo/loss/total",
    "ppo/policy/clamped_ratios",
)
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
_TEACHER_STATS = ("ppo/loss/teacher", "ppo/policy/divergence")


class ClippedValues(NamedTuple):
    """vf_coef·Σ_t w_t·½·max((v-R)², (clip(v, v_old ± c) - R)²) / denominator (as OpenAI's baselines
    clip it)."""

    cliprange: float  # c
    coef: float  # vf_coef

    def __call__(
        self,
        values: Tensor | None,
        objective: PolicyObjective,
        old_values: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The term; and statistics, whose "ppo/loss/value" is the term without ``coef``.

        Args:
            values, old_values, returns: [N].
            objective: has w and the denominator, a tensor; a denominator of 0 makes the term 0.
        """
        weights, denominator = objective.token_weights, objective.denominator
        assert isinstance(values, Tensor)
        assert isinstance(denominator, Tensor)
        low, high = old_values - self.cliprange, old_values + self.cliprange
        # No torch.clamp, whose gradient at a bound depends on torch's version: here it is 1.
        near = torch.where(values < low, low, torch.where(values > high, high, values))
        error, near_error = (values - returns).square(), (near - returns).square()
        clips = near_error > error
        losses = 0.5 * torch.where(clips, near_error, error)
        total = (losses if weights is None else weights * losses).sum()
        loss = total * torch.where(denominator == 0, 0.0, 1.0 / denominator)
        values_mean, values_var = _moments(old_values)
        return self.coef * loss, {
            "ppo/loss/value": loss.detach(),
            "ppo/val/vpred": values.detach().mean(),
            "ppo/val/error": error.detach().mean(),
            "ppo/val/clipfrac": clips.float().mean(),
            "ppo/val/mean": values_mean,
            "ppo/val/var": values_var,
        }


class RouterTerm(NamedTuple):
    """coef times the load-balancing loss of a mixture's routers, and their statistics."""

    coef: float
    replays: bool  # whether experts that rollouts chose are chosen again

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the statistics."""
        names = ("load", "aux_loss", *(("changed_choices",) if self.replays else ()))
        return tuple(f"ppo/router/{name}" for name in names)

    def added(
        self, own: MinibatchLoss, routing: Routing, share: float, policy_coef: float
    ) -> MinibatchLoss:
        """A part's loss with its share of the mini-batch's term."""
        stats = {f"ppo/router/{name}": x for name, x in routing.statistics().items()}
        added = own._replace(stats={**own.stats, **stats})
        if not self.coef:
            return added
        term = self.coef * policy_coef * share * routing.aux_loss()
        added.stats["ppo/loss/total"] = own.stats["ppo/loss/total"] + term.detach()
        return added._replace(loss=own.loss + term)


class UpdateLoss(TokenLoss):
    """The loss of a mini-batch, and its statistics: the tokens' loss, which the LM head's kernel
    computes, and the value term.

    Args:
        values: the value term; None: the policy learns no values.
        has_kl: whether experience has a KL term.
        router: the term of a mixture's routers; None for dense models.
        options: further arguments of :class:`TokenLoss`.

    Attributes:
        names: the classic names of its statistics.
    """

    def __init__(
        self,
        objective: TokenObjective,
        aggregate: Aggregate,
        values: ClippedValues | None = None,
        *,
        has_kl: bool = False,
        router: RouterTerm | None = None,
        **options: Any,
    ):
        super().__init__(objective, aggregate, **options)
        self.values, self.router = values, router
        self.names = (
            *_POLICY_STATS,
            *_OTHER_STATS,
            *(() if values is None else _VALUE_STATS),
            *(("ppo/loss/kl",) if has_kl else ()),
            *(() if self.teachers is None else _TEACHER_STATS),
            *(() if router is None else router.names),
        )

    def denominators(self, minibatches: Sequence[Experience]) -> list[Tensor]:
        """Denominators of the losses of an optimizer step's mini-batches, whose mean is the step's
        loss.

        Each counts its own mini-batch's tokens (or samples), as in TRL: tokens of a short one weigh
        more. With ``per_step`` each is D / n, where D counts those of all n mini-batches: the mean
        of n·S_j / D, S_j a mini-batch's sum of losses, is Σ_j S_j / D, which does not depend on n.
        """
        lengths = [minibatch.counts for minibatch in minibatches]
        weights = [minibatch.of_samples for minibatch in minibatches]
        if self.per_step and len(minibatches) > 1:
            joined = None if weights[0] is None else torch.cat(weights)  # type: ignore[arg-type]
            whole = self.aggregate.denominator(torch.cat(lengths), joined)
            return [whole / len(minibatches)] * len(minibatches)
        return list(map(self.aggregate.denominator, lengths, weights))

    def chooses_by_scores(self, alone: bool) -> bool:
        """Whether a forward pass before the loss's own has to say which tokens are learned.

        Args:
            alone: whether one pass sees the whole mini-batch, and so its highest entropies.
        """
        return self.off_policy is not None or (self.top_entropy < 1 and not alone)

    def with_chosen(
        self, parts: Sequence[Experience], scores: Sequence[TokenScores], every: Tensor
    ) -> list[Experience]:
        """Parts of a mini-batch that know which of their tokens are learned: those of the highest
        entropies, but for tokens that :func:`on_policy` leaves out.

        Args:
            scores: of each part's tokens.
            every: entropies of all tokens of the mini-batch, [N].
        """
        least = torch.nanquantile(every.float(), 1.0 - self.top_entropy)
        marked = []
        for part, scored in zip(parts, scores, strict=True):
            assert scored.entropies is not None
            chosen = (scored.entropies >= least).to(scored.entropies.dtype)
            if self.off_policy is not None:
                chosen = chosen * on_policy(part, scored.logprobs, self.off_policy)
            marked.append(replace(part, chosen=chosen))
        return marked

    def request(
        self, minibatch: Experience, model_pass: ModelPass, denominator: Tensor
    ) -> ScoringRequest:
        """Makes the request for the policy's part of the loss, log-probs and values. Teachers run
        for it."""
        request = self.without_teachers(minibatch, model_pass, denominator)
        if self.teachers is None:
            return request
        terms = self.teachers.terms(minibatch, minibatch.weights, denominator)
        return request._replace(teachers=terms)

    def without_teachers(
        self, minibatch: Experience, model_pass: ModelPass, denominator: Tensor
    ) -> ScoringRequest:
        """The :meth:`request` without the terms of teachers."""
        return scoring_request(
            minibatch.tokens,
            model_pass,
            temperature=self.temperature,
            entropy=True,
            values=self.values is not None,
            objective=self.policy_objective(minibatch, minibatch.counts, denominator),
        )

    def __call__(
        self,
        old: Experience,
        request: ScoringRequest,
        new: TokenScores,
        policy_coef: float = 1.0,
    ) -> MinibatchLoss:
        """The loss of a mini-batch.

        Args:
            old: the mini-batch's experience.
            request: from :meth:`request`, for this mini-batch.
            new: the model's scores of that request.
            policy_coef: the factor of the policy's part.
        """
        objective = request.objective
        assert isinstance(objective, PolicyObjective)
        assert new.loss is not None
        assert new.stats is not None
        value_loss, stats = self.value_loss(new, objective, old.values, old.returns)
        policy_loss = new.loss
        if self.teachers is not None:
            none = torch.zeros_like(new.loss)  # where no token has a teacher
            teacher = new.teacher or TeacherScores(none, none[None])
            policy_loss = policy_loss + teacher.loss
            term = teacher.loss.detach() / self.teachers.settings.coef
            of_teachers = term, teacher.divergences.mean()
            stats |= dict(zip(_TEACHER_STATS, of_teachers, strict=True))
        policy_loss = policy_loss if policy_coef == 1 else policy_coef * policy_loss
        loss = policy_loss + value_loss
        stats["ppo/loss/total"] = loss.detach()
        ratios = (new.logprobs - old.logprobs).exp()
        return MinibatchLoss(loss, stats, new.stats.mean_ratio, ratios, old.advantages)

    def value_loss(
        self, new: TokenScores, objective: PolicyObjective, old_values: Tensor, returns: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The value term, 0 without a value function; and all statistics but the whole loss.

        Args:
            new: scores with the policy's loss and its statistics.
            objective: the objective of that loss; its denominator is a tensor; at 0 the term is 0.
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
        if self.values is None:
            return torch.zeros_like(returns_mean), stats
        loss, value_stats = self.values(new.values, objective, old_values, returns)
        return loss, stats | value_stats

    def of_scored(
        self, old: Experience, mask: Tensor, logprobs: Tensor, vpreds: Tensor, logits: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The policy's part of the loss, the value term and statistics of tokens that are scored
        already; without a KL term, an entropy bonus or a choice of tokens by entropies.

        Args:
            old: has columns of the other arguments' shape, [B, T-1], or [T-1] of a single sample.
            logits: have one more dimension, the vocabulary, for the entropy; None: that is 0.
        """
        mask = torch.atleast_2d(mask.bool())
        lengths = mask.sum(-1)

        def flat(x: Tensor) -> Tensor:
            return torch.atleast_2d(x).expand_as(mask)[mask]

        new, entropies = flat(logprobs), torch.zeros_like(flat(logprobs))
        weights, denominator = self.aggregate.weights(lengths), self.aggregate.denominator(lengths)
        of_policy = Experience(
            logprobs=flat(old.logprobs), advantages=flat(old.advantages), weights=weights
        )
        objective = self.policy_objective(of_policy, lengths, denominator, entropy_coef=0.0)
        objective = objective._replace(top_entropy=1.0)
        loss, stats = policy_loss_of(new, None, objective)
        if logits is not None:
            entropies = flat(entropy_from_logits(logits, self.temperature)).detach()
        scores = TokenScores(new, entropies, flat(vpreds), None, loss, stats)
        value_loss, named = self.value_loss(scores, objective, flat(old.values), flat(old.returns))
        named["ppo/loss/total"] = (loss + value_loss).detach()
        return loss, value_loss, named


class ValueLoss:
    """The loss of a critic that is a model of its own, and its statistics.

    Args:
        policy: the policy's loss, whose denominators this loss has, too.
        values: the value term.
    """

    names = (*_VALUE_STATS, "ppo/returns/mean", "ppo/returns/var")
    router = None

    def __init__(self, policy: UpdateLoss, values: ClippedValues):
        self.policy, self.values = policy, values
        self.denominators = policy.denominators

    def chooses_by_scores(self, alone: bool) -> bool:
        """Returns False: values are learned at all tokens."""
        return False

    def request(
        self, minibatch: Experience, model_pass: ModelPass, denominator: Tensor
    ) -> ScoringRequest:
        """Makes the request for values; only weights and denominator of its objective are read."""
        request = self.policy.without_teachers(minibatch, model_pass, denominator)
        return request._replace(values=True)

    def __call__(
        self,
        old: Experience,
        request: ScoringRequest,
        new: TokenScores,
        policy_coef: float = 1.0,
    ) -> MinibatchLoss:
        """The loss of a mini-batch, without ratios. Arguments are those of :class:`UpdateLoss`, of
        which ``policy_coef`` is not read."""
        objective = request.objective
        assert isinstance(objective, PolicyObjective)
        loss, stats = self.values(new.values, objective, old.values, old.returns)
        stats["ppo/returns/mean"], stats["ppo/returns/var"] = _moments(old.returns)
        none = torch.zeros_like(stats["ppo/loss/value"])
        return MinibatchLoss(loss, stats, none, old.returns[:0], old.advantages)


def _variances(stats: Collection[str], old: Experience) -> dict[str, Tensor]:
    """The variances of a whole mini-batch that are among the statistics, by name."""
    columns = {"ppo/returns/var": old.returns, "ppo/val/var": old.values}
    return {name: _moments(x)[1] for name, x in columns.items() if name in stats}


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance of [N]; that of one number is 0."""
    variance, mean = torch.var_mean(x, correction=0)
    return mean, variance * (len(x) / max(len(x) - 1, 1))
