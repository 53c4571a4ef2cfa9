"""Where a step's statistics go besides the caller: trackers and the console."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fastrl.ppo.stats import scalars
from fastrl.run.callbacks import Evaluation, Samples, TrainCallback, without_nan

if TYPE_CHECKING:
    from fastrl.ppo.trainer import PPOTrainer

_CONSOLE_ROWS = 4


class TrackerCallback(TrainCallback):
    """Every step's and evaluation's numbers, and tables of their samples (query, response, reward),
    to the trackers of ``PPOConfig.log_with``.

    Tables ("samples", "eval/samples") go to trackers that accelerate knows to take them (wandb,
    ClearML: those with a ``log_table``), and to tensorboard as text; others get the numbers alone.
    Trackers stay open, as training may go on: ``trainer.accelerator.end_training()`` closes them.
    """

    def __init__(self) -> None:
        self._samples: Samples | None = None

    def on_samples(self, trainer: PPOTrainer, step: int, samples: Samples) -> None:
        self._samples = samples

    def on_step(self, trainer: PPOTrainer, step: int, metrics: dict[str, float]) -> None:
        trainer.accelerator.log(without_nan(metrics), step=step)
        if self._samples is not None:
            _log_table(trainer.accelerator, "samples", self._samples, step)
        self._samples = None

    def on_eval(self, trainer: PPOTrainer, step: int, evaluation: Evaluation) -> None:
        trainer.accelerator.log(without_nan(evaluation.scalars()), step=step)
        samples = Samples(evaluation.prompts, evaluation.completions, evaluation.rewards)
        _log_table(trainer.accelerator, "eval/samples", samples, step)


def _log_table(accelerator: Accelerator, name: str, samples: Samples, step: int) -> None:
    columns = ["query", "response", "reward"]
    rows = [
        list(row) for row in zip(samples.prompts, samples.completions, samples.rewards, strict=True)
    ]
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table(name, columns=columns, data=rows, step=step)
        elif tracker.name == "tensorboard":
            tracker.log({name: _markdown(columns, rows)}, step=step)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as tensorboard shows text."""
    escaped = (
        [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row]
        for row in (columns, ["---"] * len(columns), *rows)
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def log_stats(
    accelerator: Accelerator,
    log_with: str | None,
    step: int,
    stats: Mapping[str, Any],
    batch: Mapping[str, Any],
    rewards: Sequence[Tensor | float] | Tensor,
    columns_to_log: Iterable[str],
) -> dict[str, Any]:
    """Send statistics, ``env/reward_*`` and a table of samples to the tracker or the console.

    Returns what was logged. Every process takes part; the main one logs.
    """
    values = torch.as_tensor([float(r) for r in rewards], device=accelerator.device)
    values = accelerator.gather(values).flatten().cpu()
    if not accelerator.is_main_process:
        return {}
    columns = [c for c in columns_to_log if c in batch]
    logs = {
        **stats,
        "env/reward_mean": float(values.mean()),
        "env/reward_std": float(values.std()) if len(values) > 1 else 0.0,
        "env/reward_dist": values.numpy(),
    }
    rows = list(zip(*(batch[c] for c in columns), values.tolist(), strict=False)) if columns else []
    if log_with == "wandb":
        import wandb

        if rows:
            logs["game_log"] = wandb.Table(
                columns=[*columns, "reward"], rows=[list(r) for r in rows]
            )
        accelerator.log(logs, step=step)
    elif log_with is not None:
        accelerator.log(scalars(logs), step=step)
    else:
        _print_samples(columns, rows, logs)
    return logs


def _print_samples(columns: Sequence[str], rows: Sequence[tuple], logs: Mapping[str, Any]) -> None:
    table = Table(
        title=f"reward {logs['env/reward_mean']:.3f} ± {logs['env/reward_std']:.3f}, "
        f"KL {float(logs.get('objective/kl', float('nan'))):.3f}"
    )
    for column in (*columns, "reward"):
        table.add_column(column, justify="right" if column == "reward" else "left")
    for row in rows[:_CONSOLE_ROWS]:
        table.add_row(*(str(cell) for cell in row[:-1]), f"{row[-1]:.3f}")
    Console().print(table)
