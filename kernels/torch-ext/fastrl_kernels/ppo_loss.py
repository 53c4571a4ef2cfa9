"""The clipped PPO objective with value and KL terms, and its statistics."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .argument_types import explains_types
from .checks import (
    FLOAT_DTYPES,
    check_choice,
    check_constant,
    check_float,
    check_like,
    check_mask,
)
from .dispatch import Backend, Passes, choose
from .first_order import first_order
from .kl import kl_value, masked_difference
from .operators import applied
from .policy_losses import PPO_CLIP, PolicyLoss, registered_loss
from .sequence_ratios import kl_slopes, over_sequences, with_sequences
from .sequence_ratios import token_weights as token_weights_of
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
    """What the sum over tokens is divided by, 0-d fp32."""
    mask = constants.mask
    if constants.denominator is not None:
        return constants.denominator.to(torch.float32)
    if settings.denominator is not None:
        return torch.full((), settings.denominator, device=mask.device)
    if settings.aggregate == "token-mean":
        return mask.sum().clamp(min=1).to(torch.float32)
    return mask.any(-1).sum().clamp(min=1).to(torch.float32)


def inverse_of(denominator: Tensor) -> Tensor:
    """1/denominator, and 0 for 0: a batch that counts no token on any rank has loss 0."""
    return torch.where(denominator == 0, 0.0, 1.0 / denominator)


class _PolicyTerms(NamedTuple):
    """Terms of the loss per token, without token weights and denominator."""

    loss: Tensor  # the objective
    kl: Tensor | None  # the KL term without its coefficient
    slope: Tensor  # d/d log ρ of the objective, not masked
    log_ratio: Tensor  # the tokens' own log-ratios
    level: Tensor  # the log-ratio of the objective's ratio
    ratio: Tensor
    is_clipped: Tensor  # bool


def policy_terms(logprobs: Tensor, constants: PPOConstants, settings: PPOSettings) -> _PolicyTerms:
    """The objective and the KL term per token, and the objective's derivative by log ρ.

    Inside the clip range both branches are equal, and the derivative is that of the ratio. Exactly
    at a bound (probability 0) it is the unclipped branch's.
    """
    mask = constants.mask
    log_ratio = level = masked_difference(logprobs, constants.old_logprobs, mask)
    kind, of_sequences = settings.objective.kind, constants.of_sequences
    of_response = settings.objective.row.of_response
    if of_sequences is not None:
        of_sequences = torch.where(mask, of_sequences, 0.0)
        level = log_ratio if of_response else of_sequences
    ratio = read = level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if of_response:
        assert of_sequences is not None
        read = of_sequences.exp()
    advantages = torch.where(mask, constants.advantages.float(), 0.0)
    if settings.objective.is_registered:
        near = level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        loss, slope, is_clipped = _registered(kind, near, advantages, settings)
    else:
        given = torch.where(mask, logprobs.float(), 0.0)
        loss, slope, is_clipped = _OBJECTIVES[kind](read, advantages, given, settings)
    if constants.weights is not None:
        weights = torch.where(mask, constants.weights.float(), 0.0)
        loss, slope = loss * weights, slope * weights
    kl = None
    if constants.ref_logprobs is not None:
        d = masked_difference(logprobs, constants.ref_logprobs, mask)
        kl = kl_value(d, settings.kl_kind)
    return _PolicyTerms(loss, kl, slope, log_ratio, level, ratio, is_clipped)


def _clip(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor]:
    unclipped, near = -advantages * ratio, ratio.clamp(settings.low, settings.high)
    delta = settings.objective.delta
    if delta is not None:
        unclipped = torch.where(ratio > delta, -advantages * delta, unclipped)
    clipped = -advantages * near
    is_clipped = is_cut = clipped > unclipped
    loss = torch.where(is_clipped, clipped, unclipped)
    if delta is not None:
        # Between δ and the clip range's end the larger branch is that of the ratio itself.
        is_cut = torch.where(is_clipped, near != ratio, ratio > delta)
        is_clipped = is_clipped & (near != ratio)
    slope = torch.where(is_cut, 0.0, loss)
    if settings.dual_clip is not None:
        bound = -advantages * settings.dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss, slope = torch.where(beyond, bound, loss), torch.where(beyond, 0.0, slope)
    return loss, slope, is_clipped


def _cispo(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor]:
    slope = -advantages * ratio.clamp(settings.low, settings.high)
    return slope * logprobs, slope, (ratio < settings.low) | (ratio > settings.high)


def _sapo(
    ratio: Tensor, advantages: Tensor, logprobs: Tensor, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor]:
    above, below = settings.objective.sapo_temperatures
    soft = torch.where(advantages > 0, above, below)
    share = (soft * (ratio - 1)).sigmoid()
    others = (soft * (1 - ratio)).sigmoid()  # 1 - share, without cancellation
    loss, slope = -advantages * share * 4 / soft, -advantages * 4 * share * others * ratio
    return loss, slope, torch.zeros_like(ratio, dtype=torch.bool)


def _vespo(
    weights: Tensor, advantages: Tensor, logprobs: Tensor, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor]:
    slope = -advantages * weights
    return slope * logprobs, slope, torch.zeros_like(slope, dtype=torch.bool)


def _registered(
    kind: str, log_ratio: Tensor, advantages: Tensor, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor]:
    # Bounds are kept as those of the ratio.
    cliprange = 1.0 - settings.low, settings.high - 1.0
    loss, slope = registered_loss(kind, log_ratio, advantages, cliprange)
    ratio = log_ratio.exp()  # clipped is what PPO's clip would cut
    over, under = (ratio > settings.high) & (advantages > 0), (ratio < settings.low)
    return loss, slope, over | (under & (advantages < 0))


# Each gives the loss, its derivative by log ρ (where ρ is a constant weight by log π), and where it
# is clipped, from ρ, or from φ(w).
_OBJECTIVES = {"clip": _clip, "cispo": _cispo, "sapo": _sapo, "vespo": _vespo}


def joined_slopes(
    slopes: Tensor,
    logprobs: Tensor,
    weights: Tensor | None,
    constants: PPOConstants,
    settings: PPOSettings,
) -> Tensor:
    """The gradient of the sum by log-probs, from the objective's derivatives."""
    if settings.objective.joins_slopes:
        weighted = slopes if weights is None else slopes * weights
        return over_sequences(weighted, logprobs, weights, constants, settings)
    of_kl = kl_slopes(logprobs, constants, settings)
    slopes = torch.where(constants.mask, slopes if of_kl is None else slopes + of_kl, 0.0)
    return slopes if weights is None else slopes * weights


