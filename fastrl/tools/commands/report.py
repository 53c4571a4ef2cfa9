"""``fastrl report``: figures, results and samples of runs, as a page and on the console."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

from fastrl.run.folder import RunFolder
from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands import COMMANDS
from fastrl.tools.commands.flags import UsageError, own_parser
from fastrl.tools.reports.panels import COLOURS
from fastrl.tools.reports.report import (
    results_table,
    samples_table,
    write_overlay,
    write_page,
    write_report,
)
from fastrl.tools.reports.trainer_folder import open_run

# Modules and configurations of runs that programs made, as in COMMANDS.
_CONFIGS = {
    "train": ("config", ("PPOConfig",)),
    "SFTTrainer": ("trainers.sft", ("SFTConfig",)),
    "RewardTrainer": ("trainers.reward", ("RewardConfig",)),
    **{
        f"{name}Trainer": (f"trainers.{part}.{name.lower()}_config", (f"{name}Config",))
        for part, names in (("groups", ("GRPO", "RLOO")), ("pairs", ("DPO", "KTO")))
        for name in names
    },
}


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("report", __doc__)
    parser.add_argument(
        "folders", nargs="+", metavar="RUN", help="A command's --output, or a trainer's output_dir."
    )
    parser.add_argument(
        "--output",
        help="Folder for report.html, and of several runs report.png [the run's own; of several "
        "runs: report, beside the first].",
    )
    parser.add_argument("--samples", type=int, default=8, help="Samples to print [8].")
    return parser


def run_report(arguments: Sequence[str]) -> int:
    """Redraws ``report.png`` of each run, writes ``report.html``, and prints results side by side;
    of a single run also samples before and after training.

    The page of one run is written into its folder; that of several, with all of them in its figures
    and in a ``report.png`` beside it, into ``report`` next to the first; or into ``--output``.
    """
    flags = make_parser().parse_args(list(arguments))
    console, folders = run_console(), []
    for folder in flags.folders:
        if len(flags.folders) > 1 and _is_report(folder):
            console.print(plain(f"left out: {folder}, which holds a report of several runs"))
        else:
            folders.append(folder)
    runs = [open_run(folder) for folder in folders]
    target = _target(runs, flags.output)
    for run in runs:
        console.print(plain(f"drawn: {write_report(run)}"), soft_wrap=True)
    if len(runs) > len(COLOURS):
        console.print(plain(f"{len(runs)} runs share {len(COLOURS)} colours"))
    if len(runs) > 1:
        console.print(plain(f"drawn: {write_overlay(runs, target)}"), soft_wrap=True)
    console.print(plain(f"page:  {write_page(runs, target, defaults_of)}"), soft_wrap=True)
    samples = runs[0].samples()
    if len(runs) == 1 and samples and flags.samples > 0:
        console.print(samples_table(samples, flags.samples))
    console.print(results_table(runs))
    return 0


def defaults_of(folder: RunFolder) -> dict[str, Any]:
    """The defaults of a run's settings, by name; {} where its command or trainer is unknown."""
    command = str(folder.config.get("command"))
    module, names = {**COMMANDS, **_CONFIGS}.get(command, ("", ()))[:2]
    kinds = [getattr(importlib.import_module(f"fastrl.{module}"), name) for name in names]
    defaults = {}
    for field in (field for kind in kinds for field in dataclasses.fields(kind)):
        factory: Any = field.default_factory
        defaults[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return defaults


def _is_report(path: str) -> bool:
    """Whether a folder holds the report of several runs, written by this command, and no run."""
    if not RunFolder(path).page.is_file():
        return False
    try:
        open_run(path)
    except FileNotFoundError:
        return True
    return False


def _target(runs: Sequence[RunFolder], output: str | None) -> RunFolder:
    if output is None and len(runs) == 1:
        return runs[0]
    target = RunFolder(runs[0].path.parent / "report" if output is None else output)
    target.check()
    is_the_run = len(runs) == 1 and runs[0].path.resolve() == target.path.resolve()
    if target.metrics.exists() and not is_the_run:
        raise UsageError(f"{target.name} is a run's own folder: name another with --output")
    return target
