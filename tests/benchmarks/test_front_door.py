"""`pytest benchmarks`, as a process: what it measures and refuses, and what JSON says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.environments import source_tree


def run(*arguments: object, toy: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {
        k: v
        for k, v in (os.environ | {"PYTHONPATH": source_tree()}).items()
        if not k.startswith(("TRITON", "PYTEST"))
    }
    command = [sys.executable, "-m", "pytest", "benchmarks/test_ops.py", "-q"]
    command += ["--toy"] * toy
    return subprocess.run(
        [*command, "--device", "cpu", *map(str, arguments)],
        cwd=ROOT, env=kept | variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_json_has_ratio_bytes_memory_and_goals_of_each_case(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("-k", "gae", f"--benchmark-json={out}", "--results", tmp_path)
    assert done.returncode == 0, done.stdout
    assert "fastrl faster by" in done.stdout
    (found,) = json.loads(out.read_text())["benchmarks"]
    assert (found["group"], found["stats"]["rounds"]) == ("ops", 2)
    info = found["extra_info"]
    assert info["ratio"].keys() == {"eager"}
    assert info["calls in a round"] > 1
    assert info.keys() >= {"bytes", "GB/s", "of the roofline", "memory, peak", "goals"}
    assert list(tmp_path.iterdir()) == [out], "a toy is not saved"


def test_what_cannot_be_asked_for_is_refused() -> None:
    done = run("--rounds", "0")
    assert done.returncode == 4
    assert "--rounds must be above 0, got 0" in done.stderr


def test_figures_with_sleeping_threads_are_not_saved(tmp_path: Path) -> None:
    done = run("--collect-only", "--results", tmp_path, toy=False, OMP_WAIT_POLICY="passive")
    assert done.returncode == 4
    assert "--results: OMP_WAIT_POLICY=passive" in done.stderr
    assert "unset it (env -u OMP_WAIT_POLICY" in done.stderr
    asked = run("--collect-only", toy=False, OMP_WAIT_POLICY="passive")
    assert asked.returncode == 0, "without --results nothing is saved"
