"""Losses as modules."""

from __future__ import annotations

import pytest
import torch

import fastrl_kernels as ops
from fastrl_kernels import losses


def test_every_loss_has_a_module():
    modules = {getattr(losses, name).op for name in losses.__all__}
    assert modules == {getattr(ops, name) for name in ops.__all__ if name.endswith("_loss")}


def test_a_module_is_its_op_with_settings():
    logprobs, old, advantages = torch.randn(3, 2, 5).unbind()
    mask = torch.rand(2, 5) < 0.7
    tensors = logprobs.requires_grad_(), old, advantages, mask
    module = losses.PPOLoss(cliprange=0.05, aggregate="seq-mean-token-mean")
    for settings in ({}, {"denominator": 3.0}, {"cliprange": 0.5}):
        loss, stats = module(*tensors, **settings)
        expected, its = ops.ppo_loss(*tensors, **{**module.settings, **settings})
        assert torch.equal(loss, expected)
        assert torch.equal(stats.tensor, its.tensor)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert torch.equal(grad, torch.autograd.grad(expected, logprobs)[0])
    assert repr(module) == "PPOLoss(cliprange=0.05, aggregate='seq-mean-token-mean')"
    assert not list(module.parameters())


def test_a_setting_that_the_op_does_not_have_is_refused():
    message = "DPOLoss has no setting clip_range: dpo_loss takes beta, label_smoothing, kind"
    with pytest.raises(TypeError, match=message):
        losses.DPOLoss(beta=0.2, clip_range=0.1)
    with pytest.raises(TypeError, match="PPOLoss has no setting mask: ppo_loss takes cliprange"):
        losses.PPOLoss(mask=torch.ones(3))
