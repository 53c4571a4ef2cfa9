"""A step of batches that are not of one size weighs each of its examples the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import GRADIENT_STEP, SETTINGS, pairs, reward_model, texts, weights

ROWS = 5
_RATED = [
    {"prompt": f"w5 w{6 + i} ", "completion": f"w{7 + i} w9 " + "w3 " * i, "label": i % 2 == 0}
    for i in range(ROWS)
]
DOORS: dict[str, tuple[Any, Any, Dataset, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, texts(ROWS), {}),
    "reward": (RewardTrainer, RewardConfig, pairs(ROWS), {}),
    "dpo": (DPOTrainer, DPOConfig, pairs(ROWS), {}),
    "kto": (
        KTOTrainer, KTOConfig, Dataset.from_list(_RATED), {"loss_type": "apo_zero_unpaired"},
    ),
}  # fmt: skip


def one_epoch(folder: Path, door: str, size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of an epoch's only step, and the weights behind it."""
    trainer, config, rows, own = DOORS[door]
    batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": -(-ROWS // size)}
    settings = {**SETTINGS, **GRADIENT_STEP, "max_steps": -1, "num_train_epochs": 1, **batches}
    args = config(str(folder), **settings, **own)
    reward = door == "reward"
    model = reward_model("llama") if reward else tiny_models.language_model("llama")
    trainer = trainer(model, args=args, train_dataset=rows, processing_class=tiny.tokenizer())
    loss = trainer.train().training_loss
    assert trainer.state.global_step == 1
    return loss, weights(model)


@pytest.mark.parametrize("door", DOORS)
def test_the_last_batch_of_an_epoch_weighs_as_many_as_it_has(door: str, tmp_path: Path) -> None:
    loss, expected = one_epoch(tmp_path, door, ROWS)
    found, after = one_epoch(tmp_path, door, 2)
    assert found == pytest.approx(loss, rel=1e-5)
    for name, x in expected.items():
        torch.testing.assert_close(after[name], x, rtol=0, atol=2e-6, msg=name)
