"""Tensors [..., V] as rows, and allocations whose rows allow 16-byte access."""

from __future__ import annotations

import torch
from torch import Tensor

VECTOR_BYTES = 16


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., V] as [outer, inner, V] with unit stride along V: a view, or else one copy.

    Two levels of strides are what a slice like ``logits[:, :-1]`` needs; a tensor whose leading
    dimensions need more than two, or whose last dimension is not contiguous, is copied.
    """
    vocabulary = x.shape[-1]
    if not x.numel():
        return x.reshape(1, -1, vocabulary)
    if x.stride(-1) != 1 and vocabulary > 1:
        x = x.contiguous()
    levels: list[list[int]] = []  # [rows, stride], outermost first, neighbours merged
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if levels and levels[-1][1] == size * stride:
            levels[-1] = [levels[-1][0] * size, stride]
        else:
            levels.append([size, stride])
    if len(levels) > 2:
        return x.contiguous().view(1, -1, vocabulary)
    if len(levels) < 2:
        levels = [[1, 0], *(levels or [[1, 0]])]
    return x.view(levels[0][0], levels[1][0], vocabulary)


def row_walk(x: Tensor) -> tuple[Tensor, int, int, int]:
    """``as_rows`` as kernels take it: its memory, the number of inner rows, and the strides of
    outer and inner ones. No view is made of what is contiguous."""
    if x.is_contiguous():
        vocabulary = x.shape[-1]
        return x, max(1, x.numel() // vocabulary), 0, vocabulary
    rows = as_rows(x)
    return rows, rows.shape[1], rows.stride(0), rows.stride(1)


def as_rows_together(*tensors: Tensor) -> list[Tensor]:
    """``as_rows`` of tensors of one shape, cut into outer and inner rows at the same place."""
    walks = [as_rows(x) for x in tensors]
    shape = max((x.shape for x in walks), key=lambda shape: shape[0])
    # Rows with one stride can be cut anywhere; rows with two that disagree need the copy.
    walks = [x if x.shape[0] == 1 or x.shape == shape else x.contiguous() for x in walks]
    return [x.view(shape) for x in walks]


def vector_length(*dtypes: torch.dtype) -> int:
    """Elements per 16-byte vector of the narrowest of ``dtypes``."""
    return VECTOR_BYTES // min(dtype.itemsize for dtype in dtypes)


def empty_rows_like(rows: Tensor, dtype: torch.dtype, vector: int) -> Tensor:
    """Uninitialised memory of ``rows``' shape, every row of which starts as many elements past a
    multiple of ``vector`` as that of ``rows`` does: [outer, inner, V] from ``as_rows``, or any
    contiguous tensor.

    Kernels move whole vectors, so two tensors that they walk together have to be misaligned alike,
    as the rows of an odd vocabulary are. The padding is less than one vector per row, and none
    where ``rows`` is contiguous.
    """
    if rows.is_contiguous():
        start = rows.data_ptr() // rows.element_size() % vector
        if not start:
            return torch.empty_like(rows, dtype=dtype, memory_format=torch.contiguous_format)
        memory = torch.empty(start + rows.numel(), dtype=dtype, device=rows.device)
        return memory[start:].view(rows.shape)
    outer, inner, vocabulary = rows.shape
    inner_stride = vocabulary + (rows.stride(1) - vocabulary) % vector if inner > 1 else vocabulary
    outer_stride = inner * inner_stride
    outer_stride += (rows.stride(0) - outer_stride) % vector if outer > 1 else 0
    start = rows.data_ptr() // rows.element_size() % vector
    memory = torch.empty(start + outer * outer_stride, dtype=dtype, device=rows.device)
    return memory.as_strided(rows.shape, (outer_stride, inner_stride, 1), start)


def aligned_alike(rows: Tensor, others: Tensor, vector: int) -> bool:
    """Whether every row starts as far past a multiple of ``vector`` elements in both tensors."""
    starts = [x.data_ptr() // x.element_size() for x in (rows, others)]
    apart = [starts[0] - starts[1]]
    apart += [rows.stride(d) - others.stride(d) for d in (0, 1) if rows.shape[d] > 1]
    return rows.shape == others.shape and all(n % vector == 0 for n in apart)
