"""A GRPO step on fastrl and on TRL's GRPOTrainer: completions are drawn, scored and learned from.

Two workers, one per library, hold a trainer on the same weights and prompts. First a gate: both
make two steps of gradient descent on given completions, and must move every parameter as far. Then
the memory of a step is measured, and they take turns, with Adam and completions of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import models, worker
from benchmarks.cases import Case, Goal
from benchmarks.environments import TRL
from benchmarks.harness import Measurement, Run
from benchmarks.models import Model

# Of how far a parameter moves: its norm, of that of all of them.
RELATIVE, OF_ALL = 1e-3, 1e-5


@dataclasses.dataclass(frozen=True)
class Step(worker.WorkerShape):
    """A model in fp32, and completions of prompts, in groups: lengths in tokens."""

    model: Model
    prompt: int
    completion: int = 48
    batch: int = 16
    group: int = 8
    beta: float = 0.04

    @property
    def what(self) -> str:
        """A step in one sentence."""
        return (
            f"{self.model}, fp32: {self.batch} completions of "
            f"{self.completion} tokens to prompts of {self.prompt}, in groups of {self.group}, "
            f"β = {self.beta}, one update"
        )


def cases(run: Run) -> list[Case]:
    """Short and long prompts."""
    small = dataclasses.replace(models.SMALL, context=1024)
    found = [Step(small, prompt) for prompt in (16, 256)]
    if run.toy:
        found = [Step(models.TOY, 6, completion=5, batch=4, group=2)]
    return [
        Case(
            "grpo",
            step.model.name,
            f"prompts of {step.prompt} tokens",
            step.what,
            step,
            goals=() if run.toy else (Goal("speedup", 1.5, against=TRL),),
            seconds=1.0 if run.toy else 180.0,
        )
        for step in found
    ]


def moved_otherwise(ours: dict[str, float], theirs: dict[str, float]) -> Iterator[str]:
    """A line for each parameter that the sides move differently, or that only one has."""
    whole = max([*theirs.values(), 0.0])
    if not whole > 0:
        yield "the peer moved no parameter"
    for name in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(name), theirs.get(name)
        if mine is None or other is None:
            yield f"{name}: only one side has it"
        elif not abs(mine - other) <= RELATIVE * other + OF_ALL * whole:  # NaN is not
            yield f"{name}: fastrl moves it by {mine:.6g}, the peer by {other:.6g}"


def peer_of(run: Run) -> str:
    return TRL


def test_step(measurement: Measurement, case: Case, python: Path) -> None:
    pytest.importorskip("datasets")
    measure(measurement, case.of, python)


def measure(measurement: Measurement, step: Step, python: Path) -> None:
    """Gate, memory, then turns of both sides."""
    measurement.entry["units"] = ["tokens", step.batch * step.completion]
    with worker.pair(measurement, TRL, python, "grpo", step.shape, optimizer="sgd") as workers:
        moved = [side.ask("check")["moved"] for side in workers.values()]
    if wrong := list(moved_otherwise(*moved)):
        measurement.refuse("by two steps of gradient descent: " + "; ".join(wrong))
    with worker.pair(measurement, TRL, python, "grpo", step.shape) as workers:
        for side in workers.values():
            side.ask("turn")  # makes Adam's state
        worker.turns_with_memory(measurement, workers)
