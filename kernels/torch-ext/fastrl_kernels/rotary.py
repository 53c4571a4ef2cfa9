"""Rotary position embedding of a decode step's queries and keys, which go into the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._cpu.native import calls as native
from .argument_types import explains_types
from .checks import Passed, check_device, check_float, check_positive, is_plain, layout
from .dispatch import choose
from .rms_norm import torch_rms_norm
from .types import HeadNorms, RotaryInputs


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, h, D], rotated by angles [B, R]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    front, behind = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = front.chunk(2, -1)
    turned = front * cos + torch.cat([-high, low], -1) * sin
    return turned if not behind.shape[-1] else torch.cat([turned, behind.to(turned.dtype)], -1)


def _torch_rotate_and_store(inputs: RotaryInputs) -> Tensor:
    query, key, value, cos, sin, keys, values, positions, norms = inputs
    if norms is not None:
        wide = torch.promote_types(query.dtype, norms.query.dtype)
        query, _ = torch_rms_norm(query, norms.query, None, norms.eps, False, wide)
        key, _ = torch_rms_norm(key, norms.key, None, norms.eps, False, wide)
    rows = torch.arange(len(query), device=query.device)
    keys.index_put_((rows, positions), _rotated(key, cos, sin).to(keys.dtype))
    values.index_put_((rows, positions), value.to(values.dtype))
    return _rotated(query, cos, sin).to(keys.dtype)


def _check(inputs: RotaryInputs) -> None:
    query, key, value, cos, sin, keys, values, positions, norms = inputs
    named = dict(zip(inputs._fields[:7], inputs[:7], strict=True))
    if norms is not None:
        named |= {"norms.query": norms.query, "norms.key": norms.key}
        check_positive("norms.eps", norms.eps)
    for name, x in named.items():
        check_float(name, x)
        check_device(name, x, "query", query)
    check_device("positions", positions, "query", query)
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
        raise ValueError(
            f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}: they must be [B, heads, width]"
        )
    if query.dtype != key.dtype:
        raise TypeError(f"key is {key.dtype}, query {query.dtype}: convert one of them")
    if cos.dtype != sin.dtype:
        raise TypeError(f"sin is {sin.dtype}, cos {cos.dtype}: convert one of them")
    if keys.dtype != values.dtype:
        raise TypeError(f"values are {values.dtype}, keys {keys.dtype}: convert one of them")
    batch, _, width = query.shape
    for name, x, cache in (("keys", key, keys), ("values", value, values)):
        fits = cache.dim() == 4 and cache.shape[0] >= batch and cache.stride(-1) == 1
        if not fits or cache.shape[2:] != x.shape[1:] or len(x) != batch:
            raise ValueError(
                f"{name} have shape {tuple(cache.shape)} for {name[:-1]} {tuple(x.shape)} and "
                f"query {tuple(query.shape)}: they must be [S, M, heads, width] with S ≥ B, and "
                "a last stride of 1"
            )
    if keys.shape[:2] != values.shape[:2] or key.shape[-1] != width:
        raise ValueError(
            f"keys have shape {tuple(keys.shape)}, values {tuple(values.shape)}, query "
            f"{tuple(query.shape)}: slots and tokens must be equal, and keys as wide as queries"
        )
    turned = cos.shape[-1] if cos.dim() == 2 else 0
    if cos.shape != sin.shape or len(cos) != batch or turned % 2 or not 0 < turned <= width:
        raise ValueError(
            f"cos and sin have shapes {tuple(cos.shape)} and {tuple(sin.shape)}: they must be "
            f"[{batch}, R] with an even R of at most {width}"
        )
    if positions.dtype != torch.int64 or positions.shape != (batch,):
        raise ValueError(
            f"positions are {positions.dtype} {tuple(positions.shape)}: they must be int64 "
            f"({batch},)"
        )
    if norms is not None and norms.query.dtype != norms.key.dtype:
        raise TypeError(f"norms are {norms.query.dtype} and {norms.key.dtype}: convert one of them")
    if norms is not None and not norms.query.shape == norms.key.shape == (width,):
        raise ValueError(
            f"norms have shapes {tuple(norms.query.shape)} and {tuple(norms.key.shape)}: they must "
            f"be ({width},)"
        )


_passed = Passed()


@explains_types
def rotate_and_store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    norms: HeadNorms | None = None,
    backend: str = "auto",
) -> Tensor:
    """Rotates the queries and keys of one new token per row, and stores keys and values:

        rot(x) = x·cos + (-x_high, x_low)·sin,   x = (x_low, x_high)

    on the first R of the D numbers of each head; the others stay. Row i's token becomes that at
    ``positions[i]`` of slot i. Rounds where transformers' models do: each product, and their sum,
    to the wider dtype of x and cos, then to the cache's. Nothing waits for the device.

    Args:
        query: [B, Hq, D] fp32, bf16 or fp16.
        key: [B, Hkv, D] of the query's dtype.
        value: [B, Hkv, Dv].
        cos, sin: [B, R] of one dtype, R even and at most D.
        keys, values: the cache, [S, M, Hkv, D] and [S, M, Hkv, Dv] of one dtype, S ≥ B. The last
            dimension is contiguous. Changed in place.
        positions: [B] int64 in [0, M), else the Triton path stores nothing.
        norms: RMS normalisation of each head of queries and keys before.
        backend: "auto", "triton", "torch" or "native"; see ``explain``.

    Returns:
        The rotated queries, [B, Hq, D] of the cache's dtype.

    Raises:
        TypeError: dtypes that are not as above.
        ValueError: shapes, strides or devices that do not fit.

    Source: Su et al., 2021, "RoFormer" (arXiv:2104.09864), by halves as in transformers.
    """
    inputs = RotaryInputs(query, key, value, cos, sin, keys, values, positions, norms)
    seen: tuple[Any, ...] | None = None
    if is_plain(query):
        of_norms = norms and (layout(norms.query), layout(norms.key), norms.eps)
        seen = *map(layout, inputs[:8]), of_norms
    if seen is None or _passed.get(seen) is None:
        _check(inputs)
        if seen is not None:
            _passed.keep(seen, True)
    chosen = choose(backend, query)
    if chosen == "triton":
        from ._triton import rotary

        return rotary.rotate_and_store(inputs)
    if chosen == "native" and native.are_fp32(*inputs[:7], *(norms or ())[:2]):
        return native.rotate_and_store(inputs)
    with torch.no_grad():
        return _torch_rotate_and_store(inputs)
