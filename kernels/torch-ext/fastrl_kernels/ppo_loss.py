"""The clipped PPO objective with its value and KL terms, and the statistics that go with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_choice, check_constant, check_float, check_like, check_mask
from .dispatch import Backend, choose
from .kl import kl_slope, kl_value, masked_difference
from .types import (
    AGGREGATES,
    KL_KINDS,
    LOG_RATIO_LIMIT,
    KLTerm,
    LossStats,
    PPOConstants,
    PPOSettings,
    ValueTerm,
)

_LOSSES = ("loss", "policy_loss", "value_loss", "kl_loss")


def denominator_of(constants: PPOConstants, settings: PPOSettings) -> Tensor:
    mask = constants.mask
    if constants.denominator is not None:
        return constants.denominator.to(torch.float32)
    if settings.denominator is not None:
        return torch.full((), settings.denominator, device=mask.device)
    if settings.aggregate == "token-mean":
        return mask.sum().clamp(min=1).to(torch.float32)
    return mask.any(-1).sum().clamp(min=1).to(torch.float32)


def inverse_of(denominator: Tensor) -> Tensor:
    """0 where the denominator is: it comes from ranks that all count nothing, whose loss is 0."""
    return torch.where(denominator == 0, 0.0, 1.0 / denominator)


def token_weights_of(constants: PPOConstants, settings: PPOSettings) -> Tensor | None:
    """What each token weighs, [..., T] or [..., 1], beside the denominator; None where all weigh
    1."""
    mask, given = constants.mask, constants.token_weights
    weights = None if given is None else torch.where(mask, given.float(), 0.0)
    if settings.aggregate != "seq-mean-token-mean":
        return weights
    by_rows = mask.sum(-1, keepdim=True).clamp(min=1).to(torch.float32).reciprocal()
    return by_rows if weights is None else by_rows * weights


def policy_slopes(
    logprobs: Tensor, constants: PPOConstants, settings: PPOSettings, backend: str
) -> Tensor:
    """d/d log π of each token's clipped objective and KL term, 0 where masked; fp32, no weights of
    tokens or rows and no denominator in it."""
    if backend == "triton":
        from ._triton.ppo_loss import policy_slopes as triton_slopes

        return triton_slopes(logprobs, constants, settings)
    mask = constants.mask
    log_ratio = masked_difference(logprobs, constants.old_logprobs, mask)
    slope = _surrogate(log_ratio, constants, settings)[1]
    if constants.ref_logprobs is not None:
        d = masked_difference(logprobs, constants.ref_logprobs, mask)
        slope = slope + settings.kl_coef * kl_slope(d, settings.kl_kind)
    return torch.where(mask, slope, 0.0)


def _surrogate(
    log_ratio: Tensor, constants: PPOConstants, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The clipped objective per token, its derivative by log π, the ratio, and where it clips.

    Inside the clip range both branches are the same and the derivative is that of the ratio, all
    of it. Exactly at a bound (probability 0) it is the unclipped branch's as well.
    """
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantages = torch.where(constants.mask, constants.advantages.float(), 0.0)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(settings.low, settings.high)
    is_clipped = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    slope = torch.where(is_clipped, 0.0, unclipped)
    if settings.dual_clip is not None:
        bound = -advantages * settings.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, slope = torch.where(beyond, bound, loss), torch.where(beyond, 0.0, slope)
    if constants.weights is not None:
        weights = torch.where(constants.mask, constants.weights.float(), 0.0)
        loss, slope = loss * weights, slope * weights
    return loss, slope, ratio, is_clipped


