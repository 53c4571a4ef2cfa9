"""The report's tables, plots, and what it says is missing."""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.before import record, report
from benchmarks.before.cases import Case, Goal
from tests.benchmarks.ppo_results import a_result

ROOF = {"copy": 1e10, "gemm": {"fp32": 1e11}}


def entry(op: str = "gae", **changes: object) -> dict:
    case = Case(op, 64, steps=1024, main=True)
    side = {"note": "", "error": 0.5, "relative": 1e-7, "call_seconds": [0.5, 0.5]}
    return {
        "op": op,
        "label": case.label,
        "case": asdict(case),
        "goal": vars(Goal(speedup=2.0)),
        "work": {"bytes": 1, "flops": 0, "what": "17 bytes per step"},
        "limit": [0.125, 0.125],
        "implementations": {
            "fastrl": {**side, "seconds": [0.5, 0.5], "memory": {"peak": 2**20}},
            "eager": {**side, "seconds": [1.0, 2.0], "memory": {"peak": 2**23}, "note": "the loop"},
        },
        "absent": {"torchrl": "not installed"},
        "red": None,
    } | changes


def ops_result(op: str = "gae", **changes: object) -> dict:
    return {
        "benchmark": op,
        "date": "2025-01-02",
        "time": "10:00:00",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"torch": "2"},
        "threads": 2,
        "roofline": ROOF,
        "cases": [entry(op)],
        "skipped": [{"label": "[9, 9]", "reason": "needs about 9 GiB, 8 are allowed"}],
    } | changes


def gpu_result(**changes: object) -> dict:
    gates = [{"op": "gae", "check": "exact", "wrong": None}]
    gates.append({"op": "whiten", "check": "twice", "wrong": "it differs"})
    counted = {"op": "gae", "label": entry()["label"], "read": 1, "written": 1, "kernels": 2}
    machine = {"cpu": "C", "cores": 2, "memory_gib": 8, "accelerator": "NVIDIA H100"}
    return ops_result(
        "gpu", cases=[entry(goal=None)], gates=gates, bytes=[counted], machine=machine,
        left={"timing: x": "no time"}, failed={},
    ) | changes  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    return argparse.Namespace(results=tmp_path / "benchmarks" / "results", root=tmp_path)


def write(checkout: argparse.Namespace, *results: dict) -> tuple[str, str]:
    """The two READMEs after a report on these results."""
    for result in results:
        record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    return tuple((checkout.root / p).read_text() for p in ("README.md", "benchmarks/README.md"))


def test_an_op_is_shown_with_its_goal_and_all_remarks(checkout):
    brief, details = write(checkout, ops_result(), a_result())
    assert "| `gae` [64, 1024] fp32 | 500 ms | 1.5 s | 3.00 (2.00–4.00) | 1 MiB | 8 MiB |" in brief
    assert "≥ 2× eager: reached" in brief
    assert "25%" in details
    for remark in ("eager: the loop", "Absent, torchrl: not installed", "Skipped", "17 bytes"):
        assert remark in details


def test_a_goal_that_is_missed_says_so(checkout):
    brief, _ = write(checkout, ops_result(cases=[entry(goal=vars(Goal(speedup=5.0)))]))
    assert "**missed**" in brief


def test_a_red_case_has_a_line_and_no_row(checkout):
    red = entry(red="error is 9 times eager PyTorch's", implementations={})
    brief, details = write(checkout, ops_result(cases=[red]))
    assert "No figures for gae [64, 1024] fp32: error is 9 times" in details
    assert "| [64, 1024]" not in details
    assert "`gae`" not in brief


def test_what_has_not_been_measured_is_named(checkout):
    brief, details = write(checkout, ops_result(), a_result())
    for text in (brief, details):
        assert "No GPU has been measured yet." in text
        assert "Not measured yet on cpu-2core: " in text
        assert "ppo, " not in text.split("Not measured yet on cpu-2core: ")[1].splitlines()[0]
    brief, _ = write(checkout, gpu_result())
    assert "No GPU has been measured" not in brief
    assert "Not measured yet on nvidia-h100: ppo, sft, dpo, rollout, reference." in brief


def test_a_gpu_has_gates_left_steps_and_bytes(checkout):
    _, details = write(checkout, gpu_result())
    assert "1 of 2 gates are green" in details
    assert "Red: `whiten`, twice: it differs" in details
    assert "Left: timing: x: no time" in details
    assert "| `gae` [64, 1024] fp32 | 2 | 1 B | 1 B | 2.000 |" in details
    assert "No machine without a GPU has been measured yet." in details


def test_a_gpu_shows_launches_and_what_the_sanitizer_found(checkout):
    counted = entry(goal=vars(Goal(launches=(2, 0), device="nvidia")))
    counted["implementations"]["fastrl"]["launches"] = {"forward": ["a", "b"], "backward": []}
    found = {"tool": "memcheck", "errors": 0, "first": []}
    _, details = write(checkout, gpu_result(cases=[counted], sanitizer=[found]))
    assert "| launches | goal |" in details
    assert "| 2 | 2 launches: reached |" in details
    assert "compute-sanitizer, memcheck (accesses outside of an allocation" in details
    _, details = write(checkout, ops_result(commit="fffffff"))
    section = details.split("## cpu-2core")[1].split("## nvidia")[0]
    assert "launches" not in section


def test_the_newest_of_a_day_is_taken(checkout):
    later = ops_result(time="11:00:00", commit="fffffff")
    earlier = ops_result(commit="0000000")
    _, details = write(checkout, later, earlier)
    assert "commit fffffff" in details
    assert "commit 0000000" not in details


def test_plots_are_the_same_every_time_and_old_ones_go(checkout):
    write(checkout, ops_result(), a_result())
    folder = checkout.root / "benchmarks" / "plots" / "cpu-2core"
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(first) == {"speed.svg", "memory.svg", "ppo.svg"}
    assert all("<dc:date>" not in text for text in first.values())
    (folder / "gone.svg").write_text("old")
    _, details = write(checkout)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    assert "![speed](plots/cpu-2core/speed.svg)" in details


def test_a_plot_shows_the_figures(checkout):
    other = copy.deepcopy(entry())
    other["implementations"]["eager"]["seconds"] = [3.25, 3.25]
    write(checkout, ops_result(cases=[other]))
    plot = (checkout.root / "benchmarks/plots/cpu-2core/speed.svg").read_text()
    assert "6.5" in plot
    assert "eager" in plot
