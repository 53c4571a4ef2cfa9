"""GKDTrainer and SDFTTrainer learn what TRL 1.16's do, from data and from the same responses."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import GKDConfig, GKDTrainer, SDFTConfig, SDFTTrainer
from tests import tiny_models
from tests.golden import tiny
from tests.trl_parity.test_distillation_1_16 import COMMON, STEPS, teacher

if sys.version_info < (3, 11):
    pytest.skip("TRL 1.16 needs Python 3.11", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:You are importing from .trl.experimental"
)
OF_GKD = {name: COMMON[name] for name in COMMON if not name.startswith(("max_comp", "shuffle"))}
TEMPLATE = (
    "{% for m in messages %}{{ 'w90 ' if m.role == 'user' else 'w91 ' }}{{ m.content }} <eos> "
    "{% endfor %}{% if add_generation_prompt %}w91 {% endif %}"
)


def tokenizer() -> Any:
    made = tiny.tokenizer("left")
    made.chat_template = TEMPLATE
    return made


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def data() -> Dataset:
    """Conversations of two turns, of other lengths."""
    rows = [
        [
            {"role": "user", "content": words(3 + i, 9 + 2 * i)},
            {"role": "assistant", "content": words(40 + i)},
            {"role": "user", "content": words(*range(5 + i, 6 + i + i % 3))},
            {"role": "assistant", "content": words(*range(60 + i, 62 + i + i % 4))},
        ]
        for i in range(12)
    ]
    return Dataset.from_dict({"messages": rows})


def answer(prompt: list[int], length: int) -> list[int]:
    """A response by rule."""
    return [3 + (7 * sum(prompt) + 11 * i) % 86 for i in range(length - 1)] + [tiny.EOS]


def length_of(row: int, longer: int) -> int:
    """Tokens of row ``row``'s completion, and ``longer``."""
    return 2 + row % 4 + 1 + longer


def theirs(folder: Path, longer: int, **settings: Any) -> Any:
    """TRL's, which answers prompts by rule."""
    from trl.experimental.gkd import GKDConfig as Config
    from trl.experimental.gkd import GKDTrainer as Trainer

    class Answered(Trainer):
        def generate_on_policy_outputs(self, model: Any, inputs: Any, _: Any) -> Any:
            prompts, mask = inputs["prompts"], inputs["prompt_attention_mask"]
            lengths = (inputs["labels"] != -100).sum(-1) + longer
            rows = [
                answer(ids[known.bool()].tolist(), int(n))
                for ids, known, n in zip(prompts, mask, lengths, strict=True)
            ]
            width = max(map(len, rows))
            ids = torch.tensor([row + [tiny.PAD] * (width - len(row)) for row in rows])
            known = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
            labels = torch.cat(
                [torch.full_like(prompts, -100), ids.masked_fill(known == 0, -100)], 1
            )
            return torch.cat([prompts, ids], 1), torch.cat([mask, known], 1), labels

    return Answered(
        tiny_models.language_model("qwen2"),
        teacher(),
        args=Config(
            output_dir=str(folder), train_sampling_strategy="sequential", **OF_GKD, **settings
        ),
        train_dataset=data(),
        processing_class=tokenizer(),
    )


