"""Mean, variance and whitening against float64, also where the mean dwarfs the deviation."""

import pytest
import torch
from torch import Tensor

from fastrl_kernels import (
    Moments,
    masked_mean,
    masked_moments,
    masked_var,
    masked_whiten,
    merge_moments,
    reference,
)
from tests.kernels.judge import DTYPES, assert_close_to_exact, judge, names
from tests.kernels.roundings import Rounded


def mean_in_two_steps(values: Tensor, mask: Tensor) -> Tensor:
    """Deviations from a first mean correct it, as where deviations are small against the mean."""
    first = reference.masked_mean(values.detach(), mask)
    return first + reference.masked_mean(values - first, mask)


STATISTICS = {
    "mean": (masked_mean, mean_in_two_steps, {}),
    "variance": (masked_var, reference.masked_var, {}),
    "biased variance": (masked_var, reference.masked_var, {"unbiased": False}),
    "whitening": (masked_whiten, reference.masked_whiten, {}),
    "scaling": (masked_whiten, reference.masked_whiten, {"shift_mean": False}),
}


def batch(shape, dtype, device, *, mean=0.3, std=1.0, seed=0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = mean + std * torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.3
    return {"values": values.to(device, dtype), "mask": mask.to(device)}


def statistic(name, backend):
    op, formula, options = STATISTICS[name]
    return (
        lambda values, mask: op(values, mask, **options, backend=backend),
        lambda values, mask: formula(values, mask, **options),
    )


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_values_and_gradients_are_as_exact_as_pytorch(backend, device, dtype, name):
    inputs = batch((5, 507), dtype, device)
    results = judge(*statistic(name, backend), inputs, wrt=("values",))
    assert (results["dvalues"][~inputs["mask"]] == 0).all()
    if results["output 0"].dim():
        assert (results["output 0"][~inputs["mask"]] == 0).all()


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("mean", [1e4, -3e5])
def test_a_mean_far_above_the_deviation(backend, device, name, mean):
    # Σx² - n·μ² keeps no digit here, and one fp32 number is too coarse for μ itself.
    inputs = batch((4, 1500), torch.float32, device, mean=mean)
    results = judge(*statistic(name, backend), inputs, wrt=("values",))
    if name == "whitening":
        whitened = results["output 0"][inputs["mask"]].double()
        assert whitened.mean().abs() < 1e-6
        assert (whitened.std() - 1).abs() < 1e-6


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3, 5), (2050,)], ids=str)
@pytest.mark.parametrize("name", STATISTICS)
def test_any_shape(backend, device, name, shape):
    inputs = batch(shape, torch.float32, device, seed=3)
    judge(*statistic(name, backend), inputs, wrt=("values",))


def test_more_slices_than_programs(backend, device, monkeypatch):
    """Programs that take several blocks each, and more partials than a program merges itself."""
    if backend == "triton":
        from fastrl_kernels._triton import moments

        monkeypatch.setattr(moments, "MAX_PARTIALS", 2)
    inputs = batch((5, 1111), torch.float32, device, mean=50.0)
    for name in STATISTICS:
        judge(*statistic(name, backend), inputs, wrt=("values",))


