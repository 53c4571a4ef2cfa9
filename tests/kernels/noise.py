"""The random numbers that the sampling kernel draws with, by themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastrl_kernels._triton.sampling import _log2_exponential


@triton.jit
def _noise_kernel(out_ptr, STREAM: tl.constexpr, COLUMNS: tl.constexpr):
    key, column = tl.program_id(0), tl.arange(0, COLUMNS)
    tl.store(out_ptr + key * COLUMNS + column, _log2_exponential(key, column, STREAM))


def exponentials(keys: int, columns: int, stream: int, device: str) -> torch.Tensor:
    """[keys, columns] float64, of the keys 0, 1, …"""
    out = torch.empty(keys, columns, device=device)
    _noise_kernel[(keys,)](out, STREAM=stream, COLUMNS=columns)
    return out.cpu().double().exp2()
