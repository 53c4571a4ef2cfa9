"""Every command leaves the same kind of folder, and ``fastrl report`` reads it."""

import json
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from transformers import AutoModelForCausalLM

from fastrl import cli
from tests import tiny_models

FITTING = {"max-steps": 2, "eval-examples": 12, "logging-steps": 1, "use-cpu": "true"}
LEARNING = {
    "dataset": "reviews.jsonl", "reward": "rewards.py:length", "prompt-words": 5, "steps": 2,
    "max-new-tokens": 6, "batch-size": 8, "mini-batch-size": 4, "ppo-epochs": 1, "eval-prompts": 10,
}  # fmt: skip
ALIGNING = {"dataset": "prompted.jsonl", "max-length": 40, **FITTING}
COMMANDS = {
    "sft": ("sft", {"dataset": "reviews.jsonl", **FITTING}),
    "reward": ("reward", {"dataset": "pairs.jsonl", **FITTING}),
    "align": ("align", ALIGNING),
    "align online": ("align",
     {"task": "online-pairwise", "annotator": "rewards.py:length", "max-new-tokens": 6} | ALIGNING),
    "distill": ("distill",
     {"dataset": "prompted.jsonl", "teacher": "wide", "max-completion-length": 6} | FITTING),
    "ppo": ("ppo", LEARNING),
    "grpo": ("grpo", {"group-size": 4, **LEARNING}),
}  # fmt: skip
SAMPLED = ("align online", "distill", "ppo", "grpo")


@pytest.fixture(scope="module")
def world(world):
    rows = [json.loads(line) for line in (world / "pairs.jsonl").read_text().splitlines()]
    rows = [{"prompt": "the ", **row} for row in rows]
    (world / "prompted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return world


def run(name, world, output, **flags):
    command, settings = COMMANDS[name]
    settings = {"model": "lm", "output": output, **settings, **flags}
    for key in ("model", "teacher", "dataset", "reward", "annotator"):
        if key in settings:
            settings[key] = world / settings[key]
    words = (word for k, v in settings.items() for word in (f"--{k.replace('_', '-')}", str(v)))
    return cli.main([command, *words])


@pytest.fixture
def told(monkeypatch):
    """What a tracker is told, in order."""
    told = []

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "told", True
        tracker = None

        def __init__(self, run_name, logging_dir):
            super().__init__()
            told.append(("folder", logging_dir))

        def store_init_configuration(self, values):
            told.append(("settings", set(values)))

        def log(self, values, step=None, **kwargs):
            told.append((step, set(values)))

        def log_table(self, table_name, columns=None, data=None, step=None, **kwargs):
            assert all(len(row) == len(columns) for row in data)
            told.append((step, {table_name}))

        def finish(self):
            told.append(("finish", None))

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
    monkeypatch.setattr(
        "accelerate.tracking.get_available_trackers", lambda: [LoggerType.TENSORBOARD]
    )
    return told


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_leaves_the_same_kind_of_folder(name, world, tmp_path, capsys, told):
    folder = tmp_path / "run"
    assert run(name, world, folder, report_to="tensorboard") == 0
    assert told[0] == ("folder", str(folder / "logs"))
    assert told[-1] == ("finish", None)
    assert "learning_rate" in told[1][1]
    steps = [step for step, _ in told[2:-1]]
    assert min(steps) == 0  # the evaluation before training
    assert max(steps) == 2
    names = set().union(*(names for _, names in told[2:-1]))
    assert {"reward/mean", "train/loss"} & names
    assert ("eval/samples" in names) == (name in SAMPLED)
    files = {"run.json", "metrics.jsonl", "model", "report.png", "summary.json"}
    files |= {"samples.jsonl"} if name in SAMPLED else set()
    files |= {"checkpoints", *(["ledger"] if name in ("ppo", "grpo") else [])}
    assert {path.name for path in folder.iterdir()} == files
    config = json.loads((folder / "run.json").read_text())
    assert set(config) == {"command", "title", "job", "settings", "started_in", "code"}
    assert config["started_in"] == str(Path.cwd())
    assert config["command"] == COMMANDS[name][0]
    summary = json.loads((folder / "summary.json").read_text())
    assert {key: summary[key] for key in config} == config
    assert summary["steps"] == 2
    assert summary["train_examples"] > 0
    assert summary["eval_examples"] in (10, 12)
    assert summary["seconds"] > 0
    card = (folder / "model" / "README.md").read_text()
    assert "# model" in card
    assert (folder / "model" / "tokenizer.json").exists()
    if name in SAMPLED:
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert len(rows) == summary["eval_examples"]
        assert set(rows[0]) == {"prompt", "before", "reward_before", "after", "reward_after"}
    if name in ("ppo", "grpo"):
        assert set(summary["reference"]) == {"mode", "why"}

    drawn = (folder / "report.png").read_bytes()
    (folder / "report.png").unlink()
    capsys.readouterr()
    assert cli.main(["report", str(folder)]) == 0
    assert (folder / "report.png").read_bytes() == drawn
    assert (folder / "report.html").exists()
    out = capsys.readouterr().out
    assert "train examples" in out
    assert ("Held-out prompts, before and after" in out) == (name in SAMPLED)


def test_the_results_of_several_runs_stand_side_by_side(world, tmp_path, capsys):
    for rate in ("1e-3", "1e-2"):
        assert run("sft", world, tmp_path / rate, learning_rate=rate) == 0
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "1e-3"), str(tmp_path / "1e-2")]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "held out loss after" in line)
    values = [
        json.loads((tmp_path / rate / "summary.json").read_text())["held_out_loss_after"]
        for rate in ("1e-3", "1e-2")
    ]
    assert [float(word) for word in line.split()[-2:]] == [float(f"{x:.4g}") for x in values]


