"""Tensors without memory: their results have the shapes of real ones, and none is computed."""

import torch
from torch import nn

from fastrl.trainers.plan.memory import ACTIVATIONS, GRADIENTS, MemoryLog
from fastrl.trainers.plan.phantoms import Phantoms

LARGE = 1 << 40  # bytes, more than any machine here has


def test_a_tensor_larger_than_the_memory_can_be_multiplied():
    log = MemoryLog()
    with Phantoms(log):
        x = torch.zeros(1 << 20, 1 << 18)
        y = x @ torch.zeros(1 << 18, 8)
        assert y.shape == (1 << 20, 8)
        assert log.total == x.nbytes + y.nbytes
    assert x.nbytes == LARGE
    del x, y
    assert log.total == 0


def test_views_share_memory_and_copies_do_not():
    log = MemoryLog()
    with Phantoms(log):
        x = torch.ones(512, 64)
        before = log.total
        x.t()[3:].reshape(-1, 512).unsqueeze(0)
        assert log.total == before
        copy = x.t().contiguous()
        assert log.total == before + copy.nbytes


def test_token_ids_and_masks_are_computed():
    with Phantoms(MemoryLog()):
        hidden = torch.randn(4, 64, 32)
        mask = torch.arange(64) < torch.tensor([[3], [64], [0], [8]])
        assert mask.sum().item() == 75
        assert hidden[mask].shape == (75, 32)


def test_checks_of_numbers_come_out_well_and_numbers_are_zero():
    with Phantoms(MemoryLog()):
        x = torch.randn(100, 100)
        assert torch.allclose(x, x + 1)
        assert torch.isfinite(x).all()
        assert not torch.isnan(x).any()
        assert x.sum().item() == 0.0


def test_the_gradient_of_a_step_is_told_from_its_activations():
    log = MemoryLog()
    phantoms = Phantoms(log)
    with phantoms:
        layer = nn.Linear(256, 512)
        layer.weight.register_post_accumulate_grad_hook(
            lambda p: phantoms.is_kind([p.grad], GRADIENTS)
        )
        layer(torch.randn(64, 256)).sum().backward()
        assert log.now[GRADIENTS] == layer.weight.nbytes
        assert log.now[ACTIVATIONS] >= layer.weight.nbytes  # the weight itself: nobody said


def test_a_peak_belongs_to_its_phase():
    log = MemoryLog()
    with Phantoms(log):
        with log.phase("first"):
            a, b = torch.zeros(1000, 1000), torch.zeros(1000, 1000)
            del b
        with log.phase("second"):
            c = torch.zeros(1000, 500)
        assert log.peaks["first"].total == 8_000_000
        assert log.peaks["second"].total == a.nbytes + c.nbytes
