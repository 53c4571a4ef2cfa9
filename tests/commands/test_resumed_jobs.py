"""``fastrl sft``, ``reward`` and ``align``: cut at any instant and resumed, they leave the files of
a straight run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fastrl import cli
from fastrl.run.checkpoints import Checkpoints
from fastrl.run.metrics import MetricsFile
from tests import tiny_models
from tests.resuming import untimed

FLAGS = {
    "max-steps": 5, "eval-examples": 8, "per-device-train-batch-size": 8, "learning-rate": "1e-2",
    "logging-steps": 2, "save-every": 2, "use-cpu": "true", "num-train-epochs": 1,
}  # fmt: skip
ONLINE = {"max-new-tokens": 5, "eval-strategy": "steps", "eval-steps": 2, "max-length": 40}
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {"dataset": "reviews.jsonl"}),
    "reward": ("reward", {"dataset": "pairs.jsonl", "eval-strategy": "steps", "eval-steps": 2}),
    "dpo": ("align", {"dataset": "prompted.jsonl", "max-length": 40}),
    "online": (
        "align",
        {"dataset": "prompted.jsonl", "task": "online-pairwise", "judge": "judge.py:first"}
        | ONLINE,
    ),
    "ppo": (
        "align",
        {"dataset": "prompted.jsonl", "task": "reinforcement-learning"}
        | {"annotator": "rewards.py:length", "loss-args": '{"epochs": 2}'}
        | ONLINE,
    ),
}


class Killed(BaseException):
    """As a SIGKILL, nothing but the kernel's cleaning up follows."""


@pytest.fixture(scope="module")
def data(world: Path) -> Path:
    rows = [json.loads(line) for line in (world / "pairs.jsonl").read_text().splitlines()]
    rows = [{"prompt": "the ", **row} for row in rows]
    (world / "prompted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (world / "judge.py").write_text(
        "def first(questions):\n"
        "    return ['[[A]]' if len(q) % 3 else '[[B]]' for q in questions]\n"
    )
    return world


def words(name: str, data: Path, output: Path, **more: Any) -> list[str]:
    command, flags = COMMANDS[name]
    flags = {"model": "lm", "output": output, **FLAGS, **flags, **more}
    for key in ("model", "dataset", "judge", "annotator"):
        if key in flags:
            flags[key] = data / flags[key]
    return [command, *(word for k, v in flags.items() for word in (f"--{k}", str(v)))]


def left(folder: Path) -> dict[str, Any]:
    """What a run leaves, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    samples = folder / "samples.jsonl"
    return {
        "metrics": untimed(rows),
        "summary": {k: v for k, v in summary.items() if k != "seconds"},
        "samples": samples.read_text() if samples.exists() else None,
        "run": json.loads((folder / "run.json").read_text()),
        "checkpoints": [path.name for path in Checkpoints(folder / "checkpoints").paths()],
    }


def assert_same(found: Path, expected: Path) -> None:
    one, other = left(found), left(expected)
    for each in (one, other):  # settings name the folder
        for place in (each["summary"], each["run"]):
            del place["settings"], place["job"]["output"]
    assert one == other
    weights, others = (load_file(x / "model" / "model.safetensors") for x in (found, expected))
    assert weights.keys() == others.keys()
    assert all(torch.equal(x, others[name]) for name, x in weights.items())


def die_at_row(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As row ``number`` of the metrics is to be written, from 1."""
    append, count = MetricsFile.append, iter(range(1, number))

    def dying(self: Any, *args: Any) -> None:
        if next(count, None) is None:
            monkeypatch.undo()
            raise Killed
        append(self, *args)

    monkeypatch.setattr(MetricsFile, "append", dying)


