"""Rows of logits as the sampling kernels hold them: in parts, one tile each, or some groups alone.

A group is what races for a token (``race.part_size``), a number of columns; a part is a number of
groups. A part is loaded by whole vectors wherever the row starts, and its columns are moved to
slots 0, 1, …, so that results do not depend on the row's address.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..race import part_size
from ..rows import vector_length
from ..types import COLDEST
from .logprob import LOWEST, row_temperature
from .rows import align_down, load_end, per_row, rotate
from .tiles import target

_TILE = 4096  # logits that a program holds
_THREADS = 128  # threads of such a program
_ROW_THREADS = 256  # of a program for a row
# What such a program holds at a time as it looks for the row's cut: logits, and groups at the most.
_CUT_TILE = 2048
_CUT_GROUPS = 64
_COLDEST = tl.constexpr(COLDEST)
# Integers that change with the batch or prove nothing here: specialising on them only recompiles.
PART_ARGUMENTS = ("V", "row_stride", "parts")


@triton.jit
def row_parameter(ptr, number, row):
    """A row's parameter in fp32, from a tensor or, where that is None, the number for all rows."""
    if ptr is not None:
        return tl.load(ptr + row).to(tl.float32)
    return tl.full([], number, tl.float32)


@triton.jit
def sampling_temperature(temperature_ptr, temperature, row):
    """The row's temperature, 1 where it is 0, NaN where it is impossible; and whether it is 0."""
    return possible_temperature(row_temperature(temperature_ptr, temperature, row))


@triton.jit
def possible_temperature(t):
    """``sampling_temperature`` of one temperature or several that are loaded."""
    greedy = (t >= 0) & (t < _COLDEST)
    possible = (t >= 0) & (t < float("inf"))
    return tl.where(greedy, 1.0, tl.where(possible, t, float("nan"))), greedy


@triton.jit
def load_part(logits_ptr, row, row_stride, first, V, SIZE: tl.constexpr, TILE: tl.constexpr, VEC):
    """Columns [first, first + SIZE) of a row as fp32 in slots 0, 1, …, with SIZE ≤ TILE; -inf in
    slots without one."""
    start = logits_ptr + (row.to(tl.int64) * row_stride + first)
    aligned, shift = align_down(start, VEC)
    slots = tl.arange(0, TILE)
    end = shift + tl.minimum(SIZE, V - first)
    x = load_end(aligned, slots, shift, end, VEC)
    # If the row starts past a boundary, its last columns lie behind the tile: at most a vector,
    # whose place is in the slots before the first column.
    behind = load_end(aligned + TILE, slots, 0, end - TILE, VEC)
    return rotate(tl.where(slots < shift, behind, x), shift, TILE)


@triton.jit
def load_groups(
    logits_ptr,
    row,
    row_stride,
    first,
    V,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
):
    """Columns [first, first + TILE) of a row as fp32 [SIZE/SPAN, groups, SPAN]; -inf in slots
    without one. A warp holds whole groups: no reduction over one crosses warps."""
    GROUPS: tl.constexpr = TILE // SIZE
    REPEATS: tl.constexpr = SIZE // SPAN
    start = logits_ptr + (row.to(tl.int64) * row_stride + first)
    aligned, shift = align_down(start, VEC)
    if (shift == 0) & (first + TILE <= V):
        # Two dimensions, of which warps share the first: among three, Triton 3.6 lets them share
        # the repeats.
        span = tl.arange(0, REPEATS * GROUPS)[:, None]
        span = span % GROUPS * SIZE + span // GROUPS * SPAN
        x = tl.load(aligned + (span + tl.arange(0, SPAN)[None, :])).to(tl.float32)
        x = tl.reshape(x, [REPEATS, GROUPS, SPAN])
    else:
        x = load_part(logits_ptr, row, row_stride, first, V, TILE, TILE, VEC)
        x = tl.permute(tl.reshape(x, [GROUPS, REPEATS, SPAN]), (1, 0, 2))
    return x


