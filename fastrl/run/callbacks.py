"""Callbacks of ``PPOTrainer.train``: their base class, and the results that they get."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

KEPT_STEPS = 10_000  # in a result's history
_EVENTS = ("on_train_begin", "on_samples", "on_step", "on_eval", "on_train_end")


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Rewards of the policy's responses to the evaluation prompts at one point of training."""

    step: int
    mean: float
    sem: float  # standard error of the mean
    kl: float  # mean KL to the reference per sequence, in nats; NaN where there is none
    rewards: list[float]  # NaN for a sample that the means leave out
    prompts: list[str]
    completions: list[str]
    nan_samples: int = 0  # samples that ended in NaN logits
    nonfinite_rewards: int = 0  # samples with a reward that is not finite
    # Rewards by the function's name, NaN for samples that it did not judge.
    by_function: dict[str, list[float]] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """The numbers, under the names of metrics."""
        return {
            "eval/reward_mean": self.mean,
            "eval/reward_sem": self.sem,
            "eval/kl": self.kl,
            **({"eval/nan_samples": self.nan_samples} if self.nan_samples else {}),
            **self._of_rewards(),
        }

    def _of_rewards(self) -> dict[str, float]:
        """Means of each function's rewards, if there are several; ``nonfinite_rewards``, if any."""
        metrics: dict[str, float] = {}
        if self.nonfinite_rewards:
            metrics["eval/nonfinite_rewards"] = self.nonfinite_rewards
        if len(self.by_function) > 1:
            for name, rewards in self.by_function.items():
                metrics[f"eval/reward/{name}/mean"] = _mean_of_known(rewards)
        return metrics

    def without_samples(self) -> Evaluation:
        """The evaluation without texts and rewards, but with each function's mean reward."""
        means = {name: [_mean_of_known(rewards)] for name, rewards in self.by_function.items()}
        return replace(self, rewards=[], prompts=[], completions=[], by_function=means)

    def __repr__(self) -> str:
        return (
            f"Evaluation(step={self.step}, reward {self.mean:.3f} ± {self.sem:.3f}"
            f"{kl_text(self.kl)}, prompts={len(self.prompts)})"
        )


@dataclass(frozen=True)
class ShownSamples:
    """Prompts, completions and rewards of one step; and whether each completion has ended, where an
    annotator compares later ones with it."""

    prompts: list[str]
    completions: list[str]
    rewards: list[float]
    finished: list[bool] | None = None


Samples = ShownSamples  # its earlier name, which users' callbacks may import


@dataclass(repr=False)
class TrainResult:
    """The result of a call of ``train``: a dict of numbers for each of its latest 10,000 steps, and
    every evaluation, of which those between the first and the last have no samples: they would take
    more memory than weights in a long run. ``metrics.jsonl`` in the run's folder has all steps.

    Attributes:
        forgotten_steps: the number of the call's steps before the latest 10,000.
        dropped_prompts, dropped_eval_prompts: how many prompts ``long_prompts="drop"`` left out.
        seconds: the time that the run has taken, before it was resumed, too.
    """

    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    dropped_prompts: int = 0
    dropped_eval_prompts: int = 0
    seconds: float = 0.0
    forgotten_steps: int = 0

    def add_step(self, metrics: dict[str, float]) -> None:
        self.history.append(metrics)
        if len(self.history) <= KEPT_STEPS:
            return
        if not self.forgotten_steps:
            warnings.warn(
                f"the result's history keeps the latest {KEPT_STEPS} steps; metrics.jsonl in the "
                "folder of train(output=...) has all",
                stacklevel=4,
            )
        del self.history[0]
        self.forgotten_steps += 1

    def add_evaluation(self, new: Evaluation) -> None:
        """Adds an evaluation, now the last."""
        if len(self.evaluations) > 1:
            self.evaluations[-1] = self.evaluations[-1].without_samples()
        self.evaluations.append(new)

    def __repr__(self) -> str:
        parts = [f"steps={self.forgotten_steps + len(self.history)}"]
        if self.evaluations:
            rewards = [evaluation.mean for evaluation in self.evaluations]
        else:
            rewards = [row["reward/mean"] for row in self.history if "reward/mean" in row]
        if rewards:
            parts.append(f"reward {rewards[0]:.3f} → {rewards[-1]:.3f}")
        return f"TrainResult({', '.join([*parts, f'evaluations={len(self.evaluations)}'])})"


class TrainCallback:
    """Base class of callbacks; its methods do nothing. Every process calls its own callbacks.

    ``trainer`` is the :class:`fastrl.PPOTrainer`, ``total_steps`` the number of steps still to do.
    Steps are counted over all calls of ``train()``: a second call of 10 steps after a first one of
    10 has the steps 11 to 20. Where ``on_step`` returns True, training ends after this step, in all
    processes, as it does after the last one, with an evaluation and a checkpoint.
    """

    def on_train_begin(self, trainer: Any, total_steps: int) -> None: ...

    def on_samples(self, trainer: Any, step: int, samples: ShownSamples) -> None: ...

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> bool | None: ...

    def on_eval(self, trainer: Any, step: int, evaluation: Evaluation) -> None: ...

    def on_train_end(self, trainer: Any, result: TrainResult) -> None: ...

    def close(self) -> None:
        """Releases resources. The loop calls it last, also after an exception."""


def checked_callbacks(callbacks: Any) -> list[TrainCallback]:
    """The callbacks as a list; raises TypeError for a text, for what cannot be iterated over, and
    for an entry that is a class or lacks methods of :class:`TrainCallback`."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list of TrainCallback objects, got {callbacks!r}")
    checked = list(callbacks)
    for i, call in enumerate(checked):
        if isinstance(call, type):
            raise TypeError(f"callbacks[{i}] is the class {call.__name__}, no object: make one")
        lacking = [name for name in _EVENTS if not callable(getattr(call, name, None))]
        if lacking:
            raise TypeError(
                f"callbacks[{i}] is {call!r:.80}, which lacks {', '.join(lacking)}: derive it from "
                "fastrl.TrainCallback"
            )
    return checked


def closing_callbacks(run: Callable[..., TrainResult]) -> Callable[..., TrainResult]:
    """Decorator of a loop's method: closes its callbacks at the end, also after an exception."""

    @functools.wraps(run)
    def closing(loop: Any, *args: Any, **kwargs: Any) -> TrainResult:
        try:
            return run(loop, *args, **kwargs)
        finally:
            with ExitStack() as stack:  # a callback that fails leaves the others their turn
                for callback in reversed(loop.callbacks):
                    if isinstance(callback, TrainCallback):
                        stack.callback(callback.close)

    return closing


def _mean_of_known(rewards: list[float]) -> float:
    numbers = [reward for reward in rewards if not math.isnan(reward)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def kl_text(nats: float) -> str:
    """A KL as part of a line; empty if it is NaN."""
    return "" if math.isnan(nats) else f", KL {rounded(nats, 2)}"


def rounded(number: float, digits: int) -> str:
    """A number with so many digits behind the point; 0 has no sign."""
    return f"{round(number, digits) + 0.0:.{digits}f}"
