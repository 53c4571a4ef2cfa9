"""What all benchmarks share: cases with goals, sides that take turns, memory and launches of a
call, what the machine can do at best, the gate against float64, and where results are kept.

An entry is what is known of one case, as result files hold it:
{"benchmark", "name", "label", "what", "main", "goals": [Goal], "absent": {side: why},
 "baseline": None or the side that others are compared with, in place of fastrl,
 "red": None or why there are no figures, "work": None or {"bytes", "flops", "what"},
 "units": None or [word, count], "remarks": [text],
 "sides": {name: {"note", "calls": in a turn, "seconds": {phase: [of each turn]},
                  "limit": [seconds of the least work, turn by turn], "limited": its phase,
                  "memory": {kind: bytes}, "facts": {name: number}}}}
The first phase is the one that ratios are of unless another is named. Needs torch alone: a worker
in another environment loads this file by its path.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS, EAGER = "fastrl", "eager"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Entry = dict[str, Any]
Result = dict[str, Any]
Seconds = dict[str, float]  # by phase


# --- cases and goals -----------------------------------------------------------------------------

AT_LEAST = ("speedup", "roofline", "slots used")


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on one figure of a case, on devices whose name begins with one of these.

    Args:
        figure: "seconds" (of a phase), "speedup" over `against`, "roofline" (share of it), "memory"
            (the peak in bytes), "memory share" (of the peak of `against`), or the name of a fact.
        bound: at least for those in `AT_LEAST`, at most for the others.
    """

    figure: str
    bound: float
    devices: tuple[str, ...] = ("cpu",)
    side: str = OURS
    against: str = EAGER
    phase: str | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One piece of work that is measured.

    Args:
        benchmark: names the result file.
        name: of what is measured; several cases may share it.
        label: tells it from others of its name.
        what: the work in words.
        of: its sizes, whatever describes them.
        goals: what is to be reached.
        main: whether it stands in the short tables.
        seconds: that it takes, about.
    """

    benchmark: str
    name: str
    label: str
    what: str = ""
    of: Any = None
    goals: tuple[Goal, ...] = ()
    main: bool = True
    seconds: float = 60.0

    def __str__(self) -> str:
        return f"{self.name}: {self.label}"

    def entry(self) -> Entry:
        """Nothing known yet."""
        return {
            "benchmark": self.benchmark,
            "name": self.name,
            "label": self.label,
            "what": self.what,
            "main": self.main,
            "goals": [dataclasses.asdict(goal) for goal in self.goals],
            "baseline": None,
            "red": None,
            "absent": {},
            "work": None,
            "units": None,
            "remarks": [],
            "sides": {},
        }


def ratios(entry: Entry, side: str, base: str = OURS, phase: str | None = None) -> list[float]:
    """Seconds of a side over those of the base, turn by turn: above 1, the base is the faster."""
    theirs, ours = (phase_of(entry["sides"][name], phase) for name in (side, base))
    return [a / b for a, b in zip(theirs, ours, strict=True)]


def faster(entry: Entry, side: str, phase: str | None = None) -> list[float]:
    """What is shown of a side: by how much fastrl is the faster, or the side than a baseline."""
    baseline = entry.get("baseline")
    if baseline:
        return ratios(entry, baseline, side, phase)
    return ratios(entry, side, OURS, phase)


def phase_of(side: Mapping[str, Any], phase: str | None = None) -> list[float]:
    """The seconds of a phase, turn by turn; of the first one unless another is named."""
    return side["seconds"][phase or next(iter(side["seconds"]))]


def rooflines(entry: Entry, side: str = OURS) -> list[float]:
    """The least time of the case's work over the time taken, turn by turn: 1 is the limit."""
    found = entry["sides"][side]
    taken = phase_of(found, found.get("limited"))
    return [least / seconds for least, seconds in zip(found["limit"], taken, strict=True)]


def verdicts(entry: Entry, device: str) -> list[tuple[str, bool]]:
    """Each goal in words, and whether it is reached; none for those of other devices, and of what
    nobody measured."""
    found = []
    for goal in (Goal(**{**goal, "devices": tuple(goal["devices"])}) for goal in entry["goals"]):
        if entry["red"] or not device.lower().startswith(goal.devices):
            continue
        value = _figure(entry, goal)
        if value is not None:
            reached = value >= goal.bound if goal.figure in AT_LEAST else value <= goal.bound
            found.append((_words(entry, goal), reached))
    return found


