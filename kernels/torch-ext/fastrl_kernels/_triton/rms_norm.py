"""RMS normalisation: a program holds a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launcher
from .tiles import device_of, power_of_2

# Kernels take dtypes as codes, since torch.compile does not trace Triton's own names.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def rounded(x, CODE: tl.constexpr):
    """fp32 rounded to the dtype of a code."""
    if CODE == 1:
        x = x.to(tl.bfloat16).to(tl.float32)
    elif CODE == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["eps"])
def _rms_norm_kernel(
    x_ptr,  # [N, H]
    residual_ptr,  # [N, H], or None
    weight_ptr,  # [H]
    eps,  # number
    out_ptr,  # [N, H]
    total_ptr,  # [N, H] the residual with x added, or None: there is no residual
    H,
    WIDE: tl.constexpr,  # the code of the sum's dtype
    UNIT_OFFSET: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < H
    x = tl.load(x_ptr + row * H + column, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * H + column, mask=inside, other=0.0).to(tl.float32)
        x = rounded(x, WIDE)
        tl.store(total_ptr + row * H + column, x, mask=inside)
    mean = tl.sum(x * x, 0) / H
    normed = x * (1.0 / tl.sqrt_rn(mean + tl.cast(eps, tl.float32)))
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        normed *= 1.0 + weight
    else:
        normed = rounded(normed, WIDE) * weight
    tl.store(out_ptr + row * H + column, normed, mask=inside)


_launch = launcher(_rms_norm_kernel)


def _warps(width: int) -> int:
    """The number of warps that gives a thread 16 numbers, by comparisons, which are numbers while
    a graph is traced."""
    return 2 if width <= 1024 else 4 if width <= 2048 else 8 if width <= 4096 else 16


def normalise(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    unit_offset: bool,
    wide: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of checked arguments: the result, and the sum that was normalised."""
    x, weight = x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = None
    if residual is not None:
        residual = residual.contiguous()
        total = torch.empty(x.shape, dtype=wide, device=x.device)
    if x.numel():
        tile = power_of_2(max(16, width))
        with device_of(x):
            _launch(
                x.numel() // width, x, residual, weight, eps, out, total, width,
                WIDE=DTYPE_CODES[wide], UNIT_OFFSET=unit_offset, TILE=tile,
                num_warps=_warps(width),
            )  # fmt: skip
    return out, x if total is None else total
