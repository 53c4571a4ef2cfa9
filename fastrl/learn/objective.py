"""The policy's objective over the tokens of responses, whichever surface asks for it.

    L = Σ_t v_t·(u_t·ℓ_t + β·KL_t - c·H_t) / D

and beside it the term of teachers, :mod:`fastrl.learn.teacher`.

ℓ_t is a row of :data:`fastrl_kernels.POLICY_LOSSES`, a function of the ratio ρ_t = π/π_old; u_t is
its weight: 1 or 0 for chosen tokens and others, times another sampler's importance weight. H_t is
the entropy; of a :class:`Pass` its term is -c·mean_t H_t. v_t, D: :mod:`fastrl.learn.aggregate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.learn.aggregate import Aggregate
from fastrl.learn.correction import on_policy
from fastrl.learn.experience import Experience, repeated_at_tokens
from fastrl.learn.teacher import Teachers
from fastrl.models.routing import Routing
from fastrl.models.scoring import (
    PolicyObjective,
    TeacherScores,
    TeacherTerm,
    TokenScores,
    policy_loss_of,
)
from fastrl.registry import policy_loss, try_policy_loss
from fastrl_kernels.kl import kl_value
from fastrl_kernels.sequence_ratios import log_gamma_weights

_LEAST_WEIGHT = 1e-8  # the least importance weight in a ratio, as in TRL


class TokenObjective(NamedTuple):
    """A policy loss, and the bounds of its ratio; the same for all passes."""

    loss: fastrl_kernels.PolicyLoss
    cliprange: tuple[float, float]  # how far below and above 1 a ratio may be
    top_entropy: float = 1.0  # the share of tokens that learn, those of the highest entropies

    @classmethod
    def of(
        cls, settings: Any, kind: str, level: str, cliprange: tuple[float, float]
    ) -> TokenObjective:
        """Makes the objective from settings that all configurations call alike.

        Args:
            kind, level: rows of ``POLICY_LOSSES`` and ``RATIO_LEVELS``.
            cliprange: low and high; low is not read for a ratio that is bounded above alone.

        Raises:
            ValueError: δ, SAPO's temperatures, or VESPO's k or λ out of range; a ``level`` that the
                kind does not have; what :func:`fastrl.registry.try_policy_loss` refuses.
        """
        row = policy_loss(kind)
        low = float("inf") if row.bounded_above else cliprange[0]
        loss = fastrl_kernels.PolicyLoss(
            kind,
            level,
            settings.delta if "delta" in row.arguments else None,
            (settings.sapo_temperature_pos, settings.sapo_temperature_neg),
            (settings.vespo_k_pos, settings.vespo_k_neg),
            (settings.vespo_lambda_pos, settings.vespo_lambda_neg),
        )
        loss.check(None)
        try_policy_loss(kind, cliprange)
        return cls(loss, (low, cliprange[1]), settings.top_entropy_quantile)


@dataclass
class Pass:
    """A part of a mini-batch that a forward and backward pass runs.

    Attributes:
        part, whole: the samples of the pass, and those of the mini-batch.
        denominator: D of the whole mini-batch.
        counts: False where it is run for other processes, which wait for it.
        scores: scores of its tokens that are learned, once the forward has run.
        loss: L without the entropies' bonus.
        aux_loss: the load-balancing loss of a mixture's experts.
        routing: the forward's routing in a mixture of experts.
    """

    part: Experience
    whole: Experience
    denominator: float
    counts: bool = True
    scores: TokenScores | None = None
    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    routing: Routing | None = None

    def __len__(self) -> int:
        return self.part.size

    @property
    def logprobs(self) -> Tensor:
        """Log-probs by the policy, [N], without gradient."""
        assert self.scores is not None
        return self.scores.logprobs.detach()

    @property
    def entropies(self) -> Tensor:
        """Entropies of the policy, [N], without gradient."""
        assert self.scores is not None
        assert self.scores.entropies is not None
        return self.scores.entropies.detach()

    @property
    def divergences(self) -> Tensor | None:
        """Divergences from teachers, [N]; None without a teacher."""
        scores = self.scores
        return None if scores is None or scores.teacher is None else scores.teacher.divergences

    @staticmethod
    def joined(passes: Sequence[Pass]) -> Pass:
        """All passes of a mini-batch as one, whose tokens are in the mini-batch's order."""
        if len(passes) == 1:
            return passes[0]
        samples = [i for each in passes for i in each.part.tokens.samples]
        lengths = torch.cat([each.part.tokens.response_mask.sum(-1) for each in passes])
        of_token = torch.tensor(samples).repeat_interleave(lengths)
        order = of_token.argsort(stable=True).to(passes[0].logprobs.device)
        logprobs, entropies = (
            torch.cat([getattr(each, name) for each in passes])[order]
            for name in ("logprobs", "entropies")
        )
        teacher = None
        # A pass without a token has no term of a teacher.
        found = [each.divergences for each in passes if len(each.logprobs)]
        of_tokens = [x for x in found if x is not None]
        if of_tokens and len(of_tokens) == len(found):
            values = torch.cat(of_tokens)[order]
            teacher = TeacherScores(values.new_zeros(()), values)
        losses = [each.loss.detach() for each in passes if each.loss is not None]
        chosen, whole = [each.part.chosen for each in passes], passes[0].whole
        known = [x for x in chosen if x is not None]
        every = torch.cat(known)[order] if len(known) == len(chosen) else None
        return Pass(
            replace(whole, chosen=every),
            whole,
            passes[0].denominator,
            scores=TokenScores(logprobs, entropies, None, None, teacher=teacher),
            loss=torch.stack(losses).sum() if losses else None,
        )


