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
from benchmarks.models import PRECISION, Model
from benchmarks.products import of_head, roofs, without_bf16

# Of how far a parameter moves: its norm, of that of all of them.
RELATIVE, OF_ALL = 1e-3, 1e-5


@dataclasses.dataclass(frozen=True)
class Step(worker.WorkerShape):
    """A model, and completions of prompts, in groups: lengths in tokens. Its weights are fp32; in
    bf16 it runs under autocast."""

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
            f"{self.model}, {PRECISION[self.model.dtype]}: {self.batch} completions of "
            f"{self.completion} tokens to prompts of {self.prompt}, in groups of {self.group}, "
            f"β = {self.beta}, one update"
        )


def cases(run: Run) -> list[Case]:
    """Short and long prompts."""
    small = dataclasses.replace(models.SMALL, context=1024)
    half = dataclasses.replace(small, dtype="bf16")
    found = [Step(model, prompt) for model in (small, half) for prompt in (16, 256)]
    if run.toy:
        found = [Step(models.TOY, 6, completion=5, batch=4, group=2)]
    goals = {} if run.toy else {("fp32", 16): 2.7, ("fp32", 256): 5.0}
    return [
        Case(
            "grpo",
            step.model.name,
            f"prompts of {step.prompt} tokens, {step.model.dtype}",
            step.what,
            step,
            goals=tuple(
                Goal("speedup", bound, against=TRL)
                for of, bound in goals.items()
                if of == (step.model.dtype, step.prompt)
            ),
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


def test_step(measurement: Measurement, case: Case, run: Run, python: Path) -> None:
    pytest.importorskip("datasets")
    if case.of.model.dtype == "bf16" and (why := without_bf16(run.device)):
        pytest.skip(run.leave(case, why))
    measure(measurement, case.of, python)


def measure(measurement: Measurement, step: Step, python: Path) -> None:
    """Gate, memory, then turns of both sides."""
    measurement.entry["units"] = ["tokens", step.batch * step.completion]
    exact = step.shape | {"dtype": "fp32"}
    with worker.pair(measurement, TRL, python, "grpo", exact, optimizer="sgd") as workers:
        moved = [side.ask("check")["moved"] for side in workers.values()]
    if wrong := list(moved_otherwise(*moved)):
        measurement.refuse("by two steps of gradient descent: " + "; ".join(wrong))
    with worker.pair(measurement, TRL, python, "grpo", step.shape) as workers:
        for side in workers.values():
            side.ask("turn")  # makes Adam's state
        products = of_head(step.model, step.batch * step.completion)
        roofs_here = roofs(products, step.model.dtype, measurement.run.device)
        measurement.entry["roofs"] = roofs_here
        worker.turns_with_memory(measurement, workers)
