"""The rows that a PPO run leaves in its ledger: a step's samples, and what was made of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.collect.responses import Collected
from fastrl.config import PPOConfig
from fastrl.learn.experience import LastExperience
from fastrl.run.callbacks import Samples
from fastrl.run.ledger import PER_FUNCTION, Ledger, Lists

NOT_JSON = "generation_kwargs that are not JSON"  # a fact: their names


@dataclass(frozen=True)
class ScoredSamples:
    """The samples of a step, of all processes."""

    samples: Collected
    weights_version: int  # steps of the optimizer before the rollout
    token_scores: Sequence[Tensor] | None  # of the responses' tokens, where step() got these

    @property
    def shown(self) -> Samples:
        """What callbacks get."""
        said, rewards = self.samples.responses, self.samples.rewards
        return Samples(said.prompts.texts, said.texts, rewards.total.tolist())


class SampleLedger:
    """Keeps a row for each sample.

    Args:
        temperature: of the policy.
    """

    def __init__(self, ledger: Ledger, temperature: float):
        self.ledger, self.temperature = ledger, temperature

    @contextlib.contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Context of a run whose first step this is; all is written at its end.

        Raises:
            ValueError: the ledger has later steps.
        """
        self.ledger.check(step)
        try:
            yield
        finally:
            self.ledger.flush()

    def add(
        self, step: int, samples: ScoredSamples, experience: LastExperience
    ) -> dict[str, float]:
        """Adds the samples of a step; returns statistics."""
        begin = time.perf_counter()
        self.ledger.add(step, ledger_columns(samples, experience, self.temperature))
        return {"time/ledger": time.perf_counter() - begin}


def open_ledger(
    asked: bool | str | Path | Ledger,
    folder: Path | None,
    config: PPOConfig,
    generation_kwargs: Mapping[str, Any],
) -> SampleLedger | None:
    """The ledger that a run keeps.

    Args:
        asked: of ``PPOTrainer.train``.
        folder: in the run's output, if there is one.
        config, generation_kwargs: of the run; what its samples depend on is noted.
    """
    place = folder if asked is True else asked or None
    if place is None:
        return None
    ledger = place if isinstance(place, Ledger) else Ledger(place)
    recorded = recordable(generation_kwargs)
    ledger.facts |= {
        "settings": recordable(config.to_dict()),
        "generation_kwargs": recorded,
        NOT_JSON: sorted(generation_kwargs.keys() - recorded.keys()),
    }
    return SampleLedger(ledger, config.temperature)


def ledger_columns(
    samples: ScoredSamples, experience: LastExperience, temperature: float
) -> dict[str, Any]:
    """The columns of a step, of :func:`fastrl.run.ledger.fields` and of reward functions.

    Args:
        temperature: of the policy.
    """
    responses, rewards = samples.samples.responses, samples.samples.rewards
    prompts, rollout = responses.prompts, responses.rollout
    count = len(prompts)
    return {
        "prompt_row": prompts.rows,
        "prompt": prompts.texts,
        "prompt_ids": _lists(prompts.ids, np.int32),
        "completion": responses.texts,
        "completion_ids": _lists(rollout.sequences, np.int32),
        "finish_reason": rollout.finish_reasons,
        "seed": _repeated(rollout.seed, count),
        "sample_id": rollout.sample_ids,
        "number": rollout.numbers,
        "slots": [room.slots for room in samples.samples.rooms],
        "slot_length": [room.length for room in samples.samples.rooms],
        "weights_version": _repeated(samples.weights_version, count),
        "logprobs": _lists(rollout.logprobs_at(temperature), np.float32),
        "values": _lists(rollout.values, np.float32),
        "advantages": Lists(*experience.advantages()),
        "reward": rewards.total.numpy(),
        "score": samples.samples.scores.numpy(),
        "token_scores": _lists(samples.token_scores, np.float32),
        **{f"{PER_FUNCTION}{name}": x.numpy() for name, x in rewards.by_function.items()},
    }


def _lists(tensors: Sequence[Tensor] | None, dtype: Any) -> Lists | None:
    """A list per 1-D tensor; None where there are none."""
    if tensors is None:
        return None
    values = torch.cat(list(tensors)).cpu().numpy()
    return Lists(values.astype(dtype, copy=False), [len(x) for x in tensors])


def recordable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold."""
    return {name: value for name, value in settings.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _repeated(value: int | None, count: int) -> np.ndarray | None:
    return None if value is None else np.full(count, value)