def _figure(entry: Entry, goal: Goal) -> float | None:
    side, base = (entry["sides"].get(name) for name in (goal.side, goal.against))
    if not side:
        return None
    if goal.figure in ("speedup", "memory share") and not base:
        return None
    if goal.figure == "speedup":
        return statistics.median(ratios(entry, goal.against, goal.side, goal.phase))
    if goal.figure == "seconds":
        return statistics.median(phase_of(side, goal.phase))
    if goal.figure == "roofline":
        return statistics.median(rooflines(entry, goal.side))
    if goal.figure == "memory":
        return side["memory"]["peak"]
    if goal.figure == "memory share":
        return side["memory"]["peak"] / base["memory"]["peak"]
    return side["facts"].get(goal.figure)


def _words(entry: Entry, goal: Goal) -> str:
    who = "" if goal.side == OURS else f"{goal.side}: "
    phase = f"{goal.phase}, " if goal.phase else ""
    if goal.figure == "speedup":
        words = f"{who}{phase}≥ {goal.bound:g}× {goal.against}"
        limit, theirs = entry["sides"][goal.side].get("limit"), entry["sides"][goal.against]
        if limit:  # beyond what the machine can do, no implementation is that fast
            most = [a / b for a, b in zip(phase_of(theirs), limit, strict=True)]
            most = statistics.median(most)
            words += f" (at the limit: {most:.2f}×)" if most < goal.bound else ""
        return words
    if goal.figure == "seconds":
        return f"{who}≤ {duration(goal.bound)}" + (f" of {goal.phase}" if goal.phase else "")
    if goal.figure == "memory":
        return f"{who}≤ {size(goal.bound)}"
    if goal.figure == "memory share":
        return f"{who}memory ≤ {goal.bound:.3g} of {goal.against}'s"
    if goal.figure in AT_LEAST:
        return f"{who}{goal.figure} ≥ {goal.bound:.0%}"
    return f"{who}{goal.figure} ≤ {goal.bound:g}"


def duration(seconds: float) -> str:
    """`12.3 ms`, in the unit that leaves one to three digits before the point."""
    unit, scale = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"


def durations(seconds: Sequence[float]) -> str:
    """`median (lowest–highest)` in one unit."""
    unit, scale = _unit(statistics.median(seconds))
    return f"{spread([x / scale for x in seconds], '.3g', unit)}"


def _unit(seconds: float) -> tuple[str, float]:
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    return next((unit for unit in units if seconds >= unit[1]), units[-1])


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """`median (lowest–highest)`, the unit after the median."""
    unit = f" {unit}" if unit not in ("", "×") else unit
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}–{max(values):{form}})"


def size(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"


# --- sides that take turns -----------------------------------------------------------------------

LEAST_ROUNDS = 3
SAMPLE_SECONDS = 20e-3  # a shorter call is repeated up to this in a turn, on CPUs
MOST_CALLS = 1000
# Cycles for which a GPU waits before a timed call, so that the host is ahead of it.
HEAD_START = 2_000_000


@dataclasses.dataclass
class Side:
    """One way to do a case's work.

    Args:
        turn: does it once more, and says the seconds of each phase.
        note: what sets it apart.
        calls: of the work in a turn.
        limit: the seconds of the least work, as it takes its turns; `limited` is the phase that
            they are the limit of, unless the first.
        memory, facts: what else is known of it, once the turns are over.
        close: when it is done with.
    """

    turn: Callable[[], Seconds]
    note: str = ""
    calls: int = 1
    limit: list[float] | None = None
    limited: str | None = None
    memory: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, float] = dataclasses.field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def take_turn(self) -> None:
        """One turn that counts."""
        for phase, seconds in self.turn().items():
            self.seconds.setdefault(phase, []).append(seconds)

    def described(self) -> dict[str, Any]:
        """As an entry has it."""
        names = ("note", "calls", "seconds", "limit", "limited", "memory", "facts")
        return {name: getattr(self, name) for name in names}


def one_after_another(
    target: Callable[[], object], *, setup: Callable[[], object], rounds: int
) -> None:
    """As pytest-benchmark's ``pedantic``, where there is none."""
    for _ in range(rounds):
        setup()
        target()


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    pedantic: Callable[..., object] = one_after_another,
    own: str = OURS,
) -> None:
    """Rounds of a turn of each side, A B C A B C …: what slows one slows its neighbours. Fastrl's
    own is the last in a round, and what pytest-benchmark times."""
    others = [side for name, side in sides.items() if name != own]

    def setup() -> None:
        for side in others:
            side.take_turn()

    pedantic(sides[own].take_turn, setup=setup, rounds=rounds)


