"""How a trainer on transformers' Trainer resumes: a checkpoint is found, checked and read, also one
that another number of processes has saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastrl.run.checkpoints import (
    MANIFEST,
    BadCheckpoint,
    Checkpoints,
    check_identity,
    check_weights,
    read_manifest,
    step_of,
    warn_of_another_machine,
)
from fastrl.run.folder import RunFolder
from fastrl.run.processes import Processes
from fastrl.run.random_state import random_state, random_state_kept
from fastrl.run.state import load_tree
from fastrl.run.transformers_files import (
    check_torch_files,
    find_trainer_checkpoint,
    folder_of,
    is_foreign,
    shapes_of,
)
from fastrl.run.transformers_settings import SIZES, warn_of_changes


@dataclass
class Resuming:
    """The run that resumes: what a checkpoint is compared with.

    Args:
        identity: facts that must be the same in the checkpoint.
        settings: settings that get a warning where the checkpoint's differ.
        samples: the number of samples in an optimizer step (of alignment: in a batch) of all
            processes, and the settings whose product it is.
        batch_size: samples in a batch of one process.
        joined: makes one state of a trainer from the states that several processes saved.
        check_foreign: raises BadCheckpoint where the trainer cannot go on from a checkpoint that
            transformers alone has written.
        adopt: gets facts of the checkpoint's machine; takes over its libraries of matrix products.
    """

    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    processes: Processes
    samples: tuple[int, str]
    batch_size: int
    joined: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
    check_foreign: Callable[[Path], None]
    adopt: Callable[[Mapping[str, Any]], None]

    def read(self, checkpoint: Path) -> Mapping[str, Any] | None:
        """This process's state in a checkpoint; None: transformers alone has written it.

        Raises:
            BadCheckpoint: a checkpoint of another run, or that cannot be read.
        """
        check_torch_files(checkpoint)
        state: Mapping[str, Any] | None = None
        if not (checkpoint / folder_of(0)).is_dir():
            self.check_foreign(checkpoint)
        else:
            folders = len(list(checkpoint.glob("process-*")))
            states = [load_tree(checkpoint / folder_of(i)) for i in range(folders)]
            first = states[0]
            facts = {k: v for k, v in self.identity.items() if k != "weights"}
            check_identity(first["identity"], facts)
            check_weights(first["identity"]["weights"], self.identity["weights"])
            self._check_processes(first)
            resized = _count_of(first) != self.processes.count
            warn_of_changes(first["settings"], self.settings, but=SIZES if resized else ())
            same = folders == self.processes.count == _count_of(first)
            step = step_of(checkpoint)
            state = states[self.processes.index] if same else self._of_others(states, step)
        if is_foreign(checkpoint):
            warnings.warn(
                f"resume: {checkpoint} has no {MANIFEST}, as those of transformers alone: it is "
                "not verified",
                stacklevel=4,
            )
        else:
            manifest = read_manifest(checkpoint)
            self.adopt(manifest["machine"])
            warn_of_another_machine(manifest)
        return state

    def _check_processes(self, state: Mapping[str, Any]) -> None:
        """Raises BadCheckpoint where a run of another number of processes had another number of
        samples together, see ``samples``."""
        count, now = _count_of(state), self.processes.count
        earlier, (samples, product) = state.get("samples"), self.samples
        if count != now and earlier != samples:
            raise BadCheckpoint(
                f"resume: the checkpoint's run had {count} process(es) and this one has {now}, so "
                f"that {product} must be {earlier or 'the same'} as in that run, and is {samples}: "
                f"set the sizes so, or start {count} process(es)"
            )

    def _of_others(self, states: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
        """This process's state, made of the states of a run with another number of processes, or
        with processes that saved none."""
        first, count, index = states[0], _count_of(states[0]), self.processes.index
        same = count == self.processes.count
        warnings.warn(
            f"resume: the run had {count} process(es), {len(states)} of which saved the state, and "
            f"has {self.processes.count}: the examples of its steps are the same, what "
            + ("your functions draw need not be" if same else "dropout draws in them is not"),
            stacklevel=5,
        )
        done, size = first["place"], first["settings"]["per_device_train_batch_size"] * count
        now = self.batch_size * self.processes.count
        since = torch.stack([state["losses"]["since_the_log"] for state in states]).mean(0)
        saved = index < len(states)
        return {
            **first,
            "place": {**done, "minibatches": -(-done["minibatches"] * size // now)},
            "losses": {**first["losses"], "since_the_log": since},
            "own": self.joined([state["own"] for state in states]),
            "random": states[index]["random"] if saved else self._new_draws(first["seed"], step),
        }

    def _new_draws(self, seed: int, step: int) -> dict[str, Any]:
        """The random state of a process that saved none in the checkpoint."""
        with random_state_kept():
            torch.manual_seed(seed + (self.processes.index << 32) + step)
            return random_state()


def find_to_resume(
    resume: str | Path | bool | None, checkpoints: Checkpoints, processes: Processes
) -> Path | None:
    """The checkpoint that a trainer is told to go on from; None: it begins anew. Raises
    FileNotFoundError if there is no checkpoint, BadCheckpoint if it is damaged."""
    if resume is None or resume is False:
        return None
    checkpoint = find_trainer_checkpoint(resume, checkpoints, processes)
    if checkpoint is None:
        raise FileNotFoundError(
            f"resume_from_checkpoint: there is no checkpoint in {checkpoints.folder}: name a "
            "checkpoint's folder, or leave it out to begin anew"
        )
    return checkpoint


def check_shapes(checkpoint: Path, model: Any) -> None:
    """Raises BadCheckpoint where a checkpoint's weights have other shapes than a model's."""
    weights = checkpoint / "model.safetensors"
    if weights.is_file():
        shapes = {name: list(x.shape) for name, x in model.state_dict().items()}
        for name, shape in shapes_of(weights).items():
            if shapes.get(name, shape) != shape:
                raise BadCheckpoint(
                    f"resume: {checkpoint} is of another model, whose {name} is {shape}, here "
                    f"{shapes[name]}: resume with the model that the run began with"
                )


def clear_the_way(
    checkpoint: Path | None,
    state: Mapping[str, Any] | None,
    checkpoints: Checkpoints,
    folder: RunFolder | None,
    *,
    saves: bool,
) -> None:
    """Moves aside records and checkpoints of steps to be done again, or of another run.

    Args:
        checkpoint, state: what the run resumes from; None: it begins anew.
        folder: a command's run folder, which has records.
        saves: whether checkpoints will be written.
    """
    if folder is not None:
        if checkpoint is not None:
            folder.resume(checkpoint, None if state is None else state["rows"])
    elif saves:
        folder_of_run = checkpoints.folder.absolute()
        of_run = checkpoint is not None and checkpoint.absolute().parent == folder_of_run
        step = step_of(checkpoint) if of_run and checkpoint is not None else -1
        moved = checkpoints.supersede(step)
        if moved is not None:
            what = f"later than {checkpoint}" if of_run else "of an earlier run"
            warnings.warn(
                f"output_dir {checkpoints.folder} holds checkpoints {what}: they are now in "
                f"{moved}",
                stacklevel=2,
            )


def _count_of(state: Mapping[str, Any]) -> int:
    """The number of processes of the run that a state is from."""
    return state.get("processes", state["identity"].get("processes"))