@pytest.mark.filterwarnings("ignore:Some weights of GPT2ForSequenceClassification")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_that_was_cut_leaves_the_files_of_a_straight_one(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(words(name, data, tmp_path / "straight")) == 0
    rows = (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()
    later = [i for i, row in enumerate(rows, start=1) if json.loads(row)["step"] == 4]
    folder = tmp_path / "run"
    die_at_row(monkeypatch, max(later, default=len(rows) - 2))
    with pytest.raises(Killed):
        cli.main(words(name, data, folder))
    again = [*words(name, data, folder), "--resume"]
    die_at_row(monkeypatch, 2)  # once more: behind the first row of the rest
    with pytest.raises(Killed):
        cli.main(again)
    assert cli.main(again) == 0
    assert_same(folder, tmp_path / "straight")
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("row", [1, 7])
def test_a_run_that_was_cut_before_its_first_step_or_behind_its_last_is_resumed(
    row: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(words("sft", data, tmp_path / "straight")) == 0
    assert len((tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()) == 6
    folder = tmp_path / "run"
    die_at_row(monkeypatch, min(row, 6))
    with pytest.raises(Killed):
        cli.main(words("sft", data, folder))
    assert cli.main([*words("sft", data, folder), "--resume"]) == 0
    assert_same(folder, tmp_path / "straight")


def test_a_run_is_stopped_by_a_signal_and_resumed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MetricsFile.append

    def asking(self: Any, step: int, *args: Any) -> None:
        append(self, step, *args)
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MetricsFile, "append", asking)
    flags = {"save-every": 0}
    assert cli.main(words("sft", data, tmp_path / "run", **flags)) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fastrl: stopped after step 3; saved: ")
    assert said.endswith("checkpoint-3; --resume (resume_from_checkpoint=True) continues")
    monkeypatch.undo()
    resume = words("sft", data, tmp_path / "run", resume="latest", **flags)
    assert cli.main(resume) == 0
    assert cli.main(words("sft", data, tmp_path / "straight", **flags)) == 0
    found, expected = left(tmp_path / "run"), left(tmp_path / "straight")
    assert (found["checkpoints"], expected["checkpoints"]) == (["checkpoint-3"], [])
    assert found["metrics"] == expected["metrics"]


def test_the_last_step_is_saved_so_that_a_run_can_be_made_longer(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert cli.main(words("reward", data, folder, **{"keep-last": 0})) == 0
    kept = [path.name for path in Checkpoints(folder / "checkpoints").paths()]
    assert kept == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    longer = words("reward", data, folder, **{"keep-last": 1, "max-steps": 7})
    with pytest.warns(UserWarning, match="max_steps: 5 → 7"):
        assert cli.main([*longer, "--resume"]) == 0
    assert left(folder)["checkpoints"] == ["checkpoint-7"]
    assert left(folder)["summary"]["steps"] == 7
    assert (folder / "run.superseded-1.json").exists()


def test_a_checkpoint_is_named_by_its_folder(data: Path, tmp_path: Path) -> None:
    """And a new folder begins with its step."""
    assert cli.main(words("sft", data, tmp_path / "first", **{"keep-last": 0})) == 0
    path = tmp_path / "first" / "checkpoints" / "checkpoint-2"
    assert cli.main(words("sft", data, tmp_path / "run", resume=path)) == 0
    rows = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert min(row["step"] for row in rows) == 4
    one, other = (left(tmp_path / name)["summary"] for name in ("run", "first"))
    assert one["held_out_loss_before"] == other["held_out_loss_before"]
    assert one["held_out_loss_after"] == other["held_out_loss_after"]


def test_after_an_error_the_state_is_saved(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "tired.py").write_text(
        "import json, os, pathlib\n"
        "calls = []\n"
        "def tired(prompts, completions, completion_ids, **columns):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 5 and 'TIRED' in os.environ:\n"
        "        raise RuntimeError('no more')\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    flags = {"annotator": "tired.py:tired", "task": "online-pointwise", "eval-examples": 0}
    monkeypatch.setenv("TIRED", "1")
    folder = tmp_path / "run"
    arguments = words("online", data, folder, **flags)
    at = arguments.index("--judge")
    del arguments[at : at + 2]
    with pytest.warns(UserWarning, match="after RuntimeError the state is saved in .*-4; --resume"):
        assert cli.main([*arguments, "--save-every", "0"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "tired.py:tired raised RuntimeError: no more" in said
    monkeypatch.delenv("TIRED")
    assert left_checkpoints(folder) == ["checkpoint-4"]
    assert cli.main([*arguments, "--resume"]) == 0


def left_checkpoints(folder: Path) -> list[str]:
    return [path.name for path in Checkpoints(folder / "checkpoints").paths()]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_what_cannot_be_resumed_is_refused_and_stays(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = {"dataset": "prompted.jsonl", "task": "sft", "max-length": 40, "max-steps": 1}
    folder = tmp_path / "run"
    assert cli.main(words("dpo", data, folder, **given)) == 0
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    rows = (data / "prompted.jsonl").read_text().splitlines(keepends=True)
    (data / "other.jsonl").write_text("".join(rows[:-5]))
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "holds a run already (checkpoint-1): pass --resume"),
        ({"resume": "nowhere"}, "resume: there is no folder nowhere"),
        ({"resume": "latest", "overwrite": "true"}, "exclude each other"),
        ({"save-every": -1}, "save_steps must be 0 or more, got -1"),
        ({"keep-last": -1}, "save_total_limit must be 0 or more, got -1"),
        ({"resume": "latest", "dataset": "other.jsonl"}, "whose data differs"),
        ({"resume": "latest", "lora-r": 2}, "whose model differs"),
    ]
    for flags, message in refused:
        assert cli.main(words("dpo", data, folder, **{**given, **flags})) == 2, flags
        assert message in capsys.readouterr().err.splitlines()[-1]
        now = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
        assert now == before, flags


@pytest.mark.filterwarnings("ignore:Some weights of GPT2ForSequenceClassification")
@pytest.mark.parametrize("name", ["sft", "reward", "dpo"])
def test_a_checkpoint_that_is_refused_leaves_no_folder(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = {"max-steps": 1, "eval-examples": 0}
    assert cli.main(words(name, data, tmp_path / "first", **flags)) == 0
    checkpoint = tmp_path / "first" / "checkpoints" / "checkpoint-1"
    rows = (data / COMMANDS[name][1]["dataset"]).read_text().splitlines(keepends=True)
    (data / "fewer.jsonl").write_text("".join(rows[:-5]))
    other = {"resume": checkpoint, "dataset": "fewer.jsonl", **flags}
    assert cli.main(words(name, data, tmp_path / "run", **other)) == 2
    assert "whose data differs" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_kind_of_trainer_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Whether it is named itself or by its run, and before anything is warned of."""
    flags = {"model": data / "lm", "dataset": data / "reviews.jsonl", "prompt-words": 3}
    flags |= {"reward": f"{data / 'rewards.py'}:length", "steps": 1, "max-new-tokens": 3}
    flags |= {"eval-prompts": 0, "batch-size": 4, "mini-batch-size": 4, "ppo-epochs": 1}
    ppo = ["ppo", *(word for k, v in flags.items() for word in (f"--{k}", str(v)))]
    assert cli.main([*ppo, "--output", str(tmp_path / "ppo")]) == 0
    sft = {"max-steps": 1, "eval-examples": 0}
    assert cli.main(words("sft", data, tmp_path / "sft", **sft)) == 0
    for theirs, commands in (("ppo", "ppo or grpo"), ("sft", "sft, reward, align or distill")):
        path = tmp_path / theirs
        (manifest,) = path.glob("checkpoints/*/manifest.json")
        content = json.loads(manifest.read_text())
        content["machine"]["threads"] = 77
        manifest.write_text(json.dumps(content))
        for named in (path, manifest.parent):
            again = [*ppo, "--output", str(tmp_path / "run"), "--resume", str(named)]
            if theirs == "ppo":
                again = words("sft", data, tmp_path / "run", resume=named, **sft)
            capsys.readouterr()
            assert cli.main(again) == 2
            said = capsys.readouterr().err
            assert f"resume: {manifest.parent} is a checkpoint of " in said
            assert said.endswith(f"the command that wrote it (fastrl {commands})\n")
            assert not (tmp_path / "run").exists()


def test_a_run_of_another_command_is_not_resumed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert cli.main(words("sft", data, tmp_path / "run", **{"max-steps": 1})) == 0
    assert cli.main([*words("reward", data, tmp_path / "run"), "--resume"]) == 2
    assert "holds a run of sft, which reward cannot resume" in capsys.readouterr().err
