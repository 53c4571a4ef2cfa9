"""Every op, values and gradients, on whatever hypothesis draws, against float64."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from fastrl_kernels import (
    KLTerm,
    LossStats,
    ValueTerm,
    full_kl,
    gae,
    kl_penalty,
    kl_rewards,
    ppo_loss,
    reference,
    token_logprobs,
)
from fastrl_kernels.types import AGGREGATES, KL_KINDS
from tests.kernels.judge import DTYPES, judge, misaligned, results
from tests.kernels.test_moments import STATISTICS
from tests.kernels.test_ppo_loss import untie
from tests.kernels.test_preference import CASES, both

LAYOUTS = ("contiguous", "slice", "all but a row", "every other", "transposed", "misaligned")
LENGTHS = (1, 2, 3, 7, 9, 33, 128, 300)
Op = Callable[..., Any]


def examples(n: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on ``n`` draws, the same ones every time; a failure is shown as it was drawn,
    since shrinking it would take minutes in the interpreter."""
    draws = settings(
        derandomize=True,
        deadline=None,
        max_examples=n,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return lambda test: draws(given(random=st.randoms(use_true_random=True))(test))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers elsewhere in memory, with others between them."""
    if x.dim() == 0 or layout == "contiguous":
        return x
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "misaligned":
        return misaligned(x)
    other = math.nan if x.is_floating_point() else 1
    if layout == "slice":
        return x.new_full((*x.shape[:-1], x.shape[-1] + 3), other)[..., 2:-1].copy_(x)
    if layout == "all but a row" and x.dim() > 1:
        room = x.new_full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1]), other)
        return room[..., :-1, :].copy_(x)
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), other)[..., ::2].copy_(x)


class Draw:
    """What an example is made of, from a random state that hypothesis draws. Each choice is noted,
    and all are equally likely: drawn one by one, most examples would be near copies."""

    def __init__(self, random: Random, device: str) -> None:
        self.random, self.device = random, device
        self.generator = torch.Generator().manual_seed(random.getrandbits(32))
        self.dtype = self.one_of(DTYPES, "dtype")
        self.layout = self.one_of(LAYOUTS, "layout")

    def one_of(self, values: Sequence[Any], label: str) -> Any:
        value = self.random.choice(values)
        note(f"{label}: {value}")
        return value

    def sometimes(self, label: str) -> bool:
        return self.one_of((False, True), label)

    def perhaps(self, x: Any, label: str) -> Any:
        return x if self.one_of((True, True, False), label) else None

    def shape(self, lengths: Sequence[int] = LENGTHS) -> tuple[int, ...]:
        """[..., T] or [..., V], now and then with nothing in it."""
        leading = self.one_of(
            ((), (1,), (4,), (2, 3), (3, 2), (2, 1, 3), (2, 2, 2), (0, 2)), "leading"
        )
        return (*leading, self.one_of(lengths, "last"))

    def normal(self, shape: Sequence[int], scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return scale * torch.randn(tuple(shape), generator=self.generator) + shift

    def uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(tuple(shape), generator=self.generator)

    def placed(self, x: Tensor) -> Tensor:
        """On the device, most often with the dtype and the strides of the other tensors."""
        if x.is_floating_point() and self.random.random() < 0.8:
            x = x.to(self.dtype)
        layout = self.layout if self.random.random() < 0.8 else "contiguous"
        return laid_out(x.to(self.device), layout)

    def mask(self, shape: Sequence[int]) -> Tensor:
        """True in places, at the start of every row, everywhere, nowhere, or in some rows."""
        kind = self.one_of(("holes", "holes", "holes", "starts", "rows", "all", "nothing"), "mask")
        ends = self.uniform((*shape[:-1], 1) if shape else ())
        if kind == "starts" and shape:
            mask = torch.arange(shape[-1]) < (ends * (shape[-1] + 1)).long()
        elif kind == "rows":
            mask = (ends < 0.5).expand(shape).clone()
        else:
            mask = self.uniform(shape) < {"all": 2.0, "nothing": 0.0}.get(kind, 0.6)
        return self.placed(mask)

    def temperature(self, leading: Sequence[int]) -> float | Tensor:
        one = self.one_of((1.0, 0.0625, 0.7, 16.0, None, None), "temperature")
        return self.placed(4.0 * self.uniform(leading) + 0.25) if one is None else one


def check(
    op: Op,
    formula: Op,
    inputs: dict[str, Any],
    wrt: Sequence[str],
    *,
    counted: Tensor | None = None,
) -> None:
    """Judges values and gradients. Where a token is not ``counted`` they are 0, and what the inputs
    hold there changes no bit."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    others = {n: x for n, x in inputs.items() if x is not None and not isinstance(x, Tensor)}
    op, formula = partial(op, **others), partial(formula, **others)
    found = judge(op, formula, tensors, wrt=wrt)
    if counted is None:
        return

    def per_token(x: Tensor) -> bool:
        return x.shape[: counted.dim()] == counted.shape

    # In place: on a GPU the order of a sum depends on whether a tensor begins at a multiple of 16
    # bytes.
    for x in tensors.values():
        if x.is_floating_point() and per_token(x):
            here = counted[(..., *[None] * (x.dim() - counted.dim()))]
            x.masked_fill_(~here, math.nan)
    again = results(op, tensors, wrt)
    for name, x in found.items():
        torch.testing.assert_close(again[name], x, rtol=0, atol=0, equal_nan=True, msg=name)
        if per_token(x):
            assert not x[~counted].any(), f"{name} is not 0 where masked"


def distribution(draw: Draw, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits [..., V] from uniform to one-hot, near 0 or far from it; and a token of each row."""
    scale = draw.one_of((1.0, 0.0, 10.0, 1000.0), "scale")
    logits = draw.normal(shape, scale, draw.one_of((0.0, 300.0, -300.0, 5000.0), "shift"))
    labels = (draw.uniform(shape[:-1]) * shape[-1]).long()
    if draw.sometimes("impossible tokens"):
        impossible = draw.uniform(shape) < 0.4
        logits[impossible.scatter(-1, labels.unsqueeze(-1), False)] = -math.inf
    return logits, labels


@examples(16)
def test_token_logprobs(backend, device, random):
    draw = Draw(random, device)
    *leading, _ = shape = draw.shape()
    logits, labels = distribution(draw, shape)
    labels[draw.uniform(leading) < draw.one_of((0.0, 0.2), "share of -100")] = -100
    inputs = {
        "logits": draw.placed(logits),
        "labels": draw.placed(labels),
        "mask": draw.perhaps(draw.mask(leading), "masked"),
        "temperature": draw.temperature(leading),
        "entropy": draw.sometimes("entropy"),
    }
    counted = inputs["labels"] != -100
    if inputs["mask"] is not None:
        counted &= inputs["mask"]
    op = partial(token_logprobs, backend=backend)
    check(op, reference.token_logprobs, inputs, ["logits"], counted=counted)


VOCABULARIES = (50257, 129920, 151936, 152064)


def peaked(draw: Draw) -> tuple[Tensor, Tensor]:
    """A large vocabulary, far below 0, with nearly all of the mass on one token of each row."""
    vocabulary = draw.one_of(VOCABULARIES, "vocabulary")
    logits = draw.normal((draw.one_of((1, 2), "rows"), vocabulary), 2.0, -60.0)
    at = draw.one_of((0, 7, 900, vocabulary - 1), "peak")
    logits[:, at] = draw.one_of((-40.0, -5.0), "height")
    label = draw.one_of((at, vocabulary - 1, 0), "label")
    return logits, torch.full(logits.shape[:1], label)


@examples(6)
def test_token_logprobs_of_a_large_vocabulary(backend, device, random):
    draw = Draw(random, device)
    logits, labels = peaked(draw)
    inputs = {"logits": draw.placed(logits), "labels": labels.to(device), "entropy": True}
    op = partial(token_logprobs, backend=backend)
    check(op, reference.token_logprobs, inputs, ["logits"])


@examples(16)
def test_full_kl(backend, device, random):
    draw = Draw(random, device)
    *leading, _ = shape = draw.shape()
    logits, _ = distribution(draw, shape)
    apart = draw.one_of((1.0, 0.0, 1e-3, 30.0), "apart")
    shift = draw.one_of((0.0, 200.0, -200.0), "shift of the reference")
    pair = {
        "logits": draw.placed(logits),
        "ref_logits": draw.placed(logits + draw.normal(shape, apart, shift)),
    }
    mask = draw.perhaps(draw.mask(leading), "masked")
    inputs = {**pair, "mask": mask, "temperature": draw.temperature(leading)}
    op = partial(full_kl, backend=backend)
    check(op, reference.full_kl, inputs, ["logits"], counted=mask)


@examples(6)
def test_full_kl_of_a_large_vocabulary(backend, device, random):
    draw = Draw(random, device)
    logits, _ = peaked(draw)
    ref_logits = logits + draw.normal(logits.shape, 0.5)
    pair = {"logits": draw.placed(logits), "ref_logits": draw.placed(ref_logits)}
    op = partial(full_kl, backend=backend)
    check(op, reference.full_kl, pair, ["logits"])


def policies(draw: Draw, shape: Sequence[int]) -> dict[str, Tensor]:
    """Log-probs of a policy and of a reference, equal, near, or as far as fp32's exp goes."""
    base = -draw.one_of((3.0, 1e-3, 30.0), "size") * draw.uniform(shape)
    apart = draw.one_of((0.3, 2.0, 0.0, 1e-4, 12.0), "apart")
    logprobs, ref_logprobs = draw.placed(base), draw.placed(base + draw.normal(shape, apart))
    return {"logprobs": logprobs, "ref_logprobs": ref_logprobs}


@pytest.mark.parametrize("kind", KL_KINDS)
@examples(8)
def test_kl_penalty(backend, device, kind, random):
    draw = Draw(random, device)
    shape = draw.shape()
    inputs = policies(draw, shape)
    mask = draw.perhaps(draw.mask(shape), "masked")
    named = {"kind": kind, "mask": mask}
    op = partial(kl_penalty, backend=backend)
    check(op, reference.kl_penalty, {**inputs, **named}, [*inputs], counted=mask)


@pytest.mark.parametrize("kind", KL_KINDS)
@examples(6)
def test_kl_rewards(backend, device, kind, random):
    draw = Draw(random, device)
    shape = draw.shape()
    inputs = policies(draw, shape)
    scores = draw.normal(shape[:-1], draw.one_of((1.0, 1e3), "size of scores"))
    inputs["scores"] = draw.placed(scores)
    mask = draw.mask(shape)
    coef = draw.one_of((0.2, 0.0, 1.0, 30.0), "coef")
    named = {"mask": mask, "kind": kind, "coef": coef}
    op = partial(kl_rewards, backend=backend)
    check(op, reference.kl_rewards, {**inputs, **named}, [*inputs], counted=mask)


@examples(16)
def test_gae(backend, device, random):
    draw = Draw(random, device)
    shape = draw.shape((1, 2, 7, 33, 70))
    scale = draw.one_of((1.0, 1e-3, 1e3), "scale")
    wrt = {name: draw.placed(draw.normal(shape, scale)) for name in ("rewards", "values")}
    mask = draw.perhaps(draw.mask(shape), "masked")
    named: dict[str, Any] = {"mask": mask, "whiten": draw.sometimes("whiten")}
    for name in ("gamma", "lam"):
        named[name] = draw.one_of((0.97, 1.0, 0.0, 0.5), name)
    if draw.sometimes("ends"):
        named["terminated"] = draw.placed(draw.uniform(shape) < 0.1)
    if draw.sometimes("cuts"):
        named["truncated"] = draw.placed(draw.uniform(shape) < 0.2)
        wrt["bootstrap_value"] = draw.placed(draw.normal(shape, scale))
    check(partial(gae, backend=backend), reference.gae, {**wrt, **named}, [*wrt], counted=mask)


@pytest.mark.parametrize("name", STATISTICS)
@examples(8)
def test_moments(backend, device, name, random):
    draw = Draw(random, device)
    shape = draw.shape()
    op, formula, named = STATISTICS[name]
    scale = draw.one_of((1.0, 1e-3, 1e3), "scale")
    values = draw.normal(shape, scale, scale * draw.one_of((0.0, 1.0, -8.0), "mean"))
    mask = draw.mask(shape)
    inputs = {"values": draw.placed(values), "mask": mask, **named}
    check(partial(op, backend=backend), formula, inputs, ["values"], counted=mask)


def terms(value: Op, kl: Op, options: dict[str, Any]) -> dict[str, Any]:
    """Named arguments of ppo_loss, of which some are tensors within a term."""
    options = dict(options)
    if "values" in options:
        tensors = (options.pop(name) for name in ("values", "old_values", "returns"))
        options["value"] = value(*tensors, options.pop("value_cliprange"), 0.3)
    if "ref_logprobs" in options:
        options["kl"] = kl(options.pop("ref_logprobs"), 0.15, options.pop("kind"))
    return options


@pytest.mark.parametrize("aggregate", AGGREGATES)
@examples(8)
def test_ppo_loss(backend, device, aggregate, random):
    draw = Draw(random, device)
    shape = draw.shape()
    old = -3.0 * draw.uniform(shape)
    apart = draw.one_of((0.4, 0.0, 8.0), "apart")
    mask = draw.mask(shape)
    inputs: dict[str, Any] = {
        "logprobs": draw.placed(old + draw.normal(shape, apart)),
        "old_logprobs": draw.placed(old),
        "advantages": draw.placed(draw.normal(shape, draw.one_of((1.0, 1e3), "size"))),
        "mask": mask,
        "cliprange": draw.one_of((0.2, 0.0, (0.1, 0.3)), "cliprange"),
        "dual_clip": draw.one_of((None, 1.5, 3.0), "dual_clip"),
        "aggregate": aggregate,
        "denominator": draw.one_of((None, 37.0, torch.tensor(11.0, device=device)), "denominator"),
        "weights": draw.perhaps(draw.placed(draw.uniform(shape)), "weights"),
        "token_weights": draw.perhaps(draw.placed(draw.uniform(shape)), "token weights"),
    }
    if draw.sometimes("value loss"):
        for name in ("values", "old_values", "returns"):
            inputs[name] = draw.placed(draw.normal(shape))
        inputs["value_cliprange"] = draw.one_of((0.25, 0.0), "value_cliprange")
        untie(inputs, inputs["value_cliprange"])
    if draw.sometimes("KL loss"):
        inputs["ref_logprobs"] = draw.placed(old + draw.normal(shape, 0.4))
        inputs["kind"] = draw.one_of(KL_KINDS, "kind")

    def op(**options: Any) -> tuple[Tensor, ...]:
        loss, stats = ppo_loss(**terms(ValueTerm, KLTerm, options), backend=backend)
        return loss, *stats.tensor.unbind()

    def formula(**options: Any) -> tuple[Tensor, ...]:
        loss, stats = reference.ppo_loss(**terms(plain, plain, options))
        return loss, *(stats[name] for name in LossStats.NAMES)

    def plain(*term: Any) -> tuple[Any, ...]:
        return term

    wrt = [name for name in ("logprobs", "values") if name in inputs]
    check(op, formula, inputs, wrt, counted=mask)


@pytest.mark.parametrize("case", CASES)
@examples(9)
def test_preference_losses(device, random, case):
    draw = Draw(random, device)
    n = draw.one_of((3, 0, 1, 64), "examples")
    scale = draw.one_of((1.0, 1e-3, 30.0, 1e4), "scale")
    inputs = {}
    for name in CASES[case][1]:
        x = draw.normal((n,), scale, draw.one_of((0.0, -100.0), "shift"))
        inputs[name] = draw.placed(-x.abs() if case == "ORPO" else x)
    wrt = [*inputs]
    if case == "KTO":
        inputs["desirable"] = draw.placed(draw.uniform((n,)) < 0.5)
        inputs["kl"] = draw.placed(draw.normal(()))
    check(*both(case), inputs, wrt)
