"""A GRPO step on fastrl and on TRL's GRPOTrainer: completions are drawn, scored and learned from.

Two workers, one per library, hold a trainer on the same weights and prompts. First a gate: both
make two steps of gradient descent on given completions, and must move every parameter as far. Then
the memory of a step is measured, and they take turns, with Adam and completions of their own.

And fastrl's update of given completions, padding-free, beside its own on padded batches, in this
process: their gradients must agree before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fastrl
from benchmarks import models, results, worker
from benchmarks.cases import OURS, Case, Goal
from benchmarks.environments import TRL
from benchmarks.harness import Measurement, Run, own_accelerate
from benchmarks.memory import free
from benchmarks.models import PRECISION, Model
from benchmarks.products import of_head, roofs, without_bf16
from benchmarks.sides.grpo import UpdateSide
from benchmarks.timing import Side

# Of how far a parameter moves: its norm, of that of all of them.
RELATIVE, OF_ALL = 1e-3, 1e-5
GRADIENT = 1e-5  # of a parameter's gradient: the norm of the difference
# transformers' own, in fp32 and padded, is 1e-5 off that of fp64, 1e-6 for a Llama of the size.
GRADIENT_OF_STATES = 5e-5
PADDED = "fastrl, padded"


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


@dataclasses.dataclass(frozen=True)
class Update(Step):
    """The same, of given completions, and of fastrl's step what follows scores and advantages."""

    @property
    def positions(self) -> tuple[int, int]:
        """Positions that the model runs: prompts once for all their completions, and with each."""
        groups, learned = self.batch // self.group, self.batch * self.completion
        return groups * self.prompt + learned, self.batch * self.prompt + learned

    @property
    def what(self) -> str:
        once, each = self.positions
        return (
            f"{super().what}, of given completions; padded batches run {each} positions where "
            f"packed ones run {once}, {each / once:.2f} times as many; memory is an update's, "
            "above gradients too"
        )


ON_GPU = {"prompt": 128, "completion": 256, "batch": 32}


def cases(run: Run) -> list[Case]:
    """Short and long prompts beside TRL, and updates beside padded ones."""
    if run.toy:
        sizes: dict[str, Any] = {"completion": 5, "batch": 4, "group": 2}
        return [
            _beside_trl(Step(models.TOY, 6, **sizes)),
            _beside_padded(Update(_TOY, 20, **sizes)),
        ]
    small = dataclasses.replace(models.SMALL, context=1024)
    half = dataclasses.replace(small, dtype="bf16")
    faster, less = Goal("speedup", 6.0, against=TRL), Goal("memory share", 0.2, against=TRL)
    wide = _beside_padded(
        Update(_WIDE, 256, completion=64, batch=32),
        Goal("speedup", 2.7, against=PADDED),
        Goal("memory share", 0.4, against=PADDED),
    )
    wide_half = _beside_padded(
        dataclasses.replace(wide.of, model=dataclasses.replace(_WIDE, dtype="bf16"))
    )
    if run.device.type == "cuda":
        return [
            _beside_trl(Step(models.QWEN, **ON_GPU)),
            _beside_trl(Step(models.QWEN35, **ON_GPU)),
            _beside_trl(Step(models.GPT2, **ON_GPU)),
            wide_half,
        ]
    hybrid = Update(models.SMALL_QWEN35, 256, completion=64)
    once, each = hybrid.positions
    return [
        _beside_trl(Step(small, 16), Goal("speedup", 2.7, against=TRL)),
        _beside_trl(Step(small, 256), faster, less),
        _beside_trl(Step(half, 16)),
        _beside_trl(Step(half, 256)),
        wide,
        _beside_trl(Step(models.SMALL_QWEN35, 32), Goal("speedup", 1.0, against=TRL)),
        _beside_padded(hybrid, Goal("speedup", 0.8 * each / once, against=PADDED)),
        *([dataclasses.replace(wide_half, main=False)] if run.full else []),
    ]


_WIDE = Model("Llama 8×384", "llama", 8, 384, 6, 6, 1536, 8192, 1024, "fp32", tied=False)
_TOY = Model("toy Llama", "llama", 2, 32, 4, 2, 96, 503, 128, "fp32", tied=False)


def _beside_trl(step: Step, *goals: Goal) -> Case:
    label = f"prompts of {step.prompt} tokens, {step.model.dtype}"
    seconds = 1.0 if step.model is models.TOY else 180.0
    return Case("grpo", step.model.name, label, step.what, step, goals, seconds=seconds)


def _beside_padded(update: Update, *goals: Goal) -> Case:
    label = f"update of groups of {update.group}, {update.model.dtype}"
    seconds = 1.0 if update.model is _TOY else 120.0
    return Case("grpo", update.model.name, label, update.what, update, goals, seconds=seconds)


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


def test_step(
    measurement: Measurement, case: Case, run: Run, request: pytest.FixtureRequest
) -> None:
    if case.of.model.dtype == "bf16" and (why := without_bf16(run.device)):
        pytest.skip(run.leave(case, why))
    if isinstance(case.of, Update):
        measure_update(measurement, case.of)
        return
    pytest.importorskip("datasets")
    measure(measurement, case.of, request.getfixturevalue("python"))


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


def measure_update(measurement: Measurement, update: Update) -> None:
    """Gate in fp32, memory, then turns of packed and padded updates."""
    shape = update.shape
    measurement.entry["shape"] = shape
    measurement.entry["units"] = ["tokens", update.batch * update.completion]
    versions = results.versions("fastrl-lm", "torch", "transformers", "accelerate")
    measurement.run.result(measurement.case.benchmark)["versions"][OURS] = versions
    with own_accelerate():
        gradients = [s.gradients_of_step() for s in _both(shape | {"dtype": "fp32"}).values()]
        allowed = GRADIENT_OF_STATES if update.model.family == models.HYBRID else GRADIENT
        if wrong := list(other_gradients(*gradients, allowed)):
            measurement.refuse("; ".join(wrong))
        measurement.entry["remarks"].append(
            f"gradients differ by {max(apart(*gradients).values()):.0e} of their norm at most"
        )
        del gradients
        free(measurement.run.device)
    with own_accelerate():
        made = _both(shape)
        sides = {}
        for name, side in made.items():
            side.turn()  # makes Adam's state
            sides[name] = Side(lambda side=side: side.turn()["seconds"], memory=side.memory())
        measurement.measure(sides, 7)


def _both(shape: dict[str, Any]) -> dict[str, UpdateSide]:
    return {
        OURS: UpdateSide(fastrl, shape),
        PADDED: UpdateSide(fastrl, shape, padding_free=False),
    }


def other_gradients(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], allowed: float = GRADIENT
) -> Iterator[str]:
    """A line for each parameter whose gradients differ, or that only one side has."""
    if not theirs:
        yield "there is no gradient"
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{name}: only one side has a gradient"
    for name, off in apart(ours, theirs).items():
        if not off <= allowed:  # NaN is not
            yield f"{name}: gradients differ by {off:.1e} of their norm"


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """‖ours - theirs‖ / ‖theirs‖ of each parameter that both have."""
    return {
        name: float((ours[name] - expected).norm() / expected.norm())
        for name, expected in theirs.items()
        if name in ours
    }
