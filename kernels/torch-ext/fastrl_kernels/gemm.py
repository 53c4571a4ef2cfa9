"""Matrix products: the library call for each, and the rounding of its sums."""

from __future__ import annotations

import torch
from torch import Tensor

# CPU libraries are slow where sums are longer, and copies in fp32 would be large.
_LONGEST_SUM = 8192


def multiply(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out = h wᵀ + b."""
    if out.dtype != hidden.dtype:
        out.copy_(torch.nn.functional.linear(hidden, weight, bias))
    elif bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, summed in fp32: sums over chunks that are rounded to bf16 lose digits."""
    if b.dtype == torch.float32 and total.device.type != "cpu":
        total.addmm_(a.float(), b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=torch.float32, out=total)
    else:
        for start in range(0, a.shape[1], _LONGEST_SUM):
            piece = slice(start, start + _LONGEST_SUM)
            total.addmm_(a[:, piece].float(), b[piece].float())


def product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b, rounded once to its dtype."""
    in_pieces = out.device.type == "cpu" and (a.shape[1] > _LONGEST_SUM or a.dtype != b.dtype)
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
