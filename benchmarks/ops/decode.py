"""Ops of a decode step: rms_norm, swiglu, rotate_and_store in its layers, sample_keys,
linear_sample and advance_slots around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import fastrl_kernels as kernels
from benchmarks import eager, peers
from benchmarks.gate import Problem, Results
from benchmarks.ops.inputs import normal
from benchmarks.ops.record import Compiled, Expect, Mains, Op, Sizes, Work
from benchmarks.shapes import Shape
from benchmarks.timing import DTYPES
from fastrl_kernels import reference
from fastrl_kernels.rng import token_keys

# A product's result, and the stream it is added to: of 16-bit weights, and of fp32 ones under
# autocast.
_STREAMS = (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "fp16"))
HIDDEN = (896, 4096)  # of Qwen2.5-0.5B and Llama-3-8B
RECORDS = Expect(
    load_bytes=0, any_tile=True, why="factors go to shared memory, and records are small"
)
SMALL = Expect(load_bytes=0, any_tile=True, why="a head is smaller than a warp's vectors")
ONE_EACH = Expect(load_bytes=0, any_tile=True, why="a few numbers for each row")


def _norms() -> Iterator[Compiled]:
    def call(width: int, dtype: torch.dtype, wide: torch.dtype, added: bool, offset: bool) -> None:
        x, weight = torch.zeros(4, width, dtype=dtype), torch.zeros(width, dtype=wide)
        residual = torch.zeros(4, width, dtype=wide) if added else None
        kernels.rms_norm(
            x, weight, residual=residual, unit_offset=offset, dtype=dtype, backend="triton"
        )

    for (name, wide), width in product(_STREAMS, HIDDEN):
        for added, offset in ((True, False), (False, False), (True, True)):
            label = f"{name} stream={wide} H={width}"
            label += (" residual" if added else "") + (" 1+w" if offset else "")
            made = partial(call, width, DTYPES[name], DTYPES[wide], added, offset)
            yield Compiled(label, made, Expect(load_bytes=8 if width < 1024 else 16))


def _gates() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, joined: bool) -> None:
        both = torch.zeros(4, 2 * 4864, dtype=dtype)
        gate, up = both.chunk(2, -1)
        if not joined:
            gate, up = gate.clone(), up.clone()
        kernels.swiglu(gate, up, backend="triton")

    for (name, dtype), joined in product(DTYPES.items(), (False, True)):
        yield Compiled(f"{name}{' joined' if joined else ''}", partial(call, dtype, joined))


def _rotations() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, wide: torch.dtype, width: int, turned: int, normed: bool) -> None:
        query, key, value = (torch.zeros(4, heads, width, dtype=dtype) for heads in (14, 2, 2))
        angles, weight = torch.zeros(4, turned, dtype=wide), torch.zeros(width, dtype=wide)
        keys, values = torch.zeros(2, 8, 2, 1024, width, dtype=dtype).transpose(2, 3)
        norms = kernels.HeadNorms(weight, weight, 1e-6) if normed else None
        positions = torch.zeros(4, dtype=torch.int64)
        kernels.rotate_and_store(
            query, key, value, angles, angles, keys, values, positions, norms=norms,
            backend="triton",
        )  # fmt: skip

    for (name, wide), width in product(_STREAMS, (64, 128)):
        for turned, normed in ((width, False), (width, True), (width // 4, False)):
            label = f"{name} angles={wide} D={width} R={turned}" + (" norms" if normed else "")
            made = partial(call, DTYPES[name], DTYPES[wide], width, turned, normed)
            yield Compiled(label, made, SMALL)


def _keys() -> Iterator[Compiled]:
    def call(seed: int | Tensor, index: int | Tensor, hashed: bool) -> None:
        ids = torch.zeros(256, dtype=torch.int64)
        if hashed:
            token_keys(ids, index, "triton")
        else:
            kernels.sample_keys(seed, ids, index, backend="triton")

    numbers = torch.zeros(256, dtype=torch.int64)
    for label, given in {
        "tokens of a decode step": (0, numbers, True),
        "all tensors": (numbers[0], numbers, False),
        "all numbers": (2**64 - 1, 3, False),
    }.items():
        yield Compiled(label, partial(call, *given), ONE_EACH)


def _advances() -> Iterator[Compiled]:
    def call(values: torch.dtype | None, ends: int) -> None:
        columns = [torch.zeros(256, dtype=torch.int64) for _ in range(6)]
        drawn, *of_slots = columns
        draw = kernels.SampledTokens(drawn, *(torch.zeros(256) for _ in range(5)))
        stored = torch.zeros(256, 1025, dtype=torch.int64), torch.zeros(4, 256, 1025)
        slots = kernels.SlotBuffers(*of_slots, *stored)
        of_values = None if values is None else torch.zeros(256, dtype=values)
        end = torch.arange(ends)
        kernels.advance_slots(slots, draw, end, values=of_values, backend="triton")

    for values, ends in ((None, 1), (torch.float32, 2), (torch.bfloat16, 5)):
        label = f"{ends} ends" + ("" if values is None else f" values={values}")
        yield Compiled(label.replace("torch.", ""), partial(call, values, ends), ONE_EACH)


def _rms_norm(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    dtype, size = DTYPES[shape.dtype], (shape.rows, shape.steps)
    inputs = {name: normal(generator, *size).to(dtype) for name in ("x", "residual")}
    inputs["weight"] = normal(generator, shape.steps).to(dtype)

    def ours(**given: Tensor) -> Results:
        normed, total = kernels.rms_norm(**given, backend=backend)
        return {"normed": normed, "total": total}

    return Problem(
        inputs,
        ours=ours,
        eager=eager.rms_norm,
        exact=lambda **x: dict(zip(("normed", "total"), reference.rms_norm(**x), strict=True)),
        by_row=frozenset({"x", "residual", "normed", "total"}),
        row_bytes=8 * shape.steps,
    )


def _swiglu(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    dtype, size = DTYPES[shape.dtype], (shape.rows, shape.steps)
    return Problem(
        {name: normal(generator, *size).to(dtype) for name in ("gate", "up")},
        ours=lambda **x: {"out": kernels.swiglu(**x, backend=backend)},
        eager=eager.swiglu,
        exact=lambda **x: {"out": reference.swiglu(**x)},
        by_row=frozenset({"gate", "up", "out"}),
        row_bytes=8 * shape.steps,
    )


def _rows(op: str, rows: int, width: int, dtype: str = "bf16") -> Shape:
    """As many slots of a decode step, and the width of a layer."""
    return Shape(op, rows, dtype, width, backward=False)


def _main(op: str, width: int) -> Mains:
    return {"cpu": ((_rows(op, 64, width, "fp32"), ()),), "cuda": ((_rows(op, 256, width), ()),)}


def _checked(op: str) -> Callable[[Sizes], Iterator[Shape]]:
    def shapes(sizes: Sizes) -> Iterator[Shape]:
        for dtype, width in product(DTYPES, sizes.steps):
            yield _rows(op, sizes.rows, width, dtype)

    return shapes


def _work(tensors: int, what: str) -> Callable[[Shape], Work]:
    return lambda shape: Work(tensors * shape.rows * shape.steps * shape.itemsize, 0, what)


# Of Qwen2.5-0.5B and of GPT-2, whose rows end within a tile.
HEADS = ((896, 151936), (768, 50257))


def _draws() -> Iterator[Compiled]:
    def call(rows: int, width: int, vocabulary: int, dtype: torch.dtype, **options: Any) -> None:
        hidden = torch.zeros(rows, width, dtype=dtype)
        weight = torch.empty(vocabulary, width, dtype=dtype)
        keys = torch.zeros(rows, dtype=torch.int64)
        kernels.linear_sample(hidden, weight, keys, backend="triton", **options)

    def every(rows: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Any]:
        bias = torch.zeros(vocabulary, dtype=dtype)
        return {"bias": bias, "temperature": torch.ones(rows), "softcap": 30.0}

    for rows, (width, vocabulary) in product((16, 32), HEADS):
        label = f"bf16 N={rows} H={width} V={vocabulary}"
        made = partial(call, rows, width, vocabulary, torch.bfloat16)
        yield Compiled(label, made, RECORDS)
        options = every(rows, vocabulary, torch.bfloat16)
        yield Compiled(f"{label} all", partial(made, **options), RECORDS)
    made = partial(call, 32, 896, 151936, torch.float16)
    yield Compiled("fp16 N=32 H=896 V=151936", made, RECORDS)
    # A depth that ends within a tile, and at an odd address.
    for width in (100, 101):
        made = partial(call, 32, width, 50257, torch.bfloat16)
        yield Compiled(f"bf16 N=32 H={width} V=50257", made, RECORDS)


def _linear_sample(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    dtype, size = DTYPES[shape.dtype], (shape.vocabulary, shape.hidden)
    hidden = normal(generator, shape.rows, shape.hidden).to(dtype)
    inputs = {
        "hidden": hidden,
        "weight": normal(generator, *size, scale=3 * shape.hidden**-0.5).to(dtype),
        "keys": torch.randint(2**62, (shape.rows,), generator=generator),
    }

    def exact(hidden: Tensor, weight: Tensor, keys: Tensor, tokens: Tensor) -> Results:
        found = reference.token_logprobs(hidden @ weight.t(), tokens, entropy=True)
        return dict(zip(("logprobs", "entropies"), found, strict=True))

    return Problem(
        inputs,
        ours=lambda **x: _drawn(kernels.linear_sample(**x, backend=backend)),
        eager=lambda hidden, weight, keys: eager.sample_tokens(linear(hidden, weight), keys),
        exact=exact,
        by_row=frozenset({"hidden", "keys", "tokens", "logprobs", "entropies"}),
        row_bytes=8 * shape.vocabulary,
        given=("tokens",),
    )


def _drawn(found: kernels.SampledTokens) -> Results:
    named = {"logprobs": found.logprobs_t1, "entropies": found.entropies}
    return {"tokens": found.tokens, **named}


def _product_and_draw(shape: Shape, device: torch.device) -> peers.Peer:
    def call(hidden: Tensor, weight: Tensor, keys: Tensor) -> Results:
        return _drawn(kernels.sample_tokens(linear(hidden, weight), keys))

    return peers.Peer(call, "ours, too: what rollouts do where `linear_sample_pays` says no")


def _head(rows: int, dtype: str = "bf16") -> Shape:
    """Qwen2.5-0.5B's."""
    width, vocabulary = HEADS[0]
    return Shape("linear_sample", rows, dtype, hidden=width, vocabulary=vocabulary, backward=False)


