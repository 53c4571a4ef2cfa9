"""The policy losses that ``ppo_loss`` computes, one row each, and means over sequences.

``ρ`` is π/π_old of a token, or of its sequence; ``sg`` stops the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .argument_types import check_takes


class LossRow(NamedTuple):
    """A policy loss: what the documentation lists, and what others than its kernels ask of it."""

    formula: str  # per token, without weights and aggregation
    source: str
    arguments: tuple[str, ...]  # those of `PolicyLoss`, and `cliprange` and `dual_clip`
    function: Callable[..., Tensor] | None = None  # of a loss that was registered
    weighs_logprobs: bool = False  # the ratio is a weight of log π, and has no gradient
    bounded_above: bool = False  # the ratio has one bound, the upper one
    of_response: bool = False  # the ratio is always that of a whole response

    @property
    def clips(self) -> bool:
        """Whether the loss has bounds of the ratio on both sides of 1."""
        return "cliprange" in self.arguments and not self.bounded_above


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
        weighs_logprobs=True,
        bounded_above=True,
    ),
    "sapo": LossRow(
        "-A·σ(τ·(ρ - 1))·4/τ, τ = τ₊ where A > 0, else τ₋",
        "Gao et al., 2025 (SAPO)",
        ("sapo_temperatures",),
    ),
    "vespo": LossRow(
        "-sg[φ(w)]·A·log π, φ(w) = w^k·exp(λ·(1 - w)), w = Π_t ρ_t of the response, k and λ by A's "
        "sign",
        "Shen et al., 2026 (VESPO)",
        ("vespo_powers", "vespo_decays", "lengths"),
        weighs_logprobs=True,
        of_response=True,
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
    "product": LossRow(
        "ρ = Π_t π(y_t)/π_old(y_t), that of the whole response's probability",
        "Ahmadian et al., 2024 (RLOO)",
        ("lengths",),
    ),
}


def register_policy_loss(
    name: str, formula: str = "", source: str = ""
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Decorator: adds a row to ``POLICY_LOSSES``, in plain torch.

        @register_policy_loss("leaky", "-A·ρ within the clip, 0.1 of it outside")
        def leaky(log_ratio, advantages, cliprange):
            ratio, (low, high) = log_ratio.exp(), cliprange
            near = ratio.clamp(1 - low, 1 + high)
            return -advantages * (near + 0.1 * (ratio - near))

    The function returns the loss of each token, [...], from log ρ and A, [...] fp32, 0 where
    masked, and the clip range (low, high); its derivative by log ρ is autograd's, element by
    element. A constant weight of log π, as "cispo" has it, is ``weight.detach() * log_ratio``.
    Ratio levels, aggregates, weights and the KL term go with it as with the others; torch computes
    it on every device.

    Raises:
        TypeError: it is called with the function itself; a function that takes something else.
        ValueError: the name of a row of this package. One's own is replaced.
    """
    if not isinstance(name, str):
        raise TypeError('write @register_policy_loss("name"), with the name that settings take')
    if name in POLICY_LOSSES and POLICY_LOSSES[name].function is None:
        raise ValueError(f"there is a policy loss {name!r} already: choose another name")

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        check_takes(function, "log_ratio", "advantages", "cliprange")
        POLICY_LOSSES[name] = LossRow(formula, source, ("cliprange",), function)
        return function

    return add


def registered_loss(
    kind: str, log_ratio: Tensor, advantages: Tensor, cliprange: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """A registered row's loss of each token, and its derivative by log ρ, [...] as ``log_ratio``.

    Raises:
        ValueError: the function returns something else, or what does not depend on log ρ.
    """
    function = POLICY_LOSSES[kind].function
    assert function is not None
    with torch.enable_grad():
        leaf = log_ratio.detach().requires_grad_()
        loss = function(leaf, advantages, cliprange)
        if not isinstance(loss, Tensor) or loss.shape != leaf.shape:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"the policy loss {kind!r} returned {shown} for log-ratios {tuple(leaf.shape)}: "
                "return the loss of each token"
            )
        slope: Tensor | None = None
        if loss.requires_grad:
            (slope,) = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)
        if slope is None:
            raise ValueError(
                f"the policy loss {kind!r} does not depend on log_ratio, and nothing would be "
                "learned: compute it from log_ratio, and detach no more than a weight of it"
            )
    return loss.detach(), slope


