"""A session of measurements: what it measures on, and each case's way from gate to figures."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import OURS, Case, Entry, faster, own, phase_of, rooflines, verdicts
from benchmarks.results import Result, device_of, save, start_of_result
from benchmarks.timing import Side, one_after_another, rounds_within, take_turns


class Red(AssertionError):
    """A gate has failed: there are no figures."""


class Run:
    """A session's device and extent, and its results, which are saved as they come.

    Args:
        rounds: counted turns of each side, in place of each benchmark's own number.
        full: more than the main cases.
        toy: tiny cases on any device; nothing is saved.
        peers: measure beside other libraries too, not only beside eager PyTorch.
        minutes: no case is begun that would take longer.
        results: the folder of result files; None: nothing is saved.
        peer_python: an interpreter that has TRL 0.11.4.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rounds: int | None = None,
        full: bool = False,
        toy: bool = False,
        peers: bool = True,
        minutes: float | None = None,
        results: Path | None = None,
        peer_python: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.rounds, self.full, self.toy = device, rounds, full, toy
        self.peers, self.peer_python = peers, peer_python
        self.folder = None if toy else results
        self.clock = clock
        self.stop = math.inf if minutes is None else clock() + 60 * minutes
        self.results: dict[str, Result] = {}
        self.saved: dict[str, Path] = {}
        self.red_ops: set[str] = set()  # whose checks have failed

    def result(self, benchmark: str) -> Result:
        """A benchmark's result so far."""
        if benchmark not in self.results:
            self.results[benchmark] = start_of_result(benchmark, self.device)
        return self.results[benchmark]

    def save(self, benchmark: str) -> None:
        """Writes a benchmark's file with all there is so far."""
        if self.folder:
            saved = self.saved.get(benchmark)
            self.saved[benchmark] = save(self.result(benchmark), self.folder, saved)

    def obstacle(self, case: Case) -> str | None:
        """Why a case is not begun, which the result notes too."""
        left, why = self.stop - self.clock(), None
        if case.benchmark == "ops" and case.name in self.red_ops:
            why = "a check of the op is red"
        elif case.seconds > left:
            why = f"about {case.seconds:.0f} s, {max(left, 0):.0f} s were left"
        return why and self.leave(case, why)

    def leave(self, case: Case, why: str) -> str:
        """Notes in the result why a case is not measured."""
        self.result(case.benchmark)["left"][str(case)] = why
        self.save(case.benchmark)
        return why


class Measurement:
    """One case on its way from gate to figures.

    Args:
        pedantic: pytest-benchmark's.
        info: receives the case's figures, flat: pytest-benchmark's ``extra_info``.
    """

    def __init__(
        self,
        run: Run,
        case: Case,
        pedantic: Callable[..., object] = one_after_another,
        info: dict[str, Any] | None = None,
    ) -> None:
        self.run, self.case, self.pedantic = run, case, pedantic
        self.info = {} if info is None else info
        self.entry = case.entry()
        self.began = run.clock()

    def refuse(self, why: str) -> None:
        """Notes that the gate has failed, and ends the measurement."""
        self.entry["red"] = why
        self._keep()
        raise Red(why)

    def absent(self, side: str, why: str) -> None:
        """Notes why a side is not measured."""
        self.entry["absent"][side] = why

    def measure(
        self,
        sides: Mapping[str, Side],
        rounds: int,
        limit: Side | None = None,
        *,
        within: float = math.inf,
        baseline: str | None = None,
    ) -> Entry:
        """Takes turns, after an uncounted one of each side; the entry is in the result then. Call
        it once the gate has passed.

        Args:
            rounds: unless the run has its own number.
            limit: does the least work of the case, in turns with the others.
            within: seconds; with fewer left to the run, those. Fewer rounds are made, but at least
                three, where they would take longer.
            baseline: the side that others are compared with, in place of fastrl.
        """
        self.entry["baseline"] = baseline
        rounds = 2 if self.run.toy else self.run.rounds or rounds
        taking = {**({"limit": limit} if limit else {}), **sides}
        within = min(within, self.run.stop - self.run.clock())
        rounds = rounds_within(within, taking.values(), rounds)
        take_turns(taking, rounds, self.pedantic, baseline or OURS)
        for side in sides.values() if limit else ():
            if limit.limited is None or limit.limited in side.seconds:
                side.limit, side.limited = next(iter(limit.seconds.values())), limit.limited
        self.entry["sides"] = {name: side.described() for name, side in sides.items()}
        self._keep()
        return self.entry

    def _keep(self) -> None:
        self.entry["took"] = round(self.run.clock() - self.began, 1)
        result = self.run.result(self.case.benchmark)
        self.info.update(in_short(self.entry, device_of(result)))
        same = (self.case.name, self.case.label)
        others = [e for e in result["entries"] if (e["name"], e["label"]) != same]
        result["entries"] = [*others, self.entry]
        self.run.save(self.case.benchmark)


def in_short(entry: Entry, device: str) -> dict[str, Any]:
    """What a comparison of two runs reads: ratios, bytes, memory and goals, and no times."""
    found: dict[str, Any] = {name: entry[name] for name in ("benchmark", "what", "red")}
    ours = entry["sides"].get(own(entry))
    if not ours:
        return found
    others = [name for name in entry["sides"] if name != own(entry)]
    found["ratio"] = {name: statistics.median(faster(entry, name)) for name in others}
    found["calls in a round"] = ours["calls"]
    if entry["work"]:
        seconds = statistics.median(phase_of(ours))
        found |= {"bytes": entry["work"]["bytes"], "GB/s": entry["work"]["bytes"] / seconds / 1e9}
    if ours["limit"]:
        found["of the roofline"] = statistics.median(rooflines(entry, own(entry)))
    found |= {f"memory, {kind}": nbytes for kind, nbytes in ours["memory"].items()}
    found["goals"] = dict(verdicts(entry, device))
    return found


@contextlib.contextmanager
def own_accelerate() -> Iterator[None]:
    """While open, trainers may have another precision than those before; drop them first."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
