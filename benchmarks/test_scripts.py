"""Scripts of TRL 1.x with the import changed: GRPO and DPO by the same names, arguments and data on
fastrl's trainers and on TRL's, and GRPO on TRL's trainer with fastrl's rollouts.

Workers, one per side, hold trainers on the same weights and data. First a gate: all take the same
steps, on given completions or pairs. Then the memory of a step is measured, and they take turns.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path

import pytest

from benchmarks import models, test_grpo, test_training, worker
from benchmarks.cases import OURS, Case, Goal
from benchmarks.environments import TRL
from benchmarks.harness import Measurement, Run
from benchmarks.models import PRECISION, Model
from benchmarks.products import of_head, roofs, without_bf16
from benchmarks.test_grpo import Step, moved_otherwise
from benchmarks.test_training import Data

MIXED = f"{TRL}, fastrl's rollouts"
_BY_NAME = "by TRL 1.x's names, the same arguments on all sides"


@dataclasses.dataclass(frozen=True)
class GRPOScript(Step):
    @property
    def what(self) -> str:
        return f"{super().what}; {_BY_NAME}; generation is from prompts to texts"


@dataclasses.dataclass(frozen=True)
class DPOScript(Data):
    @property
    def what(self) -> str:
        return f"{super().what}; {_BY_NAME}"


@dataclasses.dataclass(frozen=True)
class DistillationScript(worker.WorkerShape):
    """A student, a teacher of another width, and responses to prompts: lengths in tokens."""

    model: Model
    teacher_width: int = 512
    prompt: int = 16
    completion: int = 48
    batch: int = 16
    beta: float = 1.0

    @property
    def what(self) -> str:
        return (
            f"{self.model}, {PRECISION[self.model.dtype]}, a teacher of width "
            f"{self.teacher_width}: {self.batch} responses of {self.completion} tokens to prompts "
            f"of {self.prompt}, β = {self.beta}, one update; {_BY_NAME}; generation is from "
            "prompts to texts"
        )


def cases(run: Run) -> list[Case]:
    """GRPO on short and long prompts, DPO by how the reference is kept, distillation."""
    small = dataclasses.replace(models.SMALL, context=1024)
    half = dataclasses.replace(small, dtype="bf16")
    steps = [GRPOScript(model, prompt) for model in (small, half) for prompt in (16, 256)]
    pairs = [
        DPOScript("dpo_script", model, 40, 16, 128, 4, reference)
        for model, reference in ((small, "copy"), (half, "copy"), (small, "cached"))
    ]
    if run.device.type == "cuda":
        steps = [GRPOScript(models.QWEN, **test_grpo.ON_GPU)]
        on_gpu = dataclasses.asdict(test_training.PAIRS_ON_GPU)
        pairs = [DPOScript(**on_gpu | {"kind": "dpo_script", "model": models.QWEN})]
    if run.toy:
        toy = models.TOY
        steps = [GRPOScript(toy, 6, completion=5, batch=4, group=2)]
        pairs = [DPOScript("dpo_script", toy, 20, 4, 24, 2, "copy")]
    labels = [f"prompts of {step.prompt} tokens, {step.model.dtype}" for step in steps]
    found = [
        Case("scripts", "GRPO", label, step.what, step, seconds=1.0 if run.toy else 180.0)
        for label, step in zip(labels, steps, strict=True)
    ]
    distilled = DistillationScript(models.SMALL)
    if run.toy:
        distilled = DistillationScript(models.TOY, 64, 6, 5, 4)
    goals = (
        Goal("speedup", 3.0, against=TRL),
        Goal("memory share", 0.4, against=TRL),
        Goal("speedup", 1.2, against=TRL, phase="update"),
    )
    found.append(
        Case(
            "scripts",
            "distillation",
            f"prompts of {distilled.prompt} tokens",
            distilled.what,
            distilled,
            goals,
            seconds=1.0 if run.toy else 180.0,
        )
    )
    return found + [
        Case(
            "scripts",
            "DPO",
            f"reference {data.reference}, {data.model.dtype}",
            data.what,
            data,
            seconds=1.0 if run.toy else 120.0,
        )
        for data in pairs
    ]


def peer_of(run: Run) -> str:
    return TRL


def test_script(measurement: Measurement, case: Case, run: Run, python: Path) -> None:
    pytest.importorskip("datasets")
    if case.of.model.dtype == "bf16" and (why := without_bf16(run.device)):
        pytest.skip(run.leave(case, why))
    if isinstance(case.of, DPOScript):
        test_training.measure(measurement, case.of, python)
    elif isinstance(case.of, DistillationScript):
        measure_distillation(measurement, case.of, python)
    else:
        measure(measurement, case.of, python)


def measure(measurement: Measurement, step: GRPOScript, python: Path) -> None:
    """Gate, memory, then turns of the three sides."""
    tokens = step.batch * step.completion
    measurement.entry["units"] = ["tokens", tokens]
    with _workers(measurement, step.shape | {"dtype": "fp32"}, python, "sgd") as workers:
        moved = {name: side.ask("check")["moved"] for name, side in workers.items()}
    theirs = moved.pop(TRL)
    wrong = [f"{name}: {x}" for name, own in moved.items() for x in moved_otherwise(own, theirs)]
    if wrong:
        measurement.refuse("by two steps of gradient descent: " + "; ".join(wrong))
    with _workers(measurement, step.shape, python) as workers:
        for side in workers.values():
            side.ask("turn")  # makes Adam's state
        products = of_head(step.model, tokens)
        measurement.entry["roofs"] = roofs(products, step.model.dtype, measurement.run.device)
        worker.turns_with_memory(measurement, workers)
    for side in measurement.entry["sides"].values():
        taken = statistics.median(side["seconds"]["generation"])
        side["facts"]["generated tokens/s"] = tokens / taken
    measurement.run.save(measurement.case.benchmark)


def measure_distillation(measurement: Measurement, step: DistillationScript, python: Path) -> None:
    """Gate, memory, then turns of both sides."""
    measurement.entry["units"] = ["tokens", step.batch * step.completion]
    with worker.pair(
        measurement, TRL, python, "distill_script", step.shape, optimizer="sgd"
    ) as workers:
        moved = [side.ask("check")["moved"] for side in workers.values()]
    if wrong := list(moved_otherwise(*moved)):
        measurement.refuse("by two steps of gradient descent: " + "; ".join(wrong))
    with worker.pair(measurement, TRL, python, "distill_script", step.shape) as workers:
        for side in workers.values():
            side.ask("turn")  # makes Adam's state
        worker.turns_with_memory(measurement, workers)


def _workers(measurement: Measurement, shape: dict, python: Path, optimizer: str = "adam"):
    names = {
        OURS: (Path(sys.executable), OURS),
        MIXED: (python, "trl+fastrl"),
        TRL: (python, "trl"),
    }
    return worker.together(measurement, names, "grpo_script", shape, optimizer=optimizer)
