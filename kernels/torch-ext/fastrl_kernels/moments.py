"""Mean, variance and whitening over the counted elements of a whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .argument_types import explains_types
from .checks import check_float, check_mask
from .dispatch import Backend, Passes, choose
from .first_order import first_order
from .operators import applied
from .types import Moments, SplitMoments

Measure = Callable[[Tensor, Tensor], SplitMoments]


def _measure(values: Tensor, mask: Tensor) -> SplitMoments:
    count = mask.sum().to(torch.float32)
    some = count.clamp(min=1)
    x = torch.where(mask, values.float(), 0.0)
    mean = x.sum() / some
    deviations = torch.where(mask, x - mean, 0.0)
    low = deviations.sum() / some
    return SplitMoments(count, mean, low, deviations.square().sum() - count * low.square())


class _MaskedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, measure: Measure) -> Tensor:
        measured = measure(values, mask)
        ctx.save_for_backward(mask, measured.count)
        ctx.dtype = values.dtype
        return measured.mean + measured.low

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        mask, count = ctx.saved_tensors
        return torch.where(mask, grads[0] / count.clamp(min=1), 0.0).to(ctx.dtype), None, None


class _MaskedVar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, unbiased: bool, measure: Measure) -> Tensor:
        measured = measure(values, mask)
        ctx.save_for_backward(values, mask, *measured)
        ctx.unbiased = unbiased
        return measured.variance(unbiased)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        values, mask, *saved = ctx.saved_tensors
        measured = SplitMoments(*saved)
        n = measured.count - 1 if ctx.unbiased else measured.count
        scale = 2.0 * grads[0] / n.clamp(min=1)
        grad = torch.where(mask, measured.centred(values.float()) * scale, 0.0)
        return grad.to(values.dtype), None, None, None


def _whiten_forward(
    values: Tensor, mask: Tensor, shift_mean: bool, given: SplitMoments | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    measured = _measure(values, mask) if given is None else given
    rstd = measured.inverse_deviation()
    whitened = measured.centred(values.float()) * rstd
    if not shift_mean:
        whitened = whitened + (measured.mean + measured.low)
    return torch.where(mask, whitened, 0.0), (values, mask, rstd, *measured)


def _whiten_backward(
    grad: Tensor, saved: tuple[Tensor, ...], shift_mean: bool, constants: bool
) -> Tensor:
    values, mask, rstd, *moments = saved
    measured = SplitMoments(*moments)
    grad = torch.where(mask, grad, 0.0)
    if constants:
        return torch.where(mask, grad * rstd, 0.0).to(values.dtype)
    n = measured.count
    whitened = torch.where(mask, measured.centred(values.float()) * rstd, 0.0)
    grad_mean = grad.sum() / n.clamp(min=1)
    along = (grad * whitened).sum() / (n - 1).clamp(min=1)
    result = (grad - grad_mean - whitened * along) * rstd
    if not shift_mean:
        result = result + grad_mean
    return torch.where(mask, result, 0.0).to(values.dtype)


class _MaskedWhiten(torch.autograd.Function):
    """y = (x - μ)·s; dx = s·(g - Σg/n - y·Σ(g·y)/(n - 1)), or s·g where μ and s were given."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        mask: Tensor,
        shift_mean: bool,
        given: SplitMoments | None,
        backend: Backend,
    ) -> Tensor:
        whitened, saved = backend.forward(values, mask, shift_mean, given)
        ctx.save_for_backward(*saved)
        ctx.options, ctx.backward_of = (shift_mean, given is not None), backend.backward
        return whitened

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_of(*grads, ctx.saved_tensors, *ctx.options), *(None,) * 4


def _whitening_in_triton() -> Backend:
    from ._triton.moments import WHITENING

    return WHITENING


_WHITENING = Passes(Backend(_whiten_forward, _whiten_backward), _whitening_in_triton)


def _checked(backend: str, values: Tensor, mask: Tensor) -> str:
    """The backend's name, of checked arguments."""
    check_float("values", values)
    check_mask(mask, "values", values)
    return choose(backend, values, mask)


