"""The ahead-of-time gate's calls of attention over a cache of keys and values in slots."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import fastrl_kernels as ops
from benchmarks.aot_judge import Case, Expect

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS, SLOTS, TOKENS = 4, 8, 1024

ATTENTION = Expect(load_bytes=16)
# name: query heads to a head of keys, and options; a span of one split makes one launch
_VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "group=1": (1, {}),
    "group=7": (7, {}),
    "group=7 one split": (7, {"span": 256}),
    "group=8 window softcap": (8, {"window": 200, "softcap": 50.0}),
    "group=80": (80, {}),
}
_FEW = ("group=1", "group=7 one split", "group=8 window softcap")


def attention_cases() -> Iterator[Case]:
    """Every dtype and width; with the usual ones, every variant."""

    def call(dtype: torch.dtype, width: int, group: int, options: dict[str, Any]) -> None:
        query = torch.zeros(ROWS, 2 * group, width, dtype=dtype)
        keys, values = torch.zeros(2, SLOTS, TOKENS, 2, width, dtype=dtype)
        lengths = torch.ones(ROWS, dtype=torch.int32)
        ops.decode_attention(query, keys, values, lengths, backend="triton", **options)

    calls = [
        (name, width, variant)
        for name in DTYPES
        for width in (64, 128)
        for variant in (_VARIANTS if name == "bf16" else _FEW)
    ]
    calls += [(name, width, _FEW[1]) for name in ("bf16", "fp32") for width in (80, 96, 256)]
    for name, width, variant in calls:
        group, options = _VARIANTS[variant]
        yield Case(
            "decode_attention",
            f"{name} D={width} {variant}",
            partial(call, DTYPES[name], width, group, options),
            ATTENTION,
        )
