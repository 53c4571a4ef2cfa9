"""SFT and reward modelling end, bit for bit, as if they had not been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from fastrl.run.metric_means import MetricMeans
from fastrl.run.processes import OneProcess
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import assert_resumes, with_dropout
from tests.trainers.conftest import SETTINGS, Make, pairs, reward_model, texts

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
# Logs lie between the checkpoints, and every second of these between two logs.
SAVING: dict[str, Any] = {
    **SETTINGS,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 1,
    "logging_steps": 2,
}
# By case: settings, and the numbers of checkpoints, from 0. An epoch of 14 texts has seven
# mini-batches: with two or three in a step, its last step has fewer, and an evaluation follows.
SFT = {
    "accumulation": ({"gradient_accumulation_steps": 2}, (0, 3)),
    "a short last step": ({"gradient_accumulation_steps": 3}, (1, 2)),
    "packing": ({"packing": True}, (2, 3)),
    "an adapter": ({"peft_config": tiny_models.lora()}, (2,)),
    "weights in bf16": ({"dtype": torch.bfloat16}, (0, 3)),
    "by length": ({"train_sampling_strategy": "group_by_length"}, (1,)),
}


@pytest.mark.parametrize("name", SFT)
def test_sft_goes_on_from_any_checkpoint(name: str, tmp_path: Path) -> None:
    settings, steps = SFT[name]
    given = dict(settings)
    peft_config = given.pop("peft_config", None)
    dtype = given.pop("dtype", torch.float32)

    def make(folder: Path) -> SFTTrainer:
        return SFTTrainer(
            with_dropout(tiny_models.language_model().to(dtype)),
            SFTConfig(
                output_dir=str(folder),
                **{**SAVING, "per_device_train_batch_size": 2, "max_length": 20},
                eval_strategy="epoch",
                **given,
            ),
            train_dataset=texts(14),
            eval_dataset=texts(4, seed=1),
            processing_class=tiny.tokenizer(),
            peft_config=peft_config,
        )

    assert_resumes(make, tmp_path, steps)


@pytest.mark.parametrize("peft", [False, True])
def test_reward_modelling_goes_on_from_any_checkpoint(peft: bool, tmp_path: Path) -> None:
    def make(folder: Path) -> RewardTrainer:
        return RewardTrainer(
            with_dropout(reward_model("gpt2")),
            RewardConfig(
                output_dir=str(folder),
                **{**SAVING, "per_device_train_batch_size": 3, "num_print_samples": 0},
                gradient_accumulation_steps=1 + peft,
                eval_strategy="steps",
                eval_steps=3,
            ),
            train_dataset=pairs(10),
            eval_dataset=pairs(4, seed=1),
            processing_class=tiny.tokenizer(),
            peft_config=tiny_models.lora(task_type="SEQ_CLS") if peft else None,
        )

    assert_resumes(make, tmp_path, (2, 3))


def test_a_checkpoint_of_an_earlier_version_keeps_the_tokens_of_its_run(
    make_sft: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_steps": 4}
    with monkeypatch.context() as patched:
        # As it was written then.
        patched.setattr(
            MetricMeans,
            "state",
            lambda self: {"sums": {}, "least": {}, "most": {}, "last": {}, "tokens": _tokens(self)},
        )
        whole = make_sft(**settings)
        whole.train()
    resumed = make_sft(output_dir=str(tmp_path / "resumed"), **settings)
    with pytest.warns(UserWarning, match="is of an earlier version: the next log is without the"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.log_history[-1]["num_tokens"] == _tokens(whole._metrics["train"]) > 0
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def _tokens(metrics: MetricMeans) -> float:
    return metrics.totals(OneProcess())["num_tokens"]
