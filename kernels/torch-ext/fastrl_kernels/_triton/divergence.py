"""The divergence of a chunk of the student's logits from the teacher's: one pass over both forward,
one more backward, by statistics of both.

Chunks are as in ``lm_head``: in their head's dtype, with rows that begin at 16-byte boundaries.
"""

from __future__ import annotations

from typing import ClassVar

import triton
import triton.language as tl

from .launch import launcher
from .lm_head import _load_tail, _store_tail, _unscaled
from .logprob import FLOOR, LN2, LOG2E, row_temperature
from .rows import PART_VECTORS, parts_of, window
from .tiles import device_of

_FORWARD_KL, _REVERSE_KL, _MIXED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_FAR = tl.constexpr(1e30)  # a difference that is as good as infinite, and that 0 can multiply


@triton.jit
def _row_scale(temperature, outer):
    """What makes a difference of unscaled logits one of log₂ probabilities."""
    return tl.cast(outer, tl.float32) * LOG2E / temperature


@triton.jit
def _below_one(x, e):
    """e - 1 for e = exp(-x), x ≥ 0, to a few units in the last place."""
    z = tl.minimum(x, 0.25)
    near = -z * (1.0 - z * (1.0 / 2 - z * (1.0 / 6 - z * (1.0 / 24 - z * (1.0 / 120 - z / 720)))))
    return tl.where(x < 0.25, near, e - 1.0)


@triton.jit
def _log_mixture(apart, beta, other):
    """log m less the larger of log p and log q, by log p - log q: see ``divergence``."""
    distance = tl.abs(apart)
    e = tl.exp2(distance * -LOG2E)
    less = _below_one(distance, e)
    part = less * tl.minimum(beta, other)
    is_large = (apart < 0) == (beta <= other)
    near = tl.where(is_large, less - part, part)
    is_far = near < -0.5
    u = 1.0 + near
    log = tl.log(tl.where(is_far, e - part, u))
    # Kahan: log1p(x) = log(u) + (x - (u - 1))/u, u = 1 + x rounded.
    return tl.where(is_far, log, log + (near - (u - 1.0)) / u)


@triton.jit
def _both(x, y, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum):
    """log₂ of both probabilities, and their difference, which is 0 where both are 0."""
    a = (x - x_max) * x_scale - log_x_sum
    b = (y - y_max) * y_scale - log_y_sum
    neither = (a == float("-inf")) & (b == float("-inf"))
    return a, b, tl.where(neither, 0.0, a - b)


@triton.jit
def _weight(apart, beta, other, MODE: tl.constexpr):
    """w, of which p·(w - E_p[w]) is the gradient, by log₂ p - log₂ q; and log q - log m."""
    apart = apart * LN2
    if MODE == _REVERSE_KL:
        return apart, apart
    apart = tl.minimum(tl.maximum(apart, -_FAR), _FAR)
    above = _log_mixture(apart, beta, other)
    return tl.minimum(apart, 0.0) - above, -(tl.maximum(apart, 0.0) + above)


@triton.jit
def _add(a, b, apart, values, means, beta, other, MODE: tl.constexpr):
    """Adds a token to each slot's sums, of q·(log q - log p), of p·w, or of q·(log q - log m) and
    p·w."""
    p = tl.exp2(a)
    if MODE == _REVERSE_KL:
        return values, means + tl.where(a == float("-inf"), 0.0, p * (apart * LN2))
    q = tl.exp2(b)
    if MODE == _FORWARD_KL:
        return values + tl.where(b == float("-inf"), 0.0, q * (apart * -LN2)), means
    w, of_teacher = _weight(apart, beta, other, MODE)
    return values + q * of_teacher, means + p * w


