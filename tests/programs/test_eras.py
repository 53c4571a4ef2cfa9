"""Settings of other versions: each has its effect, one warning, or an error."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser

import fastrl
from fastrl.eras import ERAS, IDLE, KEPT, REFUSED, RENAMED, eras_of, flags_taken
from tests.trl import test_dpo, test_kto
from tests.trl.test_online import make

CONFIGS = sorted(set(ERAS) - {"TrainingArguments"})
OFF: dict[str, Any] = {"use_cpu": True, "report_to": "none"}


def config(name: str, folder: Path, **given: Any) -> Any:
    own = {} if name == "ModelConfig" else {"output_dir": str(folder), **OFF}
    return getattr(fastrl, name)(**{**own, **given})


@pytest.mark.parametrize("name", CONFIGS)
def test_no_name_is_declared_and_every_todays_one_is(name: str) -> None:
    kind = getattr(fastrl, name)
    declared = {field.name for field in dataclasses.fields(kind) if field.init}
    for old, era in eras_of(kind).items():
        if era.kind == RENAMED:
            assert era.today in declared
        assert old not in declared or old in (era.today, "use_liger_kernel", "truncation_mode")


RENAMES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SFTConfig", {"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch"}),
    ("SFTConfig", {"warmup_ratio": 0.25}, {"warmup_steps": 0.25}),
    ("SFTConfig", {"warmup_ratio": 0.25, "warmup_steps": 3}, {"warmup_steps": 3}),
    ("SFTConfig", {"group_by_length": True}, {"train_sampling_strategy": "group_by_length"}),
    ("SFTConfig", {"max_seq_length": 7}, {"max_length": 7}),
    ("SFTConfig", {"no_cuda": True, "use_cpu": False}, {"use_cpu": True}),
    ("RewardConfig", {"adafactor": True}, {"optim": "adafactor"}),
    ("RewardConfig", {"optim": "adamw_hf"}, {"optim": "adamw_torch"}),
    ("DPOConfig", {"per_gpu_train_batch_size": 3}, {"per_device_train_batch_size": 3}),
    ("KTOConfig", {"push_to_hub_model_id": "a/b"}, {"hub_model_id": "a/b"}),
    ("GRPOConfig", {"top_k": -1}, {"top_k": 0}),
    ("GRPOConfig", {"wandb_log_unique_prompts": True}, {"log_unique_prompts": True}),
    ("RLOOConfig", {"rloo_k": 4, "kl_coef": 0.5}, {"num_generations": 4, "beta": 0.5}),
    ("RLOOConfig", {"response_length": 9, "cliprange": 0.3},
     {"max_completion_length": 9, "epsilon": 0.3}),
    ("RLOOConfig", {"num_ppo_epochs": 3, "num_mini_batches": 2},
     {"num_iterations": 3, "steps_per_generation": 2}),
    ("ModelConfig", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "now"), RENAMES, ids=str)
def test_old_names_mean_todays(
    name: str, old: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match="settings of other versions") as said:
        made = config(name, tmp_path, **old)
    assert len(said) == 1
    assert [str(getattr(getattr(made, x), "value", getattr(made, x))) for x in now] == [
        str(x) for x in now.values()
    ]
    plain = config(name, tmp_path, **{k: v for k, v in now.items() if k in now})
    if hasattr(plain, "to_dict"):
        assert made.to_dict() == plain.to_dict()


def test_programs_read_what_they_have_set(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="settings of other versions"):
        made = config("SFTConfig", tmp_path, max_seq_length=5, group_by_length=True)
    assert (made.max_seq_length, made.group_by_length, made.evaluation_strategy) == (5, True, "no")
    made.max_length = 6
    assert made.max_seq_length == 6
    assert made.overwrite_output_dir is False
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = made.nonsense


@pytest.mark.parametrize("name", CONFIGS)
def test_what_changes_nothing_is_said_and_what_cannot_be_is_refused(
    name: str, tmp_path: Path
) -> None:
    for old, era in eras_of(getattr(fastrl, name)).items():
        if era.kind == IDLE:
            config(name, tmp_path, **{old: era.default})  # as nobody has set it
            with pytest.warns(UserWarning, match=f"{old}='other' .changes nothing"):
                config(name, tmp_path, **{old: "other"})
        elif era.kind == REFUSED:
            config(name, tmp_path, **{old: era.default})
            with pytest.raises(ValueError, match=f"{name} has no {old}='other'"):
                config(name, tmp_path, **{old: "other"})


def test_two_values_of_one_setting_and_names_of_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_seq_length=5 and max_length=6, which are one"):
        config("SFTConfig", tmp_path, max_seq_length=5, max_length=6)
    with pytest.raises(TypeError, match=r"no setting 'max_lenght': did you mean 'max_length'\?"):
        config("SFTConfig", tmp_path, max_lenght=5)


@pytest.mark.parametrize("bad", [0, -1, True, "4", 2.5])
def test_lengths_are_counts(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_prompt_length must be a whole number of at least 1"):
        config("GRPOConfig", tmp_path, max_prompt_length=bad)


def test_tensorboard_writes_where_logging_dir_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    with pytest.warns(UserWarning, match="logging_dir"):
        config("SFTConfig", tmp_path, logging_dir=str(tmp_path / "logs"))
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "logs")


@pytest.mark.filterwarnings("ignore:settings of other versions")
def test_prompts_keep_their_last_tokens_and_completions_their_first(tmp_path: Path) -> None:
    whole = test_dpo.trainer(tmp_path / "whole").train_dataset
    cuts: dict[str, Any] = {"max_prompt_length": 2, "max_completion_length": 3}
    for row, cut in zip(
        whole, test_dpo.trainer(tmp_path / "dpo", **cuts).train_dataset, strict=True
    ):
        assert cut["prompt_ids"] == row["prompt_ids"][-2:]
        assert cut["chosen_ids"] == row["chosen_ids"][:3]
        assert cut["rejected_ids"] == row["rejected_ids"][:3]
    assert any(len(row["chosen_ids"]) > 3 for row in whole)
    for row in test_kto.trainer(tmp_path / "kto", **cuts).train_dataset:
        assert len(row["prompt_ids"]) <= 2
        assert len(row["completion_ids"]) <= 3


@pytest.mark.filterwarnings("ignore:settings of other versions")
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_online_prompts_keep_their_last_tokens(kind: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, kind, max_prompt_length=2, ledger=True)
    trainer.train()
    from fastrl.run.ledger import read_ledger

    rows = read_ledger(tmp_path / "ledger").to_pylist()
    assert {len(row["prompt_ids"]) for row in rows} == {2}


@pytest.mark.filterwarnings("ignore:(settings of other versions|beta of DPOTrainer)")
def test_what_is_honoured_is_kept_and_compared(tmp_path: Path) -> None:
    """By keywords of old trainers, in the settings that are written down, and on resuming."""
    args = config("DPOConfig", tmp_path, max_prompt_length=2)
    assert args.to_dict()["max_prompt_length"] == 2
    whole = test_dpo.trainer(tmp_path)
    given = {"train_dataset": test_dpo.pairs(test_dpo.PAIRS), "beta": 0.5}
    cut = fastrl.DPOTrainer(
        whole.model, args=args, processing_class=whole.processing_class, **given
    )
    assert max(len(row["prompt_ids"]) for row in cut.train_dataset) == 2
    run = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make(tmp_path, "grpo", **run, max_prompt_length=2).train()
    other = make(tmp_path, "grpo", **{**run, "max_steps": 3}, max_prompt_length=3)
    with pytest.warns(UserWarning, match="settings differ .*max_prompt_length: 2 → 3"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_flags_of_the_program_are_its_own(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Own:
        max_seq_length: int = 3

    kinds = [Own, fastrl.SFTConfig]
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--max_seq_length", "9"]
    own, settings = HfArgumentParser(kinds).parse_args_into_dataclasses(words)
    assert (own.max_seq_length, settings.max_length) == (9, 1024)
    with flags_taken(kinds, words) as rest:
        assert rest == words
    with flags_taken([fastrl.SFTConfig], [*words, "--warmup_ratio=0.5", "--no_cuda"]) as rest:
        assert rest == words[:3]
        with pytest.warns(UserWarning, match="max_seq_length=9.*warmup_ratio=0.5.*no_cuda=True"):
            made = fastrl.SFTConfig(str(tmp_path), report_to="none")
    assert (made.max_length, made.warmup_steps, made.use_cpu) == (9, 0.5, True)
    assert KEPT == "kept"


def test_flags_without_a_value_are_true(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--gradient_checkpointing", "--bf16"]
    for kind in (fastrl.SFTConfig, fastrl.DPOConfig, fastrl.GRPOConfig):
        (made,) = HfArgumentParser(kind).parse_args_into_dataclasses(words)
        assert (made.gradient_checkpointing, made.bf16) == (True, True)


def test_code_of_a_model_is_run_only_if_that_is_said_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTRL_TRUST_REMOTE_CODE", raising=False)
    assert fastrl.ModelConfig().trust_remote_code is False
    with pytest.raises(ValueError, match="trust_remote_code runs Python code that comes with"):
        fastrl.ModelConfig(trust_remote_code=True)
    monkeypatch.setenv("FASTRL_TRUST_REMOTE_CODE", "1")
    with pytest.warns(UserWarning, match="trust_remote_code=True"):
        assert fastrl.ModelConfig(trust_remote_code=True).trust_remote_code is True
