"""GKDTrainer and SDFTTrainer: who writes the completions of a batch, data, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import GKDConfig, GKDTrainer, SDFTConfig, SDFTTrainer
from fastrl.run.random_state import seed_at
from fastrl.samples import Samples
from fastrl.trainers.groups.replay import replay
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import assert_same_run, resumed, straight
from tests.taught import LORA, another, exact
from tests.trl.test_distillation import SETTINGS, divergences, prompts

OF_GKD: dict[str, Any] = {
    **{name: value for name, value in SETTINGS.items() if name != "max_completion_length"},
    "max_new_tokens": 6,
}  # fmt: skip


def texts(count: int = 8) -> Dataset:
    """Prompts and completions, of other lengths."""
    completions = [" " + " ".join(["w50"] * (1 + i % 3)) + f" w{60 + i}" for i in range(count)]
    return prompts(count).add_column("completion", completions)


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = (
        "{% for m in messages %}{{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    return made


def make(folder: Path, teacher: Any = None, model: Any = None, **settings: Any) -> Any:
    own = ("peft_config", "train_dataset", "eval_dataset", "rollout_func", "data_collator")
    given = {k: settings.pop(k) for k in own if k in settings}
    return GKDTrainer(
        tiny_models.language_model("qwen2") if model is None else model,
        another() if teacher is None else teacher,
        args=GKDConfig(output_dir=str(folder), **{**OF_GKD, **settings}),
        processing_class=tokenizer(),
        **{"train_dataset": texts(), **given},
    )


def of_data(samples: Samples) -> list[bool]:
    """Whether each response is the data's."""
    found = [x.tolist() for x in samples.sequences]
    known = [[*map(int, x.replace(" w", " ").split()), tiny.EOS] for x in texts()["completion"]]
    return [x in known for x in found]


def test_a_seed_draws_for_each_batch_who_writes_it(tmp_path: Path) -> None:
    """Of two batches that are generated together; half of 12, and the log says how many."""
    trainer = make(
        tmp_path, lmbda=0.5, max_steps=6, gradient_accumulation_steps=2,
        per_device_train_batch_size=2, seed=5,
    )  # fmt: skip
    found = []
    take = trainer._generations.take
    trainer._generations.take = lambda x, **y: (found.append(of_data(x)), take(x, **y))[1]
    trainer.train()
    drawn = []
    for step in range(6):
        seed = seed_at(seed_at(5, "responses", "train", step), "share")
        drawn.append((torch.rand(2, generator=torch.Generator().manual_seed(seed)) < 0.5).tolist())
    assert found == [[not a, not a, not b, not b] for a, b in drawn]
    assert {True, False} == {x for step in drawn for x in step}
    logged = [x["on_policy"] for x in trainer.state.log_history if "on_policy" in x]
    assert logged == [sum(step) / 2 for step in drawn]


def test_a_batch_is_written_by_one(tmp_path: Path) -> None:
    """Where several optimizer steps learn of a generation, too."""
    trainer = make(
        tmp_path, lmbda=0.5, max_steps=4, gradient_accumulation_steps=1, steps_per_generation=4,
        per_device_train_batch_size=2, seed=5,
    )  # fmt: skip
    trainer.train()
    found = [of_data(batch) for batch in trainer._generations.buffer]
    assert all(len({*x}) == 1 for x in found)
    assert len({x[0] for x in found}) == 2


@pytest.mark.parametrize("settings", [
    {"lmbda": 0.5},
    {"lmbda": 0.5, "seq_kd": True},
    {"lmbda": 0.0, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4},
])  # fmt: skip
def test_a_killed_run_goes_on_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    def of(folder: Path) -> Any:
        common = {
            "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3,
            "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
            "eval_dataset": texts(4),
        }  # fmt: skip
        return make(folder, **{**common, **settings})

    whole = straight(of, tmp_path / "whole")
    part = resumed(of, tmp_path / "part", tmp_path / "whole" / "checkpoint-3")
    assert_same_run(part, whole)


