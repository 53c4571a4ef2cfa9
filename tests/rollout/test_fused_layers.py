"""Decoder layers that are fused in decode steps: the same tokens and numbers, in few launches."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

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
    from peft import get_peft_model

    model = get_peft_model(
        tiny_models.language_model("llama"), tiny_models.lora(target_modules=["q_proj", "up_proj"])
    )
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    assert_same_rollouts(model)


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
def test_a_layer_takes_at_most_thirteen_launches(family: str) -> None:
    counts = [_launches(tiny_models.language_model(family, num_hidden_layers=n)) for n in (2, 3)]
    own, fused = (counts[1][i] - counts[0][i] for i in range(2))
    assert fused <= 13
    assert own >= 2 * fused


def _launches(model: Any) -> tuple[int, int]:
    """Of a decode step, with the model's layers and with fused ones."""
    engine = engine_of(model)
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
