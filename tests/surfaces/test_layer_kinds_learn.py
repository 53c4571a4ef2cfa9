"""Models of every kind of layer learn by every trainer without padding: one step each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

import fastrl
from fastrl.models.routing import why_not_followed
from tests import tiny_models
from tests.golden import tiny

FAMILIES = (
    *tiny_models.KINDS,
    *tiny_models.MORE_KINDS,
    *tiny_models.OF_ATTENTION,
    *("llama", "mistral", "qwen3", "gemma3", "phi3", "granite"),
)
_TEXTS = ["w5 w6 w7 w8", "w4 w9", "w6 w5 w3", "w8"]


def _arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }


def _loss_of_routers(model: Any) -> dict[str, float]:
    """Some versions of transformers compute none for some families."""
    return {} if why_not_followed(model) is None else {"router_aux_loss_coef": 0.0}


def _scores(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(set(ids)) + ids[0]) for ids in completion_ids]


def grpo(model: Any, folder: Path) -> None:
    args = fastrl.GRPOConfig(
        **_arguments(folder), **_loss_of_routers(model), num_generations=2, max_completion_length=5
    )
    rows = Dataset.from_list([{"prompt": text} for text in _TEXTS])
    fastrl.GRPOTrainer(model, _scores, args, rows, processing_class=tiny.tokenizer()).train()


def dpo(model: Any, folder: Path) -> None:
    pairs = [{"prompt": x, "chosen": " w5 w6", "rejected": " w9"} for x in _TEXTS]
    fastrl.DPOTrainer(
        model,
        args=fastrl.DPOConfig(**_arguments(folder), **_loss_of_routers(model), padding_free=True),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tiny.tokenizer(),
    ).train()


def sft(model: Any, folder: Path) -> None:
    fastrl.SFTTrainer(
        model,
        args=fastrl.SFTConfig(**_arguments(folder), max_length=16),
        train_dataset=Dataset.from_list([{"text": text} for text in _TEXTS]),
        processing_class=tiny.tokenizer(),
    ).train()


def ppo(model: Any, folder: Path) -> None:
    config = fastrl.PPOConfig(batch_size=4, mini_batch_size=2, ppo_epochs=1, learning_rate=0.1)
    policy = fastrl.AutoModelForCausalLMWithValueHead(model)
    trainer = fastrl.PPOTrainer(config, policy, tokenizer=tiny.tokenizer())
    queries = tiny_models.prompts(4, 2, 5, 3)
    responses = trainer.generate(queries, max_new_tokens=5, return_prompt=False)
    trainer.step(queries, responses, [torch.tensor(float(i)) for i in range(4)])


@pytest.mark.parametrize("learn", [grpo, dpo, sft, ppo])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_taken_without_padding(
    family: str, learn: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    model = tiny_models.language_model(family)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        learn(model, tmp_path)
    assert not [str(w.message) for w in said if "padded" in str(w.message)]
    assert not [str(w.message) for w in said if "model.generate" in str(w.message)]
    moved = [name for name, x in model.named_parameters() if not torch.equal(x, before[name])]
    assert moved
    assert all(x.isfinite().all() for x in model.parameters())
