"""A language-model head in chunks: what the ops on hidden states share.

Logits exist a chunk at a time, in a workspace of bounded size. Products are library GEMMs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import scratch

COLUMNS, FEWEST_COLUMNS = 8192, 1024  # of the vocabulary at a time, where logits are recomputed
_ROW_STEP = 16  # chunks hold a multiple of as many rows
_ALIGNED = 64  # elements: rows of a workspace begin at a multiple of it


class Transform(NamedTuple):
    """From a product x = h·w + b to a logit z = c·tanh(s·x/c)/T; without a cap z = s·x/T.

    The step before the last, tanh(s·x/c) or x itself, is called the signal here.
    """

    softcap: float | None
    logit_scale: float
    temperature: float
    temperatures: Tensor | None  # [N], in place of the number

    @property
    def inner(self) -> float:
        """s/c."""
        return 1.0 if self.softcap is None else self.logit_scale / self.softcap

    @property
    def outer(self) -> float:
        """What takes a signal to z·T."""
        return self.logit_scale if self.softcap is None else self.softcap

    def at(self, rows: slice) -> Transform:
        whole = self.temperatures
        return self if whole is None else self._replace(temperatures=whole[rows])

    def times_(self, x: Tensor, factor: float) -> Tensor:
        """x·factor/T in place, x [r] or [r, C]."""
        if factor != 1.0:
            x.mul_(factor)
        if self.temperatures is not None:
            return x.div_(self.temperatures if x.dim() == 1 else self.temperatures[:, None])
        return x if self.temperature == 1.0 else x.div_(self.temperature)


def row_chunks(n: int, columns: int, itemsize: int, budget: int) -> list[slice]:
    """Rows in chunks whose [r, columns] fit the budget, of about the same length."""
    most = max(1, budget // max(1, columns * itemsize))
    if most > _ROW_STEP:
        most -= most % _ROW_STEP
    count = -(-n // most)
    length = -(-n // max(1, count))
    if length > _ROW_STEP:
        length = min(most, -(-length // _ROW_STEP) * _ROW_STEP)
    return [slice(start, min(start + length, n)) for start in range(0, n, max(1, length))]


def column_chunks(n: int, vocabulary: int, itemsize: int, budget: int) -> list[slice]:
    """Columns in chunks of 1k to 8k, as few as [n, C] fits the budget."""
    width = COLUMNS
    while width > FEWEST_COLUMNS and n * width * itemsize > budget:
        width //= 2
    return [slice(v, min(v + width, vocabulary)) for v in range(0, vocabulary, width)]


class Workspace:
    """Memory for one chunk of logits at a time, on the device of ``like``."""

    def __init__(self, like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.columns, self.dtype = columns, dtype
        needed = rows * self._stride(columns) * dtype.itemsize
        self._memory: Tensor | None = scratch.borrow(like, needed)

    @staticmethod
    def _stride(columns: int) -> int:
        return -(-columns // _ALIGNED) * _ALIGNED

    def chunk(self, rows: int, columns: int | None = None) -> Tensor:
        """[rows, columns] whose rows all begin at a 16-byte boundary, also where V is odd."""
        assert self._memory is not None
        stride = self._stride(self.columns)
        flat = self._memory[: rows * stride * self.dtype.itemsize].view(self.dtype)
        return flat.view(rows, stride)[:, : self.columns if columns is None else columns]

    def release(self) -> None:
        """Nothing looks at the chunks any more."""
        memory, self._memory = self._memory, None
        if memory is not None:
            scratch.give_back(memory)


def multiply(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out = h wᵀ + b."""
    if out.dtype != hidden.dtype:
        out.copy_(torch.nn.functional.linear(hidden, weight, bias))
    elif bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, the sum in fp32: rounded to bf16 in between, chunk after chunk would lose."""
    if b.dtype == torch.float32 and total.device.type != "cpu":
        total.addmm_(a.float(), b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=torch.float32, out=total)
    else:
        # Piece by piece: copies in fp32 stay small, and CPU libraries are slow where sums are long.
        for start in range(0, a.shape[1], COLUMNS):
            piece = slice(start, start + COLUMNS)
            total.addmm_(a[:, piece].float(), b[piece].float())


def product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b, rounded once to its dtype."""
    in_pieces = out.device.type == "cpu" and (a.shape[1] > COLUMNS or a.dtype != b.dtype)
    if a.dtype == b.dtype == out.dtype and not in_pieces:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32:
        add_product_(out.zero_(), a, b)
    elif in_pieces:
        total = torch.zeros_like(out, dtype=torch.float32)
        add_product_(total, a, b)
        out.copy_(total)
    else:
        out.copy_(a.to(b.dtype) @ b)
