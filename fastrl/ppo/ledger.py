"""The ledger of a run's samples, kept by its loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fastrl.collect.ledger import ledger_columns, note_settings
from fastrl.collect.responses import Collected
from fastrl.config import PPOConfig
from fastrl.learn.experience import LastExperience
from fastrl.run.callbacks import Samples
from fastrl.run.ledger import Ledger, Lists


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
        columns = ledger_columns(
            samples.samples,
            samples.weights_version,
            Lists(*experience.advantages()),
            self.temperature,
            samples.token_scores,
        )
        self.ledger.add(step, columns)
        return {"time/ledger": time.perf_counter() - begin}


def open_ledger(
    asked: bool | str | Path | Ledger,
    folder: Path | None,
    config: PPOConfig,
    generation_kwargs: Mapping[str, Any],
    code: Mapping[str, str],
) -> SampleLedger | None:
    """The ledger that a run keeps.

    Args:
        asked: of ``PPOTrainer.train``.
        folder: in the run's output, if there is one.
        config, generation_kwargs, code: of the run; what its samples depend on is noted.
    """
    place = folder if asked is True else asked or None
    if place is None:
        return None
    ledger = place if isinstance(place, Ledger) else Ledger(place)
    note_settings(ledger, config.to_dict(), generation_kwargs, code)
    return SampleLedger(ledger, config.temperature)