def test_the_teacher_writes_what_it_would_as_the_student(tmp_path: Path) -> None:
    by_teacher = make(tmp_path / "a", another(), lmbda=0.0, seq_kd=True, ledger=True)
    by_itself = make(tmp_path / "b", another(2), model=another(), lmbda=1.0)
    found = []
    for trainer in (by_teacher, by_itself):
        trainer.train()
        (samples,) = trainer._generations.buffer
        found.append([x.tolist() for x in samples.sequences])
    assert found[0] == found[1]
    with pytest.raises(ValueError, match="came from completions in data, a rollout_func"):
        replay(make(tmp_path / "c", another(), lmbda=0.0, seq_kd=True), tmp_path / "a", 1)


@pytest.mark.parametrize("most", [None, 24])
def test_an_evaluation_is_on_the_datas_completions_at_temperature_1(
    most: int | None, tmp_path: Path
) -> None:
    """Whatever the student samples, and in passes."""
    data = texts(4)
    chats = [
        [{"role": "user", "content": f"{x} w7"}, {"role": "assistant", "content": y}]
        for x, y in zip(data["prompt"], data["completion"], strict=True)
    ]
    evaluated = Dataset.from_dict({"messages": chats})
    settings = {"lmbda": 1.0, "temperature": 0.5, "beta": 0.3, "micro_batch_tokens": most}
    trainer = make(tmp_path, train_dataset=prompts(), eval_dataset=evaluated, **settings)
    found = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(evaluated)["eval_loss"] == found  # as it comes
    ids = tokenizer()
    samples = Samples(
        [torch.tensor([*ids(y)["input_ids"], tiny.EOS]) for y in data["completion"]],
        prompt_ids=[torch.tensor([*ids(f"{x} w7")["input_ids"], tiny.EOS]) for x in data["prompt"]],
    )
    loss = divergences(exact(trainer.model), exact(another()), samples, 0.3).mean()
    assert found == pytest.approx(loss.item(), abs=1e-5)


def test_passes_and_padding_give_the_same_step(tmp_path: Path) -> None:
    """Of an adapter whose base reads hints."""
    data = texts().add_column("privileged_context", [f"w{20 + i}" for i in range(8)])
    losses = []
    for settings in ({}, {"micro_batch_tokens": 20}, {"padding_free": False}):
        folder, options = str(tmp_path / str(len(losses))), {**OF_GKD, "max_steps": 2, **settings}
        trainer = GKDTrainer(
            tiny_models.language_model("qwen2"),
            args=GKDConfig(output_dir=folder, lmbda=0.0, **options),
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=LORA,
        )
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)
    assert losses[0][0] > 1e-3


def test_a_plan_and_a_card(tmp_path: Path) -> None:
    trainer = make(tmp_path, lmbda=0.5, save_strategy="steps", save_steps=1)
    assert trainer.plan(8, 6).peak > 0
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "generalised knowledge distillation" in card


def beside(**columns: Any) -> dict[str, Any]:
    return {"train_dataset": Dataset.from_dict(columns)}


def answered(last: Any) -> dict[str, Any]:
    return beside(prompt=["w3"] * 8, completion=[" w4"] * 7 + [last])


