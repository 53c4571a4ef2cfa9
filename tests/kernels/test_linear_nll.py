"""linear_nll_loss: gradients and memory, on both backends."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import linear_logprobs, linear_nll_loss, reference
from fastrl_kernels.workspace import clear
from tests.kernels import test_linear_logprobs
from tests.kernels.judge import DTYPES, assert_close_to_exact, names
from tests.kernels.launches import watched
from tests.kernels.roundings import Rounded
from tests.kernels.test_linear_logprobs import (
    LEAVES,
    Inputs,
    assert_logits_never_exist,
    assert_same_bits,
)
from tests.kernels.test_linear_ppo_loss import counted_of, doubled

BF16, FP32 = torch.bfloat16, torch.float32
SMALL = (3, 4, 60)
ROWS = 1500  # bytes: half of the rows of SMALL in fp32
# Several rows each: libraries sum the products of a single row less accurately.
WORKSPACES = pytest.mark.parametrize("workspace", [None, 50_000], ids=["one chunk", "many chunks"])


def batch(*shape: int, weights: bool = False, device: Any = "cpu", **options: Any) -> Inputs:
    """A head's inputs with holes and labels of -100, and weights with zeros among them."""
    inputs = test_linear_logprobs.with_holes(
        test_linear_logprobs.batch(*shape, device=device, **options)
    )
    if weights:
        generator = torch.Generator().manual_seed(7)
        drawn = torch.rand(inputs["labels"].shape, generator=generator)
        inputs["weights"] = (drawn - 0.2).clamp(min=0).to(device)
    return inputs


