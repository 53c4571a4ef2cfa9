"""The policy's objective over the tokens of responses, whichever surface asks for it.

    L = Σ_t v_t·(u_t·ℓ_t + β·KL_t - c·H_t) / D

ℓ_t is a row of :data:`fastrl_kernels.POLICY_LOSSES` of the ratio ρ_t = π/π_old, times u_t, an
importance weight (of another sampler; 1 or 0 of tokens that are chosen or not). v_t and D are the
aggregate's, see :mod:`fastrl.learn.aggregate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.models.scoring import PolicyObjective
from fastrl.registry import policy_loss, try_policy_loss

_LEAST_WEIGHT = 1e-8  # of another sampler, in a ratio; as in TRL


class TokenObjective(NamedTuple):
    """A policy loss, and the bounds of its ratio; the same for all passes."""

    loss: fastrl_kernels.PolicyLoss
    cliprange: tuple[float, float]  # how far below and above 1 a ratio may be
    top_entropy: float = 1.0  # the share of tokens that learn, those of the highest entropies

    @classmethod
    def of(
        cls, settings: Any, kind: str, level: str, cliprange: tuple[float, float]
    ) -> TokenObjective:
        """Makes the objective with the numbers that all configurations call alike.

        Args:
            kind, level: rows of ``POLICY_LOSSES`` and ``RATIO_LEVELS``.
            cliprange: of a kind whose ratio is bounded above alone, the upper one counts.

        Raises:
            ValueError: a ``delta``, temperatures, powers or decays out of range, or of another
                kind; as :func:`fastrl.registry.try_policy_loss`.
        """
        low = float("inf") if policy_loss(kind).bounded_above else cliprange[0]
        loss = fastrl_kernels.PolicyLoss(
            kind,
            level,
            settings.delta if kind == "clip" else None,
            (settings.sapo_temperature_pos, settings.sapo_temperature_neg),
            (settings.vespo_k_pos, settings.vespo_k_neg),
            (settings.vespo_lambda_pos, settings.vespo_lambda_neg),
        )
        loss.check(None)
        try_policy_loss(kind, cliprange)
        return cls(loss, (low, cliprange[1]), settings.top_entropy_quantile)

    def lengths(self, counts: Tensor) -> Tensor | None:
        """The numbers of tokens, [S], where ratios are those of whole responses."""
        return counts if self.loss.reads_sequences else None

    def beside_sampler(
        self, old: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Log-probs that ratios are taken to, and weights u of the loss, each [N].

        A ratio of whole responses ("vespo") is to the sampler, w·Π_t u_t: weights are in it.

        Args:
            old: log-probs of the policy before its update; None: of the policy that is scored.
            weights: π_old/π_sampler, where another engine has sampled.
        """
        if weights is None or not self.loss.row.of_response:
            return old, weights
        assert old is not None
        return old - weights.clamp(min=_LEAST_WEIGHT).log(), None

    def __call__(
        self,
        old: Tensor | None,
        advantages: Tensor,
        counts: Tensor,
        *,
        token_weights: Tensor | None,
        denominator: Tensor | float,
        kl: fastrl_kernels.KLTerm | None = None,
        sampler_weights: Tensor | None = None,
        chosen: Tensor | None = None,
        entropy_coef: float = 0.0,
    ) -> PolicyObjective:
        """The objective of a pass.

        Args:
            old, sampler_weights: as of :meth:`beside_sampler`.
            advantages: [N].
            counts: tokens of each response, [S] int64; their sum is N.
            token_weights: v, [N]; None: 1.
            denominator: D.
            kl: adds β·KL_t.
            chosen: [N] 1 or 0, which tokens ℓ is of; None: those of the highest entropies in this
                pass, where ``top_entropy`` is below 1.
            entropy_coef: c.
        """
        old, weights = self.beside_sampler(old, sampler_weights)
        if chosen is not None:
            weights = chosen if weights is None else chosen * weights
        return PolicyObjective(
            old,
            advantages,
            self.cliprange,
            kl,
            token_weights,
            denominator,
            self.loss,
            self.lengths(counts),
            weights,
            entropy_coef,
            self.top_entropy if chosen is None else 1.0,
        )


def loss_of_logprobs(
    logprobs: Tensor, objective: PolicyObjective
) -> tuple[Tensor, fastrl_kernels.LossStats]:
    """L from log-probs [N] with their gradient, without entropies; and its statistics."""
    old = objective.old_logprobs
    return fastrl_kernels.ppo_loss(
        logprobs,
        logprobs.detach() if old is None else old,
        objective.advantages,
        torch.ones_like(logprobs, dtype=torch.bool),
        **objective.options,
    )
