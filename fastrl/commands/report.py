"""``fastrl report``: the figure and the results of runs, from their folders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from fastrl.commands.flags import UsageError
from fastrl.run.folder import RunFolder
from fastrl.run.report import results_table, run_console, samples_table, write_report


def run_report(arguments: Sequence[str]) -> None:
    """Redraws ``report.png`` of each run, and prints their results side by side; of a single run
    also samples before and after training.

    Raises:
        UsageError: no folder, or an unknown flag.
        FileNotFoundError: a folder without a run.
        ValueError: a run's file that cannot be read.
    """

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message} (see fastrl report --help)")

    parser = Parser(prog="fastrl report", description=__doc__.partition(": ")[2])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="A command's --output.")
    parser.add_argument("--samples", type=int, default=8, help="Samples to show [8].")
    flags = parser.parse_args(list(arguments))
    runs = [RunFolder.open(folder) for folder in flags.folders]
    console = run_console()
    for run in runs:
        console.print(f"drawn: {write_report(run)}")
    samples = runs[0].samples()
    if len(runs) == 1 and samples and flags.samples > 0:
        console.print(samples_table(samples, flags.samples))
    console.print(results_table(runs))
