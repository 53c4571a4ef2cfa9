"""``fastrl new``: what it writes trains at once, and bad names write nothing."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fastrl import cli


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:the KL estimate is negative")
@pytest.mark.filterwarnings("ignore:resume. settings differ .*max_steps")
def test_the_script_the_recipe_and_the_test_run(here, monkeypatch, capsys):
    assert cli.main(["new", "first-try"]) == 0
    assert "cd first-try" in capsys.readouterr().out
    folder = here / "first-try"
    assert (folder / "README.md").read_text().startswith("# first-try\n")
    monkeypatch.chdir(folder)
    tests = [sys.executable, "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(tests, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout

    assert cli.main(["grpo", "recipe.yaml", "--steps", "2"]) == 0
    rows = Path("runs/recipe/metrics.jsonl").read_text().splitlines()
    names = {"reward/correct/mean", "reward/digits/mean"}
    assert names <= set().union(*map(json.loads, rows))

    def script(*words):
        monkeypatch.setattr(sys, "argv", ["train.py", "--disable_tqdm", "True", *words])
        runpy.run_path("train.py", run_name="__main__")

    monkeypatch.syspath_prepend(str(folder))
    script("--max_steps", "2")
    assert "the model is in runs/train" in capsys.readouterr().out
    assert Path("runs/train/model.safetensors").is_file()
    script("--max_steps", "3", "--resume_from_checkpoint", "true")
    state = json.loads(Path("runs/train/checkpoint-3/trainer_state.json").read_text())
    assert [row["step"] for row in state["log_history"] if "reward" in row] == [1, 2, 3]
    with pytest.raises(SystemExit, match="2"):
        script("--lerning_rate", "1e-3")
    assert "did you mean --learning_rate?" in capsys.readouterr().err
    sys.modules.pop("reward")


def test_a_program_off_the_path_says_how_it_comes_there(here, monkeypatch, capsys):
    (here / ".venv" / "bin").mkdir(parents=True)
    (here / ".venv" / "bin" / "activate").touch()
    monkeypatch.setattr(sys, "prefix", str(here / ".venv"))
    for name, found in (("a", None), ("b", "/usr/bin/fastrl")):
        monkeypatch.setattr("shutil.which", lambda program, found=found: found)
        assert cli.main(["new", name]) == 0
        begin = "" if found else "source .venv/bin/activate\n  "
        assert f"written: {name}\n\n  {begin}cd {name}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a b", ".a", "ä", "a\n", "-a", None])
def test_a_bad_name_writes_nothing(name, here, capsys):
    assert cli.main(["new"] if name is None else ["new", name]) == 2
    assert "NAME" in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("kind", ["a folder", "a file", "a broken link"])
def test_what_is_there_stays(kind, here, capsys):
    there = here / "mine"
    if kind == "a folder":
        there.mkdir()
    elif kind == "a file":
        there.touch()
    else:
        there.symlink_to("nowhere")
    assert cli.main(["new", "mine"]) == 2
    assert "mine is here already: choose another name" in capsys.readouterr().err
    assert list(here.iterdir()) == [there]
    assert not there.is_dir() or list(there.iterdir()) == []
