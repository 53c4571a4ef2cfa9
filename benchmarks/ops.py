"""One record for each op: how it is called, its least work, what is measured and what is aimed for,
and what the ahead-of-time gate compiles of it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels as kernels
from benchmarks import peers
from benchmarks.harness import DTYPES, Case, Goal, Problem, Results
from fastrl_kernels import reference

HOPPER = ("nvidia h",)  # H100 and H200
MIB = 2**20


# --- shapes --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Attention:
    """A layer's heads, and what it does to its scores."""

    heads: int
    kv_heads: int
    width: int
    window: int | None = None
    softcap: float | None = None

    @property
    def label(self) -> str:
        """`32/8 heads D=128 window=4096`: of queries over those of keys."""
        parts = [f"{self.heads}/{self.kv_heads} heads D={self.width}"]
        parts += [f"window={self.window}"] if self.window is not None else []
        parts += [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        return " ".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """As arguments of the op."""
        return {"window": self.window, "softcap": self.softcap}

    @property
    def token_elements(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.kv_heads * self.width


GPT2 = Attention(12, 12, 64)
QWEN25_05B = Attention(14, 2, 64)
LLAMA3_8B = Attention(32, 8, 128)
MISTRAL_7B = Attention(32, 8, 128, window=4096)
GEMMA2_2B = Attention(8, 4, 256, window=4096, softcap=50.0)  # every other layer of it


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes and options of one op's call; what an op does not have is left at its default."""

    op: str
    rows: int  # tokens N, sequences, or slots of a cache
    dtype: str = "fp32"
    steps: int = 0  # of a sequence, or tokens of a slot
    hidden: int = 0
    vocabulary: int = 0
    active: float = 1.0  # share of the tokens that count
    entropy: str = "off"  # "metric": no gradient through it
    head: str = "trained"
    backward: bool = True
    whiten: bool = False
    attention: Attention | None = None

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Shape:
        """Of its fields, as JSON holds them."""
        heads = fields.get("attention")
        return cls(**{**fields, "attention": Attention(**heads) if heads else None})

    @property
    def label(self) -> str:
        """`N=1024 H=768 V=50257 fp32 entropy=metric`: what differs from the defaults."""
        parts = [f"[{self.rows}, {self.steps}]" if self.steps else f"N={self.rows}"]
        parts += [self.attention.label] if self.attention else []
        parts += [f"H={self.hidden}"] if self.hidden else []
        parts += [f"V={self.vocabulary}"] if self.vocabulary else []
        parts.append(self.dtype)
        parts += [f"active={self.active:g}"] if self.active != 1 else []
        parts += [f"entropy={self.entropy}"] if self.entropy != "off" else []
        parts += ["frozen head"] if self.head == "frozen" else []
        parts += ["whitened"] if self.whiten else []
        parts += ["forward"] if not self.backward and self.op in DIFFERENTIABLE else []
        return " ".join(parts)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def tokens(self) -> int:
        return self.rows * max(self.steps, 1)

    @property
    def needed_bytes(self) -> int:
        """That eager PyTorch takes, about: fp32 logits, log-softmax, softmax, product, and two
        gradients; and the inputs' own."""
        each = self.attention.token_elements if self.attention else 1
        elements = self.rows * max(self.vocabulary, self.steps) * each
        weights = self.vocabulary * self.hidden
        return elements * (24 + 4 * self.itemsize) + weights * (4 * self.itemsize + 8)


DIFFERENTIABLE = ("token_logprobs", "linear_logprobs", "linear_ppo_loss", "full_kl", "ppo_loss")


@dataclasses.dataclass(frozen=True)
class Work:
    """The least bytes and flops of a shape, and in words what is counted."""

    bytes: float
    flops: float
    what: str


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the inputs of checks: lengths are (odd, even)."""

    rows: int = 64
    vocabulary: tuple[int, int] = (50257, 151936)
    steps: tuple[int, int] = (507, 512)
    hidden: int = 256
    tokens: tuple[int, int] = (1023, 1024)  # of a cache's slot: cut into several parts
    width: int = 64  # of its heads


# --- what the ahead-of-time gate is asked --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expect:
    """The widths that a call demands of each of its kernels' main loops, in bytes per thread.

    No access may stay below the demand where its tile holds enough elements per thread, and the
    widest must reach it, unless ``any_tile`` leaves the size of tiles to the kernel. Zero demands
    nothing. ``exempt`` names pointers, and helper functions, whose accesses are not judged; a loop
    must hold others. ``why`` explains whatever is let pass.
    """

    load_bytes: int = 16
    store_bytes: int = 0
    any_tile: bool = False
    exempt: frozenset[str] = frozenset()
    why: str = ""

    def stricter(self, other: Expect) -> Expect:
        """Both demands at once: one specialisation may serve several calls."""
        return Expect(
            max(self.load_bytes, other.load_bytes),
            max(self.store_bytes, other.store_bytes),
            self.any_tile and other.any_tile,
            self.exempt & other.exempt,
            self.why if self.load_bytes > other.load_bytes else other.why,
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A call that the gate compiles, and what its kernels must look like.

    It is made on CPU tensors and never launched, so that contents do not matter: what matters is
    what kernels specialise on, which is dtypes, divisibility by 16, strides, and options.
    """

    label: str
    call: Callable[[], object]
    expect: Expect = Expect()
    kernels: Mapping[str, Expect] = dataclasses.field(default_factory=dict)  # by pattern, instead


# --- the records ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Op:
    """What is known of an op; the last field but one is all that some ops have.

    Args:
        problem: inputs of a shape and who works it out.
        work: the least that no implementation of the op's algorithm can do without.
        main: shapes with goals, for "cpu" and "cuda": what is shown.
        axes: fields of a shape and their other values; an axis named a_b sets a and b.
        checked: shapes of the checks, of every dtype, at odd and even lengths; the last one has
            masks where the op has any.
        compiled: what the ahead-of-time gate calls.
        export: its name in `fastrl_kernels`, if another.
        row_bits: a row promises the same bits in every batch, not for every run alone.
        eager: what the eager formula is, where that needs words.
    """

    problem: Callable[[Shape, torch.Generator, str, bool], Problem] | None = None
    work: Callable[[Shape], Work] | None = None
    main: Mapping[str, Sequence[tuple[Shape, tuple[Goal, ...]]]] = dataclasses.field(
        default_factory=dict
    )
    axes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    checked: Callable[[Sizes], Iterator[Shape]] | None = None
    compiled: Callable[[], Iterator[Compiled]] | None = None
    export: str = ""
    row_bits: bool = True
    eager: str = ""


def available() -> list[str]:
    """The measured ops that `fastrl_kernels` exports."""
    found = {name: op for name, op in OPS.items() if op.problem}
    return [name for name, op in found.items() if hasattr(kernels, op.export or name)]


def cases(op: str, device_type: str, full: bool = False) -> list[Case]:
    """An op's main cases for "cpu" or "cuda"; `full`: and around the first of them, one property
    changed at a time."""
    found = {shape: goals for shape, goals in OPS[op].main[device_type]}
    base = next(iter(found))
    main = len(found)
    for axis, values in OPS[op].axes.items() if full else ():
        for value in values:
            fields = PAIRED.get(axis, (axis,))
            changes = dict(zip(fields, value if axis in PAIRED else (value,), strict=True))
            found.setdefault(dataclasses.replace(base, **changes), ())
    return [
        Case("ops", op, shape.label, work(shape).what, shape, goals, main=i < main, seconds=30.0)
        for i, (shape, goals) in enumerate(found.items())
    ]


PAIRED = {
    "hidden_vocabulary": ("hidden", "vocabulary"),
    "rows_steps": ("rows", "steps"),
    "attention_rows_steps": ("attention", "rows", "steps"),
}


def work(shape: Shape) -> Work:
    """The least work of a shape."""
    counted = OPS[shape.op].work
    assert counted is not None
    return counted(shape)


def problem(
    shape: Shape,
    device: torch.device | str,
    *,
    backend: str = "auto",
    pick_rows: bool = True,
    seed: int = 0,
) -> Problem:
    """A shape's problem on a device, the same for every call with a seed.

    Ops with a head get only the rows that count, as their callers should have it; all rows and
    the mask where `pick_rows` is False.
    """
    device = torch.device(device)
    make = OPS[shape.op].problem
    assert make is not None
    with torch.device(device):
        return make(shape, torch.Generator(device).manual_seed(seed), backend, pick_rows)


def least(shape: Shape, device: torch.device) -> Callable[[], object] | None:
    """The matrix products of an op with a head, on the rows that count; None for others, whose
    least work is a copy."""
    if not shape.hidden:
        return None
    rows = max(1, round(shape.active * shape.rows))
    flops = 2.0 * shape.active * shape.rows * shape.vocabulary * shape.hidden
    count = round(work(shape).flops / flops)

    def full(*size: int) -> Tensor:
        return torch.full(size, 0.5, dtype=DTYPES[shape.dtype], device=device)

    hidden, weight = full(rows, shape.hidden), full(shape.vocabulary, shape.hidden)
    logits = full(rows, shape.vocabulary)
    products = [(logits, hidden, weight.t())]
    if shape.backward:
        products.append((torch.empty_like(hidden), logits, weight))
        if shape.head == "trained":
            products.append((torch.empty_like(weight), logits.t(), hidden))
        products += products[:1] * (count - len(products))  # the forward one comes again
    assert len(products) == count

    def run() -> None:
        for out, a, b in products:
            torch.mm(a, b, out=out)

    return run


# Whose kernels the ahead-of-time gate wants to see, each of them.
PACKAGE = "fastrl_kernels._triton"


def compiled() -> Iterator[tuple[str, Compiled]]:
    """(op, call) of everything that the ahead-of-time gate compiles."""
    for name, op in OPS.items():
        if op.compiled:
            yield from ((op.export or name, call) for call in op.compiled())


# --- inputs that several ops have ----------------------------------------------------------------


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=generator, device=generator.device)


def _flags(generator: torch.Generator, *shape: int, share: float) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device) < share


