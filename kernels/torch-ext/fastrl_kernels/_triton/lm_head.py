"""The element-wise work of a language-model head on a chunk of its logits.

Chunks are in the head's dtype and hold products; a soft cap is applied in registers. Their rows
begin at 16-byte boundaries and are padded to whole vectors, so that vectors are moved whole.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launcher
from .logprob import FLOOR, LN2, LOG2E, LOWEST, dlogits_of, online_softmax, row_temperature
from .rows import PART_VECTORS, load_end, parts_of, window
from .tiles import accurate_tanh, device_of
from .token_sets import restrict_

_SCALE_PROGRAMS = 1024
_SCALE_BLOCK = 4096
_SCALE_THREADS = tl.constexpr(256)  # at most, of a program: four warps of 64


@triton.jit
def _unscaled(x, inner, CUT: tl.constexpr = False):
    """A product's unscaled logit; where rows are cut, -inf is a token that the row's set lacks."""
    if inner is not None:
        capped = accurate_tanh(x * tl.cast(inner, tl.float32))
        x = tl.where(x == float("-inf"), x, capped) if CUT else capped
    return x


@triton.jit
def _by_product(d, x, inner, CUT: tl.constexpr):
    """The gradient by a product from that by its unscaled logit."""
    if inner is not None:
        x = tl.maximum(x, -1.0) if CUT else x  # -inf: d is 0
        d *= 1.0 - x * x
    return d


@triton.jit
def _load_tail(ptr, columns, high, inner, VEC: tl.constexpr, CUT: tl.constexpr = False):
    """Unscaled logits of a window that the row ends in, -inf after its end."""
    x = load_end(ptr, columns, 0, high, VEC)
    return tl.where(columns < high, _unscaled(x, inner, CUT), float("-inf"))


@triton.jit
def _earlier_maximum(x_ptr, columns, label, row_max, inner, CUT: tl.constexpr):
    """Whether a column before the label's has the maximum, too."""
    x = tl.load(x_ptr + columns, mask=columns < label, other=float("-inf")).to(tl.float32)
    return (columns < label) & (_unscaled(x, inner, CUT) >= row_max)


@triton.jit
def _fold(x, m, s, t, q, scale, ENTROPY: tl.constexpr, SQUARES: tl.constexpr):
    """Adds a logit to each slot as `online_softmax` does, and to q = Σ 2^(2a)."""
    if SQUARES:
        e = tl.exp2(-tl.abs(x - m) * scale)
        higher = x > m
        term = tl.where(higher, 1.0, e)
        rescale = tl.where(higher, e, 1.0)
        q = tl.fma(rescale * rescale, q, term * term)
    m, s, t = online_softmax(x, m, s, t, scale, ENTROPY)
    return m, s, t, q


@triton.jit
def _joined(e, a, s, t, q, ENTROPY: tl.constexpr, SQUARES: tl.constexpr):
    """Sums s = Σ 2^x, t = Σ 2^x·x and q = Σ 2^(2x) relative to a maximum, made relative to a new
    maximum, below which the old one lies by a. e = 2^a."""
    if ENTROPY:
        t = e * tl.fma(s, tl.maximum(a, FLOOR), t)
    if SQUARES:
        q = e * e * q
    return e * s, t, q


