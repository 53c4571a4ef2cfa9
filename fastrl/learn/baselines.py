"""Baselines of a group: a reward is compared with those of the other responses to its prompt.

Functions of advantages take rewards [groups, size], less that of the group's first response that
counts, so that equal ones are exactly 0, and a mask ``counts`` of the responses that count: by
:func:`grouped` those whose reward is not NaN, in PPO those with a token that counts. The others
have 0 for their reward, and their result is not read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastrl.registry import group_advantage

EPS = 1e-4  # added to a group's standard deviation


def grouped(rewards: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Rewards [B], less the first of their group that is not NaN, 0 where they are NaN; and the
    mask of those that are not NaN: [groups, size] each."""
    groups = rewards.view(-1, size)
    counts = ~groups.isnan()
    return above_first(groups, counts), counts


def all_equal(differences: Tensor) -> Tensor:
    """Which groups have equal rewards, [groups], from rewards less the group's first."""
    return (differences == 0).all(-1)


def above_first(rewards: Tensor, counts: Tensor) -> Tensor:
    """Rewards less that of their group's first response that counts; 0 for those not counted."""
    first = rewards.gather(-1, counts.int().argmax(-1, keepdim=True))
    return torch.where(counts, rewards - first, 0.0)


def compared(
    function: Callable[[Tensor, Tensor], Tensor], groups: Tensor, counts: Tensor
) -> Tensor:
    """A function's advantages [groups, size]; 0 where a response does not count, or is the only one
    that counts.

    Args:
        groups, counts: rewards as :func:`above_first` returns them, and which count.

    Raises:
        ValueError: a user's function returns no tensor, one of another shape, one with a gradient,
            or one not finite where it is not replaced by 0 and the group's rewards are finite.
    """
    advantages = function(groups, counts)
    name = f"the advantage {getattr(function, '__name__', type(function).__name__)}"
    if not isinstance(advantages, Tensor) or advantages.shape != groups.shape:
        is_tensor = isinstance(advantages, Tensor)
        shown = tuple(advantages.shape) if is_tensor else type(advantages).__name__
        raise ValueError(
            f"{name} returned {shown} for rewards {tuple(groups.shape)}: return an advantage for "
            "each, as a tensor"
        )
    if advantages.requires_grad:
        raise ValueError(
            f"{name} returned advantages with a gradient: they are constants, detach them"
        )
    compares = counts & (counts.sum(-1, keepdim=True) > 1)
    if function not in _OURS:  # this check waits for the device
        wrong = compares & groups.isfinite().all(-1, keepdim=True) & ~advantages.isfinite()
        if wrong.any():
            group, i = wrong.nonzero()[0].tolist()
            rewards = ", ".join(f"{x:g}" for x in groups[group].tolist())
            raise ValueError(
                f"{name} returned {float(advantages[group, i]):g} for response {i} of group "
                f"{group}, whose rewards less the first one's are {rewards}: let it return a "
                "number, 0 where nothing is to be learned"
            )
    return torch.where(compares, advantages.float(), 0.0)


def centred(rewards: Tensor, counts: Tensor) -> Tensor:
    """R - mean R (Liu et al., "Understanding R1-Zero-like training", 2025: Dr. GRPO)."""
    return rewards - rewards.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)


def standardised(rewards: Tensor, counts: Tensor) -> Tensor:
    """(R - mean R) / (std R + EPS), std unbiased (Shao et al., "DeepSeekMath", 2024: GRPO)."""
    return centred(rewards, counts) / (deviation(rewards, counts) + EPS)


def leave_one_out(rewards: Tensor, counts: Tensor) -> Tensor:
    """R less the mean R of the other responses (Ahmadian et al., "Back to basics", 2024: RLOO)."""
    others = (counts.sum(-1, keepdim=True) - 1).clamp(min=1)
    return rewards - (rewards.sum(-1, keepdim=True) - rewards) / others


def deviation(x: Tensor, counts: Tensor) -> Tensor:
    """Standard deviation, by n - 1, [..., 1] of the last dimension's n elements that count; 0 for
    n < 2. The other elements of x must be 0."""
    squares = torch.where(counts, centred(x, counts), 0.0).square().sum(-1, keepdim=True)
    return (squares / (counts.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()


_OURS = (standardised, centred, leave_one_out)
for _name, _function in zip(("grpo", "dr_grpo", "rloo"), _OURS, strict=True):
    group_advantage(_name)(_function)
