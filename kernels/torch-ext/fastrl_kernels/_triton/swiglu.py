"""The gate of a feed-forward layer: a program holds a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launcher
from .tiles import device_of, programs_for

_TILE_BYTES = 4096  # 16 for each of 256 threads, the threads of AMD's four warps


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [N, width]
    up_ptr,  # [N, width]
    out_ptr,  # [N, width]
    gate_stride,
    up_stride,
    width,
    TILE: tl.constexpr,
):
    pieces = tl.cdiv(width, TILE)
    at = tl.program_id(0)
    row = (at // pieces).to(tl.int64)
    column = at % pieces * TILE + tl.arange(0, TILE)
    inside = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + column, silu * up, mask=inside)


_launch = launcher(_swiglu_kernel)


def _by_rows(x: Tensor, width: int) -> tuple[Tensor, int]:
    """The memory of [N, width] and the stride of its rows; no view is made of what is
    contiguous."""
    if x.is_contiguous():
        return x, width
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(-1) == 1 or width == 1 else rows.contiguous()
    return rows, rows.stride(0)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``swiglu`` of checked arguments."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        width = gate.shape[-1] if gate.dim() else 1
        tile = _TILE_BYTES // gate.element_size()
        programs = gate.numel() // width * programs_for(width, tile)
        (gate, gate_stride), (up, up_stride) = _by_rows(gate, width), _by_rows(up, width)
        with device_of(gate):
            _launch(programs, gate, up, out, gate_stride, up_stride, width, TILE=tile)
    return out
