"""Ops on logits [N, V]: token_logprobs, full_kl, sample_tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels as kernels
from benchmarks import eager, peers
from benchmarks.cases import Goal
from benchmarks.gate import Problem, Results
from benchmarks.ops.inputs import (
    ACTIVE,
    COMPILED_VOCABULARIES,
    ON_VOCABULARY,
    Size,
    backward,
    checked_rows,
    flags,
    labels_of,
    normal,
    upstream,
)
from benchmarks.ops.record import HOPPER, Compiled, Expect, Op, Work
from benchmarks.shapes import Shape
from benchmarks.timing import DTYPES
from fastrl_kernels import reference

ROWS = Expect(
    load_bytes=16,
    store_bytes=16,
    exempt=frozenset({"load_end", "store_end"}),
    why="the first and the last few elements of a row share a vector with other rows",
)


def _logits(shape: Shape, generator: torch.Generator) -> Tensor:
    """[N, V], filled by slices: in half precision no fp32 tensor of that size is made."""
    logits = torch.empty(shape.rows, shape.vocabulary, dtype=DTYPES[shape.dtype])
    for rows in logits.split(512):
        rows.copy_(normal(generator, *rows.shape, scale=3.0))
    return logits


def _work(shape: Shape, read: int = 1, words: str = "active logits read") -> Work:
    """Of an op that reads so many logits forward, and again for their gradient."""
    each = read * shape.active * shape.rows * shape.vocabulary * shape.itemsize
    if not shape.backward:
        return Work(each, 0, words)
    written = shape.rows * shape.vocabulary * shape.itemsize
    gradient = "their gradient" if read == 1 else "one gradient"
    return Work(2 * each + written, 0, f"{words} twice, {gradient} written")


def _compiled_sizes() -> Iterator[tuple[str, torch.dtype, Size]]:
    for name, dtype in DTYPES.items():
        for vocabulary in COMPILED_VOCABULARIES:
            yield f"{name} V={vocabulary}", dtype, (4, vocabulary)


def _unusual_sizes() -> Iterator[tuple[str, torch.dtype, Size]]:
    yield "bf16 V=503", torch.bfloat16, (4, 503)  # fits in one tile
    # Past 2 GiB, AMD addresses by pointer in place of buffer. The pages are never touched.
    yield "bf16 V=151936 >2GiB", torch.bfloat16, (8192, 151936)


def _row_options(rows: int, per_token: bool, masked: bool) -> dict[str, Any]:
    return {
        "temperature": torch.ones(rows) if per_token else 0.7,
        "mask": torch.ones(rows, dtype=torch.bool) if masked else None,
        "backend": "triton",
    }


def _token_logprobs(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    mask = None if shape.active == 1 else flags(generator, shape.rows, share=shape.active)
    entropy = shape.entropy != "off"

    def call(op: Callable[..., Any], **inputs: Tensor) -> Results:
        found = op(**inputs, entropy=entropy)
        return dict(zip(("logprobs", "entropies"), found if entropy else (found,), strict=False))

    inputs = {"logits": _logits(shape, generator), "labels": labels_of(shape, generator)}
    return Problem(
        inputs | ({"mask": mask} if mask is not None else {}),
        ours=partial(call, partial(kernels.token_logprobs, backend=backend)),
        eager=partial(eager.token_logprobs, entropy=entropy),
        exact=partial(call, reference.token_logprobs),
        wrt=("logits",) if shape.backward else (),
        upstream=upstream(shape, generator),
        by_row=frozenset({"logits", "labels", "mask", "logprobs", "entropies"}),
        row_bytes=8 * shape.vocabulary,
    )


# (entropy, temperature per token, mask): every pair of settings is in one of the four.
_PAIRS = ((False, False, False), (False, True, True), (True, False, True), (True, True, False))


def _compiled_token_logprobs() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, size: Size, entropy: bool, per_token: bool, masked: bool) -> None:
        found = kernels.token_logprobs(
            torch.empty(size, dtype=dtype, requires_grad=True),
            torch.zeros(size[0], dtype=torch.int64),
            entropy=entropy,
            **_row_options(size[0], per_token, masked),
        )
        backward(*(found if entropy else (found,)))

    few = ((False, False, False), (True, True, True))
    calls = [
        (*each, settings)
        for each in _compiled_sizes()
        for settings in (_PAIRS if each[1] == torch.bfloat16 else few)
    ]
    calls += [(*each, _PAIRS[-1]) for each in _unusual_sizes()]
    for name, dtype, size, settings in calls:
        named = zip(("entropy", "temperatures", "mask"), settings, strict=True)
        label = " ".join([name, *(word for word, on in named if on)])
        yield Compiled(label, partial(call, dtype, size, *settings), ROWS)


_QWEN = Shape("token_logprobs", 8192, "bf16", vocabulary=151936)
TOKEN_LOGPROBS = Op(
    problem=_token_logprobs,
    work=_work,
    main={
        "cpu": ((Shape("token_logprobs", 1024, vocabulary=50257, entropy="metric"), ()),),
        "cuda": (
            (_QWEN, (Goal("seconds", 2.6e-3, HOPPER),)),
            (dataclasses.replace(_QWEN, backward=False), (Goal("seconds", 0.9e-3, HOPPER),)),
            # rows start unaligned
            (dataclasses.replace(_QWEN, vocabulary=50257, entropy="gradient"), ()),
        ),
    },
    axes=ON_VOCABULARY
    | {"active": ACTIVE, "entropy": ("off", "metric", "gradient"), "backward": (False, True)},
    checked=checked_rows("token_logprobs", entropy="gradient", active=0.5),
    compiled=_compiled_token_logprobs,
    peers={
        "trl": peers.trl_selective,
        "flash-attn": peers.flash_attn,
    },
)


def _full_kl(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    logits = _logits(shape, generator)
    ref_logits = torch.empty_like(logits)
    for rows, near in zip(ref_logits.split(512), logits.split(512), strict=True):
        rows.copy_(near + normal(generator, *near.shape, scale=0.5))
    return Problem(
        {"logits": logits, "ref_logits": ref_logits},
        ours=lambda **x: {"kl": kernels.full_kl(**x, backend=backend)},
        eager=eager.full_kl,
        exact=lambda **x: {"kl": reference.full_kl(**x)},
        wrt=("logits",) if shape.backward else (),
        upstream={"kl": normal(generator, shape.rows)} if shape.backward else {},
        by_row=frozenset({"logits", "ref_logits", "kl"}),
        row_bytes=8 * shape.vocabulary,
    )


def _compiled_full_kl() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, options: bool, ref_dtype: torch.dtype | None = None
    ) -> None:
        kl = kernels.full_kl(
            torch.empty(size, dtype=dtype, requires_grad=True),
            torch.empty(size, dtype=ref_dtype or dtype),
            **_row_options(size[0], options, options),
        )
        backward(kl)

    calls = [(*each, options) for each in _compiled_sizes() for options in (False, True)]
    calls += [(*each, True) for each in _unusual_sizes()]
    for name, dtype, size, options in calls:
        label = f"{name} temperatures mask" if options else name
        yield Compiled(label, partial(call, dtype, size, options), ROWS)
    mixed = partial(call, torch.float32, (4, COMPILED_VOCABULARIES[0]), True, torch.bfloat16)
    yield Compiled("fp32, reference bf16", mixed, ROWS)


_LLAMA = Shape("full_kl", 8192, "bf16", vocabulary=128256)
FULL_KL = Op(
    problem=_full_kl,
    work=partial(_work, read=2, words="both logits read"),
    main={
        "cpu": ((Shape("full_kl", 1024, vocabulary=50257), ()),),
        "cuda": ((_LLAMA, (Goal("seconds", 3.7e-3, HOPPER),)),),
    },
    axes=ON_VOCABULARY | {"backward": (False, True)},
    checked=checked_rows("full_kl"),
    compiled=_compiled_full_kl,
)


# What cuts a measured draw, by name.
CUTS: dict[str, dict[str, Any]] = {"": {}, "top-k=50 top-p=0.9": {"top_k": 50, "top_p": 0.9}}


def _sample_tokens(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    keys = torch.randint(2**62, (shape.rows,), generator=generator)
    cut = CUTS[shape.sampling]

    def ours(logits: Tensor, keys: Tensor) -> Results:
        drawn = kernels.sample_tokens(logits, keys, **cut, backend=backend)
        named = {"logprobs": drawn.logprobs_t1, "entropies": drawn.entropies}
        return {"tokens": drawn.tokens, **named}

    def exact(logits: Tensor, keys: Tensor, tokens: Tensor) -> Results:
        logprobs, entropies = reference.token_logprobs(logits, tokens, entropy=True)
        return {"logprobs": logprobs, "entropies": entropies}

    return Problem(
        {"logits": _logits(shape, generator), "keys": keys},
        ours=ours,
        eager=partial(eager.sample_tokens, **cut),
        exact=exact,
        by_row=frozenset({"logits", "keys", "tokens", "logprobs", "entropies"}),
        row_bytes=8 * shape.vocabulary,
        given=("tokens",),
    )


# name: which parameters sampling gets; tensors hold one per row
_SAMPLING: dict[str, dict[str, Any]] = {
    "": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 50},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "tensors": {
        "temperature": torch.ones(4),
        "top_k": torch.ones(4, dtype=torch.int64),
        "top_p": torch.ones(4),
        "min_p": torch.zeros(4),
    },
}


def _compiled_sample_tokens() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, size: Size, options: dict[str, Any]) -> None:
        keys = torch.zeros(size[0], dtype=torch.int64)
        kernels.sample_tokens(torch.empty(size, dtype=dtype), keys, backend="triton", **options)

    # Of the vocabulary these kernels know only the number of parts, by powers of two: most parts in
    # every dtype, and every option with fewer.
    fewer = (torch.bfloat16, (4, COMPILED_VOCABULARIES[0]))
    calls = [
        (*each, label)
        for each in _compiled_sizes()
        if each[1:] == fewer or each[2][1] == COMPILED_VOCABULARIES[1]
        for label in (_SAMPLING if each[1:] == fewer else ("", "all"))
    ]
    calls += [(*each, "all") for each in _unusual_sizes()]
    for name, dtype, size, label in calls:
        # A program holds its part of a row in one tile: all its vectors are masked. A short row
        # and the group that won are spread over more threads than they have vectors.
        made = partial(call, dtype, size, _SAMPLING[label])
        spread = Expect(load_bytes=16, any_tile=True)
        expect = spread if size[1] < 1024 else Expect(load_bytes=16)
        drawing = {"_sample_draw_kernel": spread}
        yield Compiled(f"{name} {label}".strip(), made, expect, kernels=drawing)


_DECODED = Shape("sample_tokens", 256, "bf16", vocabulary=151936, backward=False)
SAMPLE_TOKENS = Op(
    problem=_sample_tokens,
    work=lambda shape: _work(dataclasses.replace(shape, backward=False)),
    main={
        "cpu": ((Shape("sample_tokens", 1024, vocabulary=50257, backward=False), ()),),
        "cuda": (
            (dataclasses.replace(_DECODED, rows=8192), ()),
            # A decode step's rows.
            (_DECODED, (Goal("seconds", 30e-6, HOPPER), Goal("forward launches", 2, HOPPER))),
            (
                dataclasses.replace(_DECODED, sampling="top-k=50 top-p=0.9"),
                (Goal("forward launches", 4, HOPPER),),
            ),
        ),
    },
    axes=ON_VOCABULARY,
    checked=checked_rows("sample_tokens"),
    compiled=_compiled_sample_tokens,
)
