"""The PPO benchmark's command: shapes, references, gates, budgets and files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from benchmarks.before import ppo, ppo_cases, ppo_tables
from benchmarks.before.peer import Uninstallable
from benchmarks.before.worker import Absent, WorkerError


def test_the_ratio_is_the_median_over_pairs() -> None:
    timings = [
        {"fastrl": {"seconds": {"step": ours}}, "peer": {"seconds": {"step": theirs}}}
        for ours, theirs in ((1.0, 3.0), (2.0, 4.0), (4.0, 4.0))
    ]
    assert ppo.summary(timings, "step") == {
        "fastrl": [1.0, 2.0, 4.0],
        "peer": [3.0, 4.0, 4.0],
        "ratio": 2.0,
    }


class StandIn:
    """A worker that agrees with the other and takes one second, the peer three; on a GPU one GiB,
    the peer two."""

    started: ClassVar[list[tuple[str, ppo.Shape]]] = []
    asked: ClassVar[list[tuple[str, str]]] = []  # with which optimizer, and what

    def __init__(
        self,
        python: Path,
        implementation: str,
        shape: ppo.Shape,
        *arguments: str,
        script: Path,
        device: str,
    ) -> None:
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert given.keys() == {"--reference", "--optimizer"}
        assert script.exists()
        self.ours, self.shape = implementation == "fastrl", shape
        self.judge = implementation == "float64"
        self.reference, self.optimizer = given["--reference"], given["--optimizer"]
        self.room = 2**30 * (1 if self.ours else 2) if device == "cuda" else None
        self.started.append((implementation, shape))

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> dict:
        return {"torch": "2"} | ({"peft": "1"} if self.reference == "adapter" else {})

    def ask(self, command: str) -> dict:
        self.asked.append((self.optimizer, command))
        if command == "iterate":
            seconds = dict.fromkeys(ppo_tables.PHASES, 1.0 if self.ours else 3.0)
            return {"seconds": seconds, "peak": self.room}
        kl = 1.25 if self.ours and self.shape.dtype == "bf16" else 1.0
        return self.answer(float("nan") if self.ours and self.reference == "none" else kl)

    def answer(self, kl: float) -> dict:
        """To a check."""
        trained = {"v_head": 7}
        return {"statistics": [{"objective/kl": kl}], "trained": trained, "at_rest": self.room}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    """Runs the command with stand-ins for the workers; the exit status, and what was saved."""
    monkeypatch.setattr(StandIn, "started", [])
    monkeypatch.setattr(StandIn, "asked", [])

    def measured(worker: type, *asked: str, device: str = "cpu") -> tuple[int, dict]:
        monkeypatch.setattr(ppo, "Worker", worker)
        monkeypatch.setattr(ppo, "pick_device", lambda _: torch.device(device))
        output = tmp_path / "result.json"
        output.unlink(missing_ok=True)
        status = run("--repeats", "2", "--output", str(output), *asked)
        return status, json.loads(output.read_text()) if output.exists() else {}

    return measured


def run(*asked: str) -> int:
    parser = argparse.ArgumentParser()
    ppo.add_arguments(parser)
    return ppo.run(parser.parse_args(["--peer-python", "python", *asked]))


def test_a_red_gate_prints_no_figures(measured: Callable, capsys: pytest.CaptureFixture) -> None:
    class Off(StandIn):
        def ask(self, command: str) -> dict:
            assert command == "check", "timed in spite of a red gate"
            return self.answer(1.0 if self.ours else 2.0)

    assert measured(Off) == (1, {})
    assert "objective/kl is 1, the peer has 2" in capsys.readouterr().out


@pytest.mark.parametrize(("exact", "red"), [(1.0, False), (1.3, False), (1.6, True), (2.0, True)])
def test_float64_decides_where_the_sides_differ(
    measured: Callable, capsys: pytest.CaptureFixture, exact: float, red: bool
) -> None:
    class Off(StandIn):
        def ask(self, command: str) -> dict:
            if command == "iterate" or self.optimizer == "adam":
                return super().ask(command)
            return self.answer(exact if self.judge else 1.0 if self.ours else 2.0)

    status, result = measured(Off)
    assert status == red
    assert bool(result) != red
    out = capsys.readouterr().out
    assert "step 0: objective/kl is 1, the peer has 2" in out
    assert ("float64 decides for fastrl" in out) != red
    assert (f"the peer has 2, float64 {exact:g}" in out) == red
    assert [side for side, _ in StandIn.started][:3] == ["fastrl", "trl", "float64"]


def test_the_gate_takes_gradient_steps_and_adam_is_timed(measured: Callable) -> None:
    assert measured(StandIn)[0] == 0
    checks = [("sgd", "check")] * 2 + [("adam", "check")] * 2
    assert StandIn.asked == checks + [("adam", "iterate")] * 6
    assert "float64" not in {side for side, _ in StandIn.started}, "asked where there is no need"


def test_each_reference_has_an_entry(measured: Callable, capsys: pytest.CaptureFixture) -> None:
    status, result = measured(StandIn, "--reference", "copy", "adapter", "none", "copy")
    assert status == 0
    (case,) = result["cases"]
    entries = case["references"]
    assert [entry["reference"] for entry in entries] == ["copy", "adapter", "none"]
    assert {entry["phases"]["step"]["ratio"] for entry in entries} == {3.0}
    assert {entry["trained"] for entry in entries} == {7}
    assert {entry["memory"] for entry in entries} == {None}
    assert result["versions"]["peer"] == {"torch": "2", "peft": "1"}
    out = capsys.readouterr().out
    assert "agree on every statistic of two steps, objective/kl aside" in out
    assert ppo_cases.REFERENCES["adapter"] in out
    assert "goal ≥ 3× trl==0.11.4: reached" in out


def test_one_reference_that_is_absent_or_red_leaves_the_others(
    measured: Callable, capsys: pytest.CaptureFixture
) -> None:
    class Some(StandIn):
        def ready(self) -> dict:
            if self.reference == "adapter":
                raise Absent("trl: peft cannot be imported")
            if self.reference == "offload":
                raise WorkerError("the trl worker ended:\nTraceback\nMemoryError: no more")
            return {}

        def ask(self, command: str) -> dict:
            found = super().ask(command)
            if self.reference == "trunk" and self.ours:
                found["trained"] = {}
            return found

    status, result = measured(Some, "--reference", *ppo_cases.REFERENCES)
    assert status == 1
    copied, adapter, trunk, offload, none = result["cases"][0]["references"]
    assert copied["phases"]
    assert none["phases"]
    assert adapter["absent"] == "trl: peft cannot be imported"
    assert "v_head: fastrl trains 0 numbers of it, the peer 7" in trunk["red"]
    assert offload["red"] == "MemoryError: no more"
    assert [entry["phases"] for entry in (adapter, trunk, offload)] == [{}, {}, {}]
    assert "absent: trl: peft cannot be imported" in capsys.readouterr().out

    assert measured(Some, "--reference", "adapter")[0] == 0  # nothing is wrong with fastrl


def test_on_a_gpu_two_shapes_are_timed_in_bf16_after_fp32_has_agreed(
    measured: Callable, capsys: pytest.CaptureFixture
) -> None:
    status, result = measured(StandIn, device="cuda")
    assert status == 0
    assert [case["shape"]["name"] for case in result["cases"]] == ["GPT-2 124M", "Qwen2.5 0.5B"]
    for case in result["cases"]:
        shape = case["shape"]
        assert (shape["batch"], shape["query"], shape["response"]) == (64, 128, 256)
        assert (shape["mini_batch"], shape["epochs"], shape["dtype"]) == (8, 4, "bf16")
        assert shape["context"] >= 128 + 256
        (entry,) = case["references"]
        assert entry["differences"] == {"objective/kl": {"difference": 0.25, "of": 1.0}}
        assert entry["memory"]["peak"] == {"fastrl": [2**30] * 2, "peer": [2**31] * 2}
        assert entry["memory"]["at_rest"] == {"fastrl": [2**30], "peer": [2**31]}
    order = [(shape.name, shape.dtype) for side, shape in StandIn.started if side == "fastrl"]
    assert order == [
        (name, dtype) for name in ("GPT-2 124M", "Qwen2.5 0.5B") for dtype in ("fp32", "bf16")
    ]
    out = capsys.readouterr().out
    assert "peak memory" in out
    assert "Mean |Δ| of two steps' statistics" in out


@pytest.mark.parametrize(
    ("dtype", "why"), [("fp32", "objective/kl is 1, the peer has 1.1"), ("bf16", "kl is nan")]
)
def test_bf16_is_not_timed_where_either_gate_is_red(
    measured: Callable, capsys: pytest.CaptureFixture, dtype: str, why: str
) -> None:
    class Off(StandIn):
        def ask(self, command: str) -> dict:
            assert command == "check", "timed in spite of a red gate"
            right = 1.0 if self.ours else 1.1  # close enough in bf16
            if self.shape.dtype != dtype:
                return self.answer(1.0 if self.shape.dtype == "fp32" else right)
            return self.answer(right if dtype == "fp32" else float("nan"))

    assert measured(Off, "--shape", "Qwen", device="cuda") == (1, {})
    assert why in capsys.readouterr().out
    assert {shape.dtype for _, shape in StandIn.started} == {"fp32", dtype}


def test_a_shape_is_chosen_by_its_name(measured: Callable, capsys: pytest.CaptureFixture) -> None:
    _, result = measured(StandIn, "--shape", "Qwen", "--threads", "3", device="cuda")
    assert [case["shape"]["name"] for case in result["cases"]] == ["Qwen2.5 0.5B"]
    assert result["cases"][0]["shape"]["threads"] == result["threads"] == 3
    assert measured(StandIn, "--shape", "GPT-5") == (2, {})
    assert "no shape has 'GPT-5' in its name:\nGPT-2 4×256" in capsys.readouterr().err


def test_without_time_nothing_is_begun_and_the_rest_is_noted(
    measured: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(ppo, "monotonic", lambda: now[0])

    class Slow(StandIn):
        def ask(self, command: str) -> dict:
            now[0] += 20.0
            return super().ask(command)

    asked = ("--minutes", "8", "--reference", "copy", "none")
    status, result = measured(Slow, *asked, device="cuda")
    assert status == 0
    # 8 minutes but 10 s: 200 s for the first, as long for the second; then 70 s are left.
    (case,) = result["cases"]
    assert [entry["took"] for entry in case["references"]] == [200.0, 200.0]
    assert list(result["left"]) == [
        f"Qwen2.5 0.5B, reference {reference}" for reference in ("copy", "none")
    ]
    assert "70 s were left" in result["left"]["Qwen2.5 0.5B, reference copy"]
    assert "left: Qwen2.5 0.5B, reference none" in capsys.readouterr().out


def test_rounds_end_with_the_time_but_not_before_there_are_three(
    measured: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(ppo, "monotonic", lambda: now[0])

    class Slow(StandIn):
        def ask(self, command: str) -> dict:
            now[0] += 100.0 if command == "iterate" else 0.0
            return super().ask(command)

    for minutes, rounds in (("4", 3), ("20", 4), ("60", 9)):
        now[0] = 0.0
        _, result = measured(Slow, "--minutes", minutes, "--repeats", "9")
        found = result["cases"][0]["references"][0]["phases"]["step"]["fastrl"]
        assert len(found) == rounds


def test_a_killed_run_leaves_what_it_has(measured: Callable, tmp_path: Path) -> None:
    class Killed(StandIn):
        def ask(self, command: str) -> dict:
            if self.reference == "none":
                raise KeyboardInterrupt
            return super().ask(command)

    with pytest.raises(KeyboardInterrupt):
        measured(Killed, "--reference", "copy", "none")
    (case,) = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert [entry["reference"] for entry in case["references"]] == ["copy"]


def test_results_go_below_a_folder_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ppo, "Worker", StandIn)
    assert run("--device", "cpu", "--results", str(tmp_path)) == 0
    (path,) = tmp_path.glob("*/*.json")
    assert path.name.endswith("-ppo.json")
    assert path.parent.name.startswith("cpu-")
    assert "accelerator" not in json.loads(path.read_text())["machine"]


@pytest.mark.parametrize("flag", ["--quick", "--no-save"])
def test_nothing_is_saved_where_that_is_asked_for(measured: Callable, flag: str) -> None:
    assert measured(StandIn, flag) == (0, {})


def test_the_eager_peer_runs_here_and_keeps_a_copy_alone(measured: Callable) -> None:
    status, result = measured(StandIn, "--peer", "eager", "--reference", "copy", "trunk")
    assert status == 0
    copied, trunk = result["cases"][0]["references"]
    assert copied["phases"]
    assert trunk["absent"] == "eager: it keeps a copy, and nothing else"
    assert {side for side, _ in StandIn.started} == {"fastrl", "eager"}


def test_a_peer_that_cannot_be_installed_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(peer: str) -> Path:
        raise Uninstallable(f"{peer} cannot be had: give --peer-python PATH")

    monkeypatch.setattr(ppo, "peer_python", refuse)
    parser = argparse.ArgumentParser()
    ppo.add_arguments(parser)
    assert ppo.run(parser.parse_args(["--device", "cpu"])) == 2
    said = "trl==0.11.4 cannot be had: give --peer-python PATH, or measure against --peer eager\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("option", ["--repeats", "--threads", "--minutes"])
def test_numbers_are_positive(measured: Callable, option: str) -> None:
    assert measured(StandIn, option, "0") == (2, {})
