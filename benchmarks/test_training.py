"""Supervised fine-tuning and DPO: a fastrl trainer beside TRL's, an epoch at a time.

Two workers, one per library, hold a trainer on the same weights and data. First a gate: both train
the same epoch, and the losses of its steps must agree. Then the memory of a step is measured, and
they take turns.
"""

from __future__ import annotations

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
from benchmarks.models import Model
from benchmarks.sides.training import BETA, texts

RELATIVE = 1e-4  # of two losses
GOALS = (Goal("speedup", 1.3, against=TRL), Goal("memory share", 0.5, against=TRL))


@dataclasses.dataclass(frozen=True)
class Data(worker.WorkerShape):
    """A model and data, everything in fp32: lengths in tokens. An epoch has ten steps."""

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
        return f"{self.model}, fp32: {data}; AdamW, no checkpointing"

    @property
    def units(self) -> list[Any]:
        """What an epoch is counted in, and how many it has."""
        if self.kind == "dpo":
            return ["pairs", self.count]
        return ["tokens", sum(map(len, texts(self.shape)))]


def cases(run: Run) -> list[Case]:
    """SFT, and DPO by how the reference is kept."""
    small = dataclasses.replace(models.SMALL, context=128)
    found = [
        Data("sft", small, 80, 32, 128, 8),
        *(Data("dpo", small, 40, 16, 128, 4, reference) for reference in ("copy", "cached")),
    ]
    if run.toy:
        toy = models.TOY
        found = [Data("sft", toy, 20, 4, 12, 2), Data("dpo", toy, 20, 4, 24, 2, "copy")]
    return [
        Case(
            data.kind,
            data.kind.upper(),
            f"reference {data.reference}" if data.reference else "texts",
            data.what,
            data,
            goals=() if data.reference == "cached" or run.toy else GOALS,
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


def test_epoch(measurement: Measurement, case: Case, python: Path) -> None:
    pytest.importorskip("datasets")
    measure(measurement, case.of, python)


def measure(measurement: Measurement, data: Data, python: Path) -> None:
    """Gate, memory, then turns of both sides."""
    entry, kind = measurement.entry, data.kind
    entry["units"] = data.units
    with worker.pair(measurement, TRL, python, kind, data.shape, **data.options) as workers:
        losses = [side.ask("check")["losses"] for side in workers.values()]
        if wrong := list(disagreements(*losses)):
            measurement.refuse("; ".join(wrong))
        apart = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
        entry["remarks"].append(f"losses of {len(losses[0])} steps differ by {apart:.0e} at most")
        worker.turns_with_memory(measurement, workers)