@pytest.mark.parametrize("words", [["nowhere"], [], ["--all"]])
def test_report_says_what_it_lacks(words, capsys):
    assert cli.main(["report", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fastrl: error: ")
    assert ("nowhere holds no run" in said) == (words == ["nowhere"])


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_of_an_earlier_runs_adapter_nothing_is_left(name, world, tmp_path):
    """Or the folder would be loaded as that adapter."""
    assert run(name, world, tmp_path / "run", lora_r=2) == 0
    assert run(name, world, tmp_path / "run", overwrite="true") == 0
    assert not list((tmp_path / "run" / "model").glob("adapter*"))
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert not hasattr(tuned, "peft_config")


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_new_adapter_does_not_overwrite_its_base(name, world, tmp_path, capsys):
    assert run("sft", world, tmp_path / "run") == 0
    for model in (tmp_path / "run", tmp_path / "run" / "model"):
        assert run(name, world, tmp_path / "run", model=model, lora_r=2, overwrite="true") == 2
        assert "is the base of the adapter" in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_log_with_names_trackers_too(name, world, tmp_path, told):
    assert run(name, world, tmp_path / "run", log_with="tensorboard") == 0
    assert told[-1] == ("finish", None)
    settings = json.loads((tmp_path / "run" / "summary.json").read_text())["settings"]
    assert "tensorboard" in (settings.get("report_to"), settings.get("log_with")) or settings[
        "report_to"
    ] == ["tensorboard"]


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_yaml_file_takes_either_name_of_the_tracker(name, world, tmp_path, capsys):
    command, settings = COMMANDS[name]
    settings = {**settings, "output": tmp_path / "run"}
    lines = [f"{key.replace('-', '_')}: {value}\n" for key, value in settings.items()]
    for key in ("report_to", "log_with"):
        (tmp_path / "run.yaml").write_text("".join([*lines, f"{key}: nothing\n"]))
        assert cli.main([command, str(tmp_path / "run.yaml"), "--model", str(world / "lm")]) == 2
        assert "='nothing': choose one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_none_is_no_tracker(name, world, tmp_path):
    assert run(name, world, tmp_path / "run", report_to="none") == 0
