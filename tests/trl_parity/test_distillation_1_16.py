"""DistillationTrainer learns what TRL 1.16's does from the same responses."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from fastrl import DistillationConfig, DistillationTrainer
from tests import tiny_models
from tests.golden import tiny

if sys.version_info < (3, 11):
    pytest.skip("TRL 1.16 needs Python 3.11", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", tiny_models.PEFT_WARNING)
STEPS = 3
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0,
    "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
    "logging_steps": 1, "shuffle_dataset": False, "gradient_checkpointing": False,
    "max_completion_length": 8, "seed": 3,
}  # fmt: skip


def completion(prompt: list[int]) -> list[int]:
    """A response by rule, of 3 to 7 tokens."""
    length = 3 + sum(prompt) % 5
    words = [3 + (7 * sum(prompt) + 11 * i) % 90 for i in range(length - 1)]
    return [*words, tiny.EOS]


def written(response: list[int]) -> list[int]:
    """1 for tokens of the policy's own: a tool wrote the second and third."""
    return [0 if i in (1, 2) else 1 for i in range(len(response))]


def data() -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{3 + i} w{9 + 2 * i} w{5 + i}" for i in range(12)]})


def teacher() -> Any:
    torch.manual_seed(1)
    return tiny_models.language_model("qwen2", hidden_size=24, num_attention_heads=6)


def theirs(folder: Path, tools: bool, peft_config: Any, settings: dict[str, Any]) -> Any:
    from trl import DistillationConfig as Config
    from trl import DistillationTrainer as Trainer

    class Answered(Trainer):
        def _generate(self, prompts: list) -> Any:
            ids = [self.processing_class(prompt)["input_ids"] for prompt in prompts]
            responses = list(map(completion, ids))
            mask = list(map(written, responses)) if tools else None
            return ids, responses, mask, None, []

    return Answered(
        tiny_models.language_model("qwen2"),
        teacher(),
        args=Config(output_dir=str(folder), **COMMON, **settings),
        train_dataset=data(),
        processing_class=tiny.tokenizer("left"),
        peft_config=peft_config,
    )


def ours(folder: Path, tools: bool, peft_config: Any, settings: dict[str, Any]) -> Any:
    def answer(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        responses = list(map(completion, ids))
        masks = {"env_mask": list(map(written, responses))} if tools else {}
        return {"prompt_ids": ids, "completion_ids": responses, "logprobs": None, **masks}

    return DistillationTrainer(
        tiny_models.language_model("qwen2"),
        teacher(),
        args=DistillationConfig(output_dir=str(folder), **COMMON, **settings),
        train_dataset=data(),
        processing_class=tiny.tokenizer("left"),
        peft_config=peft_config,
        rollout_func=answer,
    )


@pytest.mark.parametrize(("beta", "temperature", "tools", "lora", "accumulated"), [
    (0.0, 1.0, False, False, 2),
    (0.3, 0.7, True, False, 2),
    (0.5, 1.0, False, True, 2),
    (1.0, 0.7, False, False, 2),
    (1.0, 1.0, True, True, 1),
    (0.0, 0.7, True, True, 2),
])  # fmt: skip
def test_losses_and_weights_are_trls(
    beta: float, temperature: float, tools: bool, lora: bool, accumulated: int, tmp_path: Path
) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None
    settings = {
        "beta": beta, "temperature": temperature, "gradient_accumulation_steps": accumulated,
        "per_device_train_batch_size": 4 // accumulated,
    }  # fmt: skip
    found = []
    for make, name in ((theirs, "theirs"), (ours, "ours")):
        trainer = make(tmp_path / name, tools, adapter, settings)
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        trainer.train()
        logs = [row for row in trainer.state.log_history if "loss" in row]
        weights = {n: p.detach() - before[n] for n, p in trainer.model.named_parameters()}
        found.append((logs, weights))
    (their_logs, their_weights), (our_logs, our_weights) = found
    assert len(their_logs) == len(our_logs) == STEPS
    for theirs_row, row in zip(their_logs, our_logs, strict=True):
        assert row["loss"] == pytest.approx(theirs_row["loss"], abs=1e-5)
        if accumulated == 1:  # else batches are of other responses, and this is a mean over them
            assert row["entropy"] == pytest.approx(theirs_row["entropy"], abs=1e-5)
    moved = 0.0
    for name, change in their_weights.items():
        torch.testing.assert_close(our_weights[name], change, rtol=0, atol=1e-5, msg=name)
        moved = max(moved, float(change.abs().max()))
    assert moved > 1e-3
