"""A decoder layer of a decode step in one call of compiled code."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ...types import HeadNorms
from . import calls
from .calls import Panels, Strides, address


class Norm(NamedTuple):
    weight: Tensor  # [H]
    eps: float


class Weights(NamedTuple):
    """A layer's weights; each product's in panels, with its bias."""

    attention_norm: Norm
    qkv: tuple[Panels, Tensor | None]
    head_norms: HeadNorms | None
    sinks: Tensor | None  # [Hq]
    out: tuple[Panels, Tensor | None]
    mlp_norm: Norm
    gate_up: tuple[Panels, Tensor | None]
    down: tuple[Panels, Tensor | None]


class Shape(NamedTuple):
    """Heads of queries, keys and values, their widths, and how they attend."""

    query_heads: int
    key_heads: int
    key_width: int
    value_width: int
    rotated: int  # of the key's width
    scale: float
    softcap: float | None
    window: int | None
    chunk: int | None


_POINTERS = (
    *("attention_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "sinks", "out", "out_bias"),
    *("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
)
_FLOATS = ("attention_eps", "head_eps", "mlp_eps", "scale", "cap")
_LONGS = ("H", "Hq", "Hkv", "D", "Dv", "R", "I", "window", "chunk")
_LONGEST = 1 << 62  # a window or chunk that no slot exceeds


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_float) for name in _FLOATS),
        *((name, ctypes.c_long) for name in _LONGS),
    )


class DecodeLayer:
    """A decoder layer such as Llama's, for one new token in each row, with weights that are not
    written to meanwhile: the bits of the single ops."""

    def __init__(self, w: Weights, s: Shape):
        norms = w.head_norms
        of_heads = (None, None, 0.0) if norms is None else norms
        products = [(panels.weight, bias) for panels, bias in (w.qkv, w.out, w.gate_up, w.down)]
        qkv, out, gate_up, down = products
        self._tensors = (
            *(w.attention_norm.weight, *qkv, *of_heads[:2], w.sinks, *out),
            *(w.mlp_norm.weight, *gate_up, *down),
        )
        assert calls.are_contiguous_fp32(*self._tensors)
        numbers = w.attention_norm.eps, of_heads[2], w.mlp_norm.eps, s.scale, s.softcap or 0.0
        self.width, self.shape = w.qkv[0].terms, s
        self._layer = _Layer(
            *map(address, self._tensors),
            *numbers,
            *(self.width, *s[:5], w.gate_up[0].rows // 2),
            *(_LONGEST if x is None else x for x in (s.window, s.chunk)),
        )
        self._numbers = calls.function("numbers_of_a_row")(ctypes.byref(self._layer))

    def __call__(
        self,
        x: Tensor,
        stream: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        positions: Tensor,
        lengths: Tensor,
        span: int,
    ) -> tuple[Tensor, Tensor]:
        """The layer's last product and the stream [B, 1, H] that it is to be added to.

        Args:
            x: [B, 1, H], the last layer's such product, or what the first layer gets.
            stream: [B, 1, H] that x is to be added to; None in front of the first layer.
            rotation: cosines and sines [B, R].
            cache: keys and values [S, M, Hkv, D], to which the token's are written.
            positions: [B] int64 of the tokens.
            lengths: [B] int32, contiguous, of live tokens, those included.
            span: a bound of all lengths.

        Raises:
            IndexError: a position that is outside of a slot.
        """
        (cos, sin), (keys, values), rows = rotation, cache, len(x)
        out, total = x.clone(memory_format=torch.contiguous_format), torch.empty_like(x)
        stream = None if stream is None else stream.contiguous()
        cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
        memory = x.new_empty(rows * self._numbers)
        failed = calls.function("decode_layer")(
            *(ctypes.byref(self._layer), address(out), address(total), address(stream)),
            *(address(cos), address(sin), address(keys), Strides(*keys.stride()[:3])),
            *(address(values), Strides(*values.stride()[:3]), address(positions)),
            *(address(lengths), address(memory), keys.shape[1], span, rows),
        )
        if failed == 1:
            raise IndexError(f"a position is outside of a slot's {keys.shape[1]} tokens")
        if failed:
            raise MemoryError(f"no memory for the scores of {span} tokens")
        return out, total
