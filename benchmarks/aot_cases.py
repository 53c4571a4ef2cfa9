"""The calls that the ahead-of-time gate compiles: every public op, forward and backward.

A call is made on CPU tensors and never launched, so that contents do not matter: what matters is
what kernels specialise on, which is dtypes, divisibility by 16, strides, and options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels as ops
from benchmarks.aot_attention_cases import attention_cases
from benchmarks.aot_judge import Case, Expect
from benchmarks.aot_linear_cases import linear_cases

PACKAGE = "fastrl_kernels._triton"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARIES = (50257, 151936)  # an odd one starts every row unaligned
ALIGNED, RAGGED = (64, 512), (13, 507)  # rows and steps; 507 is no multiple of 16
KL_KINDS = ("kl", "abs", "mse", "k3", "k3+")
AGGREGATES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
)

VOCABULARY = Expect(
    load_bytes=16,
    store_bytes=16,
    exempt=frozenset({"load_end", "store_end"}),
    why="the first and the last few elements of a row share a vector with other rows",
)
# A program holds its part of a row in one tile, so that masked vectors are all there is.
SAMPLING = Expect(load_bytes=16)
# Per-token ops are small beside those: the size of a tile is left to them.
ALIGNED_ROWS = Expect(
    load_bytes=16,
    store_bytes=16,
    any_tile=True,
    exempt=frozenset({"partials_ptr", "sums_ptr", "bootstrap_ptr"}),
    why="at most 1024 partial results, which stay in cache; bootstrap values are read only where "
    "an episode was truncated",
)
RAGGED_ROWS = replace(
    ALIGNED_ROWS, load_bytes=0, store_bytes=0, why="507 steps: rows start at any address"
)


def cases() -> Iterator[Case]:
    """Every case, the ops in the order of the design page."""
    yield from _token_logprobs_cases()
    yield from linear_cases()
    yield from _full_kl_cases()
    yield from _kl_penalty_cases()
    yield from _kl_rewards_cases()
    yield from _gae_cases()
    yield from _moments_cases()
    yield from _ppo_loss_cases()
    yield from _sample_tokens_cases()
    yield from attention_cases()


def _backward(*outputs: Tensor) -> None:
    """Gradients per token, as a loss gives them."""
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def _label(*parts: str, **flags: bool) -> str:
    return " ".join([*parts, *(name for name, on in flags.items() if on)])


# --- ops over the vocabulary ---------------------------------------------------------------------


def _token_logprobs(
    dtype: torch.dtype, shape: tuple[int, int], entropy: bool, per_token: bool, masked: bool
) -> None:
    rows = shape[:1]
    call = partial(
        ops.token_logprobs,
        torch.empty(shape, dtype=dtype, requires_grad=True),
        torch.zeros(rows, dtype=torch.int64),
        temperature=torch.ones(rows) if per_token else 0.7,
        mask=torch.ones(rows, dtype=torch.bool) if masked else None,
        backend="triton",
    )
    if entropy:
        _backward(*call(entropy=True))
    else:
        _backward(call())


def _full_kl(
    dtype: torch.dtype,
    shape: tuple[int, int],
    per_token: bool,
    masked: bool,
    ref_dtype: torch.dtype | None = None,
) -> None:
    rows = shape[:1]
    kl = ops.full_kl(
        torch.empty(shape, dtype=dtype, requires_grad=True),
        torch.empty(shape, dtype=ref_dtype or dtype),
        temperature=torch.ones(rows) if per_token else 0.7,
        mask=torch.ones(rows, dtype=torch.bool) if masked else None,
        backend="triton",
    )
    _backward(kl)


# (entropy, temperature per token, mask): in the four of them, every pair of settings meets.
_PAIRED = ((False, False, False), (False, True, True), (True, False, True), (True, True, False))
_NONE_ALL = ((False, False, False), (True, True, True))


def _vocabulary_shapes() -> Iterator[tuple[str, torch.dtype, tuple[int, int]]]:
    for (name, dtype), vocabulary in product(DTYPES.items(), VOCABULARIES):
        yield f"{name} V={vocabulary}", dtype, (4, vocabulary)


def _unusual_shapes() -> Iterator[tuple[str, torch.dtype, tuple[int, int]]]:
    yield "bf16 V=503", torch.bfloat16, (4, 503)  # fits in one tile
    # Past 2 GiB, AMD addresses by pointer in place of buffer. The pages are never touched.
    yield "bf16 V=151936 >2GiB", torch.bfloat16, (8192, 151936)


def _token_logprobs_cases() -> Iterator[Case]:
    calls = [
        (*shape, settings)
        for shape in _vocabulary_shapes()
        for settings in (_PAIRED if shape[1] == torch.bfloat16 else _NONE_ALL)
    ]
    calls += [(*shape, _PAIRED[-1]) for shape in _unusual_shapes()]
    for name, dtype, shape, (entropy, per_token, masked) in calls:
        yield Case(
            "token_logprobs",
            _label(name, entropy=entropy, temperatures=per_token, mask=masked),
            partial(_token_logprobs, dtype, shape, entropy, per_token, masked),
            VOCABULARY,
        )


def _full_kl_cases() -> Iterator[Case]:
    calls = [(*shape, options) for shape in _vocabulary_shapes() for options in (False, True)]
    calls += [(*shape, True) for shape in _unusual_shapes()]
    for name, dtype, shape, options in calls:
        yield Case(
            "full_kl",
            _label(name, temperatures=options, mask=options),
            partial(_full_kl, dtype, shape, options, options),
            VOCABULARY,
        )
    mixed = partial(_full_kl, torch.float32, (4, VOCABULARIES[0]), True, True, torch.bfloat16)
    yield Case("full_kl", "fp32, reference bf16", mixed, VOCABULARY)


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


def _sample_tokens_cases() -> Iterator[Case]:
    def call(dtype: torch.dtype, shape: tuple[int, int], options: dict[str, Any]) -> None:
        keys = torch.zeros(shape[0], dtype=torch.int64)
        ops.sample_tokens(torch.empty(shape, dtype=dtype), keys, backend="triton", **options)

    few, odd_bf16 = ("", "all"), (torch.bfloat16, (4, VOCABULARIES[0]))
    calls = [
        (*shape, label)
        for shape in _vocabulary_shapes()
        for label in (_SAMPLING if shape[1:] == odd_bf16 else few)
    ]
    calls += [(*shape, "all") for shape in _unusual_shapes()]
    for name, dtype, shape, label in calls:
        yield Case(
            "sample_tokens",
            f"{name} {label}".strip(),
            partial(call, dtype, shape, _SAMPLING[label]),
            SAMPLING,
        )


# --- ops over tokens -----------------------------------------------------------------------------

Shape = tuple[int, int]
Call = Callable[[torch.dtype, Shape], None]


def _variants(op: str, calls: Mapping[str, Call]) -> Iterator[Case]:
    """All in fp32, the usual dtype of these ops; in others, and ragged, the last, fullest one."""
    settings = [("fp32", ALIGNED, label) for label in calls]
    fullest = settings[-1][-1]
    settings += [(name, ALIGNED, fullest) for name in DTYPES if name != "fp32"]
    settings += [("fp32", RAGGED, fullest)]
    for name, shape, label in settings:
        yield Case(
            op,
            f"{name} T={shape[1]} {label}".strip(),
            partial(calls[label], DTYPES[name], shape),
            ALIGNED_ROWS if shape == ALIGNED else RAGGED_ROWS,
        )


def _tokens(dtype: torch.dtype, shape: Shape, learned: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=learned)


def _mask(shape: Shape) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def _kl_penalty_cases() -> Iterator[Case]:
    def call(
        dtype: torch.dtype, shape: Shape, kind: str, masked: bool = True, both: bool = False
    ) -> None:
        kl = ops.kl_penalty(
            _tokens(dtype, shape, learned=True),
            _tokens(dtype, shape, learned=both),
            kind,
            mask=_mask(shape) if masked else None,
            backend="triton",
        )
        _backward(kl)

    calls: dict[str, Call] = {f"{kind} mask": partial(call, kind=kind) for kind in KL_KINDS}
    calls["no mask"] = partial(call, kind="kl", masked=False)
    calls["k3 mask both"] = partial(call, kind="k3", both=True)
    yield from _variants("kl_penalty", calls)


def _kl_rewards_cases() -> Iterator[Case]:
    def call(
        dtype: torch.dtype, shape: Shape, kind: str, coef: float | Tensor, learned: bool
    ) -> None:
        results = ops.kl_rewards(
            _tokens(dtype, shape, learned),
            _tokens(dtype, shape, learned),
            torch.empty(shape[0], requires_grad=learned),
            _mask(shape),
            coef=coef,
            kind=kind,
            backend="triton",
        )
        if learned:
            _backward(*results)

    calls: dict[str, Call] = {
        "kl forward": partial(call, kind="kl", coef=0.2, learned=False),
        "kl tensor coef": partial(call, kind="kl", coef=torch.tensor(0.2), learned=True),
    }
    calls |= {kind: partial(call, kind=kind, coef=0.2, learned=True) for kind in KL_KINDS}
    yield from _variants("kl_rewards", calls)


def _gae_cases() -> Iterator[Case]:
    def call(
        dtype: torch.dtype, shape: Shape, masked: bool, ends: str = "", whiten: bool = False
    ) -> None:
        truncated = "truncated" in ends
        results = ops.gae(
            _tokens(dtype, shape, learned=True),
            _tokens(dtype, shape, learned=True),
            _mask(shape) if masked else None,
            gamma=1.0,
            lam=0.95,
            bootstrap_value=_tokens(dtype, shape, learned=True) if truncated else None,
            terminated=_mask(shape) if "terminated" in ends else None,
            truncated=_mask(shape) if truncated else None,
            whiten=whiten,
            backend="triton",
        )
        _backward(*results)

    yield from _variants(
        "gae",
        {
            "": partial(call, masked=False),
            "whiten terminated": partial(call, masked=False, ends="terminated", whiten=True),
            "mask truncated": partial(call, masked=True, ends="truncated"),
            "mask whiten": partial(call, masked=True, whiten=True),
            "all": partial(call, masked=True, ends="terminated, truncated", whiten=True),
        },
    )


def _moments_cases() -> Iterator[Case]:
    def call(dtype: torch.dtype, shape: Shape, op: Callable[..., Tensor], **options: Any) -> None:
        values = _tokens(dtype, shape, learned=True)
        _backward(op(values, _mask(shape), backend="triton", **options))

    yield from _variants("masked_mean", {"": partial(call, op=ops.masked_mean)})
    yield from _variants("masked_var", {"": partial(call, op=ops.masked_var)})
    given = ops.Moments(*torch.ones(3).unbind())
    yield from _variants(
        "masked_whiten",
        {
            "moments given": partial(call, op=ops.masked_whiten, moments=given),
            "keep mean": partial(call, op=ops.masked_whiten, shift_mean=False),
            "": partial(call, op=ops.masked_whiten),
        },
    )


def _ppo_loss_cases() -> Iterator[Case]:
    def call(
        dtype: torch.dtype,
        shape: Shape,
        kl: str = "",
        value: bool = False,
        weighted: bool = False,
        **options: Any,
    ) -> None:
        tokens, learned = partial(_tokens, dtype, shape), partial(_tokens, dtype, shape, True)
        loss, _ = ops.ppo_loss(
            learned(),
            tokens(),
            tokens(),
            _mask(shape),
            cliprange=(0.2, 0.28),
            value=ops.ValueTerm(learned(), tokens(), tokens()) if value else None,
            kl=ops.KLTerm(tokens(), 0.05, kl) if kl else None,
            weights=tokens() if weighted else None,
            token_weights=tokens() if weighted else None,
            backend="triton",
            **options,
        )
        _backward(loss)

    everything = partial(call, kl="k3", value=True, weighted=True, dual_clip=3.0)
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
    calls |= {f"all, {name}": partial(everything, aggregate=name) for name in AGGREGATES}
    yield from _variants("ppo_loss", calls)
