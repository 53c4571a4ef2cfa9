"""Advantages against the plain loop in float64: holes, cuts, long rows, gradients, whitening."""

import pytest
import torch
from torch import Tensor

from fastrl_kernels import gae, reference
from tests.kernels.judge import DTYPES, judge, misaligned, names
from tests.kernels.launches import watched

GAMMA, LAM = 0.97, 0.9
WRT = ("rewards", "values")


def episode(shape, dtype, device, *, cuts=False, mask=True, seed=0) -> dict[str, Tensor]:
    """Rewards and values; a mask with holes and a row that counts nowhere; ends of episodes."""
    generator = torch.Generator().manual_seed(seed)

    def flags(share: float) -> Tensor:
        return (torch.rand(shape, generator=generator) < share).to(device)

    def numbers() -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    inputs = {"rewards": numbers(), "values": numbers()}
    if mask:
        inputs["mask"] = flags(0.7)
        if inputs["mask"].dim() > 1 and shape[0] > 1:
            inputs["mask"].flatten(0, -2)[1] = False
    if cuts:
        inputs |= {"bootstrap_value": numbers(), "terminated": flags(0.1), "truncated": flags(0.1)}
    return inputs


def both(backend, *, gamma=GAMMA, lam=LAM, whiten=False):
    def op(rewards, values, mask=None, **rest):
        return gae(
            rewards, values, mask, gamma=gamma, lam=lam, whiten=whiten, backend=backend, **rest
        )

    def formula(rewards, values, mask=None, **rest):
        return reference.gae(rewards, values, mask, gamma=gamma, lam=lam, whiten=whiten, **rest)

    return op, formula


@pytest.mark.parametrize("whiten", [False, True], ids=["plain", "whitened"])
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_results_and_all_gradients_are_as_exact_as_the_loop(backend, device, dtype, whiten):
    inputs = episode((5, 83), dtype, device, cuts=True)
    wrt = (*WRT, "bootstrap_value")
    results = judge(*both(backend, whiten=whiten), inputs, wrt=wrt)
    for result in results.values():
        assert (result[~inputs["mask"]] == 0).all()
    read = inputs["truncated"] & ~inputs["terminated"] & inputs["mask"]
    assert (results["dbootstrap_value"][~read] == 0).all()


@pytest.mark.parametrize("shape", [(37,), (4, 1), (2, 3, 16), (1, 9), (33, 17)], ids=str)
@pytest.mark.parametrize("mask", [True, False], ids=["masked", "unmasked"])
def test_any_shape(backend, device, shape, mask):
    inputs = episode(shape, torch.float32, device, mask=mask, seed=5)
    judge(*both(backend), inputs, wrt=WRT)
    judge(*both(backend, whiten=True), inputs, wrt=WRT)


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1.0, 1.0), (1.0, 0.0), (0.0, 0.5), (0.5, 1.0), (0.99, 0.95)]
)
@pytest.mark.parametrize("cuts", [False, True], ids=["uncut", "cut"])
def test_any_discount(backend, device, gamma, lam, cuts):
    inputs = episode((3, 70), torch.float32, device, cuts=cuts)
    wrt = (*WRT, "bootstrap_value") if cuts else WRT
    judge(*both(backend, gamma=gamma, lam=lam), inputs, wrt=wrt)


@pytest.mark.parametrize("cuts", [False, True], ids=["uncut", "cut"])
@pytest.mark.parametrize("whiten", [False, True], ids=["plain", "whitened"])
def test_the_carry_crosses_tiles(backend, device, monkeypatch, cuts, whiten):
    if backend == "triton":
        from fastrl_kernels._triton import gae as module

        monkeypatch.setattr(module, "row_tile", lambda length: (8, 16))
    inputs = episode((3, 140), torch.float32, device, cuts=cuts)
    inputs["mask"][1] = True
    inputs["mask"][1, 40:110] = False  # a hole that holds whole tiles
    judge(*both(backend, gamma=1.0, lam=0.999, whiten=whiten), inputs, wrt=WRT)


def test_a_row_longer_than_a_tile(backend, device):
    inputs = episode((1, 1030), torch.float32, device)
    judge(*both(backend, gamma=1.0, lam=0.999, whiten=True), inputs, wrt=WRT)


def test_more_rows_than_partials_that_a_program_merges(backend, device, monkeypatch):
    if backend == "triton":
        from fastrl_kernels._triton import moments

        monkeypatch.setattr(moments, "MAX_PARTIALS", 2)
    inputs = episode((200, 16), torch.float32, device)
    judge(*both(backend, whiten=True), inputs, wrt=WRT)


def test_by_hand(backend, device):
    rewards = torch.tensor([[1.0, 0.0, 2.0]], device=device)
    values = torch.tensor([[0.5, 1.0, 1.5]], device=device)
    advantages, returns = gae(rewards, values, gamma=0.5, lam=0.5, backend=backend)
    # δ = 1 + .5·1 - .5, 0 + .5·1.5 - 1, 2 - 1.5; A = δ + .25·A_next
    expected = torch.tensor([[1 + 0.25 * (-0.25 + 0.25 * 0.5), -0.25 + 0.25 * 0.5, 0.5]])
    torch.testing.assert_close(advantages, expected.to(device))
    torch.testing.assert_close(returns, expected.to(device) + values)


def test_a_hole_bridges_to_the_next_counted_step(backend, device):
    rewards = torch.tensor([[1.0, 7.0, 7.0, 2.0, 7.0]], device=device)
    values = torch.tensor([[0.5, 9.0, 9.0, 1.5, 9.0]], device=device)
    mask = torch.tensor([[True, False, False, True, False]], device=device)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5, backend=backend)
    expected = torch.tensor([[1 + 0.5 * 1.5 - 0.5 + 0.25 * 0.5, 0, 0, 0.5, 0]], device=device)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + torch.where(mask, values, 0.0))