def described(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def timed(call: Callable[[], object], device: torch.device) -> Side:
    """A call as a side, which is made once to settle how many are in a turn.

    On GPUs "device" is between two events, with a cold cache and the host ahead, and "call" by the
    clock, waiting for the result; on CPUs a turn's seconds are the mean over its calls.
    """
    if device.type == "cuda":
        call()
        return Side(_OnCuda(call, device))
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-9)
    calls = min(MOST_CALLS, max(1, round(SAMPLE_SECONDS / once)))

    def turn() -> Seconds:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return {"call": (time.perf_counter() - start) / calls}

    return Side(turn, calls=calls)


class _OnCuda:
    def __init__(self, call: Callable[[], object], device: torch.device) -> None:
        self.call = call
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.other_data = torch.empty(4 * cache, dtype=torch.int8, device=device)

    def __call__(self) -> Seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.other_data.zero_()
        torch.cuda._sleep(HEAD_START)
        start.record()
        self.call()
        end.record()
        end.synchronize()
        on_device = start.elapsed_time(end) / 1e3
        self.other_data.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.call()
        torch.cuda.synchronize()
        return {"device": on_device, "call": time.perf_counter() - begin}


def rounds_within(seconds: float, sides: Iterable[Side], most: int) -> int:
    """How many rounds fit, by how long a turn of each takes now; no fewer than three."""
    begin = time.perf_counter()
    for side in sides:
        side.turn()
    once = time.perf_counter() - begin
    return int(max(min(LEAST_ROUNDS, most), min(most, seconds / max(once, 1e-9))))


def now(device: torch.device) -> float:
    """The time at which everything asked of the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def free(device: torch.device) -> None:
    """Gives a case's memory back before the next one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- a session of measurements -------------------------------------------------------------------


class Red(AssertionError):
    """A gate is red: there are no figures."""


class Run:
    """What a session measures on, how much of it, and its results, which are saved as they come.

    Args:
        rounds: counted turns of each side; each benchmark has its own number otherwise.
        full: more than the main cases.
        toy: of tiny cases, on any device; nothing is saved.
        peers: beside eager PyTorch or none; otherwise beside all that can be had.
        minutes: nothing is begun that would take longer.
        results: the folder of result files; None: nothing is saved.
        peer_python: an interpreter that has the library of other versions.
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
        """A benchmark's result, as far as it is known."""
        if benchmark not in self.results:
            self.results[benchmark] = start_of_result(benchmark, self.device)
        return self.results[benchmark]

    def save(self, benchmark: str) -> None:
        """Writes a benchmark's file with all there is so far."""
        if self.folder:
            self.saved[benchmark] = save(self.result(benchmark), self.folder)

    def obstacle(self, case: Case) -> str | None:
        """Why a case is not begun; the result says so too."""
        left, why = self.stop - self.clock(), None
        if case.benchmark == "ops" and case.name in self.red_ops:
            why = "a check of the op is red"
        elif case.seconds > left:
            why = f"about {case.seconds:.0f} s, {max(left, 0):.0f} s were left"
        return why and self.leave(case, why)

    def leave(self, case: Case, why: str) -> str:
        """Notes that a case is not measured, and says why."""
        self.result(case.benchmark)["left"][str(case)] = why
        self.save(case.benchmark)
        return why


