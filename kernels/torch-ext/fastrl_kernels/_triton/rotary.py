"""Rotary position embedding: a program holds a head of one row, be it of queries, of keys, or of
values, which are stored as they are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import RotaryInputs
from .launch import launcher
from .rms_norm import DTYPE_CODES, rounded
from .tiles import device_of, power_of_2


@triton.jit
def _head(ptr, columns, D: tl.constexpr):
    return tl.load(ptr + columns, mask=columns < D, other=0.0)


@triton.jit
def _rotated(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    columns,
    eps,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """A head's numbers at these columns, normalised where there is a weight, and rotated."""
    HALF: tl.constexpr = R // 2
    turned = columns < R
    other = tl.where(turned, tl.where(columns < HALF, columns + HALF, columns - HALF), columns)
    x = _head(x_ptr, columns, D).to(tl.float32)
    y = _head(x_ptr, other, D).to(tl.float32)
    if weight_ptr is not None:
        scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / D + tl.cast(eps, tl.float32))
        weight = _head(weight_ptr, columns, D).to(tl.float32)
        x = rounded((x * scale).to(x_ptr.dtype.element_ty).to(tl.float32) * weight, NORMED)
        weight = _head(weight_ptr, other, D).to(tl.float32)
        y = rounded((y * scale).to(x_ptr.dtype.element_ty).to(tl.float32) * weight, NORMED)
    cos = tl.load(cos_ptr + columns, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + columns, mask=turned, other=0.0).to(tl.float32)
    y = tl.where(columns < HALF, -y, y)
    return rounded(rounded(x * cos, WIDE) + rounded(y * sin, WIDE), WIDE)


@triton.jit(do_not_specialize=["eps", "tokens", "heads", "kv_heads"])
def _rotate_and_store_kernel(
    query_ptr,  # [B, Hq, D]
    key_ptr,  # [B, Hkv, D]
    value_ptr,  # [B, Hkv, DV]
    cos_ptr,  # [B, R]
    sin_ptr,  # [B, R]
    query_weight_ptr,  # [D], or None: no normalisation
    key_weight_ptr,  # [D], likewise
    eps,
    positions_ptr,  # [B] int64
    keys_ptr,  # [S, M, Hkv, D]
    values_ptr,  # [S, M, Hkv, DV]
    out_ptr,  # [B, Hq, D]
    tokens,
    heads,
    kv_heads,
    query_stride,
    key_stride,
    value_stride,
    key_slot_stride,
    key_token_stride,
    key_head_stride,
    value_slot_stride,
    value_token_stride,
    value_head_stride,
    NORMED: tl.constexpr,  # codes of the dtypes of normalised and of rotated numbers
    WIDE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
):
    at = tl.program_id(0)
    every = heads + 2 * kv_heads
    row = (at // every).to(tl.int64)
    head = at % every
    columns = tl.arange(0, WIDTH)
    cos_ptr += row * R
    sin_ptr += row * R
    if head < heads:
        ptr = query_ptr + row * query_stride + head * D
        x = _rotated(ptr, query_weight_ptr, cos_ptr, sin_ptr, columns, eps, NORMED, WIDE, D, R)
        tl.store(out_ptr + (row * heads + head) * D + columns, x, mask=columns < D)
    else:
        position = tl.load(positions_ptr + row)
        stored = (position >= 0) & (position < tokens)
        head -= heads
        if head < kv_heads:
            ptr = key_ptr + row * key_stride + head * D
            x = _rotated(ptr, key_weight_ptr, cos_ptr, sin_ptr, columns, eps, NORMED, WIDE, D, R)
            target = keys_ptr + row * key_slot_stride + position * key_token_stride
            target += head.to(tl.int64) * key_head_stride
            tl.store(target + columns, x, mask=columns < tl.where(stored, D, 0))
        else:
            head -= kv_heads
            x = _head(value_ptr + row * value_stride + head * DV, columns, DV).to(tl.float32)
            target = values_ptr + row * value_slot_stride + position * value_token_stride
            target += head.to(tl.int64) * value_head_stride
            tl.store(target + columns, x, mask=columns < tl.where(stored, DV, 0))


_launch = launcher(_rotate_and_store_kernel)


def _with_heads_together(x: Tensor) -> Tensor:
    """x [B, h, D], copied unless each row is contiguous: parts of one product's rows stay as they
    are."""
    return x if x.is_contiguous() or x[:1].is_contiguous() else x.contiguous()


def rotate_and_store(inputs: RotaryInputs) -> Tensor:
    """``rotate_and_store`` of checked arguments."""
    query, key, value, cos, sin, keys, values, positions, norms = inputs
    query, key, value = map(_with_heads_together, (query, key, value))
    cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
    batch, heads, width = query.shape
    kv_heads, value_width = value.shape[1:]
    out = torch.empty((batch, heads, width), dtype=keys.dtype, device=query.device)
    query_weight = key_weight = None
    normed, eps = query.dtype, 0.0
    if norms is not None:
        query_weight, key_weight = norms.query.contiguous(), norms.key.contiguous()
        normed, eps = torch.promote_types(normed, norms.query.dtype), float(norms.eps)
    wide = normed if cos.dtype == normed else torch.promote_types(normed, cos.dtype)
    if batch and heads:
        key_strides, value_strides = keys.stride(), values.stride()
        with device_of(query):
            _launch(
                batch * (heads + 2 * kv_heads),
                query, key, value, cos, sin, query_weight, key_weight, eps,
                positions, keys, values, out, keys.shape[1], heads, kv_heads,
                query.stride(0), key.stride(0), value.stride(0),
                key_strides[0], key_strides[1], key_strides[2],
                value_strides[0], value_strides[1], value_strides[2],
                DTYPE_CODES[normed], DTYPE_CODES[wide], width, value_width, cos.shape[1],
                power_of_2(max(16, width, value_width)), num_warps=1,
            )  # fmt: skip
    return out