def test_ends_of_episodes_by_hand(backend, device):
    rewards = torch.ones(3, 3, device=device)
    values = torch.tensor([[1.0, 2.0, 4.0]], device=device).repeat(3, 1)
    bootstrap = torch.tensor([[float("nan"), 10.0, float("nan")]], device=device).repeat(3, 1)
    end = torch.tensor([[False, True, False]], device=device)
    no = torch.zeros_like(end)
    terminated, truncated = torch.cat([end, no, end]), torch.cat([no, end, end])
    advantages, _ = gae(
        rewards, values, gamma=0.5, lam=1.0, bootstrap_value=bootstrap, terminated=terminated,
        truncated=truncated, backend=backend,
    )  # fmt: skip
    ends = -1.0  # 1 + 0 - 2
    cut = 4.0  # 1 + .5·10 - 2
    first = [1 + 0.5 * 2 - 1 + 0.5 * a for a in (ends, cut, ends)]
    expected = torch.tensor(
        [[first[0], ends, -3.0], [first[1], cut, -3.0], [first[2], ends, -3.0]], device=device
    )
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_stands_at_masked_places_never_shows(backend, device, poison):
    clean = episode((3, 60), torch.float32, device, cuts=True)
    mask = clean["mask"]
    read = mask & clean["truncated"] & ~clean["terminated"]
    poisoned = {
        "rewards": torch.where(mask, clean["rewards"], poison),
        "values": torch.where(mask, clean["values"], poison),
        "bootstrap_value": torch.where(read, clean["bootstrap_value"], poison),
    }
    upstream = torch.where(mask, torch.randn(3, 60, device=device), poison)
    for whiten in (False, True):
        results = []
        for inputs in (clean, clean | poisoned):
            leaves = {name: inputs[name].clone().requires_grad_() for name in poisoned}
            outputs = both(backend, whiten=whiten)[0](**(inputs | leaves))
            grads = torch.autograd.grad(outputs, list(leaves.values()), [upstream, upstream])
            results.append((*outputs, *grads))
        for a, b in zip(*results, strict=True):
            assert torch.isfinite(a).all()
            assert torch.equal(a, b)


@pytest.mark.parametrize("length", [9, 100])
def test_a_row_is_the_same_alone_and_among_64(backend, device, length):
    inputs = episode((64, length), torch.float32, device, cuts=True)
    op = both(backend)[0]
    together = op(**inputs)
    for row in (0, 1, 7, 63):
        alone = op(**{name: x[row : row + 1] for name, x in inputs.items()})
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[row])


def test_a_row_is_the_same_wherever_it_lies(backend, device):
    inputs = episode((2, 64), torch.float32, device, cuts=True)
    op = both(backend)[0]
    moved = op(**{name: misaligned(x) for name, x in inputs.items()})
    assert all(map(torch.equal, op(**inputs), moved))


def test_misaligned_inputs(backend, device):
    inputs = episode((3, 37), torch.bfloat16, device, cuts=True)
    inputs = {name: misaligned(x) for name, x in inputs.items()}
    judge(*both(backend, whiten=True), inputs, wrt=(*WRT, "bootstrap_value"))


@pytest.mark.parametrize("wanted", ["rewards", "values", "bootstrap_value"])
def test_gradients_reach_only_those_who_ask(backend, device, wanted):
    inputs = episode((3, 20), torch.float32, device, cuts=True)
    inputs[wanted].requires_grad_()
    judged = judge(*both(backend), inputs, wrt=(wanted,))
    # Copied inside, where the copy no longer says that a gradient is wanted.
    advantages, returns = both(backend)[0](**{k: x.reshape(20, 3).t() for k, x in inputs.items()})
    (advantages.sum() + returns.sum()).backward()
    assert inputs[wanted].grad is not None
    assert judged.keys() == {"output 0", "output 1", f"d{wanted}"}


@pytest.mark.parametrize("whiten", [False, True], ids=["plain", "whitened"])
@pytest.mark.parametrize("shape", [(0, 7), (3, 0)], ids=str)
def test_empty_batches(backend, device, shape, whiten):
    inputs = episode(shape, torch.float32, device, mask=True)
    inputs["rewards"].requires_grad_()
    advantages, returns = both(backend, whiten=whiten)[0](**inputs)
    assert advantages.shape == returns.shape == shape
    (advantages.sum() + returns.sum()).backward()
    assert inputs["rewards"].grad.shape == shape


def test_a_batch_that_counts_nowhere(backend, device):
    inputs = episode((3, 7), torch.float32, device)
    inputs["mask"][:] = False
    inputs["rewards"].requires_grad_()
    for whiten in (False, True):
        advantages, returns = both(backend, whiten=whiten)[0](**inputs)
        (grad,) = torch.autograd.grad((advantages + returns).sum(), inputs["rewards"])
        for result in (advantages, returns, grad):
            assert torch.equal(result, torch.zeros_like(result))


def test_whitened_advantages_take_two_launches_each_way(device):
    inputs = episode((3, 20), torch.float32, device)
    inputs["rewards"].requires_grad_()
    with watched() as calls:
        outputs = both("triton", whiten=True)[0](**inputs)
    assert calls == ["_gae_fwd_kernel", "_whiten_fwd_kernel"]
    upstream = [torch.ones_like(output) for output in outputs]
    with watched() as calls:
        torch.autograd.grad(outputs, inputs["rewards"], upstream)
    assert calls == ["_whiten_sums_kernel", "_gae_bwd_kernel"]
