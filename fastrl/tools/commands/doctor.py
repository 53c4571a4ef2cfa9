"""``fastrl doctor``: the usual illnesses of a run, what shows them, and what to change."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Sequence

from fastrl.run.terminal import plain, run_console
from fastrl.tools.commands.flags import own_parser
from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.doctor import Diagnosis, examine
from fastrl.tools.reports.trainer_folder import open_run


def make_parser() -> argparse.ArgumentParser:
    parser = own_parser("doctor", __doc__)
    parser.add_argument(
        "folder", metavar="RUN", help="A command's --output, or a trainer's output_dir."
    )
    parser.add_argument("--json", action="store_true", help="Print the findings as JSON.")
    return parser


def run_doctor(arguments: Sequence[str]) -> int:
    """Examines a run and prints the findings; returns 0 if it is healthy, 1 if it is ill."""
    flags = make_parser().parse_args(list(arguments))
    run = RunCurves.of(open_run(flags.folder))
    diagnosis = examine(run)
    if flags.json:
        print(as_json(run, diagnosis))
    else:
        _print(run, diagnosis)
    return 0 if diagnosis.healthy else 1


def as_json(run: RunCurves, diagnosis: Diagnosis) -> str:
    return json.dumps(
        {"run": run.name, "healthy": diagnosis.healthy, **dataclasses.asdict(diagnosis)}, indent=2
    )


def _print(run: RunCurves, diagnosis: Diagnosis) -> None:
    console = run_console()
    for finding in diagnosis.findings:
        where = "" if finding.stage is None else f" ({finding.stage})"
        console.print(plain(f"{finding.severity}: {finding.name}{where}"), style="bold")
        for text in (finding.figures, f"→ {finding.advice}", f"more: {finding.page}"):
            shown = textwrap.fill(
                text, console.width - 2, initial_indent="  ", subsequent_indent="    "
            )
            console.print(plain(shown), soft_wrap=True)
    verdict = "healthy" if diagnosis.healthy else "ill"
    console.print(plain(f"{run.name}: {verdict}; {diagnosis.checks}"))
