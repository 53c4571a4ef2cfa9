"""Arguments, tokenizers and adapters, under their old names and today's."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

import fastrl
from fastrl import AutoModelForCausalLMWithValueHead, RewardConfig, SFTConfig
from fastrl.models.load import with_adapter
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import Make, pairs, reward_model, texts, weights


def test_all_names_are_exported() -> None:
    for name in fastrl.trainers.__all__:
        assert getattr(fastrl, name) is getattr(fastrl.trainers, name)
        assert name in fastrl.__all__


def test_old_names_of_arguments_mean_the_new_ones(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="evaluation_strategy='epoch' .now eval_strategy="):
        args = SFTConfig(
            output_dir=str(tmp_path), evaluation_strategy="epoch", max_seq_length=7, report_to=None
        )
    assert args.eval_strategy == "epoch"
    assert args.max_length == 7
    assert args.report_to == []


def test_the_command_line_reads_every_setting(tmp_path: Path) -> None:
    line = ["--output_dir", str(tmp_path), "--packing", "--max_length", "9"]
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses(
        [*line, "--model_init_kwargs", '{"dtype": "bfloat16"}']
    )
    assert (args.packing, args.max_length) == (True, 9)
    assert args.model_init_kwargs == {"dtype": "bfloat16"}
    (args,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses(
        [*line[:2], "--center_rewards_coefficient", "0.1"]
    )
    assert args.center_rewards_coefficient == 0.1


def test_data_that_make_no_batch_are_refused(make_sft: Make, make_reward: Make) -> None:
    """No step would be taken, and the run end as if it had learned."""
    for make, data in ((make_sft, texts(3)), (make_reward, pairs(3))):
        trainer = make(data=data, dataloader_drop_last=True)
        with pytest.raises(ValueError, match=r"3 examples make no batch of 4, and"):
            trainer.train()


@pytest.mark.parametrize(("settings", "said"), [
    ({"max_length": 0}, "max_length must be at least 1"),
    ({"label_smoothing_factor": 0.1}, "does not smooth labels"),
    ({"tokenizer": tiny.tokenizer()}, "not both"),
    ({"processing_class": None}, "pass the tokenizer as processing_class"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    make_sft: Make, make_reward: Make, settings: dict[str, Any], said: str
) -> None:
    for make in (make_sft, make_reward):
        with pytest.raises(ValueError, match=said):
            make(**settings)


def test_a_tokenizer_without_a_pad_token_says_how_to_set_one(
    make_sft: Make, make_reward: Make
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    for make in (make_sft, make_reward):
        with pytest.raises(ValueError, match=r"set tokenizer\.pad_token = tokenizer\.eos_token"):
            make(processing_class=tokenizer)


def test_a_model_by_its_path_brings_its_tokenizer(make_sft: Make, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    tiny_models.language_model(dtype=torch.bfloat16).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    for path in (folder, str(folder)):
        trainer = make_sft(path, processing_class=None)
        assert trainer.processing_class.pad_token == "<eos>"
        assert trainer.model.dtype == torch.float32
    kept = make_sft(str(folder), model_init_kwargs={"dtype": torch.bfloat16})
    assert kept.model.dtype == torch.bfloat16


def test_adapters_train_and_what_is_below_them_does_not(make_sft: Make, make_reward: Make) -> None:
    trainer = make_sft(peft_config=tiny_models.lora(), max_steps=2)
    before = weights(trainer.model)
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in name for name in moved)
    trainer = make_reward(reward_model("gpt2"), peft_config=tiny_models.lora(task_type="SEQ_CLS"))
    before = weights(trainer.model)
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any("lora_" in name for name in moved)
    assert any("score.modules_to_save" in name for name in moved)


def test_new_weights_are_those_of_the_seed(
    make_sft: Make, make_reward: Make, tmp_path: Path
) -> None:
    """Whatever was drawn before; a reward model's head and its original, too."""
    folder = tmp_path / "model"
    tiny_models.language_model().save_pretrained(folder)

    def made(seed: int) -> list[dict[str, Any]]:
        torch.manual_seed(next(drawn))
        adapter = tiny_models.lora(init_lora_weights="gaussian")
        sft = make_sft(peft_config=adapter, seed=seed)
        dpo = fastrl.DPOTrainer(
            tiny_models.language_model(),
            args=fastrl.DPOConfig(str(tmp_path), seed=seed, use_cpu=True, report_to="none"),
            train_dataset=pairs(),
            processing_class=tiny.tokenizer(),
            peft_config=adapter,
        )
        reward = make_reward(
            str(folder), peft_config=tiny_models.lora(task_type="SEQ_CLS"), seed=seed
        )
        return [weights(x.model) for x in (sft, dpo, reward)]

    drawn = iter(range(3))
    first, again, other = made(0), made(0), made(1)
    for kind in range(3):
        assert all(torch.equal(x, again[kind][name]) for name, x in first[kind].items())
        assert any(not torch.equal(x, other[kind][name]) for name, x in first[kind].items())


