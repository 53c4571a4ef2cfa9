"""What a supervised run shows and writes while it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from fastrl.run.progress import drop_bar


class MetricsCallback(TrainerCallback):
    """One JSON object per log of transformers' Trainer, appended as they come."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            numbers = {k: _number(v) for k, v in (logs or {}).items()}
            known = {k: v for k, v in numbers.items() if v is not None}
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **known}) + "\n")


class FitProgress(TrainerCallback):
    """A progress bar with the loss in place of transformers' lines of numbers."""

    def __init__(self, description: str):
        self.description = description
        self.bar: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, desc=self.description, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        loss = _number((logs or {}).get("loss"))
        if self.bar is not None and loss is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        if self.bar is not None and metrics:
            shown = {k: metrics.get(f"eval_{k}") for k in ("loss", "accuracy")}
            told = ", ".join(f"{k} {v:.3f}" for k, v in shown.items() if v is not None)
            tqdm.write(f"{self.description} step {state.global_step}: held-out {told}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def close(self) -> None:
        """Of a training that was left by an exception."""
        if self.bar is not None:
            drop_bar(self.bar)
            self.bar = None


@contextmanager
def showing(trainer: Any, description: str, metrics: str | Path) -> Iterator[None]:
    """Writes a trainer's logs to a file and shows :class:`FitProgress` in place of transformers'
    bar, which is closed at the end, also by an exception.

    Args:
        metrics: the file, which is begun anew.
    """
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    progress = FitProgress(description)
    trainer.add_callback(MetricsCallback(metrics))
    trainer.add_callback(progress)
    try:
        yield
    finally:
        progress.close()


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
