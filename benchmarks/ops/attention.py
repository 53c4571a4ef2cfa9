"""decode_attention: one query per slot, on a cache of keys and values."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastrl_kernels as kernels
from benchmarks import eager, peers
from benchmarks.gate import Problem, Results
from benchmarks.ops.inputs import normal
from benchmarks.ops.record import Compiled, Op, Sizes, Work
from benchmarks.shapes import Attention, Shape
from benchmarks.timing import DTYPES
from fastrl_kernels import reference

GPT2 = Attention(12, 12, 64)
QWEN25_05B = Attention(14, 2, 64)
LLAMA3_8B = Attention(32, 8, 128)
MISTRAL_7B = Attention(32, 8, 128, window=4096)
GEMMA2_2B = Attention(8, 4, 256, window=4096, softcap=50.0)  # every other layer of it

# (layer, slots, tokens) of decode steps: many samples at a time, and one alone.
DECODES = (
    (LLAMA3_8B, 64, 2048),
    (QWEN25_05B, 256, 512),
    (QWEN25_05B, 16, 512),
    (GPT2, 1, 512),
    (GEMMA2_2B, 16, 2048),
    (MISTRAL_7B, 16, 8192),
)


def ragged_lengths(slots: int, tokens: int, active: float) -> list[int]:
    """Live tokens of each slot, the same at every call: evenly spread between 2·active - 1 and all
    of the tokens, both ends and at least 1 among them, in no order."""
    least = max(1, round((2 * active - 1) * tokens))
    lengths = [tokens - (tokens - least) * i // max(slots - 1, 1) for i in range(slots)]
    random.Random(0).shuffle(lengths)
    return lengths


def _decode_attention(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    layer = shape.attention
    assert layer is not None
    dtype, width = DTYPES[shape.dtype], layer.width
    keys, values = torch.empty(2, shape.rows, shape.steps, layer.kv_heads, width, dtype=dtype)
    for slot in (*keys, *values):
        slot.copy_(normal(generator, *slot.shape))
    lengths = torch.tensor(ragged_lengths(shape.rows, shape.steps, shape.active), dtype=torch.int32)
    position, ends = torch.arange(shape.steps), lengths.unsqueeze(1)
    inputs = {
        "query": normal(generator, shape.rows, layer.heads, width).to(dtype),
        "keys": keys,
        "values": values,
        "lengths": lengths,
        "mask": (position < ends) & (position >= ends - (layer.window or shape.steps)),
    }

    def call(op: Callable[..., Tensor], mask: Tensor, **inputs: Tensor) -> Results:
        return {"out": op(**inputs, **layer.options)}  # it knows lengths and needs no mask

    return Problem(
        inputs,
        ours=partial(call, partial(kernels.decode_attention, backend=backend)),
        eager=partial(eager.decode_attention, **layer.options),
        exact=partial(call, reference.decode_attention),
        by_row=frozenset({*inputs, "out"}),
        row_bytes=8 * shape.steps * layer.token_elements,
    )


def _work(shape: Shape) -> Work:
    layer = shape.attention
    assert layer is not None
    lengths = ragged_lengths(shape.rows, shape.steps, shape.active)
    live = sum(min(n, layer.window or n) for n in lengths)
    return Work(live * layer.token_elements * shape.itemsize, 0, "live keys and values read")


def _decode(layer: Attention, slots: int, tokens: int, dtype: str = "bf16") -> Shape:
    """Lengths from 1 to all."""
    return Shape(
        "decode_attention", slots, dtype, tokens, active=0.5, backward=False, attention=layer
    )


def _checked(sizes: Sizes) -> Iterator[Shape]:
    """Caps are small enough for these scores to reach them."""
    odd, even = sizes.tokens
    window = odd // 3
    for dtype, tokens, heads, options in (
        ("bf16", even, (4, 2), {}),
        ("fp32", odd, (8, 2), {}),
        ("fp16", odd, (3, 3), {"window": window}),
        ("fp32", even, (4, 2), {"softcap": 2.0}),
        ("bf16", odd, (14, 2), {"window": window, "softcap": 2.0}),
    ):
        yield _decode(Attention(*heads, sizes.width, **options), sizes.rows, tokens, dtype)


# name: query heads per head of keys, and options; a span of one split has nothing to merge. Of the
# heads, what matters is how many a program takes: up to 16, or 32, of a half dtype; 1 or 2 of fp32.
_COMPILED: dict[str, tuple[int, dict[str, Any]]] = {
    "group=1": (1, {}),
    "group=7 one split": (7, {"span": 256}),
    "group=8 window softcap": (8, {"window": 200, "softcap": 50.0}),
    "group=80": (80, {}),
    "group=8 window sinks": (8, {"window": 128, "sinks": True}),
    "group=5 chunk": (5, {"chunk": 512}),
}
_COMPILED_CALLS = (
    *product(("bf16",), (64, 128), ("group=7 one split", "group=80")),
    ("bf16", 64, "group=1"),
    ("bf16", 128, "group=8 window softcap"),
    ("fp16", 64, "group=7 one split"),
    ("fp16", 128, "group=8 window softcap"),
    *product(("fp32",), (64, 128), ("group=1", "group=8 window softcap")),
    ("bf16", 80, "group=7 one split"),
    ("fp32", 96, "group=7 one split"),
    *product(("bf16", "fp32"), (256,), ("group=8 window softcap",)),
    ("bf16", 64, "group=8 window sinks"),
    ("bf16", 128, "group=5 chunk"),
)


def _compiled() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, width: int, group: int, options: dict[str, Any]) -> None:
        query = torch.zeros(4, 2 * group, width, dtype=dtype)
        keys, values = torch.zeros(2, 8, 1024, 2, width, dtype=dtype)
        lengths = torch.ones(4, dtype=torch.int32)
        if "sinks" in options:
            options = {**options, "sinks": torch.zeros(2 * group, dtype=dtype)}
        kernels.decode_attention(query, keys, values, lengths, backend="triton", **options)

    def of_latents(dtype: torch.dtype, heads: int) -> None:
        """DeepSeek-V3's, in which values are the first numbers of the keys."""
        latents = torch.zeros(8, 1024, 1, 576, dtype=dtype)
        query, lengths = torch.zeros(4, heads, 576, dtype=dtype), torch.ones(4, dtype=torch.int32)
        kernels.decode_attention(query, latents, latents[..., :512], lengths, backend="triton")

    for name, width, label in _COMPILED_CALLS:
        made = partial(call, DTYPES[name], width, *_COMPILED[label])
        yield Compiled(f"{name} D={width} {label}", made)

    for name, heads in (("bf16", 128), ("bf16", 16), ("fp32", 16)):
        yield Compiled(f"{name} latents heads={heads}", partial(of_latents, DTYPES[name], heads))

    def in_two_launches(**given: Any) -> None:
        from fastrl_kernels._triton import decode_attention

        with mock.patch.object(decode_attention, "_merges_itself", return_value=False):
            call(**given)

    given = {"dtype": torch.bfloat16, "width": 128, "group": 8, "options": {}}
    yield Compiled("bf16 D=128 group=8 two launches", partial(in_two_launches, **given))


DECODE_ATTENTION = Op(
    problem=_decode_attention,
    work=_work,
    main={
        "cpu": ((_decode(*DECODES[2], "fp32"), ()),),
        "cuda": tuple((_decode(*DECODES[i]), ()) for i in (0, 1, 3)),
    },
    axes={"attention_rows_steps": DECODES, "dtype": tuple(DTYPES), "active": (1.0, 0.5)},
    checked=_checked,
    compiled=_compiled,
    peers={"sdpa": peers.sdpa, "flash-attn": peers.flash_attn_cache},
    eager="a masked softmax over the whole slots",
)
