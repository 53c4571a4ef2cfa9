"""Sides that take turns, and what the machine can do at best."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.cases import OURS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_ROUNDS = 3
SAMPLE_SECONDS = 20e-3  # on CPUs, shorter calls are repeated within a turn up to this
MOST_CALLS = 1000
# Cycles for which a GPU waits before a timed call, so that the host runs ahead of it.
HEAD_START = 2_000_000

Seconds = dict[str, float]  # by phase


@dataclasses.dataclass
class Side:
    """One way to do a case's work.

    Args:
        turn: does the work once and returns the seconds of each phase.
        note: what distinguishes it.
        calls: of the work per turn.
        limit: seconds of the least work, one per turn, as an entry holds them; they limit the phase
            `limited`, or the first one.
        memory, facts: what else is known once the turns are over.
    """

    turn: Callable[[], Seconds]
    note: str = ""
    calls: int = 1
    limit: list[float] | None = None
    limited: str | None = None
    memory: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def take_turn(self) -> None:
        """One turn that counts."""
        for phase, seconds in self.turn().items():
            self.seconds.setdefault(phase, []).append(seconds)

    def described(self) -> dict[str, Any]:
        """The side as an entry holds it."""
        return {name: value for name, value in vars(self).items() if name != "turn"}


def one_after_another(
    target: Callable[[], object], *, setup: Callable[[], object], rounds: int
) -> None:
    """Stands in for pytest-benchmark's ``pedantic`` outside pytest."""
    for _ in range(rounds):
        setup()
        target()


def take_turns(
    sides: Mapping[str, Side],
    rounds: int,
    pedantic: Callable[..., object] = one_after_another,
    own: str = OURS,
) -> None:
    """Rounds with one turn of each side (A B C A B C …), so that what slows one side slows its
    neighbours too. The side `own` is the last in a round, and the one pytest-benchmark times."""
    others = [side for name, side in sides.items() if name != own]

    def setup() -> None:
        for side in others:
            side.take_turn()

    pedantic(sides[own].take_turn, setup=setup, rounds=rounds)


def timed(call: Callable[[], object], device: torch.device) -> Side:
    """A call as a side. It is made once, uncounted, which also settles the calls per turn.

    On GPUs, phase "device" is the time between two events, with a cold cache and the host ahead;
    "call" is by the clock, waiting for the result. On CPUs a turn is the mean over its calls.
    """
    if device.type == "cuda":
        call()
        return Side(_turn_on_cuda(call, device))
    gc.collect()  # or it would fall into the one call that settles how many make a turn
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


def _turn_on_cuda(call: Callable[[], object], device: torch.device) -> Callable[[], Seconds]:
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    other_data = torch.empty(4 * cache, dtype=torch.int8, device=device)

    def turn() -> Seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other_data.zero_()
        torch.cuda._sleep(HEAD_START)
        start.record()
        call()
        end.record()
        end.synchronize()
        on_device = start.elapsed_time(end) / 1e3
        other_data.zero_()
        begin = now(device)
        call()
        return {"device": on_device, "call": now(device) - begin}

    return turn


def rounds_within(seconds: float, sides: Iterable[Side], most: int) -> int:
    """How many rounds fit into the seconds, by an uncounted turn of each side; at least three."""
    begin = time.perf_counter()
    for side in sides:
        side.turn()
    once = time.perf_counter() - begin
    return int(max(min(LEAST_ROUNDS, most), min(most, seconds / max(once, 1e-9))))


def now(device: torch.device) -> float:
    """The time, once the device has finished everything asked of it so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """As many threads inside; 0: as many as before."""
    if not count:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copying(nbytes: float, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes this many bytes in total."""
    source = torch.ones(max(1, round(nbytes / 2)), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def copy_speed(device: torch.device) -> float:
    """Bytes per second of torch's copy, read and written, measured now; the best of several."""
    nbytes = 2**31 if device.type == "cuda" else 2**28
    return nbytes / _fastest(copying(nbytes, device), device)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    side = timed(call, device)
    for _ in range(rounds_within(2.0, [side], 9 if device.type == "cuda" else 5)):
        side.take_turn()
    return min(next(iter(side.seconds.values())))
