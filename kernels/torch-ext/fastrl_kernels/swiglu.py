"""The gate of a transformer's feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._cpu.native import calls as native
from .argument_types import explains_types
from .checks import check_device, check_float, check_same_shape
from .dispatch import choose


@explains_types
def swiglu(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(g) · u, with silu(g) = g·σ(g) in fp32, rounded to its dtype, as the product is.

    Args:
        gate, up: [...] of one dtype: fp32, bf16 or fp16. Forward only.
        backend: "auto", "triton", "torch" or "native"; see ``explain``.

    Returns:
        [...] of their dtype.

    Raises:
        TypeError: dtypes that are not as above.
        ValueError: shapes or devices that differ.

    Source: Shazeer, 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202).
    """
    check_float("gate", gate)
    if up.dtype != gate.dtype:
        raise TypeError(f"up is {up.dtype}, gate {gate.dtype}: convert one of them")
    check_same_shape("up", up, "gate", gate)
    check_device("up", up, "gate", gate)
    chosen = choose(backend, gate)
    if chosen == "triton":
        from ._triton.swiglu import gated

        return gated(gate, up)
    if chosen == "native" and native.are_fp32(gate, up):
        return native.swiglu(gate, up)
    with torch.no_grad():
        return F.silu(gate) * up