@triton.jit(do_not_specialize=["C", "first", "V"])
def _lm_head_fwd_kernel(
    x_ptr,  # [r, C] products
    labels_ptr,  # [r] int64
    temperatures_ptr,  # [r], or None: the number
    temperature,
    inner,  # s/c, or None: no soft cap
    outer,  # c, or s
    unscaled_max_ptr,  # [r] fp32, as are the following but for is_top1
    exp_sum_ptr,
    mean_ptr,  # or None
    logprobs_ptr,
    entropies_ptr,  # or None
    log_sum_sq_ptr,  # or None
    mean_logit_ptr,  # or None
    is_top1_ptr,  # bool, or None
    C,
    first,  # the vocabulary's column that x begins with
    V,
    stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    CUT: tl.constexpr,
):
    """Statistics of rows [r, V], a chunk of columns at a time. Until the last chunk, the results
    hold sums; log-probs hold the label's logit, or NaN before the label's chunk."""
    ENTROPY: tl.constexpr = entropies_ptr is not None
    SQUARES: tl.constexpr = log_sum_sq_ptr is not None
    TOTAL: tl.constexpr = mean_logit_ptr is not None
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row) - first
    temperature = row_temperature(temperatures_ptr, temperature, row)
    outer = tl.cast(outer, tl.float32)
    scale = outer * LOG2E / temperature
    x_ptr += row.to(tl.int64) * stride

    slots = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    q = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    whole = C // BLOCK
    for w in range(0, whole):
        x = _unscaled(tl.load(x_ptr + (w * BLOCK + slots)).to(tl.float32), inner, CUT)
        m, s, t, q = _fold(x, m, s, t, q, scale, ENTROPY, SQUARES)
        if TOTAL:
            total += x
    columns = whole * BLOCK + slots
    x = _load_tail(x_ptr, columns, C, inner, VEC, CUT)
    m, s, t, q = _fold(x, m, s, t, q, scale, ENTROPY, SQUARES)
    if TOTAL:
        total += tl.where(columns < C, x, 0.0)

    row_max = tl.max(m, 0)
    a = (m - row_max) * scale
    s, t, q = _joined(tl.exp2(a), a, s, t, q, ENTROPY, SQUARES)
    exp_sum, t_sum, q_sum, sum_x = tl.sum(s, 0), tl.sum(t, 0), tl.sum(q, 0), tl.sum(total, 0)
    # A label outside [0, V) is never read: its log-probability is NaN.
    here = (label >= 0) & (label < C)
    at_label = tl.load(x_ptr + label, mask=here, other=float("nan")).to(tl.float32)
    at_label = _unscaled(at_label, inner, CUT)
    top = here & (at_label >= row_max)
    if is_top1_ptr is not None:
        earlier = tl.zeros([BLOCK], tl.int32)
        for w in range(0, tl.where(top, tl.cdiv(label, BLOCK), 0)):
            earlier |= _earlier_maximum(x_ptr, w * BLOCK + slots, label, row_max, inner, CUT)
        top = top & (tl.max(earlier, 0) == 0)

    if first > 0:
        before = tl.load(unscaled_max_ptr + row)
        if is_top1_ptr is not None:
            stays = (tl.load(is_top1_ptr + row) != 0) & (before >= row_max)
            top = tl.where(here, top & (row_max > before), stays)
        at_label = tl.where(here, at_label, tl.load(logprobs_ptr + row))
        new_max = tl.maximum(before, row_max)
        down = (row_max - new_max) * scale
        exp_sum, t_sum, q_sum = _joined(
            tl.exp2(down), down, exp_sum, t_sum, q_sum, ENTROPY, SQUARES
        )
        t_before, q_before = 0.0, 0.0
        if ENTROPY:
            t_before = tl.load(mean_ptr + row)
        if SQUARES:
            q_before = tl.load(log_sum_sq_ptr + row)
        down = (before - new_max) * scale
        s_before, t_before, q_before = _joined(
            tl.exp2(down), down, tl.load(exp_sum_ptr + row), t_before, q_before, ENTROPY, SQUARES
        )
        row_max = new_max
        exp_sum += s_before
        t_sum += t_before
        q_sum += q_before
        if TOTAL:
            sum_x += tl.load(mean_logit_ptr + row)
        tl.debug_barrier()  # other threads may still read the sums, which these replace

    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + row, top)
    tl.store(unscaled_max_ptr + row, row_max)
    tl.store(exp_sum_ptr + row, exp_sum)
    log_prob = at_label
    if first + C >= V:
        log_sum = tl.log(exp_sum)
        log_prob = tl.div_rn((at_label - row_max) * outer, temperature) - log_sum
        if ENTROPY:
            t_sum = t_sum / exp_sum * LN2
            tl.store(entropies_ptr + row, log_sum - t_sum)
        if SQUARES:
            q_sum = tl.log(q_sum) - 2.0 * log_sum
        if TOTAL:
            mean_logit = tl.div_rn(sum_x, tl.cast(V, tl.float32))
            sum_x = tl.div_rn(mean_logit * outer, temperature)
    tl.store(logprobs_ptr + row, log_prob)
    if ENTROPY:
        tl.store(mean_ptr + row, t_sum)
    if SQUARES:
        tl.store(log_sum_sq_ptr + row, q_sum)
    if TOTAL:
        tl.store(mean_logit_ptr + row, sum_x)