def _measure_on(backend: str, values: Tensor, mask: Tensor) -> Measure:
    """Checks the arguments and returns the backend's way to measure them."""
    if _checked(backend, values, mask) == "triton":
        from ._triton.moments import measure

        return measure
    return _measure


@explains_types
def masked_mean(values: Tensor, mask: Tensor, *, backend: str = "auto") -> Tensor:
    """Mean over counted elements: Σ_{mask} x / Σ mask; 0 where nothing counts.

    Args:
        values: [...], fp32, bf16 or fp16; summed in fp32. Copied once if not contiguous.
        mask: [...] bool, True = counts. What stands elsewhere is never read into a sum.
        backend: "auto", "triton" or "torch" (see :func:`fastrl_kernels.explain`).

    Returns:
        A 0-d fp32 tensor, differentiable with respect to ``values``. Nothing synchronises.

    Raises:
        TypeError: values not floating point, or a mask that is not boolean.
        ValueError: shapes or devices that differ.
    """
    return _MaskedMean.apply(values, mask, _measure_on(backend, values, mask))


@explains_types
def masked_var(
    values: Tensor, mask: Tensor, unbiased: bool = True, *, backend: str = "auto"
) -> Tensor:
    """Variance over counted elements: Σ_{mask} (x - μ)² / (n - 1), or / n unless ``unbiased``.

    0 where fewer than two elements count. Deviations are summed about the mean, so the result is
    right where mean ≫ std. Arguments, result and errors are those of :func:`masked_mean`.
    """
    return _MaskedVar.apply(values, mask, unbiased, _measure_on(backend, values, mask))


@explains_types
def masked_whiten(
    values: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    *,
    moments: Moments | None = None,
    backend: str = "auto",
) -> Tensor:
    """(x - μ)·rsqrt(σ² + 1e-8) at counted elements, plus μ again unless ``shift_mean``; else 0.

    μ and the Bessel-corrected σ² are those of all counted elements, or of ``moments``. With fewer
    than two counted elements the deviation is 0, so that the result is 0 (or μ), never NaN.

    Args:
        values: [...], fp32, bf16 or fp16. Copied once if not contiguous.
        mask: [...] bool, True = counts.
        shift_mean: False keeps the mean and scales the deviations only.
        moments: statistics to whiten with, such as those of all data-parallel ranks
            (:func:`masked_moments`, gathered, :func:`merge_moments`). Constants to autograd.
        backend: "auto", "triton" or "torch".

    Returns:
        [...] fp32, differentiable with respect to ``values``.

    Raises:
        TypeError: values not floating point, or a mask that is not boolean.
        ValueError: shapes or devices that differ.
    """
    passes, given = _WHITENING.of(_checked(backend, values, mask)), None
    if moments is not None:
        count, mean, m2 = (m.detach().to(torch.float32) for m in moments)
        given = SplitMoments(count, mean, torch.zeros_like(mean), m2)
    return applied(_MaskedWhiten, values, mask, shift_mean, given, passes)


@explains_types
def masked_moments(values: Tensor, mask: Tensor, *, backend: str = "auto") -> Moments:
    """Count, mean and Σ(x - mean)² over counted elements, each a 0-d fp32 tensor; no gradient.

    Arguments and errors are those of :func:`masked_mean`.
    """
    measured = _measure_on(backend, values, mask)(values.detach(), mask)
    return Moments(measured.count, measured.mean + measured.low, measured.m2)


@explains_types
def merge_moments(moments: Moments) -> Moments:
    """Moments of P disjoint parts together: n = Σ n_i, μ = Σ n_i·μ_i / n,
    M2 = Σ (M2_i + n_i·(μ_i - μ)²).

    Args:
        moments: fields [P], stacked in an order that every rank agrees on (that of
            ``all_gather``): then every rank gets the same bits.

    Returns:
        Moments with 0-d fp32 fields; zeros where nothing counts.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing
    sample variances", 1979.
    """
    count, mean, m2 = (m.to(torch.float32) for m in moments)
    total = count.sum()
    some = total.clamp(min=1)
    pivot = (count * mean).sum() / some
    offsets = mean - pivot  # small against the means, so that their rounding does not show
    low = (count * offsets).sum() / some
    merged = (m2 + count * (offsets - low).square()).sum()
    return Moments(total, pivot + low, merged)
