"""Runs of transformers' trainers that are cut and resumed, beside one that is not."""

import itertools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from tests.weights import assert_same_weights

TIMES = ("runtime", "per_second", "time/", "perf/", "step_time")
Make = Callable[[Path], Any]


def untimed(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows of metrics as texts, without what no two runs have in common."""
    return [
        json.dumps(
            {k: v for k, v in row.items() if not any(time in k for time in TIMES)}, sort_keys=True
        )
        for row in rows
    ]


class OwnStates(TrainerCallback):
    """What a trainer adds to checkpoints, as each step of its run begins."""

    def __init__(self, trainer: Any):
        self.trainer, self.seen = trainer, list[dict[str, Any]]()
        trainer.add_callback(self)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append(self.trainer.own_state())


def straight(make: Make, folder: Path) -> Any:
    """A trainer that has evaluated and trained, with all of its checkpoints."""
    seed(0)
    trainer = make(folder)
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    trainer.train()
    return trainer


def resumed(make: Make, folder: Path, resume: Any) -> Any:
    """One that goes on, with other states of the generators."""
    seed(0)
    trainer = make(folder)
    seed(123)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_run(found: Any, expected: Any) -> None:
    """Bit for bit: weights, and everything that was logged but times."""
    assert found.state.global_step == expected.state.global_step
    assert_same_weights(found.model, expected.model)
    pairs = itertools.zip_longest(
        untimed(found.state.log_history), untimed(expected.state.log_history)
    )
    for row, other in pairs:
        assert row == other


def assert_resumes(make: Make, folder: Path, which: Iterable[int]) -> Any:
    """Whatever checkpoint it resumes from, a run ends as the straight one.

    Args:
        which: numbers of checkpoints, from 0.
    """
    whole = straight(make, folder / "straight")
    paths = whole.checkpoints.paths()
    for number in which:
        assert_same_run(resumed(make, folder / f"from-{number}", paths[number]), whole)
    return whole


def with_dropout(model: nn.Module) -> nn.Module:
    """So that each step draws random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def seed(number: int) -> None:
    random.seed(number)
    torch.manual_seed(number)
