"""The gate of a feed-forward layer, element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rms_norm import rounded
from .tiles import TILE, device_of


@triton.jit
def _swiglu_kernel(
    gate_ptr,  # [count]
    up_ptr,  # [count]
    out_ptr,  # [count]
    count,
    TILE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + at,
        rounded(gate / (1.0 + tl.exp(-gate)), out_ptr.dtype.element_ty) * up,
        mask=inside,
    )


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """``swiglu`` of checked arguments."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if gate.numel():
        with device_of(gate):
            _swiglu_kernel[(triton.cdiv(gate.numel(), TILE),)](
                gate, up, out, gate.numel(), TILE=TILE
            )
    return out
