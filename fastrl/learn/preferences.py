"""Losses of preferences, a row each: of pairs of responses, and of single responses.

A row reads the log-probs of whole responses and returns one loss per example, whose mean is the
trainer's. r = log π - log ref of a response; p̄ and r̄ are log π and r per token; of a pair w is
the preferred response, l the other, h = r_w - r_l; ℓ(x) = -log σ(x), ε = ``label_smoothing``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.registry import Registry
from fastrl.run.processes import Processes
from fastrl_kernels.argument_types import check_takes
from fastrl_kernels.checks import check_choice


class Side(NamedTuple):
    """Log-probs of one response per example, in nats."""

    sums: Tensor  # [B] fp32, Σ log π over the response's tokens
    tokens: Tensor  # [B] int64, the response's length
    ref_sums: Any = None  # [B] fp32, Σ log ref; in losses that read a reference

    @property
    def means(self) -> Tensor:
        """p̄, [B]."""
        return self.sums / self.tokens

    @property
    def ratio(self) -> Tensor:
        """r, [B].

        Raises:
            ValueError: there is no reference.
        """
        if self.ref_sums is None:
            raise ValueError(
                "a loss that is declared to read 'p' has no reference, and reads ratio: declare "
                "that it reads 'r'"
            )
        return self.sums - self.ref_sums

    def with_ratio(self, ratio: Tensor) -> Side:
        """This side with another r, [B]: sums become r, the reference's 0."""
        return self._replace(sums=ratio, ref_sums=torch.zeros_like(ratio))

    def where(self, condition: Tensor, other: Side) -> Side:
        """Takes this side's numbers where ``condition`` [B] holds, the other's elsewhere."""
        both: Any = zip(self, other, strict=True)
        mixed: Any = (x if x is None else torch.where(condition, x, y) for x, y in both)
        return Side(*mixed)


def sides_of(count: int, *columns: Tensor) -> tuple[Side, ...]:
    """Splits columns, in which ``count`` sides stand one after the other, into the sides."""
    return tuple(Side(*each) for each in zip(*(x.chunk(count) for x in columns), strict=True))


@dataclass(frozen=True)
class PairObjective:
    """A loss of pairs, a row of :data:`PAIR_LOSSES`.

    Attributes:
        function: maps the preferred side, the other one and options to losses [B].
        reads: what the loss is computed from: "r" of both sides; "h" alone (what a prompt adds to
            both r cancels, so that the f-divergence may be another than the reverse KL); "batch",
            all sides of a batch together; "p", the policy's log-probs without a reference.
        defaults: the options' defaults, by name.
        implied: the reward that the log-probs of a side imply, for metrics; None: β·r, or β·p̄
            without a reference.
    """

    name: str
    function: Callable[..., Tensor]
    reads: str
    formula: str
    source: str
    defaults: dict[str, Any]
    implied: Callable[[Side], Tensor] | None = None

    @property
    def is_own(self) -> bool:
        """Whether a user's code declared the loss."""
        return self.name not in _OURS

    @property
    def options(self) -> dict[str, Any]:
        """All options, with their defaults."""
        divergence = {"divergence": "reverse_kl", "divergence_alpha": 0.5}
        return {**self.defaults, **(divergence if self.reads == "h" else {})}

    def __call__(self, chosen: Side, rejected: Side, **options: Any) -> Tensor:
        """The loss of each pair, [B]; where ``reads`` is "batch", no loss is one pair's."""
        kind, alpha = options.pop("divergence", "reverse_kl"), options.pop("divergence_alpha", 0.5)
        if kind != "reverse_kl":
            f = partial(fastrl_kernels.f_divergence_scores, divergence=kind, alpha=alpha)
            chosen, rejected = (x.with_ratio(f(x.ratio)) for x in (chosen, rejected))
        losses = self.function(chosen, rejected, **{**self.defaults, **options})
        if not isinstance(losses, Tensor) or losses.shape != chosen.sums.shape:
            shown = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                f"the loss {self.name!r} returned {shown} for {len(chosen.sums)} pairs: return a "
                "tensor with the loss of each"
            )
        return losses

    def reward(self, side: Side, beta: float = 1.0, **_: Any) -> Tensor:
        """The reward that the log-probs of a side imply, [B]."""
        if self.implied is not None:
            return self.implied(side)
        return beta * (side.means if self.reads == "p" else side.ratio)


_ROWS: dict[str, PairObjective] = {}
_OURS = {"sigmoid", "sft"}  # names that DPOTrainer has beside the rows


