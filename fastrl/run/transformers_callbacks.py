"""Metrics, trackers and a progress bar for transformers' Trainer, in place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.integrations import rewrite_logs
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_callback import ProgressCallback as OwnProgress

from fastrl.run.callbacks import ShownSamples
from fastrl.run.folder import RunFolder
from fastrl.run.metrics import MetricsFile, log_table, open_trackers, scalars, without_nan
from fastrl.run.progress import drop_bar


class MetricsCallback(TrainerCallback):
    """Appends each log to a file, and sends it to the accelerator's trackers.

    Args:
        evaluations: a list to which the trainer adds the samples of each evaluation; the trackers
            get a table of the latest ones. It stays empty where evaluations draw no samples.
    """

    def __init__(
        self, file: MetricsFile, accelerator: Any, evaluations: Sequence[ShownSamples] = ()
    ):
        self.file, self.accelerator, self.evaluations = file, accelerator, evaluations

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            numbers = without_nan(scalars(logs or {}))
            self.file.append(state.global_step, numbers)
            self.accelerator.log(rewrite_logs(numbers), step=state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.evaluations and state.is_world_process_zero:
            log_table(self.accelerator, "eval/samples", self.evaluations[-1], state.global_step)


# What a line about an evaluation shows, in its order, by the metrics' names.
_SHOWN = {
    "loss": "loss",
    "accuracy": "accuracy",
    "rewards/accuracies": "accuracy",
    "reward": "reward",
    "divergence": "divergence",
    "win_rate": "win rate",
}


def _held_out(metrics: Mapping[str, float]) -> str:
    """The metrics of an evaluation in a few words, with standard errors where there are some."""
    words = []
    for name, word in _SHOWN.items():
        value, sem = (metrics.get(f"eval_{name}{end}") for end in ("", "_sem"))
        if value is not None:
            words.append(f"{word} {value:.3f}" + ("" if sem is None else f" ± {sem:.3f}"))
    return ", ".join(words)


class LossProgress(TrainerCallback):
    """A progress bar with the loss, and a line for each evaluation."""

    def __init__(self, description: str):
        self.description = description
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            done = state.global_step  # the step that a resumed run begins at
            self.bar = tqdm(total=state.max_steps, initial=done, desc=self.description, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        loss = scalars(logs or {}).get("loss")
        if self.bar is not None and loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        shown = _held_out(metrics or {})
        if self.bar is not None and shown:
            tqdm.write(f"{self.description} step {state.global_step}: held-out {shown}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        """Removes the bar. :func:`recording` calls it at its end, also after an exception."""
        if self.bar is not None:
            drop_bar(self.bar)
            self.bar = None


@contextmanager
def recording(
    trainer: Any,
    folder: RunFolder,
    description: str,
    trackers: Any = (),
    evaluations: Sequence[ShownSamples] = (),
) -> Iterator[None]:
    """Context in which a trainer's logs are written to a run's folder and to trackers, with a
    progress bar. At the end, also after an exception, it removes the bar and closes trackers.
    The caller begins or resumes the folder, before the first log.

    Args:
        description: the text of the progress bar.
        trackers: names of trackers that accelerate knows.
        evaluations: see :class:`MetricsCallback`.

    Raises:
        OSError: a tracker does not start.
    """
    for callback in (OwnProgress, PrinterCallback):
        trainer.remove_callback(callback)
    if trackers:
        open_trackers(
            trainer.accelerator,
            trackers,
            project="fastrl",
            settings=folder.config.get("settings", {}),
            folder=folder.logs,
        )
    progress = LossProgress(description)
    file = MetricsFile(folder.metrics)
    trainer.add_callback(MetricsCallback(file, trainer.accelerator, evaluations))
    trainer.add_callback(progress)
    try:
        yield
    finally:
        progress.close()
        trainer.accelerator.end_training()
