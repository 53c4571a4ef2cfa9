"""Label log-probabilities and entropies of logits: one pass forward, one pass backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import types
from ..dispatch import Backend
from ..rows import empty_rows_like, row_walk
from ..types import IGNORE_LABEL
from .launch import launcher
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

_IGNORE = tl.constexpr(IGNORE_LABEL)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(types.LOWEST)  # where a running maximum starts
# Replaces -inf where 2^x·x has to be 0: 2 to this power is 0.
FLOOR = tl.constexpr(-200.0)


@triton.jit
def online_softmax(x, m, s, t, scale, ENTROPY: tl.constexpr):
    """Adds one logit to each slot's m = max x, s = Σ 2^a and t = Σ 2^a·a, with a = (x - m)·scale.

    One exponential per element: 2^(-|x - m|·scale) rescales the sums where x is a new maximum, and
    is x's own term where it is not. Multiply-adds are explicit, so that every use rounds alike.
    """
    a = -tl.abs(x - m) * scale
    e = tl.exp2(a)
    higher = x > m
    rescale = tl.where(higher, e, 1.0)
    if ENTROPY:
        t = tl.fma(rescale, t, e * tl.maximum(a, FLOOR) * tl.where(higher, s, 1.0))
    s = tl.fma(rescale, s, tl.where(higher, 1.0, e))
    return tl.maximum(m, x), s, t


@triton.jit
def _added(x, high, s, t, r, scale, ENTROPY: tl.constexpr):
    """Adds one logit, at most ``high``, to each slot's t and to r times its s."""
    a = (x - high) * scale
    e = tl.exp2(a)
    if ENTROPY:
        t = tl.fma(e, tl.maximum(a, FLOOR), t)
    return tl.fma(r, s, e), t


@triton.jit
def four_added(x0, x1, x2, x3, m, s, t, scale, ENTROPY: tl.constexpr):
    """``online_softmax`` of four logits per slot, with one more exponential for all of them where
    each would take a comparison and three selections."""
    high = tl.maximum(m, tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)))
    a = (m - high) * scale
    r = tl.exp2(a)
    if ENTROPY:
        t = r * tl.fma(s, tl.maximum(a, FLOOR), t)
    s, t = _added(x0, high, s, t, r, scale, ENTROPY)
    s, t = _added(x1, high, s, t, 1.0, scale, ENTROPY)
    s, t = _added(x2, high, s, t, 1.0, scale, ENTROPY)
    s, t = _added(x3, high, s, t, 1.0, scale, ENTROPY)
    return high, s, t


