"""`python -m benchmarks ppo`: a whole PPO iteration on fastrl and on TRL's classic trainer.

Two workers (`ppo_worker.py`), one per library and each in its own environment, hold a trainer on
the same weights and queries. First a gate: both make the same two steps, and their statistics must
agree, or no time is printed. Then they take turns, fastrl, peer, fastrl, peer, …, one iteration at
a time (generate, then step), so that a machine that slows down slows both.

The result file: the header of `record.py`, and
{"versions": {"fastrl": {...}, "peer": {...}}, "peer", "shape": {...},
 "phases": {name: {"fastrl": [seconds], "peer": [seconds], "ratio": median of peer / fastrl}}}
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks import record, timing
from benchmarks.peer import PEERS, peer_python
from benchmarks.timing import spread

WORKER = Path(__file__).with_name("ppo_worker.py")
PHASES = {
    "generate": "generate",
    "forward_pass": "old and reference scores",
    "rewards_advantages": "rewards, advantages",
    "optimize_step": "update",
    "calc_stats": "statistics",
    "step": "step(), whole",
    "iteration": "iteration, whole",
}
RELATIVE, ABSOLUTE = 1e-3, 1e-5  # as the golden tests


@dataclasses.dataclass(frozen=True)
class Shape:
    """A GPT-2 and a batch: lengths in tokens, everything in fp32."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    vocabulary: int = 50257
    batch: int = 16
    query: int = 16
    response: int = 48
    mini_batch: int = 4
    epochs: int = 4
    threads: int = dataclasses.field(default_factory=lambda: os.cpu_count() or 1)


QUICK = Shape(layers=2, width=32, vocabulary=503, batch=4, query=8, response=8, mini_batch=2)


class WorkerError(RuntimeError):
    """A worker ended instead of answering."""


