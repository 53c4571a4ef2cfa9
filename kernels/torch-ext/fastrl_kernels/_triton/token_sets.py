"""Cuts rows of logits to their sets of tokens, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..token_sets import TokenSets
from .launch import launcher
from .tiles import device_of

_ONLY = tl.constexpr(0)
_BUT = tl.constexpr(1)
_BITS = tl.constexpr(2)
_BLOCK = 1024


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
):
    row = tl.program_id(0)
    kind = tl.load(kinds_ptr + row).to(tl.int32)
    begin = tl.load(offsets_ptr + row)
    count = (tl.load(offsets_ptr + row + 1) - begin).to(tl.int32)
    x_ptr += row.to(tl.int64) * stride
    kept_ptr += row.to(tl.int64) * longest
    data_ptr += begin
    slots = tl.arange(0, BLOCK)
    if kind == _BITS:
        for start in range(0, C, BLOCK):
            columns = start + slots
            token = first + columns
            word = tl.load(data_ptr + token // 32, mask=columns < C, other=-1)
            gone = ((word >> (token % 32)) & 1) == 0
            tl.store(x_ptr + columns, float("-inf"), mask=gone)
    if kind == _ONLY:
        for start in range(0, count, BLOCK):
            at = start + slots
            columns = tl.load(data_ptr + at, mask=at < count, other=-1) - first
            here = (columns >= 0) & (columns < C) & (at < count)
            tl.store(kept_ptr + at, tl.load(x_ptr + columns, mask=here), mask=here)
        tl.debug_barrier()  # other threads may still read what these replace
        for start in range(0, C, BLOCK):
            columns = start + slots
            tl.store(x_ptr + columns, float("-inf"), mask=columns < C)
        tl.debug_barrier()
        for start in range(0, count, BLOCK):
            at = start + slots
            columns = tl.load(data_ptr + at, mask=at < count, other=-1) - first
            here = (columns >= 0) & (columns < C) & (at < count)
            tl.store(x_ptr + columns, tl.load(kept_ptr + at, mask=here), mask=here)
    if kind == _BUT:
        for start in range(0, count, BLOCK):
            at = start + slots
            columns = tl.load(data_ptr + at, mask=at < count, other=-1) - first
            here = (columns >= 0) & (columns < C) & (at < count)
            tl.store(x_ptr + columns, float("-inf"), mask=here)


_launch = launcher(_restrict_kernel)


def restrict_(x: Tensor, sets: TokenSets, rows: slice, first: int) -> None:
    """``TokenSets.restrict_`` for x [r, C] whose rows are contiguous."""
    if not len(x):
        return
    offsets = sets.offsets[rows.start : rows.stop + 1]
    kept = torch.empty(len(x), sets.longest, dtype=x.dtype, device=x.device)
    with device_of(x):
        _launch(
            len(x), x, sets.kinds[rows], offsets, sets.data, kept, x.shape[1], first, sets.longest,
            x.stride(0), BLOCK=_BLOCK,
        )  # fmt: skip
