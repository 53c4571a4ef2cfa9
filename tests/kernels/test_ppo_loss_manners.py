"""The PPO loss's manners: launches, waits, bits, what compiles once, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

from fastrl_kernels import KLTerm, LossStats, ValueTerm, ppo_loss
from fastrl_kernels.types import AGGREGATES
from tests.kernels.launches import (
    constants,
    floats_arrive_as_double,
    interpreted,
    offset_widths,
    watched,
)
from tests.kernels.test_ppo_loss import LEAVES, arguments, batch, run


def test_runs_give_the_same_bits(backend, device):
    results = [run(batch(device=device), backend) for _ in range(2)]
    assert torch.equal(results[0][0], results[1][0])
    for name in LEAVES:
        assert torch.equal(results[0][1][name], results[1][1][name])


def test_two_launches_forward_and_one_backward_without_waiting(device):
    tensors = batch(device=device)
    for name in LEAVES:
        tensors[name].requires_grad_()
    positional, named = arguments(tensors)
    with watched() as calls:
        loss, _ = ppo_loss(*positional, **named, backend="triton")
    assert calls == ["_ppo_loss_fwd_kernel", "_ppo_loss_reduce_kernel"]
    upstream = torch.ones_like(loss)
    with watched() as calls:
        torch.autograd.grad(loss, [tensors[name] for name in LEAVES], upstream)
    assert calls == ["_ppo_loss_bwd_kernel"]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_nothing_waits_for_the_device(backend, device, aggregate):
    tensors = batch(device=device)
    tensors["logprobs"].requires_grad_()
    positional, named = arguments(tensors)
    denominator = torch.tensor(50.0, device=device)
    for given in (None, denominator):
        with watched():
            loss, stats = ppo_loss(
                *positional, **named, aggregate=aggregate, denominator=given, backend=backend
            )
            _ = stats.clipfrac, stats.loss
            loss.backward()


@interpreted
def test_offsets_do_not_wrap_at_two_to_the_31(device):
    tensors = batch(device=device)
    tensors["logprobs"].requires_grad_()
    positional, named = arguments(tensors)
    with offset_widths(*tensors.values()) as widths:
        ppo_loss(*positional, **named, aggregate="seq-mean-token-mean", backend="triton")
    assert widths == {64}


@interpreted
def test_floats_that_arrive_as_double_change_no_bit(device):
    options = {"dual_clip": 1.1, "denominator": 700.1, "cliprange": 0.1}
    plain = run(batch(device=device), "triton", **options)
    with floats_arrive_as_double():
        doubled = run(batch(device=device), "triton", **options)
    assert torch.equal(plain[0], doubled[0])
    for one, other in zip(plain[1:], doubled[1:], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_coefficients_and_clip_ranges_compile_once():
    from fastrl_kernels._triton import ppo_loss as module

    assert constants(module) == {
        "KL_KIND", "BLOCK", "HAS_VALUE", "HAS_KL", "BY_ROWS", "DENOMINATOR_IS_POINTER", "STATS",
        "CHUNK",
    }  # fmt: skip


def test_statistics_are_views_until_asked(device):
    stats = LossStats(torch.arange(float(len(LossStats.NAMES)), device=device))
    assert stats.kl_loss.data_ptr() == stats.tensor[3].data_ptr()
    assert stats.to_dict()["tokens"] == len(LossStats.NAMES) - 1
    assert copy.copy(stats).loss == 0
    with pytest.raises(AttributeError, match="no field 'entropy': choose one of"):
        _ = stats.entropy


@pytest.mark.parametrize(
    "name",
    [
        *("old_logprobs", "advantages", "weights", "token_weights", "old_values", "returns"),
        "ref_logprobs",
    ],
)
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
    refused("clip ranges must not be negative", cliprange=(0.2, -0.1))
    refused("clip ranges must not be negative", value=ValueTerm(x, x, x, cliprange=-1.0))
    refused("unknown aggregate 'mean': choose one of token-mean", aggregate="mean")
    refused("unknown kind 'k2'", kl=KLTerm(x, 0.1, "k2"))
    refused("denominator must be above 0", denominator=0.0)
    refused("denominator has shape", denominator=torch.ones(2))
    refused("mask must be boolean", x, x, x, x)
    refused("advantages has shape", x, x, x[:1], mask)
    refused("ref_logprobs has shape", kl=KLTerm(x[:1], 0.1))
    refused("weights must be float32", weights=mask)
    refused("must be Python numbers", kl=KLTerm(x, torch.tensor(0.1)))
