"""What makes a token better than expected: estimated by a value function, or from a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.config import PPOConfig
from fastrl.trainers.data import to_host

EPS = 1e-4  # beside a group's standard deviation


class GAE:
    """Generalised advantage estimates, whitened over the batch (Schulman et al., 2016)."""

    def __init__(self, config: PPOConfig):
        self.gamma, self.lam = config.gamma, config.lam
        self.whiten_rewards = config.whiten_rewards

    def check(self, queries: Sequence[Tensor]) -> None:
        """
        Raises:
            ValueError: samples that do not lie as the estimate needs them.
        """

    def __call__(
        self, values: Tensor, rewards: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Values (zero where masked), advantages and returns, each [B, T-1]."""
        values = torch.where(mask, values, 0.0)
        if self.whiten_rewards:
            rewards = fastrl_kernels.masked_whiten(rewards, mask, shift_mean=False)
        advantages, returns = fastrl_kernels.gae(
            rewards, values, mask, gamma=self.gamma, lam=self.lam, whiten=True
        )
        return values, advantages, returns

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        """What there is to say of a batch's scores [B], 0-d tensors."""
        return {}


class GroupBaseline(GAE):
    """The other responses to the same prompt are the baseline; no values are learnt.

    R is the sum of a response's rewards, and all its tokens have the same advantage, a function of
    the group's R. It is not whitened; where all R of a group are equal it is exactly 0.

    Args:
        size: responses per prompt, which lie one after the other.
        advantages_of: R less that of the group's first response, [groups, size] -> the same shape.
    """

    def __init__(self, size: int, advantages_of: Callable[[Tensor], Tensor]):
        self.size, self.advantages_of = size, advantages_of

    def check(self, queries: Sequence[Tensor]) -> None:
        """
        Raises:
            ValueError: queries of a group differ.
        """
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
        """Zeros for values, advantages, and R for returns, each [B, T-1], zero where masked."""
        if len(rewards) % self.size:
            raise ValueError(
                f"{len(rewards)} samples are not whole groups of {self.size}: pass all responses "
                "to each prompt"
            )
        totals = torch.where(mask, rewards, 0.0).sum(-1)
        groups = totals.view(-1, self.size)
        advantages = self.advantages_of(groups - groups[:, :1]).view(-1, 1)
        return (
            torch.zeros_like(rewards),
            torch.where(mask, advantages, 0.0),
            torch.where(mask, totals[:, None], 0.0),
        )

    def statistics(self, scores: Tensor) -> dict[str, Tensor]:
        """Share of groups whose scores are all equal, and the mean deviation within groups."""
        groups = scores.view(-1, self.size)
        return {
            "groups/no_spread": (groups.amax(-1) == groups.amin(-1)).float().mean(),
            "groups/reward_std": groups.std(-1).mean(),
        }


def centred(rewards: Tensor) -> Tensor:
    """R - mean R (Liu et al., "Understanding R1-Zero-like training", 2025: Dr. GRPO)."""
    return rewards - rewards.mean(-1, keepdim=True)


def standardised(rewards: Tensor) -> Tensor:
    """(R - mean R) / (std R + EPS), std unbiased (Shao et al., "DeepSeekMath", 2024: GRPO)."""
    return centred(rewards) / (rewards.std(-1, keepdim=True) + EPS)


def left_out(rewards: Tensor) -> Tensor:
    """R less the mean of the others' (Ahmadian et al., "Back to basics", 2024: RLOO)."""
    n = rewards.shape[-1]
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / (n - 1)


_GROUP_BASELINES = {"grpo": standardised, "dr_grpo": centred, "rloo": left_out}


def make_advantages(config: PPOConfig) -> GAE:
    """By ``PPOConfig.advantage``."""
    if config.advantage == "gae":
        return GAE(config)
    return GroupBaseline(config.group_size, _GROUP_BASELINES[config.advantage])
