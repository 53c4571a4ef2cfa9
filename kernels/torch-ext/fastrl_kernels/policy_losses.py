"""The policy losses that ``ppo_loss`` computes, one row each, and means over sequences.

``ρ`` is π/π_old of a token, or of its sequence; ``sg`` stops the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LossRow(NamedTuple):
    """A policy loss as the documentation lists it."""

    formula: str  # per token, without weights and aggregation
    source: str
    arguments: tuple[str, ...]  # those of `PolicyLoss`, and `cliprange` and `dual_clip`


POLICY_LOSSES = {
    "clip": LossRow(
        "max(-A·min(ρ, δ), -A·clip(ρ, 1 - low, 1 + high))",
        "Schulman et al., 2017 (PPO); δ: INTELLECT-2, 2025; other bounds: Yu et al., 2025 (DAPO)",
        ("cliprange", "delta", "dual_clip"),
    ),
    "cispo": LossRow(
        "-sg[clip(ρ, 1 - low, 1 + high)]·A·log π",
        "MiniMax-M1, 2025 (CISPO)",
        ("cliprange",),
    ),
    "sapo": LossRow(
        "-A·σ(τ·(ρ - 1))·4/τ, τ = τ₊ where A > 0, else τ₋",
        "Gao et al., 2025 (SAPO)",
        ("sapo_temperatures",),
    ),
}
RATIO_LEVELS = {
    "token": LossRow("ρ_t = π(y_t)/π_old(y_t)", "Schulman et al., 2017 (PPO)", ()),
    "sequence": LossRow(
        "ρ = exp(mean_t log π(y_t)/π_old(y_t)), the same for all tokens of a response",
        "Zheng et al., 2025 (GSPO, equation 7)",
        ("lengths",),
    ),
    "sequence-token": LossRow(
        "ρ_t = sg[ρ]·π(y_t)/sg[π(y_t)], ρ that of the sequence",
        "Zheng et al., 2025 (GSPO-token, equation 14)",
        ("lengths",),
    ),
}


class PolicyLoss(NamedTuple):
    """A policy loss: a row of ``POLICY_LOSSES``, with ratios by a row of ``RATIO_LEVELS``."""

    kind: str = "clip"
    ratio_level: str = "token"
    delta: float | None = None  # δ, above which a ratio is cut before it is multiplied with A
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # τ where A > 0, and elsewhere

    @property
    def joins_slopes(self) -> bool:
        """Whether the gradient goes through a ratio that all tokens of a sequence have."""
        return self.ratio_level == "sequence" and self.kind != "cispo"

    def check(self, dual_clip: float | None) -> None:
        """
        Raises:
            TypeError: a tensor in place of a number.
            ValueError: an unknown kind or level; δ ≤ 1 or temperatures that are not positive; an
                argument that the kind does not have.
        """
        for name, value, choices in (
            ("policy loss", self.kind, POLICY_LOSSES),
            ("ratio_level", self.ratio_level, RATIO_LEVELS),
        ):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
        for number in (self.delta, *self.sapo_temperatures):
            if isinstance(number, Tensor):
                raise TypeError(
                    "delta and temperatures must be Python numbers: a tensor would wait"
                )
        if self.delta is not None and not self.delta > 1:
            raise ValueError(f"delta must be above 1, got {self.delta}: the usual value is 4")
        if not min(self.sapo_temperatures) > 0:
            raise ValueError(f"sapo_temperatures must be positive, got {self.sapo_temperatures}")
        known = POLICY_LOSSES[self.kind].arguments
        for name, given in (("delta", self.delta), ("dual_clip", dual_clip)):
            if given is not None and name not in known:
                raise ValueError(f"{name} is for the policy loss 'clip', not {self.kind!r}")


PPO_CLIP = PolicyLoss()


def sequence_means(x: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean of x over the counted tokens of each sequence, at each of its tokens.

    Args:
        x: [..., T] fp32; sequences are its rows, or as ``lengths`` says.
        mask: [..., T] bool, True = counts.
        lengths: [S] int64, of the sequences that lie one after the other, on x's device; their sum
            is the number of elements.

    Returns:
        [..., T]; 0 where no token of the sequence counts.
    """
    x = torch.where(mask, x, 0.0)
    if lengths is None:
        means = x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        return means.expand(x.shape)
    counts = _segment_sums(mask.flatten().to(x.dtype), lengths)
    means = _segment_sums(x.flatten(), lengths) / counts.clamp(min=1)
    return means.repeat_interleave(lengths, output_size=x.numel()).view(x.shape)


def _segment_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """[S], always in the same order."""
    return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True, initial=0)


def of_top_entropy(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Which counted tokens are among the ``share`` of the highest entropy: those of at least the
    (1 - share)-quantile, linearly interpolated (Wang et al., "Beyond the 80/20 rule", 2025)."""
    known = entropies.float().masked_fill(~mask, torch.nan)
    return mask & (known >= torch.nanquantile(known, 1.0 - share))
