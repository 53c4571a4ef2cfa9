"""The curves of a run: a metric's steps and values, by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastrl.run.folder import RunFolder

# The names in figures for metrics of GRPO, RLOO and distillation.
_NAMES = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "groups/no_spread",
    "kl": "objective/kl_per_token",
    "entropy": "ppo/policy/entropy",
    "clip_ratio/region_mean": "ppo/policy/clipfrac",
    "completions/mean_length": "tokens/responses_len_mean",
    "completions/clipped_ratio": "tokens/cut_share",
}
_LENGTH = "completions/mean_length"  # only trainers that sample log it
# Larger values count as this: else sums and the scales of axes would not be finite.
_LARGEST = 1e100


@dataclass(frozen=True)
class Series:
    """The steps at which a metric was recorded, and its finite values there."""

    steps: list[float]
    values: list[float]

    def __bool__(self) -> bool:
        return bool(self.steps)

    def start(self, share: float = 0.25) -> Series:
        """The first quarter of the series' records, or another share; one at least."""
        count = max(1, round(share * len(self.steps)))
        return Series(self.steps[:count], self.values[:count])

    def end(self, share: float = 0.25) -> Series:
        """The last quarter of the series' records, or another share; one at least."""
        count = max(1, round(share * len(self.steps)))
        return Series(self.steps[-count:], self.values[-count:])

    def since(self, step: float) -> Series:
        """The series' records from a step on."""
        kept = [i for i, each in enumerate(self.steps) if each >= step]
        return Series([self.steps[i] for i in kept], [self.values[i] for i in kept])

    def at(self, step: float) -> float | None:
        """The value at a step; None where there is none."""
        return dict(zip(self.steps, self.values, strict=True)).get(step)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sem(self) -> float:
        """Standard error of the mean over the steps, as if these were independent."""
        if len(self.values) < 2:
            return 0.0
        return statistics.stdev(self.values) / math.sqrt(len(self.values))

    def __neg__(self) -> Series:
        return Series(self.steps, [-value for value in self.values])


def series(rows: Sequence[Mapping[str, Any]], *keys: str) -> Series:
    """The steps and finite values of the first of the metrics ``keys`` that was recorded."""
    for key in keys:
        steps, values = [], []
        for index, row in enumerate(rows):
            value = row.get(key)
            if isinstance(value, (int, float)) and math.isfinite(value):
                steps.append(float(row.get("step", index)))
                values.append(max(-_LARGEST, min(float(value), _LARGEST)))
        if steps:
            return Series(steps, values)
    return Series([], [])


@dataclass(frozen=True)
class RunCurves:
    """What figures show of a run.

    Args:
        name: the run's name, for legends.
        rows: the rows of metrics.jsonl, one per log and one per evaluation.
        stages: rows of the run's earlier stages, by name.
        kl_ceiling: a KL in nats per sequence, drawn as a line beside the run's.
        settings: the settings of job and trainer, and the number of "eval_examples".
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    stages: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    kl_ceiling: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: RunFolder, name: str | None = None) -> RunCurves:
        """The curves of a run, read from its files; ``name`` replaces the name of the folder."""
        stages = {stage: each.rows() for stage, each in folder.stages().items()}
        config, summary = folder.config, folder.summary()
        settings = {
            **config.get("job", {}),
            **config.get("settings", {}),
            "eval_examples": summary.get("eval_examples"),
        }
        ceiling = config.get("kl_ceiling")
        rows = [
            {_name(key): value for key, value in row.items()} if _LENGTH in row else row
            for row in folder.rows()
        ]
        return cls(name or folder.name, rows, stages, ceiling, settings)

    def read(self, keys: Iterable[str], stage: str | None = None) -> Series:
        """The first of the metrics ``keys`` that the run, or its stage ``stage``, has recorded."""
        return series(self.rows if stage is None else self.stages.get(stage, ()), *keys)

    def metrics(self) -> list[str]:
        """The names of all metrics of the run, in the order of their first record."""
        return list(dict.fromkeys(key for row in self.rows for key in row))


def _name(key: str) -> str:
    if key.startswith("rewards/"):  # rewards/FUNCTION/mean
        return key.replace("rewards/", "reward/", 1)
    return _NAMES.get(key, key)
