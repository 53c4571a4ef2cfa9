"""The progress bar of ``PPOTrainer.train``, and removing unfinished bars."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from fastrl.run.callbacks import Evaluation, TrainCallback, TrainResult, kl_text

_ERASE_LINE = "\r\x1b[2K"


class ProgressCallback(TrainCallback):
    """A progress bar with reward, KL and generated tokens per second."""

    def __init__(self, description: str = "PPO"):
        self.description = description
        self.bar: Any = None

    def on_train_begin(self, trainer: Any, total_steps: int) -> None:
        from tqdm.auto import tqdm

        reference = trainer.reference
        tqdm.write(f"{self.description} reference: {reference.mode}, {reference.why}")
        if trainer.autocast_by_default is not None:
            tqdm.write(
                f"{self.description} computes in {trainer.autocast_by_default} by autocast, as "
                "weights are float32 and the device can; accelerator_kwargs="
                '{"mixed_precision": "no"} turns that off'
            )
        done = trainer.current_step
        if done:
            text = f"goes on with step {done + 1} of {done + total_steps}"
            tqdm.write(f"{self.description} {text if total_steps else _nothing_left(done)}")
        total = done + total_steps
        self.bar = tqdm(total=total, initial=done, desc=self.description, unit="step")

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.bar.set_postfix_str(
            f"reward {metrics['reward/mean']:+.3f}{kl_text(metrics['objective/kl'])}, "
            f"{metrics['perf/rollout_tokens_per_second']:.0f} tok/s"
        )
        self.bar.update()

    def on_eval(self, trainer: Any, step: int, evaluation: Evaluation) -> None:
        self.bar.write(
            f"{self.description} step {step}: held-out reward {evaluation.mean:+.3f} "
            f"± {evaluation.sem:.3f}{kl_text(evaluation.kl)}"
        )

    def on_train_end(self, trainer: Any, result: TrainResult) -> None:
        self.bar.close()
        self.bar = None

    def close(self) -> None:
        if self.bar is not None:
            drop_bar(self.bar)
            self.bar = None


def _nothing_left(done: int) -> str:
    return f"has nothing left to do: {done} steps are done; more steps would prolong the run"


def drop_bar(bar: Any) -> None:
    """Removes an unfinished bar, and prints how far it came."""
    bar.leave = False
    bar.close()
    if bar.total:
        unit = bar.unit.strip()
        line = f"{bar.desc or 'progress'}: stopped after {bar.n} of {bar.total} {unit}s"
        type(bar).write(line, file=sys.stderr)


def drop_bars() -> None:
    """Removes all open bars of tqdm, of any library."""
    for bar in _open_bars():
        bar.leave = False
        bar.close()


def line_start(stream: TextIO) -> str:
    """What to write before a line, so that the line does not begin behind a bar: on a terminal the
    bar is erased, and drawn again below with its next update."""
    if not _open_bars():
        return ""
    return _ERASE_LINE if stream.isatty() else "\n"


def _open_bars() -> list[Any]:
    tqdm = sys.modules.get("tqdm")
    # tqdm has no public name for its open bars.
    return [] if tqdm is None else list(getattr(tqdm.tqdm, "_instances", ()))
