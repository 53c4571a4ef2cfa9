"""Rows of logits in parts, one tile each, for the sampling kernels.

A tile is loaded by whole vectors wherever the row starts, and its columns are moved to slots 0, 1,
…, so that results do not depend on the row's address.

The race that draws a token has smaller parts (``race.part_size``), groups of a tile's columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..dispatch import interpreting
from ..race import part_size
from ..rows import as_rows, vector_length
from ..types import COLDEST
from .logprob import LOWEST, row_temperature
from .rows import align_down, load_end, per_row, rotate

_TILE = 4096  # logits that a program holds
_THREADS = 256
_COLDEST = tl.constexpr(COLDEST)
# Integers that change with the batch or prove nothing here: specialising on them only recompiles.
PART_ARGUMENTS = ("V", "row_stride", "parts", "position")


@triton.jit
def row_parameter(ptr, number, row):
    """A row's parameter in fp32, from a tensor or, where that is None, the number for all rows."""
    if ptr is not None:
        return tl.load(ptr + row).to(tl.float32)
    return tl.full([], number, tl.float32)


@triton.jit
def sampling_temperature(temperature_ptr, temperature, row):
    """The row's temperature, 1 where it is 0, NaN where it is impossible; and whether it is 0."""
    t = row_temperature(temperature_ptr, temperature, row)
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
    # Where the row starts past a boundary, the last columns lie behind the tile: at most a vector,
    # whose place is in the slots before the first column.
    behind = load_end(aligned + TILE, slots, 0, end - TILE, VEC)
    return rotate(tl.where(slots < shift, behind, x), shift, TILE)


@triton.jit
def part_weights(max_ptr, sum_ptr, row, parts, scale, PARTS: tl.constexpr):
    """Of a row's parts: their maxima, weights Σ 2^a and maxima's a = (max - row's)·scale."""
    index = tl.arange(0, PARTS)
    part_max = tl.load(max_ptr + row * parts + index, mask=index < parts, other=LOWEST)
    part_sum = tl.load(sum_ptr + row * parts + index, mask=index < parts, other=0.0)
    row_max = tl.max(part_max, 0)
    a = (part_max - row_max) * scale
    return part_max, row_max, part_sum * tl.exp2(a), a


def _tile(columns: int, dtype: torch.dtype) -> dict[str, int]:
    """TILE, VEC and num_warps for as many columns, or for as many of them as a tile holds."""
    vector = vector_length(dtype)
    warp = 32 if interpreting() else driver.active.get_current_target().warp_size
    tile = min(_TILE, max(warp * vector, triton.next_power_of_2(columns)))
    threads = min(_THREADS, tile // vector)
    return {"TILE": tile, "VEC": vector, "num_warps": threads // warp}


def row_argument(x: float | Tensor) -> tuple[Tensor | None, float]:
    """A parameter as the kernels take it: a tensor and no number, or no tensor and the number."""
    return (per_row(x), 0.0) if isinstance(x, Tensor) else (None, float(x))


class VocabTiles:
    """[N, V] logits cut into parts, as the kernels take them, and the launches' shapes: by V and
    dtype only, never by N."""

    def __init__(self, logits: Tensor, temperature: float | Tensor) -> None:
        self.n, self.vocabulary = logits.shape
        rows = as_rows(logits)
        self.shapes = _tile(self.vocabulary, logits.dtype)
        self.count = triton.cdiv(self.vocabulary, self.shapes["TILE"])
        self.all: dict[str, Any] = {"PARTS": max(2, triton.next_power_of_2(self.count))}
        size = part_size(self.vocabulary)
        self.groups = self.shapes["TILE"] // size  # of the race, in a tile
        self.race: dict[str, Any] = {"SIZE": size}
        # What draws a token holds the columns of one group.
        self.winner = {**_tile(size, logits.dtype), **self.race, "GROUPS": self.groups}
        self.grid = (self.n * self.count,)
        self.logits = (rows, *row_argument(temperature))
        self.sizes = (self.vocabulary, rows.stride(1), self.count)

    def new(self, number: int, *more: int) -> list[Tensor]:
        """``number`` tensors [N, parts, more], each aligned as memory is allocated."""
        shape = (self.n, self.count, *more)
        device = self.logits[0].device
        return [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(number)]