class Measurement:
    """One case on its way from gate to figures.

    Args:
        pedantic: pytest-benchmark's, or what stands in for it.
        info: gets what is known of the case, flat, as pytest-benchmark keeps it.
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
        """The gate is red: says so in the result, and ends it."""
        self.entry["red"] = why
        self._keep()
        raise Red(why)

    def absent(self, side: str, why: str) -> None:
        """A side takes no part."""
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
        """Turns of all sides, once the gate is green, after an uncounted one of each; the entry,
        which is in the result now too.

        Args:
            rounds: unless the run has a number of its own.
            limit: does the least work of the case, in turns with the others.
            within: seconds, and those left to the run; there are fewer rounds, but three, where
                they would take longer.
            baseline: the side that the others are compared with; fastrl's own otherwise.
        """
        self.entry["baseline"] = baseline
        rounds = 2 if self.run.toy else self.run.rounds or rounds
        taking = {**({"limit": limit} if limit else {}), **sides}
        within = min(within, self.run.stop - self.run.clock())
        rounds = rounds_within(within, taking.values(), rounds)
        take_turns(taking, rounds, self.pedantic, baseline or OURS)
        for side in sides.values() if limit else ():
            if limit.limited is None or limit.limited in side.seconds:
                side.limit, side.limited = phase_of({"seconds": limit.seconds}), limit.limited
        self.entry["sides"] = {name: side.described() for name, side in sides.items()}
        self._keep()
        return self.entry

    def _keep(self) -> None:
        self.entry["took"] = round(self.run.clock() - self.began, 1)
        self.info.update(in_short(self.entry, self.run.device))
        result = self.run.result(self.case.benchmark)
        same = (self.case.name, self.case.label)
        others = [e for e in result["entries"] if (e["name"], e["label"]) != same]
        result["entries"] = [*others, self.entry]
        self.run.save(self.case.benchmark)


def in_short(entry: Entry, device: torch.device) -> dict[str, Any]:
    """What a comparison of two runs looks at: ratios, bytes, memory and goals, and no times."""
    found: dict[str, Any] = {name: entry[name] for name in ("benchmark", "what", "red")}
    own = entry["baseline"] or OURS
    ours = entry["sides"].get(own)
    if not ours:
        return found
    others = [name for name in entry["sides"] if name != own]
    found["ratio"] = {name: statistics.median(faster(entry, name)) for name in others}
    found["calls in a round"] = ours["calls"]
    if entry["work"]:
        seconds = statistics.median(phase_of(ours))
        found |= {"bytes": entry["work"]["bytes"], "GB/s": entry["work"]["bytes"] / seconds / 1e9}
    if ours["limit"]:
        found["of the roofline"] = statistics.median(rooflines(entry, own))
    found |= {f"memory, {kind}": nbytes for kind, nbytes in ours["memory"].items()}
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    found["goals"] = dict(verdicts(entry, name))
    return found


# --- what the machine can do ---------------------------------------------------------------------


def copying(nbytes: float, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes as many bytes together."""
    source = torch.ones(max(1, round(nbytes / 2)), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_speed(device: torch.device) -> float:
    """Bytes per second of torch's own copy, read and written; measured now, best of several."""
    nbytes = 2**31 if device.type == "cuda" else 2**28
    return nbytes / _fastest(copying(nbytes, device), device)


def roofline(device: torch.device) -> dict[str, Any]:
    """{"copy": bytes per second, "gemm": flops per second by dtype}, measured now."""
    gemm = {}
    for name, dtype in DTYPES.items():
        # Without instructions for it, a CPU takes seconds for little in half precision.
        n = 8192 if device.type == "cuda" else (1024 if name == "fp32" else 512)
        a = torch.full((n, n), 0.5, dtype=dtype, device=device)
        gemm[name] = 2 * n**3 / _fastest(lambda a=a: a @ a, device)
    return {"copy": copy_speed(device), "gemm": gemm}


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    side = timed(call, device)
    rounds = rounds_within(2.0, [side], 9 if device.type == "cuda" else 5)
    for _ in range(rounds):
        side.take_turn()
    return min(phase_of({"seconds": side.seconds}))


# --- memory and launches of a call ---------------------------------------------------------------


class Footprint(NamedTuple):
    """Bytes: the most that was live at a time, the sum and the largest of all allocations.

    `peak` leaves out what lived before the call and what the call returned. On GPUs only the peak
    is known.
    """

    peak: int
    allocated: int | None = None
    largest: int | None = None


def footprint(
    forward: Callable[[], Any], backward: Callable[[Any], Iterable[Tensor]], device: torch.device
) -> Footprint:
    """Of `backward(forward())`; the tensors that `backward` returns count as returned.

    On CPUs every allocation and release of PyTorch's allocator is followed, those inside its own
    kernels too (a copy that makes an argument contiguous, say). What libraries allocate by
    themselves, a GEMM's packed panels, is not seen. On GPUs the caching allocator's own peak is
    read, forward and backward apart.
    """
    if device.type == "cuda":
        return _on_cuda(forward, backward, device)
    # The profiler writes its comings and goings to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True)
    with profiler:
        returned = tuple(backward(forward()))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in returned}
    return replay(_allocations(profiler), addresses)


