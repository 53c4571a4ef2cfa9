"""KL estimators and the classic rewards against float64, and what no mask may let through."""

import pytest
import torch
from torch import Tensor

from fastrl_kernels import kl_penalty, kl_rewards, reference
from fastrl_kernels.types import KL_KINDS
from tests.kernels.judge import DTYPES, assert_close_to_exact, judge, misaligned, names
from tests.kernels.launches import watched

SHAPES = ((2, 3, 41), (7, 1), (252, 19))


def pair(shape, dtype, device, seed=0, distance=0.3) -> dict[str, Tensor]:
    """Log-probs of a policy and of a reference near it, and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(shape, generator=generator)
    ref = logprobs + distance * torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.3
    mask.flatten(0, -2)[1] = False
    return {
        "logprobs": logprobs.to(device, dtype),
        "ref_logprobs": ref.to(device, dtype),
        "mask": mask.to(device),
    }


def penalty(backend, kind):
    def op(logprobs, ref_logprobs, mask=None):
        return kl_penalty(logprobs, ref_logprobs, kind, mask=mask, backend=backend)

    def formula(logprobs, ref_logprobs, mask=None):
        return reference.kl_penalty(logprobs, ref_logprobs, kind, mask=mask)

    return op, formula


def classic_rewards(backend, kind, coef=0.2):
    def op(logprobs, ref_logprobs, scores, mask):
        return kl_rewards(
            logprobs, ref_logprobs, scores, mask, coef=coef, kind=kind, backend=backend
        )

    def formula(logprobs, ref_logprobs, scores, mask):
        return reference.kl_rewards(logprobs, ref_logprobs, scores, mask, coef=coef, kind=kind)

    return op, formula


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_penalty_and_both_gradients_are_as_exact_as_pytorch(backend, device, dtype, kind):
    inputs = pair(SHAPES[0], dtype, device)
    results = judge(*penalty(backend, kind), inputs, wrt=("logprobs", "ref_logprobs"))
    for result in results.values():
        assert (result[~inputs["mask"]] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
def test_penalty_of_any_shape(backend, device, shape, masked):
    inputs = pair(shape, torch.float32, device)
    if not masked:
        del inputs["mask"]
    judge(*penalty(backend, "k3"), inputs, wrt=("logprobs", "ref_logprobs"))


def test_k3_is_exact_where_policies_almost_agree(backend, device):
    # exp(-d) - 1 + d cancels to d²/2 there; PyTorch's own formula loses all its digits.
    inputs = pair((8, 64), torch.float32, device, distance=1e-4)
    judge(*penalty(backend, "k3"), inputs, wrt=("logprobs",))


def test_k3_of_far_apart_policies(backend, device):
    inputs = pair((8, 64), torch.float32, device, distance=12.0)
    judge(*penalty(backend, "k3"), inputs, wrt=("logprobs",))


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_mse(backend, device):
    inputs = pair((4, 9), torch.float32, device)
    results = {}
    for kind in ("k3", "k3+", "mse"):
        leaf = inputs["logprobs"].clone().requires_grad_()
        value = kl_penalty(leaf, inputs["ref_logprobs"], kind, backend=backend)
        results[kind] = value.detach(), torch.autograd.grad(value.sum(), leaf)[0]
    assert torch.equal(results["k3+"][0], results["k3"][0])
    assert torch.equal(results["k3+"][1], results["mse"][1])


def test_penalty_values_by_hand(backend, device):
    logprobs = torch.tensor([-1.0, -2.0, -0.5], device=device)
    ref = torch.tensor([-2.0, -1.5, -0.5], device=device)
    expected = {
        "kl": [1.0, -0.5, 0.0], "abs": [1.0, 0.5, 0.0], "mse": [0.5, 0.125, 0.0],
        "k3": [0.36787944, 0.14872127, 0.0],
    }  # fmt: skip
    for kind, values in expected.items():
        actual = kl_penalty(logprobs, ref, kind, backend=backend)
        torch.testing.assert_close(actual, torch.tensor(values, device=device))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_what_stands_at_masked_places_never_shows(backend, device, poison):
    inputs = pair((3, 40), torch.float32, device)
    mask = inputs["mask"]
    leaves = []
    for name in ("logprobs", "ref_logprobs"):
        inputs[name] = torch.where(mask, inputs[name], poison).requires_grad_()
        leaves.append(inputs[name])
    scores = torch.tensor([1.0, poison, 3.0], device=device, requires_grad=True)  # row 1 is masked
    outputs = [kl_penalty(*leaves, "k3", mask=mask, backend=backend)]
    outputs += kl_rewards(*leaves, scores, mask, coef=0.1, kind="k3", backend=backend)
    upstream = [torch.randn_like(output) for output in outputs]
    for grad in upstream[:3]:
        grad[~mask] = poison
    grads = torch.autograd.grad(outputs, [*leaves, scores], upstream)
    for result in (*outputs[:3], *grads[:2]):
        assert torch.isfinite(result).all()
        assert (result[~mask] == 0).all()
    assert torch.isfinite(outputs[3]).all()
    assert torch.isfinite(grads[2]).all()
    assert grads[2][1] == 0


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_reach_only_those_who_ask(backend, device, which):
    inputs = pair((3, 20), torch.float32, device)
    leaves = [inputs["logprobs"], inputs["ref_logprobs"]]
    leaves[which].requires_grad_()
    # Copied inside, where the copy no longer says that a gradient is wanted.
    views = [leaf.reshape(6, 10).t() for leaf in leaves]
    kl_penalty(*views, backend=backend).sum().backward()
    sign = (1.0, -1.0)[which]
    assert torch.equal(leaves[which].grad, torch.full_like(leaves[which], sign))
    assert leaves[1 - which].grad is None


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_rewards_and_all_gradients_are_as_exact_as_pytorch(backend, device, dtype, kind):
    inputs = pair(SHAPES[0], dtype, device)
    inputs["scores"] = torch.randn(2, 3).to(device, dtype)
    wrt = ("logprobs", "ref_logprobs", "scores")
    results = judge(*classic_rewards(backend, kind), inputs, wrt=wrt)
    for name in ("output 0", "output 1", "dlogprobs", "dref_logprobs"):
        assert (results[name][~inputs["mask"]] == 0).all()


@pytest.mark.parametrize("shape", [(252, 7), (3, 1), (1, 1300), (2, 1024)], ids=str)
def test_rewards_of_any_shape(backend, device, shape):
    inputs = pair((max(2, shape[0]), shape[1]), torch.float32, device)
    inputs = {name: x[: shape[0]] for name, x in inputs.items()}
    inputs["scores"] = torch.randn(shape[0], device=device)
    wrt = ("logprobs", "ref_logprobs", "scores")
    judge(*classic_rewards(backend, "mse"), inputs, wrt=wrt)


def test_rewards_by_hand(backend, device):
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, -1.0], [-1.0] * 4, [-1.0] * 4], device=device)
    ref = torch.tensor([[-2.0, -1.0, -3.0, -9.0], [-2.0] * 4, [-2.0] * 4], device=device)
    mask = torch.tensor(
        [[True, True, True, False], [False] * 4, [False, True, False, True]], device=device
    )
    scores = torch.tensor([5, 6, 7], device=device)  # integers are converted
    rewards, kls, sums = kl_rewards(logprobs, ref, scores, mask, coef=0.1, backend=backend)
    expected = [[-0.1, 0.0, 4.8, 0.0], [0.0] * 4, [0.0, -0.1, 0.0, 6.9]]
    torch.testing.assert_close(rewards, torch.tensor(expected, device=device))
    expected = [[1.0, 0.0, 2.0, 0.0], [0.0] * 4, [0.0, 1.0, 0.0, 1.0]]
    torch.testing.assert_close(kls, torch.tensor(expected, device=device))
    torch.testing.assert_close(sums, torch.tensor([3.0, 0.0, 2.0], device=device))


def test_the_score_lands_on_the_last_counted_token_however_long_the_row(backend, device):
    length = 2500  # three tiles
    mask = torch.zeros(4, length, dtype=torch.bool, device=device)
    for row, last in enumerate((0, 1023, 1024, 2499)):
        mask[row, : last + 1 : 3] = True
        mask[row, last] = True
    zeros = torch.zeros(4, length, device=device)
    scores = torch.arange(1.0, 5.0, device=device)
    rewards, _, _ = kl_rewards(zeros, zeros, scores, mask, coef=0.5, backend=backend)
    expected = torch.zeros_like(rewards)
    for row, last in enumerate((0, 1023, 1024, 2499)):
        expected[row, last] = scores[row]
    assert torch.equal(rewards, expected)


def test_a_coefficient_on_the_device_gives_the_same_bits(backend, device):
    inputs = pair((5, 33), torch.float32, device)
    logprobs, ref, mask = inputs.values()
    logprobs.requires_grad_()
    scores = torch.randn(5, device=device)
    results = []
    for coef in (0.3, torch.tensor(0.3, device=device)):
        rewards, _, _ = kl_rewards(
            logprobs, ref, scores, mask, coef=coef, kind="mse", backend=backend
        )
        results.append((rewards, torch.autograd.grad(rewards.sum(), logprobs)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize(("rows", "length"), [(64, 37), (5, 1100)])
def test_a_row_of_rewards_is_the_same_alone_and_in_a_batch(device, rows, length):
    """Promised of the Triton kernels; PyTorch's sums promise no such thing."""
    backend = "triton"
    inputs = pair((rows, length), torch.float32, device)
    inputs["scores"] = torch.randn(rows, device=device)
    op = classic_rewards(backend, "k3")[0]
    together = op(**inputs)
    for row in (0, rows - 1):
        alone = op(**{name: x[row : row + 1] for name, x in inputs.items()})
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[0], b[row])


