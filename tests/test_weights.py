"""Loaded weights begin where torch's own do, and no result rests on where others begin."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from fastrl import (
    AutoModelForSeq2SeqLMWithValueHead,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from fastrl.rollout import RolloutEngine, SamplingParams
from tests import seq2seq_models, tiny_models
from tests.golden import tiny
from tests.golden.reader import CASES, GoldenCase
from tests.models.conftest import deep
from tests.ppo import test_golden
from tests.ppo.conftest import assert_learned_alike, make_batch, make_trainer, parameters
from tests.trainers.conftest import SETTINGS, pairs, reward_model, texts
from tests.weights import aligned, assert_same_weights, misaligned


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.stack(tiny_models.prompts(5, 5, 5))).logits


@pytest.fixture
def misaligned_loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What transformers loads begins 12 bytes past a 64-byte boundary, and at one in turns."""
    load = PreTrainedModel.from_pretrained.__func__
    loaded = 0

    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal loaded
        loaded += 1
        found = load(cls, *args, **kwargs)
        misaligned(found[0] if isinstance(found, tuple) else found, 3 * (loaded % 2))
        return found

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    yield
    assert loaded


def test_misaligned_weights_are_the_same_numbers_elsewhere() -> None:
    model, expected = tiny_models.language_model(), tiny_models.language_model()
    assert aligned(model)
    assert misaligned(model, shift=3) is model
    assert {x.data_ptr() % 64 for x in model.parameters()} == {12}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same_weights(model, expected)
    torch.testing.assert_close(logits_of(model), logits_of(expected))


@pytest.mark.parametrize("shift", range(1, 8))
def test_own_storage_gives_the_bits_of_weights_that_never_lay_elsewhere(shift: int) -> None:
    """Same numbers, same places: the same operations give the same bits."""
    from fastrl.models.load import own_storage

    expected = tiny_models.language_model()
    model = misaligned(tiny_models.language_model(), shift)
    model.transformer.wpe.weight.requires_grad_(False)
    model = own_storage(model)
    assert aligned(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.transformer.wpe.weight.requires_grad
    assert_same_weights(model, expected)
    assert torch.equal(logits_of(model), logits_of(expected))


def with_value_head_seq2seq(folder: Path) -> tuple[nn.Module, nn.Module]:
    model = seq2seq_models.policy()
    model.save_pretrained(folder)
    return model, AutoModelForSeq2SeqLMWithValueHead.from_pretrained(folder)


def in_sft(folder: Path) -> tuple[nn.Module, nn.Module]:
    model = tiny_models.language_model()
    model.save_pretrained(folder)
    args = SFTConfig(output_dir=str(folder), **SETTINGS)
    trainer = SFTTrainer(
        str(folder), args, train_dataset=texts(), processing_class=tiny.tokenizer()
    )
    return model, trainer.model


def in_reward(folder: Path) -> tuple[nn.Module, nn.Module]:
    model = reward_model()
    model.save_pretrained(folder)
    args = RewardConfig(output_dir=str(folder), **SETTINGS)
    trainer = RewardTrainer(
        str(folder), args, train_dataset=pairs(), processing_class=tiny.tokenizer()
    )
    return model, trainer.model


@pytest.mark.usefixtures("misaligned_loading")
@pytest.mark.parametrize("door", [with_value_head_seq2seq, in_sft, in_reward])
def test_what_is_loaded_is_copied_into_storage_of_its_own(door: Any, tmp_path: Path) -> None:
    model, loaded = door(tmp_path)
    assert_same_weights(loaded, model)
    assert aligned(loaded)


@pytest.mark.filterwarnings("ignore:output_dir .* holds checkpoints later than")
@pytest.mark.usefixtures("misaligned_loading")
@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_training_from_a_folder_goes_on_bit_by_bit(kind: str, tmp_path: Path) -> None:
    """Those of the first run were loaded off a boundary, those of the second were not."""
    base = tmp_path / "base"
    (tiny_models.language_model() if kind == "sft" else reward_model()).save_pretrained(base)
    Trainer, Config, data = {
        "sft": (SFTTrainer, SFTConfig, texts()),
        "reward": (RewardTrainer, RewardConfig, pairs()),
    }[kind]
    settings = {**SETTINGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    args = Config(output_dir=str(tmp_path / "run"), **settings)
    straight, resumed = (
        Trainer(str(base), args, train_dataset=data, processing_class=tiny.tokenizer())
        for _ in range(2)
    )
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(resumed.model, straight.model)


def test_a_step_learns_the_same_wherever_weights_lie() -> None:
    usual, other = make_trainer(), make_trainer()
    misaligned(other.model)
    misaligned(other.ref_model, shift=2)
    for seed in range(2):
        wanted, found = (x.step(**make_batch(seed=seed)) for x in (usual, other))
        for key in ("objective/kl", "ppo/loss/total", "ppo/val/vpred"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-4, abs=1e-5), key
    assert_learned_alike(parameters(other), parameters(usual), tolerance=2e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_rollouts_figures_are_the_same_wherever_weights_lie(family: str) -> None:
    prompts, params = tiny_models.prompts(3, 7, 5), SamplingParams(max_new_tokens=6, seed=0)
    usual, other = (
        RolloutEngine(model, tiny.tokenizer()).generate(prompts, params)
        for model in (tiny_models.policy(family), misaligned(tiny_models.policy(family), shift=2))
    )
    for name in ("logprobs", "entropies", "values"):
        for a, b in zip(getattr(usual, name), getattr(other, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_golden_figures_hold_wherever_weights_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    models = GoldenCase.models
    monkeypatch.setattr(
        GoldenCase, "models", lambda case: [misaligned(model) for model in models(case)]
    )
    case = test_golden.read_case(CASES / "minibatch_gpt2.json")
    run = test_golden.play(case, "left")
    assert not aligned(run.case.models()[0])
    assert not list(test_golden.wrong_statistics(run))


def test_a_trunk_that_lies_elsewhere_still_gives_its_own_activations() -> None:
    """What is kept of a trunk is what it would give again, but for rounding."""
    from fastrl.learn.ref_model.trunk_cache import Budget
    from tests.ref_model.test_trunk_cache import LENGTHS, trunk_cache

    model = misaligned(deep("gpt2"), shift=2)
    kept, again = (trunk_cache(model, LENGTHS, Budget(size)) for size in (1 << 20, 0))
    for i, n in enumerate(LENGTHS):
        expected = again.padded([i], False)[0]
        torch.testing.assert_close(kept.padded(range(len(LENGTHS)), False)[i, :n], expected)
