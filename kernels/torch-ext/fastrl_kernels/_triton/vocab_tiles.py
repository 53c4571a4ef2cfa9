"""Rows of logits in parts, one tile each, for the sampling kernels.

A part is PART columns, less than a tile by the longest vector, so that it fits wherever the row
starts. Its columns are moved to slots 0, 1, … as it is loaded, so that results do not depend on the
row's address.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..dispatch import interpreting
from ..rows import as_rows, vector_length
from ..types import COLDEST
from .logprob import LOWEST, row_temperature
from .rows import align_down, load_end, per_row, rotate

_TILE = 4096  # logits that a program holds
_THREADS = 256
_VECTOR = 8  # the longest vector: a part and its misalignment fit in a tile
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
def load_part(logits_ptr, row, row_stride, part, V, PART: tl.constexpr, TILE: tl.constexpr, VEC):
    """Columns [part·PART, …) of a row as fp32 in slots 0, 1, …; -inf past the last."""
    start = logits_ptr + (row.to(tl.int64) * row_stride + part * PART)
    aligned, shift = align_down(start, VEC)
    columns = tl.minimum(PART, V - part * PART)
    x = load_end(aligned, tl.arange(0, TILE), shift, shift + columns, VEC)
    return rotate(x, shift, TILE)


@triton.jit
def part_weights(max_ptr, sum_ptr, row, parts, scale, PARTS: tl.constexpr):
    """Of a row's parts: their maxima, weights Σ 2^a and maxima's a = (max - row's)·scale."""
    index = tl.arange(0, PARTS)
    part_max = tl.load(max_ptr + row * parts + index, mask=index < parts, other=LOWEST)
    part_sum = tl.load(sum_ptr + row * parts + index, mask=index < parts, other=0.0)
    row_max = tl.max(part_max, 0)
    a = (part_max - row_max) * scale
    return part_max, row_max, part_sum * tl.exp2(a), a


def _tile(vocabulary: int, dtype: torch.dtype) -> dict[str, int]:
    """PART, TILE, VEC and num_warps: by V and dtype only, never by N."""
    vector = vector_length(dtype)
    needed = triton.next_power_of_2(vocabulary + _VECTOR)
    tile = min(_TILE, max(64 * _VECTOR, needed))
    warp = 32 if interpreting() else driver.active.get_current_target().warp_size
    threads = min(_THREADS, tile // vector)
    return {
        "PART": tile - _VECTOR,
        "TILE": tile,
        "VEC": vector,
        "num_warps": max(1, threads // warp),
    }


def row_argument(x: float | Tensor) -> tuple[Tensor | None, float]:
    """A parameter as the kernels take it: a tensor and no number, or no tensor and the number."""
    return (per_row(x), 0.0) if isinstance(x, Tensor) else (None, float(x))


class VocabTiles:
    """[N, V] logits cut into parts, as the kernels take them, and the launches' shapes."""

    def __init__(self, logits: Tensor, temperature: float | Tensor) -> None:
        self.n, self.vocabulary = logits.shape
        rows = as_rows(logits)
        self.shapes = _tile(self.vocabulary, logits.dtype)
        self.count = triton.cdiv(self.vocabulary, self.shapes["PART"])
        self.all: dict[str, Any] = {"PARTS": max(2, triton.next_power_of_2(self.count))}
        self.grid = (self.n * self.count,)
        self.logits = (rows, *row_argument(temperature))
        self.sizes = (self.vocabulary, rows.stride(1), self.count)

    def new(self, number: int, *more: int) -> list[Tensor]:
        """``number`` tensors [N, parts, more], each aligned as memory is allocated."""
        shape = (self.n, self.count, *more)
        device = self.logits[0].device
        return [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(number)]