def loss_of_pairs(
    source: str = "", reads: str = "r", *, name: str | None = None, **traits: Any
) -> Callable[[Callable[..., Tensor]], PairObjective]:
    """Decorator: makes a function of two sides, and of options with defaults, a row of
    :data:`PAIR_LOSSES`. Every surface then knows it by its name, by default the function's.

    Further arguments are attributes of :class:`PairObjective`.

    Raises:
        TypeError: it is called with the function itself; a function that does not take two sides,
            or an option without a default.
        ValueError: a name of fastrl's own, an unknown ``reads``.
    """
    check_choice("reads", reads, ("h", "r", "batch", "p"))
    if not isinstance(source, str):
        raise TypeError("write @loss_of_pairs(), with the loss's source if it has one")

    def add(function: Callable[..., Tensor]) -> PairObjective:
        options = list(inspect.signature(function).parameters.values())[2:]
        if needed := [x.name for x in options if x.default is x.empty]:
            raise TypeError(f"{function.__name__}: give {', '.join(needed)} a default")
        check_takes(function, "chosen", "rejected")
        defaults, formula = {x.name: x.default for x in options}, inspect.getdoc(function) or ""
        named = name or function.__name__
        if named in _OURS:
            raise ValueError(f"there is a loss {named} already: give yours another name")
        row = PairObjective(named, function, reads, formula, source, defaults, **traits)
        _ROWS[named] = row
        return row

    return add


def _add(name: str, loss: Callable[..., Tensor]) -> None:
    """Adds what a user's file has under a name: a row, or a function that has no decorator."""
    if isinstance(loss, PairObjective):
        _ROWS[name] = loss
    else:
        loss_of_pairs(name=name)(loss)


PAIR_LOSSES = Registry(lambda: _ROWS, _add)


def _by_op(kind: str, *sides: Side, length_means: bool = False, **options: Any) -> Tensor:
    """A loss of :func:`fastrl_kernels.pair_loss`; of r̄ with ``length_means``."""
    if length_means:
        sides = tuple(side.with_ratio(side.ratio / side.tokens) for side in sides)
    sums = [side.sums for side in sides] + [side.ref_sums for side in sides]
    return fastrl_kernels.pair_loss(*sums, kind=kind, **options)


def _op(
    name: str, reads: str, formula: str, source: str, kind: str = "", **defaults: float
) -> None:
    """Makes a loss of the kernels' ``pair_loss`` a row, under its ``kind`` or another name."""
    function, options = partial(_by_op, kind or name), {"beta": 0.1, **defaults}
    _ROWS[name] = PairObjective(name, function, reads, formula, source, options)


# The documentation of fastrl_kernels.pair_loss has the papers with their equations.
_SMOOTHED = "(1-ε)·ℓ(βh) + ε·ℓ(-βh)"
_op("dpo", "h", _SMOOTHED, "Rafailov et al., 2023 (DPO)", "sigmoid", label_smoothing=0.0)
_op("cdpo", "h", _SMOOTHED, "Mitchell, 2023 (conservative DPO)", "sigmoid", label_smoothing=0.1)
_op("robust", "h", "[(1-ε)·ℓ(βh) - ε·ℓ(-βh)]/(1-2ε)", "Chowdhury et al., 2024", label_smoothing=0.1)
_op("hinge", "h", "max(0, 1 - βh)", "Liu et al., 2023 (RSO)")
_op("ipo", "h", "(h - 1/(2β))²", "Azar et al., 2023", length_means=False)
_op("sigmoid_norm", "h", "ℓ(βh)", "Lambert et al., 2024 (Tülu 3)", "sigmoid", length_means=True)
_op("exo_pair", "h", "KL of (σ(βh), σ(-βh)) to (1-ε, ε)", "Ji et al., 2024", label_smoothing=1e-3)
_op("nca_pair", "r", "ℓ(βr_w) + ½·ℓ(-βr_w) + ½·ℓ(-βr_l)", "Chen et al., 2024")
_op("bco_pair", "r", "ℓ(βr_w) + ℓ(-βr_l)", "Jung et al., 2024")
_op("sppo_hard", "r", "(r_w - 1/(2β))² + (r_l + 1/(2β))²", "Wu et al., 2024")
_AOT = "dpo of the batch's sorted log π_w - log π_l, less its sorted log ref_w - log ref_l"
_op("aot", "batch", _AOT, "Melnyk et al., 2024", label_smoothing=0.0)
_UNPAIRED_AOT = "dpo of the batch's sorted r_w, less its sorted r_l"
_op("aot_unpaired", "batch", _UNPAIRED_AOT, "Melnyk et al., 2024", label_smoothing=0.0)
_op("apo_zero", "r", "σ(-βr_w) + σ(βr_l)", "D'Oosterlinck et al., 2024")
_op("apo_down", "r", "σ(βr_w) + σ(-βh)", "D'Oosterlinck et al., 2024")
_op("discopop", "h", "m·exp(-βh) + (1-m)·ℓ(βh), m = σ(βh/τ)", "Lu et al., 2024", tau=0.05)