def replay(events: Iterable[tuple[int, int]], returned: set[int]) -> Footprint:
    """The footprint of allocations `(address, bytes)` in their order, releases being negative.

    An address is used again and again: what lies there when all is done is what was returned.
    """
    events = list(events)
    last_made = {address: i for i, (address, nbytes) in enumerate(events) if nbytes > 0}
    kept = {last_made[address] for address in returned & last_made.keys()}
    live: dict[int, int] = {}
    total = peak = allocated = largest = 0
    for i, (address, nbytes) in enumerate(events):
        if nbytes < 0:
            total -= live.pop(address, 0)  # 0: it was made before, or is returned
            continue
        allocated += nbytes
        largest = max(largest, nbytes)
        if i not in kept:
            live[address] = nbytes
            total += nbytes
            peak = max(peak, total)
    return Footprint(peak, allocated, largest)


def _allocations(profiler: torch.profiler.profile) -> Iterator[tuple[int, int]]:
    from torch._C._profiler import _EventType

    def walk(events: Iterable[Any]) -> Iterator[Any]:
        for event in events:
            yield event
            yield from walk(event.children)

    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found = [event for event in walk(tree) if event.tag == _EventType.Allocation]
    for event in sorted(found, key=lambda event: event.start_time_ns):
        fields = event.extra_fields
        if fields.device.type == "cpu":
            yield fields.ptr, fields.alloc_size


def _on_cuda(
    forward: Callable[[], Any], backward: Callable[[Any], Iterable[Tensor]], device: torch.device
) -> Footprint:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    state = forward()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    returned = tuple(backward(state))
    kept = storage_bytes(returned)
    torch.cuda.synchronize(device)
    later = torch.cuda.max_memory_allocated(device) - before - kept
    return Footprint(max(peak, later, 0))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages below tensors, each counted once."""
    storages = [x.untyped_storage() for x in tensors]
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def launches(
    forward: Callable[[], Any], backward: Callable[[Any], object], device: torch.device
) -> tuple[int, int] | None:
    """How many kernels, copies and fills each half of `backward(forward())` makes a GPU do; it is
    called twice, the first time to compile. None on CPUs, or where the profiler cannot look."""
    if device.type != "cuda":
        return None
    backward(forward())
    try:
        state, before = _recorded(forward, device)
        _, after = _recorded(lambda: backward(state), device)
    except (RuntimeError, AssertionError) as error:  # of the profiler: the call has just gone well
        print(f"no launches counted: {error}", file=sys.stderr)
        return None
    return (before, after) if before or after else None


def _recorded(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = call()
        torch.cuda.synchronize(device)
    return result, sum(event.device_type == DeviceType.CUDA for event in profiler.events())


# --- the gate against float64 --------------------------------------------------------------------

# An op's error against its specification in float64 may be at most twice that of the eager formula
# in the same dtype, plus 1e-7 of the exact result's norm.
FACTOR, FLOOR = 2.0, 1e-7
DRAWS = 4  # of inputs, where one is not enough to judge by
# Memory of the float64 specification: this many bytes of the largest of its tensors at a time.
BLOCK_BYTES = 2**28

Results = dict[str, Tensor]
Implementation = Callable[..., Results]  # named inputs -> named outputs


@dataclasses.dataclass(frozen=True)
class Problem:
    """An op on one set of inputs: the gradients asked for, and who works it out.

    Args:
        ours, eager, exact: fastrl's op, the formula in eager PyTorch, the specification.
        wrt: inputs that gradients are wanted for.
        upstream: the gradient that comes from above for each output; without one, an output is a
            statistic.
        by_row: inputs and outputs with a row for each of the batch's: the exact answer is worked
            out block by block. Outputs that are not among them are sums over rows.
        row_bytes: of the largest float64 tensor, per row; 0: no blocks.
        given: outputs that the exact answer depends on, such as the tokens that were drawn.
    """

    inputs: Mapping[str, Any]
    ours: Implementation
    eager: Implementation
    exact: Implementation
    wrt: tuple[str, ...] = ()
    upstream: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    by_row: frozenset[str] = frozenset()
    row_bytes: int = 0
    given: tuple[str, ...] = ()

    def forward(self, call: Implementation) -> tuple[Results, Results, Results]:
        """A call's outputs, the leaves that gradients are wanted for, the gradients from above."""
        leaves = {name: self.inputs[name].detach().requires_grad_() for name in self.wrt}
        outputs = call(**{**self.inputs, **leaves})
        return outputs, leaves, {k: g for k, g in self.upstream.items() if k in outputs}

    def results(self, call: Implementation) -> Results:
        """Outputs and gradients of one call: what is timed."""
        return backward(self.forward(call))