CHAT = [[{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]] * 8


@pytest.mark.parametrize(("settings", "said"), [
    ({"train_dataset": prompts()}, "train_dataset has no completions, .* or set lmbda=1"),
    ({"eval_dataset": prompts(), "lmbda": 1.0}, "eval_dataset has no completions"),
    ({"seq_kd": True, "teacher_placement": "host"}, "one model of its own on the device"),
    (beside(messages=CHAT, prompt=["w3"] * 8), "has both messages and prompt"),
    (beside(messages=[x[:1] for x in CHAT]), "messages of row 0.* must end with an assistant's"),
    (answered(""), "of row 7 of train_dataset must continue its prompt: .* and not be empty"),
    (answered(None), "row 7"),
    ({"eval_dataset": answered("")["train_dataset"], "lmbda": 1.0}, "row 7 of eval_dataset must"),
    (beside(prompt=["w3"] * 8, completion=[x[1:] for x in CHAT]),
     "row 0 of train_dataset must continue its prompt: a text a text"),
    ({"data_collator": len}, "GKDTrainer does not take data_collator: .*messages"),
    ({"lmbda": 1.5}, r"lmbda must lie in \[0, 1\]"),
    ({"beta": -1.0}, r"beta must lie in \[0, 1\]"),
    ({"num_generations": 2}, "use DistillationTrainer for several"),
    ({"packing": True}, "batches have no padding all the same"),
    ({"assistant_only_loss": True}, "the last message of a conversation is learned"),
])  # fmt: skip
def test_what_cannot_be_is_refused(settings: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        make(tmp_path, **settings)


@pytest.mark.parametrize(("completions", "settings", "said"), [
    ([" w4 w5 w6 w7"] * 8, {"max_length": 4}, "leave none of its prompt within max_length=4"),
    ([" w4"] * 7 + [" w4" * 60], {}, "more than the model's context of"),
    ([" w4"] * 7 + [" w4" * 25], {}, "more than the teacher's model's context of 24"),
    ([""] * 8, {}, "and not be empty"),
])  # fmt: skip
def test_a_completion_that_cannot_be_learned_is_refused(
    completions: list[Any], settings: Any, said: str, tmp_path: Path
) -> None:
    """Before training, with its row; of a stream as its batch comes."""
    data: Any = Dataset.from_dict({"prompt": ["w3 w4"] * 8, "completion": completions})
    settings = {"lmbda": 0.0, "max_new_tokens": 4, **settings}
    teacher = another(max_position_embeddings=24) if "teacher" in said else None
    given = {"teacher": teacher, "train_dataset": data}
    with pytest.raises(ValueError, match=f"completion of row [07] of train_dataset.*{said}"):
        make(tmp_path, **given, **settings)
    given["train_dataset"] = data.to_iterable_dataset()
    trainer = make(tmp_path, **given, max_steps=8, **settings)
    with pytest.raises(ValueError, match=f"completion of row . of the batch.*{said}"):
        trainer.train()


def test_the_teacher_that_writes_must_be_a_model(tmp_path: Path) -> None:
    data = texts().add_column("privileged_context", ["w9"] * 8)
    args = GKDConfig(output_dir=str(tmp_path), seq_kd=True, **OF_GKD)
    model = tiny_models.language_model("qwen2")
    with pytest.raises(ValueError, match="which must be one model of its own"):
        GKDTrainer(
            model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=LORA
        )


# SDFT, whose steps are compared with TRL's in tests/trl_parity.


@pytest.mark.parametrize(("settings", "said"), [
    ({"distillation_mode": "topk_logits"}, "set distillation_mode='full_logits'"),
    ({"distillation_mode": "sampled_token", "distillation_alpha": 1.0}, "sampled tokens alone"),
    ({"num_iterations": 2}, "which is not done here: set distillation_is_clip=None"),
    ({"generate_from_teacher": True}, "pass a rollout_func that answers with the hint"),
    ({"use_teacher_server": True}, "teacher_model_kind='live' is scored in this process"),
])  # fmt: skip
def test_what_sdft_means_otherwise_is_refused(settings: Any, said: str, tmp_path: Path) -> None:
    common = {**SETTINGS, "distillation_mode": "full_logits", "num_generations": 2}
    with pytest.raises(ValueError, match=said):
        SDFTTrainer(
            tiny_models.language_model("qwen2"),
            SDFTConfig(output_dir=str(tmp_path), **{**common, **settings}),
            prompts(hint=True),
            processing_class=tiny.tokenizer(),
        )


def test_sdft_cuts_prompts_and_hints_and_resumes(tmp_path: Path) -> None:
    def of(folder: Path) -> Any:
        settings = {
            **SETTINGS, "max_steps": 4, "save_strategy": "steps", "save_steps": 1,
            "distillation_mode": "full_logits", "distillation_is_clip": None, "num_iterations": 2,
            "num_generations": 2, "max_prompt_length": 2, "teacher_model_kind": "ema",
        }  # fmt: skip
        return SDFTTrainer(
            tiny_models.language_model("qwen2"),
            SDFTConfig(output_dir=str(folder), **settings),
            prompts(hint=True),
            processing_class=tiny.tokenizer(),
        )

    whole = straight(of, tmp_path / "whole")
    samples = whole._generations.buffer[0]
    assert {len(x) for x in (*samples.prompt_ids, *samples.teacher_prompt_ids)} == {2}
    part = resumed(of, tmp_path / "part", tmp_path / "whole" / "checkpoint-3")
    assert_same_run(part, whole)
    assert whole.plan(8, 6).peak > 0
