"""`python -m benchmarks tune`: other numbers for the kernels, measured in turns on a GPU.

For each knob of `knobs.py` and each case of its ops, the kernels run with one value after another,
round by round. A value whose results are off, by the measure of all gates, has no time. The result
file: what `gpu.py`'s begins with, and
{"knobs": [{"name", "predicted", "cases": [{"op", "label", "now": value, "limit": [seconds],
 "values": {value: {"seconds": [...]} or {"absent": why}}}]}], "left": {what: why}}.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.before import build, gates, record, timing
from benchmarks.before.cases import Case
from benchmarks.before.knobs import Knob, named, present, turned
from benchmarks.before.limit import limit
from benchmarks.before.measure import LIMIT
from benchmarks.before.ops import device_name, file_of, free, start_of_result
from benchmarks.before.planner import Outcome, Step, carry_out
from benchmarks.before.problem import results
from benchmarks.before.tune_tables import render
from fastrl_kernels import scratch

ROUNDS, SECONDS = 15, 3.0  # of one case
GUESS = 20.0  # seconds of a case, with compilation
AT_END = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks tune`."""
    parser.add_argument("knobs", nargs="*", metavar="KNOB", help="of knobs.py; default: all")
    parser.add_argument("--minutes", type=float, default=8.0, help="to be done within")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the file goes")


def run(args: argparse.Namespace) -> int:
    """0 where all were measured, 1 where one failed, 2 without a GPU or such a knob."""
    began = time.monotonic()
    if not torch.cuda.is_available():
        print("no GPU here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    try:
        knobs = named(args.knobs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device("cuda")
    session = Session(device, timing.roofline(device), args.results)
    left = 60 * args.minutes - AT_END - (time.monotonic() - began)
    outcome = carry_out(session.steps(knobs), left, save=session.save)
    for name, why in {**outcome.left, **outcome.failed}.items():
        print(f"left: {name}: {why}")
    print(f"saved as {session.path}")
    return 1 if outcome.failed else 0


class Session:
    """The result of one run, as its steps fill it."""

    def __init__(
        self,
        device: torch.device,
        roof: timing.Roofline,
        folder: Path | None,
        *,
        backend: str = "auto",
        rounds: int = ROUNDS,
    ) -> None:
        self.device, self.folder, self.backend, self.rounds = device, folder, backend, rounds
        self.result = start_of_result("tune", device, roof, os.cpu_count() or 1)
        self.result["knobs"] = []
        self.path: Path | None = None

    def steps(self, knobs: list[Knob]) -> Iterator[Step]:
        """Each knob with each of its cases."""
        for knob in knobs:
            for case in knob.cases:
                yield Step(
                    f"{knob.name}: {case.op} {case.label}",
                    GUESS,
                    lambda knob=knob, case=case: self.measure(knob, case),
                )

    def measure(self, knob: Knob, case: Case) -> None:
        """All values of a knob on a case, printed and kept."""
        values: dict[str, dict[str, Any]] = {}
        calls: dict[str, timing.Call] = {LIMIT: limit(case, self.device)}
        problem = build.problem(case, self.device, backend=self.backend)

        def call_with(value: int) -> timing.Call:
            def call() -> object:
                with turned(knob, value):
                    return results(problem, problem.ours)

            return call

        for value in knob.values:
            scratch.clear()
            with turned(knob, value):
                wrong = _wrong(problem)
            if wrong:
                values[str(value)] = {"absent": wrong}
            else:
                calls[str(value)] = call_with(value)
        taken = timing.interleaved(calls, self.device, rounds=self.rounds, seconds=SECONDS)
        least = taken.pop(LIMIT).device
        values |= {value: {"seconds": times.device} for value, times in taken.items()}
        entry = {
            "op": case.op,
            "label": case.label,
            "now": str(present(knob)),
            "limit": least,
            "values": {str(value): values[str(value)] for value in knob.values},
        }
        if not any(found["name"] == knob.name for found in self.result["knobs"]):
            self.result["knobs"].append(
                {"name": knob.name, "predicted": knob.predicted, "cases": []}
            )
        self.result["knobs"][-1]["cases"].append(entry)
        print("\n" + render(knob, entry, device_name(self.device)), flush=True)
        free(self.device)

    def save(self, outcome: Outcome) -> None:
        """Writes the file with all there is so far."""
        self.result["left"] = {**outcome.left, **outcome.failed}
        self.path = record.save(self.result, file_of(self.result, self.folder))


def _wrong(problem: Any) -> str | None:
    """What is wrong with a value: results that are off, or none at all."""
    try:
        return gates.exact(problem)
    except Exception as error:  # too much shared memory or too few registers, say
        return f"{type(error).__name__}: {error}"[:300]
