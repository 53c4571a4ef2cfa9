"""DistillationTrainer, and teachers beside rewards: steps against their formula for each kind of
teacher, prompts, resumed runs, what is refused."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import AutoPeftModelForCausalLM, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from fastrl import DistillationConfig, DistillationTrainer
from fastrl.models.scoring import PassLimit
from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.ledger import read_ledger
from fastrl.samples import Samples
from fastrl.trainers.groups.replay import replay
from fastrl_kernels import reference
from tests import tiny_models
from tests.golden import tiny
from tests.resuming import assert_same_run, resumed, straight
from tests.run.test_transformers_checkpoints import At
from tests.taught import LORA, Likeliest, another, exact, log_probs, swapped
from tests.trainers.conftest import GRADIENT_STEP, ONE_STEP
from tests.trl.test_online import KINDS, advantages, logprobs, small_tokens

SETTINGS: dict[str, Any] = {
    **ONE_STEP, "max_completion_length": 6, "logging_steps": 1, "gradient_checkpointing": False,
}  # fmt: skip


def prompts(count: int = 8, hint: bool = False, **columns: Any) -> Dataset:
    rows = {"prompt": [f"w{3 + i} w4 w{5 + i}" for i in range(count)], **columns}
    if hint:
        rows["privileged_context"] = [f"w{20 + i} w{30 + i}" for i in range(count)]
    return Dataset.from_dict(rows)


def make(folder: Path, teacher: Any = None, model: Any = None, **settings: Any) -> Any:
    own = {k: settings.pop(k) for k in ("peft_config", "eval_dataset", "tools") if k in settings}
    data = settings.pop("train_dataset", None)
    return DistillationTrainer(
        tiny_models.language_model("qwen2") if model is None else model,
        teacher,
        args=DistillationConfig(output_dir=str(folder), **{**SETTINGS, **settings}),
        train_dataset=prompts() if data is None else data,
        processing_class=tiny.tokenizer(),
        **own,
    )


def online(folder: Path, kind: str, teacher_model: Any = None, **settings: Any) -> Any:
    trainer, config = KINDS[kind]
    data = settings.pop("train_dataset", None)
    common = {**SETTINGS, **GRADIENT_STEP, "num_generations": 4, **settings}
    return trainer(
        tiny_models.language_model("qwen2"),
        small_tokens,
        args=config(output_dir=str(folder), **common),
        train_dataset=prompts() if data is None else data,
        processing_class=tiny.tokenizer(),
        teacher_model=teacher_model,
    )


def divergences(
    student: Any, teacher: Any, of: Samples, beta: float, temperature: float = 1.0
) -> Tensor:
    """Of each token of the responses, in float64."""
    found = []
    for i, response in enumerate(of.sequences):
        behind = of.prompt_ids if of.teacher_prompt_ids is None else of.teacher_prompt_ids
        logp = log_probs(student, of.prompt_ids[i], response, temperature)
        with torch.no_grad():
            logq = log_probs(teacher, behind[i], response, temperature)
        found.append(reference.divergence(logp, logq, beta))
    return torch.cat(found)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("padding_free", [False, True])
def test_a_step_follows_the_formula(
    beta: float, hint: bool, padding_free: bool, tmp_path: Path
) -> None:
    teacher = another()
    trainer = make(
        tmp_path, teacher, beta=beta, temperature=0.7, train_dataset=prompts(hint=hint),
        padding_free=padding_free, **GRADIENT_STEP,
    )  # fmt: skip
    start = exact(trainer.model)
    trainer.train()
    samples = trainer._generations.buffer[0]
    assert (samples.teacher_prompt_ids is not None) == hint
    loss = divergences(start, exact(teacher), samples, beta, 0.7).mean()
    loss.backward()
    found = dict(trainer.model.named_parameters())
    for name, weight in start.named_parameters():
        step = (weight - found[name].double()).detach()
        rounding = 4 * torch.finfo(torch.float32).eps * weight.detach().abs().max()
        most = float(rounding + 1e-4 * weight.grad.abs().max())
        torch.testing.assert_close(step, weight.grad, rtol=1e-3, atol=most)
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert log["divergence"] == pytest.approx(loss.item(), abs=1e-5)
    assert log["entropy"] > 0
    assert "reward" not in log


def adapted(seed: int = 0, scale: float = 0.3) -> Any:
    """A model with an adapter that was trained."""
    torch.manual_seed(seed)
    model = get_peft_model(tiny_models.language_model("qwen2"), LORA)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=scale)
    return model


def saved_adapter(folder: Path) -> str:
    adapted(seed=7).save_pretrained(folder)
    return str(folder)


def test_the_base_of_a_new_adapter_is_a_teacher_without_weights(tmp_path: Path) -> None:
    """Behind a hint; the base's own log-probs are what the student learns."""
    trainer = make(
        tmp_path, peft_config=LORA, train_dataset=prompts(hint=True), **GRADIENT_STEP, beta=0.5
    )
    (teacher,) = trainer.teaching.models.references.values()
    assert teacher.own_weights() == {}
    assert teacher.model is None
    base = exact(tiny_models.language_model("qwen2"))
    trainer.train()
    samples = trainer._generations.buffer[0]
    loss = divergences(base, base, samples, 0.5).mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["base", "live", "ema"])
