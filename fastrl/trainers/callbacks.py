"""Hooks of ``PPOTrainer.train``: progress bar, metrics file, and the base of a user's own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from fastrl.trainers.ppo import PPOTrainer


@dataclass(frozen=True)
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


@dataclass
class TrainResult:
    """What ``train`` returns: a dict of numbers per step, and every evaluation."""

    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


class TrainCallback:
    """Override what you need; every method does nothing by default."""

    def on_train_begin(self, trainer: PPOTrainer, total_steps: int) -> None: ...

    def on_step(self, trainer: PPOTrainer, step: int, metrics: dict[str, float]) -> None: ...

    def on_eval(self, trainer: PPOTrainer, step: int, evaluation: Evaluation) -> None: ...

    def on_train_end(self, trainer: PPOTrainer, result: TrainResult) -> None: ...


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


class JsonlCallback(TrainCallback):
    """One JSON object per step, and one per evaluation (``eval/*``), appended as they come.

    What is not known (NaN), such as a KL without a reference, is left out.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def on_train_begin(self, trainer: PPOTrainer, total_steps: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def on_step(self, trainer: PPOTrainer, step: int, metrics: dict[str, float]) -> None:
        self._append({"step": step, **metrics})

    def on_eval(self, trainer: PPOTrainer, step: int, evaluation: Evaluation) -> None:
        self._append(
            {
                "step": step,
                "eval/reward_mean": evaluation.mean,
                "eval/reward_sem": evaluation.sem,
                "eval/kl": evaluation.kl,
                **({"eval/nan_samples": evaluation.nan_samples} if evaluation.nan_samples else {}),
            }
        )

    def _append(self, record: dict[str, float]) -> None:
        known = {name: value for name, value in record.items() if not math.isnan(value)}
        with self.path.open("a") as file:
            file.write(json.dumps(known) + "\n")


def _kl(nats: float) -> str:
    return "" if math.isnan(nats) else f", KL {nats:.2f}"
