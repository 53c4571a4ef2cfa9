"""``fastrl doctor`` and ``fastrl report`` on runs of the commands, well and ill."""

import json
import shlex
import shutil

import pytest

from fastrl import cli

REWARDS = """
def constant(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)
def signed(prompts, completions, completion_ids, sign, **columns):
    return [s * sum(int(i) % 2 for i in ids) for s, ids in zip(sign, completion_ids, strict=True)]
"""
PPO = {
    "reward": "length", "steps": 10, "batch-size": 16, "mini-batch-size": 8, "ppo-epochs": 2,
    "max-new-tokens": 8, "eval-prompts": 16, "learning-rate": "1e-3",
}  # fmt: skip
# What makes a run ill, and how the illness is called.
SICK = {
    "exploding KL": {"learning-rate": "0.3", "steps": 6},
    "equal scores": {"reward": "constant", "steps": 3, "eval-prompts": 0},
    "responses cut by length": {"max-new-tokens": 1, "steps": 3, "eval-prompts": 0},
    "held-out reward falls": {
        "reward": "signed", "learning-rate": "2e-2", "eval-dataset": "held_out.jsonl",
        "init-kl-coef": 0, "adap-kl-ctrl": "false",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def world(world):
    (world / "ill.py").write_text(REWARDS + (world / "rewards.py").read_text())
    rows = [json.loads(line) for line in (world / "reviews.jsonl").read_text().splitlines()]
    for name, sign in (("signed", 1.0), ("held_out", -1.0)):
        prompts = [{"prompt": " ".join(r["text"].split()[:4]), "sign": sign} for r in rows]
        text = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
        (world / f"{name}.jsonl").write_text(text)
    return world


def ppo(world, output, **flags):
    settings = {**PPO, **flags, "model": world / "lm", "dataset": world / "signed.jsonl"}
    settings["reward"] = f"{world / 'ill.py'}:{settings['reward']}"
    if "eval-dataset" in settings:
        settings["eval-dataset"] = world / settings["eval-dataset"]
    words = (word for name, value in settings.items() for word in (f"--{name}", str(value)))
    return cli.main(["ppo", *words, "--output", str(output)])


@pytest.mark.parametrize("illness", SICK)
def test_a_sick_run_is_told_by_name_and_figure(illness, world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert ppo(world, "my run", **SICK[illness]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # at the end of the run
    assert illness in shown
    printed = shown.partition("; fastrl ")[2].partition(" says more")[0]
    assert cli.main([*shlex.split(printed), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    (finding,) = (each for each in told["findings"] if each["name"] == illness)
    assert finding["severity"] == "illness"
    assert "step" in finding["figures"]


@pytest.mark.usefixtures("figures")
def test_report_and_doctor_of_runs(world, tmp_path, capsys):
    assert ppo(world, tmp_path / "a", **SICK["equal scores"]) == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    runs = [str(tmp_path / name) for name in ("a", "b")]
    capsys.readouterr()
    assert cli.main(["doctor", runs[0]]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "illness: equal scores all scores of a step were equal in 3 of 3 steps" in shown
    assert shown.count("a: ill;") == 1

    assert cli.main(["report", runs[0]]) == 0
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "equal scores" in page
    assert "step 1, sample 0" in page  # the first of the ledger
    assert cli.main(["report", *runs]) == 0
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.html", "report.png"}

    before = (tmp_path / "b" / "report.png").read_bytes()
    assert cli.main(["report", *runs, "--output", runs[1]]) == 2
    assert "is a run's own folder" in capsys.readouterr().err
    assert cli.main(["report", runs[0], "--output", runs[1]]) == 2
    assert (tmp_path / "b" / "report.png").read_bytes() == before


@pytest.mark.parametrize("words", [["nowhere"], [], ["--all"]])
def test_doctor_says_what_it_lacks(words, capsys):
    assert cli.main(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fastrl: error: ")
    assert ("nowhere holds no run" in said) == (words == ["nowhere"])