def _value_error(
    values: Tensor, constants: PPOConstants, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """½·the larger squared error, its derivative, where it clips, (V - R)², and V where counted."""
    assert constants.old_values is not None
    assert constants.returns is not None
    mask = constants.mask
    v = torch.where(mask, values.float(), 0.0)
    old = torch.where(mask, constants.old_values.float(), 0.0)
    returns = torch.where(mask, constants.returns.float(), 0.0)
    near = torch.clamp(v, old - settings.value_cliprange, old + settings.value_cliprange)
    error, near_error = (v - returns).square(), (near - returns).square()
    is_clipped = near_error > error
    slope = torch.where(is_clipped, 0.0, v - returns)
    return 0.5 * torch.where(is_clipped, near_error, error), slope, is_clipped, error, v


def _torch_forward(
    logprobs: Tensor,
    values: Tensor | None,
    constants: PPOConstants,
    settings: PPOSettings,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The loss, LossStats' tensor, and its gradients by log-probs and values where wanted."""
    mask = constants.mask
    token_weights = token_weights_of(constants, settings)

    def total(x: Tensor) -> Tensor:
        return (x if token_weights is None else x * token_weights).sum()

    log_ratio = masked_difference(logprobs, constants.old_logprobs, mask)
    loss, slope, ratio, is_clipped = _surrogate(log_ratio, constants, settings)
    stats = {
        "policy_loss": total(loss),
        "clipfrac": is_clipped.sum(),
        "clipfrac_low": (is_clipped & (ratio < 1)).sum(),
        "clipfrac_high": (is_clipped & (ratio > 1)).sum(),
        "approx_kl": 0.5 * log_ratio.square().sum(),
        "policy_kl": -log_ratio.sum(),
        "mean_ratio": torch.where(mask, ratio, 0.0).sum(),
        "clamped_ratios": (log_ratio.abs() > LOG_RATIO_LIMIT).sum(),
        "tokens": mask.sum(),
    }
    objective = stats["policy_loss"]
    value_slope = None
    if values is not None:
        value_loss, value_slope, clips, error, v = _value_error(values, constants, settings)
        stats["value_loss"] = total(value_loss)
        stats["value_clipfrac"] = clips.sum()
        stats["value_error"] = error.sum()
        stats["value_mean"] = v.sum()
        objective = objective + settings.value_coef * stats["value_loss"]
        value_slope = settings.value_coef * value_slope
    if constants.ref_logprobs is not None:
        d = masked_difference(logprobs, constants.ref_logprobs, mask)
        stats["kl_loss"] = total(kl_value(d, settings.kl_kind))
        objective = objective + settings.kl_coef * stats["kl_loss"]
        slope = slope + settings.kl_coef * kl_slope(d, settings.kl_kind)

    stats["loss"] = objective
    denominator = denominator_of(constants, settings)
    numbers, inverse = _normalised(stats, denominator), inverse_of(denominator)

    if token_weights is not None:
        slope = slope * token_weights
        value_slope = None if value_slope is None else value_slope * token_weights
    gradients = (
        torch.where(mask, slope * inverse, 0.0) if wanted[0] else None,
        value_slope * inverse if wanted[1] and value_slope is not None else None,
    )
    return numbers[LossStats.NAMES.index("loss")].clone(), numbers, gradients


def _torch_backward(
    grad: Tensor, saved: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype | None, ...]
) -> tuple[Tensor | None, ...]:
    pairs = zip(saved, dtypes, strict=True)
    return tuple(None if x is None else (x * grad).to(dtype) for x, dtype in pairs)


def _normalised(sums: dict[str, Tensor], denominator: Tensor) -> Tensor:
    """LossStats' tensor: losses over the denominator, means over tokens, counts as they are."""
    zero, one = torch.zeros_like(denominator), torch.ones_like(denominator)
    tokens = sums["tokens"].clamp(min=1).to(torch.float32)
    divisors = {name: torch.where(denominator == 0, torch.inf, denominator) for name in _LOSSES}
    divisors |= {"clamped_ratios": one, "tokens": one}
    return torch.stack([sums.get(name, zero).to(torch.float32) for name in LossStats.NAMES]) / (
        torch.stack([divisors.get(name, tokens) for name in LossStats.NAMES])
    )


class _PPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        values: Tensor | None,
        constants: PPOConstants,
        settings: PPOSettings,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:2]
        loss, numbers, saved = backend.forward(logprobs, values, constants, settings, wanted)
        ctx.save_for_backward(*saved)
        ctx.dtypes = logprobs.dtype, None if values is None else values.dtype
        ctx.backward_of = backend.backward
        ctx.mark_non_differentiable(numbers)
        ctx.set_materialize_grads(False)  # statistics have none, not even zeros
        return loss, numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.backward_of(grads[0], ctx.saved_tensors, ctx.dtypes), None, None, None


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float | tuple[float, float] = 0.2,
    value: ValueTerm | None = None,
    kl: KLTerm | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LossStats]:
    """Σ_t w_t·v_t·[ u_t·max(-A_t·ρ_t, -A_t·clip(ρ_t, 1 - low, 1 + high)) + value, KL terms ].

    ρ = exp(log π - log π_old), its logarithm clamped to ±20 in the value; the gradient is that of
    a ratio of the clamped size, and the statistics count how many were clamped.

    Args:
        logprobs: [..., T] log π of the sampled tokens, in nats; fp32, bf16 or fp16. All tensors
            are copied once if not contiguous.
        old_logprobs: [..., T] of the policy that sampled.
        advantages: [..., T].
        mask: [..., T] bool, True = counts. A batch that counts nowhere has loss and gradients 0.
        cliprange: the ratio's clip range, one float or (low, high).
        value: the value loss to add, a :class:`ValueTerm`.
        kl: the KL loss to add, a :class:`KLTerm`.
        dual_clip: c > 1: where A < 0 the objective is at most -A·c (Ye et al., 2020).
        weights: [..., T] importance weights u on the clipped objective.
        token_weights: [..., T] v, on all that a token adds: objective, value and KL terms. The
            denominator stays that of unweighted tokens.
        aggregate: w. "token-mean": 1/Σ mask. "seq-mean-token-sum": 1/(rows that count).
            "seq-mean-token-mean": 1/(rows that count · the row's tokens).
            "seq-mean-token-sum-norm": 1/(rows · T).
        denominator: replaces Σ mask, the number of rows that count (twice), or rows · T: a float,
            or a 0-d tensor on the same device (read there). For data-parallel ranks and
            accumulated micro-batches. A tensor of 0 gives loss and gradients 0.
        backend: "auto", "triton" or "torch".

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``logprobs`` and ``value.values``; and
        its :class:`LossStats`, detached.

    Raises:
        TypeError: tensors not floating point, a mask that is not boolean, or a coefficient that
            is a tensor.
        ValueError: another tensor requires a gradient; negative clip ranges; dual_clip ≤ 1; a
            denominator ≤ 0; an unknown kind or aggregate; shapes or devices that differ.

    Source: Schulman et al., "Proximal policy optimization algorithms", 2017, equation 7.
    """
    values, constants, settings = checked(
        logprobs, old_logprobs, advantages, mask, cliprange, value, kl, dual_clip, weights,
        token_weights, aggregate, denominator,
    )  # fmt: skip
    loss, numbers = apply(
        logprobs, values, constants, settings, choose(backend, logprobs, values, *constants)
    )
    return loss, LossStats(numbers)


