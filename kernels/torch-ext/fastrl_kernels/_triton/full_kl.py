"""KL(policy || reference) over the vocabulary: one pass over both forward, one more backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import Backend
from ..rows import aligned_alike, as_rows_together, empty_rows_like
from .launch import launcher
from .logprob import LOG2E, LOWEST, online_softmax, row_temperature
from .rows import (
    PART_VECTORS,
    ROW_ARGUMENTS,
    align_down,
    load_end,
    parts_of,
    per_row,
    rotate,
    row_start,
    store_end,
    window,
)
from .tiles import device_of

_PIVOT_COLUMNS = tl.constexpr(256)


@triton.jit
def _pivot(start, V):
    """The maximum of a row's first columns: near its level, and found before the pass."""
    columns = tl.arange(0, _PIVOT_COLUMNS)
    x = tl.load(start + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
    pivot = tl.max(x, 0)
    return tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)


@triton.jit
def _difference(x, y, pivot, ref_pivot):
    """Δ = (x - pivot) - (y - ref_pivot), and 0 where x is -inf: its weight is 0 there."""
    return tl.where(x == float("-inf"), 0.0, (x - pivot) - (y - ref_pivot))


@triton.jit
def _accumulate(x, y, m, s, u, m_ref, s_ref, pivot, ref_pivot, scale):
    """Adds one pair of logits to each slot: both online softmaxes, and Σ 2^((x - m)·scale)·Δ."""
    a = -tl.abs(x - m) * scale
    e = tl.exp2(a)
    higher = x > m
    rescale = tl.where(higher, e, 1.0)
    term = tl.where(higher, 1.0, e)
    u = tl.fma(rescale, u, term * _difference(x, y, pivot, ref_pivot))
    s = tl.fma(rescale, s, term)
    m_ref, s_ref, _ = online_softmax(y, m_ref, s_ref, s_ref, scale, False)
    return tl.maximum(m, x), s, u, m_ref, s_ref