def backward(state: tuple[Results, Results, Results]) -> Results:
    """What `Problem.forward` began: the outputs, and the gradients as `d<input>`."""
    outputs, leaves, upstream = state
    found = {name: x.detach() for name, x in outputs.items()}
    if leaves:
        roots = [outputs[name] for name in upstream]
        grads = torch.autograd.grad(roots, list(leaves.values()), list(upstream.values()))
        found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return found


@dataclasses.dataclass(frozen=True)
class Error:
    """Norms of (found - exact) and of exact; not finite where infinities or NaNs differ."""

    error: float
    norm: float

    @property
    def relative(self) -> float:
        return self.error / self.norm if self.norm else self.error


Errors = dict[str, Error]  # by output


def errors(
    problem: Problem, found: Mapping[str, Results], block_bytes: int = BLOCK_BYTES
) -> dict[str, Errors]:
    """How far each of several results lies from the specification in float64.

    A result may lack outputs (a peer that computes less); gradients are then judged as those of
    the outputs that are there.
    """
    groups: dict[object, dict[str, Results]] = {}
    for name, one in found.items():
        same: object = name if problem.given else frozenset(problem.upstream.keys() & one.keys())
        groups.setdefault(same, {})[name] = one
    judged: dict[str, Errors] = {}
    for group in groups.values():
        judged |= _errors_of_group(problem, group, block_bytes)
    return judged


def _errors_of_group(
    problem: Problem, found: dict[str, Results], block_bytes: int
) -> dict[str, Errors]:
    squares: dict[tuple[str, str], list[Tensor]] = {}
    sums: Results = {}
    for rows, exact in _exact_blocks(problem, next(iter(found.values())), block_bytes):
        for name, value in exact.items():
            whole = name if name in problem.by_row else name.removeprefix("d")
            if whole not in problem.by_row:
                sums[name] = sums[name] + value if name in sums else value
                continue
            for who, one in found.items():
                if name in one:
                    squares.setdefault((who, name), []).append(_squares(one[name][rows], value))
    for who, one in found.items():
        for name in sums.keys() & one.keys():
            squares[who, name] = [_squares(one[name], sums[name])]
    judged: dict[str, Errors] = {who: {} for who in found}
    for (who, name), parts in squares.items():
        error, norm = torch.stack(parts).sum(0).tolist()
        judged[who][name] = Error(math.sqrt(error), math.sqrt(norm))
    return judged