@triton.jit(do_not_specialize=["C"])
def _divergence_fwd_kernel(
    x_ptr,  # [r, C] the student's products
    y_ptr,  # [r, C] the teacher's
    temperatures_ptr,  # [r], or None: the number
    temperature,
    inner,  # s/c of the student, or None: no soft cap
    outer,  # c, or s
    teacher_inner,
    teacher_outer,
    x_max_ptr,  # [r] fp32, as are the following
    x_sum_ptr,
    y_max_ptr,
    y_sum_ptr,
    values_ptr,
    means_ptr,
    beta,
    other,  # 1 - β, rounded by itself
    C,
    x_stride,
    y_stride,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    row = tl.program_id(0)
    beta, other = tl.cast(beta, tl.float32), tl.cast(other, tl.float32)
    temperature = row_temperature(temperatures_ptr, temperature, row)
    x_scale, y_scale = _row_scale(temperature, outer), _row_scale(temperature, teacher_outer)
    x_max, y_max = tl.load(x_max_ptr + row), tl.load(y_max_ptr + row)
    log_x_sum, log_y_sum = tl.log2(tl.load(x_sum_ptr + row)), tl.log2(tl.load(y_sum_ptr + row))
    x_ptr += row.to(tl.int64) * x_stride
    y_ptr += row.to(tl.int64) * y_stride

    slots = tl.arange(0, BLOCK)
    values = tl.zeros([BLOCK], tl.float32)
    means = tl.zeros([BLOCK], tl.float32)
    whole = C // BLOCK
    for w in range(0, whole):
        x = _unscaled(tl.load(x_ptr + (w * BLOCK + slots)).to(tl.float32), inner)
        y = _unscaled(tl.load(y_ptr + (w * BLOCK + slots)).to(tl.float32), teacher_inner)
        a, b, apart = _both(x, y, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum)
        values, means = _add(a, b, apart, values, means, beta, other, MODE)
    columns = whole * BLOCK + slots
    x = _load_tail(x_ptr, columns, C, inner, VEC)
    y = _load_tail(y_ptr, columns, C, teacher_inner, VEC)
    a, b, apart = _both(x, y, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum)
    values, means = _add(a, b, apart, values, means, beta, other, MODE)

    mean = tl.sum(means, 0)
    value = tl.sum(values, 0)
    if MODE == _REVERSE_KL:
        value = mean
    if MODE == _MIXED:
        value = beta * value + other * mean
    # Where a probability has underflowed, and the other side does not allow its token, 0·inf.
    number = (log_x_sum == log_x_sum) & (log_y_sum == log_y_sum)
    value = tl.where((value != value) & number, float("inf"), value)
    tl.store(values_ptr + row, value)
    # A clamp on a GPU makes a number of a NaN.
    tl.store(means_ptr + row, tl.where(number, mean, float("nan")))


_launch_fwd = launcher(_divergence_fwd_kernel)


@triton.jit
def _gradient(
    x, y, is_label, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum, beta, other, g, g_entropy,
    entropy, slope, mean, capped, MODE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient by the product, of scaled upstream gradients."""
    a, b, apart = _both(x, y, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum)
    p = tl.exp2(a)
    coefficient = -g
    if ENTROPY:
        coefficient -= g_entropy * (tl.maximum(a, FLOOR) * LN2 + entropy)
    if MODE == _FORWARD_KL:
        d = p * coefficient + (p - tl.exp2(b)) * slope  # exactly 0 where both are equal
    else:
        w, _ = _weight(apart, beta, other, MODE)
        w = tl.where(a == float("-inf"), 0.0, w - mean)
        d = p * (coefficient + slope * w)
    d += tl.where(is_label, g, 0.0)
    if capped is not None:
        d *= 1.0 - x * x
    return d


@triton.jit(do_not_specialize=["C", "parts"])
def _divergence_bwd_kernel(
    x_ptr,  # [r, C] the student's products; overwritten with their gradients
    y_ptr,  # [r, C] the teacher's
    labels_ptr,  # [r] int64
    temperatures_ptr,  # [r], or None: the number
    temperature,
    inner,  # s/c of the student, or None: no soft cap
    outer,  # c, or s
    logit_scale,  # s
    teacher_inner,
    teacher_outer,
    x_max_ptr,  # [r] fp32, as are the following
    x_sum_ptr,
    y_max_ptr,
    y_sum_ptr,
    entropies_ptr,  # or None
    means_ptr,
    grad_logprobs_ptr,
    grad_entropies_ptr,  # or None
    slopes_ptr,  # gradients by divergences, times the factor s of w
    beta,
    other,  # 1 - β, rounded by itself
    C,
    parts,
    x_stride,
    y_stride,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    PART: tl.constexpr,
):
    """d(h·w) = s/T·(1 - tanh²)·[ g·1_y - p·(g + g_H·(log p + H)) + g_D·dD/dz ], for PART columns of
    a row."""
    ENTROPY: tl.constexpr = grad_entropies_ptr is not None
    beta, other = tl.cast(beta, tl.float32), tl.cast(other, tl.float32)
    row = tl.program_id(0) // parts
    begin = (tl.program_id(0) - row * parts) * PART
    temperature = row_temperature(temperatures_ptr, temperature, row)
    x_scale, y_scale = _row_scale(temperature, outer), _row_scale(temperature, teacher_outer)
    chain = tl.div_rn(tl.cast(logit_scale, tl.float32), temperature)
    x_max, y_max = tl.load(x_max_ptr + row), tl.load(y_max_ptr + row)
    log_x_sum, log_y_sum = tl.log2(tl.load(x_sum_ptr + row)), tl.log2(tl.load(y_sum_ptr + row))
    mean = tl.load(means_ptr + row)
    g, slope = tl.load(grad_logprobs_ptr + row) * chain, tl.load(slopes_ptr + row) * chain
    g_entropy, entropy = 0.0, 0.0
    if ENTROPY:
        g_entropy = tl.load(grad_entropies_ptr + row) * chain
        entropy = tl.load(entropies_ptr + row)
    label = tl.load(labels_ptr + row).to(tl.int32)
    x_ptr += row.to(tl.int64) * x_stride
    y_ptr += row.to(tl.int64) * y_stride

    slots = begin + tl.arange(0, BLOCK)
    if begin + PART <= C:
        for w in range(PART // BLOCK):
            columns = w * BLOCK + slots
            x = _unscaled(tl.load(x_ptr + columns).to(tl.float32), inner)
            y = _unscaled(tl.load(y_ptr + columns).to(tl.float32), teacher_inner)
            d = _gradient(
                x, y, columns == label, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum, beta,
                other, g, g_entropy, entropy, slope, mean, inner, MODE, ENTROPY,
            )  # fmt: skip
            tl.store(x_ptr + columns, d.to(x_ptr.dtype.element_ty))
    else:
        for w in range(tl.cdiv(C - begin, BLOCK)):
            columns = w * BLOCK + slots
            x = _load_tail(x_ptr, columns, C, inner, VEC)
            y = _load_tail(y_ptr, columns, C, teacher_inner, VEC)
            d = _gradient(
                x, y, columns == label, x_max, y_max, x_scale, y_scale, log_x_sum, log_y_sum, beta,
                other, g, g_entropy, entropy, slope, mean, inner, MODE, ENTROPY,
            )  # fmt: skip
            _store_tail(x_ptr, columns, d, C, VEC)


_launch_bwd = launcher(_divergence_bwd_kernel)


def _mode(beta):
    return 2 if 0 < beta < 1 else int(beta)


class TritonDivergence:
    """``DivergenceBackend`` of Triton kernels, which leave the teacher's logits as they are."""

    needs_statistics: ClassVar[bool] = True

    @staticmethod
    def score(x, y, student, teacher, labels, beta, out, known):
        if not len(x):
            return
        with device_of(x):
            _launch_fwd(
                len(x), x, y, student.temperature.per_row, student.temperature.number,
                *_inner_and_outer(student), *_inner_and_outer(teacher),
                *student.statistics[:2], *teacher.statistics[:2], *out, beta, 1.0 - beta,
                x.shape[1], x.stride(0), y.stride(0), MODE=_mode(beta),
                **window(x.shape[1], x.dtype, y.dtype),
            )  # fmt: skip

    @staticmethod
    def gradients_(x, y, student, teacher, labels, beta, found, upstream, slopes, known):
        if not len(x):
            return
        shapes = window(x.shape[1], x.dtype, y.dtype)
        parts = parts_of(x.shape[1], shapes["VEC"])
        statistics, learn = student.statistics, upstream.entropies is not None
        factor = 1.0 - beta if 0 < beta < 1 else 1.0
        with device_of(x):
            _launch_bwd(
                len(x) * parts, x, y, labels, student.temperature.per_row,
                student.temperature.number, *_inner_and_outer(student),
                student.transform.logit_scale, *_inner_and_outer(teacher), *statistics[:2],
                *teacher.statistics[:2], statistics.entropies if learn else None, found.means,
                *upstream, slopes * factor, beta, 1.0 - beta, x.shape[1], parts, x.stride(0),
                y.stride(0), MODE=_mode(beta), **shapes, PART=PART_VECTORS * shapes["VEC"],
            )  # fmt: skip


def _inner_and_outer(side):
    transform = side.transform
    return None if transform.softcap is None else transform.inner, transform.outer
