"""Calls for the gate's worker, in place of those of ``benchmarks.ops``."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
import toy_kernels as toys

from benchmarks.ops import Compiled, Expect

PACKAGE = "toy_kernels"
BOTH = Expect(load_bytes=16, store_bytes=16)


def _rows(vocabulary: int) -> torch.Tensor:
    return torch.empty(4, vocabulary, dtype=torch.bfloat16)


def _wide() -> None:
    x = _rows(151936)
    toys._wide_kernel[(4,)](x, torch.empty_like(x), x.stride(0), 151936, BLOCK=2048)


def _narrow() -> None:
    x = _rows(50257)
    toys._narrow_kernel[(4,)](x, torch.empty_like(x), x.stride(0), 50257, BLOCK=2048)


def _spilling() -> None:
    x = torch.empty(131072)
    toys._spilling_kernel[(1,)](x, torch.empty_like(x), BLOCK=131072, num_warps=16)


def _tuned() -> None:
    x = torch.empty(8192)
    toys._tuned_kernel[(8,)](x, torch.empty_like(x))


def _busy() -> None:
    x = torch.empty(8192)
    toys._busy_kernel[(1,)](x, x, 8192, BLOCK=1024)


def _optional(mask: bool, scale: bool) -> None:
    x = torch.empty(1024)
    options = (x > 0 if mask else None, x if scale else None)
    toys._optional_kernel[(1,)](x, *options, BLOCK=1024)


def compiled() -> Iterator[tuple[str, Compiled]]:
    yield "wide", Compiled("bf16", _wide, BOTH)
    yield "narrow", Compiled("bf16", _narrow, BOTH)
    yield "spilling", Compiled("fp32", _spilling, BOTH)
    yield "tuned", Compiled("fp32", _tuned, BOTH)
    yield "busy", Compiled("fp32", _busy, BOTH)
    for mask, scale in product((False, True), repeat=2):
        label = " ".join(["mask"] * mask + ["scale"] * scale)
        yield "optional", Compiled(label, partial(_optional, mask, scale))
    yield "raising", Compiled("", lambda: 1 / 0)
    yield "idle", Compiled("", lambda: None)