def _logits(shape: Shape, generator: torch.Generator) -> Tensor:
    """[N, V], filled by slices: in half precision no fp32 tensor of that size is made."""
    logits = torch.empty(shape.rows, shape.vocabulary, dtype=DTYPES[shape.dtype])
    for rows in logits.split(512):
        rows.copy_(_normal(generator, *rows.shape, scale=3.0))
    return logits


def _labels(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randint(shape.vocabulary, (shape.rows,), generator=generator)


def _head(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Hidden states, a head whose logits have a standard deviation of about 3, and labels."""
    dtype = DTYPES[shape.dtype]
    hidden = _normal(generator, shape.rows, shape.hidden).to(dtype)
    weight = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype)
    for rows in weight.split(8192):
        rows.copy_(_normal(generator, *rows.shape, scale=3.0 / shape.hidden**0.5))
    return {"hidden": hidden, "weight": weight, "labels": _labels(shape, generator)}


def _leaves(shape: Shape) -> tuple[str, ...]:
    if not shape.backward:
        return ()
    return ("hidden", "weight") if shape.head == "trained" else ("hidden",)


def _sequences(shape: Shape, generator: torch.Generator, *names: str) -> dict[str, Tensor]:
    dtype = DTYPES[shape.dtype]
    return {name: _normal(generator, shape.rows, shape.steps).to(dtype) for name in names}


def _prefix_mask(shape: Shape, generator: torch.Generator) -> Tensor:
    """Responses that end after between 2·active - 1 and all of the steps, at least one."""
    least = max(2 * shape.active - 1, 0.0)
    share = least + (1 - least) * torch.rand(shape.rows, 1, generator=generator)
    return torch.arange(shape.steps) < (share * shape.steps).ceil().clamp(min=1)


def _upstream(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Random gradients per token for the log-probabilities, and for entropies that get one."""
    if not shape.backward:
        return {}
    upstream = {"logprobs": _normal(generator, shape.rows)}
    if shape.entropy == "gradient":
        upstream["entropies"] = _normal(generator, shape.rows, scale=0.01)
    return upstream


def _per_token(nbytes: int, what: str) -> Callable[[Shape], Work]:
    return lambda shape: Work(nbytes * shape.tokens, 0, f"{nbytes} bytes per token: {what}")


# --- shapes and calls that several ops have ------------------------------------------------------

# (hidden size, vocabulary) of GPT-2, Qwen2.5-0.5B, Gemma-2-2B, Llama-3-8B and Qwen3-8B.
HEADS = ((768, 50257), (896, 151936), (2304, 256000), (4096, 128256), (4096, 151936))
VOCABULARIES = tuple(dict.fromkeys(vocabulary for _, vocabulary in HEADS))
ROWS = (1024, 4096, 8192, 16384, 32768)
ACTIVE = (1.0, 0.5, 0.1)
SEQUENCES = ((64, 256), (64, 1024), (512, 1024), (128, 8192), (512, 4096), (1024, 1024))
ON_VOCABULARY = {"vocabulary": VOCABULARIES, "rows": ROWS, "dtype": tuple(DTYPES)}


def _checked_rows(
    op: str, entropy: str = "off", active: float = 1.0, hidden: bool = False
) -> Callable[[Sizes], Iterator[Shape]]:
    def shapes(sizes: Sizes) -> Iterator[Shape]:
        odd, even = sizes.vocabulary
        base = Shape(
            op, sizes.rows, hidden=sizes.hidden if hidden else 0, vocabulary=even,
            backward=op in DIFFERENTIABLE,
        )  # fmt: skip
        yield dataclasses.replace(base, dtype="bf16")
        yield dataclasses.replace(base, vocabulary=odd)
        if hidden:
            yield dataclasses.replace(base, dtype="bf16", head="frozen")
        yield dataclasses.replace(base, dtype="fp16", entropy=entropy)
        yield dataclasses.replace(
            base, dtype="bf16", vocabulary=odd, entropy=entropy, active=active
        )

    return shapes


def _checked_steps(op: str) -> Callable[[Sizes], Iterator[Shape]]:
    def shapes(sizes: Sizes) -> Iterator[Shape]:
        odd, even = sizes.steps
        base = Shape(op, sizes.rows, steps=even, active=0.7, backward=op in DIFFERENTIABLE)
        yield base
        if op == "gae":
            yield dataclasses.replace(base, whiten=True)
        yield dataclasses.replace(base, steps=odd, whiten=op == "gae")

    return shapes


COMPILED_VOCABULARIES = (50257, 151936)  # an odd one starts every row unaligned
ALIGNED, RAGGED = (64, 512), (13, 507)  # rows and steps; 507 is no multiple of 16
KL_KINDS = ("kl", "abs", "mse", "k3", "k3+")

VOCABULARY = Expect(
    load_bytes=16,
    store_bytes=16,
    exempt=frozenset({"load_end", "store_end"}),
    why="the first and the last few elements of a row share a vector with other rows",
)
# Per-token ops are small beside those: the size of a tile is left to them.
ALIGNED_ROWS = Expect(
    load_bytes=16,
    store_bytes=16,
    any_tile=True,
    exempt=frozenset({"partials_ptr", "sums_ptr", "bootstrap_ptr"}),
    why="at most 1024 partial results, which stay in cache; bootstrap values are read only where "
    "an episode was truncated",
)
RAGGED_ROWS = dataclasses.replace(
    ALIGNED_ROWS, load_bytes=0, store_bytes=0, why="507 steps: rows start at any address"
)
# Their kernels work on a chunk of logits, whose rows begin at 16-byte boundaries and are padded to
# whole vectors: unlike the logits that users hand over, of whatever vocabulary.
HEAD = Expect(
    load_bytes=16,
    store_bytes=16,
    exempt=frozenset({"_load_tail", "_store_tail", "_earlier_maximum"}),
    why="the last window of a row is masked per vector; a label that is the largest logit is rare, "
    "and so is the look at what stands before it",
)


def _backward(*outputs: Tensor) -> None:
    """Gradients per token, as a loss gives them."""
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def _compiled_vocabularies() -> Iterator[tuple[str, torch.dtype, tuple[int, int]]]:
    for (name, dtype), vocabulary in product(DTYPES.items(), COMPILED_VOCABULARIES):
        yield f"{name} V={vocabulary}", dtype, (4, vocabulary)


def _unusual_vocabularies() -> Iterator[tuple[str, torch.dtype, tuple[int, int]]]:
    yield "bf16 V=503", torch.bfloat16, (4, 503)  # fits in one tile
    # Past 2 GiB, AMD addresses by pointer in place of buffer. The pages are never touched.
    yield "bf16 V=151936 >2GiB", torch.bfloat16, (8192, 151936)


def _row_options(rows: int, per_token: bool, masked: bool) -> dict[str, Any]:
    return {
        "temperature": torch.ones(rows) if per_token else 0.7,
        "mask": torch.ones(rows, dtype=torch.bool) if masked else None,
        "backend": "triton",
    }


Size = tuple[int, int]
Call = Callable[[torch.dtype, Size], None]


def _compiled_steps(calls: Mapping[str, Call]) -> Iterator[Compiled]:
    """All in fp32, the usual dtype of these ops; in others, and ragged, the last, fullest one."""
    fullest = list(calls)[-1]
    settings = [("fp32", ALIGNED, label) for label in calls]
    settings += [(name, ALIGNED, fullest) for name in DTYPES if name != "fp32"]
    settings += [("fp32", RAGGED, fullest)]
    for name, size, label in settings:
        expect = ALIGNED_ROWS if size == ALIGNED else RAGGED_ROWS
        call = partial(calls[label], DTYPES[name], size)
        yield Compiled(f"{name} T={size[1]} {label}".strip(), call, expect)


def _tokens(dtype: torch.dtype, size: Size, learned: bool = False) -> Tensor:
    return torch.empty(size, dtype=dtype, requires_grad=learned)


def _mask(size: Size) -> Tensor:
    return torch.ones(size, dtype=torch.bool)


# --- token_logprobs ------------------------------------------------------------------------------


def _token_logprobs(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    mask = None if shape.active == 1 else _flags(generator, shape.rows, share=shape.active)
    entropy = shape.entropy != "off"

    def call(op: Callable[..., Any], **inputs: Tensor) -> Results:
        found = op(**inputs, entropy=entropy)
        return dict(zip(("logprobs", "entropies"), found if entropy else (found,), strict=False))

    inputs = {"logits": _logits(shape, generator), "labels": _labels(shape, generator)}
    return Problem(
        inputs | ({"mask": mask} if mask is not None else {}),
        ours=partial(call, partial(kernels.token_logprobs, backend=backend)),
        eager=partial(peers.token_logprobs, entropy=entropy),
        exact=partial(call, reference.token_logprobs),
        wrt=("logits",) if shape.backward else (),
        upstream=_upstream(shape, generator),
        by_row=frozenset({"logits", "labels", "mask", "logprobs", "entropies"}),
        row_bytes=8 * shape.vocabulary,
    )


def _vocabulary_work(shape: Shape) -> Work:
    each = shape.rows * shape.vocabulary * shape.itemsize
    if not shape.backward:
        return Work(shape.active * each, 0, "active logits read")
    nbytes = 2 * shape.active * each + each
    return Work(nbytes, 0, "active logits read twice, their gradient written")


# (entropy, temperature per token, mask): in the four of them, every pair of settings meets.
_PAIRS = ((False, False, False), (False, True, True), (True, False, True), (True, True, False))


def _compiled_token_logprobs() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, size: Size, entropy: bool, per_token: bool, masked: bool) -> None:
        found = kernels.token_logprobs(
            torch.empty(size, dtype=dtype, requires_grad=True),
            torch.zeros(size[0], dtype=torch.int64),
            entropy=entropy,
            **_row_options(size[0], per_token, masked),
        )
        _backward(*(found if entropy else (found,)))

    few = ((False, False, False), (True, True, True))
    calls = [
        (*each, settings)
        for each in _compiled_vocabularies()
        for settings in (_PAIRS if each[1] == torch.bfloat16 else few)
    ]
    calls += [(*each, _PAIRS[-1]) for each in _unusual_vocabularies()]
    for name, dtype, size, settings in calls:
        named = zip(("entropy", "temperatures", "mask"), settings, strict=True)
        label = " ".join([name, *(word for word, on in named if on)])
        yield Compiled(label, partial(call, dtype, size, *settings), VOCABULARY)


TOKEN_LOGPROBS = Op(
    problem=_token_logprobs,
    work=_vocabulary_work,
    main={
        "cpu": ((Shape("token_logprobs", 1024, vocabulary=50257, entropy="metric"), ()),),
        "cuda": (
            (
                Shape("token_logprobs", 8192, "bf16", vocabulary=151936),
                (Goal("seconds", 2.6e-3, HOPPER),),
            ),
            (
                Shape("token_logprobs", 8192, "bf16", vocabulary=151936, backward=False),
                (Goal("seconds", 0.9e-3, HOPPER),),
            ),
            # rows start unaligned
            (Shape("token_logprobs", 8192, "bf16", vocabulary=50257, entropy="gradient"), ()),
        ),
    },
    axes=ON_VOCABULARY
    | {"active": ACTIVE, "entropy": ("off", "metric", "gradient"), "backward": (False, True)},
    checked=_checked_rows("token_logprobs", entropy="gradient", active=0.5),
    compiled=_compiled_token_logprobs,
)


# --- linear_logprobs, linear_ppo_loss, linear_nll_loss -------------------------------------------


def _linear_logprobs(
    shape: Shape, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    entropy = shape.entropy != "off"
    names = ("logprobs", "entropies") if entropy else ("logprobs",)
    inputs = _head(shape, generator)
    rows = None
    if shape.active != 1:
        inputs["mask"] = _flags(generator, shape.rows, share=shape.active)
        if pick_rows:
            rows = inputs["mask"].nonzero().squeeze(-1)  # callers know them on the host

    def ours(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None) -> Results:
        if rows is not None:
            hidden, labels, mask = hidden[rows], labels[rows], None
        found = kernels.linear_logprobs(
            hidden, weight, labels, mask=mask, entropy=entropy, backend=backend
        )
        found = found if entropy else (found,)
        if rows is not None:
            found = [x.new_zeros(shape.rows).index_copy(0, rows, x) for x in found]
        return dict(zip(names, found, strict=True))

    def exact(
        hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None = None
    ) -> Results:
        found = reference.token_logprobs(hidden @ weight.T, labels, mask=mask, entropy=entropy)
        return dict(zip(names, found if entropy else (found,), strict=True))

    return Problem(
        inputs,
        ours=ours,
        eager=partial(peers.linear_logprobs, entropy=entropy),
        exact=exact,
        wrt=_leaves(shape),
        upstream=_upstream(shape, generator),
        by_row=frozenset({"hidden", "labels", "mask", *names}),
        row_bytes=8 * shape.vocabulary,
    )


def _linear_ppo_loss(
    shape: Shape, generator: torch.Generator, backend: str, pick_rows: bool
) -> Problem:
    entropy = shape.entropy != "off"
    head = _head(shape, generator)
    mask = _flags(generator, shape.rows, share=shape.active)
    rows = mask.nonzero().squeeze(-1) if pick_rows and shape.active != 1 else None
    split = zip(head["hidden"].split(512), head["labels"].split(512), strict=True)
    with torch.no_grad():
        old = [peers.linear_logprobs(x, head["weight"], y)["logprobs"] for x, y in split]
    tokens = {
        "old_logprobs": torch.cat(old) + _normal(generator, shape.rows, scale=0.2),
        "advantages": _normal(generator, shape.rows),
        "mask": mask,
    }

    def ours(weight: Tensor, denominator: float, **by_row: Tensor) -> Results:
        if rows is not None:
            by_row = {name: x[rows] for name, x in by_row.items()}
        loss, stats = kernels.linear_ppo_loss(
            weight=weight, denominator=denominator, entropy=entropy, backend=backend, **by_row
        )
        return {"loss": loss} | ({"entropy": stats.entropy} if entropy else {})

    def exact(
        hidden: Tensor, weight: Tensor, labels: Tensor, old_logprobs: Tensor, advantages: Tensor,
        mask: Tensor, denominator: float,
    ) -> Results:  # fmt: skip
        logits = hidden @ weight.T
        logprobs, entropies = reference.token_logprobs(logits, labels, mask=mask, entropy=True)
        loss, _ = reference.ppo_loss(
            logprobs, old_logprobs, advantages, mask, denominator=denominator
        )
        return {"loss": loss} | ({"entropy": entropies.sum() / denominator} if entropy else {})

    return Problem(
        head | tokens | {"denominator": float(mask.sum())},
        ours=ours,
        eager=partial(peers.linear_ppo_loss, entropy=entropy),
        exact=exact,
        wrt=_leaves(shape),
        upstream={"loss": torch.ones(())},
        by_row=frozenset({"hidden", "labels", *tokens}),
        row_bytes=8 * shape.vocabulary,
    )


def _linear_work(products: int, what: str) -> Callable[[Shape], Work]:
    def of(shape: Shape) -> Work:
        count = products - (shape.head == "frozen") if shape.backward else 1
        flops = 2.0 * count * shape.active * shape.rows * shape.vocabulary * shape.hidden
        # Each product reads the weight, or writes its gradient.
        nbytes = count * shape.vocabulary * shape.hidden * shape.itemsize
        return Work(nbytes, flops, f"{count} GEMMs of N·V·H" + (what if shape.backward else ""))

    return of


def _linear_axes(*entropy: str, backward: Sequence[bool] = (True,)) -> dict[str, Sequence[Any]]:
    return {
        "hidden_vocabulary": HEADS,
        "rows": ROWS,
        "dtype": tuple(DTYPES),
        "active": ACTIVE,
        "entropy": entropy,
        "head": ("trained", "frozen"),
        "backward": backward,
    }


# Per-token tensors of a handful of rows, by the kernels of ppo_loss, which has calls of its own:
# where a specialisation is shared with those, theirs are the demands, and theirs the exemptions.
POLICY = Expect(load_bytes=0, any_tile=True, exempt=frozenset({"partials_ptr"}))
HEAD_ROWS, HEAD_WIDTH = 32, 8


def _head_inputs(dtype: torch.dtype, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden": torch.zeros(HEAD_ROWS, HEAD_WIDTH, dtype=dtype, requires_grad=True),
        "weight": torch.zeros(vocabulary, HEAD_WIDTH, dtype=dtype, requires_grad=True),
        "labels": torch.zeros(HEAD_ROWS, dtype=torch.int64),
        "backend": "triton",
    }


def _head_options() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "": {},
        "entropy": {"entropy": True},
        "softcap": {"softcap": 30.0},
        "temperatures": {"temperature": torch.ones(HEAD_ROWS)},
        "extras": {"extras": kernels.Extras._fields},
    }
    return found | {"all": {k: v for options in found.values() for k, v in options.items()}}


def _compiled_linear_logprobs() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        # Half of the rows at a time, so that backward computes chunks of columns as well.
        half = HEAD_ROWS // 2 * vocabulary * dtype.itemsize
        inputs = _head_inputs(dtype, vocabulary)
        found = kernels.linear_logprobs(**inputs, workspace_bytes=half, **options)
        found = [found] if isinstance(found, Tensor) else list(found)
        outputs = [x for x in found if isinstance(x, Tensor)]
        torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    every, few = _head_options(), ("", "all")
    calls = [
        (name, vocabulary, label)
        for name, vocabulary in product(DTYPES, COMPILED_VOCABULARIES)
        for label in (every if name == "bf16" else few)
    ]
    calls += [("bf16", 503, label) for label in few]  # fits in one window
    for name, vocabulary, label in calls:
        made = partial(call, DTYPES[name], vocabulary, every[label])
        yield Compiled(f"{name} V={vocabulary} {label}".strip(), made, HEAD)


def _compiled_linear_ppo_loss() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        tokens = torch.zeros(HEAD_ROWS)
        loss, _ = kernels.linear_ppo_loss(
            **_head_inputs(dtype, vocabulary), old_logprobs=tokens, advantages=tokens,
            mask=tokens == 0, kl=kernels.KLTerm(tokens, 0.05), **options,
        )  # fmt: skip
        loss.backward()

    def scale_a_large_gradient() -> None:
        """Past 2 GiB, AMD addresses by pointer in place of buffer. The pages are never touched."""
        from fastrl_kernels._triton.lm_head import TritonHead

        TritonHead.scale_(torch.empty(2**30 + 2**20, dtype=torch.bfloat16), torch.ones(()))

    everything = {k: v for k, v in _head_options()["all"].items() if k != "extras"}
    for (name, dtype), vocabulary in product(DTYPES.items(), COMPILED_VOCABULARIES):
        for label, options in (("", {}), ("all", everything)):
            made = partial(call, dtype, vocabulary, options)
            label = f"{name} V={vocabulary} {label}".strip()
            yield Compiled(label, made, HEAD, {"_ppo_loss_*": POLICY})
    yield Compiled("a gradient >2GiB", scale_a_large_gradient, HEAD)


def _compiled_linear_nll_loss() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, vocabulary: int, options: dict[str, Any]) -> None:
        loss, _ = kernels.linear_nll_loss(**_head_inputs(dtype, vocabulary), **options)
        loss.backward()

    for (name, dtype), vocabulary in product(DTYPES.items(), COMPILED_VOCABULARIES):
        for label, options in (("", {}), ("softcap", {"softcap": 30.0})):
            made = partial(call, dtype, vocabulary, options)
            yield Compiled(f"{name} V={vocabulary} {label}".strip(), made, HEAD)


LINEAR_LOGPROBS = Op(
    problem=_linear_logprobs,
    work=_linear_work(4, ", the logits' one twice"),
    main={
        "cpu": (
            (
                # The entropy has a gradient; in the loss it is a statistic, as in classic PPO.
                Shape("linear_logprobs", 1024, hidden=768, vocabulary=50257, entropy="gradient"),
                (Goal("speedup", 1.6), Goal("memory share", 1 / 8)),
            ),
        ),
        "cuda": (
            (
                Shape("linear_logprobs", 4096, "bf16", hidden=4096, vocabulary=131072),
                (Goal("seconds", 26e-3, HOPPER), Goal("memory", 600 * MIB, HOPPER)),
            ),
        ),
    },
    axes=_linear_axes("off", "metric", "gradient", backward=(True, False)),
    checked=_checked_rows("linear_logprobs", entropy="gradient", active=0.5, hidden=True),
    compiled=_compiled_linear_logprobs,
    row_bits=False,
)
LINEAR_PPO_LOSS = Op(
    problem=_linear_ppo_loss,
    work=_linear_work(3, ""),
    main={
        "cpu": (
            (
                Shape("linear_ppo_loss", 1024, hidden=768, vocabulary=50257, entropy="metric"),
                (Goal("speedup", 2.2), Goal("memory share", 1 / 8)),
            ),
        ),
        "cuda": (
            (
                Shape("linear_ppo_loss", 4096, "bf16", hidden=4096, vocabulary=131072,
                      entropy="metric"),
                (Goal("seconds", 19.5e-3, HOPPER),),
            ),
        ),
    },
    axes=_linear_axes("off", "metric"),
    checked=_checked_rows("linear_ppo_loss", entropy="metric", active=0.5, hidden=True),
    compiled=_compiled_linear_ppo_loss,
    row_bits=False,
)  # fmt: skip


# --- full_kl -------------------------------------------------------------------------------------


def _full_kl(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    logits = _logits(shape, generator)
    ref_logits = torch.empty_like(logits)
    for rows, near in zip(ref_logits.split(512), logits.split(512), strict=True):
        rows.copy_(near + _normal(generator, *near.shape, scale=0.5))
    return Problem(
        {"logits": logits, "ref_logits": ref_logits},
        ours=lambda **x: {"kl": kernels.full_kl(**x, backend=backend)},
        eager=peers.full_kl,
        exact=lambda **x: {"kl": reference.full_kl(**x)},
        wrt=("logits",) if shape.backward else (),
        upstream={"kl": _normal(generator, shape.rows)} if shape.backward else {},
        by_row=frozenset({"logits", "ref_logits", "kl"}),
        row_bytes=8 * shape.vocabulary,
    )


def _full_kl_work(shape: Shape) -> Work:
    each = shape.rows * shape.vocabulary * shape.itemsize
    if not shape.backward:
        return Work(2 * each, 0, "both logits read")
    return Work(5 * each, 0, "both logits read twice, one gradient written")


def _compiled_full_kl() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, options: bool, ref_dtype: torch.dtype | None = None
    ) -> None:
        kl = kernels.full_kl(
            torch.empty(size, dtype=dtype, requires_grad=True),
            torch.empty(size, dtype=ref_dtype or dtype),
            **_row_options(size[0], options, options),
        )
        _backward(kl)

    calls = [(*each, options) for each in _compiled_vocabularies() for options in (False, True)]
    calls += [(*each, True) for each in _unusual_vocabularies()]
    for name, dtype, size, options in calls:
        label = f"{name} temperatures mask" if options else name
        yield Compiled(label, partial(call, dtype, size, options), VOCABULARY)
    mixed = partial(call, torch.float32, (4, COMPILED_VOCABULARIES[0]), True, torch.bfloat16)
    yield Compiled("fp32, reference bf16", mixed, VOCABULARY)


FULL_KL = Op(
    problem=_full_kl,
    work=_full_kl_work,
    main={
        "cpu": ((Shape("full_kl", 1024, vocabulary=50257), ()),),
        "cuda": (
            (
                Shape("full_kl", 8192, "bf16", vocabulary=128256),
                (Goal("seconds", 3.7e-3, HOPPER),),
            ),
        ),
    },
    axes=ON_VOCABULARY | {"backward": (False, True)},
    checked=_checked_rows("full_kl"),
    compiled=_compiled_full_kl,
)


# --- kl_penalty, kl_rewards ----------------------------------------------------------------------

KL_COEF = 0.1


def _kl_rewards(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    names = ("rewards", "kls", "sequence_kl")
    inputs = _sequences(shape, generator, "logprobs", "ref_logprobs")
    inputs |= {"scores": _normal(generator, shape.rows), "mask": _prefix_mask(shape, generator)}

    def call(op: Callable[..., Any], **inputs: Tensor) -> Results:
        return dict(zip(names, op(**inputs, coef=KL_COEF), strict=True))

    return Problem(
        inputs,
        ours=partial(call, partial(kernels.kl_rewards, backend=backend)),
        eager=partial(peers.kl_rewards, coef=KL_COEF),
        exact=partial(call, reference.kl_rewards),
        by_row=frozenset({*inputs, *names}),
    )


def _compiled_kl_penalty() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, kind: str, masked: bool = True, both: bool = False
    ) -> None:
        mask = _mask(size) if masked else None
        both_ = _tokens(dtype, size, True), _tokens(dtype, size, both)
        _backward(kernels.kl_penalty(*both_, kind, mask=mask, backend="triton"))

    calls: dict[str, Call] = {f"{kind} mask": partial(call, kind=kind) for kind in KL_KINDS}
    calls["no mask"] = partial(call, kind="kl", masked=False)
    calls["k3 mask both"] = partial(call, kind="k3", both=True)
    yield from _compiled_steps(calls)


def _compiled_kl_rewards() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, kind: str, coef: float | Tensor = 0.2, learned: bool = True
    ) -> None:
        found = kernels.kl_rewards(
            _tokens(dtype, size, learned), _tokens(dtype, size, learned),
            torch.empty(size[0], requires_grad=learned), _mask(size),
            coef=coef, kind=kind, backend="triton",
        )  # fmt: skip
        if learned:
            _backward(*found)

    calls: dict[str, Call] = {
        "kl forward": partial(call, kind="kl", learned=False),
        "kl tensor coef": partial(call, kind="kl", coef=torch.tensor(0.2)),
    }
    yield from _compiled_steps(calls | {kind: partial(call, kind=kind) for kind in KL_KINDS})


