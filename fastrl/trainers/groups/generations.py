"""How far GRPOTrainer and RLOOTrainer are in what they have sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fastrl.run.checkpoints import BadCheckpoint
from fastrl.run.random_state import seed_at
from fastrl.samples import Samples


class Generations:
    """The responses of the latest generation, in the batches that are learned from one by one.

    Args:
        seed: the run's seed.
        steps: batches of a generation.
        iterations: how often each of them is learned from.

    Attributes:
        step: batches that were learned from so far, each time counted.
        made: generations so far, by mode: "train" and "eval".
        buffer: the batches of the latest generation; None before the first.
    """

    def __init__(self, seed: int, steps: int, iterations: int):
        self.seed, self.steps, self.uses = seed, steps, steps * iterations
        self.step, self.made = 0, {"train": 0, "eval": 0}
        self.buffer: list[Samples] | None = None

    def is_due(self) -> bool:
        """Whether responses are sampled before the next batch is learned from."""
        return self.buffer is None or self.step % self.uses == 0

    def take(self, whole: Samples) -> None:
        """Takes the responses of a generation, which are learned from in a drawn order."""
        generator = torch.Generator().manual_seed(self.seed_of("order", "train"))
        order = torch.randperm(len(whole), generator=generator).tolist()
        size = len(whole) // self.steps
        self.buffer = whole.select(order).split([size] * self.steps)

    def batch(self) -> Samples:
        """The batch to learn from now."""
        assert self.buffer is not None
        return self.buffer[self.step % self.steps]

    def seed_of(self, what: str, mode: str) -> int:
        """The seed of something in the next generation, the same in all processes, however many
        there are."""
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
        """Goes on from a :meth:`state`, or begins a run."""
        self.step, self.buffer, self.made["train"] = 0, None, 0
        if state is not None:
            self.step, self.made["train"] = state["step"], state["generations"]
            if state["buffer"] is not None:
                self.buffer = [Samples.of_state(x) for x in state["buffer"]]

    def mark(self) -> tuple[Any, ...]:
        """What a step changes."""
        return self.step, self.made["train"], self.buffer

    def rewind(self, mark: tuple[Any, ...]) -> None:
        self.step, self.made["train"], self.buffer = mark


def between_generations(state: Mapping[str, Any], accumulated: int) -> dict[str, Any]:
    """The state of a run of another number of processes, from which responses are sampled next.

    Args:
        accumulated: batches of an optimizer step.

    Raises:
        BadCheckpoint: in the midst of responses that the processes have sampled.
    """
    uses = state["uses"]
    if state["step"] % uses:
        raise BadCheckpoint(
            f"the checkpoint is {state['step'] % uses} of {uses} batches into what each process "
            "has sampled: resume it with as many processes, or from a checkpoint between two "
            f"generations (save_steps × {accumulated} a multiple of {uses})"
        )
    return {**state, "step": 0, "buffer": None}
