"""Attention of one new token per sequence, the tokens of its cache cut into splits.

A program takes SPLIT tokens of one row, for the query heads that share a head of keys; a second
kernel merges what they found in the order of the splits. Where splits begin depends on a row's
length and window alone, hence so do its bits. Splits without a live token are left out.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dispatch import interpreting
from ..types import AttentionSettings
from .logprob import LOG2E, LOWEST
from .tiles import accurate_tanh, device_of, dot

SPLIT = 256  # tokens of a program
_PARTS = 16  # splits that are merged at a time
_TILE_ELEMENTS = {2: 8192, 4: 2048}  # of keys that a program holds, by bytes per element
_HEADS = {2: 32, 4: 2}  # query heads that a program takes at most, likewise
# Integers that change from call to call, or prove nothing: specialising on them only recompiles.
# Of strides, it has to be known whether they are multiples of 16 bytes.
_ARGUMENTS = ("heads", "kv_heads", "splits", "span", "window")


@triton.jit
def _live_tokens(lengths_ptr, row, span, window):
    """The row's length, and its live tokens [low, high): none of a row beyond the span."""
    length = tl.load(lengths_ptr + row)
    high = tl.where((length > 0) & (length <= span), length, 0).to(tl.int32)
    return length, tl.maximum(high - window, 0), high


@triton.jit
def _store_row(ptr, acc, exp_sum, length, mask):
    """acc/sum; 0 of a row without tokens, and 0/0 = NaN of one beyond the span."""
    x = tl.where(length > 0, acc / exp_sum, 0.0)
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_tokens(ptr, tokens, low, high, stride, columns, D: tl.constexpr):
    """Live tokens of a tile, and 0 elsewhere, where memory may be NaN."""
    mask = ((tokens >= low) & (tokens < high))[:, None]
    if columns.shape[0] != D:
        mask = mask & (columns < D)[None, :]
    return tl.load(ptr + (tokens.to(tl.int64) * stride)[:, None] + columns[None, :], mask, 0.0)


