"""RewardTrainer: its loss, its gradients, predictions, tables and files."""

import contextlib
import copy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    TrainingArguments,
)

from fastrl import RewardConfig, RewardDataCollatorWithPadding, RewardTrainer, compute_accuracy
from fastrl.data.prepare import prepare_pairs
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import (
    GRADIENT_STEP,
    SETTINGS,
    Make,
    assert_moved_by,
    pairs,
    reward_model,
    weights,
)
from tests.weights import assert_same_weights


def exact(model: Any, data: Dataset, coef: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, text by text and without padding; a mean over labels."""
    model, tokenizer = copy.deepcopy(model).double(), tiny.tokenizer()
    loss = torch.zeros((), dtype=torch.float64)
    for row in data:
        chosen, rejected = (
            model(
                input_ids=tokenizer(row["prompt"] + row[side], return_tensors="pt")["input_ids"]
            ).logits.flatten()
            for side in ("chosen", "rejected")
        )
        margin = torch.tensor(row.get("margin", 0.0))
        loss = loss - torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
        loss = loss + coef * ((chosen + rejected) ** 2).mean()
    loss = loss / len(data)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["roberta", "gpt2", "llama"])
@pytest.mark.parametrize("coef", [None, 0.05])
@pytest.mark.parametrize("margin", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(
    make_reward: Make, family: str, coef: float | None, margin: bool
) -> None:
    data = pairs(4, margin=lambda i: 0.5 * i - 0.3) if margin else pairs(4)
    model = reward_model(family)
    loss, gradients = exact(model, data, coef or 0.0)
    before = weights(model)
    gradients |= {n: torch.zeros_like(w).double() for n, w in before.items() if n not in gradients}
    trainer = make_reward(model, data, center_rewards_coefficient=coef, **GRADIENT_STEP)
    assert trainer.train().training_loss == pytest.approx(loss, rel=1e-5)
    assert_moved_by(before, model, gradients)


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("labels", [1, 2])
def test_margins_may_stand_in_a_column_and_labels_be_two(
    make_reward: Make, labels: int, column: bool
) -> None:
    data = pairs(4, margin=lambda i: [0.5 * i - 0.3] if column else 0.5 * i - 0.3)
    model = reward_model("llama", num_labels=labels)
    loss, gradients = exact(model, data, 0.05)
    before = weights(model)
    gradients |= {n: torch.zeros_like(w).double() for n, w in before.items() if n not in gradients}
    with several_labels(labels):
        trainer = make_reward(model, data, center_rewards_coefficient=0.05, **GRADIENT_STEP)
    assert trainer.train().training_loss == pytest.approx(loss, rel=1e-5)
    assert_moved_by(before, model, gradients)


def several_labels(labels: int) -> Any:
    """Where the one warning of a model with several labels is due."""
    if labels == 1:
        return contextlib.nullcontext()
    return pytest.warns(UserWarning, match=rf"the model has {labels} labels.*num_labels=1")


def test_a_model_with_two_labels_is_evaluated_by_the_mean_of_its_rewards(
    make_reward: Make, capsys: Any
) -> None:
    model, data = reward_model("gpt2", num_labels=2), pairs(6)
    with several_labels(2) as warned:
        trainer = make_reward(model, data, eval_dataset=data)
        predictions, _, metrics = trainer.predict(data)
        evaluation = trainer.evaluate()
        trainer.train()
    assert len(warned) == 1
    assert predictions.shape == (6, 2)
    assert "rejected_text" in capsys.readouterr().out
    assert metrics["test_accuracy"] == evaluation["eval_accuracy"]


def test_predictions_of_two_labels_compare_their_means(make_reward: Make) -> None:
    model, data, tokenizer = reward_model("gpt2", num_labels=2), pairs(6), tiny.tokenizer()
    with several_labels(2):
        trainer = make_reward(model, data)
    predictions, _, metrics = trainer.predict(data)
    for row, pair in zip(data, predictions, strict=True):
        rewards = torch.stack(
            [
                model(
                    tokenizer(row["prompt"] + row[side], return_tensors="pt")["input_ids"]
                ).logits.mean()
                for side in ("chosen", "rejected")
            ]
        )
        # fp32 rewards around 1, padded in one case
        np.testing.assert_allclose(pair, rewards.softmax(0).detach().numpy(), atol=1e-6)
    wins = (predictions[:, 0] > predictions[:, 1]).mean()
    assert metrics["test_accuracy"] == pytest.approx(wins)


def test_the_short_example_of_the_documentation_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoModelForSequenceClassification gives a plain checkpoint two labels."""
    monkeypatch.chdir(tmp_path)  # the default folder of results is a relative one
    folder = tmp_path / "gpt2"
    tiny_models.language_model("gpt2").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with several_labels(2):
        trainer = RewardTrainer(model=model, tokenizer=tokenizer, train_dataset=pairs())
    assert np.isfinite(trainer.train().training_loss)


def test_a_trained_model_is_tagged_for_the_hub(make_reward: Make) -> None:
    trainer = make_reward()
    assert trainer.model.model_tags == trainer._tag_names == ["fastrl", "trl", "reward-trainer"]
    twice = make_reward(trainer.model)
    assert twice.model.model_tags == ["fastrl", "trl", "reward-trainer"]


@pytest.mark.parametrize("drops", [False, True])
def test_columns_are_the_trainers_own_whatever_is_to_be_dropped(
    make_reward: Make, drops: bool
) -> None:
    trainer = make_reward(remove_unused_columns=drops)
    assert "chosen_ids" in trainer.train_dataset.column_names
    trainer.train()


def test_both_sides_go_through_the_model_in_one_forward(make_reward: Make) -> None:
    model, shapes = reward_model(), []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: shapes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    make_reward(model, max_steps=3).train()
    assert shapes[-3:] == [8, 8, 8]
    assert set(shapes[:-3]) == {1, 4}  # of the comparison that finds the side of its padding


@pytest.mark.filterwarnings("ignore:the loss is of batches that a data_collator of your own")
@pytest.mark.parametrize("labels", [False, True])
def test_gradient_accumulation_is_one_big_batch(make_reward: Make, labels: bool) -> None:
    collate = RewardDataCollatorWithPadding(tiny.tokenizer())

    def labelled(rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A collator of one's own: labels say nothing of how many pairs there are."""
        return collate(rows) | {"labels": torch.ones(len(rows), 5)}

    data = prepare_pairs(pairs(4), tiny.tokenizer(), None)
    settings = {**GRADIENT_STEP, "data_collator": labelled if labels else None}
    whole, parts = reward_model(), reward_model()
    make_reward(whole, data, **settings).train()
    accumulated = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    make_reward(parts, data, **settings, **accumulated).train()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("lacking", ["input_ids_rejected", "margin"])
@pytest.mark.parametrize("row", [0, 1])
def test_a_batch_whose_rows_have_other_columns_is_refused(lacking: str, row: int) -> None:
    names = [
        f"{what}_{side}"
        for what in ("input_ids", "attention_mask")
        for side in ("chosen", "rejected")
    ]
    rows = [{**{key: [1] for key in names}, "margin": 1.0} for _ in range(2)]
    del rows[row][lacking]
    with pytest.raises(ValueError, match=f"the examples lack {lacking}; they have"):
        RewardDataCollatorWithPadding(tiny.tokenizer())(rows)


def test_the_documented_example_trains(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    reward_model(positions=520).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    rows = [
        {
            "instruction": "w5 w6",
            "chosen_response": f"w9 w{20 + i}",
            "rejected_response": f"w{i + 30}",
        }
        for i in range(12)
    ]

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def as_tokens(row: dict[str, str]) -> dict[str, Any]:
        columns = {}
        for side in ("chosen", "rejected"):
            made = tokenizer(
                row["instruction"] + "\n" + row[f"{side}_response"],
                padding="max_length",
                truncation=True,
                max_length=512,
                return_tensors="pt",
            )
            columns[f"input_ids_{side}"] = made["input_ids"][0]
            columns[f"attention_mask_{side}"] = made["attention_mask"][0]
        return columns

    data = Dataset.from_list(rows).map(as_tokens).train_test_split(seed=0)
    with pytest.warns(UserWarning, match="evaluation_strategy="):
        args = RewardConfig(
            output_dir=str(tmp_path / "reward_model"), per_device_train_batch_size=16,
            evaluation_strategy="steps", logging_steps=1, num_train_epochs=10, learning_rate=1e-2,
            use_cpu=True, report_to=None,
        )  # fmt: skip
    trainer = RewardTrainer(
        model=model,
        args=args,
        tokenizer=tokenizer,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    evaluations = [row for row in trainer.state.log_history if "eval_loss" in row]
    assert len(evaluations) == 10
    assert evaluations[-1]["eval_accuracy"] == 1.0
    # Padding to 512 is cut off again.
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids_chosen"].shape == (9, 4)


def classic(folder: Path, args: Any = None, **given: Any) -> RewardTrainer:
    """A trainer by the names and arguments of TRL's classic one."""
    if args is None:
        args = TrainingArguments(str(folder), max_steps=1, use_cpu=True, save_strategy="no")
    tokenizer = tiny.tokenizer()
    return RewardTrainer(reward_model(), args, tokenizer=tokenizer, train_dataset=pairs(), **given)


def test_plain_training_arguments_and_a_classic_max_length_do(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, save_strategy="no")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer = classic(tmp_path, args, max_length=8)
    said = sorted((w.category.__name__, str(w.message)) for w in warned)
    for (kind, message), (category, begin) in zip(
        said,
        [
            ("FutureWarning", "TrainingArguments as args is deprecated"),
            ("FutureWarning", "max_length as an argument is deprecated"),
            ("UserWarning", "5 of 8 pairs dropped: 5 have a side of more than max_length=8 tokens"),
            ("UserWarning", "remove_unused_columns=True"),
        ],
        strict=True,
    ):
        assert kind == category
        assert message.startswith(begin)
    trainer.train()
    assert trainer.tokenizer is trainer.processing_class
    assert trainer.use_reward_data_collator
    assert not trainer.args.remove_unused_columns
    assert args.remove_unused_columns, "the caller's own arguments stay as they are"


@pytest.mark.filterwarnings("ignore:TrainingArguments as args", "ignore:remove_unused_columns")
def test_a_length_that_nobody_gave_is_said_and_one_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="max_length is not given: 512 is taken"):
        trainer = classic(tmp_path)
    assert trainer.args.max_length == 512
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": None}
    with pytest.raises(ValueError, match="max_length is given twice, 9 and 8"):
        classic(tmp_path, RewardConfig(**given, max_length=8), max_length=9)
    with pytest.warns(FutureWarning, match="max_length as an argument is deprecated"):
        trainer = classic(tmp_path, RewardConfig(**given), max_length=20)
    assert trainer.args.max_length == 20
    classic(tmp_path, RewardConfig(**given))  # TRL 1.x's way: nothing to say


def test_a_loss_of_an_own_collators_batches_is_warned_of_once(tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path), **{**SETTINGS, "max_steps": 3})
    trainer = classic(tmp_path, args, data_collator=RewardDataCollatorWithPadding(tiny.tokenizer()))
    assert not trainer.use_reward_data_collator
    with pytest.warns(UserWarning, match="data_collator of your own") as warned:
        trainer.train()
    assert len(warned) == 1


def test_without_peft_a_peft_config_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    args = RewardConfig(str(tmp_path), use_cpu=True, report_to=None)
    with pytest.raises(ValueError, match=r"peft_config needs peft: pip install"):
        classic(tmp_path, args, peft_config={"r": 8})


def test_shown_pairs_go_to_wandb_with_the_classic_columns(
    make_reward: Make, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    logged: list[Any] = []
    fake = SimpleNamespace(run=object(), log=logged.append, Table=lambda **table: table)
    trainer = make_reward(eval_dataset=pairs(3))
    trainer.args.report_to = ["wandb"]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trainer.visualize_samples(-1)
    shown = capsys.readouterr().out
    table = logged[0]["completions"]
    assert table["columns"] == ["chosen_text", "rejected_text", "logits"]
    assert all(name in shown for name in table["columns"])
    assert len(table["data"]) == 3
    for row in table["data"]:
        assert sum(row[2]) == pytest.approx(1, abs=2e-4)
        assert str(row[2]) in shown


def test_predictions_are_the_softmax_of_both_rewards(make_reward: Make) -> None:
    model, data = reward_model("gpt2"), pairs(6)
    trainer = make_reward(model, data, eval_dataset=data)
    predictions, labels, metrics = trainer.predict(data)
    assert predictions.shape == (6, 2)
    np.testing.assert_array_equal(labels, np.zeros(6))
    tokenizer = tiny.tokenizer()
    for row, pair in zip(data, predictions, strict=True):
        rewards = [
            model(tokenizer(row["prompt"] + row[side], return_tensors="pt")["input_ids"]).logits
            for side in ("chosen", "rejected")
        ]
        expected = torch.cat(rewards).flatten().softmax(0).detach().numpy()
        np.testing.assert_allclose(pair, expected, atol=1e-6)
    wins = float((predictions[:, 0] > predictions[:, 1]).mean())
    assert metrics["test_accuracy"] == pytest.approx(wins)
    loss = -np.log(predictions[:, 0].astype(np.float64)).mean()
    assert trainer.evaluate(num_print_samples=0)["eval_loss"] == pytest.approx(loss, rel=1e-4)


def test_ties_are_counted_as_wrong_and_said() -> None:
    predictions = np.array([[0.7, 0.3], [0.5, 0.5], [0.2, 0.8], [0.6, 0.4]])
    with pytest.warns(UserWarning, match="1 of 4 pairs have equal rewards"):
        assert compute_accuracy((predictions, None)) == {"accuracy": 0.5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute_accuracy((predictions[:1], None)) == {"accuracy": 1.0}


@pytest.mark.parametrize("kind", [np.array, torch.tensor, "bfloat16"])
def test_accuracy_of_arrays_and_of_tensors(kind: Any) -> None:
    predictions: Any = [[0.75, 0.25], [0.25, 0.75], [0.5, 0.625], [0.25, 0.125]]
    labels: Any = [0, 0, 1, 1]
    if kind == "bfloat16":
        predictions, labels = torch.tensor(predictions).bfloat16(), torch.tensor(labels)
    else:
        predictions, labels = kind(predictions), kind(labels)
    assert compute_accuracy(EvalPrediction(predictions, labels)) == {"accuracy": 0.5}
    assert compute_accuracy((predictions, None)) == {"accuracy": 0.5}
    assert compute_accuracy((predictions[1:3], labels[1:3])) == {"accuracy": 0.5}
    assert compute_accuracy((predictions[1:3], None)) == {"accuracy": 0.0}


@pytest.mark.parametrize(("count", "shown"), [(-1, 7), (3, 3), (0, 0), (100, 7)])
def test_evaluation_prints_as_many_pairs_as_asked_for(
    make_reward: Make, capsys: Any, count: int, shown: int
) -> None:
    data = pairs(7)
    trainer = make_reward(None, data, eval_dataset=data)
    trainer.model.train()
    trainer.visualize_samples(count)
    assert trainer.model.training
    out = capsys.readouterr().out
    # A longer text goes on in the next line, where the table is as narrow as a terminal.
    assert sum(row["chosen"][:12] in out for row in data) == shown
    assert ("logits" in out) == (shown > 0)


def test_brackets_in_texts_are_printed_as_they_are(make_reward: Make, capsys: Any) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.batch_decode = lambda ids, **_: ["[/b] [red]x"] * len(ids)  # type: ignore[assignment]
    trainer = make_reward(eval_dataset=pairs(2), processing_class=tokenizer)
    trainer.visualize_samples(-1)
    assert "[/b] [red]x" in capsys.readouterr().out


def test_several_evaluation_sets_are_told_apart(make_reward: Make, capsys: Any) -> None:
    trainer = make_reward(eval_dataset={"a": pairs(3, seed=1), "b": pairs(2, seed=2)})
    metrics = trainer.evaluate(num_print_samples=1)
    assert {"eval_a_loss", "eval_b_loss", "eval_a_accuracy", "eval_b_accuracy"} <= set(metrics)
    out = capsys.readouterr().out
    for shown, data in ((1, pairs(3, seed=1)), (1, pairs(2, seed=2))):
        assert sum(row["chosen"][:12] in out for row in data) == shown
    assert "eval_loss" in trainer.evaluate(pairs(3, seed=3), num_print_samples=0)


def test_a_saved_model_gives_the_same_rewards(make_reward: Make, tmp_path: Path) -> None:
    trainer = make_reward(max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    again = make_reward(str(tmp_path / "saved"), processing_class=None)
    assert_same_weights(again.model, trainer.model)
    expected = trainer.predict(pairs(3)).predictions
    np.testing.assert_allclose(again.predict(pairs(3)).predictions, expected, atol=1e-6)


def test_model_init_makes_the_model(tmp_path: Path) -> None:
    args = RewardConfig(output_dir=str(tmp_path), **SETTINGS)
    make = {"args": args, "train_dataset": pairs(), "tokenizer": tiny.tokenizer()}
    RewardTrainer(model_init=lambda: reward_model(), **make).train()
    with pytest.warns(UserWarning, match=r"the model has 3 labels.*num_labels=1"):
        RewardTrainer(model_init=lambda: reward_model(num_labels=3), **make)


def test_a_decoder_without_a_pad_token_reads_the_last_token(make_reward: Make) -> None:
    model = reward_model("gpt2")
    model.config.pad_token_id = None
    predictions = make_reward(model).predict(pairs()).predictions
    expected = make_reward(reward_model("gpt2")).predict(pairs()).predictions
    np.testing.assert_allclose(predictions, expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the loss is of batches that a data_collator of your own")
def test_an_own_collator_may_pad_each_side_by_itself(make_reward: Make) -> None:
    tokenizer = tiny.tokenizer()

    def collate(rows: list[dict[str, str]]) -> dict[str, Any]:
        batch = {}
        for side in ("chosen", "rejected"):
            padded = tokenizer(
                [r["prompt"] + r[side] for r in rows], padding=True, return_tensors="pt"
            )
            batch[f"input_ids_{side}"] = padded["input_ids"]
            batch[f"attention_mask_{side}"] = padded["attention_mask"]
        return batch

    data = pairs(4)
    usual = make_reward(reward_model("gpt2"), data)
    own = make_reward(reward_model("gpt2"), data, data_collator=collate, processing_class=None)
    expected = usual.predict(data).predictions
    np.testing.assert_allclose(own.predict(data).predictions, expected, atol=1e-6)
