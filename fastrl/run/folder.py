"""RunFolder: the files of a run, and how they are written and read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastrl.run.checkpoints import Checkpoints, find_checkpoint, step_of
from fastrl.run.files import free_name, new_folder, sync_file, write_file
from fastrl.run.lock import FolderLock
from fastrl.run.processes import Processes

STARTED_IN = "started_in"  # in run.json of a command: its working directory
_LOCAL = ("summary.json", "samples.jsonl", "report.png", "report.html")


class RunFolder:
    """The folder of a run; all training commands write files of these names.

    ================== ============================================================================
    ``run.json``       command, title, "job" (the command's settings), "settings" (the trainer's),
                       working directory, hashes of users' code
    ``metrics.jsonl``  one JSON object per log and per evaluation, appended during the run
    ``logs/``          files of trackers
    ``checkpoints/``   see :class:`fastrl.run.checkpoints.Checkpoints`
    ``ledger/``        every training sample of PPO, GRPO and RLOO
    ``model/``         weights, tokenizer and model card (``README.md``)
    ``samples.jsonl``  responses to held-out prompts before and after training, with their rewards
    ``report.png``     curves; also in ``report.html``, which ``fastrl report`` writes
    ``summary.json``   the contents of run.json, and the results
    ================== ============================================================================

    A folder is claimed before anything is written (:meth:`claim`), and by one process at a time. A
    run that resumes another keeps its files; records of steps that it will do again are moved to
    ``metrics.superseded-N.jsonl``. ``model/`` and files, but for ``metrics.jsonl`` and trackers',
    are written under another name and then renamed: nobody sees half of one, even after a kill.

    Args:
        path: the folder's path; making this object writes nothing.
        config: the contents of ``run.json``; values that JSON cannot hold are written as text.
    """

    def __init__(self, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None):
        self.name = os.fspath(path)
        self.path = Path(path).absolute()  # a user's function may change the working directory
        self.config: dict[str, Any] = dict(config or {})
        self.metrics = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.ledger = self.path / "ledger"
        self.report = self.path / "report.png"
        self.page = self.path / "report.html"
        self.lock = FolderLock(self.path)
        self._counted = (0, 0)  # bytes of the metrics that were read, and their lines

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
                f"{path} holds no run: there is no metrics.jsonl and no trainer_state.json of a "
                "trainer; name the --output of a command, or the output_dir of a trainer that "
                "saves checkpoints, or whose program calls trainer.save_state() at its end"
            )
        folder.config = folder.read("run.json")
        return folder

    def keep_config(self) -> None:
        """Replaces the configuration by that of ``run.json``, if there is one."""
        self.config = self.read("run.json") or self.config

    def stage(self, name: str, config: Mapping[str, Any] | None = None) -> RunFolder:
        """The folder of an earlier stage of the run."""
        return RunFolder(self.path / name, config)

    def stages(self) -> dict[str, RunFolder]:
        """The stages that ``run.json`` names under "stages"."""
        return {name: self.stage(name) for name in self.config.get("stages", ())}

    def check(self) -> None:
        """Checks that the folder can be written.

        Raises:
            ValueError: an empty name, or the name of a file.
            PermissionError: a folder that cannot be written to.
        """
        if not self.name.strip():
            raise ValueError("output is empty: name a folder")
        existing = self.path.absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        if not existing.is_dir():
            raise ValueError(f"output {self.name}: {existing} is a file, name a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"output {self.name}: {existing} cannot be written to")

    @contextmanager
    def claim(self, *, resume: Any = False, overwrite: bool = False) -> Iterator[None]:
        """Context in which this process alone may write to the folder; makes it, and removes it
        again if nothing was written.

        Args:
            resume: what to continue, see :meth:`checkpoint`; the folder may hold a run.
            overwrite: the folder may hold a run; :meth:`begin` leaves its model and logs alone.

        Raises:
            ValueError: ``resume`` and ``overwrite``; an empty name; a file; a run, with neither of
                them; files that are not a run's; with ``resume`` the run of another command.
            PermissionError: a folder that cannot be written to.
            FolderInUse: an OSError: another run writes to it.
            KeyboardInterrupt: raised in the block; it gets a message that says how to resume.
        """
        if resume and overwrite:
            raise ValueError("resume and overwrite exclude each other: pass one of them")
        self.check()
        self._check_contents(bool(resume), overwrite)
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock.acquire()
        try:
            self._check_contents(bool(resume), overwrite)  # again: another run may just have ended
            yield
        except KeyboardInterrupt as interrupt:
            if not interrupt.args and self._is_run():
                interrupt.args = (f"interrupted; {self._way_on()}",)
            raise
        finally:
            if _is_empty(self.checkpoints):  # transformers' Trainer always makes it
                self.checkpoints.rmdir()
            self.lock.release()
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def _way_on(self) -> str:
        last = next(reversed(Checkpoints(self.checkpoints).paths()), None)
        if last is None:
            return "there is no checkpoint yet: --resume (resume=True) begins anew"
        return f"the newest checkpoint is {last}: --resume (resume=True) continues from there"

    def _check_contents(self, resume: bool, overwrite: bool) -> None:
        names = [p.name for p in self._entries()]
        if not names:
            return
        if not self._is_run():
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise ValueError(
                f"output {self.name} holds files that are not a run's ({shown}): name a new or "
                "empty folder"
            )
        theirs, ours = (x.get("command") for x in (self.read("run.json"), self.config))
        if resume and theirs and ours and theirs != ours:
            raise ValueError(
                f"output {self.name} holds a run of {theirs}, which {ours} cannot resume: name "
                "another folder"
            )
        if not resume and not overwrite:
            last = next((p.name for p in reversed(Checkpoints(self.checkpoints).paths())), None)
            raise ValueError(
                f"output {self.name} holds a run already ({last or 'no checkpoint'}): pass "
                "--resume (resume=True) to continue it, --overwrite (overwrite=True) to begin "
                "anew, or name another folder"
            )

    def _entries(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        entries = sorted(p for p in self.path.iterdir() if not p.name.startswith("."))
        return [p for p in entries if p != self.checkpoints or not _is_empty(p)]

    def holds(self, command: str) -> bool:
        """Whether the folder has a run of this command."""
        return self._is_run() and self.read("run.json").get("command") == command

    def _is_run(self) -> bool:
        return (self.path / "run.json").is_file() or self.metrics.is_file()

    def checkpoint(self, resume: Any, processes: Processes | None = None) -> Path | None:
        """The checkpoint to resume from, see :func:`find_checkpoint`; None without ``resume``."""
        if not resume:
            return None
        return find_checkpoint(resume, Checkpoints(self.checkpoints), processes=processes)

    def begin(self) -> None:
        """Makes the folder, or removes an earlier run's files except model and logs; writes
        ``run.json`` and an empty ``metrics.jsonl``."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in (*self.path.glob("metrics.superseded-*"), *self.path.glob("run.superseded-*")):
            path.unlink()
        for name in _LOCAL:
            (self.path / name).unlink(missing_ok=True)
        removed = (self.ledger, self.checkpoints, self.path / "completions")
        for path in (*removed, *self.path.glob("checkpoints.superseded-*")):
            shutil.rmtree(path, ignore_errors=True)
        self.write("run.json", self.config)
        self.metrics.write_text("")
        self._counted = (0, 0)

    def resume(self, checkpoint: Path | None, rows: int | None = None) -> None:
        """Makes the files those of a run that has just written ``checkpoint``; with None, or the
        checkpoint of another folder, those of a run that has not begun. Later metrics and
        checkpoints are moved, not removed.

        Args:
            rows: the number of metrics' lines at the checkpoint; later lines may have its step.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        step = step_of(checkpoint) if checkpoint is not None and self.owns(checkpoint) else -1
        self._supersede_metrics(step, rows)
        Checkpoints(self.checkpoints).supersede(step)
        if self._is_run() and _is_other(self.read("run.json"), _as_json(self.config)):
            old = self.path / "run.json"
            old.replace(free_name(old, "superseded"))
        self.write("run.json", self.config)

    def owns(self, checkpoint: Path | None) -> bool:
        """Whether a checkpoint is of the run in this folder."""
        if checkpoint is None:
            return False
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def count_rows(self) -> int:
        """Counts the lines of the metrics. They only grow, so nothing is read twice."""
        if not self.metrics.is_file():
            return 0
        with self.metrics.open("rb") as file:
            file.seek(self._counted[0])
            lines = self._counted[1] + sum(1 for _ in file)
            self._counted = (file.tell(), lines)
        return lines

    def _supersede_metrics(self, step: int, rows: int | None) -> None:
        """Moves metrics after ``step``, or behind the first ``rows``, and an unfinished line."""
        text = self.metrics.read_text(encoding="utf-8") if self.metrics.is_file() else ""
        kept: list[str] = []
        later: list[str] = []
        for number, line in enumerate(text.splitlines(keepends=True)):
            stays = _step_in(line) <= step and (rows is None or number < rows)
            (kept if stays else later).append(line)
        if later:
            write_file(free_name(self.metrics, "superseded"), "".join(later), sync=True)
        write_file(self.metrics, "".join(kept), sync=True)
        self._counted = (0, 0)

    def sync(self) -> None:
        """Waits until the disk has the metrics."""
        if self.metrics.is_file():
            sync_file(self.metrics)

    def write_model(self, save: Callable[[Path], object]) -> None:
        """Replaces ``model/``.

        Args:
            save: writes model, tokenizer and card to the folder that it gets.
        """
        with new_folder(self.model) as folder:
            save(folder)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON object to a file."""
        write_file(self.path / name, json.dumps(content, indent=2, default=str) + "\n")

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes JSON objects to a file, one per line."""
        write_file(self.path / name, "".join(json.dumps(row, default=str) + "\n" for row in rows))

    def write_summary(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Writes results and configuration to ``summary.json``; returns them as one dict."""
        summary = {**results, **self.config}
        self.write("summary.json", summary)
        return summary

    def write_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.write_rows("samples.jsonl", rows)

    def write_page(self, html: str) -> None:
        """Writes ``report.html``, in a folder that is made if it is not there."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_file(self.page, html)

    def write_report(self, figure: Any) -> None:
        """Writes a figure of matplotlib to ``report.png``, in a folder that is made if needed."""
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.path / ".report.png"
        figure.savefig(part)
        part.replace(self.report)

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
        """Reads ``metrics.jsonl``, a dict per line; empty if there is none."""
        return _rows(self.metrics)

    def samples(self) -> list[dict[str, Any]]:
        """Reads ``samples.jsonl``, a dict per line; empty if there is none."""
        return _rows(self.path / "samples.jsonl")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Reads JSON objects from a file, one per line; none if there is no such file. A last line that
    a killed run has not written to its end is left out; another one that is no JSON object raises
    ValueError, which names its number."""
    if not path.is_file():
        return []
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):  # the last
                    break
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object")
            rows.append(row)
    return rows


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _step_in(line: str) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _is_other(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a ``run.json`` has other settings, apart from the folder where it was started."""
    one, other = ({k: v for k, v in x.items() if k != STARTED_IN} for x in (before, now))
    return bool(before) and one != other


def _as_json(content: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(content, default=str))