class PolicyLoss(NamedTuple):
    """A policy loss: a row of ``POLICY_LOSSES``, with ratios by a row of ``RATIO_LEVELS``."""

    kind: str = "clip"
    ratio_level: str = "token"
    delta: float | None = None  # δ, above which a ratio is cut before it is multiplied with A
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # τ where A > 0, and elsewhere
    vespo_powers: tuple[float, float] = (2.0, 3.0)  # k where A ≥ 0, and elsewhere
    vespo_decays: tuple[float, float] = (3.0, 2.0)  # λ likewise

    @property
    def row(self) -> LossRow:
        return POLICY_LOSSES[self.kind]

    @property
    def reads_sequences(self) -> bool:
        """Whether a token's objective depends on the log-probs of all tokens of its sequence."""
        return self.ratio_level != "token" or self.row.of_response

    @property
    def is_registered(self) -> bool:
        """Whether it was added by :func:`register_policy_loss`."""
        return self.kind in POLICY_LOSSES and self.row.function is not None

    @property
    def bounded_above(self) -> bool:
        """Whether its ratio has one bound, the upper one; a kind that is not known has two."""
        return self.kind in POLICY_LOSSES and self.row.bounded_above

    @property
    def joins_slopes(self) -> bool:
        """Whether the gradient goes through a ratio that all tokens of a sequence have."""
        return self.ratio_level in ("sequence", "product") and not self.row.weighs_logprobs

    def check(self, dual_clip: float | None) -> None:
        """Raises TypeError for a tensor in place of a number, and ValueError for an unknown kind or
        level, δ ≤ 1, temperatures or decays that are not positive, negative powers, and an argument
        or a level that the kind does not have."""
        for name, value, choices in (
            ("policy loss", self.kind, POLICY_LOSSES),
            ("ratio_level", self.ratio_level, RATIO_LEVELS),
        ):
            if value not in choices:
                raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
        shapes = (*self.sapo_temperatures, *self.vespo_powers, *self.vespo_decays)
        for number in (self.delta, *shapes):
            if isinstance(number, Tensor):
                raise TypeError(
                    "delta, temperatures, powers and decays must be Python numbers: a tensor would "
                    "wait"
                )
        if self.delta is not None and not self.delta > 1:
            raise ValueError(f"delta must be above 1, got {self.delta}: the usual value is 4")
        if not all(x > 0 for x in self.sapo_temperatures):
            raise ValueError(f"sapo_temperatures must be positive, got {self.sapo_temperatures}")
        if not all(0 <= x < math.inf for x in self.vespo_powers):
            raise ValueError(f"vespo_powers must be 0 or more, got {self.vespo_powers}")
        if not all(0 < x < math.inf for x in self.vespo_decays):
            raise ValueError(f"vespo_decays must be positive, got {self.vespo_decays}")
        if self.row.of_response and self.ratio_level != "token":
            raise ValueError(
                f"ratio_level={self.ratio_level!r}, but the policy loss {self.kind!r} has a ratio "
                "of whole sequences of its own: leave the level at 'token'"
            )
        known = self.row.arguments
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
    counts = sequence_sums(torch.ones_like(x), mask, lengths)
    means = sequence_sums(x, mask, lengths) / counts.clamp(min=1)
    return at_tokens(means, x, lengths)


def joined_over_sequences(
    x: Tensor, mask: Tensor, lengths: Tensor | None, ratio_level: str
) -> Tensor:
    """The mean of x over each sequence, or of ``ratio_level="product"`` its sum, at each token."""
    if ratio_level == "product":
        return at_tokens(sequence_sums(x, mask, lengths), x, lengths)
    return sequence_means(x, mask, lengths)


def sequence_sums(x: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """The sum of x over the counted tokens of each sequence, always in the same order.

    Args:
        x, mask, lengths: as for :func:`sequence_means`.

    Returns:
        [..., 1] of rows, [S] with ``lengths``.
    """
    x = torch.where(mask, x, 0.0)
    if lengths is None:
        return x.sum(-1, keepdim=True)
    return torch.segment_reduce(x.flatten(), "sum", lengths=lengths, unsafe=True, initial=0)


def at_tokens(of_sequences: Tensor, like: Tensor, lengths: Tensor | None) -> Tensor:
    """Numbers of sequences, as :func:`sequence_sums` returns them, at each of their tokens:
    [..., T] as ``like`` is."""
    if lengths is None:
        return of_sequences.expand(like.shape)
    return of_sequences.repeat_interleave(lengths, output_size=like.numel()).view(like.shape)


def of_top_entropy(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Which counted tokens are among the ``share`` of the highest entropy: those of at least the
    (1 - share)-quantile, linearly interpolated (Wang et al., "Beyond the 80/20 rule", 2025)."""
    known = entropies.float().masked_fill(~mask, torch.nan)
    return mask & (known >= torch.nanquantile(known, 1.0 - share))