@triton.jit
def _window_of(aligned, w, slots, shift, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """Columns [w·BLOCK, (w + 1)·BLOCK) of a row that starts ``shift`` past a boundary, each in slot
    (column + shift) mod BLOCK: its last ones lie in the next window's first vector."""
    x = tl.load(aligned + (w * BLOCK + slots)).to(tl.float32)
    behind = tl.load(aligned + ((w + 1) * BLOCK + slots), mask=slots < VEC, other=0.0)
    return tl.where(slots < shift, behind.to(tl.float32), x)


@triton.jit
def row_temperature(temperature_ptr, temperature, row, AGAIN: tl.constexpr = False):
    """The row's temperature in fp32; AGAIN loads it a second time, which frees a register."""
    if temperature_ptr is not None:
        return tl.load(temperature_ptr + row, volatile=AGAIN).to(tl.float32)
    return tl.full([], temperature, tl.float32)


@triton.jit
def row_counts(label, mask_ptr, row):
    counted = label != _IGNORE
    if mask_ptr is not None:
        counted = counted & (tl.load(mask_ptr + row) != 0)
    return counted


@triton.jit(do_not_specialize=ROW_ARGUMENTS)
def _token_logprobs_fwd_kernel(
    logits_ptr,  # [outer, inner, V]
    labels_ptr,  # [N] integer
    mask_ptr,  # [N] bool, or None: all count
    temperature_ptr,  # [N], or None: the number
    temperature,
    logprobs_ptr,  # [N] fp32
    entropies_ptr,  # [N] fp32, or None: not wanted
    saved_ptr,  # [2 or, with entropies, 3, N] fp32, or None: no backward to come.
    # max_v x_v, Σ_v exp((x_v - max)/T), (E[x] - max)/T
    n,
    V,
    inner,
    outer_stride,
    inner_stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    ENTROPY: tl.constexpr = entropies_ptr is not None
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row).to(tl.int64)
    if row_counts(label, mask_ptr, row) == 0:
        tl.store(logprobs_ptr + row, 0.0)
        if ENTROPY:
            tl.store(entropies_ptr + row, 0.0)
        return

    temperature = row_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / temperature
    start = row_start(logits_ptr, row, inner, outer_stride, inner_stride)
    aligned, shift = align_down(start, VEC)
    slots = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    # Which columns are added in one step depends on V alone, not on where the row starts.
    fours = (V - 1) // (4 * BLOCK)
    if shift == 0:
        for w in range(0, 4 * fours, 4):
            at = aligned + (w * BLOCK + slots)
            x0 = tl.load(at).to(tl.float32)
            x1 = tl.load(at + BLOCK).to(tl.float32)
            x2 = tl.load(at + 2 * BLOCK).to(tl.float32)
            x3 = tl.load(at + 3 * BLOCK).to(tl.float32)
            m, s, t = four_added(x0, x1, x2, x3, m, s, t, scale, ENTROPY)
    else:
        for w in range(0, 4 * fours, 4):
            x0 = _window_of(aligned, w, slots, shift, BLOCK, VEC)
            x1 = _window_of(aligned, w + 1, slots, shift, BLOCK, VEC)
            x2 = _window_of(aligned, w + 2, slots, shift, BLOCK, VEC)
            x3 = _window_of(aligned, w + 3, slots, shift, BLOCK, VEC)
            m, s, t = four_added(x0, x1, x2, x3, m, s, t, scale, ENTROPY)
    end = shift + V
    for w in range(4 * fours, tl.cdiv(V, BLOCK)):
        x = load_end(aligned, w * BLOCK + slots, shift, end, VEC)
        behind = load_end(aligned, (w + 1) * BLOCK + slots, shift, end, VEC)
        x = tl.where(slots < shift, behind, x)
        m, s, t = online_softmax(x, m, s, t, scale, ENTROPY)

    row_max = tl.max(m, 0)
    a = (m - row_max) * scale
    e = tl.exp2(a)
    row_sum = tl.sum(rotate(e * s, shift, BLOCK), 0)
    log_sum = tl.log(row_sum)
    # A label outside [0, V) is never read: its log-probability is NaN.
    known = (label >= 0) & (label < V)
    x_label = tl.load(start + label, mask=known, other=float("nan")).to(tl.float32)
    tl.store(logprobs_ptr + row, tl.div_rn(x_label - row_max, temperature) - log_sum)
    if saved_ptr is not None:
        tl.store(saved_ptr + row, row_max)
        tl.store(saved_ptr + n + row, row_sum)
    if ENTROPY:
        t = e * tl.fma(s, tl.maximum(a, FLOOR), t)
        mean = tl.sum(rotate(t, shift, BLOCK), 0) / row_sum * LN2
        tl.store(entropies_ptr + row, log_sum - mean)
        if saved_ptr is not None:
            tl.store(saved_ptr + 2 * n + row, mean)


_launch_fwd = launcher(_token_logprobs_fwd_kernel)


def forward(logits, labels, mask, temperature, number, *, entropy, save):
    """Log-probabilities, entropies, and what backward needs of each row, [2 or 3, N]."""
    rows, *walk = row_walk(logits)
    n, vocabulary = labels.numel(), logits.shape[-1]
    logprobs = logits.new_empty(labels.shape, dtype=torch.float32)
    entropies = torch.empty_like(logprobs) if entropy else None
    saved = logprobs.new_empty(3 if entropy else 2, n) if save else None
    with device_of(logits):
        _launch_fwd(
            n, rows, per_row(labels), per_row(mask), per_row(temperature), number,
            logprobs, entropies, saved, n, vocabulary, *walk, **window(vocabulary, logits.dtype),
        )  # fmt: skip
    return logprobs, entropies, saved


@triton.jit
def dlogits_of(x, is_label, row_max, scale, at_label, base, slope, ENTROPY: tl.constexpr):
    a = (x - row_max) * scale
    weight = tl.fma(tl.maximum(a, FLOOR), slope, base) if ENTROPY else base
    return tl.fma(-tl.exp2(a), weight, tl.where(is_label, at_label, 0.0))


@triton.jit(do_not_specialize=ROW_ARGUMENTS)
def _token_logprobs_bwd_kernel(
    grad_logprobs_ptr,  # [N] fp32
    grad_entropies_ptr,  # [N] fp32, or None: no gradient through entropies
    logits_ptr,  # [outer, inner, V]
    labels_ptr,  # [N] integer
    mask_ptr,  # [N] bool, or None: all count
    temperature_ptr,  # [N], or None: the number
    temperature,
    saved_ptr,  # [2 or, with entropies, 3, N] fp32, of the forward kernel
    dlogits_ptr,  # [outer, inner, V], rows aligned as those of logits
    n,
    V,
    parts,
    inner,
    outer_stride,
    inner_stride,
    d_outer_stride,
    d_inner_stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
    PART: tl.constexpr,
):
    """dz = [g (1_y - p) - g_H p (z - E[z])]/T, for one of a row's parts of PART columns."""
    ENTROPY: tl.constexpr = grad_entropies_ptr is not None
    row = tl.program_id(0) // parts
    first = (tl.program_id(0) - row * parts) * PART
    slots = first + tl.arange(0, BLOCK)
    start = row_start(logits_ptr, row, inner, outer_stride, inner_stride)
    aligned, shift = align_down(start, VEC)
    d_start = row_start(dlogits_ptr, row, inner, d_outer_stride, d_inner_stride)
    d_aligned, _ = align_down(d_start, VEC)
    end = shift + V
    windows = tl.minimum(PART // BLOCK, tl.cdiv(end - first, BLOCK))
    label = tl.load(labels_ptr + row).to(tl.int64)
    if row_counts(label, mask_ptr, row) == 0:
        zeros = tl.zeros([BLOCK], tl.float32)
        for w in range(windows):
            store_end(d_aligned, w * BLOCK + slots, zeros, shift, end, VEC)
        return

    # With p = e/s, a row's gradient is 1_y·at_label - e·(base + a·slope).
    temperature = row_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / temperature
    row_max = tl.load(saved_ptr + row)
    row_sum = tl.load(saved_ptr + n + row)
    at_label = tl.div_rn(tl.load(grad_logprobs_ptr + row), temperature)
    # Divided in this order, both are the same number where p = 1, and the gradient is exactly 0.
    # A label outside [0, V) has no log-probability, and no gradient either.
    base = tl.where((label >= 0) & (label < V), tl.div_rn(at_label, row_sum), float("nan"))
    slope = 0.0
    if ENTROPY:
        g_entropy = tl.div_rn(tl.load(grad_entropies_ptr + row), row_sum * temperature)
        base -= g_entropy * tl.load(saved_ptr + 2 * n + row)
        slope = g_entropy * LN2
    label_slot = shift + label.to(tl.int32)
    if (first >= shift) & (first + PART <= end):
        for w in range(PART // BLOCK):
            at = w * BLOCK + slots
            x = tl.load(aligned + at).to(tl.float32)
            d = dlogits_of(x, at == label_slot, row_max, scale, at_label, base, slope, ENTROPY)
            tl.store(d_aligned + at, d.to(dlogits_ptr.dtype.element_ty))
    else:
        for w in range(windows):
            at = w * BLOCK + slots
            x = load_end(aligned, at, shift, end, VEC)
            d = dlogits_of(x, at == label_slot, row_max, scale, at_label, base, slope, ENTROPY)
            store_end(d_aligned, at, d, shift, end, VEC)


_launch_bwd = launcher(_token_logprobs_bwd_kernel)


def backward(grad_logprobs, grad_entropies, logits, labels, mask, temperature, number, saved):
    rows, *walk = row_walk(logits)
    n, vocabulary = labels.numel(), logits.shape[-1]
    if grad_logprobs is None:
        grad_logprobs = torch.zeros(labels.shape, device=logits.device)
    shapes = window(vocabulary, logits.dtype)
    dlogits = empty_rows_like(rows, logits.dtype, shapes["VEC"])
    strides = walk[1:] if logits.is_contiguous() else dlogits.stride()[:2]
    parts = parts_of(vocabulary, shapes["VEC"])
    with device_of(logits):
        _launch_bwd(
            n * parts, per_row(grad_logprobs), per_row(grad_entropies),
            rows, per_row(labels), per_row(mask), per_row(temperature), number,
            saved, dlogits, n, vocabulary, parts, *walk, *strides,
            **shapes, PART=PART_VECTORS * shapes["VEC"],
        )  # fmt: skip
    return dlogits if dlogits.shape == logits.shape else dlogits.view(logits.shape)


PASSES = Backend(forward, backward)
