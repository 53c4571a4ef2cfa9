"""Fused heads on a CPU in pieces of the vocabulary: judged as in whole rows, with one rounding for
all ops. Elsewhere tests' weights are too small for the libraries that work so."""

import pytest
import torch

from fastrl_kernels import gemm, linear_logprobs
from tests.kernels import test_linear_logprobs as logprobs_tests
from tests.kernels import test_linear_nll as nll_tests
from tests.kernels import test_linear_ppo_loss as ppo_tests

BF16, FP32 = torch.bfloat16, torch.float32
HERE = {"backend": "torch", "device": "cpu"}
USABLE = {
    dtype: name
    for dtype, name in ((FP32, "onednn"), (BF16, "bf16"))
    if gemm.LIBRARIES[str(dtype).removeprefix("torch.")][name].absent() is None
}
per_dtype = pytest.mark.parametrize("dtype", USABLE, ids=str)


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch):
    """Of 96 columns, with whatever library works in pieces here."""
    monkeypatch.setattr(gemm, "PIECE", 96)
    chosen = {str(d).removeprefix("torch."): gemm.Choice(name) for d, name in USABLE.items()}
    with gemm.using(chosen):
        yield


@per_dtype
@pytest.mark.parametrize("variant", ["plain", "scale", "temperature"])
def test_log_probs_and_entropies(dtype, variant):
    logprobs_tests.test_values_and_gradients(**HERE, dtype=dtype, variant=variant)


@per_dtype
def test_many_chunks(dtype):
    logprobs_tests.test_many_chunks(**HERE, dtype=dtype)


@per_dtype
@pytest.mark.parametrize("workspace", [None, 50_000], ids=["one chunk", "many chunks"])
def test_losses(dtype, workspace):
    nll_tests.test_loss_and_gradients(**HERE, dtype=dtype, workspace=workspace)
    ppo_tests.test_loss_and_gradients(**HERE, dtype=dtype, workspace=workspace)


@per_dtype
@pytest.mark.parametrize("workspace", [None, 50_000], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("peaked", [False, True], ids=["as drawn", "sure of its labels"])
def test_gradients_of_all_that_a_head_may_have(dtype, workspace, peaked):
    """Where the policy is sure of a label, its gradient g·(1 - p) is far below g·p."""
    inputs = nll_tests.batch(40, 1200, dtype=dtype, bias=True, weights=True)
    if peaked:
        inputs["hidden"] = 10 * inputs["hidden"]
        likeliest = (inputs["hidden"] @ inputs["weight"].t() + inputs["bias"]).argmax(-1)
        inputs["labels"] = torch.where(inputs["labels"] == -100, -100, likeliest)
        chances = linear_logprobs(**_head(inputs))[nll_tests.counted_of(inputs)].exp()
        assert chances.max() > 0.99 > chances.min()
    nll_tests.check(inputs, "torch", workspace, logit_scale=0.9)
    ppo = ppo_tests.batch(40, 1200, dtype=dtype, bias=True)
    ppo_tests.check(ppo, "torch", workspace, logit_scale=0.9)


def _head(inputs):
    return {name: inputs[name] for name in ("hidden", "weight", "bias", "labels", "mask")}


@pytest.mark.skipif(FP32 not in USABLE, reason="torch has no oneDNN operator here")
def test_pieces_that_are_impossible_add_nothing():
    logprobs_tests.test_impossible_tokens_add_nothing_and_get_no_gradient(**HERE)


@per_dtype
def test_losses_where_whole_pieces_are_impossible(dtype):
    """Their tokens are as good as not in the vocabulary."""
    inputs = nll_tests.batch(12, 400, dtype=dtype, bias=True)
    inputs["labels"].clamp_(max=199)
    inputs["bias"][200:] = -torch.inf
    loss, grads, logprobs = nll_tests.run(inputs, "torch")
    fewer = {**inputs, "weight": inputs["weight"][:200], "bias": inputs["bias"][:200]}
    loss_, grads_, logprobs_ = nll_tests.run(fewer, "torch")
    close = {"rtol": 1e-5, "atol": 1e-7} if dtype == FP32 else {"rtol": 0.02, "atol": 1e-4}
    torch.testing.assert_close(logprobs, logprobs_, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(loss, loss_, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads["hidden"], grads_["hidden"], **close)
    for name in ("weight", "bias"):
        torch.testing.assert_close(grads[name][:200], grads_[name], **close)
        assert not grads[name][200:].any()


@pytest.mark.skipif(FP32 not in USABLE, reason="torch has no oneDNN operator here")
@pytest.mark.parametrize("shift", [300, -300])
def test_far_from_zero(shift):
    logprobs_tests.test_far_from_zero_and_widely_spread(**HERE, scale=10, shift=shift)


@per_dtype
def test_scores_with_and_without_gradients_and_in_a_loss_have_the_same_bits(dtype):
    """The old policy, the new one and the reference are scored by different calls."""
    inputs = ppo_tests.batch(4, 5, 500, dtype=dtype, bias=True)
    head = {**_head(inputs), "backend": "torch"}
    with torch.no_grad():
        scored, entropies = linear_logprobs(**head, entropy=True)
    learning = {**head, "weight": head["weight"].clone().requires_grad_()}
    again, also = linear_logprobs(**learning, entropy=True)
    assert torch.equal(scored, again)
    assert torch.equal(entropies, also)
    one_by_one = [
        linear_logprobs(**{**head, **{k: head[k][i] for k in ("hidden", "labels", "mask")}})
        for i in range(4)
    ]
    assert torch.equal(scored, torch.stack(one_by_one))
    _, _, stats = ppo_tests.run(inputs, "torch")
    assert torch.equal(stats.logprobs, scored)


@pytest.mark.skipif(BF16 not in USABLE, reason="this CPU has no instructions for bf16")
def test_autocast_multiplies_in_bf16(monkeypatch):
    seen = []
    right = gemm.Bf16.linear
    monkeypatch.setattr(
        gemm.Bf16, "linear", staticmethod(lambda *a: seen.append(a[0].dtype) or right(*a))
    )
    ppo_tests.test_autocast_multiplies_in_its_dtype(**HERE, workspace=None)
    assert seen
    assert set(seen) == {BF16}
