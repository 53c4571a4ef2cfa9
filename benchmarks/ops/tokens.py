"""Ops on values per token [B, T]: kl_penalty, kl_rewards, gae, ppo_loss and masked moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels as kernels
from benchmarks import eager, peers
from benchmarks.cases import Goal
from benchmarks.gate import Problem, Results
from benchmarks.ops.inputs import Size, backward, normal
from benchmarks.ops.record import (
    HOPPER,
    Compiled,
    Expect,
    Mains,
    Op,
    Sizes,
    Work,
)
from benchmarks.shapes import DIFFERENTIABLE, Shape
from benchmarks.timing import DTYPES
from fastrl_kernels import reference

SEQUENCES = ((64, 256), (64, 1024), (512, 1024), (128, 8192), (512, 4096), (1024, 1024))
ALIGNED, RAGGED = (64, 512), (13, 507)  # rows and steps of compiled calls; 507 = 16·31 + 11
KL_KINDS = ("kl", "abs", "mse", "k3", "k3+")
KL_COEF = 0.1
# These ops are small beside those on logits: the size of a tile is left to them.
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

Call = Callable[[torch.dtype, Size], None]


def _sequences(shape: Shape, generator: torch.Generator, *names: str) -> dict[str, Tensor]:
    dtype = DTYPES[shape.dtype]
    return {name: normal(generator, shape.rows, shape.steps).to(dtype) for name in names}


def _prefix_mask(shape: Shape, generator: torch.Generator) -> Tensor:
    """Responses that end after between 2·active - 1 and all of the steps, at least one."""
    least = max(2 * shape.active - 1, 0.0)
    share = least + (1 - least) * torch.rand(shape.rows, 1, generator=generator)
    return torch.arange(shape.steps) < (share * shape.steps).ceil().clamp(min=1)


def _work(nbytes: int, what: str) -> Callable[[Shape], Work]:
    return lambda shape: Work(
        nbytes * shape.rows * shape.steps, 0, f"{nbytes} bytes per token: {what}"
    )


def _main(
    op: str, rows: int, steps: int, *goals: Goal, cpu: tuple[Goal, ...] = (), **more: Any
) -> Mains:
    return {
        "cpu": ((_shape(op, 64, 1024), cpu),),
        "cuda": ((dataclasses.replace(_shape(op, rows, steps), **more), goals),),
    }


def _shape(op: str, rows: int, steps: int) -> Shape:
    return Shape(op, rows, steps=steps, active=0.7, backward=op in DIFFERENTIABLE)


def _checked(op: str) -> Callable[[Sizes], Iterator[Shape]]:
    def shapes(sizes: Sizes) -> Iterator[Shape]:
        odd, even = sizes.steps
        yield _shape(op, sizes.rows, even)
        if op == "gae":
            yield dataclasses.replace(_shape(op, sizes.rows, even), whiten=True)
        yield dataclasses.replace(_shape(op, sizes.rows, odd), whiten=op == "gae")

    return shapes


def _compiled(calls: Mapping[str, Call]) -> Iterator[Compiled]:
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


def _compiled_kl_penalty() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, kind: str, masked: bool = True, both: bool = False
    ) -> None:
        mask = _mask(size) if masked else None
        logprobs = _tokens(dtype, size, True), _tokens(dtype, size, both)
        backward(kernels.kl_penalty(*logprobs, kind, mask=mask, backend="triton"))

    calls: dict[str, Call] = {f"{kind} mask": partial(call, kind=kind) for kind in KL_KINDS}
    calls["no mask"] = partial(call, kind="kl", masked=False)
    calls["k3 mask both"] = partial(call, kind="k3", both=True)
    yield from _compiled(calls)


KL_PENALTY = Op(compiled=_compiled_kl_penalty)


def _kl_rewards(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    names = ("rewards", "kls", "sequence_kl")
    inputs = _sequences(shape, generator, "logprobs", "ref_logprobs")
    inputs |= {"scores": normal(generator, shape.rows), "mask": _prefix_mask(shape, generator)}

    def call(op: Callable[..., Any], **inputs: Tensor) -> Results:
        return dict(zip(names, op(**inputs, coef=KL_COEF), strict=True))

    return Problem(
        inputs,
        ours=partial(call, partial(kernels.kl_rewards, backend=backend)),
        eager=partial(eager.kl_rewards, coef=KL_COEF),
        exact=partial(call, reference.kl_rewards),
        by_row=frozenset({*inputs, *names}),
    )


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
            backward(*found)

    calls: dict[str, Call] = {
        "kl forward": partial(call, kind="kl", learned=False),
        "kl tensor coef": partial(call, kind="kl", coef=torch.tensor(0.2)),
    }
    yield from _compiled(calls | {kind: partial(call, kind=kind) for kind in KL_KINDS})


KL_REWARDS = Op(
    problem=_kl_rewards,
    work=_work(17, "two log-probabilities, mask, rewards, KL"),
    main=_main("kl_rewards", 512, 4096),
    axes={"rows_steps": SEQUENCES},
    checked=_checked("kl_rewards"),
    compiled=_compiled_kl_rewards,
    torch_compile=False,  # it would unroll the loop over sequences
    eager="a sequence at a time",
)


def _gae(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    settings: dict[str, Any] = {"gamma": eager.GAMMA, "lam": eager.LAM, "whiten": shape.whiten}
    inputs = _sequences(shape, generator, "rewards", "values")
    inputs["mask"] = _prefix_mask(shape, generator)

    def call(op: Callable[..., Any], **inputs: Tensor) -> Results:
        return dict(zip(("advantages", "returns"), op(**inputs, **settings), strict=True))

    return Problem(
        inputs,
        ours=partial(call, partial(kernels.gae, backend=backend)),
        eager=partial(eager.gae, **settings),
        exact=partial(call, reference.gae),
        by_row=frozenset({*inputs, "advantages", "returns"}),
    )


def _gae_work(shape: Shape) -> Work:
    each = 17 + 4 * shape.whiten
    again = ", advantages once more" if shape.whiten else ""
    what = f"{each} bytes per step: rewards, values, mask, advantages, returns{again}"
    return Work(each * shape.rows * shape.steps, 0, what)


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
        backward(*found)

    everything = partial(call, masked=True, ends="terminated, truncated", whiten=True)
    yield from _compiled(
        {
            "": partial(call, masked=False),
            "whiten terminated": partial(call, masked=False, ends="terminated", whiten=True),
            "mask truncated": partial(call, masked=True, ends="truncated"),
            "mask whiten": partial(call, masked=True, whiten=True),
            "all": everything,
        }
    )
    # Rows that share a tile, that fill one, and that are walked in several.
    for size in ((64, 16), (64, 1024), (512, 4096)):
        made = partial(everything, torch.float32, size)
        yield Compiled(f"fp32 T={size[1]} all", made, ALIGNED_ROWS)


GAE = Op(
    problem=_gae,
    work=_gae_work,
    main=_main(
        "gae", 512, 4096, Goal("seconds", 25e-6, HOPPER), Goal("forward launches", 2, HOPPER),
        Goal("backward launches", 0, HOPPER), cpu=(Goal("speedup", 30),), whiten=True,
    ),
    axes={"rows_steps": SEQUENCES, "whiten": (False, True)},
    checked=_checked("gae"),
    compiled=_compiled_gae,
    peers={"torchrl": peers.torchrl},
    torch_compile=False,  # it would unroll the loop over steps
    eager="the classic per-step loop",
)  # fmt: skip


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
        eager=eager.ppo_loss,
        exact=partial(call, reference.ppo_loss),
        wrt=("logprobs", "values"),
        upstream={"loss": torch.ones(())},
        by_row=frozenset(inputs),
    )


def _compiled_ppo_loss() -> Iterator[Compiled]:
    def call(
        dtype: torch.dtype, size: Size, kl: str = "", value: bool = False, weighted: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
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
        backward(loss)

    on_device = torch.tensor(512.0)
    everything = partial(call, kl="k3", value=True, weighted=True, dual_clip=3.0)
    aggregates = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
                  "seq-mean-token-mean")  # fmt: skip
    calls: dict[str, Call] = {
        "": call,
        "kl": partial(call, kl="kl", value=True),
        "abs, denominator": partial(call, kl="abs", value=True, denominator=512.0),
        "mse, dual clip": partial(call, kl="mse", dual_clip=3.0),
        "k3+, weights": partial(call, kl="k3+", weighted=True),
        "kl, denominator tensor": partial(call, kl="kl", value=True, denominator=on_device),
        "delta": partial(call, objective=kernels.PolicyLoss(delta=4.0)),
        "cispo": partial(call, kl="k3", objective=kernels.PolicyLoss("cispo")),
        "sapo": partial(call, kl="k3", objective=kernels.PolicyLoss("sapo")),
        "vespo": partial(call, kl="k3", objective=kernels.PolicyLoss("vespo")),
    }
    yield from _compiled(
        calls | {f"all, {name}": partial(everything, aggregate=name) for name in aggregates}
    )


PPO_LOSS = Op(
    problem=_ppo_loss,
    work=_work(33, "six inputs and a mask, two gradients"),
    main=_main(
        "ppo_loss", 1024, 1024, Goal("forward launches", 1, HOPPER),
        Goal("backward launches", 1, HOPPER),
    ),
    axes={"rows_steps": SEQUENCES},
    checked=_checked("ppo_loss"),
    compiled=_compiled_ppo_loss,
)  # fmt: skip


def _compiled_moments(op: str, **variants: dict[str, Any]) -> Callable[[], Iterator[Compiled]]:
    def call(dtype: torch.dtype, size: Size, **options: Any) -> None:
        values = _tokens(dtype, size, learned=True)
        backward(getattr(kernels, op)(values, _mask(size), backend="triton", **options))

    named = {name.replace("_", " "): partial(call, **x) for name, x in variants.items()}
    return lambda: _compiled({**named, "": call})


MASKED_MEAN = Op(compiled=_compiled_moments("masked_mean"))
MASKED_VAR = Op(compiled=_compiled_moments("masked_var"))


def _whiten(shape: Shape, generator: torch.Generator, backend: str, _: bool) -> Problem:
    inputs = _sequences(shape, generator, "values")
    inputs["mask"] = _prefix_mask(shape, generator)
    return Problem(
        inputs,
        ours=lambda **x: {"whitened": kernels.masked_whiten(**x, backend=backend)},
        eager=eager.masked_whiten,
        exact=lambda **x: {"whitened": reference.masked_whiten(**x)},
        by_row=frozenset({*inputs, "whitened"}),
    )


WHITEN = Op(
    problem=_whiten,
    work=_work(9, "values, mask, results"),
    main=_main("whiten", 512, 4096),
    axes={"rows_steps": SEQUENCES},
    checked=_checked("whiten"),
    compiled=_compiled_moments(
        "masked_whiten",
        moments_given={"moments": kernels.Moments(*torch.ones(3).unbind())},
        keep_mean={"shift_mean": False},
    ),
    export="masked_whiten",
)
