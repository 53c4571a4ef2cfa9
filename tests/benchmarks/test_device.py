"""All that a GPU has to say: stages in their order, whatever becomes of one."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.before import __main__ as command
from benchmarks.before import device
from benchmarks.before.device import Stage

FINE = Stage("fine", "ends well", 2, ("-c", "print('all is well')"))
FAILS = Stage("fails", "does not", 2, ("-c", "print('why it failed'); raise SystemExit(3)"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run(*stages: Stage, arguments: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(device, "STAGES", stages)
        parser = argparse.ArgumentParser()
        device.add_arguments(parser)
        return device.run(parser.parse_args(["--results", str(tmp_path), *arguments]))

    return run


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["device", "--results", str(tmp_path)]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_stage_that_fails_costs_the_others_nothing(run, tmp_path, capsys):
    assert run(FAILS, FINE) == 1
    printed = capsys.readouterr().out
    assert "why it failed" in printed
    assert "fails: FAILED (3) after" in printed
    assert (tmp_path / "logs" / "fine.log").read_text() == "all is well\n"
    assert run(FINE) == 0


def test_stages_can_be_chosen(run, tmp_path):
    assert run(FAILS, FINE, arguments=("--only", "fine")) == 0
    assert not (tmp_path / "logs" / "fails.log").exists()


def test_what_there_is_no_time_for_is_said(run, capsys):
    assert run(FINE, arguments=("--minutes", "0.5")) == 1
    assert "fine: not run: 0.5 minutes were left" in capsys.readouterr().out


def test_a_stage_that_takes_too_long_ends_with_all_that_it_began(tmp_path):
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    ended = device.run_stage([sys.executable, "-c", code], tmp_path / "log", 3.0)
    assert ended.code is None
    assert not ended.fine
    assert "killed" in str(ended)
    for _ in range(100):  # until it has been reaped
        if not alive(int(child.read_text())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("its child lives on")


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


@pytest.mark.parametrize(
    ("chosen", "words"), [(None, ["--peer", "eager"]), ("/py", ["--peer-python", "/py"])], ids=str
)
def test_a_command_is_filled_in(chosen, words):
    args = argparse.Namespace(peer_python=chosen, results=Path("out"), jobs=3)
    stage = dataclasses.replace(FINE, command=("-m", "{jobs}", "{peer}", "{minutes}", "{results}"))
    assert device.filled(stage, args, 1.5) == ["-m", "3", *words, "1.5", "out"]


@pytest.mark.parametrize("stage", device.STAGES, ids=lambda stage: stage.name)
def test_every_stage_asks_for_what_there_is(stage, capsys):
    """Folders of tests that exist, and options that the benchmark has."""
    args = argparse.Namespace(peer_python=None, results=Path("out"), jobs=3)
    words = device.filled(stage, args, 1.5)
    if words[1] == "pytest":
        folders = [word for word in words if word.startswith("tests/")]
        assert folders
        assert all(os.path.isdir(folder) for folder in folders)
        return
    module, options = command.COMMANDS[words[2]].module, words[3:]
    parser = argparse.ArgumentParser(exit_on_error=False)
    __import__(module)
    sys.modules[module].add_arguments(parser)
    parser.parse_args(options)
