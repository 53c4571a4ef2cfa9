"""``fastrl align`` from end to end, on tiny models and local files."""

import json
import re

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fastrl import cli
from fastrl.tools.commands.align import AlignJob
from fastrl.tools.demo.text import preference_pairs
from tests import tiny_models

JUDGE = (
    "def first(questions):\n    return ['[[A]]' if i % 3 else '?' for i in range(len(questions))]\n"
)
WEIGHTS = "def half(batch):\n    return [0.5] * batch.size\n"
# By task: what is needed beside the data, and what an evaluation says.
TASKS = {
    "sft": ({}, "held_out_loss"),
    "reward-modelling": ({}, "held_out_accuracy"),
    "reinforcement-learning": ({"annotator": "rewards.py:length"}, "held_out_reward"),
    "offline-pointwise": ({}, "held_out_accuracy"),
    "online-pointwise": ({"annotator": "rewards.py:length"}, "held_out_reward"),
    "offline-pairwise": ({}, "held_out_accuracy"),
    "online-pairwise": ({"judge": "judge.py:first"}, "win_rate_against_the_start"),
}


@pytest.fixture(scope="module")
def folder(world):
    rows = [
        {"prompt": " ".join(a.split()[:2]) + " ", "chosen": a, "rejected": b}
        for a, b in preference_pairs(60, seed=0)
    ]
    (world / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (world / "judge.py").write_text(JUDGE)
    (world / "weights.py").write_text(WEIGHTS)
    return world


def arguments(folder, output, **flags):
    settings = {
        "model": folder / "lm", "dataset": folder / "pairs.jsonl", "output": output,
        "eval-examples": 12, "per-device-train-batch-size": 16, "num-train-epochs": 1,
        "learning-rate": "1e-2", "logging-steps": 1, "use-cpu": "true", "max-new-tokens": 6,
        "max-length": 40, **flags,
    }  # fmt: skip
    for name in ("annotator", "judge", "reweighter", "loss"):
        if ".py" in str(settings.get(name)):
            settings[name] = folder / settings[name]
    return ["align", *(word for k, v in settings.items() for word in (f"--{k}", str(v)))]


@pytest.mark.usefixtures("figures")
@pytest.mark.filterwarnings("ignore:Some weights of GPT2ForSequenceClassification")
@pytest.mark.parametrize("task", TASKS)
def test_every_task_leaves_a_model_metrics_and_a_report(task, folder, tmp_path, capsys):
    flags, told = TASKS[task]
    run = tmp_path / "run"
    assert cli.main(arguments(folder, run, task=task, **flags)) == 0
    assert (run / "report.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "loss", "learning_rate"} <= set().union(*rows)
    summary = json.loads((run / "summary.json").read_text())
    assert {f"{told}_before", f"{told}_after"} <= set(summary)
    assert summary["job"]["task"] == task
    assert summary["steps"] == (
        12 if task == "reinforcement-learning" else 3 * (1 + (task == "offline-pointwise"))
    )
    kind = (
        AutoModelForSequenceClassification if task == "reward-modelling" else AutoModelForCausalLM
    )
    kind.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").eos_token == "<eos>"
    shown = capsys.readouterr().out
    assert ("Held-out prompts, before and after" in shown) == (
        "online" in task or "inforce" in task
    )
    word = "win rate" if "win_rate" in told else told.removeprefix("held_out_")
    assert re.search(rf" step \d+: held-out .*{word} -?\d\.\d\d\d", shown)


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_loss_coefficients_weights_and_an_adapter_are_flags(folder, tmp_path):
    flags = {
        "loss": "ipo",
        "loss-args": '{"beta": 0.5, "length_means": true}',
        "reweighter": "weights.py:half", "lora-r": 2, "eval-examples": 0, "max-steps": 2,
    }  # fmt: skip
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 0
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(0.5 * (1 / (2 * 0.5)) ** 2)  # the weight, and h = 0
    assert rows[0]["weights"] == 0.5
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()


@pytest.mark.parametrize(("loss", "most"), [("dpo", 32), ("kto", 32), ("bradley-terry", 64)])
def test_rows_shorter_than_the_longest_allowed_are_planned(loss, most, folder, tmp_path, capsys):
    flags = {"plan": "true", "max-steps": 1, "eval-examples": 0, "micro-batch-tokens": most}
    flags |= {"loss": loss, "max-length": 128, "model": folder / "lm"}
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 0
    said = capsys.readouterr().err
    assert "planned memory: " in said
    assert "no plan" not in said


@pytest.mark.parametrize(("flags", "message"), [
    ({"task": "offline"}, "unknown task 'offline': choose one of sft"),
    ({"loss": "kto", "task": "offline-pairwise"}, "kto does not fit the task offline-pairwise"),
    ({"loss": "dqo"}, "unknown loss 'dqo'"),
    ({"loss-args": "{beta: 1}"}, "loss_args is not valid JSON"),
    ({"loss-args": "[1]"}, "loss_args must be a dict or a JSON object"),
    ({"loss-args": '{"gamma": 1}'}, "the loss dpo has no coefficient 'gamma'"),
    ({"loss-args": '{"beta": -1}'}, "beta of the loss dpo must be a number of 0"),
    ({"loss": "hinge", "loss-args": '{"label_smoothing": 0.1}'}, "has no coefficient 'label_"),
    ({"loss": "weights.py:half"}, "half must take chosen, rejected, in this order"),
    ({"task": "online-pairwise"}, "pass --annotator or --judge, one of the two"),
    ({"annotator": "rewards.py:length"}, "leave out --annotator and --judge"),
    ({"reweighter": "heavy"}, "unknown reweighter 'heavy'"),
    ({"num-train-epochs": "1.5"}, "num_train_epochs must be a whole number"),
    ({"task": "online-pairwise", "judge": "judge.py:first", "top-p": "2"}, "top_p must lie"),
    ({"reference": "trunk"}, "needs num_shared_layers"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(folder, tmp_path, capsys, flags, message):
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_loss_ppo_takes_any_number_of_mini_batches():
    job = AlignJob(
        model="model", dataset="rows.jsonl", task="reinforcement-learning", loss="ppo",
        loss_args='{"mini_batches": 4}', annotator="rewards.py:length",
    )  # fmt: skip
    assert job.make_loss().mini_batches == 4


def test_a_loss_of_ones_own_is_named_by_its_file(folder, tmp_path):
    (folder / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from fastrl.alignment import PairwiseLoss\n"
        "@dataclass(frozen=True)\n"
        "class Chosen(PairwiseLoss):\n"
        "    name: ClassVar[str] = 'chosen'\n"
        "    worth: float = 2.0\n"
        "    def losses(self, chosen, rejected):\n"
        "        return self.worth + chosen.sums - chosen.sums.detach()\n"
        "    def implicit_reward(self, side):\n"
        "        return side.sums\n"
    )
    flags = {"loss": "mine.py:Chosen", "loss-args": '{"worth": 3}', "max-steps": 1}
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 0
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == [3.0]


@pytest.mark.parametrize("task", ["offline-pairwise", "reward-modelling"])
@pytest.mark.filterwarnings("ignore:Some weights of GPT2ForSequenceClassification")
@pytest.mark.filterwarnings("ignore:.* examples are longer than max_length")
def test_texts_are_cut_or_dropped_at_the_models_limit(task, folder, tmp_path):
    """As by ``fastrl sft`` and ``reward``: the default max_length is beyond it."""
    long = [
        {"prompt": "the film is ", "chosen": "moving " * n, "rejected": "tedious " * n}
        for n in (3, 200)
    ]
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in long * 2))
    flags = {"dataset": data, "eval-examples": 0, "max-length": 1024, "max-steps": 1, "task": task}
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 0


def test_a_judge_that_says_nothing_may_stop_the_run(folder, tmp_path, capsys):
    flags = {"task": "online-pairwise", "judge": "judge.py:first", "judge-unparsed": "refuse"}
    assert cli.main(arguments(folder, tmp_path / "run", **flags)) == 2
    assert "'?'" in capsys.readouterr().err


@pytest.mark.parametrize(("loss", "task"), [
    (None, "offline-pairwise"),
    ("dpo", "offline-pairwise"),
    ("kto", "offline-pointwise"),
    ("sft", "sft"),
    ("bradley-terry", "reward-modelling"),
])  # fmt: skip
def test_a_loss_without_a_task_takes_its_own_offline_one(loss, task):
    job = AlignJob(model="m", dataset="d.jsonl", loss=loss)
    assert job.task == job.record()["job"]["task"] == task


def test_a_loss_of_responses_that_the_policy_writes_takes_its_own_task():
    job = AlignJob(model="m", dataset="d.jsonl", loss="ppo", annotator="a")
    assert job.task == "reinforcement-learning"
