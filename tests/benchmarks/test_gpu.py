"""What a GPU is asked, without one: stages in their order, tunables, and what profilers print."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import ROOT, environments, gpu, ops, profilers, tunables
from benchmarks import __main__ as command
from benchmarks.cases import Case
from benchmarks.gpu import Stage
from benchmarks.harness import Measurement, Run
from benchmarks.ops import Shape
from benchmarks.test_ops import TOY
from benchmarks.tunables import TUNABLES, Tunable
from tests.patience import LONG, PATIENCE

CPU = torch.device("cpu")
FINE = Stage("fine", "ends well", 2, ("-c", "print('all is well')"))
FAILS = Stage("fails", "does not", 2, ("-c", "print('why it failed'); raise SystemExit(3)"))


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run(*stages: Stage, arguments: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr(gpu, "STAGES", stages)
        parser = argparse.ArgumentParser()
        gpu.add_arguments(parser)
        return gpu.run(parser.parse_args(["--results", str(tmp_path), *arguments]))

    return run


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["gpu", "--results", str(tmp_path)]) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_a_stage_that_fails_costs_the_others_nothing(run, tmp_path, capsys) -> None:
    assert run(FAILS, FINE) == 1
    printed = capsys.readouterr().out
    assert "why it failed" in printed
    assert "fails: FAILED (3) after" in printed
    assert (tmp_path / "logs" / "fine.log").read_text() == "all is well\n"
    assert run(FAILS, FINE, arguments=("--only", "fine")) == 0


def test_what_there_is_no_time_for_is_said(run, capsys) -> None:
    assert run(FINE, arguments=("--minutes", "0.5")) == 1
    assert "fine: not run: 0.5 minutes were left" in capsys.readouterr().out


def test_a_stage_that_takes_too_long_ends_with_all_that_it_began(tmp_path) -> None:
    child = tmp_path / "child"
    # A shell has begun within a thousandth of that.
    command = ["sh", "-c", f"sleep {LONG} & echo $! > '{child}'; sleep {LONG}"]
    ended = gpu.run_stage(command, tmp_path / "log", 3.0)
    assert ended.code is None
    assert "killed" in str(ended)
    for _ in range(10 * PATIENCE):  # until it has been reaped
        status = Path(f"/proc/{int(child.read_text())}/status")
        if not status.exists() or "zombie" in status.read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("its child lives on")


@pytest.mark.parametrize("stage", gpu.STAGES, ids=lambda stage: stage.name)
def test_every_stage_asks_for_what_there_is(stage: Stage) -> None:
    """Files that exist, and options that are known."""
    args = argparse.Namespace(peer_python="/py", results=Path("out"), jobs=3)
    words = gpu.filled(stage, args, 1.5)
    assert not [word for word in words if "{" in word]
    if words[1] != "pytest":
        assert words[1] == "benchmarks.tunables"
        return
    paths = [word for word in words if word.startswith(("tests/", "benchmarks/"))]
    assert paths
    assert all(os.path.exists(path) for path in paths)
    if paths[0].startswith("benchmarks/"):
        source = (ROOT / "benchmarks" / "conftest.py").read_text()
        given = {word for word in words if word.startswith("--")} - {"--quiet"}
        assert all(f'"{option}"' in source for option in given)


def test_a_bare_checkout_is_enough() -> None:
    """Torch and triton may be all that a GPU machine has."""
    names = "{'transformers', 'datasets', 'accelerate', 'matplotlib', 'pytest', 'fastrl'}"
    code = "import sys, benchmarks.gpu, benchmarks.tunables, benchmarks.profilers; "
    code += f"print(*(sys.modules.keys() & {names}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": environments.source_tree()},
    )  # fmt: skip
    assert done.stdout.split() == []


WINDOW = dataclasses.replace(TUNABLES[1], values=(64, 128))
SHAPE = Shape("linear_logprobs", 8, hidden=16, vocabulary=3000)


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda tunable: tunable.name)
def test_a_tunable_is_a_number_that_the_kernels_have_and_get_back(tunable: Tunable) -> None:
    assert tunable.shapes, "no case shows what it does"
    now = tunable.present
    assert now in tunable.values
    for *_, found in tunable.found:  # copies of one number
        assert (found if tunable.key is None else found[tunable.key]) == now
    other = next(value for value in tunable.values if value != now)

    def fail() -> None:
        with tunable.set_to(other):
            raise KeyError(tunable.present)

    with pytest.raises(KeyError, match=str(other)):
        fail()
    assert tunable.present == now


def tuned(tmp_path: Path) -> dict:
    run = Run(CPU, rounds=3, results=tmp_path)
    measurement = Measurement(run, Case("tune", SHAPE.op, SHAPE.label, of=SHAPE))
    tunables.values_in_turns(measurement, WINDOW, "torch")
    (entry,) = json.loads(run.saved["tune"].read_text())["entries"]
    return entry


def test_values_take_turns_beside_the_present_one(tmp_path) -> None:
    assert WINDOW.name == "window"
    entry = tuned(tmp_path)
    assert (entry["tunable"], entry["baseline"]) == ("window", "128, now")
    assert set(entry["sides"]) == {"64", "128, now"}
    assert all(len(side["seconds"]["call"]) == 3 for side in entry["sides"].values())


@pytest.mark.parametrize("raises", [False, True])
def test_a_value_with_other_results_or_none_has_no_time(tmp_path, monkeypatch, raises) -> None:
    def wrong(problem, others):
        if WINDOW.present == 64 and raises:
            raise RuntimeError("out of resource: shared memory")
        return "it is off" if WINDOW.present == 64 else None

    monkeypatch.setattr(tunables, "wrong_numbers", wrong)
    entry = tuned(tmp_path)
    assert set(entry["sides"]) == {"128, now"}
    assert ("out of resource" if raises else "it is off") in entry["absent"]["64"]


NCU = """==PROF== Connected to process 7
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","_fwd","dram__bytes_read.sum","byte","1,000"
"0","7","_fwd","dram__bytes_write.sum","byte","24"
"1","7","_bwd","dram__bytes_read.sum","byte","500.0"
"1","7","_bwd","dram__bytes_write.sum","byte","2,000,000"
"""


def test_bytes_are_summed_over_kernels() -> None:
    assert profilers.parse_ncu(NCU.splitlines()) == {
        "read": 1500,
        "written": 2_000_024,
        "kernels": 2,
    }


def test_a_profiler_that_may_not_count_says_so() -> None:
    refusal = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    with pytest.raises(profilers.Refused, match="ERR_NVGPUCTRPERM"):
        profilers.parse_ncu(["==PROF== Connected", refusal])


def test_the_sanitizers_summary_is_read() -> None:
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert profilers.parse_sanitizer(clean, 0) == {"errors": 0, "first": []}
    races = "========= COMPUTE-SANITIZER\n========= Error: Race reported\n"
    races += "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    found = profilers.parse_sanitizer(races, profilers.EXIT_CODE)
    assert found["errors"] == 2
    assert "Race reported" in found["first"][0]
    for text, code in (("", 1), ("Traceback\nModuleNotFoundError: x", 1), (clean, 1)):
        with pytest.raises(profilers.Refused):
            profilers.parse_sanitizer(text, code)


def test_the_sanitizer_sees_every_op_and_no_tensor_ends_within_a_vector(monkeypatch) -> None:
    """Or the kernels' whole loads would be reported as reading past it."""
    seen = []
    problem = ops.problem
    monkeypatch.setattr(
        ops, "problem", lambda shape, *a, **k: seen.append(shape.op) or problem(shape, *a, **k)
    )
    profilers.sanitized("cpu", TOY, "torch")
    assert set(seen) == set(ops.available())
    for op in ops.available():
        assert all(shape.rows % 16 == 0 for shape in ops.OPS[op].checked(profilers.SANITIZED))
