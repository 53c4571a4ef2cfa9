"""A model's linear layers within a run's products, and with packed weights in rollouts."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastrl import RolloutEngine, SamplingParams
from fastrl.models.products import PackedProducts, Products
from fastrl_kernels import gemm
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.skipif(
    gemm.OneDnn.absent() is not None, reason="torch has no oneDNN operator here"
)
IDS = torch.arange(3, 15).view(2, 6)
ONEDNN = {"float32": gemm.Choice("onednn"), "bfloat16": gemm.Choice("mm")}


def products(**chosen: gemm.Choice) -> Products:
    with gemm.using(ONEDNN | chosen):
        return Products()


def calls(monkeypatch) -> list[int]:
    """The numbers of rows of the products that oneDNN computes from now on."""
    seen: list[int] = []
    right = gemm.OneDnn.linear

    def linear(x, *others):
        seen.append(len(x))
        return right(x, *others)

    monkeypatch.setattr(gemm.OneDnn, "linear", staticmethod(linear))
    return seen


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_layers_compute_the_same_forward_and_backward(family, monkeypatch):
    model = tiny_models.language_model(family)

    def step(of):
        of.zero_grad()
        loss = of(IDS, labels=IDS).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in of.named_parameters()}

    libraries = products()
    seen = calls(monkeypatch)
    with libraries.on(model):
        loss, found = step(model)
    layers = sum(isinstance(m, torch.nn.Linear | Conv1D) for m in model.modules())
    assert len(seen) == 3 * layers
    del seen[:]
    plain, expected = step(model)
    exact, right = step(copy.deepcopy(model).double())
    assert not seen
    assert abs(loss - exact) <= 2 * abs(plain - exact) + 1e-6
    for name, gradient in found.items():
        allowed = 2 * (expected[name] - right[name]).norm() + 1e-6 * right[name].norm()
        assert (gradient - right[name]).norm() <= allowed, name


def test_layers_have_their_own_forward_afterwards_and_before():
    model = tiny_models.language_model("llama")
    own = model.model.layers[0].mlp.up_proj
    own.forward = lambda x: torch.zeros(*x.shape[:-1], own.out_features)
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.gate_proj)
    hooked = []
    model.lm_head.register_forward_hook(lambda *_: hooked.append(1))
    expected = model(IDS).logits
    context = products().on(model)
    context.__enter__()
    assert not vars(own)["forward"](torch.ones(1, 16)).any()
    torch.testing.assert_close(model(IDS).logits, expected)
    assert not context.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert len(hooked) == 2
    assert [n for n, m in model.named_modules() if "forward" in vars(m)] == [
        "model.layers.0.mlp.up_proj"
    ]


def test_a_copy_that_is_made_within_them_is_a_model_of_its_own():
    model = tiny_models.language_model()
    with products().on(model):
        copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(IDS).logits.any()
    assert model(IDS).logits.any()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rollouts_see_weights_as_they_are(precision):
    """Also where a fused optimizer has written to them, which changes no version."""
    if precision == "bfloat16" and not gemm.has_bf16():
        pytest.skip("this CPU packs no bf16 weights")
    model = tiny_models.policy("gpt2")
    prompts, params = tiny_models.prompts(3, 5), SamplingParams(max_new_tokens=5, seed=0)

    def engine():
        def autocast():
            return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")

        return RolloutEngine(model, tiny.tokenizer(), autocast=autocast)

    kept = engine()
    with gemm.using({precision: gemm.Choice({"float32": "onednn"}.get(precision, "bf16"))}):
        before = kept.generate(prompts, params)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.3, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        after = kept.generate(prompts, params)
        expected = engine().generate(prompts, params)
    for a, b in zip(after.logprobs, expected.logprobs, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(before.logprobs[0], after.logprobs[0])


def test_frozen_weights_are_packed_once_until_somebody_writes_to_them(monkeypatch):
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "torch")  # compiled code has panels instead
    packed = []
    right = gemm.Packed.__init__

    def init(self, weight, wide=False):
        packed.append(tuple(weight.shape))
        right(self, weight, wide)

    monkeypatch.setattr(gemm.Packed, "__init__", init)
    layer = torch.nn.Linear(8, 8).requires_grad_(False)
    trained = torch.nn.Linear(8, 4)
    model, both = torch.nn.Sequential(layer, trained), PackedProducts()
    x = torch.randn(3, 8)
    with gemm.using(ONEDNN), torch.no_grad():
        for changed in (False, False, True):
            if changed:
                layer.weight.mul_(2.0)
            with both.in_place(model):
                torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)
        both.free()
        with both.in_place(model):
            pass
        assert packed.count((8, 8)) == 3
        assert packed.count((4, 8)) == 4
        layer.weight.requires_grad_()
        layer.weight.grad = torch.ones(8, 8)
        torch.optim.AdamW([layer.weight], fused=True).step()  # changes no version
        with both.in_place(model):
            torch.testing.assert_close(layer(x), x @ layer.weight.t() + layer.bias)


def test_a_tall_weight_is_packed_once_there_are_a_few_rows(monkeypatch):
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "torch")  # compiled code has panels instead
    packed = []
    right = gemm.Packed.__init__
    monkeypatch.setattr(
        gemm.Packed, "__init__", lambda self, *x: (packed.append(1), right(self, *x))[0]
    )
    head, runs = torch.nn.Linear(128, 8192).requires_grad_(False), PackedProducts()
    few = gemm.Packed.FEW
    with gemm.using({"float32": gemm.MM}), torch.no_grad():
        for _ in range(2):
            for rows in (1, few.start - 1, few.start, few.stop - 1, few.stop):
                x = torch.randn(rows, 1, 128)
                exact = x.double() @ head.weight.double().t() + head.bias.double()
                own = (torch.nn.functional.linear(x, head.weight, head.bias) - exact).norm()
                with runs.in_place(head):
                    off = (head(x) - exact).norm()
                assert off <= 2 * own + 1e-6 * exact.norm()
            assert packed == [1]
        monkeypatch.setenv(gemm.LIBRARY_VARIABLE, "mm")
        with PackedProducts().in_place(head):
            head(torch.randn(few.start, 128))
    assert packed == [1]


@pytest.mark.parametrize("activation", [NewGELUActivation, FastGELUActivation])
def test_an_activation_by_tanh_is_computed_in_one_pass(activation):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), activation())
    x = torch.randn(4, 8)

    def learned(of, x):
        y = of(x)
        return y, *torch.autograd.grad(y.square().sum(), of[0].parameters())

    exact = learned(copy.deepcopy(model).double(), x.double())
    plain = learned(model, x)
    ops: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func.name())
            return func(*args, **kwargs or {})

    with products().on(model), Seen():
        found = learned(model, x)
    assert ops.count("aten::gelu") == ops.count("aten::gelu_backward") == 1
    assert "aten::tanh" not in ops
    for a, b, c in zip(found, plain, exact, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-7 * c.norm()


def test_the_main_processs_libraries_hold_for_all(monkeypatch):
    class Second:
        is_main = False

        def from_main(self, _):
            return {"float32": ["mm", 0], "bfloat16": ["mm", 0]}

    with gemm.using(ONEDNN):
        assert Products(Second()).choices["float32"] == gemm.MM  # type: ignore[arg-type]