def run(
    inputs: Inputs, backend: str | None, wrt: Any = LEAVES, upstream: float = 1.0, **options: Any
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, gradients by name and log-probs; by the reference where ``backend`` is None."""
    leaves = {k: inputs[k].detach().requires_grad_() for k in wrt if k in inputs}
    given = {**inputs, **leaves, **options}
    if backend is None:
        loss, logprobs = reference.linear_nll_loss(**given)
    else:
        loss, logprobs = linear_nll_loss(**given, backend=backend)
        assert loss.dtype == logprobs.dtype == FP32
        assert loss.dim() == 0
    assert not logprobs.requires_grad
    grads = torch.autograd.grad(loss, [*leaves.values()], torch.full_like(loss, upstream))
    return loss.detach(), dict(zip(leaves, grads, strict=True)), logprobs


def check(inputs: Inputs, backend: str, workspace: int | None = None, **options: Any) -> None:
    loss, grads, logprobs = run(inputs, backend, workspace_bytes=workspace, **options)
    runs = Rounded(lambda: by_name(*run(inputs, None, **options)))
    exact = by_name(*run(doubled(inputs), None, **options))
    for name, x in by_name(loss, grads, logprobs).items():
        assert_close_to_exact(x, runs[name], exact[name], name)
    counted = counted_of(inputs)
    for name, grad in grads.items():
        assert grad.dtype == inputs[name].dtype
    assert not grads["hidden"][~counted].any()
    assert not logprobs[~counted].any()
    assert grads["hidden"].any()


def by_name(loss: Tensor, grads: dict[str, Tensor], logprobs: Tensor) -> dict[str, Tensor]:
    """All that ``run`` returns."""
    return {"loss": loss, **{f"d{name}": x for name, x in grads.items()}, "logprobs": logprobs}


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
@WORKSPACES
def test_loss_and_gradients(backend, device, dtype, workspace):
    """In one chunk the plain op, in many all that a head may have."""
    full = workspace is not None
    inputs = batch(7, 1200, dtype=dtype, device=device, bias=full, weights=full)
    options = {"softcap": 4.0, "logit_scale": 1.5, "denominator": 5.0} if full else {}
    # Gradients are rounded before upstream's factor reaches them.
    check(inputs, backend, workspace, upstream=0.3 if dtype == FP32 else 1.0, **options)


def test_it_is_the_mean_of_linear_logprobs(backend, device):
    inputs = batch(*SMALL, device=device)
    loss, grads, logprobs = run(inputs, backend)
    leaves = {k: inputs[k].detach().requires_grad_() for k in LEAVES if k in inputs}
    separate = linear_logprobs(**{**inputs, **leaves}, backend=backend)
    assert_same_bits([logprobs], [separate.detach()])
    composed = -separate.sum() / counted_of(inputs).sum()
    torch.testing.assert_close(loss, composed.detach(), rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(composed, [*leaves.values()])
    for name, grad in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7)


def test_a_tensor_as_denominator_and_what_does_not_count(backend, device):
    inputs = batch(*SMALL, device=device, bias=True)
    inputs["hidden"][~counted_of(inputs)] = torch.nan
    loss, grads, _ = run(inputs, backend, denominator=torch.tensor(3, device=device))
    loss_, grads_, _ = run(inputs, backend, denominator=3.0)
    assert_same_bits([loss, *grads.values()], [loss_, *grads_.values()])
    assert all(x.isfinite().all() for x in (loss, *grads.values()))


@pytest.mark.parametrize("nothing", ["rows", "masked", "denominator"])
def test_where_nothing_counts_all_is_zero(backend, device, nothing):
    inputs = batch(*SMALL, device=device, bias=True)
    options = {}
    if nothing == "rows":
        inputs = {k: x[:0] if k in ("hidden", "labels", "mask") else x for k, x in inputs.items()}
    elif nothing == "masked":
        inputs["mask"] = torch.zeros_like(inputs["mask"])
    else:
        options = {"denominator": torch.zeros((), device=device)}
    loss, grads, _ = run(inputs, backend, **options)
    assert loss == 0
    assert not any(x.any() for x in grads.values())
    assert [x.shape for x in grads.values()] == [inputs[name].shape for name in grads]


def test_a_second_backward_is_refused(backend, device):
    inputs = batch(*SMALL, device=device)
    inputs["hidden"].requires_grad_()
    loss, _ = linear_nll_loss(**inputs, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_nll_loss hands its gradients out once: call it"):
        loss.backward()


def test_a_loss_that_nothing_is_learned_of_gives_no_gradients():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            ctx.set_materialize_grads(False)
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    inputs = batch(*SMALL)
    inputs["hidden"].requires_grad_()
    Stop.apply(linear_nll_loss(**inputs)[0]).backward()
    assert inputs["hidden"].grad is None or not inputs["hidden"].grad.any()


def test_logits_never_exist(backend, device):
    assert_logits_never_exist(run, batch, device, free=clear, backend=backend, upstream=2.0)


def test_labels_out_of_range(backend, device):
    inputs = batch(*SMALL, device=device)
    inputs["labels"][0, 0], inputs["mask"][0, 0] = 60, True
    if backend == "torch" and torch.device(device).type == "cpu":
        with pytest.raises(ValueError, match="labels"):
            linear_nll_loss(**inputs, backend=backend)
        return
    loss, grads, _ = run(inputs, backend)
    assert loss.isnan()
    assert grads["hidden"][0, 0].isnan().all()


@pytest.mark.parametrize(("change", "error", "said"), [
    ({"weights": torch.ones(2, 4)}, ValueError, "weights has shape"),
    ({"weights": torch.ones(3, 4).long()}, TypeError, "weights"),
    ({"weights": torch.ones(3, 4, requires_grad=True)}, ValueError, "weights requires a grad"),
    ({"denominator": torch.ones(2)}, ValueError, "denominator must be a number or a 0-d"),
])  # fmt: skip
def test_arguments_are_checked_and_named(change, error, said):
    with pytest.raises(error, match=said):
        linear_nll_loss(**{**batch(*SMALL), **change}, backend="torch")


def test_nothing_waits_for_the_device(device):
    inputs = batch(*SMALL, device=device, bias=True, weights=True)
    for name in LEAVES:
        inputs[name].requires_grad_()
    with watched() as calls:
        loss, _ = linear_nll_loss(**inputs, workspace_bytes=ROWS, backend="triton")
        loss.backward()
    assert calls.count("_lm_head_fwd_kernel") == calls.count("_lm_head_bwd_kernel") == 2