def apply(
    logprobs: Tensor,
    values: Tensor | None,
    constants: PPOConstants,
    settings: PPOSettings,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The loss and LossStats' tensor, of checked arguments."""
    passes = Backend(_torch_forward, _torch_backward)
    if backend == "triton":
        from ._triton import ppo_loss

        passes = Backend(ppo_loss.forward, ppo_loss.backward)
    return _PPOLoss.apply(logprobs, values, constants, settings, passes)


def checked(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cliprange: float | tuple[float, float],
    value: ValueTerm | None,
    kl: KLTerm | None,
    dual_clip: float | None,
    weights: Tensor | None,
    token_weights: Tensor | None,
    aggregate: str,
    denominator: float | Tensor | None,
) -> tuple[Tensor | None, PPOConstants, PPOSettings]:
    low, high = cliprange if isinstance(cliprange, tuple | list) else (cliprange, cliprange)
    numbers = [low, high, dual_clip, *(value or ())[3:], *(kl or ())[1:2]]
    if any(isinstance(number, Tensor) for number in numbers):
        raise TypeError("clip ranges and coefficients must be Python numbers: a tensor would wait")
    if low < 0 or high < 0 or (value is not None and value.cliprange < 0):
        raise ValueError("clip ranges must not be negative")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}: the usual value is 3")
    check_choice("aggregate", aggregate, AGGREGATES)
    if kl is not None:
        check_choice("kind", kl.kind, KL_KINDS)
    given = denominator if isinstance(denominator, Tensor) else None
    number = None if isinstance(denominator, Tensor) else denominator
    if given is not None and given.dim() != 0:
        raise ValueError(f"denominator has shape {tuple(given.shape)}: pass a float or 0-d tensor")
    if number is not None and not number > 0:
        raise ValueError(f"denominator must be above 0, got {number}")
    if denominator is None and aggregate == "seq-mean-token-sum-norm":
        number = float(max(mask.numel(), 1))

    check_float("logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    if logprobs.dim() == 0:
        raise ValueError("logprobs has no time dimension: pass [..., T]")
    values = None if value is None else value.values
    constants = PPOConstants(
        old_logprobs,
        advantages,
        mask,
        weights,
        None if value is None else value.old_values,
        None if value is None else value.returns,
        None if kl is None else kl.ref_logprobs,
        given,
        token_weights,
    )
    floats = constants._replace(denominator=None)._asdict() | {"values": values}
    for name, tensor in floats.items():
        if tensor is not None and name != "mask":
            check_like(name, tensor, "logprobs", logprobs)
    for name, tensor in constants._asdict().items():
        if tensor is not None:
            check_constant(name, tensor)
    settings = PPOSettings(
        low=1.0 - low,
        high=1.0 + high,
        dual_clip=dual_clip,
        aggregate=aggregate,
        denominator=number,
        value_cliprange=0.0 if value is None else value.cliprange,
        value_coef=0.0 if value is None else value.coef,
        kl_coef=0.0 if kl is None else kl.coef,
        kl_kind="kl" if kl is None else kl.kind,
    )
    return values, constants, settings
