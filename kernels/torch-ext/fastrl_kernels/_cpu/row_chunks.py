"""Chunks of a few rows of logits, which fit in a CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..rows import as_rows_together

CHUNK_ELEMENTS = 1 << 20  # logits that are worked on at a time: 4 MiB in fp32
# Replaces -inf where exp(x)·x has to be 0: exp of it is 0.
FLOOR = -200.0
# exp(-87) = 1.6e-38, which no smaller normal number is near.
LEAST, NOTHING = -87.0, 2e-38


def exponentials_of(d: Tensor, out: Tensor) -> Tensor:
    """exp(d) where that is a normal number of fp32, else 0. MKL takes up to 150 times as long for
    exponentials that underflow, which in rows that leave out tokens nearly all would do."""
    torch.clamp(d, min=LEAST, out=out).exp_()
    return torch.threshold_(out, NOTHING, 0.0)


def rows_at_a_time(vocabulary: int) -> int:
    return max(1, CHUNK_ELEMENTS // max(1, vocabulary))


def chunks(*tensors: Tensor, buffers: int) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
    """Blocks of rows of [..., V] tensors: which rows, a view [r, V] of each tensor, and fp32
    working memory [buffers, r, V], the same for all blocks."""
    walks = as_rows_together(*tensors)
    outer, inner, vocabulary = walks[0].shape
    step = max(1, min(inner, rows_at_a_time(vocabulary)))
    device = tensors[0].device
    memory = torch.empty(buffers, step, vocabulary, dtype=torch.float32, device=device)
    for i in range(outer):
        for j in range(0, inner, step):
            stop = min(j + step, inner)
            rows = slice(i * inner + j, i * inner + stop)
            yield rows, [x[i, j:stop] for x in walks], memory[:, : stop - j]


def wide(x: Tensor, out: Tensor) -> Tensor:
    """x in fp32: x itself if it is, else its copy in ``out``."""
    return x if x.dtype == torch.float32 else out.copy_(x)


def zero_rows(x: Tensor, counted: Tensor) -> Tensor:
    """Zeroes fp32 rows that do not count, by their bits, as 0·NaN is NaN."""
    x.view(torch.int32).bitwise_and_(-counted.int())
    return x


def blocks(x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Parts of x [r, C], a few rows each, and their places."""
    step = rows_at_a_time(x.shape[1])
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        yield rows, x[rows]