@loss_of_pairs("Meng et al., 2024", "p")
def simpo(chosen: Side, rejected: Side, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """ℓ(β(p̄_w - p̄_l) - γ)"""
    return fastrl_kernels.simpo_loss(chosen.means, rejected.means, beta=beta, gamma=gamma)


@loss_of_pairs("Hong et al., 2024", "p")
def orpo(chosen: Side, rejected: Side, beta: float = 0.1) -> Tensor:
    """-p̄_w + β·ℓ(log-odds of p̄_w less those of p̄_l)"""
    return fastrl_kernels.orpo_loss(chosen.means, rejected.means, beta=beta) - chosen.means


@loss_of_pairs("Zhao et al., 2023 (SLiC-HF)", "p", implied=lambda side: side.sums)
def slic(chosen: Side, rejected: Side, beta: float = 1.0, lam: float = 0.1) -> Tensor:
    """max(0, β - log π_w + log π_l) - λ·log π_w"""
    return fastrl_kernels.slic_loss(chosen.sums, rejected.sums, beta=beta, lam=lam)


_OURS.update(PAIR_LOSSES)


class UnpairedObjective(NamedTuple):
    """λ·(1 - σ(±β(r - max(0, KL)))) of single responses, + where one is desirable, see
    :func:`fastrl_kernels.kto_loss`: a row of :data:`UNPAIRED_LOSSES`."""

    source: str
    has_kl: bool  # whether a KL is estimated, by mismatched_kl; else it is 0

    def __call__(self, side: Side, desirable: Tensor, kl: Tensor, **options: float) -> Tensor:
        """The loss of each response, [B]."""
        return fastrl_kernels.kto_loss(side.sums, side.ref_sums, desirable, kl, **options)


UNPAIRED_LOSSES = {
    "kto": UnpairedObjective("Ethayarajh et al., 2024 (arXiv:2402.01306)", has_kl=True),
    "apo_zero_unpaired": UnpairedObjective(
        "D'Oosterlinck et al., 2024 (arXiv:2408.06266)", has_kl=False
    ),
}


def mismatched_kl(side: Side, processes: Processes, share: float) -> Tensor:
    """KTO's estimate of KL(π || ref): the mean r of prompts with other prompts' responses.

    Args:
        share: this process's share of all processes' examples.
    """
    return processes.sums(side.ratio.mean() * share)


def try_on_a_pair(name: str, loss: Callable[[Side, Side], Tensor]) -> None:
    """Computes a loss of a few pairs, so that its function checks its options.

    Raises:
        ValueError, TypeError: an option that it cannot have; a loss whose gradient by the log-probs
            is 0 for all of them.
    """
    numbers = torch.tensor([[-4.0, -2.0, -3.0, -1.0], [-1.0, -3.0, -2.0, -4.0]])
    with torch.enable_grad():
        chosen, rejected = (
            Side(x.clone().requires_grad_(), torch.full((4,), 3), ref)
            for x, ref in zip(numbers, numbers.flip(0) - 0.5, strict=True)
        )
        losses, leaves = loss(chosen, rejected), [chosen.sums, rejected.sums]
        slopes: Sequence[Tensor | None] = [None]
        if losses.requires_grad:
            slopes = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
    if not any(slope is not None and slope.any() for slope in slopes):
        raise ValueError(
            f"the loss {name!r} does not depend on the policy's log-probs, and nothing would be "
            "learned: compute it from sums, means or ratio of both sides, and detach none of them"
        )


def losses_by_preference(
    loss: Callable[[Side, Side], Tensor], first: Side, second: Side, preferred: Tensor
) -> tuple[Tensor, Side, Side]:
    """p·loss(first, second) + (1-p)·loss(second, first) of each pair, [B]; then the preferred sides
    of all pairs, and the other sides.

    Args:
        preferred: p in [0, 1], ½ for a tie, [B] on the host, where reading it does not wait for the
            device.
    """
    undecided = bool(((preferred > 0) & (preferred < 1)).any())
    preferred = preferred.to(first.sums.device)
    ahead = preferred >= 0.5
    chosen, rejected = first.where(ahead, second), second.where(ahead, first)
    losses = loss(chosen, rejected)
    if undecided:
        share = torch.where(ahead, preferred, 1.0 - preferred)
        both = share * losses + (1.0 - share) * loss(rejected, chosen)
        losses = torch.where(share < 1, both, losses)
    return losses, chosen, rejected


def response_sums(logprobs: Tensor, mask: Tensor, alpha: float | None = None) -> Tensor:
    """Log-probs of whole responses [2B], from those of tokens [2B, T], all chosen ones first.

    Args:
        mask: [2B, T], 1 for response tokens; log-probs of other tokens are 0.
        alpha: weight of tokens behind the length of the pair's shorter response (LD-DPO, Liu et
            al., 2024, arXiv:2409.06411); None: 1.
    """
    if alpha is None:
        return logprobs.sum(1)
    shared = mask.sum(1).view(2, -1).min(0).values.repeat(2)[:, None]
    return torch.where(mask.cumsum(1) <= shared, logprobs, alpha * logprobs).sum(1)
