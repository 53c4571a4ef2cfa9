"""Attention of one new token per sequence, the tokens of its cache cut into splits.

A program takes SPLIT tokens of one row, for the query heads that share a head of keys; the one that
is done last merges what all of them found, in the order of the splits. Where splits begin depends
on a row's length and window alone, hence so do its bits. Splits without a live token are left out.

On AMD's GPUs a second kernel merges: there a program may arrive before the stores of its later
waves do, see ``last_program``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.compiler import is_compiling
from triton.runtime import driver

from ..dispatch import interpreting
from ..types import AttentionSettings
from .last_program import arrives_last
from .launch import launcher
from .logprob import LOG2E, LOWEST
from .tiles import accurate_tanh, device_of, dot, power_of_2, programs_for, target

SPLIT = 256  # tokens of a program
_PARTS = 16  # splits that are merged at a time
# How many of them are on their way from memory at a time: at most, and by a thread's registers.
_MOST_LOADED, _LOADED_REGISTERS = 8, 32
# Elements of keys that a program holds, by bytes per element: fp32 takes most of the registers.
_TILE_ELEMENTS = {2: 8192, 4: 1024}
_TILE_ELEMENTS_ON_AMD = {2: 8192, 4: 2048}
_HEADS = {2: 32, 4: 2}  # query heads that a program takes at most, likewise
_HEADS_OF_WIDE = 16  # of more than 256 columns, whose sums take more registers
_MERGE_TILE = (
    256  # numbers of a split that a program of the second kernel merges: a vector a thread
)
# Integers that change from call to call, or prove nothing: specialising on them only recompiles.
# Of strides, it has to be known whether they are multiples of 16 bytes.
_ARGUMENTS = ("kv_heads", "splits", "span", "window")


@triton.jit
def _live_tokens(lengths_ptr, row, span, window, chunk):
    """The row's length, and its live tokens [low, high): none of a row beyond the span."""
    length = tl.load(lengths_ptr + row)
    high = tl.where((length > 0) & (length <= span), length, 0).to(tl.int32)
    low = tl.maximum(high - window, 0)
    if chunk is not None:
        low = tl.maximum(low, tl.maximum(high - 1, 0) // chunk * chunk)
    return length, low, high


@triton.jit
def _with_sinks(exp_sum, m, sinks_ptr, head, there, factor):
    """Σ 2^(a - max) of scores and of their head's sink; 0 stays 0, where there is no score."""
    sink = tl.load(sinks_ptr + head, there, 0.0).to(tl.float32) * LOG2E
    return tl.where(exp_sum > 0.0, exp_sum + tl.exp2(sink - m * factor), exp_sum)


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


@triton.jit
def _merge(
    out_ptr,
    parts_ptr,
    sinks_ptr,
    number,  # of all parts
    first_head,  # of those that share keys
    member,  # the first of the heads to merge, among those
    splits,
    live,  # splits, two at least
    factor,
    kv_head,
    GROUP: tl.constexpr,
    MERGED: tl.constexpr,
    DV: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    LOADED: tl.constexpr,
):
    """Merges the live splits of some heads in their order. Reads past the first level of caches,
    which other processors' writes do not reach."""
    members = member + tl.arange(0, MERGED)
    columns = tl.arange(0, VALUE_WIDTH)
    there = members < GROUP  # without those that are for tensor cores alone
    inside = there[:, None] & (columns < DV)[None, :]
    head = first_head + members
    max_ptr = parts_ptr + number * DV + head * splits
    sum_ptr = max_ptr + number
    acc_ptr = parts_ptr + (head * splits * DV)[:, None] + columns[None, :]
    m = tl.full([MERGED], LOWEST, tl.float32)
    exp_sum = tl.zeros([MERGED], tl.float32)
    acc = tl.zeros([MERGED, VALUE_WIDTH], tl.float32)
    for first in range(0, live, PARTS):
        index = (first + tl.arange(0, PARTS))[None, :]
        mask = there[:, None] & (index < live)
        part_max = tl.load(max_ptr[:, None] + index, mask, LOWEST, cache_modifier=".cg")
        part_sum = tl.load(sum_ptr[:, None] + index, mask, 0.0, cache_modifier=".cg")
        higher = tl.maximum(m, tl.max(part_max, 1))
        rescale = tl.exp2((m - higher) * factor)
        weights = tl.exp2((part_max - higher[:, None]) * factor)
        m = higher
        exp_sum = exp_sum * rescale + tl.sum(weights * part_sum, 1)
        part_acc = tl.zeros([MERGED, VALUE_WIDTH], tl.float32)
        for loaded in range(first, tl.minimum(first + PARTS, live), LOADED):
            for i in tl.static_range(LOADED):
                one = loaded + tl.full([1], i, tl.int32)
                mask_one = there & (one < live)
                one_max = tl.load(max_ptr + one, mask_one, LOWEST, cache_modifier=".cg")
                mask_acc = inside & (one < live)[:, None]
                ptr = acc_ptr + (one * DV)[:, None]
                one_acc = tl.load(ptr, mask_acc, 0.0, cache_modifier=".cg")
                part_acc += tl.exp2((one_max - higher) * factor)[:, None] * one_acc
        acc = acc * rescale[:, None] + part_acc
    if sinks_ptr is not None:
        exp_sum = _with_sinks(exp_sum, m, sinks_ptr, kv_head * GROUP + members, there, factor)
    out = (acc / exp_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (head * DV)[:, None] + columns[None, :], out, mask=inside)


@triton.jit(do_not_specialize=_ARGUMENTS)
def _decode_attention_fwd_kernel(
    query_ptr,  # [B, Hq, D]
    keys_ptr,  # [S, M, Hkv, D]
    values_ptr,  # [S, M, Hkv, DV]
    lengths_ptr,  # [B] integer
    inner,  # number, or None: no softcap
    outer,  # number
    out_ptr,  # [B, Hq, DV]
    # Each split's Σ 2^a·v with a = (score - max)·outer·log2(e), [B, Hq, splits, DV]; the max of
    # q·k or tanh(inner·q·k), [B, Hq, splits]; and Σ 2^a, [B, Hq, splits].
    parts_ptr,  # fp32, one behind the other, or None: one split
    arrivals_ptr,  # [B, Hkv, BLOCKS] int32, 0 between launches, or None: another kernel merges
    sinks_ptr,  # [Hq], or None
    kv_heads,
    splits,
    span,
    window,
    chunk,  # number, or None
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
    WIDTH: tl.constexpr,  # columns of keys, and
    REST: tl.constexpr,  # the columns behind those, or 0: 576 are 512 and 64
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,  # at least a tile
    TILE: tl.constexpr,
    DOT: tl.constexpr,
    WIDE: tl.constexpr,
    MERGED: tl.constexpr,  # heads that are merged at a time
    PARTS: tl.constexpr,
    LOADED: tl.constexpr,
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

    length, low, high = _live_tokens(lengths_ptr, row, span, window, chunk)
    start = (low // SPLIT + split) * SPLIT
    stop = tl.minimum(start + SPLIT, high)
    if parts_ptr is not None:
        if (start >= stop) & (split > 0):  # the first stores the result of a row without tokens
            return

    member = block * HEADS + tl.arange(0, HEADS)
    head = kv_head * GROUP + member
    columns = tl.arange(0, WIDTH)
    value_columns = tl.arange(0, VALUE_WIDTH)
    query_ptr += row.to(tl.int64) * query_row_stride
    heads_ptr = query_ptr + head.to(tl.int64)[:, None] * query_head_stride
    mask = (member < GROUP)[:, None] & (columns < D)[None, :]
    query = tl.load(heads_ptr + columns[None, :], mask, 0.0)
    if REST > 0:
        rest_columns = WIDTH + tl.arange(0, REST)
        mask = (member < GROUP)[:, None] & (rest_columns < D)[None, :]
        query_rest = tl.load(heads_ptr + rest_columns[None, :], mask, 0.0)
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
        if REST > 0:
            keys = _load_tokens(keys_ptr, tokens, low, high, key_token_stride, rest_columns, D)
            if DOT:
                x = dot(query_rest, tl.trans(keys), x, WIDE)
            else:
                x += tl.sum(query_rest[:, None, :] * keys[None, :, :], 2)
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

    # Anew, so that the loop need not hold it all in registers.
    at = tl.program_id(0).to(tl.int64)
    row = at // (splits.to(tl.int64) * kv_heads * BLOCKS)
    kv_head = at // BLOCKS % kv_heads
    block = at % BLOCKS
    split = at // (BLOCKS * kv_heads) % splits
    member = (block * HEADS).to(tl.int32) + tl.arange(0, HEADS)
    length, low, high = _live_tokens(lengths_ptr, row, span, window, chunk)
    live = tl.cdiv(high, SPLIT) - low // SPLIT  # splits
    first_head = row.to(tl.int64) * (kv_heads * GROUP) + kv_head * GROUP
    there = member < GROUP
    part = (first_head + member) * splits + split
    mask = there[:, None] & (value_columns < DV)[None, :]
    out = out_ptr + ((first_head + member) * DV)[:, None] + value_columns[None, :]
    whole = exp_sum
    if sinks_ptr is not None:
        whole = _with_sinks(exp_sum, m, sinks_ptr, kv_head * GROUP + member, there, factor)
    if parts_ptr is None:
        _store_row(out, acc, whole[:, None], length, mask)
    elif live <= 1:
        _store_row(out, acc, whole[:, None], length, mask)
    else:
        number = (tl.num_programs(0) // BLOCKS).to(tl.int64) * GROUP  # of all parts
        tl.store(parts_ptr + (part * DV)[:, None] + value_columns[None, :], acc, mask=mask)
        tl.store(parts_ptr + number * DV + part, m, mask=there)
        tl.store(parts_ptr + number * (DV + 1) + part, exp_sum, mask=there)
        if arrivals_ptr is not None:
            arrivals_ptr += (row.to(tl.int64) * kv_heads + kv_head) * BLOCKS + block
            if arrives_last(arrivals_ptr, live):
                _merge(
                    out_ptr, parts_ptr, sinks_ptr, number, first_head, block * HEADS, splits, live,
                    factor, kv_head, GROUP, MERGED, DV, VALUE_WIDTH, PARTS, LOADED,
                )  # fmt: skip


@triton.jit(do_not_specialize=_ARGUMENTS)
def _decode_attention_merge_kernel(
    lengths_ptr,  # [B] integer
    outer,  # number
    out_ptr,  # [B, Hq, DV]
    parts_ptr,  # as above
    sinks_ptr,  # [Hq], or None
    kv_heads,
    splits,
    span,
    window,
    chunk,  # number, or None
    DV: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,
    PARTS: tl.constexpr,
    LOADED: tl.constexpr,
):
    BLOCKS: tl.constexpr = (GROUP + MERGED - 1) // MERGED
    at = tl.program_id(0)
    block = at % BLOCKS
    at = at // BLOCKS  # of heads of keys
    _, low, high = _live_tokens(lengths_ptr, at // kv_heads, span, window, chunk)
    live = tl.cdiv(high, SPLIT) - low // SPLIT
    if live > 1:
        factor = tl.cast(outer, tl.float32) * LOG2E
        number = (tl.num_programs(0) // BLOCKS).to(tl.int64) * (splits * GROUP)
        _merge(
            out_ptr, parts_ptr, sinks_ptr, number, at.to(tl.int64) * GROUP, block * MERGED, splits,
            live, factor, at % kv_heads, GROUP, MERGED, DV, VALUE_WIDTH, PARTS, LOADED,
        )  # fmt: skip


_launch_fwd = launcher(_decode_attention_fwd_kernel)
_launch_merge = launcher(_decode_attention_merge_kernel)


@torch.compiler.assume_constant_result
def _on_amd() -> bool:
    return target()[0] == "hip"


def _merges_itself() -> bool:
    """Whether the last program merges, see above."""
    return not _on_amd()


def _stream(x: Tensor) -> int:
    """The stream on which kernels take x."""
    if is_compiling() or not x.is_cuda:
        return 0
    return driver.active.get_current_stream(x.get_device())


def _shapes(
    heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype, elements: int
) -> dict[str, Any]:
    """Sizes of tiles, of ``elements`` of keys at most: by dtype and the widths and numbers of heads
    only."""
    size = dtype.itemsize
    group = heads // kv_heads
    dot = size == 2  # fp32 would lose digits on tensor cores
    key_tile, value_tile = power_of_2(max(16, width)), power_of_2(max(16, value_width))
    rest = 0
    if width > 256 and key_tile > width:
        key_tile //= 2
        rest = power_of_2(max(16, width - key_tile))
    widest = max(key_tile, value_tile)
    # Fewer heads fit into registers where sums are wide.
    some = min(_HEADS[size], power_of_2(group), _HEADS_OF_WIDE if widest > 256 else 32)
    warps = 4 if widest <= 128 else 8  # more would spill with 4
    registers = max(1, some * value_tile // (32 * warps))  # of a split that is merged
    return {
        "D": width,
        "DV": value_width,
        "GROUP": group,
        "HEADS": max(16, some) if dot else some,
        "WIDTH": key_tile,
        "REST": rest,
        "VALUE_WIDTH": value_tile,
        "TILE": min(64, max(16, elements // widest)),
        "DOT": dot,
        "WIDE": interpreting(),
        "MERGED": some,
        "PARTS": _PARTS,
        "LOADED": min(_MOST_LOADED, max(1, _LOADED_REGISTERS // registers)),
        "num_warps": warps,
    }


_kept_shapes = functools.cache(_shapes)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    arrivals: Callable[[int, int], Tensor],
    sinks: Tensor | None,
    a: AttentionSettings,
) -> Tensor:
    """``decode_attention`` of checked arguments; ``arrivals`` is ``LiveTokens.arrivals``."""
    batch, heads, key_width = query.shape
    _, _, kv_heads, width = values.shape
    out = torch.empty((batch, heads, width), dtype=query.dtype, device=query.device)
    if batch == 0:
        return out
    query = query if query.stride(-1) == 1 else query.contiguous()
    lengths = lengths.contiguous()
    sinks = sinks if sinks is None else sinks.contiguous()
    chunk = a.chunk if a.chunk < a.span else None
    # A window may touch one split more than it fills.
    splits = min(programs_for(a.span, SPLIT), programs_for(a.window - 1, SPLIT) + 1)
    elements = _TILE_ELEMENTS_ON_AMD if _on_amd() else _TILE_ELEMENTS
    shapes = (_shapes if is_compiling() else _kept_shapes)(
        heads, kv_heads, key_width, width, query.dtype, elements[query.element_size()]
    )
    programs = batch * kv_heads * programs_for(shapes["GROUP"], shapes["HEADS"])
    parts = counters = None
    if splits > 1:
        number = batch * heads * splits * (width + 2)
        parts = torch.empty(number, dtype=torch.float32, device=query.device)
        counters = arrivals(programs, _stream(query)) if _merges_itself() else None
    query_strides, key_strides, value_strides = query.stride(), keys.stride(), values.stride()
    with device_of(query):
        _launch_fwd(
            programs * splits,
            query, keys, values, lengths, a.inner, a.outer, out, parts, counters, sinks,
            kv_heads, splits, a.span, a.window, chunk, query_strides[0], query_strides[1],
            key_strides[0], key_strides[1], key_strides[2],
            value_strides[0], value_strides[1], value_strides[2],
            SPLIT=SPLIT, **shapes,
        )  # fmt: skip
        if parts is not None and counters is None:
            merged = max(1, _MERGE_TILE // shapes["VALUE_WIDTH"])
            _launch_merge(
                batch * kv_heads * programs_for(shapes["GROUP"], merged),
                lengths, a.outer, out, parts, sinks, kv_heads, splits, a.span, a.window, chunk,
                DV=width, GROUP=shapes["GROUP"], VALUE_WIDTH=shapes["VALUE_WIDTH"], SPLIT=SPLIT,
                MERGED=merged, PARTS=_PARTS, LOADED=_MOST_LOADED, num_warps=1,
            )  # fmt: skip
    return out