def test_the_policys_own_weights_as_teacher(kind: str, tmp_path: Path) -> None:
    settings = {"teacher_update_rate": 0.25, "teacher_sync_steps": 1, "max_steps": 2}
    trainer = make(
        tmp_path, teacher_model_kind=kind, train_dataset=prompts(hint=True), beta=1.0,
        **{**GRADIENT_STEP, **settings},
    )  # fmt: skip
    begin = exact(trainer.model)
    then: list[Any] = []
    trainer.add_callback(At("on_step_end", 1, lambda: then.append(exact(trainer.model))))
    trainer.train()
    (student,) = then
    teacher = {"base": begin, "live": student}.get(kind)
    if teacher is None:
        teacher = copy.deepcopy(begin)
        for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 0.25)
    loss = divergences(student, teacher, trainer._generations.buffer[0], 1.0).mean()
    assert trainer.state.log_history[1]["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_an_evaluation_that_a_live_teacher_says_nothing_in_is_told(tmp_path: Path) -> None:
    settings = {"train_dataset": prompts(hint=True), "eval_dataset": prompts()}
    trainer = make(tmp_path, teacher_model_kind="live", **settings)
    with pytest.warns(UserWarning, match="the evaluation data have no column teacher_prompt"):
        assert trainer.evaluate()["eval_divergence"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.evaluate()


def test_another_adapter_on_the_same_base(tmp_path: Path) -> None:
    trainer = make(tmp_path, saved_adapter(tmp_path / "teacher"), peft_config=LORA, **GRADIENT_STEP)
    (teacher,) = trainer.teaching.models.references.values()
    assert teacher.model is None
    trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained
    assert not any("fastrl_teacher" in name for name in trained)
    trainer.train()
    samples = trainer._generations.buffer[0]
    base = exact(tiny_models.language_model("qwen2"))
    loss = divergences(base, exact(adapted(seed=7)), samples, 1.0).mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_a_teacher_in_host_memory_is_the_same_teacher(tmp_path: Path) -> None:
    losses = []
    for place in ("device", "host"):
        trainer = make(tmp_path / place, another(), teacher_placement=place, max_steps=2)
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history[:2]])
    assert losses[0] == losses[1]


