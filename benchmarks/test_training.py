"""Supervised fine-tuning and DPO: a fastrl trainer beside TRL's, an epoch at a time.

Two workers, one per library, hold a trainer on the same weights and data. First a gate: both train
the same epoch, and the losses of its steps must agree. Then the memory of a step is measured, and
they take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import models, worker
from benchmarks.cases import Case, Goal
from benchmarks.environments import TRL
from benchmarks.harness import Measurement, Run
from benchmarks.models import PRECISION, Model
from benchmarks.products import of_head, roofs, without_bf16
from benchmarks.sides.training import BETA, texts

RELATIVE = 1e-4  # of two losses
FASTER = {"sft": 3.5, "dpo": 4.0}  # in fp32, by how much


@dataclasses.dataclass(frozen=True)
class Data(worker.WorkerShape):
    """A model and data: lengths in tokens. Weights are fp32; in bf16 the model runs under autocast.
    An epoch has ten steps."""

    kind: str  # sft or dpo
    model: Model
    count: int  # texts, or pairs, whose prompts and responses are up to half the longest
    shortest: int
    longest: int
    batch: int
    reference: str = ""  # of DPO

    @property
    def options(self) -> dict[str, str]:
        return {"reference": self.reference} if self.reference else {}

    @property
    def what(self) -> str:
        """An epoch in one sentence."""
        if self.kind == "sft":
            data = f"{self.count} texts of {self.shortest} to {self.longest} tokens in batches of "
            data += f"{self.batch}"
        else:
            data = f"{self.count} pairs in batches of {self.batch}, prompts and responses of "
            data += f"{self.shortest} to {self.longest // 2} tokens, β = {BETA}; "
            data += {
                "copy": "the reference is a frozen copy, which runs in every step",
                "cached": "the reference's log-probs are computed before training begins, and not "
                "timed (TRL's precompute_ref_log_probs)",
            }[self.reference]
        return (
            f"{self.model}, {PRECISION[self.model.dtype]}: {data}; AdamW, no checkpointing; the "
            "peer pads each batch to its longest row, its default (not to, it needs "
            "flash-attention)"
        )

    @property
    def goals(self) -> tuple[Goal, ...]:
        """In fp32, with a reference that takes part in every step where there is one."""
        if self.reference == "cached" or self.model.dtype != "fp32":
            return ()
        faster = Goal("speedup", FASTER[self.kind], against=TRL)
        return faster, Goal("memory share", 0.5, against=TRL)

    @property
    def units(self) -> list[Any]:
        """What an epoch is counted in, and how many it has."""
        if self.kind != "sft":
            return ["pairs", self.count]
        return ["tokens", sum(map(len, texts(self.shape)))]


PAIRS_ON_GPU = Data("dpo", models.QWEN, 40, 64, 1024, 4, "copy")


def cases(run: Run) -> list[Case]:
    """SFT, and DPO by how the reference is kept."""
    small = dataclasses.replace(models.SMALL, context=128)
    half = dataclasses.replace(small, dtype="bf16")
    found = [
        Data("sft", small, 80, 32, 128, 8),
        Data("sft", half, 80, 32, 128, 8),
        Data("dpo", small, 40, 16, 128, 4, "copy"),
        Data("dpo", half, 40, 16, 128, 4, "copy"),
        Data("dpo", small, 40, 16, 128, 4, "cached"),
    ]
    if run.device.type == "cuda":
        found = [Data("sft", models.QWEN, 80, 128, 1024, 8), PAIRS_ON_GPU]
    if run.toy:
        toy = models.TOY
        found = [Data("sft", toy, 20, 4, 12, 2), Data("dpo", toy, 20, 4, 24, 2, "copy")]
    return [
        Case(
            data.kind,
            data.kind.upper(),
            f"{f'reference {data.reference}' if data.reference else 'texts'}, {data.model.dtype}",
            data.what,
            data,
            goals=() if run.toy else data.goals,
            seconds=1.0 if run.toy else 120.0,
        )
        for data in found
    ]


def disagreements(ours: list[float], theirs: list[float]) -> Iterator[str]:
    """A line for each step whose losses differ, or that one of the sides lacks."""
    if len(ours) != len(theirs) or not ours:
        yield f"fastrl made {len(ours)} steps, the peer {len(theirs)}"
        return
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        if not math.isclose(found, expected, rel_tol=0, abs_tol=RELATIVE * abs(expected)):
            yield f"step {step}: the loss is {found:.7g}, the peer's {expected:.7g}"


def peer_of(run: Run) -> str:
    return TRL


def test_epoch(measurement: Measurement, case: Case, run: Run, python: Path) -> None:
    pytest.importorskip("datasets")
    if case.of.model.dtype == "bf16" and (why := without_bf16(run.device)):
        pytest.skip(run.leave(case, why))
    measure(measurement, case.of, python)


def measure(measurement: Measurement, data: Data, python: Path) -> None:
    """Gate, memory, then turns of both sides."""
    entry, kind = measurement.entry, data.kind
    entry["units"] = data.units
    exact = data.shape | {"dtype": "fp32"}
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(
            worker.pair(measurement, TRL, python, kind, exact, **data.options)
        )
        losses = [side.ask("check")["losses"] for side in workers.values()]
        if wrong := list(disagreements(*losses)):
            measurement.refuse("; ".join(wrong))
        entry["remarks"].append(apart(losses))
        if data.model.dtype != "fp32":
            stack.close()
            workers = stack.enter_context(
                worker.pair(measurement, TRL, python, kind, data.shape, **data.options)
            )
            losses = [side.ask("check")["losses"] for side in workers.values()]
            entry["remarks"].append(f"in {data.model.dtype} {apart(losses)}")
        products = of_head(data.model, round(data.batch * data.longest / 2))
        entry["roofs"] = roofs(products, data.model.dtype, measurement.run.device)
        worker.turns_with_memory(measurement, workers)


def apart(losses: list[list[float]]) -> str:
    """How far the losses of both sides lie apart."""
    most = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    return f"losses of {len(losses[0])} steps differ by {most:.0e} at most"