_launch_fwd = launcher(_lm_head_fwd_kernel)


@triton.jit(do_not_specialize=["C", "first", "parts"])
def _lm_head_bwd_kernel(
    x_ptr,  # [r, C] products; overwritten with their gradients
    labels_ptr,  # [r] int64
    temperatures_ptr,  # [r], or None: the number
    temperature,
    inner,  # s/c, or None: no soft cap
    outer,  # c, or s
    logit_scale,  # s
    unscaled_max_ptr,  # [r] fp32
    exp_sum_ptr,  # [r] fp32
    mean_ptr,  # [r] fp32, or None without entropies
    grad_logprobs_ptr,  # [r] fp32
    grad_entropies_ptr,  # [r] fp32, or None
    C,
    first,  # the vocabulary's column that x begins with
    parts,
    stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    PART: tl.constexpr,
    CUT: tl.constexpr,
):
    """d(h·w) = s/T·(1 - tanh²)·[ g·1_y - p·(g + g_H·(z - E[z])) ], for PART columns of a row."""
    ENTROPY: tl.constexpr = grad_entropies_ptr is not None
    row = tl.program_id(0) // parts
    begin = (tl.program_id(0) - row * parts) * PART
    temperature = row_temperature(temperatures_ptr, temperature, row)
    scale = tl.cast(outer, tl.float32) * LOG2E / temperature
    chain = tl.div_rn(tl.cast(logit_scale, tl.float32), temperature)
    row_max = tl.load(unscaled_max_ptr + row)
    per_sum = tl.div_rn(chain, tl.load(exp_sum_ptr + row))
    g = tl.load(grad_logprobs_ptr + row)
    base = g * per_sum
    slope = 0.0
    if ENTROPY:
        g_entropy = tl.load(grad_entropies_ptr + row) * per_sum
        base -= g_entropy * tl.load(mean_ptr + row)
        slope = g_entropy * LN2
    label = (tl.load(labels_ptr + row) - first).to(tl.int32)
    x_ptr += row.to(tl.int64) * stride

    slots = begin + tl.arange(0, BLOCK)
    if begin + PART <= C:
        for w in range(PART // BLOCK):
            columns = w * BLOCK + slots
            x = _unscaled(tl.load(x_ptr + columns).to(tl.float32), inner, CUT)
            d = dlogits_of(x, columns == label, row_max, scale, g * chain, base, slope, ENTROPY)
            d = _by_product(d, x, inner, CUT)
            tl.store(x_ptr + columns, d.to(x_ptr.dtype.element_ty))
    else:
        for w in range(tl.cdiv(C - begin, BLOCK)):
            columns = w * BLOCK + slots
            x = _load_tail(x_ptr, columns, C, inner, VEC, CUT)
            d = dlogits_of(x, columns == label, row_max, scale, g * chain, base, slope, ENTROPY)
            d = _by_product(d, x, inner, CUT)
            _store_tail(x_ptr, columns, d, C, VEC)


_launch_bwd = launcher(_lm_head_bwd_kernel)


@triton.jit
def _store_tail(ptr, columns, x, high, VEC: tl.constexpr):
    """Stores whole vectors: after the row's end there is padding."""
    tl.store(
        ptr + columns, x.to(ptr.dtype.element_ty), mask=columns < (high + VEC - 1) // VEC * VEC
    )


@triton.jit
def _scale_there(at, factor, mask):
    x = tl.load(at, mask=mask).to(tl.float32) * factor
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n"])
def _lm_head_scale_kernel(
    x_ptr,  # [n]
    factor_ptr,  # []
    n,
    BLOCK: tl.constexpr,
):
    """x·factor in place; a factor of 1 costs one load."""
    VEC: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        slots = tl.arange(0, BLOCK)
        whole = n // BLOCK
        for tile in range(tl.program_id(0), whole, tl.num_programs(0)):
            at = tl.cast(tile, tl.int64) * BLOCK + slots
            _scale_there(x_ptr + at, factor, None)
        if tl.program_id(0) == 0:
            # By vectors: a mask by elements takes four times a tile's registers, and so leaves room
            # for a fourth of the programs.
            high = tl.cast(n // VEC * VEC, tl.int64)
            at = tl.cast(whole, tl.int64) * BLOCK + slots
            _scale_there(x_ptr + at, factor, at < high)
            # There are as many slots as threads, or threads would read what another has written.
            at = high + tl.arange(0, _SCALE_THREADS)
            _scale_there(x_ptr + at, factor, at < n)


_launch_scale = launcher(_lm_head_scale_kernel)


class TritonHead:
    """``HeadBackend`` of Triton kernels. Chunks keep their products even with ``once``: another
    exponential costs a GPU nothing."""

    by_columns: ClassVar[bool] = True

    @staticmethod
    def chunk_dtype(hidden: Tensor) -> torch.dtype:
        return hidden.dtype

    @staticmethod
    def fill(x, hidden, weight, bias, transform, library):
        library.multiply(x, hidden, weight, bias)

    @staticmethod
    def statistics(
        x, labels, transform, temperature, out, once=False, first=0, vocabulary=None, cut=False
    ):
        if not len(x):
            return
        with device_of(x):
            _launch_fwd(
                len(x), x, labels, temperature.per_row, temperature.number,
                None if transform.softcap is None else transform.inner, transform.outer,
                *out, x.shape[1], first, vocabulary or x.shape[1], x.stride(0),
                **window(x.shape[1], x.dtype), CUT=cut and transform.softcap is not None,
            )  # fmt: skip

    @staticmethod
    def gradients_(
        x, first, labels, transform, temperature, saved, upstream, once=False, cut=False
    ):
        shapes = window(x.shape[1], x.dtype)
        parts = parts_of(x.shape[1], shapes["VEC"])
        with device_of(x):
            _launch_bwd(
                len(x) * parts, x, labels, temperature.per_row, temperature.number,
                None if transform.softcap is None else transform.inner, transform.outer,
                transform.logit_scale, saved.unscaled_max, saved.exp_sum,
                None if upstream.entropies is None else saved.mean, *upstream,
                x.shape[1], first, parts, x.stride(0), **shapes, PART=PART_VECTORS * shapes["VEC"],
                CUT=cut and transform.softcap is not None,
            )  # fmt: skip

    @staticmethod
    def unscaled(x, transform):
        return x.float() if transform.softcap is None else torch.tanh(x.float() * transform.inner)

    @staticmethod
    def lowest(transform):
        return float("-inf")

    @staticmethod
    def restrict_(x, sets, rows, first, transform):
        if transform.softcap is not None:  # a cap gives a bias of -inf the logit -c
            x.clamp_(min=torch.finfo(x.dtype).min)
        restrict_(x, sets, rows, first)

    @staticmethod
    def scale_(x: Tensor, factor: Tensor) -> None:
        # A gradient may be transposed, like its tensor: this is its memory, in order.
        flat = x.as_strided((x.numel(),), (1,))
        programs = min(_SCALE_PROGRAMS, triton.cdiv(len(flat), _SCALE_BLOCK))
        if programs:
            with device_of(x):
                _launch_scale(programs, flat, factor, len(flat), BLOCK=_SCALE_BLOCK)
