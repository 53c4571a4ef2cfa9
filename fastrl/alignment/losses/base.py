"""The base class of losses, and the registry of their names."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastrl.alignment.batch import Batch
from fastrl.alignment.tasks import Task
from fastrl.rollout import SamplingParams
from fastrl.settings import is_number

LOSSES: dict[str, type[Loss]] = {}  # by name; the first loss that fits a task is its default
_TRAINERS = ("loss", "grad_norm", "learning_rate", "epoch")  # metrics that the trainer logs itself
SomeLoss = TypeVar("SomeLoss", bound="type[Loss]")


class LossOutput(NamedTuple):
    """The loss of a batch, and the metrics to log."""

    loss: Tensor  # 0-d fp32, with the samples' weights in it
    metrics: dict[str, Tensor]  # detached; 1-D where they are of samples, else 0-d


@dataclass(frozen=True)
class Loss(ABC):
    """A loss function with its coefficients, called with a batch.

    Subclass it, give it a ``name``, the ``tasks`` that it fits and a ``__call__``; :func:`register`
    it where a command should know it by its name.

    Attributes:
        name: the loss's name in commands.
        tasks: the names of the tasks that the loss fits.
        compares: whether the loss reads the reference model.
        reads_all: whether the loss reads ``batch.whole``, the batch of all processes, too.
        learns: what is trained: "policy", "policy with values" or "reward model".
        backward: ``backward(minibatches, model, accelerator, optimizer)`` leaves the gradient of a
            whole optimizer step in the weights, or none if the step should be skipped; returns the
            mean :class:`LossOutput`, and whether the rest of the batch is to be skipped. The
            trainer takes the step. None: the trainer computes the gradient of what a call returns.
    """

    name: ClassVar[str]
    tasks: ClassVar[tuple[str, ...]]
    compares: ClassVar[bool] = False
    reads_all: ClassVar[bool] = False
    learns: ClassVar[str] = "policy"
    backward: ClassVar[Any] = None

    def __post_init__(self) -> None:
        """Raises ValueError for a coefficient that is no number of 0 or more."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(field.default) in (int, float) and not (is_number(value) and value >= 0):
                raise ValueError(
                    f"{field.name} of the loss {self.name} must be a number of 0 or more, got "
                    f"{value!r}"
                )

    @abstractmethod
    def __call__(self, batch: Batch, policy: Any, reference: Any) -> LossOutput:
        """Returns the loss of a batch, and metrics.

        Args:
            batch: a batch of one of the loss's tasks.
            policy: has ``logprobs(batch)``, with gradients (a reward model: ``rewards(batch)``).
            reference: has ``logprobs(batch)``, without gradients; None unless ``compares``.
        """

    def minibatches(self, batch: Batch, policy: Any, reference: Any) -> Iterator[Batch]:
        """The mini-batches that a batch is trained on: the batch itself, once."""
        yield batch

    @property
    def minibatches_per_batch(self) -> int:
        """How many mini-batches :meth:`minibatches` yields."""
        return 1

    def reference_batches(self, batch: Batch) -> tuple[Batch, ...]:
        """The batches whose log-probs the loss asks the reference for."""
        return (batch,) if self.compares else ()

    def check(self, task: Task, batch_size: int) -> None:
        """Raises ValueError for a task or a batch size that the loss does not fit."""
        if task.name not in self.tasks:
            fitting = [name for name, loss in LOSSES.items() if task.name in loss.tasks]
            raise ValueError(
                f"the loss {self.name} does not fit the task {task.name}: it is for "
                f"{', '.join(self.tasks)}; for {task.name} choose {', '.join(fitting)}"
            )

    def check_sampling(self, params: SamplingParams) -> None:  # noqa: B027 - most need no check
        """Checks how an online task samples its responses.

        Raises:
            ValueError: the loss needs responses of another distribution.
        """


def output_of(loss: Loss, batch: Batch, policy: Any, reference: Any) -> LossOutput:
    """Calls a loss with a batch, and checks what it returns.

    Raises:
        TypeError: not a 0-d tensor and a dict of tensors; a metric of a name that the trainer logs.
    """
    output = loss(batch, policy, reference)
    must = "it must return LossOutput(loss, metrics), a tensor of one number and a dict of tensors"
    if not isinstance(output, tuple) or len(output) != 2:
        raise TypeError(f"the loss {loss.name} returned {output!r:.80}: {must}")
    number, metrics = output
    wrong = None
    if not isinstance(number, Tensor):
        wrong = f"a loss of the type {type(number).__name__}"
    elif number.dim():
        wrong = f"a loss of shape {tuple(number.shape)}"
    elif not isinstance(metrics, Mapping):
        wrong = f"metrics of the type {type(metrics).__name__}"
    for name, value in {} if wrong else metrics.items():
        if not isinstance(value, Tensor):
            wrong = f"the metric {name!r} of the type {type(value).__name__}"
        elif name in _TRAINERS:
            wrong = f"the metric {name!r}, and that is a name of the trainer's own"
    if wrong:
        raise TypeError(f"the loss {loss.name} returned {wrong}: {must}")
    return LossOutput(number, metrics)


def register(loss: SomeLoss) -> SomeLoss:
    """Class decorator: adds a loss to :data:`LOSSES`."""
    LOSSES[loss.name] = loss
    return loss


def weighted_mean(losses: Tensor, batch: Batch) -> Tensor:
    """Returns Σ w·ℓ / B, 0-d, from losses ℓ [B] and the batch's weights w. The ℓ of a sample of
    weight 0, even if not finite, adds 0 and gets the gradient 0; an infinite or NaN derivative of
    that ℓ still makes NaN of it."""
    weights = batch.weights().to(losses.device)
    return torch.where(weights > 0, weights * losses, 0.0).sum() / len(losses)


def share_ahead(one: Tensor, other: Tensor) -> Tensor:
    """1 where ``one`` is the higher, 0 where ``other`` is, ½ where they are equal; fp32."""
    return torch.where(one == other, 0.5, (one > other).float())