@triton.jit
def group_weights(max_ptr, sum_ptr, row, groups, scale, ALL: tl.constexpr):
    """A row's groups' maxima, weights Σ 2^a, and the a = (max - row's)·scale of the maxima."""
    index = tl.arange(0, ALL)
    group_max = tl.load(max_ptr + row * groups + index, mask=index < groups, other=float("-inf"))
    group_sum = tl.load(sum_ptr + row * groups + index, mask=index < groups, other=0.0)
    row_max = tl.maximum(tl.max(group_max, 0), LOWEST)
    a = (group_max - row_max) * scale
    return group_max, row_max, group_sum * tl.exp2(a), a


def _tile(columns: int, vector: int, most: int, most_threads: int, warp: int) -> dict[str, int]:
    """TILE, VEC and num_warps for as many columns, or for as many of them as a tile holds."""
    tile = min(most, max(warp * vector, triton.next_power_of_2(columns)))
    threads = min(most_threads, tile // vector)
    return {"TILE": tile, "VEC": vector, "num_warps": threads // warp}


def row_argument(x: float | Tensor) -> tuple[Tensor | None, float]:
    """A parameter as the kernels take it: a tensor and no number, or no tensor and the number."""
    return (per_row(x), 0.0) if isinstance(x, Tensor) else (None, float(x))


class Tilings(NamedTuple):
    """Shapes of the launches: by vocabulary and dtype, never by the number of rows."""

    parts: int  # of a row
    groups: int  # of the race, in a row
    part: dict[str, Any]  # what finds statistics holds a part
    cut: dict[str, Any]  # what looks for cuts, some of the groups that may be kept
    draw: dict[str, Any]  # what draws a token, the columns of one group
    draw_cut: dict[str, Any]  # the draw's, after a look for cuts


@cache
def _tilings(
    vocabulary: int, dtype: torch.dtype, most: int, most_threads: int, warp: int
) -> Tilings:
    vector = vector_length(dtype)
    tile = _tile(vocabulary, vector, most, most_threads, warp)
    size = part_size(vocabulary)
    in_tile = tile["TILE"] // size
    parts = triton.cdiv(vocabulary, tile["TILE"])
    part = {**tile, "SIZE": size, "SPAN": min(size, tile["VEC"] * warp)}
    of_all = in_tile * triton.next_power_of_2(parts)
    every = {"SIZE": size, "GROUPS": in_tile, "ALL": max(2, of_all)}
    threads = max(most_threads, min(_ROW_THREADS, every["ALL"]))
    winner = _tile(size, vector, most, most_threads, warp) | {"num_warps": threads // warp}
    listed = min(in_tile, _CUT_GROUPS, max(1, _CUT_TILE // size))
    threads = max(most_threads, min(_ROW_THREADS, listed * size // tile["VEC"]))
    cut = {**every, "LISTED": listed, "VEC": tile["VEC"], "num_warps": threads // warp}
    draw = {**winner, **every, "LISTED": 0}
    return Tilings(parts, parts * in_tile, part, cut, draw, {**winner, **cut})


class VocabTiles:
    """Logits [N, V] cut into parts and groups, as the kernels take them."""

    def __init__(self, logits: Tensor, temperature: float | Tensor) -> None:
        self.n, self.vocabulary = logits.shape
        rows = logits if logits.stride(1) == 1 or self.vocabulary == 1 else logits.contiguous()
        self.shapes = _tilings(self.vocabulary, logits.dtype, _TILE, _THREADS, target()[1])
        self.programs = self.n * self.shapes.parts
        self.logits = (rows, *row_argument(temperature))
        self.sizes = (self.vocabulary, rows.stride(0), self.shapes.parts)

    def new(self) -> Tensor:
        """Memory for a number of each group, [N, groups] fp32."""
        count = self.n * self.shapes.groups
        return torch.empty(count, dtype=torch.float32, device=self.logits[0].device)
