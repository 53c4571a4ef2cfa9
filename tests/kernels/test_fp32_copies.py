"""Products of bf16 weights in fp32, with copies that follow the weights."""

import os

import pytest
import torch
from torch import Tensor, nn

from fastrl_kernels import gemm
from fastrl_kernels._cpu import fp32_copies
from fastrl_kernels._cpu.fp32_copies import in_fp32, keeping

FP32 = {"float32": gemm.MM, "bfloat16": gemm.Choice("fp32")}


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(70, 40).bfloat16(), requires_grad=False)


def assert_copies(weight: Tensor) -> None:
    for x in (weight, weight.t(), weight[3:9], weight.t()[:, 5:60], weight[:, 7:], weight[-1:]):
        assert torch.equal(in_fp32(x), x.float())


def is_kept(weight: Tensor) -> bool:
    found, again = in_fp32(weight), in_fp32(weight)
    return found.data_ptr() == again.data_ptr()


@pytest.mark.parametrize("laid_out", ["rows", "columns"])
def test_parts_of_a_weight_are_parts_of_its_copy(weight, laid_out):
    if laid_out == "columns":
        weight = weight.detach().t().contiguous().t()
    other = torch.randn(9, 4).bfloat16()
    with keeping([weight]):
        whole = in_fp32(weight)
        assert_copies(weight)
        part = in_fp32(weight[2:5, 3:])
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert torch.equal(in_fp32(other), other.float())
        assert not is_kept(other)
    assert not is_kept(weight)


def test_copies_follow_their_weights(weight):
    trained = nn.Parameter(torch.randn(20, 10).bfloat16())
    optimizer = torch.optim.AdamW([trained], lr=0.1, fused=True)
    with keeping([weight, trained]):
        assert_copies(weight)
        assert_copies(trained)
        weight.mul_(2.0)
        assert_copies(weight)
        trained.grad = torch.ones_like(trained)
        optimizer.step()  # which is no new version of the weight
        assert_copies(trained)
        assert is_kept(trained)
        former = weight.data
        weight.data = torch.randn(70, 40).bfloat16()
        assert_copies(weight)
        assert_copies(former)
        assert not is_kept(former)


def test_what_is_no_matrix_is_not_kept():
    for x in (torch.randn(6).bfloat16(), torch.randn(2, 3, 4).bfloat16()):
        with keeping([x]):
            assert torch.equal(in_fp32(x), x.float())
            assert not is_kept(x)


def test_a_view_that_reaches_beyond_a_weight_is_none_of_it():
    both = torch.randn(8, 10).bfloat16()
    with keeping([both[:4]]):
        assert is_kept(both[:4])
        for x in (both, both[2:6], both[4:]):
            assert torch.equal(in_fp32(x), x.float())
            assert not is_kept(x)


def test_copies_take_no_more_than_a_half_of_the_memory(weight, monkeypatch):
    others = [torch.randn(70, 40).bfloat16() for _ in range(3)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(fp32_copies, "available_bytes", lambda: 4 * 2 * weight.numel() * 4 + 3)
    with keeping([weight, *others]):
        assert [is_kept(x) for x in (weight, *others)] == [True, True, False, False]
        assert_copies(others[-1])


def test_available_memory_is_no_more_than_the_machine_has():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < fp32_copies.available_bytes() <= total


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory", [0, 1 << 40], ids=["in pieces", "kept"])
def test_a_layer_is_as_exact_as_torchs(memory, autocast, monkeypatch):
    """And memory decides no bit."""
    monkeypatch.setattr(fp32_copies, "available_bytes", lambda: memory)
    x = torch.randn(3, 15, 40)
    layer = nn.Linear(40, 70)
    if not autocast:
        x, layer = x.bfloat16(), layer.bfloat16()
    upstream = torch.randn(3, 15, 70).bfloat16()

    def step(linear, dtype: torch.dtype | None = None) -> list[Tensor]:
        leaves = [t.detach() for t in (x, layer.weight, layer.bias)]
        if dtype is not None:  # of what autocast multiplies
            leaves = [t.bfloat16().to(dtype) for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        with keeping([leaves[1]]), torch.autocast("cpu", enabled=autocast and dtype is None):
            out = linear(*leaves)
            out.backward(upstream.to(out.dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    with gemm.using(FP32):
        found = step(gemm.linear)
        monkeypatch.setattr(fp32_copies, "available_bytes", lambda: (1 << 40) - memory)
        assert all(map(torch.equal, found, step(gemm.linear)))
    plain = step(nn.functional.linear)
    exact = step(nn.functional.linear, torch.float64)
    for ours, torchs, right in zip(found, plain, exact, strict=True):
        assert ours.dtype == torchs.dtype
        assert ours.shape == torchs.shape
        rounding = 2.0**-9 * right.norm()  # of a result in bf16
        assert (ours - right).norm() <= max((torchs - right).norm(), rounding)


def test_packed_weights_are_copies(weight):
    x, bias = torch.randn(5, 2, 40).bfloat16(), torch.randn(70).bfloat16()
    with gemm.using(FP32):
        packed = gemm.Packed(weight, wide=True)
        expected = gemm.linear(x, weight, bias)
    found = packed.linear(x, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)
    assert packed.linear(x[:0], bias).shape == (0, 2, 70)