KL_REWARDS = Op(
    problem=_kl_rewards,
    work=_per_token(17, "two log-probabilities, mask, rewards, KL"),
    main={
        "cpu": ((Shape("kl_rewards", 64, steps=1024, active=0.7, backward=False), ()),),
        "cuda": ((Shape("kl_rewards", 512, steps=4096, active=0.7, backward=False), ()),),
    },
    axes={"rows_steps": SEQUENCES},
    checked=_checked_steps("kl_rewards"),
    compiled=_compiled_kl_rewards,
    eager="a sequence at a time",
)


# --- gae -----------------------------------------------------------------------------------------


def _gae(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    settings: dict[str, Any] = {"gamma": peers.GAMMA, "lam": peers.LAM, "whiten": shape.whiten}
    inputs = _sequences(shape, generator, "rewards", "values")
    inputs["mask"] = _prefix_mask(shape, generator)

    def call(op: Callable[..., Any], **inputs: Tensor) -> Results:
        return dict(zip(("advantages", "returns"), op(**inputs, **settings), strict=True))

    return Problem(
        inputs,
        ours=partial(call, partial(kernels.gae, backend=backend)),
        eager=partial(peers.gae, **settings),
        exact=partial(call, reference.gae),
        by_row=frozenset({*inputs, "advantages", "returns"}),
    )


def _gae_work(shape: Shape) -> Work:
    each = 17 + 4 * shape.whiten
    again = ", advantages once more" if shape.whiten else ""
    what = f"{each} bytes per step: rewards, values, mask, advantages, returns{again}"
    return Work(each * shape.tokens, 0, what)


def _compiled_gae() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, masked: bool, ends: str = "", whiten: bool = False
    ) -> None:
        truncated = "truncated" in ends
        found = kernels.gae(
            _tokens(dtype, size, True), _tokens(dtype, size, True),
            _mask(size) if masked else None,
            gamma=1.0,
            lam=0.95,
            bootstrap_value=_tokens(dtype, size, True) if truncated else None,
            terminated=_mask(size) if "terminated" in ends else None,
            truncated=_mask(size) if truncated else None,
            whiten=whiten,
            backend="triton",
        )  # fmt: skip
        _backward(*found)

    yield from _compiled_steps(
        {
            "": partial(call, masked=False),
            "whiten terminated": partial(call, masked=False, ends="terminated", whiten=True),
            "mask truncated": partial(call, masked=True, ends="truncated"),
            "mask whiten": partial(call, masked=True, whiten=True),
            "all": partial(call, masked=True, ends="terminated, truncated", whiten=True),
        }
    )


