"""Rollouts by compiled code for CPUs: the tokens and numbers of PyTorch's."""

from typing import Any

import peft
import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.models import products
from fastrl.models.products import PackedProducts
from fastrl_kernels import dispatch
from fastrl_kernels._cpu import fp32_copies
from fastrl_kernels._cpu.native import build, calls
from fastrl_kernels._cpu.native.build import why_not
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no compiled code here")
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [1]] * 5


FUSED = ("llama", "qwen3")


def generated(model: Any, monkeypatch: pytest.MonkeyPatch, backend: str, **given: Any) -> Any:
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", backend)
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=24)
    params = SamplingParams(**{"max_new_tokens": 6, "n": 16, "seed": 1} | given)
    return engine.generate(PROMPTS, params)


@pytest.fixture
def called(monkeypatch):
    """The names of the compiled functions that were asked for."""
    names, function = set(), calls.function
    monkeypatch.setattr(calls, "function", lambda name: names.add(name) or function(name))
    return names


def assert_same(found: Any, expected: Any) -> None:
    for x, y in zip(found.sequences, expected.sequences, strict=True):
        assert torch.equal(x, y)
    for name in ("logprobs", "entropies"):
        for x, y in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_rollouts_are_pytorchs(family, called, monkeypatch):
    model = tiny_models.language_model(family)
    fused = {"rms_norm", "swiglu", "decode_layer", "numbers_of_a_row"} if family in FUSED else set()
    always = fused | {"decode_attention", "linear", "pack", "columns_of_a_panel"}
    for given in ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}):
        expected = generated(model, monkeypatch, "torch", **given)
        assert not called
        found = generated(model, monkeypatch, "native", **given)
        drawn = {"draw"} if given in ({}, {"temperature": 0.7}) else set()  # not cut, nor greedy
        assert called == always | drawn
        called.clear()
        assert_same(found, expected)


def test_weights_are_those_of_now(monkeypatch):
    model = tiny_models.language_model("llama")
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=24)
    for frozen in (False, True, True):
        model.requires_grad_(not frozen)
        found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, seed=1))
        kept = sum(x.nbytes for x in engine.model_runner.stored())
        layers = [x for x in model.modules() if isinstance(x, torch.nn.Linear)]
        weights = sum(x.weight.nbytes for x in layers)
        assert weights <= kept < 1.5 * weights if frozen else kept == 0
        expected = generated(model, monkeypatch, "torch", n=1)
        assert_same(found, expected)
        monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "native")
        with torch.no_grad():  # of a frozen layer, too
            for x in layers:
                x.weight.mul_(1.1)


@pytest.mark.parametrize("joined", [False, True])
def test_biases_are_those_of_now(joined, monkeypatch):
    """Also those that are trained, or written to, beside frozen weights."""
    family = "qwen2" if joined else "gpt2"
    model = tiny_models.language_model(family).requires_grad_(False)
    biases = [x for name, x in model.named_parameters() if name.endswith("bias") and x.dim() == 1]
    assert biases
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=24)
    for trained in (False, True):
        for x in biases:
            x.requires_grad_(trained)
        for _ in range(2):
            monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "native")
            found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, seed=1))
            assert_same(found, generated(model, monkeypatch, "torch", n=1))
            for x in biases:
                x.data.add_(torch.randn_like(x)) if trained else x.add_(torch.randn_like(x))


def test_layers_without_weights_are_left(monkeypatch):
    """Such as those of libraries for quantised weights, and models on another device."""
    model = tiny_models.language_model("llama")
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=24)
    expected = engine.generate(PROMPTS, SamplingParams(max_new_tokens=3, seed=1))
    attention = model.model.layers[0].self_attn
    inner = attention.q_proj
    attention.q_proj = torch.nn.Module()
    attention.q_proj.forward = lambda x: torch.nn.functional.linear(x, inner.weight)
    found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=3, seed=1))
    assert_same(found, expected)
    monkeypatch.setattr(products, "explain", None)  # it may refuse a CPU that nobody asked about
    with PackedProducts().in_place(tiny_models.language_model("llama").to("meta")):
        pass


def test_short_memory_costs_time_not_bits(monkeypatch):
    model = tiny_models.language_model("llama")
    expected = generated(model, monkeypatch, "native")
    monkeypatch.setattr(fp32_copies, "available_bytes", lambda: 0)
    engine = RolloutEngine(model.requires_grad_(False), tiny.tokenizer(), max_slots=24)
    found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, n=16, seed=1))
    assert not engine.model_runner.stored()
    for name in ("sequences", "logprobs"):
        for x, y in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert torch.equal(x, y)


def test_adapters_and_hooks_are_run(monkeypatch):
    model = tiny_models.language_model("llama")
    expected = generated(model, monkeypatch, "torch")
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))
    assert_same(generated(model, monkeypatch, "native"), expected)
    assert len(seen) > 6
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["v_proj"]), model)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.normal_()
    changed = generated(model, monkeypatch, "torch")
    assert any(
        not torch.equal(x, y) for x, y in zip(changed.logprobs, expected.logprobs, strict=True)
    )
    assert_same(generated(model, monkeypatch, "native"), changed)


def test_what_lacks_is_warned_of_once(monkeypatch):
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "auto")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(build, "why_not", lambda: "there is no C compiler (apt install gcc)")
    monkeypatch.setattr(dispatch, "_chosen", {})
    model = tiny_models.language_model("llama")
    with pytest.warns(UserWarning, match=r"no C compiler \(apt install gcc\)") as said:
        engine = RolloutEngine(model, tiny.tokenizer(), max_slots=24)
    assert len(said) == 1
    found = engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, n=16, seed=1))
    assert_same(found, generated(model, monkeypatch, "torch"))
