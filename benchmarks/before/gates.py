"""What must hold before any time on a device counts: small checks of every op's kernels.

Forward and backward at odd and even lengths in every dtype, strided inputs, masks, a row alone
against the same row in a batch, and two runs against each other, the last two bit for bit; no wait
for the device; of attention over a cache, ragged lengths, and NaN where its tokens are dead. They
need nothing but torch and triton, so that a bare checkout on a GPU can run them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.before import build
from benchmarks.before.attention import Attention
from benchmarks.before.cases import DIFFERENTIABLE, Case
from benchmarks.before.problem import DRAWS, FACTOR, Problem, Results, errors_of, results, settled

# Ops whose rows promise the same bits in every batch; the others promise it for every run.
ROW_OPS = (
    "token_logprobs",
    "full_kl",
    "kl_rewards",
    "gae",
    "sample_tokens",
    "decode_attention",
)
ON_VOCABULARY = ("token_logprobs", "full_kl", "sample_tokens")
ON_HEAD = ("linear_logprobs", "linear_ppo_loss")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the checks' inputs: lengths are (odd, even)."""

    rows: int = 64
    vocabulary: tuple[int, int] = (50257, 151936)
    steps: tuple[int, int] = (507, 512)
    hidden: int = 256
    tokens: tuple[int, int] = (1023, 1024)  # of a cache's slot: cut into several parts
    width: int = 64  # of its heads


# For the interpreter.
TINY = Sizes(rows=5, vocabulary=(61, 64), steps=(37, 48), hidden=16, tokens=(37, 260), width=16)


@dataclasses.dataclass(frozen=True)
class Check:
    """`run` says what is wrong, or None."""

    op: str
    name: str
    run: Callable[[], str | None]


def checks(
    op: str, device: torch.device, backend: str = "auto", sizes: Sizes | None = None
) -> Iterator[Check]:
    """An op's checks, the most telling first."""
    sizes = sizes or Sizes()
    for case in cases_of(op, sizes):
        make = partial(build.problem, case, device, backend=backend, pick_rows=False)
        yield Check(op, f"exact: {case.label}", lambda make=make: exact(*_draws(make)))
        if op == "decode_attention":  # it leaves out what is dead in a way for each dtype
            yield Check(
                op, f"dead is unread: {case.label}", lambda make=make: dead_is_unread(make())
            )
    # The last case has masks, where the op has any.
    yield Check(
        op, f"strided: {case.label}", lambda: exact(*_draws(lambda seed: strided(make(seed=seed))))
    )
    if op != "decode_attention":
        yield Check(op, f"zero where masked: {case.label}", lambda: zero_where_masked(make()))
    yield Check(op, f"same bits twice: {case.label}", lambda: same_twice(make()))
    if device.type == "cuda":
        yield Check(op, f"waits for nothing: {case.label}", lambda: waits_for_nothing(make()))
    if op in ROW_OPS:
        plain = dataclasses.replace(case, whiten=False)
        alone = partial(build.problem, plain, device, backend=backend)
        yield Check(op, f"same bits alone: {plain.label}", lambda: same_alone(alone()))


def cases_of(op: str, sizes: Sizes) -> Iterator[Case]:
    """An op in every dtype, at odd and even lengths, with masks where it has any."""
    backward = op in DIFFERENTIABLE
    if op in ON_VOCABULARY or op in ON_HEAD:
        odd, even = sizes.vocabulary
        hidden = sizes.hidden if op in ON_HEAD else 0
        entropy = {"token_logprobs": "gradient", "linear_logprobs": "gradient"}.get(op, "off")
        entropy = "metric" if op == "linear_ppo_loss" else entropy
        active = 1.0 if op in ("full_kl", "sample_tokens") else 0.5
        base = Case(op, sizes.rows, hidden=hidden, vocabulary=even, backward=backward)
        yield dataclasses.replace(base, dtype="bf16")
        yield dataclasses.replace(base, dtype="fp32", vocabulary=odd)
        if op in ON_HEAD:
            yield dataclasses.replace(base, dtype="bf16", head="frozen")
        yield dataclasses.replace(base, dtype="fp16", entropy=entropy)
        yield dataclasses.replace(
            base, dtype="bf16", vocabulary=odd, entropy=entropy, active=active
        )
        return
    if op == "decode_attention":
        yield from _attention_cases(sizes)
        return
    odd, even = sizes.steps
    base = Case(op, sizes.rows, steps=even, active=0.7, backward=backward)
    yield base
    if op == "gae":
        yield dataclasses.replace(base, whiten=True)
    yield dataclasses.replace(base, steps=odd, whiten=op == "gae")


