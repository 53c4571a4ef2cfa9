"""Finds a checkpoint of transformers' Trainer, and reads and writes its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from fastrl.run.checkpoints import (
    MANIFEST,
    OF_TRANSFORMERS,
    BadCheckpoint,
    Checkpoints,
    find_checkpoint,
    names_a_folder,
)
from fastrl.run.files import NO_PICKLE
from fastrl.run.processes import OneProcess, Processes
from fastrl.run.state import save_tree


def find_trainer_checkpoint(
    resume: Any, checkpoints: Checkpoints, processes: Processes | None = None
) -> Path | None:
    """The checkpoint to resume from, see :func:`fastrl.run.checkpoints.find_checkpoint`. A folder
    that is named may also be a checkpoint without a manifest, which transformers has written."""
    processes = processes or OneProcess()
    if processes.from_main(names_a_folder(resume) and is_foreign(Path(resume))):
        return Path(resume)
    return find_checkpoint(resume, checkpoints, OF_TRANSFORMERS, processes)


def is_foreign(path: Path) -> bool:
    """Whether transformers alone has written a checkpoint."""
    return (path / OF_TRANSFORMERS.file).is_file() and not (path / MANIFEST).exists()


def check_torch_files(checkpoint: Path) -> None:
    """Reads the states of optimizer, schedule, scaler and random generators, which transformers
    writes with torch.save; their tensors stay on the disk, and code in them is not executed.

    Raises:
        BadCheckpoint: a file that holds more than tensors and plain values, or is damaged; weights
            that are pickles alone, without safetensors.
    """
    pickled = [*checkpoint.glob("pytorch_model*.bin"), *checkpoint.rglob("adapter_model.bin")]
    for path in pickled:
        if not any(path.parent.glob("*.safetensors")):
            raise BadCheckpoint(f"resume: {path}: {NO_PICKLE}")
    names = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
    for path in (path for name in names for path in sorted(checkpoint.glob(name))):
        try:
            with safe_globals():
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise BadCheckpoint(
                f"resume: {path} cannot be read as tensors and plain values ({first}); nothing in "
                "it was executed"
            ) from error


def shapes_of(path: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a safetensors file, by their names.

    Raises:
        BadCheckpoint: a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise BadCheckpoint(f"resume: {path} is damaged: {error}") from error


def save_state(state: TrainerState, path: Path) -> None:
    """Writes ``trainer_state.json`` as transformers does, but a line for each log, and without a
    copy of all logs in memory: a long run has many, and every save writes them."""
    rest = json.dumps({**vars(state), "log_history": []}, indent=2, sort_keys=True)
    before, name, after = rest.partition('"log_history": [')
    with path.open("w", encoding="utf-8") as file:
        file.write(before + name)
        for i, log in enumerate(state.log_history):
            file.write(f"{',' if i else ''}\n    {json.dumps(log, sort_keys=True)}")
        file.write(f"{after}\n")


def folder_of(process: int) -> str:
    """The name of a process's folder in a checkpoint."""
    return f"process-{process}"


def save_process(state: Mapping[str, Any], checkpoint: Path, process: int) -> None:
    """Writes the state of one process to its folder in a checkpoint."""
    folder = checkpoint / folder_of(process)
    folder.mkdir(parents=True, exist_ok=True)
    save_tree(state, folder)
