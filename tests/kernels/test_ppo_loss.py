"""The PPO loss, its gradients and statistics, against float64 and by hand."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import KLTerm, LossStats, ValueTerm, ppo_loss, reference
from fastrl_kernels.types import AGGREGATES, KL_KINDS
from tests.kernels.judge import DTYPES, assert_close_to_exact, misaligned, names
from tests.kernels.launches import watched
from tests.kernels.roundings import Rounded

SHAPE = (9, 150)  # more than one block, and none of them full at the end
LEAVES = ("logprobs", "values")
VALUE_RANGE = 0.25


def batch(shape=SHAPE, dtype=torch.float32, device="cpu", seed=0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

    old = -3 * torch.rand(shape, generator=generator)
    tensors = {
        "logprobs": (old + 0.4 * torch.randn(shape, generator=generator)).to(device, dtype),
        "old_logprobs": old.to(device, dtype), "advantages": numbers(), "weights": numbers().abs(),
        "token_weights": numbers().abs(), "values": numbers(), "old_values": numbers(),
        "returns": numbers(),
        "ref_logprobs": (old + 0.4 * torch.randn(shape, generator=generator)).to(device, dtype),
        "mask": (torch.rand(shape, generator=generator) > 0.3).to(device),
    }  # fmt: skip
    if len(shape) > 1 and shape[0] > 2:
        tensors["mask"][1] = False
        tensors["mask"][2] = True
    untie(tensors, VALUE_RANGE)
    return tensors


def untie(tensors: dict[str, Any], value_range: float) -> None:
    """Moves returns that are as far below a value as they are above it once it is clipped: either
    error may have the gradient there."""
    values, old_values, returns = (tensors[x].float() for x in ("values", "old_values", "returns"))
    near = values.clamp(old_values - value_range, old_values + value_range)
    tied = (near != values) & ((values - returns).abs() == (near - returns).abs())
    tensors["returns"][tied] += 1.0


def arguments(
    tensors: dict[str, Tensor],
    *,
    value=True,
    kl="k3",
    weights=True,
    token_weights=False,
    plain=False,
):
    """Positional and named arguments of ppo_loss, or of its reference where ``plain``."""
    value_term = (
        *(tensors[x] for x in ("values", "old_values", "returns")), VALUE_RANGE, 0.3,
    )  # fmt: skip
    kl_term = (tensors["ref_logprobs"], 0.15, kl)
    named = {
        "value": (value_term if plain else ValueTerm(*value_term)) if value else None,
        "kl": (kl_term if plain else KLTerm(*kl_term)) if kl else None,
        "weights": tensors["weights"] if weights else None,
        "token_weights": tensors["token_weights"] if token_weights else None,
    }
    return [tensors[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")], named


def run(tensors: dict[str, Tensor], backend: str | None, terms=None, upstream=1.0, **options):
    """Loss, gradients by name, statistics by name; by the reference where ``backend`` is None."""
    terms = terms or {}
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in LEAVES}
    positional, named = arguments(tensors | leaves, **terms, plain=backend is None)
    if backend is None:
        loss, stats = reference.ppo_loss(*positional, **named, **options)
    else:
        loss, wrapped = ppo_loss(*positional, **named, **options, backend=backend)
        assert wrapped.tensor.dtype == loss.dtype == torch.float32
        assert loss.dim() == 0
        stats = {name: getattr(wrapped, name) for name in LossStats.NAMES}
    used = {name: x for name, x in leaves.items() if name == "logprobs" or named["value"]}
    grads = torch.autograd.grad(loss, list(used.values()), torch.full_like(loss, upstream))
    return loss.detach(), dict(zip(used, grads, strict=True)), stats


def converted(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in tensors.items()}


def check(tensors: dict[str, Tensor], backend: str, **options) -> dict[str, Tensor]:
    loss, grads, stats = run(tensors, backend, **options)
    runs = Rounded(lambda: by_name(*run(converted(tensors, torch.float32), None, **options)))
    exact = by_name(*run(converted(tensors, torch.float64), None, **options))
    found = by_name(loss, grads, stats)
    assert found.keys() == exact.keys()
    for name, x in found.items():
        assert_close_to_exact(x, runs[name], exact[name], name)
    for name, grad in grads.items():
        assert grad.dtype == tensors[name].dtype
        assert (grad[~tensors["mask"]] == 0).all()
    return stats


def by_name(loss: Tensor, grads: dict[str, Tensor], stats: dict[str, Tensor]) -> dict[str, Tensor]:
    """All that ``run`` returns."""
    return {"total": loss, **{f"d{name}": x for name, x in grads.items()}, **stats}


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_loss_gradients_and_statistics(backend, device, dtype, aggregate):
    stats = check(batch(dtype=dtype, device=device), backend, aggregate=aggregate, upstream=-1.7)
    for name in ("clipfrac_low", "clipfrac_high", "value_clipfrac"):
        assert 0.01 < stats[name] < 0.9, "the example must exercise both branches"


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("on_device", [False, True], ids=["float", "tensor"])
def test_a_given_denominator(backend, device, aggregate, on_device):
    denominator = torch.tensor(812.5, device=device) if on_device else 812.5
    check(batch(device=device), backend, aggregate=aggregate, denominator=denominator)


def test_an_integer_denominator_on_the_device(backend, device):
    check(batch(device=device), backend, denominator=torch.tensor(1000, device=device))


@pytest.mark.parametrize("value", [False, True], ids=["", "value"])
@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("kl", [None, *KL_KINDS])
def test_every_combination_of_terms(backend, device, value, kl, weights):
    terms = {"value": value, "kl": kl, "weights": weights}
    stats = check(batch((4, 33), device=device), backend, terms=terms)
    assert value or (stats["value_loss"] == 0 and stats["value_error"] == 0)
    assert kl or stats["kl_loss"] == 0


@pytest.mark.parametrize("options", [{"cliprange": (0.1, 0.3)}, {"dual_clip": 1.3}], ids=str)
def test_asymmetric_and_dual_clipping(backend, device, options):
    check(batch(device=device), backend, **options)


@pytest.mark.parametrize("shape", [(11,), (3, 1), (1, 5), (2, 3, 7), (1, 1025)], ids=str)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_any_shape(backend, device, shape, aggregate):
    check(batch(shape, device=device, seed=2), backend, aggregate=aggregate)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_weights_of_tokens(backend, device, dtype, aggregate):
    """They act on every term, and change no denominator."""
    check(
        batch(dtype=dtype, device=device),
        backend,
        terms={"token_weights": True},
        aggregate=aggregate,
    )


def test_a_token_that_weighs_nothing_has_no_gradient(backend, device):
    tensors = batch(device=device)
    tensors["token_weights"] = (torch.rand(SHAPE, device=device) > 0.5).float()
    _, grads, _ = run(tensors, backend, {"token_weights": True})
    nothing = tensors["token_weights"] == 0
    for grad in grads.values():
        assert (grad[nothing] == 0).all()
        assert (grad[~nothing & tensors["mask"]] != 0).any()


def test_misaligned_inputs(backend, device):
    tensors = {name: misaligned(x) for name, x in batch((4, 37), device=device).items()}
    check(tensors, backend, aggregate="seq-mean-token-mean")


def test_by_hand(backend, device):
    log_ratio = torch.tensor([[math.log(1.5), math.log(1.5), math.log(0.5), 0.0]], device=device)
    logprobs = log_ratio.clone().requires_grad_()
    advantages = torch.tensor([[2.0, -2.0, 1.0, 3.0]], device=device)
    mask = torch.tensor([[True, True, True, True]], device=device)
    loss, stats = ppo_loss(
        logprobs, torch.zeros_like(logprobs), advantages, mask, cliprange=0.2, backend=backend
    )
    # -2·1.2 (clipped), 2·1.5, -1·.5 (lower, so the bound does not count), -3·1
    torch.testing.assert_close(loss.item(), (-2.4 + 3.0 - 0.5 - 3.0) / 4)
    loss.backward()
    expected = torch.tensor([[0.0, 3.0, -0.5, -3.0]], device=device) / 4
    torch.testing.assert_close(logprobs.grad, expected)
    numbers = stats.to_dict()
    assert list(numbers) == list(LossStats.NAMES)
    assert numbers["clipfrac"] == numbers["clipfrac_high"] == 0.25
    assert numbers["clipfrac_low"] == 0
    assert numbers["tokens"] == 4
    assert numbers["mean_ratio"] == pytest.approx((1.5 + 1.5 + 0.5 + 1) / 4)
    assert numbers["policy_kl"] == pytest.approx(-(2 * math.log(1.5) + math.log(0.5)) / 4)


def test_the_value_loss_by_hand(backend, device):
    values = torch.tensor([1.0, 1.0, 0.1], device=device, requires_grad=True)
    old_values = torch.zeros(3, device=device)
    returns = torch.tensor([2.0, 0.0, 0.0], device=device)
    term = ValueTerm(values, old_values, returns, cliprange=0.5, coef=2.0)
    zeros = torch.zeros(3, device=device)
    loss, stats = ppo_loss(zeros, zeros, zeros, zeros == 0, value=term, backend=backend)
    # clipped to .5 error 2.25 > 1; clipped error .25 < 1; not clipped
    torch.testing.assert_close(stats.value_loss.item(), 0.5 * (2.25 + 1 + 0.01) / 3)
    torch.testing.assert_close(loss.item(), (2.25 + 1 + 0.01) / 3)
    torch.testing.assert_close(stats.value_clipfrac.item(), 1 / 3)
    loss.backward()
    expected = torch.tensor([0.0, 1.0, 0.1], device=device) * 2 / 3
    torch.testing.assert_close(values.grad, expected)


def test_at_a_ratio_of_one_the_whole_gradient_arrives(backend, device):
    """The first epoch: both branches are equal, and a maximum that halves ties halves the step."""
    tensors = batch(device=device)
    logprobs = tensors["logprobs"].requires_grad_()
    loss, stats = ppo_loss(
        logprobs, logprobs.detach(), tensors["advantages"], tensors["mask"], backend=backend
    )
    (grad,) = torch.autograd.grad(loss, logprobs)
    counted = tensors["mask"].sum()
    expected = torch.where(tensors["mask"], -tensors["advantages"] / counted, 0.0)
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=0)
    assert stats.mean_ratio == 1
    assert stats.clipfrac == 0


def test_huge_log_ratios_are_clamped_counted_and_keep_a_gradient(backend, device):
    log_ratios = [20.0, 20.5, 300.0, 1e10, -20.0, -20.5, -300.0, -1e10]
    log_ratio = torch.tensor([log_ratios], device=device)
    for advantage in (1.0, -1.0):
        logprobs = log_ratio.clone().requires_grad_()
        zeros = torch.zeros_like(log_ratio)
        loss, stats = ppo_loss(logprobs, zeros, zeros + advantage, zeros == 0, backend=backend)
        assert torch.isfinite(loss)
        assert stats.clamped_ratios == 6
        loss.backward()
        ratio = log_ratio.double().clamp(-20, 20).exp()
        gone = ratio > 1 if advantage > 0 else ratio < 1
        expected = torch.where(gone, 0.0, -advantage * ratio / 8)
        torch.testing.assert_close(logprobs.grad.double(), expected, rtol=3e-7, atol=0)


def test_a_log_prob_of_nan_shows(backend, device):
    tensors = batch((3, 5), device=device)
    tensors["mask"][0, 1] = True
    tensors["logprobs"][0, 1] = torch.nan
    for options in ({}, {"dual_clip": 1.5}):
        loss, grads, stats = run(tensors, backend, **options)
        assert all(x.isnan() for x in (loss, stats["policy_loss"], stats["mean_ratio"]))
        assert grads["logprobs"].isnan().sum() == grads["logprobs"][0, 1].isnan() == 1


def test_unclamped_log_ratios_up_to_the_limit_are_exact(backend, device):
    # exp by way of exp2(x·log2 e) in fp32 is off by |x|/2 ulps at the ends.
    tensors = batch(device=device)
    generator = torch.Generator().manual_seed(1)
    spread = 40 * torch.rand(SHAPE, generator=generator).to(device) - 20
    tensors["logprobs"] = tensors["old_logprobs"] + spread
    _, grads, _ = run(tensors, backend, {"value": False, "kl": None})
    runs = Rounded(lambda: run(tensors, None, {"value": False, "kl": None})[1])
    doubles = converted(tensors, torch.float64)
    _, exact, _ = run(doubles, None, {"value": False, "kl": None})
    assert_close_to_exact(grads["logprobs"], runs["logprobs"], exact["logprobs"], "dlogprobs")


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_what_stands_at_masked_places_never_shows(backend, device, poison, aggregate):
    clean = batch(device=device)
    mask = clean["mask"]
    poisoned = {
        name: x if name == "mask" else torch.where(mask, x, poison) for name, x in clean.items()
    }
    options = {"aggregate": aggregate, "dual_clip": 2.0}
    loss, grads, stats = run(clean, backend, **options)
    loss_, grads_, stats_ = run(poisoned, backend, **options)
    assert torch.equal(loss, loss_)
    assert all(torch.equal(grads[name], grads_[name]) for name in grads)
    assert all(torch.equal(stats[name], stats_[name]) for name in stats)


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("denominator", [None, "zero"])
@pytest.mark.parametrize("shape", [(4, 30), (0, 7), (3, 0)], ids=str)
def test_a_batch_that_counts_nowhere_gives_zeros(backend, device, aggregate, denominator, shape):
    tensors = batch(shape, device=device)
    tensors["mask"][...] = False
    if denominator is not None:  # the sum over ranks that count nothing
        denominator = torch.zeros((), device=device)
    loss, grads, stats = run(tensors, backend, aggregate=aggregate, denominator=denominator)
    assert loss == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())
    assert all(stat == 0 for stat in stats.values())


@pytest.mark.parametrize("shape", [(3, 10_000), (2, 8195)], ids=str)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_rows_of_more_tokens_than_are_counted_at_once(backend, device, shape, aggregate):
    check(batch(shape, device=device), backend, aggregate=aggregate)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_programs_that_walk_several_tiles(device, aggregate, monkeypatch):
    """As of more than half a million tokens; here two programs for nine tiles."""
    from fastrl_kernels._triton import ppo_loss as module

    tensors = batch((9, 1000), device=device)
    whole = run(tensors, "triton", aggregate=aggregate)
    monkeypatch.setattr(module, "MOST_PROGRAMS", 2)
    check(tensors, "triton", aggregate=aggregate)
    walked = run(tensors, "triton", aggregate=aggregate)
    # Which program has a tile decides the order of sums alone, and counts are exact in any order.
    for name in LEAVES:
        assert torch.equal(walked[1][name], whole[1][name])


def test_the_count_of_programs_is_zero_after_every_call(device):
    from fastrl_kernels._triton.last_program import arrival_counters

    tensors = batch(device=device)
    for _ in range(2):
        run(tensors, "triton")
        run(tensors, "triton", aggregate="seq-mean-token-mean")
        counters = arrival_counters(tensors["mask"])
        assert torch.equal(counters, torch.zeros_like(counters))


@pytest.mark.parametrize("upstream", [0.0, 65536.0])
def test_the_upstream_gradient_scales_whatever_the_forward_saved(backend, device, upstream):
    check(batch(device=device), backend, upstream=upstream)


def test_gradients_twice_from_one_graph(backend, device):
    tensors = batch(device=device)
    logprobs = tensors["logprobs"].requires_grad_()
    positional, named = arguments(tensors)
    loss, _ = ppo_loss(*positional, **named, backend=backend)
    first, second = (
        torch.autograd.grad(loss, logprobs, torch.full_like(loss, scale), retain_graph=True)[0]
        for scale in (1.0, 2.0)
    )
    assert torch.equal(2 * first, second)


@pytest.mark.parametrize("wanted", LEAVES)
def test_gradients_reach_only_those_who_ask(backend, device, wanted):
    tensors = batch((3, 10), device=device)
    leaf = tensors[wanted].requires_grad_()
    # Copied inside, where the copy no longer says that a gradient is wanted.
    positional, named = arguments({name: x.reshape(10, 3).t() for name, x in tensors.items()})
    loss, stats = ppo_loss(*positional, **named, backend=backend)
    loss.backward()
    assert leaf.grad.abs().sum() > 0
    assert not stats.tensor.requires_grad


def test_without_gradients_nothing_is_saved(backend, device):
    tensors = batch(device=device)
    positional, named = arguments(tensors)
    loss, stats = ppo_loss(*positional, **named, backend=backend)
    assert not loss.requires_grad
    assert torch.equal(stats.loss, loss)


def test_a_row_mean_weighs_rows_and_a_token_mean_tokens(backend, device):
    advantages = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0, 0, 0], [0, 0, 0, 0]], device=device)
    zeros = torch.zeros_like(advantages)
    mask = advantages > 0
    expected = {
        "token-mean": -7 / 5, "seq-mean-token-sum": -7 / 2, "seq-mean-token-mean": -(1 + 3) / 2,
        "seq-mean-token-sum-norm": -7 / 12,
    }  # fmt: skip
    for aggregate, value in expected.items():
        loss, _ = ppo_loss(zeros, zeros, advantages, mask, aggregate=aggregate, backend=backend)
        assert loss.item() == pytest.approx(value)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_one_launch_each_way_without_waiting(device, aggregate):
    tensors = batch(device=device)
    for name in LEAVES:
        tensors[name].requires_grad_()
    positional, named = arguments(tensors)
    ppo_loss(*positional, backend="triton")  # makes the counter that is kept
    with watched() as calls:
        loss, _ = ppo_loss(*positional, **named, aggregate=aggregate, backend="triton")
    assert calls == ["_ppo_loss_fwd_kernel"]
    upstream = torch.ones_like(loss)
    with watched() as calls:
        torch.autograd.grad(loss, [tensors[name] for name in LEAVES], upstream)
    assert calls == ["_ppo_loss_bwd_kernel"]


def test_statistics_are_views_until_asked(device):
    stats = LossStats(torch.arange(float(len(LossStats.NAMES)), device=device))
    assert stats.kl_loss.data_ptr() == stats.tensor[3].data_ptr()
    assert stats.to_dict()["tokens"] == len(LossStats.NAMES) - 1
    assert copy.copy(stats).loss == 0
    with pytest.raises(AttributeError, match="no field 'entropy': choose one of"):
        _ = stats.entropy


@pytest.mark.parametrize("name", [
    *("old_logprobs", "advantages", "weights", "token_weights", "old_values", "returns"),
    "ref_logprobs",
])  # fmt: skip
def test_constants_that_require_a_gradient_are_refused(backend, device, name):
    tensors = batch((2, 5), device=device)
    tensors[name].requires_grad_()
    positional, named = arguments(tensors, token_weights=True)
    with pytest.raises(ValueError, match=rf"{name} requires a gradient.*{name}.detach\(\)"):
        ppo_loss(*positional, **named, backend=backend)
    with torch.no_grad():
        ppo_loss(*positional, **named, backend=backend)


def test_refusals(backend, device):
    x = torch.zeros(2, 3, device=device)
    mask = x == 0

    def refused(match, *tensors, **options):
        with pytest.raises((ValueError, TypeError), match=match):
            ppo_loss(*(tensors or (x, x, x, mask)), **options, backend=backend)

    refused("dual_clip must be above 1, got 1.0", dual_clip=1.0)
    refused("^cliprange must be at least 0, got -0.1", cliprange=(0.2, -0.1))
    refused("^cliprange must be at least 0, got nan", cliprange=float("nan"))
    refused(r"^value\.cliprange must be at least 0", value=ValueTerm(x, x, x, cliprange=-1.0))
    refused(r"^value\.coef must be finite, got nan", value=ValueTerm(x, x, x, coef=float("nan")))
    refused(r"^kl\.coef must be finite, got inf", kl=KLTerm(x, float("inf")))
    refused("unknown aggregate 'mean': choose one of token-mean", aggregate="mean")
    refused("unknown kind 'k2'", kl=KLTerm(x, 0.1, "k2"))
    refused("denominator must be above 0", denominator=0.0)
    refused("denominator has shape", denominator=torch.ones(2))
    refused("mask must be boolean", x, x, x, x)
    refused("advantages has shape", x, x, x[:1], mask)
    refused("ref_logprobs has shape", kl=KLTerm(x[:1], 0.1))
    refused("weights must be float32", weights=mask)
    refused("must be Python numbers", kl=KLTerm(x, torch.tensor(0.1)))
