"""``fastrl sft`` and ``fastrl reward`` from end to end, on tiny models and local files."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from fastrl import SFTTrainer, cli
from fastrl.rewards.classifier import ClassifierReward
from tests.resuming import untimed

COMMANDS = {"sft": ("lm", "reviews.jsonl"), "reward": ("clf1", "pairs.jsonl")}


@pytest.fixture(scope="module")
def folder(world):
    model = AutoModelForSequenceClassification.from_pretrained(
        world / "clf", num_labels=1, ignore_mismatched_sizes=True
    )
    model.save_pretrained(world / "clf1")
    AutoTokenizer.from_pretrained(world / "clf").save_pretrained(world / "clf1")
    return world


def arguments(command, folder, output, **flags):
    model, data = COMMANDS[command]
    settings = {
        "model": folder / model, "dataset": folder / data, "output": output,
        "eval-examples": 12, "per-device-train-batch-size": 8, "num-train-epochs": 1,
        "learning-rate": "1e-2", "logging-steps": 1, "use-cpu": "true", "seed": 3, **flags,
    }  # fmt: skip
    return [command, *(word for k, v in settings.items() for word in (f"--{k}", str(v)))]


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_leaves_a_model_metrics_and_a_report(command, folder, tmp_path, capsys):
    assert cli.main(arguments(command, folder, tmp_path / "run")) == 0
    run = tmp_path / "run"
    assert (run / "report.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "loss", "learning_rate", "eval_loss"} <= set().union(*rows)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["train_examples"], summary["eval_examples"], summary["steps"]) == (48, 12, 6)
    assert summary["job"]["eval_examples"] == 12
    assert summary["settings"]["learning_rate"] == 0.01
    assert f"{command}" in capsys.readouterr().err.lower()  # the progress bar
    if command == "sft":
        assert summary["held_out_loss_after"] < summary["held_out_loss_before"]
        tuned = AutoModelForCausalLM.from_pretrained(run / "model")
        start = AutoModelForCausalLM.from_pretrained(folder / "lm")
    else:
        assert 0 <= summary["held_out_accuracy_after"] <= 1
        tuned = AutoModelForSequenceClassification.from_pretrained(run / "model")
        start = AutoModelForSequenceClassification.from_pretrained(folder / "clf1")
        assert len(ClassifierReward.from_pretrained(str(run / "model")).score(["a film ."])) == 1
    before, after = start.transformer.wte.weight, tuned.transformer.wte.weight
    assert not torch.equal(before, after)
    assert AutoTokenizer.from_pretrained(run / "model").eos_token == "<eos>"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-6"]
    card = (run / "model" / "README.md").read_text()
    start = folder / ("lm" if command == "sft" else "clf1")
    assert "trained with fastrl" in card
    assert f"**Base model:** `{start}`" in card


@pytest.mark.parametrize("command", COMMANDS)
def test_rows_shorter_than_the_longest_allowed_are_planned(command, folder, tmp_path, capsys):
    flags = {"plan": "true", "max-steps": 1, "eval-examples": 0, "micro-batch-tokens": 64}
    assert cli.main(arguments(command, folder, tmp_path / "run", **flags)) == 0
    said = capsys.readouterr().err
    assert "planned memory: " in said
    assert "no plan" not in said


def metrics_of(run):
    return untimed(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))


@pytest.mark.usefixtures("figures")
@pytest.mark.filterwarnings("ignore:after RuntimeError the state is saved")
def test_an_evaluation_that_failed_is_in_the_metrics_once(folder, tmp_path, monkeypatch):
    flags = {f"{x}-strategy": "epoch" for x in ("eval", "save")} | {"num-train-epochs": 2}
    runs = [arguments("sft", folder, tmp_path / name, **flags) for name in ("whole", "run")]
    assert cli.main(runs[0]) == 0
    evaluate = SFTTrainer.evaluate

    def fails(self, *args, **kwargs):
        metrics = evaluate(self, *args, **kwargs)  # which are logged
        if self.state.global_step == 6:
            raise RuntimeError("no room")
        return metrics

    monkeypatch.setattr(SFTTrainer, "evaluate", fails)
    with pytest.raises(RuntimeError, match="no room"):
        cli.main(runs[1])
    monkeypatch.setattr(SFTTrainer, "evaluate", evaluate)
    whole = metrics_of(tmp_path / "whole")
    assert cli.main([*runs[1], "--resume", "true"]) == 0
    assert metrics_of(tmp_path / "run") == whole
    behind_one = tmp_path / "whole" / "checkpoints" / "checkpoint-6"
    assert cli.main([*runs[0], "--resume", str(behind_one)]) == 0
    assert metrics_of(tmp_path / "whole") == whole


@pytest.mark.parametrize("command", COMMANDS)
def test_without_held_out_examples_all_are_trained_on(command, folder, tmp_path):
    flags = {"eval-examples": 0, "max-steps": 1}
    assert cli.main(arguments(command, folder, tmp_path / "run", **flags)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["train_examples"], summary["eval_examples"]) == (60, 0)
    assert not any(name.startswith("held_out") for name in summary)


def test_a_template_says_what_is_learned(folder, tmp_path, capsys):
    flags = {"response-template": " nowhere to be found", "max-steps": 1}
    assert cli.main(arguments("sft", folder, tmp_path / "run", **flags)) == 2
    assert "does not occur" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    ({"eval-examples": 60}, "60 held-out examples leave none of 60 to train on"),
    ({"eval-examples": -1}, "eval_examples must be 0 or more or None, got -1"),
    ({"lora-r": -2}, "lora_r must be 0 or more"),
    ({"dataset": "nowhere.jsonl"}, "there is no data set at nowhere.jsonl"),
    ({"packing": "true"}, "unknown argument '--packing'"),
])  # fmt: skip
def test_what_is_wrong_is_said_in_a_line(folder, tmp_path, capsys, flags, message):
    assert cli.main(arguments("reward", folder, tmp_path / "run", **flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


def test_an_unknown_metric_of_the_best_model_is_refused_by_the_first_evaluation(
    folder, tmp_path, capsys
):
    flags = {"metric-for-best-model": "acuracy", "max-steps": 1, "eval-strategy": "steps"}
    assert cli.main(arguments("reward", folder, tmp_path / "run", **flags)) == 2
    error = capsys.readouterr().err
    assert "metric_for_best_model='acuracy' is not measured; evaluations have loss, " in error
    assert "runtime" not in error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_yaml_file_holds_the_flags_and_help_explains_them(command, folder, tmp_path, capsys):
    model, data = COMMANDS[command]
    (tmp_path / "run.yaml").write_text(
        f"model: {folder / model}\ndataset: {folder / data}\noutput: {tmp_path / 'run'}\n"
        "eval_examples: 4\nmax_steps: 1\nuse_cpu: true\n"
    )
    assert cli.main([command, str(tmp_path / "run.yaml"), "--max-steps", "2"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    out = capsys.readouterr().out
    assert "--eval-examples" in out
    assert "--max-length" in out
    assert "--output-dir" not in out


OWN_CODE = """
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnLM(GPT2LMHeadModel):
    config_class = OwnConfig

