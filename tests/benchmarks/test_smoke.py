"""`pytest benchmarks`, as a process: each benchmark measures tiny cases and passes its gate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT
from benchmarks.environments import source_tree

# The cases that a smoke test takes of each benchmark.
CASES = {
    "ops": "gae", "ppo": "copy and fp32", "grpo": "update", "ref_model": "", "rollout": "",
    "run": "ledger", "plan": "", "training": "DPO", "scripts": "DPO", "cuts": "top-p",
}  # fmt: skip


def run(*arguments: object, toy: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    shown = os.environ | {"PYTHONPATH": source_tree()} | variables
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--device", "cpu", *["--toy"] * toy,
         *map(str, arguments)],
        env={k: v for k, v in shown.items() if not k.startswith(("TRITON", "PYTEST"))},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_measures_a_toy_and_saves_nothing(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(
        f"benchmarks/test_{name}.py", "-k", CASES[name], f"--benchmark-json={out}",
        "--results", tmp_path,
    )  # fmt: skip
    if " skipped" in done.stdout and " passed" not in done.stdout:
        pytest.skip("its peer is not installed, or the machine has no instructions for it")
    assert done.returncode == 0, done.stdout
    assert list(tmp_path.iterdir()) == [out], "a toy is not saved"
    found = json.loads(out.read_text())["benchmarks"]
    assert found, done.stdout
    assert all(one["stats"]["rounds"] == 2 for one in found)
    if name == "ops":
        assert "fastrl faster by" in done.stdout
        (info,) = (one["extra_info"] for one in found)
        assert info["ratio"].keys() == {"eager"}
        assert info["calls in a round"] > 1
        assert info.keys() >= {"bytes", "GB/s", "of the roofline", "memory, peak", "goals"}


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    sleeping = {"toy": False, "OMP_WAIT_POLICY": "passive"}
    ops = "benchmarks/test_ops.py"
    for done, code, words in (
        (run(ops, "--rounds", "0"), 4, ["--rounds must be above 0, got 0"]),
        (run(ops, "--collect-only", "--results", tmp_path, **sleeping), 4,
         ["--results: OMP_WAIT_POLICY=passive", "unset it (env -u OMP_WAIT_POLICY"]),
        (run(ops, "--collect-only", **sleeping), 0, []),  # without --results nothing is saved
    ):  # fmt: skip
        assert done.returncode == code
        assert all(x in done.stderr for x in words)