def test_several_teachers_chosen_by_a_column(tmp_path: Path) -> None:
    teachers = {"a": another(1), "b": another(2)}
    names = ["a", "b", "b", "a"] * 2
    trainer = make(
        tmp_path, teachers, train_dataset=prompts(of=names), teacher_column="of", **GRADIENT_STEP
    )
    start = exact(trainer.model)
    trainer.train()
    samples = trainer._generations.buffer[0]
    of_each = []
    for i, number in enumerate(samples.teachers):
        teacher = exact(teachers["ab"[number]])
        of_each.append(divergences(start, teacher, samples.select([i]), 1.0))
    assert {0, 1} == set(samples.teachers)
    loss = torch.cat(of_each).mean()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("kind", [
    *("model", "host", "base", "live", "ema", "adapter", "several", "function"),
])  # fmt: skip
def test_a_killed_run_goes_on_to_the_bit(kind: str, tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path / "teacher")

    def of(folder: Path) -> Any:
        settings: dict[str, Any] = {
            "max_steps": 4, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-3,
            "train_dataset": prompts(hint=True), "gradient_accumulation_steps": 2,
            "teacher_sync_steps": 2,
        }  # fmt: skip
        teacher: Any = None
        if kind in ("model", "host"):
            teacher = another()
            settings["teacher_placement"] = "host" if kind == "host" else "device"
        elif kind == "function":
            teacher = Likeliest()
            settings |= {"num_iterations": 2, "steps_per_generation": 2}
        elif kind == "adapter":
            teacher, settings["peft_config"] = adapter, LORA
        elif kind == "several":
            teacher = {"a": another(1), "b": another(2)}
            settings["train_dataset"] = prompts(hint=True, of=["a", "b"] * 4)
            settings["teacher_column"] = "of"
        else:
            settings["teacher_model_kind"] = kind
        return make(folder, teacher, **settings)

    whole = straight(of, tmp_path / "whole")
    part = resumed(of, tmp_path / "part", tmp_path / "whole" / "checkpoint-3")
    assert_same_run(part, whole)


# Beside rewards.


