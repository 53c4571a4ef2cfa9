"""How a training run is saved: not at all, or in a folder, from which it can be resumed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from fastrl.models.sharding import is_spread
from fastrl.run.callbacks import Evaluation
from fastrl.run.checkpoints import Checkpoints, read_manifest, step_of, warn_of_another_machine
from fastrl.run.folder import RunFolder
from fastrl.run.metrics import MetricsCallback, MetricsFile
from fastrl.run.processes import OneProcess, Processes
from fastrl.run.random_state import random_state, restore_random_state, same_state
from fastrl.run.state import load_tree, save_tree
from fastrl.run.stopping import Stopped
from fastrl.trainers.driver import StateLost
from fastrl.trainers.ppo.roles import Resumable, Run


class Saving(Protocol):
    """What a run does with its state."""

    @property
    def ledger_folder(self) -> Path | None:
        """The folder of the ledger in the run's output; None without an output."""

    def opened(self, loop: Run) -> AbstractContextManager[bool]:
        """Context of the run; yields whether the run goes on from a checkpoint. With a folder it
        raises the errors of :meth:`RunFolder.claim` and ``find_checkpoint``."""

    def mark(self) -> None:
        """Keeps random states and numbers of steps before a next step, for :meth:`save_before`."""

    def save_if_due(self, step: int, *, last: bool, stops: bool) -> bool:
        """Saves the state after a step where that is due or the run stops; returns if it did."""

    def save_to_stop(self) -> None:
        """Saves the state after the latest step, unless it is saved already."""

    def stopped(self) -> Stopped:
        """The exception that a run raises when it was asked to stop."""

    def save_before(self, error: BaseException) -> Path | None:
        """See :class:`fastrl.trainers.driver.Driven`."""

    def settings(self) -> dict[str, Any]:
        """The settings that must be the same in all processes."""


class NotSaved:
    """A run without a folder."""

    ledger_folder: Path | None = None

    def __init__(self, trainer: Resumable):
        self.trainer = trainer

    @contextlib.contextmanager
    def opened(self, loop: Run) -> Iterator[bool]:
        yield False

    def mark(self) -> None:
        pass

    def save_if_due(self, step: int, *, last: bool, stops: bool) -> bool:
        return False

    def save_to_stop(self) -> None:
        pass

    def stopped(self) -> Stopped:
        step = self.trainer.current_step
        return Stopped(f"stopped after step {step}; nothing was saved, as there is no output")

    def save_before(self, error: BaseException) -> Path | None:
        return None

    def settings(self) -> dict[str, Any]:
        return {"output": None}