def _attention_cases(sizes: Sizes) -> Iterator[Case]:
    """Lengths from 1 to all of a slot's tokens; the cap is one that these scores reach."""
    odd, even = sizes.tokens
    window = odd // 3
    for dtype, tokens, heads, options in (
        ("bf16", even, (4, 2), {}),
        ("fp32", odd, (8, 2), {}),
        ("fp16", odd, (3, 3), {"window": window}),
        ("fp32", even, (4, 2), {"softcap": 2.0}),
        ("bf16", odd, (14, 2), {"window": window, "softcap": 2.0}),
    ):
        layer = Attention(*heads, sizes.width, **options)
        yield Case(
            "decode_attention",
            sizes.rows,
            dtype,
            steps=tokens,
            active=0.5,
            backward=False,
            attention=layer,
        )


def _draws(make: Callable[..., Problem]) -> tuple[Problem, Iterator[Problem]]:
    """A problem, and others that differ in what is drawn."""
    return make(seed=0), (make(seed=seed) for seed in range(1, DRAWS))


def exact(problem: Problem, others: Iterable[Problem] = ()) -> str | None:
    """Error against float64 within twice that of eager PyTorch."""
    found = {"ours": results(problem, problem.ours), "eager": results(problem, problem.eager)}
    judged = errors_of(problem, found)
    error = settled(judged["ours"], judged["eager"], others)
    if error <= FACTOR:
        return None
    return f"error is {error:.3g} times eager PyTorch's, {FACTOR:g} are allowed"


def strided(problem: Problem) -> Problem:
    """The same inputs as slices of wider memory."""

    def slice_of_more(x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        room = x.new_empty(*x.shape[:-1], x.shape[-1] + 3)
        room[..., : x.shape[-1]] = x
        return room[..., : x.shape[-1]]

    inputs = {name: slice_of_more(x) for name, x in problem.inputs.items()}
    return dataclasses.replace(problem, inputs=inputs)


def zero_where_masked(problem: Problem) -> str | None:
    """Results and gradients are exactly 0 there, also where inputs are NaN.

    Hidden states stay as they are: a head's gradient is a product with all of them.
    """
    mask = problem.inputs.get("mask")
    if mask is None:
        return None
    found = results(_with_nan(problem, ~mask), problem.ours)
    for name, result in found.items():
        if result.shape[: mask.dim()] == mask.shape and not (result[~mask] == 0).all():
            return f"{name} is not 0 where masked"
        if not result.isfinite().all():
            return f"{name} is not finite: what is masked got in"
    return None


def dead_is_unread(problem: Problem) -> str | None:
    """NaN among the tokens of a cache that do not count changes no bit of any result."""
    plain = results(problem, problem.ours)
    dead = _with_nan(problem, ~problem.inputs["mask"])
    return _difference(results(dead, problem.ours), plain)


def _with_nan(problem: Problem, where: Tensor) -> Problem:
    inputs = {
        name: _nan_where(where, x) if name in problem.by_row - {"hidden"} else x
        for name, x in problem.inputs.items()
    }
    return dataclasses.replace(problem, inputs=inputs)


def _nan_where(where: Tensor, x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.shape[: where.dim()] != where.shape:
        return x
    return x.masked_fill(where.reshape(where.shape + (1,) * (x.dim() - where.dim())), torch.nan)


def same_twice(problem: Problem) -> str | None:
    """Two runs give the same bits."""
    return _difference(*(results(problem, problem.ours) for _ in range(2)))


def waits_for_nothing(problem: Problem) -> str | None:
    """The host asks the device for nothing, neither forward nor backward."""
    results(problem, problem.ours)  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(problem, problem.ours)
    except RuntimeError as error:
        return f"it waits for the device: {error}"[:300]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def same_alone(problem: Problem) -> str | None:
    """A row gives the same bits alone and in the batch: the first, the last and one between."""
    together = results(problem, problem.ours)
    rows = next(len(x) for name, x in problem.inputs.items() if name in problem.by_row)
    for row in sorted({0, rows // 2, rows - 1}):
        here = slice(row, row + 1)

        def own(named: dict, here: slice = here) -> dict:
            return {k: x[here] if k in problem.by_row else x for k, x in named.items()}

        part = dataclasses.replace(
            problem, inputs=own(problem.inputs), upstream=own(problem.upstream)
        )
        alone = results(part, problem.ours)
        wrong = _difference(alone, {name: x[here] for name, x in together.items()})
        if wrong:
            return f"row {row}: {wrong}"
    return None


def _difference(first: Results, second: Results) -> str | None:
    for name, x in first.items():
        if not torch.equal(x, second[name]):
            return f"{name} differs in {(x != second[name]).sum()} of {x.numel()} places"
    return None
