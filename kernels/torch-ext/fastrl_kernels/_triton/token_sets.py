"""Cuts rows of logits to their sets of tokens, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..token_sets import TokenSets
from .launch import launcher
from .rows import window
from .tiles import device_of

_ONLY = tl.constexpr(0)
_BUT = tl.constexpr(1)
_BITS = tl.constexpr(2)


@triton.jit
def _columns_of(data_ptr, at, count, first, C):
    """Columns that ids name, and which of them x has."""
    columns = tl.load(data_ptr + at, mask=at < count, other=-1) - first
    return columns, (at < count) & (columns >= 0) & (columns < C)


@triton.jit
def _keep(x_ptr, kept_ptr, data_ptr, at, count, first, C):
    columns, here = _columns_of(data_ptr, at, count, first, C)
    tl.store(kept_ptr + at, tl.load(x_ptr + columns, mask=here), mask=here)


@triton.jit
def _put_back(x_ptr, kept_ptr, data_ptr, at, count, first, C):
    columns, here = _columns_of(data_ptr, at, count, first, C)
    tl.store(x_ptr + columns, tl.load(kept_ptr + at, mask=here), mask=here)


@triton.jit
def _drop(x_ptr, data_ptr, at, count, first, C):
    columns, here = _columns_of(data_ptr, at, count, first, C)
    tl.store(x_ptr + columns, float("-inf"), mask=here)


@triton.jit
def _cut_by_bits(x, data_ptr, columns, first, mask):
    """x, or -inf where a token's bit is not set."""
    token = first + columns
    word = tl.load(data_ptr + token // 32, mask=mask)
    return tl.where(((word >> (token % 32)) & 1) == 1, x.to(tl.float32), float("-inf"))


@triton.jit
def _load_end(ptr, columns, C, VEC: tl.constexpr):
    return tl.load(ptr + columns, mask=columns < (C + VEC - 1) // VEC * VEC)


@triton.jit
def _store_end(ptr, columns, x, C, VEC: tl.constexpr):
    """Stores whole vectors: after the row's end there is padding."""
    x = x.to(ptr.dtype.element_ty)
    tl.store(ptr + columns, x, mask=columns < (C + VEC - 1) // VEC * VEC)


@triton.jit(do_not_specialize=["C", "first", "longest"])
def _restrict_kernel(
    x_ptr,  # [r, C] logits
    kinds_ptr,  # [r] uint8
    offsets_ptr,  # [r + 1] int64
    data_ptr,  # [M] int32
    kept_ptr,  # [r, longest], scratch in x's dtype
    C,
    first,  # the vocabulary's token that x begins with
    longest,
    stride,
    BLOCK: tl.constexpr,
    VEC: tl.constexpr,
):
    """-inf in place of the logits of tokens that are not in the rows' sets."""
    row = tl.program_id(0)
    kind = tl.load(kinds_ptr + row).to(tl.int32)
    begin = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - begin).to(tl.int32)
    x_ptr += row.to(tl.int64) * stride
    kept_ptr += row.to(tl.int64) * longest
    data_ptr += begin
    slots = tl.arange(0, BLOCK)
    whole = C // BLOCK
    if kind == _BITS:
        for w in range(0, whole):
            columns = w * BLOCK + slots
            x = tl.load(x_ptr + columns)
            x = _cut_by_bits(x, data_ptr, columns, first, None)
            tl.store(x_ptr + columns, x.to(x_ptr.dtype.element_ty))
        columns = whole * BLOCK + slots
        x = _load_end(x_ptr, columns, C, VEC)
        x = _cut_by_bits(x, data_ptr, columns, first, columns < C)
        _store_end(x_ptr, columns, x, C, VEC)
    if kind == _ONLY:
        for start in range(0, count, BLOCK):
            _keep(x_ptr, kept_ptr, data_ptr, start + slots, count, first, C)
        tl.debug_barrier()  # other threads may still read what these replace
        gone = tl.full([BLOCK], float("-inf"), tl.float32)
        for w in range(0, whole):
            tl.store(x_ptr + (w * BLOCK + slots), gone.to(x_ptr.dtype.element_ty))
        _store_end(x_ptr, whole * BLOCK + slots, gone, C, VEC)
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            _put_back(x_ptr, kept_ptr, data_ptr, start + slots, count, first, C)
    if kind == _BUT:
        for start in range(0, count, BLOCK):
            _drop(x_ptr, data_ptr, start + slots, count, first, C)


_launch = launcher(_restrict_kernel)


def restrict_(x: Tensor, sets: TokenSets, rows: slice, first: int) -> None:
    """``TokenSets.restrict_`` for a chunk of a workspace, whose rows are padded."""
    if not len(x):
        return
    offsets = sets.offsets[rows.start : rows.stop + 1]
    kept = torch.empty(len(x), sets.longest, dtype=x.dtype, device=x.device)
    with device_of(x):
        _launch(
            len(x), x, sets.kinds[rows], offsets, sets.data, kept, x.shape[1], first, sets.longest,
            x.stride(0), **window(x.shape[1], x.dtype),
        )  # fmt: skip
