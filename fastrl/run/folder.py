"""The folder of a run: where each of its files goes, and how it is written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


class RunFolder:
    """Names and writes the files of a run; every command leaves the same.

    ================== ============================================================================
    ``run.json``       command, title, job and settings; written as the run begins
    ``metrics.jsonl``  one JSON object per log and per evaluation, appended as they come
    ``logs/``          of trackers that write files
    ``checkpoints/``   of transformers' Trainer, where asked for
    ``model/``         weights, tokenizer and model card (``README.md``)
    ``samples.jsonl``  responses to held-out prompts before and after training, with their rewards
    ``report.png``     curves
    ``summary.json``   what run.json says, and the results
    ================== ============================================================================

    A run in the folder of an earlier one overwrites it: :meth:`begin` removes the earlier one's
    metrics, samples, report and summary; its model stays until there is a new one. Every file but
    ``metrics.jsonl``, and ``model/``, is written under another name and then renamed: a reader, or
    a run that was interrupted, finds the old one or the new one, never half of it.

    Args:
        path: of the folder; nothing is written before :meth:`begin`.
        config: of ``run.json``: values that JSON can hold, others as their text.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None):
        self.name = os.fspath(path)
        self.path = Path(path)
        self.config: dict[str, Any] = dict(config or {})

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that has begun, with its ``run.json``.

        Raises:
            FileNotFoundError: there is no ``metrics.jsonl``.
            ValueError: ``run.json`` is not a JSON object.
        """
        folder = cls(path)
        if not folder.metrics.is_file():
            raise FileNotFoundError(
                f"{path} holds no run: there is no metrics.jsonl; name the folder that a command "
                "wrote, its --output"
            )
        folder.config = folder.read("run.json")
        return folder

    # ------------------------------------------------------------------ names

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.png"

    def stage(self, name: str, config: Mapping[str, Any] | None = None) -> RunFolder:
        """The folder of a stage that comes before the run."""
        return RunFolder(self.path / name, config)

    def stages(self) -> dict[str, RunFolder]:
        """Those that ``run.json`` names under "stages"."""
        return {name: self.stage(name) for name in self.config.get("stages", ())}

    # ------------------------------------------------------------------ writing

    def check(self) -> None:
        """Refuses a folder that cannot be written.

        Raises:
            ValueError: no name, or a file in the way.
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
        """Makes the folder, or empties that of an earlier run but for its model, checkpoints and
        logs; writes ``run.json`` and an empty ``metrics.jsonl``."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "samples.jsonl", "report.png"):
            (self.path / name).unlink(missing_ok=True)
        self.write("run.json", self.config)
        self.metrics.write_text("")

    def save_model(self, save: Callable[[Path], object]) -> None:
        """Replaces ``model/``.

        Args:
            save: writes the model, its tokenizer and its card to the folder that it is given, and
                makes it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".saving-") as folder:
            new, old = Path(folder) / "model", Path(folder) / "old"  # model cards show the name
            save(new)
            if self.model.exists():
                self.model.rename(old)
            new.rename(self.model)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON object to a file."""
        self._replace(name, json.dumps(content, indent=2, default=str) + "\n")

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """JSON objects to a file, one per line."""
        self._replace(name, "".join(json.dumps(row, default=str) + "\n" for row in rows))

    def write_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """``samples.jsonl``."""
        self.write_rows("samples.jsonl", rows)

    def write_summary(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Results and configuration to ``summary.json``; returns both."""
        summary = {**results, **self.config}
        self.write("summary.json", summary)
        return summary

    def write_report(self, figure: Any) -> None:
        """A figure of matplotlib to ``report.png``."""
        part = self.path / ".report.png"
        figure.savefig(part)
        part.replace(self.report)

    def drop_empty_checkpoints(self) -> None:
        """Removes the folder that transformers' Trainer makes, where it holds none."""
        if self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
            self.checkpoints.rmdir()

    def _replace(self, name: str, text: str) -> None:
        part = self.path / f".{name}"
        part.write_text(text, encoding="utf-8")
        part.replace(self.path / name)

    # ------------------------------------------------------------------ reading

    def read(self, name: str) -> dict[str, Any]:
        """A JSON object from a file; empty where there is no such file.

        Raises:
            ValueError: something else.
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
        """Of a run that has ended; else empty."""
        return self.read("summary.json")

    def rows(self) -> list[dict[str, Any]]:
        """Metrics.

        Raises:
            ValueError: a line that is not a JSON object, named by its number.
        """
        return _rows(self.metrics)

    def samples(self) -> list[dict[str, Any]]:
        """Of a run that has ended and was evaluated on prompts; else empty.

        Raises:
            ValueError: a line that is not a JSON object, named by its number.
        """
        return _rows(self.path / "samples.jsonl")


def _rows(path: Path) -> list[dict[str, Any]]:
    """JSON objects from a file, one per line; none where there is no such file."""
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
