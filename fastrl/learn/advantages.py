"""Advantages: generalised advantage estimates, or differences from a group's baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.data.batch import to_host
from fastrl.learn.baselines import above_first, all_equal, compared, deviation, grouped


class Advantages(Protocol):
    """Advantages and returns from rewards, with a value function or a group as baseline."""

    per_token: bool  # whether it matters which tokens of a response have the rewards

    def check(self, queries: Sequence[Tensor]) -> None:
        """Raises ValueError where samples are not in the order that the estimate needs."""

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (zero where masked), advantages and returns, each [B, T-1]."""

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        """Statistics, [] each, of a batch's scores [B], which are NaN where they are missing."""


def check_estimates(
    estimates: Any, rewards: Tensor, mask: Tensor, *, finite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Checks and returns a result of ``compute_advantages``: values, advantages, returns, [B, T-1].

    Args:
        rewards, mask: the arguments of that call, [B, T-1].
        finite: check that numbers are finite, for which the host waits for the device.

    Raises:
        TypeError: no tuple or list of three.
        ValueError: no tensor, or one of another shape or with a gradient; with ``finite`` a number
            that is not finite where the mask is True and the reward is finite.
    """
    must = "compute_advantages must return (values, advantages, returns)"
    if not isinstance(estimates, tuple | list) or len(estimates) != 3:
        size = f" of {len(estimates)}" if hasattr(estimates, "__len__") else ""
        raise TypeError(f"{must}, got a {type(estimates).__name__}{size}")
    checked = (mask & rewards.isfinite()) if finite else mask
    for name, each in zip(("values", "advantages", "returns"), estimates, strict=True):
        if not isinstance(each, Tensor) or each.shape != rewards.shape:
            shown = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(
                f"{must}, each {tuple(rewards.shape)} as its arguments are; {name} are {shown}"
            )
        if each.requires_grad:
            raise ValueError(f"{must}, which are constants; {name} have a gradient: detach them")
        if finite and not (each.isfinite() | ~checked).all():
            row, column = ((~each.isfinite()) & checked).nonzero()[0].tolist()
            raise ValueError(
                f"{must} that are finite where the mask is True; {name}[{row}, {column}] is "
                f"{float(each[row, column]):g}, and the reward there is "
                f"{float(rewards[row, column]):g}"
            )
    values, advantages, returns = estimates
    return values, advantages, returns


class PerToken:
    """The base of estimates that read the rewards of single tokens."""

    per_token = True

    def check(self, queries: Sequence[Tensor]) -> None:
        """Does nothing: samples may be in any order."""

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        return {}


class GAE(PerToken):
    """Generalised advantage estimates, whitened over the batch (Schulman et al., 2016)."""

    def __init__(self, gamma: float, lam: float, whiten_rewards: bool = False):
        self.gamma, self.lam, self.whiten_rewards = gamma, lam, whiten_rewards

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        values, rewards = self._prepared(values, rewards, mask)
        advantages, returns = fastrl_kernels.gae(
            rewards, values, mask, gamma=self.gamma, lam=self.lam, whiten=True
        )
        return values, advantages, returns

    def _prepared(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Values, zero where masked, and rewards, whitened if ``whiten_rewards``; [B, T-1]."""
        if self.whiten_rewards:
            rewards = fastrl_kernels.masked_whiten(rewards, mask, shift_mean=False)
        return torch.where(mask, values, 0.0), rewards


class DecoupledGAE(GAE):
    """Generalised advantage estimates A, whitened, and returns R with different λ (Yue et al.,
    "VAPO", 2025): for A ``lam``, or 1 - 1/(α·l) for a response of l tokens, for R ``lam_value``.

    Args:
        alpha: α; None: ``lam`` gives A.
    """

    def __init__(
        self,
        gamma: float,
        lam: float,
        whiten_rewards: bool,
        lam_value: float,
        alpha: float | None,
    ):
        super().__init__(gamma, lam, whiten_rewards)
        self.lam_value, self.alpha = lam_value, alpha

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        values, rewards = self._prepared(values, rewards, mask)
        _, returns = fastrl_kernels.gae(rewards, values, mask, gamma=self.gamma, lam=self.lam_value)
        return values, self._advantages(values, rewards, mask), returns

    def _advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
        lam = self.lam if self.alpha is None else 0.0  # with λ = 0 the estimates are δ_t
        advantages, _ = fastrl_kernels.gae(
            rewards, values, mask, gamma=self.gamma, lam=lam, whiten=self.alpha is None
        )
        if self.alpha is None:
            return advantages
        lam_of_each = (1 - 1 / (self.alpha * mask.sum(-1).clamp(min=1))).clamp(min=0)
        sums = discounted_sums(advantages, mask, self.gamma * lam_of_each)
        return fastrl_kernels.masked_whiten(sums, mask)


def discounted_sums(x: Tensor, mask: Tensor, discounts: Tensor) -> Tensor:
    """Σ_{k≥0} a^k·x_(t+k) over the tokens from t on that count, [B, T], with a discount a for each
    row, in ⌈log₂ T⌉ rounds: the sums after each are over twice as many tokens as before.

    Args:
        x: [B, T], 0 where the mask [B, T] is False.
        discounts: [B], in [0, 1].
    """
    order = (~mask).long().argsort(dim=-1, stable=True)  # tokens that count first
    sums, discount, steps = x.gather(-1, order), discounts[:, None], 1
    while steps < sums.shape[-1]:
        later = torch.nn.functional.pad(sums[:, steps:], (0, steps))
        sums = sums + discount * later
        discount, steps = discount.square(), 2 * steps
    return torch.zeros_like(sums).scatter(-1, order, sums)


class BatchReturns(PerToken):
    """Sums of the rewards to come, Σ_{u≥t} γ^{u-t}·r_u, whitened over the batch's tokens; no values
    are learned (Hu et al., "REINFORCE++", 2025). The KL belongs in the rewards."""

    def __init__(self, gamma: float):
        self.gamma = gamma

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (zeros), advantages and returns, each [B, T-1]."""
        values = torch.zeros_like(rewards)
        advantages, returns = fastrl_kernels.gae(
            rewards, values, mask, gamma=self.gamma, lam=1.0, whiten=True
        )
        return values, advantages, returns


class GroupBaseline:
    """Advantages over the other responses to the same prompt; no values are learned.

    R is the sum of a response's rewards; all its tokens have the same advantage, a function of the
    group's R, not whitened; fastrl's functions give exactly 0 where all R are equal. A response of
    which no token counts is in no baseline; a group's only response that counts has advantage 0.

    Args:
        size: responses per prompt, one after the other.
        advantages_of: maps R less that of the group's first response that counts, and a mask of
            responses that count, both [groups, size], to advantages [groups, size]. Where a
            response does not count R is 0, and its advantage is not read.
    """

    per_token = False

    def __init__(self, size: int, advantages_of: Callable[[Tensor, Tensor], Tensor]):
        self.size, self.advantages_of = size, advantages_of

    def check(self, queries: Sequence[Tensor]) -> None:
        """Raises ValueError where queries of a group differ."""
        host = to_host(queries)
        for start in range(0, len(host), self.size):
            for i in range(start + 1, start + self.size):
                if not torch.equal(host[start], host[i]):
                    raise ValueError(
                        f"group {start // self.size}: queries[{i}] is not queries[{start}]; with "
                        f"group_size={self.size} the responses to a prompt lie one after the "
                        "other: repeat each query that many times in a row"
                    )

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (zeros), advantages, and returns R, each [B, T-1], zero where masked. Raises
        ValueError for a group that is not whole, and what :func:`compared` raises."""
        if len(rewards) % self.size:
            raise ValueError(
                f"{len(rewards)} samples are not whole groups of {self.size}: pass all responses "
                "to each prompt"
            )
        totals = torch.where(mask, rewards, 0.0).sum(-1)
        groups, counts = totals.view(-1, self.size), mask.any(-1).view(-1, self.size)
        advantages = compared(self.advantages_of, above_first(groups, counts), counts)
        return (
            torch.zeros_like(rewards),
            torch.where(mask, advantages.view(-1, 1), 0.0),
            torch.where(mask, totals[:, None], 0.0),
        )

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        """The share of groups of equal scores, NaN aside; the mean standard deviation in groups."""
        differences, counts = grouped(scores, self.size)
        return {
            "groups/no_spread": all_equal(differences).float().mean(),
            "groups/reward_std": deviation(differences, counts).mean(),
        }
