"""Tiny models, data and trainers that learn from examples."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from fastrl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from tests import tiny_models
from tests.golden import tiny

disable_progress_bars()
ONE_STEP: dict[str, Any] = {
    "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 1,
    "save_strategy": "no", "report_to": None, "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip
SETTINGS: dict[str, Any] = {**ONE_STEP, "learning_rate": 1e-3}
# One step changes every weight by its gradient.
GRADIENT_STEP: dict[str, Any] = {
    "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
}  # fmt: skip


def text(rng: random.Random, length: int) -> str:
    return " ".join(f"w{rng.randrange(3, 97)}" for _ in range(length))


def texts(count: int = 8, seed: int = 0, low: int = 3, high: int = 12) -> Dataset:
    """Ragged texts of words."""
    rng = random.Random(seed)
    return Dataset.from_list([{"text": text(rng, rng.randint(low, high))} for _ in range(count)])


def pairs(count: int = 8, seed: int = 0, **columns: Callable[[int], Any]) -> Dataset:
    """Ragged pairs with a prompt, where the better one has a w9 in it; more columns by index."""
    rng = random.Random(seed)
    rows = [
        {
            "prompt": text(rng, rng.randint(1, 4)) + " ",
            "chosen": text(rng, rng.randint(1, 6)) + " w9",
            "rejected": text(rng, rng.randint(1, 9)),
            **{name: make(i) for name, make in columns.items()},
        }
        for i in range(count)
    ]
    return Dataset.from_list(rows)


@torch.no_grad()
def reward_model(family: str = "roberta", **changes: Any) -> PreTrainedModel:
    """A classifier with one label, weights by `tiny.rule`, without dropout."""
    if family == "roberta":
        config = RobertaConfig(
            vocab_size=tiny.VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=changes.pop("positions", 64),
            type_vocab_size=1,
            bos_token_id=tiny.BOS,
            eos_token_id=tiny.EOS,
            pad_token_id=tiny.PAD,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **{"num_labels": 1, **changes},
        )
        model: PreTrainedModel = RobertaForSequenceClassification(config)
    else:
        config = tiny_models.config(family, **{"num_labels": 1, **changes})
        model = AutoModelForSequenceClassification.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.copy_(tiny.rule(name, tuple(parameter.shape)))
    return model.eval()


Make = Callable[..., Any]


def _made(kind: Any, config: Any, folder: Path, model: Any, data: Any, settings: Any) -> Any:
    given = {k: settings.pop(k) for k in _TRAINERS_OWN if k in settings}
    args = config(**{"output_dir": str(folder), **SETTINGS, **settings})
    given = {"processing_class": tiny.tokenizer(), **given}
    return kind(model, args, train_dataset=data, **given)


def reward(folder: Path, model: Any = None, data: Any = None, **settings: Any) -> RewardTrainer:
    model = reward_model() if model is None else model
    data = pairs() if data is None else data
    return _made(RewardTrainer, RewardConfig, folder, model, data, settings)


def sft(folder: Path, model: Any = None, data: Any = None, **settings: Any) -> SFTTrainer:
    model = tiny_models.language_model() if model is None else model
    data = texts() if data is None else data
    return _made(SFTTrainer, SFTConfig, folder, model, data, settings)


@pytest.fixture
def make_reward(tmp_path: Path) -> Make:
    return partial(reward, tmp_path)


@pytest.fixture
def make_sft(tmp_path: Path) -> Make:
    return partial(sft, tmp_path)


_TRAINERS_OWN = (
    "eval_dataset", "processing_class", "tokenizer", "data_collator", "compute_metrics",
    "peft_config", "formatting_func", "callbacks",
)  # fmt: skip


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_moved_by(
    before: dict[str, torch.Tensor], model: Any, gradients: dict[str, torch.Tensor]
) -> None:
    """The weights are those before less their exact gradients, [float64]."""
    assert gradients
    for name, after in model.named_parameters():
        moved = (before[name] - after.detach()).double()
        # Weights near 1 are rounded twice, by 6e-8 each; sums in fp32 are off by some 1e-6.
        torch.testing.assert_close(moved, gradients[name], rtol=2e-5, atol=1e-6, msg=name)
