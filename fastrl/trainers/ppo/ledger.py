"""The ledger of a PPO run's samples, which the training loop writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastrl.collect.ledger import ledger_columns, note_settings
from fastrl.config import PPOConfig
from fastrl.learn.experience import Experience
from fastrl.run.ledger import Ledger, Lists
from fastrl.samples import Samples


class SampleLedger:
    """Keeps a row for each sample of a policy that samples at ``temperature``."""

    def __init__(self, ledger: Ledger, temperature: float):
        self.ledger, self.temperature = ledger, temperature

    @contextlib.contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Context of a run whose first step is ``step``; at its end all rows are written. Raises
        ValueError if the ledger has that step or later ones."""
        self.ledger.check(step)
        try:
            yield
        finally:
            self.ledger.flush()

    def add(
        self, step: int, samples: Samples, weights_version: int, experience: Experience
    ) -> dict[str, float]:
        """Adds all processes' samples of a step, drawn after ``weights_version`` optimizer steps;
        returns the seconds that this took, as "time/ledger"."""
        begin = time.perf_counter()
        columns = ledger_columns(
            samples,
            weights_version,
            learned_advantages(experience),
            self.temperature,
        )
        self.ledger.add(step, columns)
        return {"time/ledger": time.perf_counter() - begin}


def learned_advantages(experience: Experience) -> Lists:
    """The advantages of the tokens that a step has learned from, fp32, sample after sample."""
    mask = experience.tokens.response_mask
    return Lists(experience.advantages.float().cpu()[mask].numpy(), mask.sum(-1).numpy())


def open_ledger(
    asked: bool | str | Path | Ledger,
    folder: Path | None,
    config: PPOConfig,
    generation_kwargs: Mapping[str, Any],
    code: Mapping[str, str],
) -> SampleLedger | None:
    """The ledger that a run keeps; None without one.

    Args:
        asked: the argument ``ledger`` of ``PPOTrainer.train``.
        folder: the folder for ``asked=True``, in the run's output; None without output.
        config, generation_kwargs, code: the run's settings, which the ledger notes as far as
            samples depend on them.
    """
    target = folder if asked is True else asked or None
    if target is None:
        return None
    ledger = target if isinstance(target, Ledger) else Ledger(target)
    note_settings(ledger, config.to_dict(), generation_kwargs, code)
    return SampleLedger(ledger, config.temperature)