@triton.jit(do_not_specialize=_ARGUMENTS)
def _decode_attention_fwd_kernel(
    query_ptr,  # [B, Hq, D]
    keys_ptr,  # [S, M, Hkv, D]
    values_ptr,  # [S, M, Hkv, DV]
    lengths_ptr,  # [B] integer
    inner,  # number, or None: no softcap
    outer,  # number
    out_ptr,  # [B, Hq, DV], or None: there are splits to merge
    max_ptr,  # [B, Hq, splits] fp32, or None: one split. max of q·k or tanh(inner·q·k)
    sum_ptr,  # [B, Hq, splits] fp32, likewise. Σ 2^a with a = (score - max)·outer·log2(e)
    acc_ptr,  # [B, Hq, splits, DV] fp32, likewise. Σ 2^a·v
    kv_heads,
    splits,
    span,
    window,
    query_row_stride,
    query_head_stride,
    key_slot_stride,
    key_token_stride,
    key_head_stride,
    value_slot_stride,
    value_token_stride,
    value_head_stride,
    D: tl.constexpr,
    DV: tl.constexpr,
    GROUP: tl.constexpr,  # query heads to a head of keys
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # The heads of a token are contiguous: programs that run together read one piece of memory.
    at = tl.program_id(0)
    block = at % BLOCKS
    at = at // BLOCKS
    kv_head = at % kv_heads
    at = at // kv_heads
    split = at % splits
    row = at // splits

    length, low, high = _live_tokens(lengths_ptr, row, span, window)
    start = (low // SPLIT + split) * SPLIT
    stop = tl.minimum(start + SPLIT, high)
    if out_ptr is None:
        if start >= stop:
            return

    member = block * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + member
    columns = tl.arange(0, WIDTH)
    value_columns = tl.arange(0, VALUE_WIDTH)
    query_ptr += row.to(tl.int64) * query_row_stride
    offset = head.to(tl.int64)[:, None] * query_head_stride + columns[None, :]
    mask = (member < GROUP)[:, None] & (columns < D)[None, :]
    query = tl.load(query_ptr + offset, mask, 0.0)
    keys_ptr += row.to(tl.int64) * key_slot_stride + kv_head.to(tl.int64) * key_head_stride
    values_ptr += row.to(tl.int64) * value_slot_stride + kv_head.to(tl.int64) * value_head_stride

    factor = tl.cast(outer, tl.float32) * LOG2E
    m = tl.full([HEADS], LOWEST, tl.float32)
    exp_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, VALUE_WIDTH], tl.float32)
    for first in range(tl.maximum(start, low // TILE * TILE), stop, TILE):
        tokens = first + tl.arange(0, TILE)
        keys = _load_tokens(keys_ptr, tokens, low, high, key_token_stride, columns, D)
        if DOT:
            x = dot(query, tl.trans(keys), tl.zeros([HEADS, TILE], tl.float32), WIDE)
        else:
            x = tl.sum(query[:, None, :] * keys[None, :, :], 2)
        if inner is not None:
            x = accurate_tanh(x * tl.cast(inner, tl.float32))
        x = tl.where(((tokens >= low) & (tokens < high))[None, :], x, float("-inf"))
        higher = tl.maximum(m, tl.max(x, 1))
        rescale = tl.exp2((m - higher) * factor)
        e = tl.exp2((x - higher[:, None]) * factor)
        m = higher
        exp_sum = exp_sum * rescale + tl.sum(e, 1)
        acc = acc * rescale[:, None]
        values = _load_tokens(values_ptr, tokens, low, high, value_token_stride, value_columns, DV)
        if DOT:
            acc = dot(e.to(values.dtype), values, acc, WIDE)
        else:
            acc += tl.sum(e[:, :, None] * values[None, :, :], 1)

    at = row.to(tl.int64) * (kv_heads * GROUP) + head
    mask = (member < GROUP)[:, None] & (value_columns < DV)[None, :]
    if out_ptr is not None:
        ptr = out_ptr + at[:, None] * DV + value_columns[None, :]
        _store_row(ptr, acc, exp_sum[:, None], length, mask)
    else:
        at = at * splits + split
        tl.store(max_ptr + at, m, mask=member < GROUP)
        tl.store(sum_ptr + at, exp_sum, mask=member < GROUP)
        tl.store(acc_ptr + at[:, None] * DV + value_columns[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=_ARGUMENTS)
def _decode_attention_merge_kernel(
    lengths_ptr,  # [B] integer
    outer,  # number
    max_ptr,  # [B, Hq, splits] fp32
    sum_ptr,  # [B, Hq, splits] fp32
    acc_ptr,  # [B, Hq, splits, DV] fp32
    out_ptr,  # [B, Hq, DV]
    heads,
    splits,
    span,
    window,
    DV: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    length, low, high = _live_tokens(lengths_ptr, at // heads, span, window)
    count = tl.cdiv(high, SPLIT) - low // SPLIT
    factor = tl.cast(outer, tl.float32) * LOG2E
    columns = tl.arange(0, VALUE_WIDTH)
    # A vector of one element, as the other kernel has one for each head.
    m = tl.full([1], LOWEST, tl.float32)
    exp_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([VALUE_WIDTH], tl.float32)
    for first in range(0, count, PARTS):
        index = first + tl.arange(0, PARTS)
        part = at * splits + index
        part_max = tl.load(max_ptr + part, mask=index < count, other=LOWEST)
        part_sum = tl.load(sum_ptr + part, mask=index < count, other=0.0)
        mask = (index < count)[:, None] & (columns < DV)[None, :]
        part_acc = tl.load(acc_ptr + part[:, None] * DV + columns[None, :], mask, 0.0)
        higher = tl.maximum(m, tl.max(part_max, 0))
        rescale = tl.exp2((m - higher) * factor)
        weights = tl.exp2((part_max - higher) * factor)
        m = higher
        exp_sum = exp_sum * rescale + tl.sum(weights * part_sum, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * part_acc, 0)
    _store_row(out_ptr + at * DV + columns, acc, exp_sum, length, columns < DV)


def _shapes(query: Tensor, keys: Tensor, values: Tensor) -> dict[str, Any]:
    """Sizes of tiles: by dtype and the widths and numbers of heads only."""
    size = query.element_size()
    group = query.shape[1] // keys.shape[2]
    heads = min(_HEADS[size], triton.next_power_of_2(group))
    dot = size == 2  # fp32 would lose digits on tensor cores
    width, value_width = (max(16, triton.next_power_of_2(x.shape[-1])) for x in (keys, values))
    return {
        "D": keys.shape[-1],
        "DV": values.shape[-1],
        "GROUP": group,
        "HEADS": max(16, heads) if dot else heads,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "SPLIT": SPLIT,
        "TILE": min(64, max(16, _TILE_ELEMENTS[size] // max(width, value_width))),
        "DOT": dot,
        "WIDE": interpreting(),
        "num_warps": 4 if max(width, value_width) <= 128 else 8,  # more would spill with 4
    }


def attend(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, a: AttentionSettings
) -> Tensor:
    """``decode_attention`` of checked arguments; one launch where a split is all there is."""
    batch, heads, _ = query.shape
    kv_heads, width = values.shape[2:]
    out = torch.empty(batch, heads, width, dtype=query.dtype, device=query.device)
    if batch == 0:
        return out
    query = query if query.stride(-1) == 1 else query.contiguous()
    lengths = lengths.contiguous()
    # A window may touch one split more than it fills.
    splits = min(triton.cdiv(a.span, SPLIT), triton.cdiv(a.window - 1, SPLIT) + 1)
    shapes = _shapes(query, keys, values)
    parts: list[Tensor | None] = [None, None, None]
    if splits > 1:
        parts = [
            torch.empty(batch, heads, splits, *more, dtype=torch.float32, device=query.device)
            for more in ((), (), (width,))
        ]
    programs = batch * splits * kv_heads * triton.cdiv(shapes["GROUP"], shapes["HEADS"])
    with device_of(query):
        _decode_attention_fwd_kernel[(programs,)](
            query, keys, values, lengths, a.inner, a.outer, None if splits > 1 else out, *parts,
            kv_heads, splits, a.span, a.window,
            *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
            **shapes,
        )  # fmt: skip
        if splits > 1:
            _decode_attention_merge_kernel[(batch * heads,)](
                lengths, a.outer, *parts, out, heads, splits, a.span, a.window,
                DV=width, VALUE_WIDTH=shapes["VALUE_WIDTH"], SPLIT=SPLIT, PARTS=_PARTS,
            )  # fmt: skip
    return out
