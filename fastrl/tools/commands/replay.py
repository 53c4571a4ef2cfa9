"""``fastrl replay``: draws a sample of a run again, and compares it with the recorded one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastrl.run.folder import STARTED_IN, RunFolder
from fastrl.run.ledger import read_facts
from fastrl.run.terminal import run_console
from fastrl.tools.commands.flags import own_parser
from fastrl.tools.commands.samples import choose, ledger_of, record_table
from fastrl.tools.reports.trainer_folder import open_run

if TYPE_CHECKING:
    from fastrl.collect.compare_replay import Replayed, ReplayedSample
    from fastrl.config import PPOConfig
    from fastrl.tools.commands.align import AlignFlags, AlignJob
    from fastrl.tools.commands.distill import DistillFlags, DistillJob
    from fastrl.tools.commands.ppo import PPOJob

_JOBS = {
    "ppo": ("ppo", "PPOJob"),
    "grpo": ("ppo", "GRPOJob"),
    "align": ("align", "AlignJob"),
    "distill": ("distill", "DistillJob"),
}
# Of commands on transformers' Trainer: the class of their flags, and the module that replays.
_FITTED = {
    "align": ("AlignFlags", "fastrl.alignment.replay"),
    "distill": ("DistillFlags", "fastrl.trainers.groups.replay"),
}
# Modules that replay runs of trainers that have no command.
_IN_PYTHON = {
    "GRPOTrainer": "fastrl.trainers.groups.replay",
    "RLOOTrainer": "fastrl.trainers.groups.replay",
}


def run_replay(arguments: Sequence[str]) -> int:
    """Makes the trainer of a run, walks its updates up to a step, draws the step's samples, and
    prints how they compare with the ledger.

    Returns:
        0 where the sample, or without ``--sample`` each sample of the step, is the recorded one,
        bit for bit or within the tolerance that is printed; else 1.
    """
    flags = make_parser().parse_args(list(arguments))
    ledger = ledger_of(flags.run)
    row, _ = choose(ledger, step=flags.step, sample=flags.sample)  # raises if there is none
    folder = open_run(flags.run)
    replayed = _replayed(folder, flags.step)
    console = run_console()
    source = f"checkpoint-{replayed.begun_at}" if replayed.begun_at else "the run's beginning"
    plural = "" if replayed.walked == 1 else "s"
    console.print(f"step {replayed.step}, from {source}: {replayed.walked} update{plural}")
    if replayed.strayed is not None:
        console.print(f"updates were not the run's, first in {replayed.strayed}")
    if replayed.tolerance:
        console.print(
            "the run computed in batches of other sizes (of several processes, or with samples "
            "that dynamic sampling replaced), which round otherwise: log-probs and values within "
            f"{replayed.tolerance:.1e} count as the same"
        )
    if flags.sample is None:
        console.print("\n".join(_of_all(replayed)))
        return 0 if replayed.identical else 1
    sample = replayed.samples[flags.sample]
    console.print(record_table(row))
    console.print("\n".join(_of_one(flags.sample, sample)))
    return 0 if sample.identical else 1


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("replay", __doc__)
    parser.add_argument(
        "run", metavar="RUN", help="The --output of fastrl ppo, grpo, align or distill."
    )
    parser.add_argument("--step", type=int, required=True, metavar="N", help="Counted from 1.")
    parser.add_argument(
        "--sample", type=int, metavar="I", help="A sample of the step, from 0; by default all."
    )
    return parser


def _replayed(folder: RunFolder, step: int) -> Replayed:
    with working_directory(folder):
        job: Any = read_job(folder)
        home = importlib.import_module(type(job).__module__)
        if job.command in _FITTED:
            _, walks = _FITTED[job.command]
            # No annotator is called: its judgements are read from the ledger.
            unasked = [SimpleNamespace(statistics=dict)] * (job.command == "align")
            fitted = home.make_trainer(job, read_flags(folder, step), *unasked)
        else:
            from fastrl.models.load import load_tokenizer

            config = read_settings(folder, step)
            trainer = home.make_trainer(job, config, load_tokenizer(job.check_model()))
    if job.command in _FITTED:
        return importlib.import_module(walks).replay(fitted, folder.path, step)
    from fastrl.trainers.ppo.replay import replay

    return replay(trainer, folder, step, progress=True)


def read_job(folder: RunFolder) -> PPOJob | AlignJob | DistillJob:
    """The job of a run, read from its ``run.json``.

    Raises:
        ValueError: a run of another command or of a program, or with settings unknown here.
    """
    recorded = folder.config
    command = recorded.get("command")
    if command in _IN_PYTHON:
        raise ValueError(
            f"{folder.name} is of a {command} in a program, which alone can make it again: there, "
            f"from {_IN_PYTHON[command]} import replay; replay(trainer, {str(folder.path)!r}, STEP)"
        )
    if command not in _JOBS:
        raise ValueError(
            f"{folder.name} is not a run of fastrl {', '.join(_JOBS)}, which alone can be made "
            "again from run.json: in Python, replay of fastrl.trainers.ppo.replay, "
            "fastrl.trainers.groups.replay or fastrl.alignment.replay takes a trainer made as for "
            "the run"
        )
    module, kind = _JOBS[command]
    home = importlib.import_module(f"fastrl.tools.commands.{module}")
    return _made(getattr(home, kind), recorded["job"], folder)


def read_settings(folder: RunFolder, step: int) -> PPOConfig:
    """The trainer's settings at a step, by the ledger: those that a run is resumed with may differ
    from those it began with. Batch sizes are those of all processes together.

    Raises:
        ValueError: the ledger has settings that this version of fastrl does not know.
    """
    from fastrl.config import PPOConfig
    from fastrl.trainers.ppo.replay import process_count_of

    facts = read_facts(folder.ledger, step, step)[-1]
    settings = unflattened(facts["settings"])
    for name in ("batch_size", "mini_batch_size"):
        settings[name] *= process_count_of(facts)
    config = _made(PPOConfig, settings, folder)
    config.log_with = None
    return config


def read_flags(folder: RunFolder, step: int) -> AlignFlags | DistillFlags:
    """The settings of a run of ``fastrl align`` or ``distill`` at a step, see
    :func:`read_settings`."""
    command = folder.config["command"]
    home = importlib.import_module(f"fastrl.tools.commands.{command}")
    kind = getattr(home, _FITTED[command][0])
    facts = read_facts(folder.ledger, step, step)[-1]["settings"]
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    names = {name for name in names if not name.endswith("_token")}  # transformers hides these
    settings = {name: value for name, value in facts.items() if name in names}
    if command == "distill":
        batch = facts["per_device_train_batch_size"] * facts["steps_per_generation"]
        if facts["generation_batch_size"] != batch:
            raise ValueError(
                f"{folder.name} is a run of {facts['generation_batch_size'] // batch} processes, "
                "whose responses one process cannot draw again; what they were is in the ledger "
                "(fastrl samples)"
            )
        del settings["generation_batch_size"]
    else:
        settings["per_device_train_batch_size"] *= facts["processes"]
    changed: dict[str, Any] = {"report_to": "none", "push_to_hub": False}
    changed |= {"resume_from_checkpoint": None, "logging_strategy": "no", "disable_tqdm": True}
    return kind(**{**settings, **changed})


@contextlib.contextmanager
def working_directory(folder: RunFolder) -> Iterator[None]:
    """Context in the working directory of a run, from which the paths of its model, of an adapter's
    base and of users' files start. If it is gone, this process keeps its own working directory,
    with a warning if the model is not there either."""
    cwd, model = os.getcwd(), folder.config.get("job", {}).get("model", "")
    start = folder.config.get(STARTED_IN, cwd)
    if not Path(start).is_dir():
        if not Path(model).exists():
            warnings.warn(
                f"the folder where the run was started, {start}, is not there, and {cwd} has no "
                f"{model}: if that is a folder, and not a Hub id, run this command where it lies",
                stacklevel=3,
            )
        start = cwd
    os.chdir(start)
    try:
        yield
    finally:
        os.chdir(cwd)


def _made(kind: Any, settings: Mapping[str, Any], folder: RunFolder) -> Any:
    fields = {field.name: field.init for field in dataclasses.fields(kind)}
    unknown = [name for name in settings if name not in fields]
    if unknown:
        raise ValueError(
            f"{folder.name} has settings that this version of fastrl does not know "
            f"({', '.join(unknown)}): replay the run with the version that made it"
        )
    return kind(**{name: value for name, value in settings.items() if fields[name]})


def unflattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``PPOConfig.to_dict``: names with "/" as dicts in dicts."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.split("/")
        inner = nested
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return nested


def _of_one(number: int, sample: ReplayedSample) -> list[str]:
    if sample.identical:
        with_them = " with their log-probs" if sample.logprobs is not None else ""
        with_them += " and values" if sample.values is not None else ""
        same = f"identical{_but(sample.tolerance)}"
        return [f"sample {number}: {same}, {len(sample.completion_ids)} tokens{with_them}"]
    return [f"sample {number} DIFFERS:", *(f"  {line}" for line in sample.differences())]


def _of_all(replayed: Replayed) -> list[str]:
    numbered = list(enumerate(replayed.samples))
    other = [(number, sample) for number, sample in numbered if not sample.identical]
    but = _but(replayed.tolerance)
    lines = [f"{len(numbered) - len(other)} of {len(numbered)} samples are identical{but}"]
    return lines + [line for number, sample in other for line in _of_one(number, sample)]


def _but(tolerance: float) -> str:
    return " but for rounding" if tolerance else ""
