"""Protocols: what the loop needs of a PPOTrainer, and what saving needs of trainer and loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from accelerate import Accelerator
from torch import Tensor

from fastrl.config import PPOConfig
from fastrl.data.prompts import PromptStream
from fastrl.learn.advantages import Advantages
from fastrl.learn.experience import Experience
from fastrl.learn.nonfinite import NonFiniteNumbers
from fastrl.models.products import Products
from fastrl.run.callbacks import TrainCallback
from fastrl.run.processes import Processes
from fastrl.trainers.ppo.ledger import SampleLedger
from fastrl.trainers.ppo.rollouts import Rollouts
from fastrl.trainers.ppo.teaching import StepTeaching


class Resumable(Protocol):
    """Something that takes steps, and whose state is saved between them."""

    config: PPOConfig
    model: Any
    processes: Processes
    products: Products

    @property
    def current_step(self) -> int:
        """The number of complete steps."""

    @property
    def steps_begun(self) -> int:
        """How many optimizer steps of policy and critic have begun, added up."""

    def state_dict(self, random: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
        """All state that later steps depend on, see :meth:`fastrl.PPOTrainer.state_dict`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a :meth:`state_dict`."""


class Stepping(Resumable, Protocol):
    """A trainer, as the loop drives it."""

    tokenizer: Any
    dataset: Any
    accelerator: Accelerator
    rollouts: Rollouts
    advantages: Advantages
    nonfinite: NonFiniteNumbers
    teaching: StepTeaching | None
    experience: Experience | None

    @property
    def streams(self) -> dict[str, PromptStream]:
        """The orders of prompts, by the prompts' fingerprint."""

    @property
    def own_code(self) -> dict[str, str]:
        """Hashes of the users' functions that the trainer learns by: losses and advantages."""

    @property
    def weights_version(self) -> int:
        """The number of the policy's optimizer steps so far."""

    @property
    def step(self) -> Callable[..., dict[str, Any]]:
        """See :meth:`fastrl.PPOTrainer.step`."""

    def sequence_kl(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        masks: Sequence[Tensor] | None = None,
    ) -> float:
        """Mean KL to the reference, over the tokens in ``masks``, in nats per response."""


class Run(Protocol):
    """A training loop whose state is saved."""

    callbacks: list[TrainCallback]
    ledger: SampleLedger | None

    @property
    def code(self) -> dict[str, str]:
        """Hashes of the users' functions that the run calls."""

    @property
    def last_step(self) -> int:
        """The number of the step with which the loop ends."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises BadCheckpoint for the state of a run on other prompts."""

    def state_dict(self) -> dict[str, Any]:
        """The loop's state, without the trainer's."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a :meth:`state_dict`."""
