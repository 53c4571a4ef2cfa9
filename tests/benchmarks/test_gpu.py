"""The GPU command without a GPU: its planner, its gates in the interpreter, its bookkeeping."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import types

import pytest
import torch

from benchmarks.before import build, cases, gates, gpu, ncu, sanitizer, timing
from benchmarks.before.attention import Attention
from benchmarks.before.cases import Case
from benchmarks.before.planner import Step, carry_out
from tests.kernels.conftest import (  # noqa: F401 - fixtures
    _quiet_interpreter,
    interpreter_rounds_to_nearest,
    interpreter_scans_by_doubling,
)

CPU = torch.device("cpu")
ROOF = timing.Roofline(1e10, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11})


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, name: str, guess: float, takes: float, obstacle: str | None = None) -> Step:
        def run() -> None:
            self.now += takes

        return Step(name, guess, run, lambda: obstacle)


def test_steps_are_done_in_order_while_there_is_time_for_them():
    clock = Clock()
    steps = [clock.step("a", 40, 40), clock.step("b", 70, 70), clock.step("c", 50, 50)]
    outcome = carry_out(steps, 100, clock=clock)
    assert outcome.done == ["a", "c"]
    assert outcome.left == {"b": "about 70 s, 60 s were left"}
    assert clock.now <= 100


def test_guesses_that_prove_too_low_are_corrected():
    clock = Clock()
    steps = [clock.step("a", 10, 40), clock.step("b", 20, 80)]
    outcome = carry_out(steps, 100, clock=clock)
    assert outcome.done == ["a"]
    assert clock.now == 40


def test_a_step_that_raises_costs_the_others_nothing():
    def fail() -> None:
        raise RuntimeError("no memory")

    clock, saved = Clock(), []
    steps = [Step("a", 1, fail), clock.step("b", 1, 1), clock.step("c", 1, 1, "not now")]
    outcome = carry_out(steps, 100, clock=clock, save=lambda o: saved.append(list(o.done)))
    assert outcome.failed == {"a": "RuntimeError: no memory"}
    assert outcome.done == ["b"]
    assert outcome.left == {"c": "not now"}
    assert saved == [[], ["b"], ["b"]], "saved after every step"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    assert gpu.run(parser.parse_args([])) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("op", cases.available())
def test_the_gates_are_green(op, monkeypatch):
    monkeypatch.delenv("FASTRL_KERNELS_BACKEND", raising=False)
    names = []
    for check in gates.checks(op, CPU, "triton", gates.TINY):
        assert check.run() is None, check.name
        names.append(check.name.split(":")[0])
    masked = "dead is unread" if op == "decode_attention" else "zero where masked"
    wanted = {"exact", "strided", masked, "same bits twice"}
    assert set(names) == wanted | ({"same bits alone"} if op in gates.ROW_OPS else set())


def wrong_problem(case: Case, change) -> object:
    """A problem whose op's results are changed by `change(results, inputs)`."""
    from benchmarks.before import build

    problem = build.problem(case, CPU, backend="torch")
    ours = problem.ours
    return dataclasses.replace(problem, ours=lambda **x: change(ours(**x), x))


GAE = Case("gae", 5, steps=16, active=0.7)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (gates.exact, lambda found, x: found | {"returns": found["returns"] * 1.001}),
        (gates.zero_where_masked, lambda found, x: found | {"returns": found["returns"] + 1e-9}),
        (gates.zero_where_masked, lambda found, x: found | {"returns": x["values"] * 0}),
        (gates.same_twice, lambda found, x: found | {"returns": torch.rand(5, 16)}),
        (gates.same_alone, lambda found, x: found | {"returns": found["returns"] + len(x["mask"])}),
    ],
    ids=["exact", "not zero", "nan", "twice", "alone"],
)
def test_each_gate_can_be_red(check, change):
    assert check(wrong_problem(GAE, lambda found, x: found)) is None
    assert check(wrong_problem(GAE, change))


def test_reading_dead_tokens_is_red():
    layer = Attention(4, 2, 8, window=5)
    case = Case("decode_attention", 5, steps=16, active=0.5, backward=False, attention=layer)

    def live_alone(found, x):
        return {"out": x["values"].where(x["mask"][:, :, None, None], 0.0).sum(1)}

    assert gates.dead_is_unread(wrong_problem(case, live_alone)) is None
    for end in (0, -1):  # what a window has left behind, and what is not written yet
        wrong = wrong_problem(case, lambda found, x, end=end: {"out": x["keys"][:, end]})
        assert "out differs" in gates.dead_is_unread(wrong)


def session(tmp_path, **options) -> gpu.Session:
    options = {"backend": "torch", "sizes": gates.TINY, "telling": (GAE,)} | options
    return gpu.Session(CPU, ROOF, tmp_path, **options)


def test_gates_then_figures_saved_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "available", lambda: ["gae"])
    run = session(tmp_path)
    outcome = carry_out(run.steps(), 1e9, save=run.save)
    assert outcome.done[0] == "gates: gae"
    assert not outcome.failed
    profilers = {"ncu is not on the path", "compute-sanitizer is not on the path"}
    assert set(outcome.left.values()) <= profilers
    saved = json.loads(run.path.read_text())
    assert saved["benchmark"] == "gpu"
    assert all(gate["wrong"] is None for gate in saved["gates"])
    (entry,) = saved["cases"]  # measured twice, kept once
    assert entry["implementations"]["fastrl"]["seconds"]
    assert not run.red