def _value_error(
    values: Tensor, constants: PPOConstants, settings: PPOSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """½·the larger squared error, its derivative, where it is clipped, (V - R)², and V, 0 where
    masked."""
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

    terms = policy_terms(logprobs, constants, settings)
    loss, kl, slope, log_ratio, level, ratio, is_clipped = terms
    stats = {
        "policy_loss": total(loss),
        "clipfrac": is_clipped.sum(),
        "clipfrac_low": (is_clipped & (ratio < 1)).sum(),
        "clipfrac_high": (is_clipped & (ratio > 1)).sum(),
        "approx_kl": 0.5 * log_ratio.square().sum(),
        "policy_kl": -log_ratio.sum(),
        "mean_ratio": torch.where(mask, ratio, 0.0).sum(),
        "clamped_ratios": (level.abs() > LOG_RATIO_LIMIT).sum(),
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
    if kl is not None:
        stats["kl_loss"] = total(kl)
        objective = objective + settings.kl_coef * stats["kl_loss"]
    stats["loss"] = objective
    denominator = denominator_of(constants, settings)
    numbers, inverse = _normalised(stats, denominator), inverse_of(denominator)

    slope = joined_slopes(slope, logprobs, token_weights, constants, settings)
    if token_weights is not None:
        value_slope = None if value_slope is None else value_slope * token_weights
    gradients = (
        torch.where(mask, slope * inverse, 0.0) if wanted[0] else None,
        value_slope * inverse if wanted[1] and value_slope is not None else None,
    )
    return numbers[LossStats.NAMES.index("loss")].clone(), numbers, gradients


def _torch_backward(
    grad: Tensor,
    saved: tuple[Tensor | None, ...],
    shape: torch.Size,
    dtypes: tuple[torch.dtype | None, ...],
    wanted: tuple[bool, ...],
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
        ctx.shape, ctx.backward_of = logprobs.shape, backend.backward
        ctx.dtypes = logprobs.dtype, None if values is None else values.dtype
        ctx.mark_non_differentiable(numbers)
        ctx.set_materialize_grads(False)  # statistics have none, not even zeros
        return loss, numbers

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.backward_of(
            grads[0], ctx.saved_tensors, ctx.shape, ctx.dtypes, ctx.needs_input_grad[:2]
        )
        return *gradients, None, None, None


@explains_types
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
    objective: PolicyLoss = PPO_CLIP,
    lengths: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, LossStats]:
    """Σ_t w_t·v_t·[ u_t·max(-A_t·ρ_t, -A_t·clip(ρ_t, 1 - low, 1 + high)) + value, KL terms ].

    ρ = exp(log π - log π_old), its logarithm clamped to ±20 in the value; the gradient is that of
    a ratio of the clamped size, and the statistics count how many were clamped. A ratio or a value
    that is exactly at a bound of its clip range counts as within it, and has its whole gradient.

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
        objective: another loss in the place of the maximum, or ratios of whole sequences: a
            :class:`PolicyLoss`, whose kinds are the rows of ``POLICY_LOSSES``.
        lengths: [S] int64, for ratios of sequences where these are no rows: the numbers of tokens
            of sequences that lie one after the other, all of them together as many as there are.
            Their sum is checked on CPUs.
        backend: "auto", "triton" or "torch".

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``logprobs`` and ``value.values``; and
        its :class:`LossStats`, detached.

    Raises:
        TypeError: tensors not floating point, a mask that is not boolean, or a coefficient that
            is a tensor.
        ValueError: another tensor requires a gradient; negative clip ranges; dual_clip ≤ 1; a
            denominator ≤ 0; an unknown kind or aggregate; an argument that an objective does not
            have; shapes or devices that differ.

    Source: Schulman et al., "Proximal policy optimization algorithms", 2017, equation 7.
    """
    values, constants, settings = checked_loss(
        logprobs, old_logprobs, advantages, mask, cliprange, value, kl, dual_clip, weights,
        token_weights, aggregate, denominator, objective, lengths,
    )  # fmt: skip
    loss, numbers = loss_of(
        logprobs, values, constants, settings, choose(backend, logprobs, values, *constants)
    )
    return loss, LossStats(numbers)


def _import_triton() -> Backend:
    from ._triton.ppo_loss import PASSES

    return PASSES


_PASSES = Passes(Backend(_torch_forward, _torch_backward), _import_triton)


def loss_of(
    logprobs: Tensor,
    values: Tensor | None,
    constants: PPOConstants,
    settings: PPOSettings,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The loss and LossStats' tensor, of checked arguments."""
    if settings.objective is not PPO_CLIP:
        constants = with_sequences(logprobs, constants, settings)
        if settings.objective.is_registered:
            backend = "torch"
    return applied(_PPOLoss, logprobs, values, constants, settings, _PASSES.of(backend))


def checked_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
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
    objective: PolicyLoss,
    lengths: Tensor | None,
) -> tuple[Tensor | None, PPOConstants, PPOSettings]:
    if type(cliprange) is float:
        low = high = cliprange
    else:
        low, high = cliprange if isinstance(cliprange, tuple | list) else (cliprange, cliprange)
    values = old_values = returns = ref_logprobs = fixed = None
    value_cliprange = value_coef = kl_coef = 0.0
    kind = "kl"
    if value is not None:
        values, old_values, returns, value_cliprange, value_coef = value
    if kl is not None:
        ref_logprobs, kl_coef, kind = kl
        check_choice("kind", kind, KL_KINDS)
    for number in (low, high, dual_clip, value_cliprange, value_coef, kl_coef):
        if type(number) is not float and isinstance(number, Tensor):
            raise TypeError(
                "cliprange, dual_clip, value.cliprange, value.coef and kl.coef must be Python "
                "numbers: a tensor would wait"
            )
    # A single bound may be less than 1.
    least = -1 if objective.bounded_above else 0
    for name, number, bound in (
        ("cliprange", low, 0),
        ("cliprange", high, least),
        ("value.cliprange", value_cliprange, 0),
    ):
        if not number >= bound:
            raise ValueError(f"{name} must be at least {bound}, got {number}")
    for name, number in (("value.coef", value_coef), ("kl.coef", kl_coef)):
        if not -math.inf < number < math.inf:
            raise ValueError(f"{name} must be finite, got {number}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}: the usual value is 3")
    check_choice("aggregate", aggregate, AGGREGATES)
    if objective is not PPO_CLIP:
        objective.check(dual_clip)
    if lengths is not None:
        _check_lengths(lengths, logprobs, aggregate)
    if denominator is not None:
        if isinstance(denominator, Tensor):
            fixed, denominator = denominator, None
            if fixed.dim() != 0:
                shape = tuple(fixed.shape)
                raise ValueError(f"denominator has shape {shape}: pass a float or 0-d tensor")
            check_constant("denominator", fixed)
        elif not denominator > 0:
            raise ValueError(f"denominator must be above 0, got {denominator}")
    elif aggregate == "seq-mean-token-sum-norm":
        denominator = float(max(mask.numel(), 1))

    check_float("logprobs", logprobs)
    check_mask(mask, "logprobs", logprobs)
    shape = logprobs.shape
    if not shape:
        raise ValueError("logprobs has no time dimension: pass [..., T]")
    tensors = (
        old_logprobs, advantages, weights, old_values, returns, ref_logprobs, token_weights,
    )  # fmt: skip
    for tensor in tensors:
        if tensor is not None and (
            tensor.dtype not in FLOAT_DTYPES or tensor.shape != shape or tensor.requires_grad
        ):
            _check_constants(logprobs, *tensors)
    if values is not None:
        check_like("values", values, "logprobs", logprobs)
    constants = PPOConstants(
        old_logprobs, advantages, mask, weights, old_values, returns, ref_logprobs, fixed,
        token_weights, lengths,
    )  # fmt: skip
    settings = PPOSettings(
        1.0 - low, 1.0 + high, dual_clip, aggregate, denominator, value_cliprange, value_coef,
        kl_coef, kind, objective,
    )  # fmt: skip
    return values, constants, settings


def _check_lengths(lengths: Tensor, logprobs: Tensor, aggregate: str) -> None:
    if lengths.dtype != torch.int64 or lengths.dim() != 1:
        raise TypeError(
            f"lengths must be int64 [S], one of each sequence, got {lengths.dtype} "
            f"{tuple(lengths.shape)}"
        )
    if aggregate in ("seq-mean-token-sum", "seq-mean-token-mean"):
        raise ValueError(
            f"aggregate={aggregate!r} is of rows, and with lengths these are no sequences: pass "
            "token_weights and a denominator"
        )
    # On a GPU the sum would wait.
    if lengths.device.type == "cpu" and int(lengths.sum()) != logprobs.numel():
        raise ValueError(
            f"lengths add up to {int(lengths.sum())}, but logprobs has {logprobs.numel()} tokens"
        )


def _check_constants(logprobs: Tensor, *tensors: Tensor | None) -> None:
    """Raises what is wrong with the first that may not be used."""
    names = (
        "old_logprobs", "advantages", "weights", "old_values", "returns", "ref_logprobs",
        "token_weights",
    )  # fmt: skip
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            check_like(name, tensor, "logprobs", logprobs)
            check_constant(name, tensor)