@pytest.mark.parametrize("counted", [0, 1])
def test_too_few_elements_give_zeros_and_no_nan(backend, device, counted):
    values = torch.full((3, 4), float("nan"), device=device)
    mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
    values[1, 2], mask[1, 2] = 7.0, counted == 1
    values.requires_grad_()
    expected_mean = 7.0 * counted
    expected = torch.zeros(3, 4, device=device)

    mean = masked_mean(values, mask, backend=backend)
    assert mean == expected_mean
    assert masked_var(values, mask, backend=backend) == 0
    assert torch.equal(masked_whiten(values, mask, backend=backend), expected)
    expected[1, 2] = expected_mean
    assert torch.equal(masked_whiten(values, mask, False, backend=backend), expected)

    for name in STATISTICS:
        (grad,) = torch.autograd.grad(statistic(name, backend)[0](values, mask).sum(), values)
        expected[1, 2] = counted if name in ("mean", "scaling") else 0
        assert torch.equal(grad, expected), name


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_stands_at_masked_places_never_shows(backend, device, poison):
    values, mask = batch((3, 50), torch.float32, device).values()
    clean = values.clone()
    values = torch.where(mask, values, poison)
    upstream = torch.where(mask, torch.ones_like(values), poison)
    for name in STATISTICS:
        results = []
        for x in (values, clean):
            x = x.clone().requires_grad_()
            result = statistic(name, backend)[0](x, mask)
            upstream_here = upstream if result.dim() else torch.ones_like(result)
            results.append((result, *torch.autograd.grad(result, x, upstream_here)))
        for poisoned, plain in zip(*results, strict=True):
            assert torch.isfinite(poisoned).all()
            assert poisoned.shape == plain.shape
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_ranks_merge_their_moments_into_those_of_the_whole_batch(backend, device):
    values, mask = batch((8, 333), torch.float32, device, mean=1e4).values()
    mask[2:4] = False  # a rank that counts nothing
    parts = [
        masked_moments(values[i : i + 2], mask[i : i + 2], backend=backend) for i in range(0, 8, 2)
    ]
    stacked = Moments(*(torch.stack(field) for field in zip(*parts, strict=True)))
    merged = merge_moments(stacked)
    exact = values[mask].double()
    assert merged.count == mask.sum()
    torch.testing.assert_close(merged.mean.double(), exact.mean(), rtol=1.2e-7, atol=0)
    exact_m2 = (exact - exact.mean()).square().sum()
    # Each rank's mean is one fp32 number, off by up to half an ulp of 1e4.
    torch.testing.assert_close(merged.m2.double(), exact_m2, rtol=5e-5, atol=0)

    whitened = [
        masked_whiten(values[i : i + 2], mask[i : i + 2], moments=merged, backend=backend)
        for i in range(0, 8, 2)
    ]
    runs = Rounded(lambda: reference.masked_whiten(values, mask))
    exact = reference.masked_whiten(values.double(), mask)
    # Moments hold one fp32 mean of 1e4, which shifts everything by as much as it is off.
    torch.testing.assert_close(torch.cat(whitened).double(), exact, rtol=0, atol=1.2e-7 * 1e4)
    whole = masked_whiten(values, mask, backend=backend)
    assert_close_to_exact(whole, runs, exact, "the whole batch at once")


def test_merging_nothing_gives_zeros(device):
    nothing = torch.zeros(3, device=device)
    assert all(field == 0 for field in merge_moments(Moments(nothing, nothing, nothing)))


def test_given_moments_are_constants_to_the_gradient(backend, device):
    values, mask = batch((4, 9), torch.float32, device).values()
    values.requires_grad_()
    moments = masked_moments(values, mask, backend=backend)
    assert not any(field.requires_grad for field in moments)
    result = masked_whiten(values, mask, moments=moments, backend=backend)
    (grad,) = torch.autograd.grad(result.sum(), values)
    rstd = torch.rsqrt(moments.m2 / (moments.count - 1))
    torch.testing.assert_close(grad, torch.where(mask, rstd, 0.0))


def test_given_moments_of_one_element_have_no_deviation(backend, device):
    values = torch.tensor([3.0, 4.0], device=device)
    moments = Moments(*torch.tensor([1.0, 2.0, 0.0], device=device).unbind())
    for shift_mean, expected in ((True, 0.0), (False, 2.0)):
        whitened = masked_whiten(values, values > 0, shift_mean, moments=moments, backend=backend)
        assert torch.equal(whitened, torch.full_like(values, expected))


def test_whitening_by_hand(backend, device):
    values = torch.tensor([[1.0, 2.0, 99.0, 3.0, 6.0]], device=device)
    mask = values < 99
    # mean 3, variance (4 + 1 + 0 + 9)/3
    expected = torch.tensor([[-2.0, -1.0, 0.0, 0.0, 3.0]], device=device) * (3 / 14) ** 0.5
    torch.testing.assert_close(masked_whiten(values, mask, backend=backend), expected)
    expected = torch.where(mask, expected + 3, 0.0)
    torch.testing.assert_close(masked_whiten(values, mask, False, backend=backend), expected)