def test_an_op_with_a_red_gate_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "available", lambda: ["gae"])
    monkeypatch.setattr(gates, "same_twice", lambda problem: "it differs")
    run = session(tmp_path)
    outcome = carry_out(run.steps(), 1e9, save=run.save)
    assert outcome.done == ["gates: gae"]
    timings = {why for name, why in outcome.left.items() if not name.startswith("sanitizer")}
    assert timings == {"a gate is red"}
    assert run.red == {"gae"}
    assert "it differs" in run.path.read_text()


def test_a_check_that_raises_is_red(tmp_path, monkeypatch):
    def fail(problem):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(gates, "exact", fail)
    run = session(tmp_path)
    run.gates("gae")
    assert run.red == {"gae"}


def test_no_figures_without_gates(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "available", lambda: ["gae"])
    run = session(tmp_path)
    steps = [step for step in run.steps() if not step.name.startswith(("gates", "sanitizer"))]
    assert set(carry_out(steps, 1e9).left.values()) == {"its gates have not run"}


NCU = """==PROF== Connected to process 7
==PROF== Disconnected from process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","_fwd","dram__bytes_read.sum","byte","1,000"
"0","7","_fwd","dram__bytes_write.sum","byte","24"
"1","7","_bwd","dram__bytes_read.sum","byte","500.0"
"1","7","_bwd","dram__bytes_write.sum","byte","2,000,000"
"""


def test_bytes_are_summed_over_kernels():
    assert ncu.parse(NCU.splitlines()) == {"read": 1500, "written": 2_000_024, "kernels": 2}


def test_a_profiler_that_may_not_count_says_so():
    refusal = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters"
    with pytest.raises(ncu.Refused, match="ERR_NVGPUCTRPERM"):
        ncu.parse(["==PROF== Connected", refusal])


def test_a_profiler_that_may_not_count_is_asked_once(tmp_path, monkeypatch):
    def refuse(case, timeout):
        raise ncu.Refused("ERR_NVGPUCTRPERM")

    monkeypatch.setattr(cases, "available", lambda: ["gae"])
    monkeypatch.setattr(ncu, "available", lambda: True)
    monkeypatch.setattr(ncu, "count", refuse)
    run = session(tmp_path, telling=(GAE, dataclasses.replace(GAE, rows=6)))
    steps = [step for step in run.steps() if step.name.startswith(("gates", "bytes"))]
    outcome = carry_out(steps, 1e9)
    assert not outcome.failed
    assert list(outcome.left.values()) == ["ncu cannot count here: ERR_NVGPUCTRPERM"]


def test_the_sanitizers_summary_is_read():
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.parse(clean, 0) == {"errors": 0, "first": []}
    races = "========= COMPUTE-SANITIZER\n========= Error: Race reported\n"
    races += "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
    found = sanitizer.parse(races, sanitizer.EXIT_CODE)
    assert found["errors"] == 2
    assert "Race reported" in found["first"][0]
    for text, code in (("", 1), ("Traceback\nModuleNotFoundError: x", 1), (clean, 1)):
        with pytest.raises(sanitizer.Refused):
            sanitizer.parse(text, code)


def test_the_sanitizer_sees_every_op(monkeypatch):
    seen = []
    problem = build.problem
    monkeypatch.setattr(
        build, "problem", lambda case, *a, **k: seen.append(case.op) or problem(case, *a, **k)
    )
    sanitizer.main("cpu", gates.TINY, "torch")
    assert set(seen) == set(cases.available())


def test_no_tensor_of_the_sanitizers_ends_within_a_vector():
    """Or the kernels' whole loads would be reported as reading past it."""
    for op in cases.available():
        for case in gates.cases_of(op, sanitizer.SIZES):
            assert case.rows % 16 == 0


def test_errors_of_the_sanitizer_are_red(tmp_path, monkeypatch):
    found = {"tool": "memcheck", "errors": 3, "first": ["Invalid read"]}
    monkeypatch.setattr(cases, "available", lambda: [])
    monkeypatch.setattr(sanitizer, "available", lambda: True)
    monkeypatch.setattr(sanitizer, "check", lambda tool, timeout: found | {"tool": tool})
    run = session(tmp_path)
    outcome = carry_out(run.steps(gates_only=True), 1e9, save=run.save)
    assert outcome.done == ["sanitizer: memcheck", "sanitizer: racecheck"]
    assert run.red == {"all, by memcheck", "all, by racecheck"}
    assert "Invalid read" in run.path.read_text()


def test_a_bare_checkout_is_enough():
    """Torch and triton may be all that a GPU machine has."""
    names = "{'transformers', 'datasets', 'accelerate', 'matplotlib', 'pytest', 'fastrl'}"
    code = f"import sys, benchmarks.before.gpu; print(*(sys.modules.keys() & {names}))"
    path = os.pathsep.join(map(str, ncu.sources()))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def test_ncu_profiles_this_very_module(monkeypatch):
    asked = []

    def run(command, **options):
        asked.append((command, options))
        return types.SimpleNamespace(stdout=NCU)

    monkeypatch.setattr(ncu.subprocess, "run", run)
    assert ncu.count(GAE, timeout=1)["kernels"] == 2
    ((command, options),) = asked
    assert command[-3:-1] == ["-m", "benchmarks.before.ncu"]
    assert Case.read(json.loads(command[-1])) == GAE
    assert "torch-ext" in options["env"]["PYTHONPATH"]
