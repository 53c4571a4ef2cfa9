"""Metrics of a run: metrics.jsonl, trackers, the console."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastrl.run.callbacks import Evaluation, ShownSamples, TrainCallback

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

_CONSOLE_ROWS = 4
# Packages with another name than their tracker.
_PACKAGES = {"azure_ml": "azureml-mlflow", "comet_ml": "comet-ml", "flyte": "flytekit"}


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """The numbers and 0-D tensors among the statistics, as floats."""
    return {
        name: float(value)
        for name, value in stats.items()
        if isinstance(value, (int, float, np.number)) or getattr(value, "shape", None) == ()
    }


def without_nan(record: Mapping[str, float]) -> dict[str, float]:
    """The numbers that are not NaN."""
    return {name: value for name, value in record.items() if not math.isnan(value)}


class MetricsFile:
    """A file with one JSON object per line; numbers that are NaN are left out."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def begin(self) -> None:
        """Makes an empty file, and its folder if there is none."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def append(self, step: int, numbers: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **without_nan(numbers)}) + "\n")


class MetricsCallback(TrainCallback):
    """Appends a row per step, and one per evaluation (``eval/*``), to a file."""

    def __init__(self, file: MetricsFile):
        self.file = file

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.file.append(step, metrics)

    def on_eval(self, trainer: Any, step: int, evaluation: Evaluation) -> None:
        self.file.append(step, evaluation.scalars())


class JsonlCallback(MetricsCallback):
    """Writes one JSON object per step, and one per evaluation (``eval/*``).

    NaN, such as a KL without a reference, is left out. The file starts empty, unless the same
    callback continues with the same trainer.
    """

    def __init__(self, path: str | Path):
        super().__init__(MetricsFile(path))
        self._written_by: weakref.ref[Any] | None = None

    def on_train_begin(self, trainer: Any, total_steps: int) -> None:
        if self._written_by is not None and self._written_by() is trainer:
            return
        self._written_by = weakref.ref(trainer)
        self.file.begin()


def check_trackers(flag: str, names: Iterable[str], *, of_transformers: bool = False) -> None:
    """Checks that trackers are known and installed.

    Args:
        flag: the name of the setting, for messages.
        names: the trackers' names; "all" and "none" are not checked.
        of_transformers: also allow trackers that only transformers knows.

    Raises:
        ValueError: a tracker is unknown.
        ImportError: a tracker's package is not installed.
    """
    from accelerate.tracking import get_available_trackers
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    trackers = _names_of_accelerate()
    ready = {str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()}
    if of_transformers:
        trackers = trackers | set(INTEGRATION_TO_CALLBACK)
        ready = ready | set(get_available_reporting_integrations())
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in trackers:
            choices = ", ".join(sorted(trackers))
            raise ValueError(f"unknown tracker {flag}={name!r}: choose one of {choices}")
        if name not in ready:
            package = _PACKAGES.get(name, name)
            raise ImportError(f"{flag}={name} needs a package: pip install {package}")


def split_trackers(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The trackers that accelerate knows, and those that only transformers knows."""
    names, of_accelerate = list(names), _names_of_accelerate()
    return [n for n in names if n in of_accelerate], [n for n in names if n not in of_accelerate]


def _names_of_accelerate() -> set[str]:
    from accelerate.utils import LoggerType

    return {str(kind.value) for kind in LoggerType} - {"all"}


def open_trackers(
    accelerator: Accelerator,
    trackers: Any,
    *,
    project: str,
    settings: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
) -> None:
    """Opens trackers for ``accelerator.log``; ``accelerator.end_training`` closes them.

    Args:
        trackers: a name that accelerate knows, one of its trackers, or a list of these.
        project: the project name that trackers show.
        settings: the run's settings; trackers show the numbers among them.
        options: keyword arguments by tracker name.
        folder: the folder of trackers' files; None: that of the accelerator's configuration.

    Raises:
        OSError: a tracker does not start.
    """
    from accelerate.tracking import filter_trackers

    if folder is not None:
        accelerator.project_configuration.logging_dir = str(folder)
    accelerator.log_with = filter_trackers(trackers, accelerator.logging_dir)
    try:
        accelerator.init_trackers(
            project, config=scalars(settings), init_kwargs=dict(options or {})
        )
    except Exception as error:  # trackers may raise anything
        kinds = (getattr(each, "value", each) for each in accelerator.log_with)
        names = ", ".join(str(getattr(kind, "name", kind)) for kind in kinds)
        raise OSError(
            f"the tracker did not start ({names}): {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Mend that, or leave it out of log_with (report_to)"
        ) from error


class TrackerCallback(TrainCallback):
    """Sends every step's and evaluation's numbers, and tables of their samples (query, response,
    reward), to the trackers of ``PPOConfig.log_with``.

    Tables ("samples", "eval/samples") go where :func:`log_table` says. Trackers stay open for
    further training: ``trainer.accelerator.end_training()`` closes them.
    """

    def __init__(self) -> None:
        self._samples: ShownSamples | None = None

    def on_samples(self, trainer: Any, step: int, samples: ShownSamples) -> None:
        self._samples = samples

    def on_step(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        trainer.accelerator.log(without_nan(metrics), step=step)
        if self._samples is not None:
            log_table(trainer.accelerator, "samples", self._samples, step)
        self._samples = None

    def on_eval(self, trainer: Any, step: int, evaluation: Evaluation) -> None:
        trainer.accelerator.log(without_nan(evaluation.scalars()), step=step)
        samples = ShownSamples(evaluation.prompts, evaluation.completions, evaluation.rewards)
        log_table(trainer.accelerator, "eval/samples", samples, step)


def log_table(accelerator: Accelerator, name: str, samples: ShownSamples, step: int) -> None:
    """Sends a table of samples (query, response, reward) to the trackers that show tables: those of
    accelerate with ``log_table`` (wandb, ClearML), trackio, and tensorboard, as text."""
    columns = ["query", "response", "reward"]
    rows = [
        list(row) for row in zip(samples.prompts, samples.completions, samples.rewards, strict=True)
    ]
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            tracker.log_table(name, columns=columns, data=rows, step=step)
        elif tracker.name == "trackio":
            import pandas
            import trackio

            table = trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))
            tracker.log({name: table}, step=step)
        elif tracker.name == "tensorboard":
            tracker.log({name: _markdown(columns, rows)}, step=step)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
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
    """Sends statistics, ``env/reward_*`` and, to wandb, a table of samples to the tracker
    ``log_with``; without one prints the table. All processes must call it: the main one logs and
    returns what it logged, the others return {}. Rewards of tokens are summed for each sample."""
    import torch

    sums = [float(r.sum()) if isinstance(r, torch.Tensor) else float(r) for r in rewards]
    values = torch.as_tensor(sums, device=accelerator.device)
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
    from rich.console import Console
    from rich.table import Table

    from fastrl.run.terminal import plain

    table = Table(
        title=f"reward {logs['env/reward_mean']:.3f} ± {logs['env/reward_std']:.3f}, "
        f"KL {float(logs.get('objective/kl', float('nan'))):.3f}"
    )
    for column in (*columns, "reward"):
        table.add_column(column, justify="right" if column == "reward" else "left")
    for row in rows[:_CONSOLE_ROWS]:
        table.add_row(*(plain(str(cell)) for cell in row[:-1]), f"{row[-1]:.3f}")
    Console().print(table)
