"""Losses as modules."""

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


@pytest.mark.parametrize("name", losses.__all__)
def test_a_module_of_defaults_can_be_made(name):
    getattr(losses, name)()


X = torch.zeros(3, 7)


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: losses.PPOLoss(cliprange=-0.1), ValueError, "cliprange must be at least 0"),
    (lambda: losses.PPOLoss(cliprange=(0.1, 0.2, 0.3)), TypeError, "must be a number or"),
    (lambda: losses.PPOLoss(aggregate="mean"), ValueError, "unknown aggregate 'mean'"),
    (lambda: losses.PPOLoss(backend="cuda"), ValueError, "unknown backend 'cuda'"),
    (lambda: losses.PPOLoss(kl=ops.KLTerm(X, 0.1, "k2")), ValueError, "unknown kind 'k2'"),
    (lambda: losses.PPOLoss(kl=0.1), TypeError, "kl must be KLTerm or None, got float"),
    (lambda: losses.PPOLoss(value=ops.ValueTerm(X, X, X, cliprange=-1.0)), ValueError,
     "value.cliprange must be at least 0"),
    (lambda: losses.LinearPPOLoss(entropy="no"), TypeError, "entropy must be bool, got str"),
    (lambda: losses.LinearKLLoss(beta=2.0), ValueError, r"beta must lie in \[0, 1\], got 2.0"),
    (lambda: losses.LinearNLLLoss(softcap=0.0), ValueError, "softcap must be positive"),
    (lambda: losses.DPOLoss(beta=0.0), ValueError, "beta must be positive"),
    (lambda: losses.DPOLoss(beta=torch.tensor(0.1)), TypeError, "beta must be a number"),
    (lambda: losses.DPOLoss(0.1), TypeError, "DPOLoss takes settings by their names"),
    (lambda: losses.KTOLoss(undesirable_weight=-1.0), ValueError, "undesirable_weight must be"),
])  # fmt: skip
def test_settings_are_judged_before_training(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_settings_of_other_shapes_and_devices_are_judged_at_the_call():
    losses.PPOLoss(weights=X, denominator=torch.ones(()), kl=ops.KLTerm(X, 0.1), backend="triton")
    losses.LinearPPOLoss(temperature=X, shift=9)
