"""TrainerFolder: the ``output_dir`` of a trainer, read as the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastrl.run.checkpoints import OF_TRANSFORMERS, Checkpoints
from fastrl.run.folder import RunFolder


class TrainerFolder(RunFolder):
    """The ``output_dir`` of a trainer of fastrl's or TRL's in a user's program, to be read.

    Metrics are read from the ``trainer_state.json`` with the most steps, a checkpoint's or that of
    ``save_state()``. Settings are known where a trainer of fastrl wrote a checkpoint.

    Args:
        path: the folder, with such a file in it or in a checkpoint.

    Raises:
        ValueError: a ``trainer_state.json`` that is not transformers'.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self.checkpoints = self.path
        self._steps, self._logs = max(map(self._state, _states(self.path)), key=lambda x: x[0])
        kept = [self.read(f"{x.name}/process-0/state.json") for x in Checkpoints(self.path).paths()]
        last: dict[str, Any] = next(filter(None, reversed(kept)), {})
        name = last.get("identity", {}).get("trainer")
        self.config = {"command": name, "settings": last.get("settings", {})}

    def _state(self, name: str) -> tuple[int, list[dict[str, Any]]]:
        state = self.read(name)
        try:
            return int(state["global_step"]), [dict(row) for row in state["log_history"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.path / name} is not transformers' state, which has global_step and "
                "log_history"
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """The logs."""
        return self._logs

    def summary(self) -> dict[str, Any]:
        """The number of steps, and the latest metrics of evaluations and of the whole training."""
        figures = {
            key: value
            for row in self._logs
            for key, value in row.items()
            if key.startswith(("eval_", "train_"))
        }
        return {"steps": self._steps, **figures}


def open_run(path: str | os.PathLike[str]) -> RunFolder:
    """The folder of an existing run: a command's, or a trainer's ``output_dir``.

    Raises:
        FileNotFoundError: the folder is neither.
        ValueError: ``run.json`` or ``trainer_state.json`` has other content than it should.
    """
    folder = RunFolder(path)
    if folder.metrics.is_file() or not _states(folder.path):
        return RunFolder.open(path)
    return TrainerFolder(path)


def _states(path: Path) -> list[str]:
    """The files of transformers' state in a folder and its checkpoints, relative to the folder."""
    folders = [path, *Checkpoints(path).paths()]
    files = [folder / OF_TRANSFORMERS.file for folder in folders]
    return [str(x.relative_to(path)) for x in files if x.is_file()]
