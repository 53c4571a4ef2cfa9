"""`python -m benchmarks device`: all that a GPU has to say, unattended: right first, then how fast.

Stages, each a command of its own with a limit of time and a log: the kernels' tests, compiled; the
tests of all that trains and generates; then `gpu`, `tune`, `rollout`, `ppo` and `reference`. One
that fails or runs out of its time costs the others nothing. On a machine that is lent for minutes,
`--only` makes several calls of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.before import record
from benchmarks.before.ncu import sources

LEAST = 1.0  # minutes: with less, a stage is not begun
GRACE = 30.0  # seconds for a stage to save what it has, beyond its limit
TAIL = 12  # lines of a failed stage's log that are shown


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command of this Python: `{minutes}`, `{results}`, `{jobs}` and `{peer}` are filled in."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]


# What a driver or another version warns of is no failure, and a package that is not there costs its
# own tests alone.
_PYTEST = (
    "-m", "pytest", "--numprocesses", "{jobs}", "--quiet", "--maxfail", "40", "-W", "default",
    "--continue-on-collection-errors",
)  # fmt: skip
_BENCHMARK = ("--minutes", "{minutes}", "--results", "{results}")
STAGES = (
    Stage("kernels", "the kernels' tests, compiled", 9, (*_PYTEST, "tests/kernels")),
    Stage(
        "trainers", "the tests of rollouts, references and trainers, TRL's golden figures too", 7,
        (*_PYTEST, *(f"tests/{x}" for x in (
            "rollout", "references", "trainers", "models", "supervised", "alignment",
        ))),
    ),
    Stage("gpu", "gates and single ops", 9, ("-m", "benchmarks.before", "gpu", *_BENCHMARK)),
    Stage("tune", "what could be faster", 8, ("-m", "benchmarks.before", "tune", *_BENCHMARK)),
    Stage(
        "rollout", "generation", 9,
        ("-m", "benchmarks.before", "rollout", "--rounds", "3", *_BENCHMARK),
    ),
    Stage(
        "ppo", "a whole PPO iteration by reference", 9,
        ("-m", "benchmarks.before", "ppo",
         "--repeats", "3", "--reference", "copy", "adapter", "trunk",
         "{peer}", *_BENCHMARK),
    ),
    Stage(
        "reference", "PPO's reference, by the way it is kept", 6,
        ("-m", "benchmarks.before", "reference", "--rounds", "3", *_BENCHMARK),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a stage ended: its exit code, or why it was not run; None: it was killed."""

    code: int | str | None
    seconds: float = 0.0
    log: Path | None = None

    @property
    def fine(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        if isinstance(self.code, str):
            return f"not run: {self.code}"
        how = "ended" if self.fine else "killed" if self.code is None else f"FAILED ({self.code})"
        return f"{how} after {self.seconds:.0f} s, {self.log}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks device`."""
    names = tuple(stage.name for stage in STAGES)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="STAGE",
        help="; ".join(f"{stage.name}: {stage.what}" for stage in STAGES),
    )
    total = sum(stage.minutes for stage in STAGES)
    parser.add_argument("--minutes", type=float, default=total, help=f"in all; default {total:g}")
    parser.add_argument("--results", type=Path, default=record.RESULTS, metavar="FOLDER")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="default: RESULTS/logs")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument(
        "--peer-python", metavar="PATH", help="an interpreter that has TRL 0.11.4; else eager"
    )


def run(args: argparse.Namespace) -> int:
    """0 where every stage ended well, 1 otherwise, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("no GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    logs = args.logs or args.results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in STAGES if stage.name in args.only]
    ended = carry_out(stages, args, logs)
    print("\n" + "\n".join(f"{name}: {how}" for name, how in ended.items()))
    return 0 if all(how.fine for how in ended.values()) else 1


def carry_out(stages: Sequence[Stage], args: argparse.Namespace, logs: Path) -> dict[str, Ended]:
    """The stages in their order, each within its minutes and what is left of all."""
    stop = time.monotonic() + 60 * args.minutes
    ended = {}
    for stage in stages:
        minutes = min(stage.minutes, (stop - time.monotonic()) / 60)
        if minutes < LEAST:
            ended[stage.name] = Ended(f"{max(minutes, 0):.1f} minutes were left")
            continue
        command = [sys.executable, *filled(stage, args, minutes)]
        print(f"{stage.name}: {' '.join(command[1:])}", flush=True)
        log = logs / f"{stage.name}.log"
        ended[stage.name] = run_stage(command, log, 60 * minutes + GRACE)
        print(f"{stage.name}: {ended[stage.name]}", flush=True)
        if not ended[stage.name].fine:
            print(*log.read_text().splitlines()[-TAIL:], sep="\n", flush=True)
    return ended


def filled(stage: Stage, args: argparse.Namespace, minutes: float) -> list[str]:
    """The command's words; `{peer}` may be several."""
    peer = ["--peer-python", args.peer_python] if args.peer_python else ["--peer", "eager"]
    values = {"minutes": f"{minutes:.1f}", "results": str(args.results), "jobs": str(args.jobs)}
    words: list[str] = []
    for word in stage.command:
        words += peer if word == "{peer}" else [word.format(**values)]
    return words


def run_stage(command: Sequence[str], log: Path, seconds: float) -> Ended:
    """The command in a process group of its own, with all that it says in a file."""
    began = time.monotonic()
    paths = [*map(str, sources()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    code: int | None = None
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=record.ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # its workers too, whatever ended it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - began, log)