class OwnClassifier(GPT2ForSequenceClassification):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_models_own_code_runs_where_it_is_trusted(command, folder, tmp_path, capsys, monkeypatch):
    """By the flag, and by nothing else."""
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    own = tmp_path / "own"
    shutil.copytree(folder / COMMANDS[command][0], own)
    (own / "own.py").write_text(OWN_CODE)
    config = json.loads((own / "config.json").read_text())
    classes = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnLM",
        "AutoModelForSequenceClassification": "own.OwnClassifier",
    }
    config |= {"model_type": "own", "auto_map": classes}
    (own / "config.json").write_text(json.dumps(config))
    given = {"model": own, "max-steps": 1, "eval-examples": 0}
    assert cli.main(arguments(command, folder, tmp_path / "without", **given)) != 0
    assert "trust_remote_code" in capsys.readouterr().err
    trusted = {**given, "trust-remote-code": "true"}
    assert cli.main(arguments(command, folder, tmp_path / "with", **trusted)) == 0
    assert (tmp_path / "with" / "model" / "own.py").exists()


def test_model_init_kwargs_reach_the_model(folder, tmp_path):
    given = {"model-init-kwargs": '{"dtype": "bfloat16"}', "max-steps": 1, "eval-examples": 0}
    assert cli.main(arguments("sft", folder, tmp_path / "run", **given)) == 0
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"