def ours(folder: Path, longer: int, **settings: Any) -> Any:
    def respond(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        ids = [
            trainer.processing_class.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for prompt in prompts
        ]
        numbers = [int(prompt[0]["content"].split()[0][1:]) - 3 for prompt in prompts]
        responses = [answer(x, length_of(i, longer)) for x, i in zip(ids, numbers, strict=True)]
        return {"prompt_ids": ids, "completion_ids": responses, "logprobs": None}

    return GKDTrainer(
        tiny_models.language_model("qwen2"),
        teacher(),
        args=GKDConfig(output_dir=str(folder), shuffle_dataset=False, **OF_GKD, **settings),
        train_dataset=data(),
        processing_class=tokenizer(),
        rollout_func=respond,
    )


def trained(trainer: Any) -> tuple[list[float], dict[str, Any]]:
    """Logged losses, and how weights have moved."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {n: p.detach() - before[n] for n, p in trainer.model.named_parameters()}


def assert_same(one: Any, other: Any) -> None:
    (their_losses, their_weights), (losses, weights) = trained(one), trained(other)
    assert len(losses) == STEPS
    assert losses == pytest.approx(their_losses, abs=1e-5)
    for name, change in their_weights.items():
        torch.testing.assert_close(weights[name], change, rtol=0, atol=1e-5, msg=name)
    assert max(float(x.abs().max()) for x in weights.values()) > 1e-3


@pytest.mark.parametrize(("beta", "lmbda", "accumulated", "max_length"), [
    (0.0, 0.0, 2, 1024),
    (0.5, 0.0, 2, 1024),
    (1.0, 0.0, 2, 9),
    (0.3, 0.0, 1, 1024),
    (0.5, 1.0, 2, 1024),
    (1.0, 1.0, 1, 1024),
])  # fmt: skip
def test_losses_and_weights_are_trls(
    beta: float, lmbda: float, accumulated: int, max_length: int, tmp_path: Path
) -> None:
    """On the data, and on responses of as many tokens."""
    settings = {
        "beta": beta, "lmbda": lmbda, "temperature": 0.7, "max_length": max_length,
        "gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 4 // accumulated,
        "max_new_tokens": 8,
    }  # fmt: skip
    found = [make(tmp_path / make.__name__, 0, **settings) for make in (theirs, ours)]
    assert_same(*found)


def test_the_loss_is_divided_by_what_is_learned_where_trl_counts_the_data(tmp_path: Path) -> None:
    """Of two steps' first, on responses that have two tokens more than the data's completions."""
    settings = {
        "lmbda": 1.0, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
        "max_new_tokens": 8,
    }  # fmt: skip
    (their_loss, *_), _ = trained(theirs(tmp_path / "theirs", 2, **settings))
    (loss, *_), _ = trained(ours(tmp_path / "ours", 2, **settings))
    of_data = sum(length_of(i, 0) for i in range(4))
    assert loss * (of_data + 8) == pytest.approx(their_loss * of_data, abs=1e-4)


HINTED = {
    "prompt": [words(3 + i, 9 + 2 * i, 5 + i) for i in range(12)],
    "privileged_context": [words(*range(40 + i, 42 + i + i % 3)) for i in range(12)],
}


def lengths(prompt: list[int]) -> int:
    return 3 + sum(prompt) // 4 % 4


def their_sdft(folder: Path, model: str, **settings: Any) -> Any:
    from trl.experimental.sdft import SDFTConfig as Config
    from trl.experimental.sdft import SDFTTrainer as Trainer

    class Answered(Trainer):
        def _generate(self, prompt_ids: list[list[int]]) -> Any:
            return prompt_ids, [answer(x, lengths(x)) for x in prompt_ids]

    args = Config(output_dir=str(folder), **settings)
    return Answered(model, args, Dataset.from_dict(HINTED), processing_class=tiny.tokenizer("left"))


def our_sdft(folder: Path, model: str, **settings: Any) -> Any:
    def respond(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(x)["input_ids"] for x in prompts]
        responses = [answer(x, lengths(x)) for x in ids]
        return {"prompt_ids": ids, "completion_ids": responses, "logprobs": None}

    return SDFTTrainer(
        model,
        SDFTConfig(output_dir=str(folder), **settings),
        Dataset.from_dict(HINTED),
        processing_class=tiny.tokenizer("left"),
        rollout_func=respond,
    )


@pytest.mark.parametrize(("alpha", "kind", "skipped", "accumulated"), [
    (0.5, "base", 0, 2),
    (1.0, "ema", 2, 1),
    (0.0, "live", 0, 2),
])  # fmt: skip
def test_losses_and_weights_of_sdft_are_trls(
    alpha: float, kind: str, skipped: int, accumulated: int, tmp_path: Path
) -> None:
    """With the divergence over the whole vocabulary."""
    model = str(tmp_path / "model")
    tiny_models.language_model("qwen2").save_pretrained(model)
    settings = {
        "distillation_alpha": alpha, "teacher_model_kind": kind, "temperature": 0.7,
        "num_loss_tokens_to_skip": skipped, "gradient_accumulation_steps": accumulated,
        "per_device_train_batch_size": 4 // accumulated, "distillation_mode": "full_logits",
        "num_generations": 2, "teacher_update_rate": 0.25, **COMMON,
    }  # fmt: skip
    made = [make(tmp_path / make.__name__, model, **settings) for make in (their_sdft, our_sdft)]
    assert_same(*made)
