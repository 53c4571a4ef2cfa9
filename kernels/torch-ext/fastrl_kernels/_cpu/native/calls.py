"""The compiled functions, on fp32 tensors of a CPU that were checked."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...race import part_size
from ...types import (
    COLDEST,
    AttentionSettings,
    RotaryInputs,
    SampledTokens,
    SamplingParameters,
)
from .build import library

_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}
_ARGUMENTS = {
    "pack": "ppllll",
    "linear": "pplppplll",
    "rms_norm": "pppppfll",
    "swiglu": "ppplll",
    "rotate_and_store": "p" * 14 + "f" + "l" * 7,
    "decode_attention": "p" * 8 + "ff" + "l" * 8,
    "draw": "ppplpflll",
    "columns_of_a_panel": "",
}
_Strides = ctypes.c_long * 3


@functools.cache
def _function(name: str) -> Callable[..., int]:
    found = getattr(library(), name)
    found.argtypes = [_KINDS[kind] for kind in _ARGUMENTS[name]]
    return found


def _at(x: Tensor | None) -> int | None:
    if x is None:
        return None
    at = x.data_ptr()
    if not at and x.numel():
        raise RuntimeError("compiled code was given a tensor without memory")
    return at


def are_fp32(*tensors: Tensor | None) -> bool:
    """Whether all are plain fp32 tensors of a CPU."""
    return all(
        x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and type(x) in _PLAIN)
        for x in tensors
    )


_PLAIN = (Tensor, torch.nn.Parameter)


class Panels:
    """A copy of a weight [N, K] in panels of columns, for products without gradients."""

    def __init__(self, weight: Tensor):
        self.rows, self.terms = weight.shape
        columns = _function("columns_of_a_panel")()
        self.weight = torch.empty(-(-self.rows // columns) * columns * self.terms)
        _function("pack")(_at(self.weight), _at(weight), *weight.shape, *weight.stride())

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x wᵀ + b [..., N] of fp32 x [..., K]."""
        flat = x.reshape(-1, self.terms)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        bias = None if bias is None else bias.contiguous()
        out, turned = x.new_empty(*x.shape[:-1], self.rows), x.new_empty(flat.numel())
        if flat.numel():
            at = _at(out), _at(flat), flat.stride(0), _at(self.weight), _at(bias), _at(turned)
            _function("linear")(*at, len(flat), self.rows, self.terms)
        return out


def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The normalised rows [..., H], and the sum that was normalised."""
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    width = x.shape[-1]
    at = map(_at, (out, total, x, residual, weight))
    _function("rms_norm")(*at, eps, x.numel() // width, width)
    return out, total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(g)·u of tensors [..., I]."""
    flat = [_rows(x) for x in (gate, up)]
    if flat[0].stride(0) != flat[1].stride(0):
        flat = [x.contiguous() for x in flat]
    out = gate.new_empty(gate.shape)
    rows, width = flat[0].shape
    _function("swiglu")(_at(out), _at(flat[0]), _at(flat[1]), flat[0].stride(0), rows, width)
    return out


def _rows(x: Tensor) -> Tensor:
    """x as [rows, C], with rows that are contiguous."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def rotate_and_store(inputs: RotaryInputs) -> Tensor:
    """Rotated queries [B, Hq, D]; keys and values are stored."""
    query, key, value, cos, sin, keys, values, positions, norms = inputs
    heads = [
        x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
        for x in (query, key, value)
    ]
    cos, sin, positions = (x.contiguous() for x in (cos, sin, positions))
    batch, count, width = query.shape
    out = query.new_empty(query.shape)
    of_norms = [None if norms is None else x.contiguous() for x in (norms or ())[:2]] or [None] * 2
    outside = _function("rotate_and_store")(
        *(_at(x) for x in (out, *heads)),
        _Strides(*(x.stride(0) for x in heads)),
        *(_at(cos), _at(sin), _at(keys), _Strides(*keys.stride()[:3])),
        *(_at(values), _Strides(*values.stride()[:3]), _at(positions)),
        *(_at(x) for x in of_norms),
        0.0 if norms is None else norms.eps,
        *(keys.shape[1], batch, count, key.shape[1], width, value.shape[2], cos.shape[1]),
    )
    if outside:
        raise IndexError(f"a position is outside of a slot's {keys.shape[1]} tokens")
    return out


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    sinks: Tensor | None,
    a: AttentionSettings,
) -> Tensor:
    """Attention of queries [B, Hq, D] over their slots, [B, Hq, Dv]."""
    batch, heads, width = query.shape
    if lengths.dtype == torch.int64:
        lengths = lengths.clamp(max=a.span + 1)  # no smaller by its 32 low bits
    query, lengths = query.contiguous(), lengths.int().contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    out = query.new_empty(batch, heads, values.shape[-1])
    failed = _function("decode_attention")(
        *(_at(out), _at(query), _at(keys), _Strides(*keys.stride()[:3])),
        *(_at(values), _Strides(*values.stride()[:3]), _at(lengths), _at(sinks)),
        *(a.scale, a.softcap or 0.0, a.span, a.window, a.chunk),
        *(batch, heads, keys.shape[2], width, values.shape[-1]),
    )
    if failed:
        raise MemoryError(f"no memory for the scores of {a.span} tokens")
    return out


def draws(logits: Tensor, p: SamplingParameters) -> bool:
    """Whether :func:`draw` is what the parameters ask for."""
    plain = isinstance(p.temperature, float | int) and p.temperature >= COLDEST
    return plain and are_fp32(logits) and not any(p.truncates(logits.shape[-1]))


def draw(logits: Tensor, keys: Tensor, p: SamplingParameters) -> SampledTokens:
    """Tokens from the softmax of logits [N, V] over a temperature, which nothing cuts."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    keys = keys.contiguous()
    rows, vocabulary = logits.shape
    size = part_size(vocabulary)
    tokens, figures = torch.empty_like(keys), logits.new_empty(5, rows)
    at = _at(tokens), _at(figures), _at(logits), logits.stride(0), _at(keys), p.temperature
    if _function("draw")(*at, rows, vocabulary, size):
        raise MemoryError(f"no memory for the exponentials of {vocabulary} logits")
    return SampledTokens(tokens, *figures.unbind())
