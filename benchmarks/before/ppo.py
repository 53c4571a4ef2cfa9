"""`python -m benchmarks ppo`: a whole PPO iteration on fastrl and on TRL's classic trainer.

Two workers (`ppo_worker.py`), one per library and each in its own environment, hold a trainer on
the same weights and queries. First a gate, in fp32 and with plain gradient descent: both make the
same two steps, and their statistics must agree, or no time is printed. Where they differ by more
than rounding, a PPO in float64 (`ppo_float64.py`) makes the same steps and decides: fastrl must be
within rounding of it, or nearer to it than the peer. What is timed has Adam, which makes whole
steps of rounding, and may be in bf16: there the statistics must be finite, and how far they lie
apart in bf16 is told. The sides take turns, fastrl, peer, fastrl, peer, …, one iteration at a time
(generate, then step), so that a machine that slows down slows both. All of it for each shape, once
for each way of keeping the reference; the file is written anew after each.

The result file: the header of `record.py`, and
{"versions": {"fastrl": {...}, "peer": {...}}, "peer", "threads", "left": {what: why},
 "cases": [{"shape": {...}, "goal": {...} or None, "references": [
  {"reference", "absent": None or why, "red": None or what disagrees, "took": seconds,
   "trained": numbers that the optimizer has,
   "differences": {statistic: {"difference", "of"}}, in bf16 alone,
   "memory": None or {"peak", "at_rest": {"fastrl": [bytes], "peer": [bytes]}},
   "phases": {name: {"fastrl": [seconds], "peer": [seconds],
                     "ratio": median of peer / fastrl}}}]}]};
older files have one "shape" and its "references" in place of "cases", or "phases", which mean a
copy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.before import ppo_gate, ppo_tables, record, suite
from benchmarks.before.ops import file_of, pick_device
from benchmarks.before.peer import Uninstallable, peer_python
from benchmarks.before.planner import Outcome, Step, carry_out
from benchmarks.before.ppo_cases import EAGER, PEERS, REFERENCES, UNKNOWN, Case, Shape, cases, exact
from benchmarks.before.timing import LEAST_ROUNDS
from benchmarks.before.worker import Absent, Worker, WorkerError

WORKER = Path(__file__).with_name("ppo_worker.py")
AT_END = 10.0  # seconds kept for the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks ppo`."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shape", metavar="TEXT", help="shapes whose name contains TEXT")
    parser.add_argument(
        "--peer",
        choices=tuple(PEERS),
        default="trl==0.11.4",
        help=f"{EAGER} is {PEERS[EAGER]}, and needs no environment of its own",
    )
    parser.add_argument(
        "--peer-python",
        type=Path,
        metavar="PATH",
        help="an interpreter that has the peer; without it, one is made under .benchmarks/",
    )
    parser.add_argument(
        "--reference",
        nargs="+",
        choices=tuple(REFERENCES),
        default=["copy"],
        help="how the reference is kept, one or more: "
        + "; ".join(f"{name} ({what})" for name, what in REFERENCES.items()),
    )
    parser.add_argument("--repeats", type=int, default=7, help="counted iterations of each side")
    parser.add_argument("--threads", type=int, metavar="N", help="of each side; default: all cores")
    parser.add_argument(
        "--minutes", type=float, metavar="M", help="nothing is begun that would not end in M"
    )
    parser.add_argument("--quick", action="store_true", help="toy shapes, twice; nothing is saved")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--results", type=Path, metavar="FOLDER", help="where result files go")
    where.add_argument("--output", type=Path, metavar="PATH", help="the result file")
    parser.add_argument("--no-save", action="store_true", help="write no result file")


def run(args: argparse.Namespace) -> int:
    """Gate, measure, print, save. 1 where the two libraries disagree or a worker fails, 2 where
    the request is wrong or there is no peer."""
    stop = monotonic() + 60 * args.minutes - AT_END if args.minutes else None
    device = pick_device(args.device)
    if device is None:
        print("no GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    if mistake := suite.wrong(args, "repeats", "threads", "minutes"):
        print(mistake, file=sys.stderr)
        return 2
    found = cases(device.type, quick=args.quick, threads=args.threads)
    chosen = [case for case in found if not args.shape or args.shape in case.shape.name]
    if not chosen:
        names = "\n".join(case.shape.name for case in found)
        print(f"no shape has {args.shape!r} in its name:\n{names}", file=sys.stderr)
        return 2
    try:
        python = Path(sys.executable) if args.peer == EAGER else args.peer_python
        python = python or peer_python(args.peer)
    except Uninstallable as why:
        print(f"{why}, or measure against --peer {EAGER}", file=sys.stderr)
        return 2
    session = Session(args, device.type, python, stop)
    left = stop - monotonic() if stop else float("inf")
    outcome = carry_out(session.steps(chosen), left, save=session.save, clock=monotonic)
    for name, why in {**outcome.left, **outcome.failed}.items():
        print(f"left: {name}: {why}")
    if session.path:
        print(f"\nsaved as {session.path}")
    return 1 if session.red or outcome.failed else 0


class Session:
    """The result of one run, as its steps fill it."""

    def __init__(
        self, args: argparse.Namespace, device: str, python: Path, stop: float | None
    ) -> None:
        self.args, self.device, self.python, self.stop = args, device, python, stop
        header = record.header("ppo")
        if device == "cpu":
            header["machine"].pop("accelerator", None)
        record.warn_if_busy(header["machine"])
        self.result: dict[str, Any] = {
            **header,
            "versions": {"fastrl": {}, "peer": {}},
            "peer": args.peer,
            "threads": args.threads or os.cpu_count() or 1,
            "left": {},
            "cases": [],
        }
        self.path: Path | None = None
        print(ppo_tables.render_head(self.result), flush=True)

    @property
    def red(self) -> bool:
        """Whether the sides disagree anywhere, or one failed."""
        return any(e["red"] for case in self.result["cases"] for e in case["references"])

    def steps(self, chosen: list[Case]) -> Iterator[Step]:
        """Each shape with each reference."""
        for case in chosen:
            for reference in dict.fromkeys(self.args.reference):
                yield Step(
                    f"{case.shape.name}, reference {reference}",
                    case.seconds,
                    lambda case=case, reference=reference: self.add(case, reference),
                )

    def save(self, outcome: Outcome) -> None:
        """Writes the file with all there is so far, unless all of it is red."""
        self.result["left"] = {**outcome.left, **outcome.failed}
        some = any(map(ppo_tables.timed, self.result["cases"]))
        if not (self.args.no_save or self.args.quick or (self.red and not some)):
            output = self.args.output or file_of(self.result, self.args.results)
            self.path = record.save(self.result, output)

    def add(self, case: Case, reference: str) -> None:
        """An entry, measured and printed."""
        began = monotonic()
        entry = {"reference": reference, "absent": None, "red": None, "trained": 0, "phases": {}}
        try:
            entry |= self.measure(case.shape, reference)
        except Absent as why:
            entry["absent"] = str(why)
        except WorkerError as error:
            print(error, file=sys.stderr)
            entry["red"] = str(error).strip().splitlines()[-1]
        entry["took"] = round(monotonic() - began, 1)
        found = self.result["cases"]
        if not found or found[-1]["shape"] != vars(case.shape):
            goal = dataclasses.asdict(case.goal) if case.goal else None
            found.append({"shape": vars(case.shape), "goal": goal, "references": []})
        found[-1]["references"].append(entry)
        print("\n" + ppo_tables.render(self.result, found[-1], entry), flush=True)

    def measure(self, shape: Shape, reference: str) -> dict[str, Any]:
        """What is found out of a shape with one reference.

        Raises:
            Absent: a side cannot have it.
            WorkerError: a side ended.
        """
        if self.args.peer == EAGER and reference != "copy":
            raise Absent(f"{EAGER}: it keeps a copy, and nothing else")
        unknown = UNKNOWN.get(reference, set())
        if wrong := self.apart(exact(shape), reference):
            return {"red": f"by gradient descent in fp32: {wrong}"}
        with self.workers(shape, reference) as sides:
            checks = ours, theirs = [side.ask("check") for side in sides.values()]
            found = [
                *ppo_gate.not_finite(*_stats(checks), unknown),
                *ppo_gate.trained_otherwise(ours["trained"], theirs["trained"]),
            ]
            if found:
                return {"red": self.refused(reference, found)}
            turns = list(self.turns(sides))
        found = {}
        if shape.dtype != "fp32":
            found = {"differences": ppo_gate.differences(*_stats(checks), unknown)}
        return {
            **found,
            "trained": sum(ours["trained"].values()),
            "memory": memory(turns, {"fastrl": ours, "peer": theirs}),
            "phases": {phase: summary(turns, phase) for phase in ppo_tables.PHASES},
        }

    def apart(self, shape: Shape, reference: str) -> str:
        """What is wrong with fastrl's two steps of gradient descent, in a line; nothing where the
        sides agree, or where float64 decides for fastrl."""
        unknown = UNKNOWN.get(reference, set())
        with self.workers(shape, reference, "sgd") as sides:
            checks = ours, theirs = [side.ask("check") for side in sides.values()]
        if lines := list(ppo_gate.trained_otherwise(ours["trained"], theirs["trained"])):
            return self.refused(reference, lines)
        lines = list(ppo_gate.disagreements(*_stats(checks), unknown))
        but = "".join(f", {key} aside" for key in sorted(unknown))
        who = f"{reference}: fastrl and {self.args.peer}"
        if not lines:
            print(f"{who} agree on every statistic of two steps{but}", flush=True)
            return ""
        with self.worker(Path(sys.executable), "float64", shape, reference, "sgd") as judge:
            judge.ready()
            found = judge.ask("check")["statistics"]
        print("\n".join(lines))
        if lines := list(ppo_gate.disagreements(*_stats(checks), unknown, found)):
            return self.refused(reference, lines)
        print(f"{who} differ as above, and float64 decides for fastrl{but}", flush=True)
        return ""

    def refused(self, reference: str, lines: list[str]) -> str:
        """Prints why there are no figures, and returns it in a line."""
        print(f"no figures for {reference}: fastrl or {self.args.peer} is wrong", *lines, sep="\n")
        return "; ".join(lines)

    @contextlib.contextmanager
    def workers(
        self, shape: Shape, reference: str, optimizer: str = "adam"
    ) -> Iterator[dict[str, Worker]]:
        """Both sides, ready to begin; notes the versions that they run on."""
        pythons = {"fastrl": Path(sys.executable), "peer": self.python}
        implementations = {"fastrl": "fastrl", "peer": self.args.peer.split("==")[0]}
        with contextlib.ExitStack() as stack:
            sides = {
                side: stack.enter_context(
                    self.worker(python, implementations[side], shape, reference, optimizer)
                )
                for side, python in pythons.items()
            }
            for side, worker in sides.items():
                self.result["versions"][side] |= worker.ready()
            yield sides

    def worker(
        self, python: Path, implementation: str, shape: Shape, reference: str, optimizer: str
    ) -> Worker:
        """A side of its own process."""
        return Worker(
            python,
            implementation,
            shape,
            *("--reference", reference, "--optimizer", optimizer),
            script=WORKER,
            device=self.device,
        )

    def turns(self, sides: dict[str, Worker]) -> Iterator[dict[str, Any]]:
        """Counted iterations of both sides, after one that warms up: fewer, but three, where time
        runs out."""
        rounds = 2 if self.args.quick else self.args.repeats
        for turn in range(rounds + 1):
            began = monotonic()
            if sys.stderr.isatty():
                print(f"\rround {turn} of {rounds} ", end="", file=sys.stderr, flush=True)
            found = {name: side.ask("iterate") for name, side in sides.items()}
            if turn:
                yield found
            now = monotonic()
            if self.stop and turn >= LEAST_ROUNDS and 2 * now - began > self.stop:
                break
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)


def memory(
    turns: list[dict[str, Any]], checks: dict[str, dict[str, Any]]
) -> dict[str, dict[str, list[int]]] | None:
    """Bytes allocated by both sides, where the device keeps count: the most in each iteration, and
    between two steps."""
    if any(check["at_rest"] is None for check in checks.values()):
        return None
    return {
        "peak": {side: [turn[side]["peak"] for turn in turns] for side in checks},
        "at_rest": {side: [check["at_rest"]] for side, check in checks.items()},
    }


def summary(turns: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    """A phase's seconds on both sides, and the median of the ratios of neighbouring iterations."""
    seconds = {side: [turn[side]["seconds"][phase] for turn in turns] for side in turns[0]}
    return {**seconds, "ratio": statistics.median(ppo_tables.ratios(seconds))}


def _stats(checks: list[dict[str, Any]]) -> list[ppo_gate.Statistics]:
    return [check["statistics"] for check in checks]
