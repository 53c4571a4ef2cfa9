"""Small kernels of Triton's: run by test_ptx_compiled.py, in a process that compiles."""

import pytest
import torch
import triton
import triton.language as tl

from tests.ptx.faults import Fault, Race


@triton.jit
def _softmax_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * columns + at, e / tl.sum(e, 0), mask=at < columns)


@triton.jit
def _running_sum_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.cumsum(tl.load(x_ptr + at), 0))


@triton.jit
def _product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    place = at[:, None] * N + at[None, :]
    product = tl.dot(tl.load(a_ptr + place), tl.load(b_ptr + place))
    tl.store(out_ptr + place, product)


@triton.jit
def _total_kernel(x_ptr, total_ptr, BLOCK: tl.constexpr):
    """All programs write to one place."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(total_ptr, tl.sum(tl.load(x_ptr + at), 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax(dtype):
    x = torch.randn(5, 300).to(dtype)
    out = torch.full((5, 300), torch.nan)
    _softmax_kernel[(5,)](x, out, 300, BLOCK=512)
    # exp2 and the quotient are off by 2^-22 each.
    torch.testing.assert_close(out, x.double().softmax(1).float(), rtol=2e-6, atol=0)


def test_running_sum():
    x = torch.randint(-100, 100, (512,), dtype=torch.int32)
    out = torch.empty_like(x)
    _running_sum_kernel[(2,)](x, out, BLOCK=256)
    assert torch.equal(out, x.view(2, 256).cumsum(1).int().flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_product(dtype):
    a, b = torch.randn(2, 32, 32).to(dtype)
    out = torch.full((32, 32), torch.nan)
    _product_kernel[(1,)](a, b, out, N=32)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_a_load_past_a_tensor_is_a_fault():
    with pytest.raises(Fault, match=r"_running_sum_kernel, statement \d+: .*out of bounds"):
        _running_sum_kernel[(3,)](torch.ones(512), torch.ones(768), BLOCK=256)


def test_programs_that_write_one_place_are_a_race():
    _total_kernel[(1,)](torch.ones(512), torch.zeros(1), BLOCK=256)
    with pytest.raises(Race, match=r"_total_kernel, statement \d+: .*st\.global.*program"):
        _total_kernel[(2,)](torch.ones(512), torch.zeros(1), BLOCK=256)