class Ratios(NamedTuple):
    """Probability ratios to the old policy, of tokens or of whole responses."""

    units: Tensor  # [N] or [B]
    advantages: Tensor  # of the units
    by_sequence: bool


class TokenLoss:
    """Computes L over the tokens of a mini-batch, or of a part of it.

    KL_t is that of the experience's KL term; with ``corrects_kl`` it is multiplied by ρ_t
    (DeepSeek-V3.2), the token's own ratio even where ℓ_t reads a sequence's: with the latter the
    gradient would not be that of a KL.

    Args:
        objective: ℓ, and the bounds of its ratio.
        aggregate: gives v and D.
        entropy_coef: c.
        temperature: T of the policy softmax(logits / T).
        per_step: whether all mini-batches of an optimizer step have one D.
        off_policy: in nats, ``most`` of :func:`on_policy`, which leaves out tokens; None: all stay.
        teachers: what the policy learns of beside ℓ, or alone; None: nobody.
        is_scaled: whether a GradScaler scales the loss before its backward pass: the LM head, which
            computes gradients in its forward, would round them unscaled.
    """

    only_teachers: ClassVar[bool] = False  # whether the policy learns of its teachers alone

    def __init__(
        self,
        objective: TokenObjective,
        aggregate: Aggregate,
        *,
        entropy_coef: float = 0.0,
        temperature: float = 1.0,
        per_step: bool = False,
        off_policy: float | None = None,
        corrects_kl: bool = False,
        is_scaled: bool = False,
        teachers: Teachers | None = None,
    ):
        self.objective, self.aggregate = objective, aggregate
        self.top_entropy, self.row = objective.top_entropy, objective.loss.row
        self.entropy_coef, self.temperature = entropy_coef, temperature
        self.per_step, self.off_policy = per_step, off_policy
        self.corrects_kl, self.is_scaled = corrects_kl, is_scaled
        self.teachers = teachers

    def policy_objective(
        self, old: Experience, counts: Tensor, denominator: Tensor | float, **other: Any
    ) -> PolicyObjective:
        """The objective of a mini-batch, or of a part of it.

        Args:
            counts: tokens of each response, [S] int64; their sum is N.
            denominator: D.
            other: columns and coefficients in the place of the experience's and the loss's:
                ``kl``, ``chosen`` ([N] 1 or 0, which tokens ℓ is of; None: those of the highest
                entropies in this pass, where ``top_entropy`` is below 1) and ``entropy_coef``.
        """
        options: Any = {"kl": old.kl, "chosen": old.chosen, "entropy_coef": self.entropy_coef}
        options |= other
        logprobs, weights = self._beside_sampler(old)
        chosen, loss, v = options["chosen"], self.objective.loss, old.weights
        if v is not None:
            v = repeated_at_tokens(v, counts, len(old.advantages))
        if chosen is not None:
            weights = chosen if weights is None else chosen * weights
        return PolicyObjective(
            logprobs,
            old.advantages,
            self.objective.cliprange,
            options["kl"],
            v,
            denominator,
            loss,
            counts if loss.reads_sequences else None,
            weights,
            options["entropy_coef"],
            self.top_entropy if chosen is None else 1.0,
        )

    def _beside_sampler(self, old: Experience) -> tuple[Tensor | None, Tensor | None]:
        """Log-probs that ratios are taken to, and weights u of ℓ, each [N].

        Where a loss always has the ratio w of whole responses, w·Π_t u_t takes its place, the ratio
        to the sampler: the log-probs then hold the weights, and None is returned for u.
        """
        weights = old.sampler_weights
        if weights is None or not self.row.of_response:
            return old.logprobs, weights
        assert old.logprobs is not None
        return old.logprobs - weights.clamp(min=_LEAST_WEIGHT).log(), None

    def denominator(self, part: Experience, generated: float) -> float:
        """D of a mini-batch of responses.

        Args:
            generated: D if ``per_step``: the mean number of learned tokens in one of the
                mini-batches that were generated together.
        """
        if self.per_step:
            return max(generated, 1e-9)
        return float(self.aggregate.denominator(part.tokens.response_mask.sum(-1)))

    def terms(self, given: Pass) -> tuple[TeacherTerm, ...]:
        """The terms of teachers in a pass's loss, for which these run."""
        if self.teachers is None:
            return ()
        return self.teachers.terms(given.part, given.part.weights, given.denominator)

    def in_one_pass(
        self, given: Pass, entropy_coef: float, processes: int
    ) -> PolicyObjective | None:
        """The objective by which the LM head computes a pass's loss, less c·mean_t H_t, and its
        gradient; None where the head cannot.

        It cannot where there is a KL times a ratio other than 1, which the kernels do not have; a
        mask of responses that are off the policy, or thresholds of entropy over several processes,
        which need all log-probs or entropies first; a mean of entropies that weighs tokens
        otherwise than the loss; a loss that is scaled; or no token.

        Args:
            entropy_coef: c, as it is now.
            processes: the number of processes.
        """
        part, denominator, count = given.part, given.denominator, len(given.whole.advantages)
        is_same, kl = part.logprobs is None, part.kl
        no_kl = is_same and part.sampled is None
        masks = self.off_policy is not None and not (no_kl and self.off_policy >= 0)
        top = self.top_entropy < 1 and part.chosen is None
        bonus = entropy_coef != 0 and (self.top_entropy < 1 or part.weights is not None)
        several = top and processes > 1
        if self.is_scaled or not len(part.advantages) or masks or bonus or several:
            return None
        if kl is not None and self.corrects_kl:
            if not is_same:
                return None
            kl = kl._replace(kind="k3+")  # the derivative of ρ·KL at ρ = 1 is log π - log π_ref
        coef = entropy_coef * denominator / count
        objective = self.policy_objective(part, part.counts, denominator, kl=kl, entropy_coef=coef)
        if is_same:  # a sequence's ratio is 1, too
            loss = objective.objective._replace(ratio_level="token")
            reads = loss.reads_sequences
            objective = objective._replace(
                objective=loss, lengths=objective.lengths if reads else None
            )
        return objective

    def of_logprobs(
        self, part: Experience, logprobs: Tensor, chosen: Tensor | None, denominator: float
    ) -> Tensor:
        """L of a part of a batch from its log-probs [N], without the entropies' bonus.

        Args:
            chosen: [N] 1 or 0, the tokens that ℓ is of; None: all.
        """
        options: Any = {"kl": None, "chosen": chosen, "entropy_coef": 0.0}
        objective = self.policy_objective(part, part.counts, denominator, **options)
        loss, _ = policy_loss_of(logprobs, None, objective)
        if part.kl is not None:
            kl, weights = self.kl(part, logprobs), objective.token_weights
            kl = kl if weights is None else kl * weights
            loss = loss + part.kl.coef * kl.sum() / denominator
        return loss

    def of_pass(
        self, given: Pass, entropy_coef: float, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The loss of a pass that has its scores, less c·mean_t H_t: as the head computed it, else
        from log-probs. Sets the pass's ``loss``.

        Args:
            choose: maps a mini-batch's entropies [N] to 1 for the highest of all processes, else 0.
        """
        loss = self._of_policy(given, entropy_coef, choose)
        assert given.scores is not None
        if given.scores.teacher is None:
            return loss
        assert given.loss is not None
        given.loss = given.loss + given.scores.teacher.loss.detach()
        return loss + given.scores.teacher.loss

    def _of_policy(
        self, given: Pass, entropy_coef: float, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What :meth:`of_pass` returns, without the terms of teachers."""
        part, scores = given.part, given.scores
        assert scores is not None
        loss, chosen = scores.loss, part.chosen
        is_fused = loss is not None
        if loss is None:
            if chosen is None and self.top_entropy < 1:
                assert scores.entropies is not None
                chosen = choose(scores.entropies)
                part = replace(part, chosen=chosen)
                given.part = given.whole = part
            kept = chosen
            if self.off_policy is not None:
                near = on_policy(part, scores.logprobs, self.off_policy)
                kept = near if kept is None else kept * near
            loss = self.of_logprobs(part, scores.logprobs, kept, given.denominator)
        given.loss = loss
        if not entropy_coef:
            return loss
        assert scores.entropies is not None
        entropies = scores.entropies if chosen is None else scores.entropies * chosen
        whole = given.whole
        count: Tensor | int = max(len(whole.advantages), 1)
        if whole.chosen is not None:
            count = whole.chosen.sum().clamp(min=1)
        bonus = entropy_coef * entropies.sum() / count
        if not is_fused:
            return loss - bonus
        given.loss = loss + bonus.detach()  # the head's loss is less the bonus
        return loss

    def kl(self, part: Experience, logprobs: Tensor) -> Tensor:
        """KL_t, [N]."""
        assert part.kl is not None
        kl = kl_value(logprobs - part.kl.ref_logprobs, part.kl.kind)
        return kl * part.differences(logprobs).exp() if self.corrects_kl else kl

    def ratios(self, part: Experience, logprobs: Tensor) -> Ratios:
        """ρ_t = π(y_t)/π_old(y_t), or (GSPO) a response's geometric mean exp(mean_t log ρ_t), or
        (RLOO) its product Π_t ρ_t."""
        log_ratio, level = part.differences(logprobs), self.objective.loss.ratio_level
        if level == "token":
            return Ratios(log_ratio.exp(), part.advantages, False)
        units = (part.sums if level == "product" else part.means)(log_ratio).exp()
        assert part.of_responses is not None
        return Ratios(units, part.of_responses, True)

    def gammas(self, part: Experience, logprobs: Tensor) -> Tensor:
        """φ(w), VESPO's weight of a response with the ratio w, at each of its tokens, [N]."""
        old, _ = self._beside_sampler(part)
        log_ratio = logprobs - (logprobs if old is None else old)
        every, advantages = torch.ones_like(log_ratio, dtype=torch.bool), part.advantages
        loss = self.objective.loss
        return log_gamma_weights(log_ratio, advantages, every, part.counts, loss).exp()


class TeacherLoss(TokenLoss):
    """The terms of teachers alone, over the tokens of a mini-batch, or of a part of it."""

    only_teachers: ClassVar[bool] = True

    def __init__(self, aggregate: Aggregate, *, temperature: float, per_step: bool):
        nothing = TokenObjective(fastrl_kernels.PolicyLoss("clip"), (0.0, 0.0))
        super().__init__(nothing, aggregate, temperature=temperature, per_step=per_step)

    def in_one_pass(self, given: Pass, entropy_coef: float, processes: int) -> None:
        return None

    def _of_policy(
        self, given: Pass, entropy_coef: float, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        given.loss = given.logprobs.new_zeros(())
        return given.loss