class Worker:
    """A trainer in a process of its own; idle, it waits on its input and costs nothing."""

    def __init__(self, python: Path, implementation: str, shape: Shape) -> None:
        self.implementation = implementation
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(
            [python, WORKER, "--impl", implementation, "--shape", json.dumps(vars(shape))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=_environment(implementation),
        )

    def ready(self) -> dict[str, str]:
        """Waits for the trainer; the versions it runs on."""
        return self._answer()["ready"]

    def ask(self, command: str) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        with contextlib.suppress(BrokenPipeError):  # it ended: _answer says how
            print(json.dumps({"command": command}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.log.seek(0)
        raise WorkerError(f"the {self.implementation} worker ended:\n{self.log.read()[-4000:]}")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.stdin.close()
        if error is not None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks ppo`."""
    parser.add_argument("--peer", choices=PEERS, default="trl==0.11.4")
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help="an interpreter that has the peer; without it, one is made under .benchmarks/",
    )
    parser.add_argument("--repeats", type=int, default=7, help="counted iterations of each side")
    parser.add_argument("--threads", type=int, metavar="N", help="of each side; default: all cores")
    parser.add_argument("--quick", action="store_true", help="a toy shape, twice; nothing is saved")
    parser.add_argument("--output", type=Path, metavar="PATH", help="the result file")
    parser.add_argument("--no-save", action="store_true", help="write no result file")


def run(args: argparse.Namespace) -> int:
    """Gate, measure, print, save. 1 where the two libraries disagree or a worker fails."""
    shape = QUICK if args.quick else Shape()
    if args.threads:
        shape = dataclasses.replace(shape, threads=args.threads)
    try:
        result = measure(args, shape)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    if result is None:
        return 1
    print(render(result))
    if not (args.no_save or args.quick):
        print(f"\nsaved as {record.save(result, args.output)}")
    return 0


def measure(args: argparse.Namespace, shape: Shape) -> dict[str, Any] | None:
    """The result of one run; None where the gate is red."""
    python = args.peer_python or peer_python(args.peer)
    header = record.header("ppo")
    record.warn_if_busy(header["machine"])
    with contextlib.ExitStack() as stack:
        fastrl = stack.enter_context(Worker(Path(sys.executable), "fastrl", shape))
        peer = stack.enter_context(Worker(python, args.peer.split("==")[0], shape))
        versions = {"fastrl": fastrl.ready(), "peer": peer.ready()}
        wrong = list(disagreements(*(w.ask("check")["statistics"] for w in (fastrl, peer))))
        if wrong:
            print(f"no figures: fastrl and {args.peer} disagree\n" + "\n".join(wrong))
            return None
        print(f"fastrl and {args.peer} agree on every statistic of two steps")
        repeats = 2 if args.quick else args.repeats
        timings = [
            {"fastrl": fastrl.ask("iterate"), "peer": peer.ask("iterate")}
            for _ in _progress(repeats + 1)
        ][1:]  # the first one warms up
    return {
        **header,
        "versions": versions,
        "peer": args.peer,
        "shape": vars(shape),
        "phases": {phase: summary(timings, phase) for phase in PHASES},
    }


def disagreements(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> Iterator[str]:
    """A line for each of the peer's statistics that fastrl lacks or has otherwise."""
    for step, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        for key, value in expected.items():
            if key not in found:
                yield f"step {step}: {key} is missing"
            elif not math.isclose(
                found[key], value, rel_tol=0, abs_tol=ABSOLUTE + RELATIVE * abs(value)
            ):
                yield f"step {step}: {key} is {found[key]:.7g}, the peer has {value:.7g}"


def summary(timings: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    """A phase's seconds on both sides, and the median of the ratios of neighbouring iterations."""
    seconds = {
        side: [timing[side]["seconds"][phase] for timing in timings] for side in ("fastrl", "peer")
    }
    return {**seconds, "ratio": statistics.median(ratios(seconds))}


def ratios(phase: dict[str, Any]) -> list[float]:
    """Peer's seconds over fastrl's, pair by pair."""
    return timing.ratios(phase["peer"], phase["fastrl"])


def render(result: dict[str, Any]) -> str:
    """The table for a terminal: medians, and their range in brackets."""
    machine, shape = result["machine"], result["shape"]
    peer = result["peer"]
    where = machine.get("accelerator", f"{machine['cores']} cores, threads: {shape['threads']}")
    lines = [
        f"{describe(shape)}",
        f"on {machine['cpu']} ({where}); "
        + "; ".join(
            f"{side}: " + ", ".join(f"{name} {v}" for name, v in versions.items())
            for side, versions in result["versions"].items()
        ),
        "",
        f"{'seconds, median (range)':<26}{'fastrl':>28}{peer:>28}{peer + ' / fastrl':>28}",
    ]
    for name, phase in result["phases"].items():
        columns = [spread(phase["fastrl"], ".3g"), spread(phase["peer"], ".3g")]
        columns.append(spread(ratios(phase), ".2f"))
        lines.append(f"{PHASES[name]:<26}{columns[0]:>28}{columns[1]:>28}{columns[2]:>28}")
    return "\n".join(lines)


def describe(shape: dict[str, Any]) -> str:
    """One sentence on what an iteration is."""
    return (
        f"GPT-2 of {shape['layers']} layers, width {shape['width']}, {shape['heads']} heads, "
        f"vocabulary {shape['vocabulary']}, fp32: {shape['batch']} samples of {shape['query']} + "
        f"{shape['response']} tokens, mini-batches of {shape['mini_batch']}, "
        f"{shape['epochs']} epochs"
    )


def _progress(rounds: int) -> Iterator[int]:
    for i in range(rounds):
        if sys.stderr.isatty():
            print(f"\riteration {i + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        yield i
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)


def _environment(implementation: str) -> dict[str, str]:
    """A worker's environment: fastrl's finds this source tree, the peer's finds nothing of ours."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONSAFEPATH"] = "1"  # else the worker's folder hides packages of equal names
    if implementation == "fastrl":
        sources = (record.ROOT, record.ROOT / "kernels" / "torch-ext")
        environment["PYTHONPATH"] = os.pathsep.join(map(str, sources))
    return environment
