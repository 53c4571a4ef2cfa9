"""Models of every kind of layer learn by every trainer without padding: one step each."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

import fastrl
from fastrl.data.padding_free import PaddingFree
from fastrl.models.adapter_targets import with_targets
from fastrl.models.routing import why_not_followed
from tests import tiny_models
from tests.golden import tiny

FAMILIES = (
    *tiny_models.KINDS, *tiny_models.MORE_KINDS, *tiny_models.OF_ATTENTION,
    *("llama", "mistral", "qwen3", "gemma3", "phi3", "granite"),
)  # fmt: skip
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


def _plain(model: Any) -> Any:
    return fastrl.AutoModelForCausalLMWithValueHead(model)


def _checkpointing(model: Any) -> Any:
    policy = _plain(model)
    policy.activation_checkpointing_enable()
    return policy


def _adapter(model: Any) -> Any:
    torch.manual_seed(1)
    config = with_targets(
        model, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.0)
    )
    return fastrl.AutoModelForCausalLMWithValueHead.from_pretrained(model, peft_config=config)


_SETTINGS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "activation checkpointing": (_checkpointing, {}),
    "an adapter": (_adapter, {}),
    "passes of few tokens": (_plain, {"micro_batch_tokens": 30}),
    "a shared trunk": (_plain, {"num_shared_layers": 1}),
}


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
# PEFT knows of experts, which tiny DeepSeeks have not; responses by chance are unlikely.
@pytest.mark.filterwarnings("ignore:target_parameters=.* were set")
@pytest.mark.filterwarnings("ignore:.* keys did not match any targeted module")
@pytest.mark.filterwarnings("ignore:the KL estimate is negative")
@pytest.mark.parametrize("setting", _SETTINGS)
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "nemotron_h", "lfm2", "deepseek_v3"])
def test_an_update_is_that_of_padded_batches(family: str, setting: str) -> None:
    queries = [x for x in tiny_models.prompts(7, 3, seed=3) for _ in range(4)]
    responses = tiny_models.prompts(5, 2, 9, 4, 6, 1, 3, 8, seed=4)
    wrap, given = _SETTINGS[setting]
    shape = {"linear_key_head_dim": 64} if family == "qwen3_5" else {}
    learned = []
    for packed in (True, False):
        policy = wrap(tiny_models.language_model(family, **shape))
        trained = [p for p in policy.parameters() if p.requires_grad]
        trainer = fastrl.PPOTrainer(
            fastrl.PPOConfig(
                batch_size=8, mini_batch_size=8, ppo_epochs=1, advantage="grpo", group_size=4,
                kl_in="loss", init_kl_coef=0.1, padding_free=packed, **given,
            ),
            policy,
            tokenizer=tiny.tokenizer(),
            optimizer=torch.optim.SGD(trained, lr=1.0),
        )  # fmt: skip
        assert isinstance(trainer.padding, PaddingFree) == packed
        before = [p.detach().clone() for p in trained]
        trainer.step(queries, responses, [torch.tensor(float(i % 3)) for i in range(8)])
        moved = [(p.detach() - x).flatten() for p, x in zip(trained, before, strict=True)]
        learned.append(torch.cat(moved))
    found, expected = learned
    assert expected.norm() > 0.1
    assert (found - expected).norm() <= 1e-5 * expected.norm()
