"""The responses that GRPOTrainer and RLOOTrainer learn from, and how many of them were used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.random_state import seed_at
from fastrl.samples import Samples


def _shuffled(whole: Samples, seed: int) -> list[int]:
    return torch.randperm(len(whole), generator=torch.Generator().manual_seed(seed)).tolist()


def _together(whole: Samples, seed: int) -> list[int]:
    """A random order in which responses to a prompt follow the first of them, so that as few
    batches as can be read the prompt."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in _shuffled(whole, seed):
        groups.setdefault(tuple(whole.prompt_ids[i].tolist()), []).append(i)
    return [i for group in groups.values() for i in group]


# How the responses of a generation are put into batches: a function of these and of a seed.
ORDERS: dict[str, Callable[[Samples, int], list[int]]] = {
    "shuffled": _shuffled,
    "together": _together,
    "as sampled": lambda whole, seed: list(range(len(whole))),
}


class Generations:
    """The responses of the latest generation, in the batches that are learned from one by one.

    Args:
        seed: the run's seed.
        steps: the number of batches in a generation.
        iterations: how often each batch is learned from.
        order: one of :data:`ORDERS`, by which responses are put into the batches.

    Attributes:
        step: batches learned from so far; one that was learned from twice counts as two.
        made: generations so far, by mode: "train" counts the run's, "eval" an evaluation's.
        buffer: the batches of the latest generation; None before the first.
    """

    def __init__(self, seed: int, steps: int, iterations: int, order: str):
        self.seed, self.steps, self.uses = seed, steps, steps * iterations
        self._order = ORDERS[order]
        self.step, self.made = 0, {"train": 0, "eval": 0}
        self.buffer: list[Samples] | None = None

    def is_due(self) -> bool:
        """Whether responses are sampled before the next batch is learned from."""
        return self.buffer is None or self.step % self.uses == 0

    def take(self, whole: Samples) -> None:
        """Splits the responses of a generation into the batches to learn."""
        order = self._order(whole, self.seed_of("order", "train"))
        size = len(whole) // self.steps
        self.buffer = whole.select(order).split([size] * self.steps)

    def batch(self) -> Samples:
        """The batch to learn from now."""
        assert self.buffer is not None
        return self.buffer[self.step % self.steps]

    def seed_of(self, what: str, mode: str) -> int:
        """The seed of the draws named ``what``, by the number of generations so far. It depends
        neither on the process nor on how many there are."""
        return seed_at(self.seed, what, mode, self.made[mode])

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "generations": self.made["train"],
            "uses": self.uses,
            "buffer": None if self.buffer is None else [x.state() for x in self.buffer],
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restores what :meth:`state` returned; None begins a run."""
        self.step, self.buffer, self.made["train"] = 0, None, 0
        if state is not None:
            self.step, self.made["train"] = state["step"], state["generations"]
            if state["buffer"] is not None:
                self.buffer = [Samples.of_state(x) for x in state["buffer"]]

    def mark(self) -> tuple[Any, ...]:
        """What a step changes, for :meth:`rewind`."""
        return self.step, self.made["train"], self.buffer

    def rewind(self, mark: tuple[Any, ...]) -> None:
        self.step, self.made["train"], self.buffer = mark


def between_generations(state: Mapping[str, Any], accumulated: int) -> dict[str, Any]:
    """The state to resume from on another number of processes: responses are sampled first.

    Args:
        state: the :meth:`Generations.state` of one of the processes that saved the checkpoint.
        accumulated: batches of an optimizer step.

    Raises:
        BadCheckpoint: the latest generation has batches that are not learned from yet.
    """
    uses = state["uses"]
    if state["step"] % uses:
        raise BadCheckpoint(
            f"the checkpoint is {state['step'] % uses} of {uses} batches into what each process "
            "has sampled: resume it with as many processes, or from a checkpoint between two "
            f"generations (save_steps × {accumulated} a multiple of {uses})"
        )
    return {**state, "step": 0, "buffer": None}
