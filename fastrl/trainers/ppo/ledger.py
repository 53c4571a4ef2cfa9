"""The ledger of a PPO run's samples, which the training loop writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fastrl.collect.ledger import ledger_columns, note_settings, teacher_columns
from fastrl.config import PPOConfig
from fastrl.learn.experience import Experience
from fastrl.run.ledger import Ledger, Lists
from fastrl.samples import Samples


class SampleLedger:
    """Keeps a row for each sample of a policy that samples at ``temperature``, and learns of
    ``teachers``, their names."""

    def __init__(self, ledger: Ledger, temperature: float, teachers: Sequence[str] = ()):
        self.ledger, self.temperature, self.teachers = ledger, temperature, teachers

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
        if self.teachers:
            columns |= self._of_teachers(experience)
        self.ledger.add(step, columns)
        return {"time/ledger": time.perf_counter() - begin}

    def _of_teachers(self, experience: Experience) -> dict[str, Any]:
        tokens, logprobs = experience.teacher_tokens, experience.teacher_logprobs
        numbers, prompts = None, None
        if tokens is not None:
            read = zip(tokens.sequences(), tokens.query_lengths, strict=True)
            numbers, prompts = tokens.teachers, [ids[:length] for ids, length in read]
        known = None if logprobs is None else _at_learned(experience, logprobs)
        return teacher_columns(self.teachers, numbers, prompts, known)


def learned_advantages(experience: Experience) -> Lists:
    """The advantages of the tokens that a step has learned from, fp32, sample after sample."""
    return _at_learned(experience, experience.advantages)


def _at_learned(experience: Experience, column: Tensor) -> Lists:
    mask = experience.tokens.response_mask
    return Lists(column.float().cpu()[mask].numpy(), mask.sum(-1).numpy())


def open_ledger(
    asked: bool | str | Path | Ledger,
    folder: Path | None,
    config: PPOConfig,
    generation_kwargs: Mapping[str, Any],
    code: Mapping[str, str],
    teachers: Sequence[str] = (),
) -> SampleLedger | None:
    """The ledger that a run keeps; None without one.

    Args:
        asked: the argument ``ledger`` of ``PPOTrainer.train``.
        folder: the folder for ``asked=True``, in the run's output; None without output.
        config, generation_kwargs, code: the run's settings, which the ledger notes as far as
            samples depend on them.
        teachers: the names of the policy's teachers.
    """
    target = folder if asked is True else asked or None
    if target is None:
        return None
    ledger = target if isinstance(target, Ledger) else Ledger(target)
    note_settings(ledger, config.to_dict(), generation_kwargs, code)
    return SampleLedger(ledger, config.temperature, teachers)
