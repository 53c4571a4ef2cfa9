"""The gate of a feed-forward layer: a program holds a piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import device_of

_TILE_BYTES = 4096  # 16 for each of 256 threads, as AMD's four warps have


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


def _by_rows(x: Tensor, width: int) -> Tensor:
    """[N, width], a view where there is one."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(-1) == 1 or width == 1 else rows.contiguous()


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``swiglu`` of checked arguments."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if gate.numel():
        width = gate.shape[-1] if gate.dim() else 1
        gate, up = _by_rows(gate, width), _by_rows(up, width)
        tile = _TILE_BYTES // gate.element_size()
        with device_of(gate):
            _swiglu_kernel[(len(gate) * triton.cdiv(width, tile),)](
                gate, up, out, gate.stride(0), up.stride(0), width, TILE=tile
            )
    return out
