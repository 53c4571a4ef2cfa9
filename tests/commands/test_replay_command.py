"""``fastrl replay``: the trainer of a run is made again from ``run.json``."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from fastrl import cli
from fastrl.run.folder import RunFolder
from fastrl.run.ledger import Ledger, read_facts, read_ledger
from fastrl.tools.commands.ppo import GRPOFlags, PPOFlags
from fastrl.tools.commands.replay import read_job, read_settings, unflattened
from tests import tiny_models

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]


def train(world, output, command="ppo", /, **flags):
    settings = {
        "model": world / "lm", "dataset": world / "reviews.jsonl",
        "reward": f"{world / 'rewards.py'}:length", "output": output, "prompt-words": 5,
        "max-new-tokens": 6, "steps": 3, "save-every": 2, "batch-size": 8, "mini-batch-size": 4,
        "eval-prompts": 10, "learning-rate": "1e-2", **flags,
    }  # fmt: skip
    words = (word for key, value in settings.items() for word in (f"--{key}", str(value)))
    assert cli.main([command, *words]) == 0


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    """A run of PPO with a new adapter and value head, whose reward function has gone since."""
    output = tmp_path_factory.mktemp("runs") / "run"
    rewards = world / "others.py"
    shutil.copy(world / "rewards.py", rewards)
    # What is drawn as it is loaded must not matter.
    rewards.write_text("import torch\ntorch.rand(3)\n" + rewards.read_text())
    accelerate = json.dumps({"mixed_precision": "no"})
    train(world, output, **{"reward": f"{rewards}:length", "lora-r": 2},
          **{"accelerator-kwargs": accelerate})  # fmt: skip
    rewards.unlink()
    return output


def replay(capsys, *arguments):
    torch.manual_seed(99)
    status = cli.main(["replay", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_sample_is_drawn_again_from_the_beginning_and_from_a_checkpoint(capsys, run, step):
    status, out, _ = replay(capsys, run, "--step", step, "--sample", 5)
    source = "checkpoint-2: 0 updates" if step == 3 else f"the run's beginning: {step - 1} update"
    assert f"step {step}, from {source}" in out
    (row,) = (
        row for row in read_ledger(run / "ledger", None, step, step).to_pylist()
        if row["sample"] == 5
    )  # fmt: skip
    shown = {line.split(None, 1)[0]: line.split(None, 1)[1].strip()
             for line in out.splitlines() if len(line.split(None, 1)) == 2}  # fmt: skip
    assert shown["seed"] == str(row["seed"])
    count = len(row["completion_ids"])
    assert f"sample 5: identical, {count} tokens with their log-probs and values" in out
    assert status == 0


def test_a_run_of_relative_paths_is_replayed_from_anywhere(
    capsys, world, run, tmp_path, monkeypatch
):
    """By the working directory of the run; where that is gone, a warning says so."""
    other = tmp_path / "a run"
    shutil.copytree(run, other)
    recorded = json.loads((other / "run.json").read_text())
    recorded["job"]["model"], recorded["started_in"] = "lm", str(world)
    (other / "run.json").write_text(json.dumps(recorded))
    monkeypatch.chdir(tmp_path)
    assert replay(capsys, "a run", "--step", 3, "--sample", 5)[0] == 0
    assert Path.cwd() == tmp_path
    recorded["started_in"] = str(tmp_path / "gone")
    recorded["job"]["model"] = "./lm"
    (other / "run.json").write_text(json.dumps(recorded))
    with pytest.warns(
        UserWarning, match=r"was started, .*/gone, is not there, and .* has no \./lm"
    ):
        assert replay(capsys, "a run", "--step", 3)[0] == 2


def test_all_samples_of_a_step_of_grpo_are_compared(capsys, world, tmp_path):
    train(world, tmp_path / "run", "grpo", **{"group-size": 4, "eval-prompts": 0})
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    status, out, _ = replay(capsys, tmp_path / "run", "--step", 3)
    assert (status, out.splitlines()[-1]) == (0, "8 of 8 samples are identical")


@pytest.mark.parametrize("loss", ["dpo", "ppo"])
def test_samples_of_align_are_drawn_again_without_its_annotator(capsys, world, tmp_path, loss):
    rewards = world / f"of_{loss}.py"
    shutil.copy(world / "rewards.py", rewards)
    lines = (world / "reviews.jsonl").read_text().splitlines()
    texts = (json.loads(line)["text"].split() for line in lines)
    prompts = [json.dumps({"prompt": " ".join(words[:4])}) for words in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    settings = {
        "model": world / "lm", "dataset": tmp_path / "prompts.jsonl", "output": tmp_path / "run",
        "annotator": f"{rewards}:remainder", "task": {"dpo": "online-pairwise"}.get(loss),
        "loss": loss, "ledger": "true", "log-completions": "true", "max-steps": 6, "save-steps": 4,
        "logging-steps": 3, "per-device-train-batch-size": 4, "eval-examples": 4,
        "max-new-tokens": 6, "learning-rate": "1e-2", "use-cpu": "true",
    }  # fmt: skip
    if loss == "ppo":
        settings["loss-args"] = json.dumps({"epochs": 2})
    given = ((k, str(v)) for k, v in settings.items() if v is not None)
    assert cli.main(["align", *(word for k, v in given for word in (f"--{k}", v))]) == 0
    rewards.unlink()
    assert sorted(path.name for path in (tmp_path / "run" / "completions").iterdir())
    step, count = {"dpo": (6, 8), "ppo": (3, 4)}[loss]
    capsys.readouterr()
    status, out, _ = replay(capsys, tmp_path / "run", "--step", step)
    walked = {"dpo": "1 update", "ppo": "0 updates"}[loss]
    assert f"step {step}, from checkpoint-4: {walked}" in out
    assert (status, out.splitlines()[-1]) == (0, f"{count} of {count} samples are identical")
    status, out, _ = replay(capsys, tmp_path / "run", "--step", 1, "--sample", 1)
    assert status == 0
    assert "sample 1: identical" in out


def test_a_sample_that_differs_is_an_exit_status_of_one(capsys, run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run, other)
    ledger = other / "ledger"
    (facts,), table = read_facts(ledger, 3, 3), read_ledger(ledger, None, 3)
    logprobs = table["logprobs"].to_pylist()
    logprobs[5] = [x - 0.5 for x in logprobs[5]]
    where = table.column_names.index("logprobs")
    table = table.set_column(where, "logprobs", pa.array(logprobs, pa.list_(pa.float32())))
    Ledger(ledger)._write(3, 3, table, facts)
    status, out, _ = replay(capsys, other, "--step", 3, "--sample", 5)
    assert status == 1
    assert "sample 5 DIFFERS:" in out
    assert "logprobs: up to 5.0e-01 apart, in 6 of 6 tokens" in out
    assert replay(capsys, other, "--step", 3, "--sample", 4)[0] == 0
    status, out, _ = replay(capsys, other, "--step", 3)
    assert status == 1
    assert "7 of 8 samples are identical" in out


def test_the_settings_of_a_run_are_read_as_they_were_given(run):
    folder = RunFolder.open(run)
    job, settings = read_job(folder), read_settings(folder, 2)
    assert (job.lora_r, job.max_new_tokens, job.prompt_words) == (2, 6, 5)
    assert (settings.batch_size, settings.learning_rate) == (8, 1e-2)
    assert settings.accelerator_kwargs == {"mixed_precision": "no"}
    for kind in (PPOFlags, GRPOFlags):
        given = kind(tracker_kwargs={"wandb": {"entity": "me", "tags": ["a"]}}, batch_size=8)
        read = unflattened(json.loads(json.dumps(given.to_dict())))
        assert (
            kind(**{f.name: read[f.name] for f in fields(kind) if f.init and f.name in read})
            == given
        )


def test_a_run_resumed_with_other_settings_is_replayed_with_those_of_each_step(
    capsys, world, tmp_path
):
    output = tmp_path / "run"
    train(world, output, **{"eval-prompts": 0, "keep-last": 0})
    recorded = (output / "run.json").read_text()
    again = {"resume": output / "checkpoints" / "checkpoint-3", "learning-rate": "5e-2"}
    with pytest.warns(UserWarning, match="learning_rate: 0.01 → 0.05"):
        train(world, output, **{"eval-prompts": 0, **again})
    assert (output / "run.json").read_text() == recorded  # there was nothing left to do
    with pytest.warns(UserWarning, match="learning_rate: 0.01 → 0.05"):
        train(world, output, **{"eval-prompts": 0, **again, "steps": 5, "keep-last": 0})
    for step in (2, 5):
        status, out, _ = replay(capsys, output, "--step", step)
        assert (status, out.splitlines()[-1]) == (0, "8 of 8 samples are identical")
    shutil.rmtree(output / "checkpoints")
    with pytest.warns(UserWarning, match=r"other settings \(learning_rate: 0.01 → 0.05\)"):
        status, out, _ = replay(capsys, output, "--step", 5)
    assert status == 1
    assert "updates were not the run's, first in step 2: advantages" in out


@pytest.mark.parametrize(("change", "message"), [
    ({"command": "train"}, "is not a run of fastrl ppo, grpo, align"),
    ({"job": {"later": 1}}, "that this version of fastrl does not know (later)"),
    ({"job": None}, "(None)"),
])  # fmt: skip
def test_a_run_that_cannot_be_made_again_is_refused(capsys, run, tmp_path, change, message):
    other = tmp_path / "run"
    shutil.copytree(run / "ledger", other / "ledger")
    recorded = json.loads((run / "run.json").read_text())
    if change.get("job", 1) is None:
        recorded["job"]["model"], message = str(tmp_path / "none"), str(tmp_path / "none")
        change = {}
    (other / "metrics.jsonl").touch()
    (other / "run.json").write_text(json.dumps({**recorded, **change}))
    status, _, err = replay(capsys, other, "--step", 2)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(("arguments", "message"), [
    (["--step", "4"], "does not have step 4: it has the steps 1 to 3"),
    (["--step", "1", "--sample", "8"], "--sample 8: step 1 has no such sample"),
    ([], "the following arguments are required: --step"),
])  # fmt: skip
def test_what_is_not_there_is_named(capsys, run, arguments, message):
    status, _, err = replay(capsys, run, *arguments)
    assert status == 2
    assert message in err
