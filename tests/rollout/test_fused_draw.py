"""Decode steps that draw from hidden states: the same tokens and numbers as from logits."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn

import fastrl_kernels
from fastrl import RolloutEngine, SamplingParams
from fastrl.models.products import PackedProducts
from fastrl.rollout import fused_draw, model_runner
from fastrl_kernels import Choice
from tests import tiny_models
from tests.golden import tiny

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
VOCABULARY = 200
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops in PyTorch, taken for Triton's, which have tests of their own; small heads that pay; no
    packed weights."""
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "torch")
    monkeypatch.setattr(model_runner, "explain", lambda _device: Choice("triton", "pretended"))
    monkeypatch.setattr(fused_draw, "linear_sample_pays", _pays)
    monkeypatch.setattr(model_runner, "kind_of_device", lambda _device: "cuda")
    monkeypatch.setattr(PackedProducts, "in_place", lambda *_: contextlib.nullcontext())


def _pays(rows: int, _hidden: int, _vocabulary: int, dtype: torch.dtype) -> bool:
    return rows <= 32 and dtype == BF16


def model_of(family: str = "llama", **changes: Any) -> Any:
    return tiny_models.language_model(family, vocab_size=VOCABULARY, **changes)


def engine_of(model: Any, **settings: Any) -> RolloutEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return RolloutEngine(model, tiny.tokenizer(), max_slots=2, **settings)


def is_fused(engine: RolloutEngine, **settings: Any) -> bool:
    """Whether a call's tokens come from the head in one with the draw."""
    params = SamplingParams(max_new_tokens=1, seed=1, eos_token_ids=[], **settings)
    op = fastrl_kernels.linear_sample
    with mock.patch.object(fastrl_kernels, "linear_sample", side_effect=op) as called:
        engine.generate(PROMPTS[:1], params)
    return called.called


def both(engine: RolloutEngine, **settings: Any) -> tuple[Any, Any]:
    """Outputs of the same call, drawn from hidden states and from logits."""
    params = SamplingParams(max_new_tokens=4, seed=1, **settings)
    found = engine.generate(PROMPTS, params)
    engine.model_runner.fused_draw.active = False
    expected = engine.generate(PROMPTS, params)
    engine.model_runner.fused_draw.active = True
    return found, expected


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.7])
def test_rollouts_are_those_drawn_from_logits(temperature: float) -> None:
    """Of fp32 weights under autocast, whose cached casts are what is multiplied."""
    model = model_of()
    engine = engine_of(model, autocast=partial(torch.autocast, "cpu", BF16))
    assert engine.model_runner.fused_draw.active
    found, expected = both(engine, temperature=temperature)
    for x, y in zip(found.sequences, expected.sequences, strict=True):
        assert torch.equal(x, y)
    for name in ("logprobs", "logprobs_t1", "entropies"):
        for x, y in zip(getattr(found, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2e-2)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.fixture
def half_precision() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_accelerate_has_prepared_draws_so_too(half_precision: Accelerator) -> None:
    """It runs under autocast, and makes fp32 of its logits."""
    model = half_precision.unwrap_model(half_precision.prepare(model_of()))
    assert model(input_ids=torch.tensor(PROMPTS[:1])).logits.dtype == torch.float32
    engine = engine_of(model, autocast=half_precision.autocast)
    assert is_fused(engine)
    found, expected = both(engine)
    for x, y in zip(found.sequences, expected.sequences, strict=True):
        assert torch.equal(x, y)


def test_only_plain_draws_of_few_rows_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of().to(BF16))
    assert is_fused(engine)
    assert is_fused(engine, temperature=0.5)
    for settings in (
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.2},
        {"suppress_tokens": [3]},
    ):
        assert not is_fused(engine, **settings), settings
    monkeypatch.setattr(fused_draw, "linear_sample_pays", lambda *_: False)
    assert not is_fused(engine)


def test_values_come_with_the_tokens() -> None:
    engine = engine_of(tiny_models.policy("llama", vocab_size=VOCABULARY).to(BF16))
    assert is_fused(engine)
    found, expected = both(engine)
    for x, y in zip(found.values, expected.values, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "changes"), [("gemma2", {}), ("cohere", {}), ("granite", {"logits_scaling": 2.0})]
)
def test_logits_that_the_model_changes_are_computed(family: str, changes: dict[str, Any]) -> None:
    """By a soft cap, or a scale; without a word."""
    engine = engine_of(model_of(family, **changes).to(BF16))
    assert not engine.model_runner.fused_draw.active


def test_heads_that_do_more_than_multiply_are_called() -> None:
    lora = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    adapted = get_peft_model(model_of(), lora).to(BF16)
    assert not engine_of(adapted).model_runner.fused_draw.active
    replaced = model_of().to(BF16)
    replaced.lm_head.forward = partial(nn.Linear.forward, replaced.lm_head)
    assert not engine_of(replaced).model_runner.fused_draw.active


def test_hooks_that_came_later_see_logits() -> None:
    model = model_of().to(BF16)
    engine = engine_of(model)
    seen: list[tuple[int, ...]] = []
    handle = model.lm_head.register_forward_hook(lambda _m, _a, out: seen.append(tuple(out.shape)))
    assert not is_fused(engine)
    assert (1, 1, VOCABULARY) in seen
    handle.remove()
    assert is_fused(engine)


def test_a_head_of_now_is_multiplied_with() -> None:
    """Not one that the model had before."""
    model = model_of(tie_word_embeddings=False).to(BF16)
    engine = engine_of(model)
    other = copy.deepcopy(model.lm_head)
    other.weight.data.neg_()
    model.set_output_embeddings(other)
    assert is_fused(engine)
    found, expected = both(engine)
    assert all(map(torch.equal, found.sequences, expected.sequences))


def test_numbers_that_differ_leave_it_off_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = fused_draw.FusedDraw.draw

    def wrong(*args: Any) -> Any:
        found = draw(*args)
        return found._replace(logprobs=found.logprobs - 1)

    monkeypatch.setattr(fused_draw.FusedDraw, "draw", wrong)
    model = model_of().to(BF16)
    with pytest.warns(UserWarning, match=r"fused with the draw differs from the model's own way"):
        engine = RolloutEngine(model, tiny.tokenizer(), max_slots=2)
    assert not is_fused(engine)


def test_what_cannot_run_is_left_off_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(fused_draw.FusedDraw, "draw", broken)
    model = model_of().to(BF16)
    with pytest.warns(UserWarning, match="cannot run .RuntimeError: out of registers"):
        RolloutEngine(model, tiny.tokenizer(), max_slots=2)


def test_weights_in_full_precision_keep_their_logits() -> None:
    assert not engine_of(model_of()).model_runner.fused_draw.active
