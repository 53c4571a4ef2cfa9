"""Hooks of ``PPOTrainer.train``: progress bar, metrics file, and the base of a user's own."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from fastrl.run.progress import drop_bar

if TYPE_CHECKING:
    from fastrl.ppo.trainer import PPOTrainer


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Rewards of the policy's responses to the evaluation prompts at one point of training."""

    step: int
    mean: float
    sem: float  # standard error of the mean
    kl: float  # mean KL to the reference per sequence, in nats; NaN where there is none
    rewards: list[float]  # NaN for a sample that ended in NaN logits, which no mean has in it
    prompts: list[str]
    completions: list[str]
    nan_samples: int = 0  # how many did

    def scalars(self) -> dict[str, float]:
        """As metrics."""
        return {
            "eval/reward_mean": self.mean,
            "eval/reward_sem": self.sem,
            "eval/kl": self.kl,
            **({"eval/nan_samples": self.nan_samples} if self.nan_samples else {}),
        }

    def __repr__(self) -> str:
        return (
            f"Evaluation(step={self.step}, reward {self.mean:.3f} ± {self.sem:.3f}"
            f"{_kl(self.kl)}, prompts={len(self.prompts)})"
        )


@dataclass(frozen=True)
class Samples:
    """What the policy wrote in one step: texts, and what the reward function made of them."""

    prompts: list[str]
    completions: list[str]
    rewards: list[float]


@dataclass(repr=False)
class TrainResult:
    """What ``train`` returns: a dict of numbers per step, and every evaluation.

    Attributes:
        dropped_prompts, dropped_eval_prompts: how many ``long_prompts="drop"`` has left out.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    dropped_prompts: int = 0
    dropped_eval_prompts: int = 0

    def __repr__(self) -> str:
        told = [f"steps={len(self.history)}"]
        if self.evaluations:
            rewards = [evaluation.mean for evaluation in self.evaluations]
        else:
            rewards = [row["reward/mean"] for row in self.history if "reward/mean" in row]
        if rewards:
            told.append(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
        return f"TrainResult({', '.join([*told, f'evaluations={len(self.evaluations)}'])})"


class TrainCallback:
    """Override what you need; every method does nothing by default.

    Steps are counted over all of a trainer's runs: a second ``train()`` of 10 steps after a first
    one of 10 tells of the steps 11 to 20.
    """

    def on_train_begin(self, trainer: PPOTrainer, total_steps: int) -> None: ...

    def on_samples(self, trainer: PPOTrainer, step: int, samples: Samples) -> None: ...

    def on_step(self, trainer: PPOTrainer, step: int, metrics: dict[str, float]) -> None: ...

    def on_eval(self, trainer: PPOTrainer, step: int, evaluation: Evaluation) -> None: ...

    def on_train_end(self, trainer: PPOTrainer, result: TrainResult) -> None: ...

    def close(self) -> None:
        """Called last, after an exception as well: give back what is open."""


class ProgressCallback(TrainCallback):
    """A progress bar with reward, KL and generated tokens per second."""

    def __init__(self, description: str = "PPO"):
        self.description = description
        self.bar: Any = None

    def on_train_begin(self, trainer: PPOTrainer, total_steps: int) -> None:
        reference = trainer.reference
        tqdm.write(f"{self.description} reference: {reference.mode}, {reference.why}")
        self.bar = tqdm(total=total_steps, desc=self.description, unit="step")

    def on_step(self, trainer: PPOTrainer, step: int, metrics: dict[str, float]) -> None:
        self.bar.set_postfix_str(
            f"reward {metrics['reward/mean']:+.3f}{_kl(metrics['objective/kl'])}, "
            f"{metrics['perf/rollout_tokens_per_second']:.0f} tok/s"
        )
        self.bar.update()

    def on_eval(self, trainer: PPOTrainer, step: int, evaluation: Evaluation) -> None:
        tqdm.write(
            f"{self.description} step {step}: held-out reward {evaluation.mean:+.3f} "
            f"± {evaluation.sem:.3f}{_kl(evaluation.kl)}"
        )

    def on_train_end(self, trainer: PPOTrainer, result: TrainResult) -> None:
        self.bar.close()
        self.bar = None

    def close(self) -> None:
        if self.bar is not None:
            drop_bar(self.bar)
            self.bar = None


def closing_callbacks(run: Callable[..., TrainResult]) -> Callable[..., TrainResult]:
    """Of a loop's method: ``close`` of its callbacks is called when the method ends, also by an
    exception."""

    @functools.wraps(run)
    def closing(loop: Any, *args: Any, **kwargs: Any) -> TrainResult:
        try:
            return run(loop, *args, **kwargs)
        finally:
            for callback in loop.callbacks:
                if isinstance(callback, TrainCallback):
                    callback.close()

    return closing


class JsonlCallback(TrainCallback):
    """One JSON object per step, and one per evaluation (``eval/*``), appended as they come.

    What is not known (NaN), such as a KL without a reference, is left out. The file is begun anew
    unless the same callback goes on with the same trainer.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._written_by: weakref.ref[PPOTrainer] | None = None

    def on_train_begin(self, trainer: PPOTrainer, total_steps: int) -> None:
        if self._written_by is not None and self._written_by() is trainer:
            return
        self._written_by = weakref.ref(trainer)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def on_step(self, trainer: PPOTrainer, step: int, metrics: dict[str, float]) -> None:
        self._append({"step": step, **metrics})

    def on_eval(self, trainer: PPOTrainer, step: int, evaluation: Evaluation) -> None:
        self._append({"step": step, **evaluation.scalars()})

    def _append(self, record: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(without_nan(record)) + "\n")


def without_nan(record: dict[str, float]) -> dict[str, float]:
    """What is known of a step."""
    return {name: value for name, value in record.items() if not math.isnan(value)}


def _kl(nats: float) -> str:
    return "" if math.isnan(nats) else f", KL {nats:.2f}"
