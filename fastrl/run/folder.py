"""RunFolder: the files of a run, and how they are written and read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


class RunFolder:
    """The folder of a run; every command writes the same files.

    ================== ============================================================================
    ``run.json``       command, title, job and settings; written as the run begins
    ``metrics.jsonl``  one JSON object per log and per evaluation, appended during the run
    ``logs/``          files of trackers
    ``checkpoints/``   of transformers' Trainer, if the flags ask for them
    ``model/``         weights, tokenizer and model card (``README.md``)
    ``samples.jsonl``  responses to held-out prompts before and after training, with their rewards
    ``report.png``     curves
    ``summary.json``   the contents of run.json, and the results
    ================== ============================================================================

    A run in the folder of an earlier one overwrites it: :meth:`begin` removes the earlier run's
    metrics, samples, report and summary; its model stays until there is a new one. ``model/`` and
    every file but ``metrics.jsonl`` are written under another name and then renamed, so that a
    reader, or an interrupted run, never sees half of one.

    Args:
        path: of the folder; nothing is written before :meth:`begin`.
        config: for ``run.json``; values that JSON cannot hold are written as text.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None):
        self.name = os.fspath(path)
        self.path = Path(path)
        self.config: dict[str, Any] = dict(config or {})
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.report = self.path / "report.png"

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of an existing run, with the contents of its ``run.json``.

        Raises:
            FileNotFoundError: there is no ``metrics.jsonl``.
            ValueError: ``run.json`` is not a JSON object.
        """
        folder = cls(path)
        if not folder.metrics.is_file():
            raise FileNotFoundError(
                f"{path} holds no run: there is no metrics.jsonl; name the --output folder of a "
                "command"
            )
        folder.config = folder.read("run.json")
        return folder

    def stage(self, name: str, config: Mapping[str, Any] | None = None) -> RunFolder:
        """The folder of an earlier stage of the run."""
        return RunFolder(self.path / name, config)

    def stages(self) -> dict[str, RunFolder]:
        """The stages that ``run.json`` names under "stages"."""
        return {name: self.stage(name) for name in self.config.get("stages", ())}

    def check(self) -> None:
        """Checks that the folder can be written.

        Raises:
            ValueError: no name, or a file of that name.
            PermissionError: a folder that cannot be written to.
        """
        if not self.name.strip():
            raise ValueError("output is empty: name a folder")
        there = self.path.absolute()
        while not there.exists() and there != there.parent:
            there = there.parent
        if not there.is_dir():
            raise ValueError(f"output {self.name}: {there} is a file, name a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(f"output {self.name}: {there} cannot be written to")

    def begin(self) -> None:
        """Makes the folder, or removes an earlier run's files except model, checkpoints and logs;
        writes ``run.json`` and an empty ``metrics.jsonl``."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "samples.jsonl", "report.png"):
            (self.path / name).unlink(missing_ok=True)
        self.write("run.json", self.config)
        self.metrics.write_text("")

    def save_model(self, save: Callable[[Path], object]) -> None:
        """Replaces ``model/``.

        Args:
            save: makes the folder that it is given, and writes model, tokenizer and card to it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".saving-") as folder:
            new, old = Path(folder) / "model", Path(folder) / "old"  # model cards show the name
            save(new)
            if self.model.exists():
                self.model.rename(old)
            new.rename(self.model)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON object to a file."""
        self._replace(name, json.dumps(content, indent=2, default=str) + "\n")

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes JSON objects to a file, one per line."""
        self._replace(name, "".join(json.dumps(row, default=str) + "\n" for row in rows))

    def write_summary(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Writes results and configuration to ``summary.json``; returns both."""
        summary = {**results, **self.config}
        self.write("summary.json", summary)
        return summary

    def write_report(self, figure: Any) -> None:
        """Writes a figure of matplotlib to ``report.png``."""
        part = self.path / ".report.png"
        figure.savefig(part)
        part.replace(self.report)

    def write_text(self, name: str, text: str) -> Path:
        """Writes a text file, and returns its path."""
        self._replace(name, text)
        return self.path / name

    def drop_empty_checkpoints(self) -> None:
        """Removes the folder of checkpoints, which transformers' Trainer always makes, if it is
        empty."""
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()

    def _replace(self, name: str, text: str) -> None:
        part = self.path / f".{name}"
        part.write_text(text, encoding="utf-8")
        part.replace(self.path / name)

    def read(self, name: str) -> dict[str, Any]:
        """Reads a JSON object from a file; empty if there is no such file.

        Raises:
            ValueError: not a JSON object.
        """
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} is not a JSON object")
        return content

    def summary(self) -> dict[str, Any]:
        """Reads ``summary.json``; empty before the run has ended."""
        return self.read("summary.json")

    def rows(self) -> list[dict[str, Any]]:
        """Reads ``metrics.jsonl``.

        Raises:
            ValueError: a line that is not a JSON object, named by its number.
        """
        return _rows(self.metrics)

    def samples(self) -> list[dict[str, Any]]:
        """Reads ``samples.jsonl``; empty if there is none.

        Raises:
            ValueError: a line that is not a JSON object, named by its number.
        """
        return _rows(self.path / "samples.jsonl")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON objects from a file, one per line; none if there is no such file."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        rows.append(row)
    return rows
