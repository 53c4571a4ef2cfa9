"""What the benchmarks of SFT and DPO have in common: gate, turns, arithmetic, goals."""

import argparse
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.before import dpo, peer, sft, training
from benchmarks.before.dpo import DPO
from benchmarks.before.sft import SFT
from benchmarks.before.training import Training
from benchmarks.before.training_worker import texts

TRAININGS = pytest.mark.parametrize(
    ("which", "command"), [(SFT, sft), (DPO, dpo)], ids=["sft", "dpo"]
)


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    return parser.parse_args([*given, "--peer-python", "python", "--quick"])


class Stub:
    """A worker whose losses, by reference, memory and epochs are given."""

    losses: ClassVar[dict[tuple[str, str], list[float]]] = {}
    running = 0

    def __init__(
        self, python: Path, implementation: str, shape: training.Shape, *given: str, script: Path
    ) -> None:
        assert script == training.SCRIPT
        assert script.exists()
        self.implementation, self.given = implementation, given
        self.epochs = 0
        self.checked = False

    def __enter__(self) -> "Stub":
        Stub.running += 1
        assert Stub.running <= 2, "more than two workers at a time"
        return self

    def __exit__(self, *error: object) -> None:
        Stub.running -= 1

    def ready(self) -> dict:
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        ours = self.implementation == "fastrl"
        if command == "check":
            self.checked = True
            ordinary = [5.0001] if ours else [5.0]
            return {"losses": self.losses.get((self.implementation, self.given[-1]), ordinary)}
        assert self.checked
        if command == "memory":
            return {"peak": 100 if ours else 200, "beyond_gradients": 10 if ours else 20}
        self.epochs += 1
        return {"seconds": 99.0 if self.epochs == 1 else (1.0 if ours else 1.5)}


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Worker", Stub)
    monkeypatch.setattr(Stub, "running", 0)
    monkeypatch.setattr(Stub, "losses", {})


SIDES = {
    "fastrl": {"seconds": [1.0, 1.0], "peak": 100, "beyond_gradients": 10},
    "peer": {"seconds": [1.5, 1.5], "peak": 200, "beyond_gradients": 20},
}


def test_losses_agree_within_the_tolerance() -> None:
    assert not list(training.disagreements([5.0004, 4.0], [5.0, 4.0]))


@pytest.mark.parametrize("ours", [[5.0006, 4.0], [5.0, float("nan")], [5.0], []], ids=str)
def test_losses_that_are_apart_or_missing_are_named(ours: list[float]) -> None:
    (line,) = training.disagreements(ours, [5.0, 4.0])
    assert "loss is" in line or f"fastrl made {len(ours)} steps, the peer 2" in line


def test_no_steps_at_all_are_no_agreement() -> None:
    assert list(training.disagreements([], []))


@TRAININGS
def test_a_red_gate_prints_no_figures(
    which: Training,
    command: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    last = which.arguments()[-1][-1]  # of the last reference, where there are several
    monkeypatch.setattr(Stub, "losses", {("fastrl", last): [6.0], ("trl", last): [6.1]})
    assert command.run(arguments()) == 1
    printed = capsys.readouterr().out
    assert "step 0: the loss is 6, the peer's 6.1" in printed
    assert "per second" not in printed
    assert Stub.running == 0


def test_sides_take_turns_and_the_first_epoch_is_not_counted() -> None:
    result = training.measure(SFT, arguments(), SFT.quick)
    assert result["sides"] == SIDES
    assert result["tokens"] == sum(map(len, texts(vars(SFT.quick))))
    assert result["difference"] == pytest.approx(2e-5)
    assert training.runs_of(result) == [result]
    assert training.speedups(result) == [1.5, 1.5]


def test_every_reference_has_workers_a_gate_and_figures_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(Stub, "losses", {("fastrl", "cached"): [5.0002]})
    result = training.measure(DPO, arguments(), DPO.quick)
    assert result["pairs"] == DPO.quick.pairs
    copy, cached = training.runs_of(result)
    assert copy == {"reference": "copy", "difference": pytest.approx(2e-5), "sides": SIDES}
    assert cached == {"reference": "cached", "difference": pytest.approx(4e-5), "sides": SIDES}
    assert training.difference(result) == cached["difference"]
    assert capsys.readouterr().out.count("agree on the losses of 1 steps") == 2


@TRAININGS
def test_goals_are_of_the_first_run_and_on_cpus(which: Training, command: object) -> None:
    result = training.measure(which, arguments(), which.quick)
    result["machine"].pop("accelerator", None)
    assert [reached for _, reached in training.verdicts(which, result)] == [True, True]
    first = training.runs_of(result)[0]
    first["sides"] = SIDES | {"fastrl": {"seconds": [1.2, 1.2], "peak": 101}}
    assert [reached for _, reached in training.verdicts(which, result)] == [False, False]
    result["machine"]["accelerator"] = "NVIDIA H100"
    assert training.verdicts(which, result) == []


@TRAININGS
def test_the_terminal_shows_every_figure(
    which: Training, command: object, capsys: pytest.CaptureFixture
) -> None:
    assert command.run(arguments()) == 0
    printed = capsys.readouterr().out
    for name in which.references or (None,):
        row = f"{which.unit} per second of training" + (f"; reference {name}" if name else "")
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{row} ")]
        assert "1.50 (1.50–1.50)" in line
    assert f"goal ≥ 1.3× the {which.unit}/s: reached" in printed
    assert "saved" not in printed


def test_a_peer_that_is_installed_beside_us_needs_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer.importlib.metadata, "version", lambda name: "1.16.0")
    assert peer.peer_python(training.PEER) == Path(sys.executable)