def test_misaligned_inputs(backend, device):
    inputs = pair((4, 37), torch.bfloat16, device)
    inputs = {name: misaligned(x) for name, x in inputs.items()}
    judge(*penalty(backend, "k3"), inputs, wrt=("logprobs", "ref_logprobs"))
    inputs["scores"] = torch.randn(4, device=device)
    judge(*classic_rewards(backend, "k3"), inputs, wrt=("logprobs", "scores"))


def test_rewards_take_one_launch(device):
    logprobs, ref, mask = pair((3, 20), torch.float32, device).values()
    scores = torch.ones(3, device=device)
    with watched() as calls:
        kl_rewards(logprobs, ref, scores, mask, coef=0.1, backend="triton")
    assert calls == ["_kl_rewards_fwd_kernel"]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
def test_empty_batches(backend, device, shape):
    logprobs = torch.zeros(shape, device=device, requires_grad=True)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    scores = torch.zeros(shape[0], device=device, requires_grad=True)
    assert kl_penalty(logprobs, logprobs.detach(), backend=backend).shape == shape
    rewards, kls, sums = kl_rewards(
        logprobs, logprobs.detach(), scores, mask, coef=0.1, backend=backend
    )
    assert rewards.shape == kls.shape == shape
    assert torch.equal(sums, torch.zeros(shape[0], device=device))
    rewards.sum().backward()
    assert torch.equal(scores.grad, torch.zeros_like(scores))


def test_a_vector_is_one_row(backend, device):
    inputs = pair((2, 12), torch.float32, device)
    inputs["scores"] = torch.ones(2, device=device)
    op = classic_rewards(backend, "kl")[0]
    rows = op(**inputs)
    vector = op(**{name: x[0] for name, x in inputs.items()})
    for a, b in zip(vector, rows, strict=True):
        assert a.shape == b.shape[1:]
        assert_close_to_exact(a, [b[0]], b[0], "a row as a vector")
