"""What every loss of the framework is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastrl.alignment.batch import Batch
from fastrl.alignment.tasks import Task
from fastrl.rollout import SamplingParams

LOSSES: dict[str, type[Loss]] = {}
SomeLoss = TypeVar("SomeLoss", bound="type[Loss]")


class LossOutput(NamedTuple):
    """What is differentiated, and what is logged."""

    loss: Tensor  # 0-d fp32, with the samples' weights in it
    metrics: dict[str, Tensor]  # detached; [B] where they are per sample, else 0-d


@dataclass(frozen=True)
class Loss:
    """A loss with its coefficients: called with a batch, it says how the policy should change.

    Subclass it, give it a ``name``, the ``tasks`` that it fits and a ``__call__``; :func:`register`
    it where a command should know it by its name.

    Attributes:
        name: in commands.
        tasks: names of tasks that it fits.
        compares: whether it reads the reference.
        learns: what is trained: "policy", "policy with values" or "reward model".
        whole_steps: whether :meth:`backward` computes the gradient of an optimizer step; else it
            is the sum of those of :meth:`__call__`.
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    compares: ClassVar[bool] = False
    learns: ClassVar[str] = "policy"
    whole_steps: ClassVar[bool] = False

    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        """
        Args:
            batch: as the task makes it.
            policy: has ``logprobs(batch)``, with gradients (of a reward model ``rewards(batch)``).
            reference: has ``logprobs(batch)``, without; None where the loss does not compare.
        """
        raise NotImplementedError

    def parts(self, batch: Batch, policy: Any, reference: Any) -> Iterator[Batch]:
        """What one batch is learned as: itself, once."""
        yield batch

    def parts_of(self, size: int) -> int:
        """How many parts a batch of ``size`` samples has."""
        return 1

    def backward(
        self, parts: Sequence[Batch], model: Any, accelerator: Any, optimizer: Any
    ) -> tuple[LossOutput, bool]:
        """Leaves the gradient of one optimizer step in the weights, or none where the step is not
        to be taken.

        Args:
            parts: what :meth:`parts` yielded for the step.
            model, optimizer: as accelerate has wrapped them; the step is the caller's to take.

        Returns:
            means over the parts, and whether the rest of their batch is not to be learned.
        """
        raise NotImplementedError

    def compared(self, batch: Batch) -> tuple[Batch, ...]:
        """Whose log-probs the loss asks the reference for."""
        return (batch,) if self.compares else ()

    def check(self, task: Task, batch_size: int) -> None:
        """
        Raises:
            ValueError: a task, or a number of samples, that the loss does not fit.
        """
        if task.name not in self.tasks:
            fitting = [name for name, loss in LOSSES.items() if task.name in loss.tasks]
            raise ValueError(
                f"the loss {self.name} does not fit the task {task.name}: it is for "
                f"{', '.join(self.tasks)}; for {task.name} choose {', '.join(fitting)}"
            )

    def check_sampling(self, params: SamplingParams) -> None:
        """Of an online task, how its responses are sampled.

        Raises:
            ValueError: the loss takes responses of another distribution.
        """


def register(loss: SomeLoss) -> SomeLoss:
    """Makes a loss known by its name."""
    LOSSES[loss.name] = loss
    return loss


def make_loss(name: str, **coefficients: Any) -> Loss:
    """A loss by its name.

    Raises:
        ValueError: no such loss; a coefficient that it does not have, or one out of range.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: choose one of {', '.join(LOSSES)}")
    known = [field.name for field in dataclasses.fields(LOSSES[name]) if field.init]
    for given in coefficients:
        if given not in known:
            raise ValueError(
                f"the loss {name} has no coefficient {given!r}: it has {', '.join(known) or 'none'}"
            )
    return LOSSES[name](**coefficients)


def describe_losses() -> str:
    """The losses with their coefficients, for ``--help`` and documents."""
    return "; ".join(
        f"{name} ({', '.join(f'{f.name}={f.default}' for f in dataclasses.fields(loss))})"
        for name, loss in LOSSES.items()
    ).replace(" ()", "")


def weighted_mean(losses: Tensor, batch: Batch) -> Tensor:
    """Σ w·ℓ / B; a weight of 0 takes a sample's gradient away, whatever its loss is."""
    weights = batch.weights().to(losses.device)
    return torch.where(weights > 0, weights * losses, 0.0).sum() / len(losses)
