"""Cases for the gate's worker, in place of ``benchmarks.aot_cases``."""

from collections.abc import Iterator

import torch
import toy_kernels as toys

from benchmarks.aot_judge import Case, Expect

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


def cases() -> Iterator[Case]:
    yield Case("wide", "bf16", _wide, BOTH)
    yield Case("narrow", "bf16", _narrow, BOTH)
    yield Case("spilling", "fp32", _spilling, BOTH)
    yield Case("tuned", "fp32", _tuned, BOTH)
    yield Case("raising", "", lambda: 1 / 0)
    yield Case("idle", "", lambda: None)
