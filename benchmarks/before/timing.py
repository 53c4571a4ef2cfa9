"""Times of calls that take turns, and what the machine can do at best, in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

Call = Callable[[], object]

LEAST_ROUNDS = 3
SAMPLE_SECONDS = 20e-3  # a shorter call is repeated up to this, on CPUs
MOST_CALLS = 1000
# Cycles for which a GPU waits before a timed call, so that the host is ahead of it.
HEAD_START = 2_000_000


class Times(NamedTuple):
    """Seconds per call, one entry per round.

    `device`: from the first kernel's start to the last one's end, as the GPU's own events say; on
    CPUs the same as `call`. `call`: as the caller's clock says, waiting for the result.
    """

    device: list[float]
    call: list[float]


def interleaved(
    calls: Mapping[str, Call],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Rounds of one sample of each call, A B C A B C …: what slows one slows its neighbours.

    Ends after `rounds`, or after `seconds` once there are three.
    """
    stop = clock() + seconds
    stopwatch = _CudaStopwatch(device) if device.type == "cuda" else _CpuStopwatch(calls, clock)
    times = {name: Times([], []) for name in calls}
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and clock() > stop:
            break
        for name, call in calls.items():
            device_seconds, call_seconds = stopwatch(name, call)
            times[name].device.append(device_seconds)
            times[name].call.append(call_seconds)
    return times


class _CpuStopwatch:
    """The mean over a sample of calls; how many are in one is settled by a first, uncounted one."""

    def __init__(self, calls: Mapping[str, Call], clock: Callable[[], float]) -> None:
        self.clock = clock
        self.calls_per_sample = {}
        for name, call in calls.items():
            start = clock()
            call()
            one = max(clock() - start, 1e-9)
            self.calls_per_sample[name] = min(MOST_CALLS, max(1, round(SAMPLE_SECONDS / one)))

    def __call__(self, name: str, call: Call) -> tuple[float, float]:
        times = self.calls_per_sample[name]
        start = self.clock()
        for _ in range(times):
            call()
        seconds = (self.clock() - start) / times
        return seconds, seconds


class _CudaStopwatch:
    """One call between two events, with a cold cache and the host ahead; then one by the clock."""

    def __init__(self, device: torch.device) -> None:
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.other_data = torch.empty(4 * cache, dtype=torch.int8, device=device)

    def __call__(self, name: str, call: Call) -> tuple[float, float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.other_data.zero_()
        torch.cuda._sleep(HEAD_START)
        start.record()
        call()
        end.record()
        end.synchronize()
        device_seconds = start.elapsed_time(end) / 1e3

        self.other_data.zero_()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return device_seconds, time.perf_counter() - begin


class Roofline(NamedTuple):
    """Bytes per second of a copy (read and written), flops per second of a GEMM by dtype."""

    copy: float
    gemm: dict[str, float]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def roofline(device: torch.device, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Roofline:
    """Measured now, by torch's own copy and matrix product, in each dtype; best of several."""
    on_gpu = device.type == "cuda"
    source = torch.ones((2**30 if on_gpu else 2**27) // 4, device=device)
    target = torch.empty_like(source)
    rounds = 9 if on_gpu else 5
    times = interleaved({"copy": lambda: target.copy_(source)}, device, rounds=rounds, seconds=2.0)
    copy = 2 * source.nbytes / min(times["copy"].device)
    gemm = {}
    for name in dtypes:
        # Without instructions for it, a CPU takes seconds for little in half precision.
        size = 8192 if on_gpu else (1024 if name == "fp32" else 512)
        a = torch.full((size, size), 0.5, dtype=DTYPES[name], device=device)
        times = interleaved({"gemm": lambda a=a: a @ a}, device, rounds=rounds, seconds=2.0)
        gemm[name] = 2 * size**3 / min(times["gemm"].device)
    return Roofline(copy, gemm)


def now(device: torch.device) -> float:
    """The time at which everything asked of the device so far is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ratios(peer: list[float], ours: list[float]) -> list[float]:
    """Peer's seconds over ours, round by round."""
    return [theirs / mine for theirs, mine in zip(peer, ours, strict=True)]


def spread(values: list[float], form: str) -> str:
    """`median (lowest–highest)`."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"
