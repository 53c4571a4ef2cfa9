"""The rows that a PPO run leaves in its ledger: a step's samples, and what was made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fastrl.data.prompts import Prompts
from fastrl.ppo.experience import LastExperience
from fastrl.rollout import RolloutOutput
from fastrl.run.ledger import PER_FUNCTION, Ledger, Lists

if TYPE_CHECKING:
    from fastrl.ppo.trainer import PPOTrainer


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a step with their rewards; tensors are [B] fp32, NaN for samples that ended in
    NaN logits."""

    prompts: Prompts  # one per sample
    completions: list[str]
    rollout: RolloutOutput
    by_function: Mapping[str, Tensor]  # what each reward function returned
    rewards: Tensor  # their weighted sum
    scores: Tensor  # less penalties: what step() got


class StepLedger(Protocol):
    """Keeps the samples of a run's steps, or does not."""

    def check(self, step: int) -> None:
        """As :meth:`fastrl.run.ledger.Ledger.check`."""

    def add(self, trainer: PPOTrainer, samples: ScoredSamples) -> dict[str, float]:
        """Adds the samples of the trainer's last step; returns statistics."""

    def flush(self, *, sync: bool = False) -> None:
        """As :meth:`fastrl.run.ledger.Ledger.flush`."""


class NoLedger:
    """Keeps nothing."""

    def check(self, step: int) -> None:
        """Any step will do."""

    def add(self, trainer: PPOTrainer, samples: ScoredSamples) -> dict[str, float]:
        return {}

    def flush(self, *, sync: bool = False) -> None:
        """There is nothing to write."""


class SampleLedger:
    """Keeps a row for each sample."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def check(self, step: int) -> None:
        self.ledger.check(step)

    def add(self, trainer: PPOTrainer, samples: ScoredSamples) -> dict[str, float]:
        begin = time.perf_counter()
        assert trainer.experience is not None
        self.ledger.add(trainer.current_step, ledger_columns(samples, trainer.experience))
        return {"time/ledger": time.perf_counter() - begin}

    def flush(self, *, sync: bool = False) -> None:
        self.ledger.flush(sync=sync)


def open_ledger(ledger: str | Path | Ledger | None, facts: Mapping[str, Any]) -> StepLedger:
    """The ledger of a folder, or one that was made for it; None: none.

    Args:
        facts: see :class:`fastrl.run.ledger.Ledger`.
    """
    if ledger is None:
        return NoLedger()
    found = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    found.facts |= facts
    return SampleLedger(found)


def ledger_columns(samples: ScoredSamples, experience: LastExperience) -> dict[str, Any]:
    """The columns of a step, of :func:`fastrl.run.ledger.fields` and of reward functions."""
    prompts, rollout = samples.prompts, samples.rollout
    count = len(prompts)
    return {
        "prompt_row": prompts.rows,
        "prompt": prompts.texts,
        "prompt_ids": _lists(prompts.ids, np.int32),
        "completion": samples.completions,
        "completion_ids": _lists(rollout.sequences, np.int32),
        "finish_reason": rollout.finish_reasons,
        "seed": _repeated(rollout.seed, count),
        "sample_id": rollout.sample_ids,
        "number": rollout.numbers,
        "slots": _repeated(rollout.room.slots, count),
        "slot_length": _repeated(rollout.room.length, count),
        "weights_version": _repeated(rollout.weights_version, count),
        "logprobs": _lists(rollout.logprobs, np.float32),
        "values": _lists(rollout.values, np.float32),
        "advantages": Lists(*experience.advantages()),
        "reward": samples.rewards.numpy(),
        "score": samples.scores.numpy(),
        **{f"{PER_FUNCTION}{name}": x.numpy() for name, x in samples.by_function.items()},
    }


def _lists(tensors: Sequence[Tensor] | None, dtype: Any) -> Lists | None:
    """A list per 1-D tensor; None where there are none."""
    if tensors is None:
        return None
    values = torch.cat(list(tensors)).cpu().numpy()
    return Lists(values.astype(dtype, copy=False), [len(x) for x in tensors])


def _repeated(value: int | None, count: int) -> np.ndarray | None:
    return None if value is None else np.full(count, value)
