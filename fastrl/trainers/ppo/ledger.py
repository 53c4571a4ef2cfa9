"""The ledger of a PPO run's samples, which the training loop writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.collect.ledger import ledger_columns, note_settings
from fastrl.config import PPOConfig
from fastrl.learn.experience import LastExperience
from fastrl.run.ledger import Ledger, Lists
from fastrl.samples import Samples


class SampleLedger:
    """Keeps a row for each sample.

    Args:
        temperature: that of the policy.
    """

    def __init__(self, ledger: Ledger, temperature: float):
        self.ledger, self.temperature = ledger, temperature

    @contextlib.contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Context of a run whose first step is ``step``; at its end all rows are written.

        Raises:
            ValueError: the ledger has later steps.
        """
        self.ledger.check(step)
        try:
            yield
        finally:
            self.ledger.flush()

    def add(
        self, step: int, samples: Samples, weights_version: int, experience: LastExperience
    ) -> dict[str, float]:
        """Adds the samples of a step, of all processes; returns statistics.

        Args:
            weights_version: optimizer steps taken before the rollout.
        """
        begin = time.perf_counter()
        columns = ledger_columns(
            samples,
            weights_version,
            Lists(*experience.advantages()),
            self.temperature,
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
        asked: the argument ``ledger`` of ``PPOTrainer.train``.
        folder: the folder for ``asked=True``, in the run's output; None without one.
        config, generation_kwargs, code: the run's settings, which the ledger notes as far as
            samples depend on them.
    """
    place = folder if asked is True else asked or None
    if place is None:
        return None
    ledger = place if isinstance(place, Ledger) else Ledger(place)
    note_settings(ledger, config.to_dict(), generation_kwargs, code)
    return SampleLedger(ledger, config.temperature)