GAE = Op(
    problem=_gae,
    work=_gae_work,
    main={
        "cpu": (
            (Shape("gae", 64, steps=1024, active=0.7, backward=False), (Goal("speedup", 30),)),
        ),
        "cuda": (
            (
                Shape("gae", 512, steps=4096, active=0.7, backward=False, whiten=True),
                (
                    Goal("seconds", 25e-6, HOPPER),
                    Goal("forward launches", 2, HOPPER),
                    Goal("backward launches", 0, HOPPER),
                ),
            ),
        ),
    },
    axes={"rows_steps": SEQUENCES, "whiten": (False, True)},
    checked=_checked_steps("gae"),
    compiled=_compiled_gae,
    eager="the classic per-step loop",
)


# --- ppo_loss ------------------------------------------------------------------------------------


def _ppo_loss(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    inputs = _sequences(
        shape, generator, "logprobs", "old_logprobs", "advantages", "values", "old_values",
        "returns",
    )  # fmt: skip
    inputs["logprobs"] = inputs["old_logprobs"] + 0.2 * inputs["logprobs"]
    inputs["mask"] = _prefix_mask(shape, generator)

    def call(
        op: Callable[..., Any], values: Tensor, old_values: Tensor, returns: Tensor, **x: Tensor
    ) -> Results:
        return {"loss": op(**x, value=kernels.ValueTerm(values, old_values, returns))[0]}

    return Problem(
        {**inputs, "denominator": float(inputs["mask"].sum())},
        ours=partial(call, partial(kernels.ppo_loss, backend=backend)),
        eager=peers.ppo_loss,
        exact=partial(call, reference.ppo_loss),
        wrt=("logprobs", "values"),
        upstream={"loss": torch.ones(())},
        by_row=frozenset(inputs),
    )


def _compiled_ppo_loss() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype,
        size: Size,
        kl: str = "",
        value: bool = False,
        weighted: bool = False,
        **options: Any,
    ) -> None:
        tokens, learned = partial(_tokens, dtype, size), partial(_tokens, dtype, size, True)
        loss, _ = kernels.ppo_loss(
            learned(), tokens(), tokens(), _mask(size),
            cliprange=(0.2, 0.28),
            value=kernels.ValueTerm(learned(), tokens(), tokens()) if value else None,
            kl=kernels.KLTerm(tokens(), 0.05, kl) if kl else None,
            weights=tokens() if weighted else None,
            token_weights=tokens() if weighted else None,
            backend="triton",
            **options,
        )  # fmt: skip
        _backward(loss)

    everything = partial(call, kl="k3", value=True, weighted=True, dual_clip=3.0)
    aggregates = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                  "seq-mean-token-mean")  # fmt: skip
    calls: dict[str, Call] = {
        "": call,
        "kl": partial(call, kl="kl", value=True),
        "abs, denominator": partial(call, kl="abs", value=True, denominator=512.0),
        "mse, dual clip": partial(call, kl="mse", dual_clip=3.0),
        "k3+, weights": partial(call, kl="k3+", weighted=True),
        "kl, denominator tensor": partial(
            call, kl="kl", value=True, denominator=torch.tensor(512.0)
        ),
    }
    calls |= {f"all, {name}": partial(everything, aggregate=name) for name in aggregates}
    yield from _compiled_steps(calls)


