"""The compiled functions, on fp32 tensors of a CPU that were checked."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch import watched
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
    "pack": "pplllll",
    "linear": "pplpplpplll",
    "rms_norm": "pppppfll",
    "swiglu": "ppplll",
    "rotate_and_store": "p" * 14 + "f" + "l" * 7,
    "decode_attention": "p" * 8 + "ff" + "l" * 8,
    "draw": "ppplpflll",
    "columns_of_a_panel": "",
    "numbers_of_a_row": "p",
    "decode_layer": "p" * 13 + "lll",
}
Strides = ctypes.c_long * 3


@functools.cache
def function(name: str) -> Callable[..., int]:
    found = getattr(library(), name)
    found.argtypes = [_KINDS[kind] for kind in _ARGUMENTS[name]]
    return found


def address(x: Tensor | None) -> int | None:
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


def are_contiguous_fp32(*tensors: Tensor | None) -> bool:
    return are_fp32(*tensors) and all(x is None or x.is_contiguous() for x in tensors)


_PLAIN = (Tensor, torch.nn.Parameter)


class Panels:
    """A copy of weights [N_i, K], one below the other, in panels of columns, for products without
    gradients. Where PyTorch's operations are watched, as in plans, it is made and used by them."""

    def __init__(self, *weights: Tensor):
        self.rows, self.terms = sum(map(len, weights)), weights[0].shape[1]
        self.columns = function("columns_of_a_panel")()
        panels = -(-self.rows // self.columns)
        if watched():
            whole = F.pad(torch.cat(weights), (0, 0, 0, panels * self.columns - self.rows))
            by_panel = whole.view(panels, self.columns, self.terms)
            self.weight = by_panel.transpose(1, 2).contiguous()
            return
        self.weight = weights[0].new_empty(panels, self.terms, self.columns)
        self.weight[self.rows // self.columns :] = 0
        first = 0
        for x in weights:
            function("pack")(address(self.weight), address(x), *x.shape, *x.stride(), first)
            first += len(x)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x wᵀ + b [..., N] of fp32 x [..., K]."""
        if watched():
            by_panel = x.reshape(-1, self.terms) @ self.weight
            out = by_panel.transpose(0, 1).reshape(-1, len(self.weight) * self.columns)
            out = out[:, : self.rows].reshape(*x.shape[:-1], self.rows)
            return out if bias is None else out + bias
        return _linear(x, self.weight, None, self.rows, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + b [..., N] of x [..., K] and a weight [N, K] as it is: the bits of :class:`Panels`,
    without the copy."""
    if watched():
        return F.linear(x, weight, bias)
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    return _linear(x, None, weight, len(weight), bias)


def _linear(
    x: Tensor, panels: Tensor | None, weight: Tensor | None, rows: int, bias: Tensor | None
) -> Tensor:
    terms = x.shape[-1]
    flat = x.reshape(-1, terms)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    bias = None if bias is None else bias.contiguous()
    out, turned = x.new_empty(*x.shape[:-1], rows), x.new_empty(flat.numel())
    if flat.numel():
        down = 0 if weight is None else weight.stride(0)
        at = address(out), address(flat), flat.stride(0), address(panels), address(weight), down
        function("linear")(*at, address(bias), address(turned), len(flat), rows, terms)
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
    at = map(address, (out, total, x, residual, weight))
    function("rms_norm")(*at, eps, x.numel() // width, width)
    return out, total


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(g)·u of tensors [..., I]."""
    flat = [_rows(x) for x in (gate, up)]
    if flat[0].stride(0) != flat[1].stride(0):
        flat = [x.contiguous() for x in flat]
    out = gate.new_empty(gate.shape)
    rows, width = flat[0].shape
    function("swiglu")(
        address(out), address(flat[0]), address(flat[1]), flat[0].stride(0), rows, width
    )
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
    outside = function("rotate_and_store")(
        *(address(x) for x in (out, *heads)),
        Strides(*(x.stride(0) for x in heads)),
        *(address(cos), address(sin), address(keys), Strides(*keys.stride()[:3])),
        *(address(values), Strides(*values.stride()[:3]), address(positions)),
        *(address(x) for x in of_norms),
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
    failed = function("decode_attention")(
        *(address(out), address(query), address(keys), Strides(*keys.stride()[:3])),
        *(address(values), Strides(*values.stride()[:3]), address(lengths), address(sinks)),
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
    at = (
        address(tokens),
        address(figures),
        address(logits),
        logits.stride(0),
        address(keys),
        p.temperature,
    )
    if function("draw")(*at, rows, vocabulary, size):
        raise MemoryError(f"no memory for the exponentials of {vocabulary} logits")
    return SampledTokens(tokens, *figures.unbind())
