"""Scripts of TRL 1.x on either library: the same steps, and what a turn says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks import test_scripts, test_training, worker
from benchmarks.cases import OURS, Case
from benchmarks.environments import TRL
from benchmarks.harness import Measurement, Red, Run
from benchmarks.sides.grpo import GRPOScriptSide
from benchmarks.sides.training import DPOScriptSide

GRPO, DPO = (case.of for case in test_scripts.cases(Run(torch.device("cpu"), toy=True)))
needs_trl = pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL 1.16 needs Python 3.11")
pytestmark = pytest.mark.filterwarnings("ignore")  # libraries' own


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As far as accelerate is concerned, which keeps a process to one precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@needs_trl
def test_all_trainers_move_parameters_alike_and_say_what_they_took() -> None:
    pytest.importorskip("trl")
    moved = {}
    for name in ("fastrl", "trl", "benchmarks.sides.trl_with_rollouts"):
        side = GRPOScriptSide(importlib.import_module(name), GRPO.shape, optimizer="sgd")
        moved[name] = side.check()["moved"]
        seconds = side.turn()["seconds"]
        assert 0 < seconds["generation"] < seconds["step"]
    theirs = moved.pop("trl")
    for own in moved.values():
        assert not list(test_scripts.moved_otherwise(own, theirs))


@needs_trl
def test_pairs_have_the_same_losses_on_both() -> None:
    pytest.importorskip("trl")
    ours, theirs = (
        DPOScriptSide(importlib.import_module(name), DPO.shape, **DPO.options).check()["losses"]
        for name in ("fastrl", "trl")
    )
    assert len(ours) == 10
    assert not list(test_training.disagreements(ours, theirs))


class StandIn:
    """A worker's other end, whose parameters move as told."""

    moves: dict[str, float] = {}  # noqa: RUF012 - by the implementation

    def __init__(self, python: Path, implementation: str, *_: Any, **options: Any):
        self.implementation = implementation

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ready(self) -> dict:
        return {"torch": "2"}

    def ask(self, command: str) -> dict:
        seconds = {"step": 2.0, "generation": 0.5 if self.implementation != "trl" else 1.0}
        return {
            "check": {"moved": {"a": self.moves.get(self.implementation, 1.0)}},
            "turn": {"seconds": seconds},
            "memory": {"peak": 1},
        }[command]


def test_each_side_must_move_as_trls_trainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "Worker", StandIn)
    run = Run(torch.device("cpu"), rounds=2)
    measurement = Measurement(run, Case("scripts", "GRPO", "x", of=GRPO))
    test_scripts.measure(measurement, GRPO, Path("python"))
    sides = measurement.entry["sides"]
    assert list(sides) == [OURS, test_scripts.MIXED, TRL]
    rates = [side["facts"]["generated tokens/s"] for side in sides.values()]
    assert rates == [4 * 5 / 0.5, 4 * 5 / 0.5, 4 * 5 / 1.0]
    for implementation, named in (("fastrl", OURS), ("trl+fastrl", test_scripts.MIXED)):
        monkeypatch.setattr(StandIn, "moves", {implementation: 1.1})
        with pytest.raises(Red, match=f"{named}: a"):
            test_scripts.measure(measurement, GRPO, Path("python"))