def _head_read(shape: Shape) -> Work:
    elements = (shape.vocabulary + shape.rows) * shape.hidden
    flops = 2.0 * shape.rows * shape.vocabulary * shape.hidden
    return Work(elements * shape.itemsize, flops, "the head's weight read, one product")


def _checked_heads(sizes: Sizes) -> Iterator[Shape]:
    for dtype, vocabulary in product(DTYPES, sizes.vocabulary):
        yield Shape(
            "linear_sample", sizes.rows, dtype, hidden=sizes.hidden, vocabulary=vocabulary,
            backward=False,
        )  # fmt: skip


RMS_NORM = Op(
    problem=_rms_norm,
    work=_work(4, "the product and the stream read, their sum and its norm written"),
    main=_main("rms_norm", 4096),
    checked=_checked("rms_norm"),
    compiled=_norms,
)
SWIGLU = Op(
    problem=_swiglu,
    work=_work(3, "gate and up read, their product written"),
    main=_main("swiglu", 14336),
    checked=_checked("swiglu"),
    compiled=_gates,
)
ROTATE_AND_STORE = Op(compiled=_rotations)
SAMPLE_KEYS = Op(compiled=_keys)
ADVANCE_SLOTS = Op(compiled=_advances)
LINEAR_SAMPLE = Op(
    problem=_linear_sample,
    work=_head_read,
    main={
        "cpu": ((Shape("linear_sample", 32, hidden=768, vocabulary=50257, backward=False), ()),),
        "cuda": tuple((_head(rows), ()) for rows in (16, 32)),
    },
    axes={"hidden_vocabulary": HEADS, "rows": (1, 16, 32, 64), "dtype": tuple(DTYPES)},
    checked=_checked_heads,
    compiled=_draws,
    peers={"product, sample_tokens": _product_and_draw},
)
