"""A GPU's products on CPU tensors: its rules for chunks and memory, and what ``torch.mm`` does
there that it does not do on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.ops.head_counts import Product
from fastrl_kernels.dispatch import standing_for

_mm, _addmm = torch.mm, torch.addmm


def _split(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum in two parts, each rounded to ``dtype`` before they are added."""
    middle = a.shape[1] // 2
    halves = (slice(0, middle), slice(middle, None))
    first, second = (_mm(a[:, k].double(), b[k].double()).to(dtype) for k in halves)
    return first + second


@contextmanager
def products_of_a_gpu() -> Iterator[list[Product]]:
    """Context in which tensors take a GPU's way, with the products that it takes. Those that come
    out in half precision are split, and their parts added in it, as torch's flags allow."""
    found: list[Product] = []

    def note(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> None:
        assert a.dtype == b.dtype, f"a product of {a.dtype} and {b.dtype}"
        assert out.shape == (a.shape[0], b.shape[1])
        found.append(Product(*a.shape, b.shape[1], a.dtype, out.dtype, adds))

    def mm(a: Tensor, b: Tensor, *, out_dtype: Any = None, out: Tensor) -> Tensor:
        assert out.dtype == (out_dtype or a.dtype)
        note(a, b, out, adds=False)
        return out.copy_(_split(a, b, out.dtype))

    def addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: Any = None, out: Tensor) -> Tensor:
        note(a, b, out, adds=total is out)
        if out_dtype is None:  # of one dtype
            return _addmm(total, a, b, out=out)
        assert total.dtype == out.dtype == out_dtype == torch.float32 != a.dtype
        return out.add_(_mm(a.double(), b.double()).float())

    with (
        standing_for("cuda"),
        mock.patch.object(torch, "mm", mm),
        mock.patch.object(torch, "addmm", addmm),
    ):
        yield found