@triton.jit(do_not_specialize=ROW_ARGUMENTS)
def _full_kl_fwd_kernel(
    logits_ptr,  # [outer, inner, V]
    ref_ptr,  # [outer, inner, V], rows aligned as those of logits
    mask_ptr,  # [N] bool, or None: all count
    temperature_ptr,  # [N], or None: the number
    temperature,
    kl_ptr,  # [N] fp32
    saved_ptr,  # [5, N] fp32, or None: no backward to come. Both pivots, max x, Σ exp, E_p[Δ]
    n,
    V,
    inner,
    outer_stride,
    inner_stride,
    ref_outer_stride,
    ref_inner_stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    row = tl.program_id(0)
    if mask_ptr is not None:
        if tl.load(mask_ptr + row) == 0:
            tl.store(kl_ptr + row, 0.0)
            return

    scale = LOG2E / row_temperature(temperature_ptr, temperature, row)
    start = row_start(logits_ptr, row, inner, outer_stride, inner_stride)
    ref_start = row_start(ref_ptr, row, inner, ref_outer_stride, ref_inner_stride)
    pivot, ref_pivot = _pivot(start, V), _pivot(ref_start, V)
    aligned, shift = align_down(start, VEC)
    ref_aligned, _ = align_down(ref_start, VEC)
    end = shift + V
    last = tl.maximum((end - 1) // BLOCK, 1)  # window 1 is all masked where V fits in window 0

    slots = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    m_ref = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    s_ref = tl.zeros([BLOCK], tl.float32)
    u = tl.zeros([BLOCK], tl.float32)
    x = load_end(aligned, slots, shift, end, VEC)
    y = load_end(ref_aligned, slots, shift, end, VEC)
    m, s, u, m_ref, s_ref = _accumulate(x, y, m, s, u, m_ref, s_ref, pivot, ref_pivot, scale)
    for w in range(1, last):
        at = w * BLOCK + slots
        x = tl.load(aligned + at).to(tl.float32)
        y = tl.load(ref_aligned + at).to(tl.float32)
        m, s, u, m_ref, s_ref = _accumulate(x, y, m, s, u, m_ref, s_ref, pivot, ref_pivot, scale)
    x = load_end(aligned, last * BLOCK + slots, shift, end, VEC)
    y = load_end(ref_aligned, last * BLOCK + slots, shift, end, VEC)
    m, s, u, m_ref, s_ref = _accumulate(x, y, m, s, u, m_ref, s_ref, pivot, ref_pivot, scale)

    row_max = tl.max(m, 0)
    e = tl.exp2((m - row_max) * scale)
    row_sum = tl.sum(rotate(e * s, shift, BLOCK), 0)
    row_u = tl.sum(rotate(e * u, shift, BLOCK), 0)
    ref_max = tl.max(m_ref, 0)
    ref_sum = tl.sum(rotate(tl.exp2((m_ref - ref_max) * scale) * s_ref, shift, BLOCK), 0)
    mean = tl.div_rn(row_u, row_sum)
    below_max = mean - ((row_max - pivot) - (ref_max - ref_pivot))
    # Loaded a second time: through the loop, sm_100 would spill it.
    temperature = row_temperature(temperature_ptr, temperature, row, AGAIN=True)
    kl = tl.div_rn(below_max, temperature) - tl.log(tl.div_rn(row_sum, ref_sum))
    tl.store(kl_ptr + row, kl)
    if saved_ptr is not None:
        tl.store(saved_ptr + row, pivot)
        tl.store(saved_ptr + n + row, ref_pivot)
        tl.store(saved_ptr + 2 * n + row, row_max)
        tl.store(saved_ptr + 3 * n + row, row_sum)
        tl.store(saved_ptr + 4 * n + row, tl.where(kl == kl, mean, kl))  # NaN reaches the gradient


_launch_fwd = launcher(_full_kl_fwd_kernel)


def forward(logits, ref_logits, mask, temperature, number, *, save):
    """The KL per token, and [5, N] that backward needs of the rows."""
    vocabulary = logits.shape[-1]
    shapes = window(vocabulary, logits.dtype, ref_logits.dtype)
    rows, refs, inner, strides = _rows_of(logits, ref_logits, shapes["VEC"])
    kl = logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    n = kl.numel()
    saved = kl.new_empty(5, n) if save else None
    with device_of(logits):
        _launch_fwd(
            n, rows, refs, per_row(mask), per_row(temperature), number, kl, saved,
            n, vocabulary, inner, *strides, **shapes,
        )  # fmt: skip
    return kl, saved


def _rows_of(
    logits: Tensor, ref_logits: Tensor, vector: int
) -> tuple[Tensor, Tensor, int, tuple[int, ...]]:
    """Both logits as rows, the number of inner rows, and the strides of outer and inner rows, the
    policy's first; the reference is copied where its rows are not aligned as the policy's are.
    Contiguous logits stay as they are."""
    if logits.is_contiguous() and ref_logits.is_contiguous():
        start = logits.data_ptr() // logits.element_size()
        if (start - ref_logits.data_ptr() // ref_logits.element_size()) % vector == 0:
            vocabulary = logits.shape[-1]
            strides = 0, vocabulary, 0, vocabulary
            return logits, ref_logits, max(1, logits.numel() // vocabulary), strides
    rows, refs = as_rows_together(logits, ref_logits)
    if not aligned_alike(rows, refs, vector):
        refs = empty_rows_like(rows, ref_logits.dtype, vector).copy_(refs)
    return rows, refs, rows.shape[1], (*rows.stride()[:2], *refs.stride()[:2])


@triton.jit
def _dlogits(x, y, row_max, pivot, ref_pivot, mean, scale, slope):
    # Subtracted first: where one token has all the probability, its Δ and the mean are the same.
    apart = _difference(x, y, pivot, ref_pivot) - mean
    return tl.exp2((x - row_max) * scale) * (apart * slope)


@triton.jit(do_not_specialize=ROW_ARGUMENTS)
def _full_kl_bwd_kernel(
    grad_ptr,  # [N] fp32
    logits_ptr,  # [outer, inner, V]
    ref_ptr,  # [outer, inner, V], rows aligned as those of logits
    mask_ptr,  # [N] bool, or None: all count
    temperature_ptr,  # [N], or None: the number
    temperature,
    saved_ptr,  # [5, N] fp32, of the forward kernel
    dlogits_ptr,  # [outer, inner, V], rows aligned as those of logits
    n,
    V,
    parts,
    inner,
    outer_stride,
    inner_stride,
    ref_outer_stride,
    ref_inner_stride,
    d_outer_stride,
    d_inner_stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    PART: tl.constexpr,
):
    """dz = g p [log p - log q - KL]/T, for one of a row's parts of PART columns."""
    row = tl.program_id(0) // parts
    first = (tl.program_id(0) - row * parts) * PART
    slots = first + tl.arange(0, BLOCK)
    start = row_start(logits_ptr, row, inner, outer_stride, inner_stride)
    aligned, shift = align_down(start, VEC)
    ref_start = row_start(ref_ptr, row, inner, ref_outer_stride, ref_inner_stride)
    ref_aligned, _ = align_down(ref_start, VEC)
    d_start = row_start(dlogits_ptr, row, inner, d_outer_stride, d_inner_stride)
    d_aligned, _ = align_down(d_start, VEC)
    end = shift + V
    windows = tl.minimum(PART // BLOCK, tl.cdiv(end - first, BLOCK))
    if mask_ptr is not None:
        if tl.load(mask_ptr + row) == 0:
            zeros = tl.zeros([BLOCK], tl.float32)
            for w in range(windows):
                store_end(d_aligned, w * BLOCK + slots, zeros, shift, end, VEC)
            return

    # log p - log q - KL is (Δ - E_p[Δ])/T.
    temperature = row_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / temperature
    pivot, ref_pivot = tl.load(saved_ptr + row), tl.load(saved_ptr + n + row)
    row_max, mean = tl.load(saved_ptr + 2 * n + row), tl.load(saved_ptr + 4 * n + row)
    row_sum = tl.load(saved_ptr + 3 * n + row)
    slope = tl.div_rn(tl.load(grad_ptr + row), row_sum * temperature * temperature)
    if (first >= shift) & (first + PART <= end):
        for w in range(PART // BLOCK):
            at = w * BLOCK + slots
            x = tl.load(aligned + at).to(tl.float32)
            y = tl.load(ref_aligned + at).to(tl.float32)
            d = _dlogits(x, y, row_max, pivot, ref_pivot, mean, scale, slope)
            tl.store(d_aligned + at, d.to(dlogits_ptr.dtype.element_ty))
    else:
        for w in range(windows):
            at = w * BLOCK + slots
            x = load_end(aligned, at, shift, end, VEC)
            y = load_end(ref_aligned, at, shift, end, VEC)
            d = _dlogits(x, y, row_max, pivot, ref_pivot, mean, scale, slope)
            store_end(d_aligned, at, d, shift, end, VEC)


_launch_bwd = launcher(_full_kl_bwd_kernel)


def backward(grad, logits, ref_logits, mask, temperature, number, saved):
    n, vocabulary = grad.numel(), logits.shape[-1]
    shapes = window(vocabulary, logits.dtype, ref_logits.dtype)
    rows, refs, inner, strides = _rows_of(logits, ref_logits, shapes["VEC"])
    dlogits = empty_rows_like(rows, logits.dtype, shapes["VEC"])
    d_strides = strides[:2] if rows is logits else dlogits.stride()[:2]
    parts = parts_of(vocabulary, shapes["VEC"])
    with device_of(logits):
        _launch_bwd(
            n * parts, per_row(grad), rows, refs, per_row(mask), per_row(temperature), number,
            saved, dlogits, n, vocabulary, parts, inner, *strides, *d_strides,
            **shapes, PART=PART_VECTORS * shapes["VEC"],
        )  # fmt: skip
    return dlogits if dlogits.shape == logits.shape else dlogits.view(logits.shape)


PASSES = Backend(forward, backward)
