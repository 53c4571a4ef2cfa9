"""The way of the ops with a head on a GPU, its chunks and its products, without one."""

import functools

import pytest
import torch

from fastrl_kernels import gemm, lm_head
from tests.kernels import test_linear_kl as kl_tests
from tests.kernels import test_linear_logprobs as logprobs_tests
from tests.kernels import test_linear_nll as nll_tests
from tests.kernels import test_linear_ppo_loss as ppo_tests
from tests.kernels.gpu_products import products_of_a_gpu
from tests.kernels.judge import judge, names
from tests.kernels.test_linear_kl_properties import both

BF16, FP32 = torch.bfloat16, torch.float32
MANY = (11, 2500)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize(
    ("shape", "elements", "chunks"),
    [(MANY, None, (1, 1)), (MANY, 5632, (1, 5)), ((70, 300), 1100, (7, 3))],
    ids=["whole", "columns", "tiles"],
)
def test_log_probs_and_gradients(device, dtype, shape, elements, chunks, monkeypatch):
    monkeypatch.setattr(lm_head, "FEWEST_COLUMNS", 100)
    workspace = elements and elements * dtype.itemsize
    if workspace:
        found = lm_head.tiles(*shape, dtype.itemsize, workspace)
        assert tuple(map(len, found)) == chunks
    inputs = logprobs_tests.with_holes(
        logprobs_tests.batch(*shape, dtype=dtype, device=device, bias=True)
    )
    inputs["temperature"] = logprobs_tests.temperatures(inputs)
    with products_of_a_gpu() as products:
        logprobs_tests.judged(
            inputs, "triton", softcap=8.0, logit_scale=1.5, workspace_bytes=workspace
        )
    assert {x.operands for x in products} == {dtype}
    adds = {(x.n, x.k < shape[0]) for x in products if x.adds}  # by n of H, whether of rows
    assert len(adds) == (chunks[0] > 1) + (chunks[1] > 1)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize(
    ("rows", "workspace"), [(11, None), (11, 20_000), (24, 20_000)], ids=["fits", "saves", "many"]
)
def test_losses_and_gradients(device, dtype, rows, workspace):
    """Where all logits fit the workspace, where they fit it with what is saved, and in chunks."""
    shape = rows, MANY[1]
    inputs = ppo_tests.batch(*shape, dtype=dtype, device=device, bias=True)
    of_nll = nll_tests.batch(*shape, dtype=dtype, device=device)
    with products_of_a_gpu() as products:
        ppo_tests.check(inputs, "triton", workspace, upstream=-1.7)
        nll_tests.check(of_nll, "triton", workspace)
    several = rows == 24 or (workspace is not None and dtype == FP32)
    assert any(x.adds and x.m == MANY[1] for x in products) == several


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize("kind", kl_tests.KINDS)
@pytest.mark.parametrize("workspace", [None, 20_000], ids=["fits", "chunks"])
@pytest.mark.parametrize("name", ["linear_kl", "linear_kl_loss"])
def test_divergences_and_gradients(device, name, dtype, kind, workspace):
    """Chunks are of both heads' logits, each in its own dtype; the loss computes them once."""
    inputs = kl_tests.batch(11, 1200, kind=kind, dtype=dtype, device=device, bias=True)
    rest = {"rest": inputs.pop("rest")} if kind != "head" else {}
    options = {"beta": 0.3, "entropy": True, "softcap": 8.0, **rest}
    ours, formula = (functools.partial(op, **options) for op in both(name, "triton"))
    ours = functools.partial(ours, workspace_bytes=workspace)
    with products_of_a_gpu() as products:
        judge(ours, formula, inputs, wrt=["hidden", "weight", "bias"], own_dtypes=True)
    logits = [x for x in products if x.n == 1200]
    assert {x.operands for x in logits} == ({dtype, FP32} if kind == "head" else {dtype})
    one_chunk = (2 if kind == "head" else 1) * (2 if name == "linear_kl" else 1)
    # One chunk of fewer bytes than the weight's sum in fp32, which it does without, is not cut.
    whole = name == "linear_kl_loss" and kind != "head" and dtype == BF16
    assert (len(logits) > one_chunk) == (workspace is not None and not whole)


def test_the_gradient_of_hidden_states_is_summed_in_fp32(device, monkeypatch):
    """However large it is, and whatever torch's flags let a library do in half precision."""
    monkeypatch.setattr(gemm, "_MAY_SPLIT", 0)
    inputs = ppo_tests.batch(*MANY, dtype=BF16, device=device)
    with products_of_a_gpu() as products:
        ppo_tests.check(inputs, "triton", wrt=["hidden"])
    assert [x.out for x in products if x.k == MANY[1]] == [FP32]
