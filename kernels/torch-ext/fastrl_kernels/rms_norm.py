"""RMS normalisation of a residual stream, with the addition to it fused in."""

from __future__ import annotations

import torch
from torch import Tensor

from ._cpu.native import calls as native
from .argument_types import explains_types
from .checks import check_device, check_float, check_float_dtype, check_positive, check_same_shape
from .dispatch import choose


def torch_rms_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None,
    eps: float,
    unit_offset: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of checked arguments: the result, and the sum that was normalised."""
    total = x if residual is None else residual + x
    normed = total.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.float())).to(dtype), total
    return (weight * normed.to(total.dtype)).to(dtype), total


@explains_types
def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """w · s / √(mean s² + ε) over the last dimension, of s = x, or of s = residual + x.

    Rounds where transformers' models do: s to the wider of its two dtypes, s / √(…) to the dtype of
    s, and the product. With ``unit_offset`` it is (1 + w) in place of w, and the product alone is
    rounded, as in Gemma. Sums are fp32, over a row alone: its bits do not depend on others. Forward
    only.

    Args:
        x: [..., H] fp32, bf16 or fp16.
        weight: [H] fp32, bf16 or fp16.
        residual: [..., H], to which x is added first.
        eps: ε > 0.
        dtype: of the result, fp32, bf16 or fp16; by default the wider of those of s and w.
        backend: "auto", "triton", "torch" or "native"; see ``explain``.

    Returns:
        [..., H]; with a residual also s, to which the next layer adds.

    Raises:
        TypeError: dtypes that are not as above.
        ValueError: shapes or devices that do not fit, ε ≤ 0.

    Source: Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization" (arXiv:1910.07467).
    """
    check_float("x", x)
    check_float("weight", weight)
    if x.dim() == 0 or weight.dim() != 1 or weight.shape != x.shape[-1:] or weight.shape[0] == 0:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}: they must be [..., H] "
            "and [H]"
        )
    check_device("weight", weight, "x", x)
    eps = check_positive("eps", eps)
    wide = x.dtype
    if residual is not None:
        check_float("residual", residual)
        check_same_shape("residual", residual, "x", x)
        check_device("residual", residual, "x", x)
        if residual.dtype != wide:
            wide = torch.promote_types(wide, residual.dtype)
    if dtype is not None:
        check_float_dtype("dtype", dtype)
    else:
        same = unit_offset or weight.dtype == wide
        dtype = wide if same else torch.promote_types(wide, weight.dtype)
    chosen = choose(backend, x)
    if chosen == "triton":
        from ._triton.rms_norm import normalise

        normed, total = normalise(x, weight, residual, eps, unit_offset, wide, dtype)
    elif chosen == "native" and not unit_offset and native.are_fp32(x, weight, residual):
        normed, total = native.rms_norm(x, weight, residual, eps)
        normed = normed.to(dtype)
    else:
        with torch.no_grad():
            normed, total = torch_rms_norm(x, weight, residual, eps, unit_offset, dtype)
    return normed if residual is None else (normed, total)
