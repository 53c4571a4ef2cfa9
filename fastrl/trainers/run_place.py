"""The place of a run; transformers' Trainer keeps it in local variables, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback

from fastrl.run.random_state import random_state, restore_random_state
from fastrl.trainers.due import BeforeEvaluation


@dataclass
class RunPlace:
    """The place of a run in its data and its (optimizer) steps, and what it was resumed from."""

    checkpoint: Path | None = None  # that the run was resumed from
    resumed: Mapping[str, Any] | None = None  # what this process saved in that checkpoint
    identity: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    begun: float = 0.0  # time.time(); after a resume less the run's seconds before that
    epoch: int = 0
    minibatch: int = 0  # the next mini-batch to be fetched, by its number in the epoch
    done: int = 0  # mini-batches of the epoch that are learned
    passes: int = 0  # passes done of the step that is under way
    epoch_is_over: bool = False
    seed: int = 0  # torch's, from which the order of the data follows
    random: Mapping[str, Any] | None = None  # states of generators to restore for the next batch
    random_at_epoch: Mapping[str, Any] = field(default_factory=dict)  # states as the epoch began
    save_is_due: bool = False  # a save waits for a place from which a run can be resumed
    between_steps: bool = False  # False: weights may be ahead of what is saved with them
    behind_step: bool = False  # a step is being logged, evaluated and saved
    before_evaluation: BeforeEvaluation | None = None  # of an evaluation that is due or going on
    is_ended: bool = False  # what was due at the checkpoint's step has ended the resumed run
    due: dict[str, bool] | None = None  # what an exception has kept from being done behind a step
    ignored: Any = None  # keys of outputs that evaluations leave out
    loss: torch.Tensor | None = None  # the sum of losses since the last log, at the last step's end
    last_step: dict[str, Any] | None = None  # state at its end that a failing step may have changed
    saving: bool = False  # a checkpoint is being written, or could not be
    alone: bool = False  # the main process saves by itself: the others may have ended
    forgets: bool = False  # old logs were dropped, and a warning said so

    def begin_at(
        self, epoch: int, minibatches: int, *, skips: bool, last: int | None = None
    ) -> tuple[int, int]:
        """The epoch in which the run begins, and how many of its mini-batches are learned already.

        Args:
            epoch, minibatches: computed by transformers from the number of steps: wrongly
                where a stream has ended, or another number of processes made the checkpoint.
            skips: whether a run that is resumed passes over the data that it has seen.
            last: the epoch of a run that has all its steps; transformers would do one step more.
        """
        self.random = None
        if self.resumed is not None:
            self.random = self.resumed["random"]
            self.random_at_epoch = self.resumed["random_at_epoch"]
            if skips:
                place = self.resumed["place"]
                epoch, minibatches = place["epoch"], place["minibatches"]
        epoch = epoch if last is None else last
        self.epoch, self.epoch_is_over = epoch, False
        self.minibatch = self.done = minibatches
        return epoch, minibatches

    def in_data(self, *, cut: bool) -> dict[str, int]:
        """The epoch, and how many of its mini-batches are learned already.

        Args:
            cut: whether the epoch ended because the run has all its steps.
        """
        if self.epoch_is_over and not cut:
            return {"epoch": self.epoch + 1, "minibatches": 0}
        return {"epoch": self.epoch, "minibatches": self.done}

    def begin_epoch(self, loader: Any) -> None:
        """Begins a loader's epoch; a resumed epoch gets the random states that it began with."""
        if self.epoch_is_over:  # else this is the first epoch, or that which the run resumes in
            self.epoch, self.epoch_is_over = self.epoch + 1, False
            self.minibatch = self.done = 0
        if self.random is not None and self.minibatch:
            assert self.resumed is not None
            restore_random_state(self.resumed["random_at_epoch"])  # by which samplers may draw
        else:
            self.restore_draws()
        self.random_at_epoch = random_state()
        _set_epoch(loader, self.epoch)

    def restore_draws(self) -> None:
        """Restores the generators of the checkpoint, once: at an epoch's beginning before the next
        batch is drawn, and within an epoch after it, as the run had drawn that batch before."""
        if self.random is not None:
            restore_random_state(self.random)
        self.random = None

    def note_draws(self) -> None:
        """Has what was drawn so far count as drawn before the checkpoint, if its generators are yet
        to be restored."""
        if self.random is not None:
            self.random = random_state()


class FirstToKnow(TrainerCallback):
    """Begins the epochs of a run, before other callbacks, which may draw random numbers, and fail.

    Args:
        place: returns the place of the run that is going on.
    """

    def __init__(self, place: Callable[[], RunPlace]):
        self.place = place

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        self.place().begin_epoch(kwargs["train_dataloader"])


class LastToKnow(TrainerCallback):
    """Calls ``begin`` before the first step of a run, after other callbacks."""

    def __init__(self, begin: Callable[[], None]):
        self.begin = begin

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin()


def _set_epoch(loader: Any, epoch: int) -> None:
    """Sets the epoch of a loader's sampler, however deep it lies: with several processes accelerate
    does not reach it."""
    while loader is not None:
        if isinstance(loader, Sampler) and hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = getattr(loader, "batch_sampler", None)  # bool() fails for a stream's
        loader = getattr(loader, "sampler", None) if batches is None else batches