PPO_LOSS = Op(
    problem=_ppo_loss,
    work=_per_token(33, "six inputs and a mask, two gradients"),
    main={
        "cpu": ((Shape("ppo_loss", 64, steps=1024, active=0.7), ()),),
        "cuda": (
            (
                Shape("ppo_loss", 1024, steps=1024, active=0.7),
                (Goal("forward launches", 2, HOPPER), Goal("backward launches", 1, HOPPER)),
            ),
        ),
    },
    axes={"rows_steps": SEQUENCES},
    checked=_checked_steps("ppo_loss"),
    compiled=_compiled_ppo_loss,
    row_bits=False,
)


# --- masked_mean, masked_var, masked_whiten ------------------------------------------------------


def _whiten(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    inputs = _sequences(shape, generator, "values")
    inputs["mask"] = _prefix_mask(shape, generator)
    return Problem(
        inputs,
        ours=lambda **x: {"whitened": kernels.masked_whiten(**x, backend=backend)},
        eager=peers.masked_whiten,
        exact=lambda **x: {"whitened": reference.masked_whiten(**x)},
        by_row=frozenset({*inputs, "whitened"}),
    )


def _compiled_moments(op: str, **variants: dict[str, Any]) -> Callable[[], Iterator[Compiled]]:
    def call(dtype: torch.dtype, size: Size, **options: Any) -> None:
        values = _tokens(dtype, size, learned=True)
        _backward(getattr(kernels, op)(values, _mask(size), backend="triton", **options))

    def compiled() -> Iterator[Compiled]:
        named = {name.replace("_", " "): partial(call, **x) for name, x in variants.items()}
        yield from _compiled_steps({**named, "": call})

    return compiled


WHITEN = Op(
    problem=_whiten,
    work=_per_token(9, "values, mask, results"),
    main={
        "cpu": ((Shape("whiten", 64, steps=1024, active=0.7, backward=False), ()),),
        "cuda": ((Shape("whiten", 512, steps=4096, active=0.7, backward=False), ()),),
    },
    axes={"rows_steps": SEQUENCES},
    checked=_checked_steps("whiten"),
    compiled=_compiled_moments(
        "masked_whiten",
        moments_given={"moments": kernels.Moments(*torch.ones(3).unbind())},
        keep_mean={"shift_mean": False},
    ),
    export="masked_whiten",
    row_bits=False,
)


# --- sample_tokens -------------------------------------------------------------------------------


def _sample_tokens(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    keys = torch.randint(2**62, (shape.rows,), generator=generator)

    def ours(logits: Tensor, keys: Tensor) -> Results:
        drawn = kernels.sample_tokens(logits, keys, backend=backend)
        return {
            "tokens": drawn.tokens,
            "logprobs": drawn.logprobs_t1,
            "entropies": drawn.entropies,
        }

    def exact(logits: Tensor, keys: Tensor, tokens: Tensor) -> Results:
        logprobs, entropies = reference.token_logprobs(logits, tokens, entropy=True)
        return {"logprobs": logprobs, "entropies": entropies}

    return Problem(
        {"logits": _logits(shape, generator), "keys": keys},
        ours=ours,
        eager=peers.sample_tokens,
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
        for each in _compiled_vocabularies()
        if each[1:] == fewer or each[2][1] == COMPILED_VOCABULARIES[1]
        for label in (_SAMPLING if each[1:] == fewer else ("", "all"))
    ]
    calls += [(*each, "all") for each in _unusual_vocabularies()]
    for name, dtype, size, label in calls:
        # A program holds its part of a row in one tile, so that masked vectors are all there is.
        made = partial(call, dtype, size, _SAMPLING[label])
        yield Compiled(f"{name} {label}".strip(), made, Expect(load_bytes=16))


SAMPLE_TOKENS = Op(
    problem=_sample_tokens,
    work=lambda shape: _vocabulary_work(dataclasses.replace(shape, backward=False)),
    main={
        "cpu": ((Shape("sample_tokens", 1024, vocabulary=50257, backward=False), ()),),
        "cuda": ((Shape("sample_tokens", 8192, "bf16", vocabulary=151936, backward=False), ()),),
    },
    axes=ON_VOCABULARY,
    checked=_checked_rows("sample_tokens"),
    compiled=_compiled_sample_tokens,
)


# --- decode_attention ----------------------------------------------------------------------------

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
    """Live tokens of each slot, the same for every call: evenly spread between 2·active - 1 and all
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
        slot.copy_(_normal(generator, *slot.shape))
    lengths = torch.tensor(ragged_lengths(shape.rows, shape.steps, shape.active), dtype=torch.int32)
    position, ends = torch.arange(shape.steps), lengths.unsqueeze(1)
    inputs = {
        "query": _normal(generator, shape.rows, layer.heads, width).to(dtype),
        "keys": keys,
        "values": values,
        "lengths": lengths,
        "mask": (position < ends) & (position >= ends - (layer.window or shape.steps)),
    }

    def call(op: Callable[..., Tensor], mask: Tensor, **inputs: Tensor) -> Results:
        return {"out": op(**inputs, **layer.options)}  # who knows lengths needs no mask

    return Problem(
        inputs,
        ours=partial(call, partial(kernels.decode_attention, backend=backend)),
        eager=partial(peers.decode_attention, **layer.options),
        exact=partial(call, reference.decode_attention),
        by_row=frozenset({*inputs, "out"}),
        row_bytes=8 * shape.steps * layer.token_elements,
    )


def _attention_work(shape: Shape) -> Work:
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


def _checked_attention(sizes: Sizes) -> Iterator[Shape]:
    """The cap is one that these scores reach."""
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


# name: query heads to a head of keys, and options; a span of one split makes one launch. Of the
# heads, what matters is how many a program takes: up to 16, or 32, of a half dtype; 1 or 2 of fp32.
_ATTENTION: dict[str, tuple[int, dict[str, Any]]] = {
    "group=1": (1, {}),
    "group=7 one split": (7, {"span": 256}),
    "group=8 window softcap": (8, {"window": 200, "softcap": 50.0}),
    "group=80": (80, {}),
}
_COMPILED_ATTENTION = (
    *product(("bf16",), (64, 128), ("group=7 one split", "group=80")),
    ("bf16", 64, "group=1"),
    ("bf16", 128, "group=8 window softcap"),
    ("fp16", 64, "group=7 one split"),
    ("fp16", 128, "group=8 window softcap"),
    *product(("fp32",), (64, 128), ("group=1", "group=8 window softcap")),
    ("bf16", 80, "group=7 one split"),
    ("fp32", 96, "group=7 one split"),
    *product(("bf16", "fp32"), (256,), ("group=8 window softcap",)),
)


def _compiled_attention() -> Iterator[Compiled]:
    def call(dtype: torch.dtype, width: int, group: int, options: dict[str, Any]) -> None:
        query = torch.zeros(4, 2 * group, width, dtype=dtype)
        keys, values = torch.zeros(2, 8, 1024, 2, width, dtype=dtype)
        lengths = torch.ones(4, dtype=torch.int32)
        kernels.decode_attention(query, keys, values, lengths, backend="triton", **options)

    for name, width, label in _COMPILED_ATTENTION:
        made = partial(call, DTYPES[name], width, *_ATTENTION[label])
        yield Compiled(f"{name} D={width} {label}", made)


DECODE_ATTENTION = Op(
    problem=_decode_attention,
    work=_attention_work,
    main={
        "cpu": ((_decode(*DECODES[2], "fp32"), ()),),
        "cuda": tuple((_decode(*DECODES[i]), ()) for i in (0, 1, 3)),
    },
    axes={"attention_rows_steps": DECODES, "dtype": tuple(DTYPES), "active": (1.0, 0.5)},
    checked=_checked_attention,
    compiled=_compiled_attention,
    eager="a masked softmax over the whole slots",
)


OPS = {
    "token_logprobs": TOKEN_LOGPROBS,
    "linear_logprobs": LINEAR_LOGPROBS,
    "linear_ppo_loss": LINEAR_PPO_LOSS,
    "linear_nll_loss": Op(compiled=_compiled_linear_nll_loss),
    "full_kl": FULL_KL,
    "kl_penalty": Op(compiled=_compiled_kl_penalty),
    "kl_rewards": KL_REWARDS,
    "gae": GAE,
    "masked_mean": Op(compiled=_compiled_moments("masked_mean")),
    "masked_var": Op(compiled=_compiled_moments("masked_var")),
    "whiten": WHITEN,
    "ppo_loss": PPO_LOSS,
    "sample_tokens": SAMPLE_TOKENS,
    "decode_attention": DECODE_ATTENTION,
}
