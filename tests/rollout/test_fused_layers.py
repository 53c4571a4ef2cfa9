"""Decoder layers that are fused in decode steps: the same tokens and numbers, in few launches."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout.attention import DecodeAttention, choose_decode_kernel
from fastrl.rollout.kv_cache import KVCache
from tests import tiny_models
from tests.golden import tiny
from tests.kernels.launches import interpreted, watched

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's, which the rollouts of other tests leave out on a CPU."""
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "auto")


def engine_of(model: Any, **settings: Any) -> RolloutEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return RolloutEngine(model, tiny.tokenizer(), max_slots=2, **settings)


def generated(engine: RolloutEngine, **settings: Any) -> Any:
    return engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, seed=1, **settings))


def assert_same_rollouts(model: Any, **settings: Any) -> None:
    engine = engine_of(model)
    assert engine.model_runner.fused_layers.active
    found = generated(engine, **settings)
    engine.model_runner.fused_layers.active = False
    expected = generated(engine, **settings)
    for name in ("sequences", "logprobs", "entropies"):
        for x, y in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_are_those_of_the_models_own_layers(family: str) -> None:
    assert_same_rollouts(tiny_models.language_model(family))


def test_rollouts_with_a_sliding_window_are_too() -> None:
    """The window is shorter than the samples."""
    assert_same_rollouts(tiny_models.language_model("mistral", sliding_window=3))


def test_adapters_run_inside_of_fused_layers() -> None:
    model = tiny_models.language_model("llama")
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    assert_same_rollouts(get_peft_model(model, lora))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_casts_of_weights_under_autocast_are_joined(family: str) -> None:
    """Products in bf16 round alike, joined or not; Qwen2's have biases."""
    model = tiny_models.language_model(family)
    engine = engine_of(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    runner = engine.model_runner
    assert runner.fused_layers.active
    fused = runner.fused_layers.layers[0]
    with runner.opened():
        x = torch.randn(3, 1, model.config.hidden_size).bfloat16()
        with watched() as calls:
            joined = fused.attention_products(x)
        assert calls.count("mm") + calls.count("addmm") == 1
        own = model.model.layers[0].self_attn
        for y, layer in zip(joined, (own.q_proj, own.k_proj, own.v_proj), strict=True):
            torch.testing.assert_close(y, layer(x), rtol=1e-2, atol=1e-2)
    found = generated(engine)
    runner.fused_layers.active = False
    expected = generated(engine)
    for x, y in zip(found.logprobs, expected.logprobs, strict=True):
        assert len(x) == len(y)
        assert (x - y).abs().mean() < 5e-3
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi3", "cohere"])
def test_layers_of_another_structure_stay_as_they_are(family: str) -> None:
    model = tiny_models.language_model(family)
    engine = engine_of(model)
    assert not engine.model_runner.fused_layers.active
    assert not any("forward" in vars(module) for module in model.modules())


def test_layers_whose_numbers_differ_stay_as_they_are_with_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_models.language_model("llama")
    mlp = model.model.layers[1].mlp
    own = type(mlp).forward
    monkeypatch.setattr(type(mlp), "forward", lambda self, x: 1.01 * own(self, x))
    with pytest.warns(UserWarning, match=r"fused decoder layers differ from the model's own by 1\.|"
                      r"fused decoder layers differ from the model's own by \d"):  # fmt: skip
        engine = RolloutEngine(model, tiny.tokenizer(), max_slots=2)
    assert not engine.model_runner.fused_layers.active


def test_layers_that_hooks_look_into_stay_as_they_are() -> None:
    model = tiny_models.language_model("llama")
    engine = engine_of(model)
    seen: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    generated(engine)
    count = len(seen)
    assert count > 0
    handle.remove()
    generated(engine)
    assert len(seen) == count
    assert not any("forward" in vars(module) for module in model.modules())


@interpreted
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("autocast", "most"), [(True, 10), (False, 13)], ids=["bf16", "fp32"])
def test_a_layers_launches(family: str, autocast: bool, most: int) -> None:
    """Products of their own, of weights that are not cast, are three more."""
    (two_own, two), (three_own, three) = (
        _launches(tiny_models.language_model(family, num_hidden_layers=n), autocast) for n in (2, 3)
    )
    assert three - two <= most
    assert three_own - two_own >= 2.5 * (three - two)


def _launches(model: Any, autocast: bool) -> tuple[int, int]:
    """Of a decode step, with the model's layers and with fused ones."""
    context = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
    engine = engine_of(model, autocast=context)
    runner = engine.model_runner
    kv_cache = KVCache(runner.layer_shapes(), 2, 600, runner.dtype, runner.device)
    kernel = choose_decode_kernel(kv_cache)
    found = []
    for active in (False, True):
        runner.fused_layers.active = active
        with runner.opened():
            positions = torch.tensor([5, 7])
            attention = DecodeAttention(kernel, kv_cache, positions, 600)
            with watched() as calls:
                runner.decode(positions, positions, attention)
        found.append(len(calls))
    return found[0], found[1]
