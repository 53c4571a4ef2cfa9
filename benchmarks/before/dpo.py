"""`python -m benchmarks dpo`: DPO by fastrl's alignment trainer beside TRL's DPOTrainer, see
`training.py`. First with a reference that runs in every step, then with its log-probs computed
before training begins."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks.before import training
from benchmarks.before.training import add_arguments
from benchmarks.before.training_worker import BETA

__all__ = ["DPO", "Shape", "add_arguments", "run"]


@dataclasses.dataclass(frozen=True)
class Shape(training.Shape):
    """Pairs. Prompts and responses are as short as this, and as long as half the longest text."""

    pairs: int = 40
    shortest: int = 16
    batch: int = 4


def data(shape: dict[str, Any]) -> str:
    """What an epoch has."""
    return (
        f"{shape['pairs']} pairs in batches of {shape['batch']}, prompts and responses of "
        f"{shape['shortest']} to {shape['longest'] // 2} tokens, β = {BETA}"
    )


DPO = training.Training(
    name="dpo",
    title="DPO",
    heading="Direct preference optimization",
    shape=Shape,
    quick=Shape(layers=2, width=32, vocabulary=503, pairs=20, shortest=4, longest=24, batch=2),
    unit="pairs",
    count=lambda shape: shape["pairs"],
    data=data,
    references=("copy", "cached"),
    legend="- Reference copy: a frozen copy, which runs in every step; cached: its log-probs are "
    "computed before training begins, and not timed (TRL's `precompute_ref_log_probs`). On CPUs "
    "TRL's head scores every position, prompts' and padding too, and computes entropies and mean "
    "logits for its metrics in every step; fastrl's scores the responses alone.",
)


def run(args: argparse.Namespace) -> int:
    """See ``training.run``."""
    return training.run(DPO, args)