@pytest.mark.parametrize(("kind", "settings"), [
    ("grpo", {}),
    ("grpo", {"loss_type": "grpo", "beta": 0.1}),
    ("grpo", {"use_bias_correction_kl": True, "beta": 0.1, "num_iterations": 2}),
    ("rloo", {"beta": 0.0}),
])  # fmt: skip
def test_a_teacher_beside_rewards_adds_its_term(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """To a step without it, the gradient of coef·Σ v·D / D."""
    teacher, steps = another(), []
    for coef in (0.0, 0.25):
        given = {"teacher_model": teacher, "teacher_kl_coef": coef, "teacher_beta": 0.5}
        trainer = online(tmp_path / str(coef), kind, **(given if coef else {}), **settings)
        start = exact(trainer.model)
        trainer.train()
        after = dict(trainer.model.named_parameters())
        steps.append({n: (p - after[n].double()).detach() for n, p in start.named_parameters()})
    samples = trainer._generations.buffer[0]
    values = divergences(start, exact(teacher), samples, 0.5)
    if settings.get("loss_type") == "grpo" or kind == "rloo":
        lengths = [len(x) for x in samples.sequences]
        term = torch.stack([x.mean() for x in values.split(lengths)]).mean()
    else:
        term = values.mean()
    (0.25 * term).backward()
    for name, weight in start.named_parameters():
        torch.testing.assert_close(
            steps[1][name] - steps[0][name], weight.grad, rtol=2e-3, atol=2e-6, msg=name
        )
    log = trainer.state.log_history[0]
    assert log["divergence"] == pytest.approx(values.mean().item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("hint", [False, True])
def test_a_teacher_in_the_reward(kind: str, hint: bool, tmp_path: Path) -> None:
    """Of each token, or of the response: -coef·(log π - log π_teacher), as it was sampled."""
    teacher = another()
    trainer = online(
        tmp_path, kind, teacher, teacher_kl_coef=0.5, teacher_kl_in="reward", beta=0.0,
        train_dataset=prompts(hint=hint),
    )  # fmt: skip
    start = exact(trainer.model)
    trainer.train()
    samples = trainer._generations.buffer[0]
    behind = samples.teacher_prompt_ids if hint else samples.prompt_ids
    own, theirs = [], []
    for i, response in enumerate(samples.sequences):
        own.append(logprobs(start, samples, i))
        with torch.no_grad():
            log_q = log_probs(exact(teacher), behind[i], response)
        theirs.append(log_q.gather(1, response[:, None])[:, 0])
    apart = [x.detach() - y for x, y in zip(own, theirs, strict=True)]
    rewards = torch.tensor(small_tokens([x.tolist() for x in samples.sequences])).double()
    if kind == "rloo":
        taken = rewards - 0.5 * torch.stack([x.sum() for x in apart])
        loss = -(torch.stack([x.sum() for x in own]) * advantages(taken, "rloo")).mean()
    else:
        of_group = advantages(rewards, "grpo")
        each = [-(a - 0.5 * d) * x for a, d, x in zip(of_group, apart, own, strict=True)]
        loss = torch.cat(each).mean()
    loss.backward()
    after = dict(trainer.model.named_parameters())
    for name, weight in start.named_parameters():
        step = (weight - after[name].double()).detach()
        torch.testing.assert_close(step, weight.grad, rtol=2e-3, atol=2e-6, msg=name)
    found = trainer.state.log_history[0]["teacher_kl"]
    assert found == pytest.approx(torch.cat(apart).mean().item(), abs=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_ledger_has_what_a_teacher_read_and_said(kind: str, tmp_path: Path) -> None:
    """Its log-probs of the sampled tokens, too, whether it is in the rewards or in the loss."""
    teacher, settings = another(), {"train_dataset": prompts(hint=True), "ledger": True}
    for place in ("reward", "loss"):
        given = {"teacher_kl_coef": 0.5, "teacher_kl_in": place, "beta": 0.0, **settings}
        online(tmp_path / place, kind, teacher, **given).train()
        rows = read_ledger(tmp_path / place / "ledger").to_pylist()
        assert rows
        for row in rows:
            response, read = (
                torch.tensor(row[x]) for x in ("completion_ids", "teacher_prompt_ids")
            )
            assert len(read) == len(row["prompt_ids"]) + 2
            with torch.no_grad():
                of_all = log_probs(exact(teacher), read, response)
            said = of_all.gather(1, response[:, None])[:, 0].float()
            found = torch.tensor(row["teacher_logprobs"])
            torch.testing.assert_close(found, said, rtol=1e-4, atol=1e-4)
            # As used: the same for all tokens but for what a teacher in the rewards says of each.
            apart = torch.tensor(row["logprobs"]) - found if place == "reward" else 0.0
            of_sample = torch.tensor(row["advantages"]) + 0.5 * apart
            if kind == "grpo":
                torch.testing.assert_close(of_sample, of_sample[:1].expand_as(of_sample))


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_log_probs_of_a_teacher_with_rows_of_padding_are_over_the_tokens(
    place: str, tmp_path: Path
) -> None:
    teacher = another(vocab_size=110)
    settings = {"teacher_kl_coef": 0.5, "teacher_kl_in": place, "beta": 0.0, "ledger": True}
    online(tmp_path, "grpo", teacher, **settings).train()
    for row in read_ledger(tmp_path / "ledger").to_pylist():
        prompt, response = (torch.tensor(row[x]) for x in ("prompt_ids", "completion_ids"))
        with torch.no_grad():
            logits = exact(teacher)(torch.cat([prompt, response])[None]).logits[0]
        logits = logits[len(prompt) - 1 : -1, :97]  # the tokenizer's
        said = logits.log_softmax(-1).gather(1, response[:, None])[:, 0].float()
        found = torch.tensor(row["teacher_logprobs"])
        torch.testing.assert_close(found, said, rtol=1e-4, atol=1e-4)


def test_models_of_two_dtypes_and_autocast(tmp_path: Path) -> None:
    """Each head computes in its own dtype; under autocast both do in bf16."""
    losses = {}
    for name, teacher, settings in (
        ("fp32", another(), {}),
        ("bf16 teacher", another().bfloat16(), {}),
        ("autocast", another(), {"bf16": True}),
    ):
        trainer = make(tmp_path / name, teacher, train_dataset=prompts(hint=True), **settings)
        trainer.train()
        losses[name] = trainer.state.log_history[0]["loss"]
    for name in ("bf16 teacher", "autocast"):
        assert losses[name] == pytest.approx(losses["fp32"], rel=0.03)
        assert losses[name] != losses["fp32"]


def test_the_run_folder_tells_of_teachers(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        {"a": another(1), "b": another(2)},
        teacher_column="of",
        train_dataset=prompts(of=["a", "b"] * 4),
        save_strategy="steps",
        save_steps=1,
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
    assert "on-policy distillation" in card
    assert "a, b" in card
    with pytest.raises(BadCheckpoint, match="whose teachers differ: make the trainer with"):
        make(
            tmp_path,
            {"a": another(1), "b": another(3)},
            teacher_column="of",
            train_dataset=prompts(of=["a", "b"] * 4),
            max_steps=2,
        ).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("form", ["alone", "function", "reward"])
def test_a_sample_of_the_past_is_drawn_again(form: str, tmp_path: Path) -> None:
    """From the run's beginning, so that the walk learns of the teacher again, behind its hints."""
    settings: dict[str, Any] = {
        "ledger": True, "max_steps": 3, "learning_rate": 1e-2, "train_dataset": prompts(hint=True),
    }  # fmt: skip

    def learning(folder: Path) -> Any:
        if form != "reward":
            return make(folder, another() if form == "alone" else Likeliest(), **settings)
        beside = {"teacher_kl_coef": 0.5, "teacher_kl_in": "reward"}
        return online(folder, "grpo", another(), **settings, **beside)

    learning(tmp_path / "run").train()
    found = replay(learning(tmp_path / "other"), tmp_path / "run", 3)
    assert found.begun_at == 0
    assert found.identical, found.samples[0].differences()
    assert found.strayed is None


def test_the_loss_of_a_batch_as_trl_lays_it_out(tmp_path: Path) -> None:
    teacher = another()
    trainer = make(tmp_path, teacher, beta=0.3)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 9), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    tools = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    batch = {
        "prompt_ids": ids[:, :4], "prompt_mask": torch.ones(2, 4, dtype=torch.long),
        "completion_ids": ids[:, 4:], "completion_mask": mask, "tool_mask": tools,
    }  # fmt: skip
    student, found = exact(trainer.model), []
    for i, length in enumerate([5, 3]):
        rows = [ids[i, :4], ids[i, 4 : 4 + length]]
        logp, logq = log_probs(student, *rows), log_probs(exact(teacher), *rows)
        found.append(reference.divergence(logp, logq, 0.3)[tools[i, :length].bool()])
    loss = trainer.compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(torch.cat(found).mean().item(), abs=1e-6)
    whole = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(14))
    assert whole.item() == pytest.approx(loss.item() / 2, rel=1e-6)


WORD, PICTURE = {"type": "text", "text": "w9"}, {"type": "image", "text": None}


def test_a_context_is_a_text_content_blocks_or_messages(tmp_path: Path) -> None:
    read = []
    for context in ("w9", [WORD], [{"role": "user", "content": [WORD]}]):
        data = prompts(privileged_context=[context] * 8)
        trainer = make(tmp_path, another(), train_dataset=data)
        trainer.train()
        read.append([x.tolist() for x in trainer._generations.buffer[0].teacher_prompt_ids])
    assert read[0] == read[1] == read[2]
    assert all(ids[-1] == 9 for ids in read[0])


# What is refused, before anything is trained.


def of_another(_: Path) -> Any:
    return another()


def long_hint(_: Path) -> dict[str, Any]:
    context = [" ".join(["w9"] * 60) if i == 3 else "w9" for i in range(8)]
    return {"train_dataset": prompts(privileged_context=context)}


def adapter_as_both(folder: Path) -> dict[str, Any]:
    """A policy with an adapter, which is its teacher, too."""
    tiny_models.language_model("qwen2").save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = get_peft_model(model, copy.deepcopy(LORA))
    torch.nn.init.normal_(next(p for n, p in adapted.named_parameters() if "lora_B" in n))
    adapted.save_pretrained(folder / "adapter")
    model = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter", is_trainable=True)
    return {"model": model, "teacher": str(folder / "adapter")}


def base_with_adapter(folder: Path) -> dict[str, Any]:
    """A policy with a new adapter, and its base once more."""
    tiny_models.language_model("qwen2").save_pretrained(folder)
    model, teacher = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    return {"model": model, "teacher": teacher, "peft_config": copy.deepcopy(LORA)}


def without_numbers(_: Path) -> Any:
    model = another()
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    return model


@pytest.mark.parametrize(("teacher", "settings", "said"), [
    (swapped, {}, "'w5' is token 5 of the policy's, and 'w6' of the teacher"),
    (of_another, long_hint, "the teacher's prompt of row 3 of train_dataset has 6. tokens"),
    (lambda _: another(vocab_size=90), {}, "a teacher's head has 90 rows, and the"),
    (None, {}, r"the policy itself \(teacher_model_kind='base'\) behind the same prompts"),
    (None, {"teacher_model_kind": "live"}, "nothing to learn of it: give the data a column"),
    (of_another, {"beta": 1.5}, "beta"),
    (of_another, {"beta": -0.1}, "beta"),
    (lambda _: {"a": another()}, {}, "and teacher_column, the column, go together"),
    (of_another, {"teacher_column": "of"}, "and teacher_column, the column, go together"),
    (lambda _: {"a": another(), "b": None}, {"teacher_column": "of"}, "None, which would be the"),
    (lambda _: {"a": another()},
     lambda _: {"teacher_column": "of", "train_dataset": prompts(of=["a"] * 7 + ["c"])},
     "row 7 of train_dataset: column 'of' names the teacher 'c', and teacher_model has a"),
    (of_another, lambda _: {"train_dataset": prompts(privileged_context=["w3"] * 7 + [None])},
     "row 7 of train_dataset has neither teacher_prompt nor privileged_context"),
    (of_another, lambda _: {"train_dataset": prompts(privileged_context=["w3"] * 7 + [" "])},
     "privileged_context of row 7 of train_dataset is empty"),
    (of_another, lambda _: {"train_dataset": prompts(privileged_context=[[PICTURE]] * 8)},
     "privileged_context of row 0 of train_dataset, message 0 has content of the type 'image'"),
    (of_another,
     lambda _: {"train_dataset": prompts(
         privileged_context=[[{"role": "user", "content": [WORD, PICTURE]}]] * 8)},
     "privileged_context of row 0 of train_dataset, message 0 has content of the type 'image'"),
    (of_another, lambda _: {"train_dataset": prompts(privileged_context=[["w3"]] * 8)},
     "row 0 of train_dataset: privileged_context is a list: it must be a text, or messages"),
    (of_another,
     lambda _: {"train_dataset": prompts(hint=True, teacher_prompt=["w4"] * 8)},
     "row 0 of train_dataset has both teacher_prompt and privileged_context"),
    (None, lambda _: {"train_dataset": prompts(teacher_prompt=prompts()["prompt"])},
     "the policy itself .*behind the same prompts"),
    (None, adapter_as_both, "has the very weights that the policy begins with"),
    pytest.param(None, base_with_adapter, "has the very weights that the policy begins with",
                 marks=pytest.mark.filterwarnings("ignore:teacher .* no tokenizer is saved")),
    (lambda _: another(max_position_embeddings=8), {},
     "row 0 of train_dataset has 3 tokens; with 6 .* exceeds the teacher's model's context of 8"),
    (without_numbers, {}, "the head of teacher 'Qwen2ForCausalLM' has weights that are NaN"),
    (lambda _: another().model, {}, "is a Qwen2Model, which is no causal language model"),
    (of_another, {"teacher_prompt_template": "{prompt}"}, r"has no \{privileged_context\}"),
    (of_another, {"fp16": True}, "fp16=True scales the loss"),
    (of_another, {"teacher_kl_coef": 0.5}, "teacher_kl_coef=0.5 is not supported by Distillation"),
    (of_another, {"teacher_model_init_kwargs": {"dtype": "bfloat16"}}, "is loaded already"),
])  # fmt: skip
def test_what_cannot_be_is_refused(teacher: Any, settings: Any, said: str, tmp_path: Path) -> None:
    def settled(x: Any) -> Any:
        return x(tmp_path / "teacher") if callable(x) else x

    given = dict(settled(settings))
    teacher = given.pop("teacher", settled(teacher))
    with pytest.raises((ValueError, TypeError), match=said):
        make(tmp_path / "run", teacher, **given)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def stream(_: Path) -> dict[str, Any]:
    rows = IterableDataset.from_generator(lambda: ({"prompt": f"w{3 + i}"} for i in range(8)))
    return {"train_dataset": rows}


@pytest.mark.parametrize(("teacher", "settings", "said"), [
    (None, stream, "the policy itself .*behind the same prompts"),
    (lambda _: another(max_position_embeddings=8),
     lambda _: {"train_dataset": prompts().to_iterable_dataset()},
     "^prompt . and response . have 3 . 6 tokens, beyond the teacher's model's context of 8"),
    (of_another, lambda _: {"model": tiny_models.language_model("qwen2", vocab_size=600)},
     "response 0 have the token ..., a row of padding .*another model has 97 rows"),
])  # fmt: skip
def test_what_only_a_batch_shows_is_refused_before_it_is_learned(
    teacher: Any, settings: Any, said: str, tmp_path: Path
) -> None:
    settings = settings(tmp_path) if callable(settings) else settings
    trainer = make(tmp_path, teacher and teacher(tmp_path), max_steps=1, **settings)
    with pytest.raises(ValueError, match=said):
        trainer.train()


def learned(trainer: Any, none_of: Callable[[int], bool]) -> list[dict[str, float]]:
    """The logs of a run in which no token of some responses of each batch is learned."""
    respond = trainer.responses_to

    def masked(rows: Any, mode: str) -> Samples:
        samples = respond(rows, mode)
        for i, mask in enumerate(samples.learned):
            mask &= not none_of(i)
        return samples

    trainer.responses_to = masked
    trainer.train()
    return [x for x in trainer.state.log_history if "loss" in x]


def test_a_batch_without_a_token_to_learn_changes_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path, another())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    (logged,) = learned(trainer, lambda i: True)
    assert logged["loss"] == 0
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("kind", ["grpo", "distillation"])
def test_passes_without_a_token_to_learn_are_no_part_of_the_divergence(
    kind: str, tmp_path: Path
) -> None:
    found = []
    for most in (None, 10):
        settings = {"micro_batch_tokens": most, "padding_free": False}
        if kind == "grpo":
            trainer = online(tmp_path / str(most), kind, another(), teacher_kl_coef=0.5, **settings)
        else:
            trainer = make(tmp_path / str(most), another(), **settings)
        (logged,) = learned(trainer, lambda i: i % 2 == 1)
        found.append((logged["loss"], logged["divergence"]))
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_a_generation_config_that_transformers_finds_fault_with_is_saved(tmp_path: Path) -> None:
    """A temperature without do_sample, as Llama 2's files have; the tokenizer's ids change it."""
    tiny_models.language_model("qwen2").save_pretrained(tmp_path / "model")
    GenerationConfig(temperature=0.9, top_p=0.6).to_json_file(
        tmp_path / "model" / "generation_config.json"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = make(tmp_path / "run", another(), model, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-1"):
        saved = GenerationConfig.from_pretrained(folder)
        assert (saved.temperature, saved.top_p) == (0.9, 0.6)
        assert saved.pad_token_id == tiny.tokenizer().pad_token_id


@pytest.mark.parametrize("kind", ["list", "tokenizer"])
def test_what_can_be_no_teacher_is_refused(kind: str, tmp_path: Path) -> None:
    """A tokenizer is no function, though it can be called."""
    given = ["a", "b"] if kind == "list" else tiny.tokenizer()
    with pytest.raises(TypeError, match="a teacher is a model, a path, a function or, with"):
        make(tmp_path, given)


def test_a_reward_of_tokens_does_not_go_with_ratios_of_responses(tmp_path: Path) -> None:
    settings = {"teacher_kl_coef": 1.0, "teacher_kl_in": "reward"}
    with pytest.raises(ValueError, match="gives each token an advantage of its own"):
        online(tmp_path, "grpo", another(), importance_sampling_level="sequence", **settings)


def test_a_teacher_without_a_coefficient_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="teacher_kl_coef is 0, so that nothing is learned of it"):
        online(tmp_path, "grpo", another())


@pytest.mark.parametrize("ledger", [False, True])
def test_nothing_is_learned_of_a_teacher_where_it_has_no_numbers(
    ledger: bool, tmp_path: Path
) -> None:
    """It breaks on one word, which one of the prompts has."""
    teacher = another()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[12].fill_(torch.nan)
    data = Dataset.from_dict({"prompt": ["w3 w4", "w12 w4", "w5 w4", "w6 w4"]})
    settings = {"shuffle_dataset": False, "padding_free": False, "ledger": ledger}
    trainer = make(tmp_path, teacher, train_dataset=data, **settings)
    with pytest.warns(UserWarning, match="are not finite in 1 of 4 responses of a pass"):
        trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
    assert trainer.state.log_history[0]["teacher_nonfinite"] == 0.25
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_the_host_reads_a_teachers_numbers_once_the_students_pass_has_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = []

    def later(x: Tensor) -> Callable[[], Tensor]:
        return lambda: read.append(x) or x

    monkeypatch.setattr("fastrl.learn.teacher.later_on_host", later)
    trainer = make(tmp_path, another())
    trainer.train()
    read.clear()
    (given,) = trainer._passes(trainer.model, trainer._generations.buffer[0], "train")
    trainer.compute_loss(trainer.model, given)
    assert not read
    trainer._note([given], "train")
    assert len(read) == 1


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_rewards_are_without_a_teacher_that_has_no_numbers(kind: str, tmp_path: Path) -> None:
    """Its responses are left out; the advantages of the others have the teacher's part."""
    teacher = another()
    with torch.no_grad():
        teacher.get_input_embeddings().weight[12].fill_(torch.nan)
    data = Dataset.from_dict({"prompt": ["w3 w4", "w12 w4", "w5 w4", "w6 w4"]})
    settings: dict[str, Any] = {
        "shuffle_dataset": False, "padding_free": False, "beta": 0.0,
        "per_device_train_batch_size": 16,
    }  # fmt: skip

    def trained(**of_teacher: Any) -> Samples:
        trainer = online(tmp_path, kind, train_dataset=data, **settings, **of_teacher)
        trainer.train()
        assert all(p.isfinite().all() for p in trainer.model.parameters())
        return trainer._generations.buffer[0]

    alone = trained()
    coefficient = {"teacher_kl_coef": 0.5, "teacher_kl_in": "reward"}
    with pytest.warns(UserWarning, match="log-probs that are not finite in") as warned:
        beside = trained(teacher_model=teacher, **coefficient)
    pairs = zip(beside.prompt_ids, beside.sequences, strict=True)
    broken = [12 in prompt or 12 in response for prompt, response in pairs]
    assert 4 <= sum(broken) < 16
    assert f"in {sum(broken)} of 16 responses" in str(warned[0].message)
    assert [not mask.any() for mask in beside.learned] == broken
    if kind == "rloo":
        others = ~torch.tensor(broken)
        assert (beside.advantages != alone.advantages)[others].all()
        assert not beside.advantages[~others].any()
    else:
        assert [bool(x.any()) for x in beside.token_advantages] == [not out for out in broken]


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_prompt_that_several_responses_share_is_read_once_by_each_side(
    place: str, tmp_path: Path
) -> None:
    """Positions of both models, counted by hooks: packed, without a position for padding. Groups
    that fit in a batch stay together in it."""
    teacher = another()
    seen: dict[str, int] = {}

    def count(name: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            ids = kwargs.get("input_ids", args[0] if args else None)
            seen[name] = seen.get(name, 0) + ids.numel()

        return hook

    settings: dict[str, Any] = {
        "train_dataset": prompts(6, hint=True), "num_generations": 4, "padding_free": True,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 3,
    }  # fmt: skip
    if place == "loss":
        trainer = make(tmp_path, teacher, **settings)
    else:
        beside = {"teacher_kl_coef": 1.0, "teacher_kl_in": "reward", "beta": 0.0}
        trainer = online(tmp_path, "grpo", teacher, **settings, **beside)
    trainer.train()  # chooses packing, and heads
    for name, model in (("student", trainer.model), ("teacher", teacher)):
        model.model.register_forward_pre_hook(count(name), with_kwargs=True)
    batches = trainer._generations.buffer
    if place == "reward":
        whole = Samples.joined(batches)
        trainer.teaching.teachers.log_probs(whole, tiny.PAD, torch.device("cpu"), PassLimit(24))
        batches = [whole]
    else:
        assert len(batches) == 3
    expected = {"student": 0, "teacher": 0}
    for samples in batches:
        responses = sum(map(len, samples.sequences))
        sides = (("student", samples.prompt_ids), ("teacher", samples.teacher_prompt_ids))
        for name, read in sides:
            shared = {tuple(ids.tolist()) for ids in read}
            assert len(shared) == len(samples) // 4
            expected[name] += sum(map(len, shared)) + responses
        if place == "loss":
            (each,) = trainer._passes(trainer.model, samples, "train")
            assert trainer.compute_loss(trainer.model, each).isfinite()
    if place == "reward":
        del expected["student"]
    assert seen == expected