def test_a_reward_model_resumes_whatever_its_first_head_was(
    make_reward: Make, tmp_path: Path
) -> None:
    """PEFT keeps the head that it trains a copy of."""

    def made(folder: str) -> Any:
        model = reward_model("gpt2")
        with torch.no_grad():
            model.score.weight.normal_()
        saves: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        saves |= {"output_dir": str(tmp_path / folder)}
        return make_reward(model, peft_config=tiny_models.lora(task_type="SEQ_CLS"), **saves)

    made("whole").train()
    resumed = made("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state.global_step == 4


@pytest.mark.parametrize("kind", [None, "CAUSAL_LM", "TOKEN_CLS"])
def test_an_adapter_of_any_task_trains_the_reward_layer(
    make_reward: Make, kind: str | None
) -> None:
    config = tiny_models.lora(task_type=kind)
    told = pytest.warns(UserWarning, match=f"task_type={kind} is taken as SEQ_CLS")
    with told if kind else contextlib.nullcontext():
        trainer = make_reward(reward_model("gpt2"), peft_config=config)
    assert trainer.model.base_model.model.score.modules_to_save["default"].weight.requires_grad
    assert trainer.model.peft_config["default"].task_type == "SEQ_CLS"
    assert config.task_type == kind


@pytest.mark.parametrize("flag", ["is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit"])
def test_quantised_models_are_prepared_for_their_adapter(monkeypatch: Any, flag: str) -> None:
    import peft

    calls = []

    def prepare(model: Any, **options: Any) -> Any:
        calls.append(options)
        return model

    monkeypatch.setattr(peft, "prepare_model_for_kbit_training", prepare)
    args = SimpleNamespace(gradient_checkpointing=True, gradient_checkpointing_kwargs=None)
    plain = tiny_models.language_model()
    with_adapter(plain, tiny_models.lora(), args)
    assert calls == []
    quantised = tiny_models.language_model()
    setattr(quantised, flag, True)
    args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    model = with_adapter(quantised, tiny_models.lora(), args)
    assert calls == [
        {
            "use_gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    ]
    assert hasattr(model, "peft_config")
    wrapped = tiny_models.language_model()
    setattr(wrapped, flag, True)
    AutoModelForCausalLMWithValueHead.from_pretrained(wrapped, peft_config=tiny_models.lora())
    assert calls[1:] == [{"use_gradient_checkpointing": False}]


def test_neftune_noise_reaches_the_embeddings_in_training_alone(make_sft: Make) -> None:
    from fastrl import SFTTrainer

    changed = []
    for alpha in (None, 5.0):
        model = tiny_models.language_model()
        trainer = make_sft(model, texts(4), eval_dataset=texts(4), neftune_noise_alpha=alpha)
        clean = trainer.evaluate()["eval_loss"]
        changed.append(trainer.train().training_loss - clean)
    assert abs(changed[0]) < 1e-5
    assert abs(changed[1]) > 1e-3
    classic = SFTTrainer(
        tiny_models.language_model(),
        trainer.args,
        train_dataset=texts(4),
        tokenizer=tiny.tokenizer(),
        neftune_noise_alpha=1.0,
    )
    assert classic.neftune_noise_alpha == 1.0