def _exact_blocks(
    problem: Problem, found: Results, block_bytes: int
) -> Iterator[tuple[slice, Results]]:
    """(which rows, outputs and gradients in float64), a block of rows at a time."""
    inputs = {k: _double(x) for k, x in problem.inputs.items() if k not in problem.by_row}
    rows = next((len(x) for k, x in problem.inputs.items() if k in problem.by_row), 1)
    step = max(1, block_bytes // problem.row_bytes) if problem.row_bytes else rows
    upstream = {name: g for name, g in problem.upstream.items() if name in found}
    for start in range(0, rows, step):
        here = slice(start, start + step)
        block = {k: _double(x[here]) for k, x in problem.inputs.items() if k in problem.by_row}
        block |= {name: found[name][here] for name in problem.given}
        gradients = {k: _double(g[here] if k in problem.by_row else g) for k, g in upstream.items()}
        part = dataclasses.replace(problem, inputs=inputs | block, upstream=gradients)
        yield here, part.results(problem.exact)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _squares(found: Tensor, exact: Tensor) -> Tensor:
    """[Σ (found - exact)², Σ exact²]; NaN where infinities differ."""
    found = found.double()
    difference = torch.where(found == exact, 0.0, found - exact)  # infinities too
    finite = torch.where(exact.isinf(), 0.0, exact)
    return torch.stack([difference.square().sum(), finite.square().sum()])


def error_ratio(ours: Mapping[str, Error], torchs: Mapping[str, Error]) -> float:
    """The worst of our errors over PyTorch's own; green up to FACTOR, never where it is NaN.

    The floor of 1e-7 of the exact result's norm is on PyTorch's side.
    """
    worst = 0.0
    for name, mine in ours.items():
        allowed = FACTOR * torchs[name].error + FLOOR * mine.norm
        here = FACTOR * mine.error / allowed if allowed else (0.0 if mine.error == 0 else math.inf)
        worst = math.nan if math.isnan(here) or math.isnan(worst) else max(worst, here)
    return worst


def worst_relative(mine: Mapping[str, Error]) -> float:
    """The largest of the relative errors; NaN where one is."""
    values = [error.relative for error in mine.values()]
    return math.nan if any(map(math.isnan, values)) else max(values)


def wrong_numbers(problem: Problem, others: Iterable[Problem] = ()) -> str | None:
    """Why fastrl's results have no figures: an error beyond twice eager PyTorch's, None where there
    is none. What is judged first is `problem`; see `settled` for the others."""
    judged = errors(problem, {OURS: problem.results(problem.ours),
                              EAGER: problem.results(problem.eager)})  # fmt: skip
    return too_far(settled(judged[OURS], judged[EAGER], others))


def too_far(error: float) -> str | None:
    """What is wrong with an `error_ratio`."""
    if error <= FACTOR:  # NaN is not
        return None
    return f"error is {error:.3g} times eager PyTorch's, {FACTOR:g} are allowed"


def settled(ours: Errors, torchs: Errors, others: Iterable[Problem]) -> float:
    """The `error_ratio` of one draw of inputs; beyond FACTOR, of this draw and others together.

    What is a single number, a loss, PyTorch may hit by luck: its error over one draw says little.
    `others` are asked for one by one, and no further than it takes.
    """
    mine, eagers = [ours], [torchs]
    error = error_ratio(ours, torchs)
    if error <= FACTOR:
        return error
    for problem in others:
        found = {name: problem.results(call) for name, call in
                 ((OURS, problem.ours), (EAGER, problem.eager))}  # fmt: skip
        judged = errors(problem, found)
        mine.append(judged[OURS])
        eagers.append(judged[EAGER])
        error = error_ratio(_pooled(mine), _pooled(eagers))
        if error <= FACTOR:
            break
    return error


def _pooled(draws: Sequence[Errors]) -> Errors:
    """Errors of several draws as if all were one."""
    return {
        name: Error(
            math.hypot(*(draw[name].error for draw in draws)),
            math.hypot(*(draw[name].norm for draw in draws)),
        )
        for name in draws[0]
    }


# --- where results are kept ----------------------------------------------------------------------


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """The processor, its cores and memory, and the accelerator where there is one that is used.

    `load` is how many processes wanted a core in the minute before: figures count where it is
    well below the number of cores.
    """
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    found = {
        "cpu": named[1] if named else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(all_memory(torch.device("cpu")) / 2**30),
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def all_memory(device: torch.device) -> int:
    """Bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_of(result: Result) -> str:
    """As goals name it: the accelerator's name, or `cpu`."""
    return result["machine"].get("accelerator", "cpu")


def commit() -> str:
    """The commit that was measured; `uncommitted` where the measured code differs from it.

    A tree that was copied without its repository says which it is in FASTRL_COMMIT.
    """
    if named := os.environ.get("FASTRL_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *arguments], **options).stdout.strip()

    try:
        if git("status", "--porcelain", "--", "fastrl", "kernels", "benchmarks/*.py"):
            return "uncommitted"
        return git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return "uncommitted"


def versions(*packages: str) -> dict[str, str]:
    """Python's and those of the packages; what is missing is left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def start_of_result(benchmark: str, device: torch.device) -> Result:
    """A result without entries; date and time are UTC."""
    at = datetime.datetime.now(datetime.timezone.utc)
    return {
        "benchmark": benchmark,
        "date": at.date().isoformat(),
        "time": at.strftime("%H:%M:%S"),
        "commit": commit(),
        "machine": machine(device),
        "threads": torch.get_num_threads(),
        "versions": {},
        "left": {},  # what was not done: why
        "entries": [],
    }


def place(result: Result) -> Path:
    """A result's file below the folder of all: `<device>/<date>-<commit>-<benchmark>.json`."""
    found = result["machine"]
    slug = re.sub(r"[^a-z0-9]+", "-", device_of(result).lower()).strip("-")
    folder = slug if "accelerator" in found else f"cpu-{found['cores']}core"
    return Path(folder) / f"{result['date']}-{result['commit']}-{result['benchmark']}.json"


def save(result: Result, folder: Path) -> Path:
    """Writes a result to its place below the folder of all results."""
    path = folder / place(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
