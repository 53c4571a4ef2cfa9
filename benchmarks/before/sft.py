"""`python -m benchmarks sft`: fastrl's SFTTrainer beside TRL's, see `training.py`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks.before import training, training_worker
from benchmarks.before.training import add_arguments

__all__ = ["SFT", "Shape", "add_arguments", "run"]


@dataclasses.dataclass(frozen=True)
class Shape(training.Shape):
    """Texts."""

    texts: int = 80
    shortest: int = 32


def count(shape: dict[str, Any]) -> int:
    """Tokens of an epoch."""
    return sum(map(len, training_worker.texts(shape)))


def data(shape: dict[str, Any]) -> str:
    """What an epoch has."""
    return (
        f"{shape['texts']} texts of {shape['shortest']} to {shape['longest']} tokens in batches of "
        f"{shape['batch']}"
    )


SFT = training.Training(
    name="sft",
    title="SFT",
    heading="Supervised fine-tuning",
    shape=Shape,
    quick=Shape(layers=2, width=32, vocabulary=503, texts=20, shortest=4, longest=12, batch=2),
    unit="tokens",
    count=count,
    data=data,
)


def run(args: argparse.Namespace) -> int:
    """See ``training.run``."""
    return training.run(SFT, args)