class SavedInFolder:
    """A run with a folder: metrics and checkpoints are written there.

    A checkpoint is written after every ``save_every`` steps and the last one; when the run is asked
    to stop; and after an exception, with the state before the step that failed, unless that step
    has begun to change weights.

    Args:
        save_every: steps between two checkpoints; 0: only when the run is stopped, or fails.
        keep_last: number of checkpoints to keep; 0 keeps all.
        resume: True or "latest": the newest good checkpoint of the folder, or the beginning where
            there is none; or the folder of a checkpoint or a run.
        overwrite: remove an earlier run in the folder; its saved model stays.
    """

    def __init__(
        self,
        trainer: Resumable,
        folder: RunFolder,
        save_every: int,
        keep_last: int,
        resume: bool | str | Path,
        overwrite: bool,
    ):
        self.trainer, self.folder = trainer, folder
        self.processes = trainer.processes
        self.save_every, self.resume, self.overwrite = save_every, resume, overwrite
        self.checkpoints = Checkpoints(folder.checkpoints, keep_last or None)
        self.ledger_folder: Path | None = folder.ledger
        self._loop: Any = None
        self._random: list[dict[str, Any]] = []  # states of all processes before the next step
        self._begun = (-1, -1)  # the trainer's current_step and steps_begun before the next step

    @contextlib.contextmanager
    def opened(self, loop: Run) -> Iterator[bool]:
        self._loop = loop
        self.folder.config["code"] = loop.code
        is_main = self.processes.is_main
        with contextlib.ExitStack() as stack:
            with self.processes.together():
                # A command has claimed the folder before it loaded a model.
                if is_main and not self.folder.lock.held:
                    claim = self.folder.claim(resume=self.resume, overwrite=self.overwrite)
                    stack.enter_context(claim)
            resume = self.processes.from_main(self.resume)
            checkpoint, rows = self.folder.checkpoint(resume, self.processes), None
            with self.processes.together():
                if checkpoint is not None:
                    manifest, state = read_manifest(checkpoint), load_tree(checkpoint)
                    loop.check_state(state)
                    self.trainer.load_state_dict(state)
                    loop.load_state_dict(state["loop"])
                    rows = state["loop"]["rows"]
                    self.trainer.products.adopt(manifest["machine"])
                    warn_of_another_machine(manifest)
                if is_main and self.resume:
                    self._resume(loop, checkpoint, rows)
                elif is_main:
                    self.folder.begin()
            if is_main:
                loop.callbacks.append(MetricsCallback(MetricsFile(self.folder.metrics)))
            self._random = self.processes.objects(random_state())
            yield checkpoint is not None

    def _resume(self, loop: Run, checkpoint: Path | None, rows: int | None) -> None:
        """Makes the folder's records those of the run up to its checkpoint."""
        done = self.trainer.current_step
        if checkpoint is not None and done >= loop.last_step:  # no step is left for new settings
            self.folder.keep_config()
        owned = self.folder.owns(checkpoint)
        self.folder.resume(checkpoint, rows)
        if loop.ledger is not None:
            in_folder = loop.ledger.ledger.folder == self.folder.ledger
            loop.ledger.ledger.supersede(done if owned or not in_folder else 0)

    def mark(self) -> None:
        now, before = random_state(), self._random[self.processes.index]
        # Draws by keys move no generator: then the processes exchange no state.
        changed = self.processes.objects(None if same_state(now, before) else now)
        self._random = [new or old for new, old in zip(changed, self._random, strict=True)]
        self._begun = self.trainer.current_step, self.trainer.steps_begun

    def save_if_due(self, step: int, *, last: bool, stops: bool) -> bool:
        due = bool(self.save_every) and (last or step % self.save_every == 0)
        if due or stops:
            self.save()
        return due or stops

    def save_to_stop(self) -> None:
        if not self._is_there(self.trainer.current_step):
            self.save()

    def settings(self) -> dict[str, Any]:
        return {"output": "a folder", "save_every": self.save_every, "resume": bool(self.resume)}

    def save(self) -> Path:
        """Writes a checkpoint of the state after the last complete step; returns its path."""
        self._write(self.trainer.state_dict(), self.processes)
        return self.checkpoints.path(self.trainer.current_step)

    def _write(self, state: dict[str, Any], processes: Processes) -> None:
        """Writes a checkpoint; ``processes`` are those that write: all, or the main one alone."""
        with self.checkpoints.new(self.trainer.current_step, processes=processes) as folder:
            if processes.is_main:
                self.folder.sync()
                if self._loop.ledger is not None:
                    self._loop.ledger.ledger.flush(sync=True)
                loop = {**self._loop.state_dict(), "rows": self.folder.count_rows()}
                state = {**state, "loop": loop}
            save_tree(state, folder, processes)

    def save_before(self, error: BaseException) -> Path | None:
        """See :class:`fastrl.trainers.driver.Driven`. Other processes may have ended, so that only
        a run whose weights are spread over them needs anything from them."""
        step, updates = self.trainer.current_step, self.trainer.steps_begun
        random = [random_state()]  # after a step, other processes' states are not known
        if (step, updates) == self._begun:
            random = self._random
            restore_random_state(random[self.processes.index])
        elif step == self._begun[0]:
            raise StateLost(f"step {step + 1} failed within its update; {self._newest()}")
        if self._is_there(step):
            return None
        if is_spread(self.trainer.model):
            if not self.processes.all_know(error):
                raise RuntimeError(
                    "its weights are spread over processes, of which one has ended or failed by "
                    f"itself; {self._newest()}"
                )
            return self.save()
        if not self.processes.is_main:
            return None
        self._write(self.trainer.state_dict(random), OneProcess())
        return self.checkpoints.path(step)

    def stopped(self) -> Stopped:
        step = self.trainer.current_step
        return Stopped(
            f"stopped after step {step}; saved: {self.checkpoints.path(step)}; --resume "
            "(resume=True) continues"
        )

    def _is_there(self, step: int) -> bool:
        return any(step_of(path) == step for path in self.checkpoints.paths())

    def _newest(self) -> str:
        paths = self.checkpoints.paths()
        return f"the last checkpoint is {paths[-1]}" if paths else "there is no checkpoint"


def make_saving(
    trainer: Resumable,
    output: str | Path | RunFolder | None,
    save_every: int,
    keep_last: int,
    resume: bool | str | Path,
    overwrite: bool,
) -> Saving:
    """Makes the saving for arguments of ``PPOTrainer.train``; ValueError for those that clash."""
    if output is None:
        if resume or overwrite:
            name = "resume" if resume else "overwrite"
            raise ValueError(f"{name} needs a folder: pass output")
        return NotSaved(trainer)
    if not isinstance(output, RunFolder):
        config = {
            "command": "train",
            "title": f"{trainer.config.model_name}: {trainer.config.title}",
            "settings": trainer.config.to_dict(),
        }
        output = RunFolder(output, config)
    return SavedInFolder(trainer, output, save_every, keep_last, resume, overwrite)


def evaluations_as_tree(evaluations: list[Evaluation]) -> list[dict[str, Any]]:
    """Evaluations for a checkpoint, without their prompts, which the resumed run has itself."""
    return [
        {k: v for k, v in dataclasses.asdict(one).items() if k != "prompts"} for one in evaluations
    ]


def evaluations_from_tree(tree: list[Mapping[str, Any]], prompts: list[str]) -> list[Evaluation]:
    return [Evaluation(prompts=prompts if one["completions"] else [], **one) for one in tree]
