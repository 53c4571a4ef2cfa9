"""Access to rows of a vocabulary by 16-byte vectors, whatever the row's start.

A row of V elements is walked in windows of BLOCK elements that begin at a multiple of VEC elements
(16 bytes of the narrowest operand), at or below the row's start. Interior windows need no mask;
the first and the last are masked per vector, and only the row's first and last few elements, which
share a vector with other rows, are moved one by one.

An element falls into slot (column + shift) mod BLOCK, where ``shift`` is how far the row starts
past the boundary. A row's sums per slot do not depend on the shift, only on which slot they are in,
so ``rotate`` puts column c's into slot c mod BLOCK before slots are added up: a row gives
the same bits wherever it lies in memory.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..dispatch import interpreting
from ..rows import vector_length

VECTORS = 128  # of 16 bytes per window, one for each thread
PART_VECTORS = 16 * VECTORS  # vectors that one program of an elementwise kernel walks
# Integers that change with the batch or prove nothing here: specialising on them only recompiles.
ROW_ARGUMENTS = (
    "n",
    "V",
    "parts",
    "inner",
    "outer_stride",
    "inner_stride",
    "ref_outer_stride",
    "ref_inner_stride",
    "d_outer_stride",
    "d_inner_stride",
)


def window(vocabulary: int, *dtypes: torch.dtype) -> dict[str, int]:
    """BLOCK, VEC and num_warps for rows of ``vocabulary``: by V and dtype only, never by N.

    A thread holds one vector: with sums in registers for each of its elements, more threads with
    less to hold hide more latency than fewer with more.
    """
    # The interpreter takes its time per operation, whatever the size.
    most = PART_VECTORS // 2 if interpreting() else VECTORS
    return _window(vocabulary, dtypes, most)


@cache
def _window(vocabulary: int, dtypes: tuple[torch.dtype, ...], most: int) -> dict[str, int]:
    vector = vector_length(*dtypes)
    needed = triton.next_power_of_2(triton.cdiv(vocabulary + vector - 1, vector))
    vectors = min(most, max(64, needed))
    warp = 32 if interpreting() else driver.active.get_current_target().warp_size
    return {"BLOCK": vectors * vector, "VEC": vector, "num_warps": vectors // warp}


def parts_of(vocabulary: int, VEC: int) -> int:
    """How many programs of PART_VECTORS cover a row, wherever it starts."""
    return (vocabulary + VEC - 2) // (PART_VECTORS * VEC) + 1


def per_row(x: Tensor | None) -> Tensor | None:
    """A tensor of one value per row as the kernels take it: N of them, contiguous."""
    return x if x is None or x.is_contiguous() else x.contiguous()


@triton.jit
def row_start(ptr, row, inner, outer_stride, inner_stride):
    """The address of row ``row`` of [outer, inner, V]; 64-bit, since N·V may exceed 2³¹."""
    outer = row // inner
    within = row - outer * inner
    return ptr + (outer.to(tl.int64) * outer_stride + within.to(tl.int64) * inner_stride)


@triton.jit
def align_down(ptr, VEC: tl.constexpr):
    """The boundary of VEC elements at or below ``ptr``, and how many elements it lies below."""
    ITEM: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    address = ptr.to(tl.int64)
    boundary = address // (VEC * ITEM) * (VEC * ITEM)
    shift = ((address - boundary) // ITEM).to(tl.int32)
    # A pointer made from an integer, since the hint on pointer arithmetic is lost on AMD.
    return tl.multiple_of(boundary.to(ptr.dtype), VEC * ITEM), shift


@triton.jit
def load_end(ptr, columns, low, high, VEC: tl.constexpr):
    """A window at a row's end as fp32, -inf outside columns [low, high): exp gives 0 there.

    Vectors are read whole, neighbouring rows' elements with them: one that holds an element of the
    row lies within its memory, since allocations end at a multiple of 16 bytes; of 32, those of a
    GPU, as VEC elements of fp32 need that are walked together with a narrower dtype's.
    """
    mask = (columns >= low // VEC * VEC) & (columns < (high + VEC - 1) // VEC * VEC)
    x = tl.load(ptr + columns, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where((columns >= low) & (columns < high), x, float("-inf"))


@triton.jit
def store_end(ptr, columns, x, low, high, VEC: tl.constexpr):
    """Stores columns [low, high) of a window: whole vectors, and the few others one by one."""
    whole = (columns >= (low + VEC - 1) // VEC * VEC) & (columns < high // VEC * VEC)
    inside = (columns >= low) & (columns < high)
    x = x.to(ptr.dtype.element_ty)
    tl.store(ptr + columns, x, mask=whole)
    tl.store(ptr + columns, x, mask=inside & (whole == 0))


@triton.jit
def rotate(slots, shift, BLOCK: tl.constexpr):
    """Slot (c + shift) mod BLOCK moves to slot c."""
    return tl.gather(slots, (tl.arange(0, BLOCK) + shift) % BLOCK, 0)
