"""`python -m benchmarks gpu`: tests and measurements on a GPU, unattended.

Each stage is a command with a limit of time, a log and a result file: the kernels' tests, compiled;
the tests of all that trains and generates; then ops, tunables and whole workloads. A stage that
fails or runs out of time does not stop the others; in the end the file of predictions is filled
with what was measured. On a machine that is available for minutes only,
`--only` names the stages of one call.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import ROOT, predict
from benchmarks.environments import source_tree
from benchmarks.results import RESULTS

LEAST = 1.0  # minutes: with less, a stage is not begun
GRACE = 30.0  # seconds for a stage to save what it has, beyond its limit
TAIL = 12  # lines of a failed stage's log that are shown


class Stage(NamedTuple):
    """A command of this Python: `{minutes}`, `{results}`, `{jobs}` and `{peer}` are filled in."""

    name: str
    what: str
    minutes: float
    command: tuple[str, ...]


# A warning of a driver or of another version is no failure, and a missing package costs only its
# own tests.
_PYTEST = ("-m", "pytest", "--quiet", "-W", "default")
_TESTS = (*_PYTEST, "--numprocesses", "{jobs}", "--maxfail", "40",
          "--continue-on-collection-errors")  # fmt: skip
_SAVED = ("--minutes", "{minutes}", "--results", "{results}")
_MEASURE = (*_PYTEST, "--device", "cuda", *_SAVED)
_THRICE = (*_MEASURE, "--rounds", "3")
_FOLDERS = ("rollout", "ref_model", "models", "ppo", "trainers", "alignment", "trl")

STAGES = (
    Stage("kernels", "the kernels' tests, compiled", 9, (*_TESTS, "tests/kernels")),
    Stage("trainers", "the tests of rollouts, references and trainers, TRL's golden figures too",
          7, (*_TESTS, *(f"tests/{name}" for name in _FOLDERS))),
    Stage("ops", "checks of the kernels, single ops", 9, (*_MEASURE, "benchmarks/test_ops.py")),
    Stage("tune", "what could be faster", 8, ("-m", "benchmarks.tunables", *_SAVED)),
    Stage("rollout", "generation", 9, (*_THRICE, "benchmarks/test_rollout.py")),
    Stage("ppo", "a whole PPO iteration", 9, (*_THRICE, "{peer}", "benchmarks/test_ppo.py")),
    Stage("ref_model", "PPO's reference, by the way it is kept", 6,
          (*_THRICE, "benchmarks/test_ref_model.py")),
    Stage("run", "what a run writes, beside its steps", 5, (*_THRICE, "benchmarks/test_run.py")),
    Stage("grpo", "GRPO steps beside TRL, where it is installed", 9,
          (*_THRICE, "benchmarks/test_grpo.py")),
    Stage("training", "SFT, DPO and scripts of TRL 1.x beside TRL, where it is installed", 9,
          (*_THRICE, "benchmarks/test_training.py", "benchmarks/test_scripts.py")),
)  # fmt: skip


class Ended(NamedTuple):
    """How a stage ended: its exit code, or why it was not run; None: it was killed."""

    code: int | str | None
    seconds: float = 0.0
    log: Path | None = None

    def __str__(self) -> str:
        if isinstance(self.code, str):
            return f"not run: {self.code}"
        how = {0: "ended", None: "killed"}.get(self.code, f"FAILED ({self.code})")
        return f"{how} after {self.seconds:.0f} s, {self.log}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks gpu`."""
    names = tuple(stage.name for stage in STAGES)
    stages = "; ".join(f"{stage.name}: {stage.what}" for stage in STAGES)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STAGE", help=stages
    )
    total = sum(stage.minutes for stage in STAGES)
    parser.add_argument("--minutes", type=float, default=total, help=f"in all; default {total:g}")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="default: RESULTS/logs")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument(
        "--peer-python", metavar="PATH", help="an interpreter that has TRL 0.11.4; else eager"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the stages in their order, each within its minutes and what is left of all; 0 where
    every stage ended well, 1 otherwise, 2 without a GPU."""
    if not torch.cuda.is_available():
        print(
            "no GPU here: torch.cuda.is_available() is False. On a machine without one, `pytest "
            "benchmarks` measures the CPU paths and `python -m tests.aot` compiles the kernels.",
            file=sys.stderr,
        )
        return 2
    logs = args.logs or args.results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + 60 * args.minutes
    ended = {}
    for stage in STAGES:
        if stage.name not in args.only:
            continue
        minutes = min(stage.minutes, (stop - time.monotonic()) / 60)
        if minutes < LEAST:
            ended[stage.name] = Ended(f"{max(minutes, 0):.1f} minutes were left")
            continue
        command = [sys.executable, *filled(stage, args, minutes)]
        print(f"{stage.name}: {' '.join(command[1:])}", flush=True)
        log = logs / f"{stage.name}.log"
        ended[stage.name] = run_stage(command, log, 60 * minutes + GRACE)
        print(f"{stage.name}: {ended[stage.name]}", flush=True)
        if ended[stage.name].code != 0:
            print(*log.read_text().splitlines()[-TAIL:], sep="\n", flush=True)
    if predict.fill_file(args.results):
        print(f"measurements beside predictions: {args.results / predict.FILE}", flush=True)
    print("\n" + "\n".join(f"{name}: {how}" for name, how in ended.items()))
    return 0 if all(how.code == 0 for how in ended.values()) else 1


def filled(stage: Stage, args: argparse.Namespace, minutes: float) -> list[str]:
    """The command's words; `{peer}` may be several, or none."""
    peer = ["--peer-python", args.peer_python] if args.peer_python else []
    values = {"minutes": f"{minutes:.1f}", "results": str(args.results), "jobs": str(args.jobs)}
    words: list[str] = []
    for word in stage.command:
        words += peer if word == "{peer}" else [word.format(**values)]
    return words


def run_stage(command: Sequence[str], log: Path, seconds: float) -> Ended:
    """The command in a process group of its own, with all its output in a file."""
    began = time.monotonic()
    code: int | None = None
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": source_tree(), "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:  # however it ended, its workers end too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - began, log)
