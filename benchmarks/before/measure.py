"""One case, start to end: the gate, the memory, the times in turns; and how it is printed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import torch

from benchmarks.before import build, timing
from benchmarks.before.cases import Case, work
from benchmarks.before.launches import in_words, launches
from benchmarks.before.limit import limit
from benchmarks.before.memory import footprint
from benchmarks.before.peers import TOLERANCES, Peer, described, peers_of
from benchmarks.before.problem import (
    DRAWS,
    FACTOR,
    Error,
    Implementation,
    Problem,
    backward,
    errors_of,
    forward,
    ratio,
    results,
    settled,
    worst_relative,
)
from fastrl_kernels import scratch

OURS, EAGER, LIMIT = "fastrl", "eager", "limit"
EAGER_NOTES = {
    "gae": "the classic per-step loop",
    "kl_rewards": "a sequence at a time",
    "decode_attention": "a masked softmax over the whole slots",
}


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much a case may cost: rounds of timing, seconds, and bytes."""

    rounds: int
    seconds: float
    memory: int
    peers: bool = True  # other than eager PyTorch


def too_much(case: Case, effort: Effort, roof: timing.Roofline, device: torch.device) -> str | None:
    """Why a case is left out, from what eager PyTorch will need for it; None where it is not.

    A main case may take any time: its rounds end when the seconds are over.
    """
    rows, elements = case.rows, case.elements
    weights = case.vocabulary * case.hidden
    # fp32 logits, log-softmax, softmax, product, and two gradients in eager PyTorch; results.
    need = elements * (4 * 6 + 4 * case.itemsize) + weights * (4 * case.itemsize + 8)
    need += work(case).bytes  # what the limit copies
    if need > effort.memory:
        return f"needs about {need / 2**30:.0f} GiB, {effort.memory / 2**30:.0f} are allowed"
    flops = 6.0 * rows * weights
    once = flops / roof.gemm[case.dtype] + 100 * elements / roof.copy
    # The gate costs some ten of eager's times in float64, on GPUs made for it and on CPUs alike.
    seconds = once * (2 * effort.rounds + 10)
    if seconds > effort.seconds and not case.main:
        return f"needs about {seconds:.0f} s, {effort.seconds:.0f} are allowed"
    return None


def measure(
    case: Case, device: torch.device, effort: Effort, backend: str = "auto"
) -> dict[str, Any]:
    """The case's entry in a result file; without times where the gate is red."""
    began = time.perf_counter()
    problem = build.problem(case, device, backend=backend)
    entry: dict[str, Any] = {
        "op": case.op,
        "label": case.label,
        "case": {k: v for k, v in dataclasses.asdict(case).items() if k != "goal"},
        "goal": dataclasses.asdict(case.goal) if case.goal else None,
        "work": dataclasses.asdict(work(case)),
        "limit": [],
        "implementations": {},
        "absent": {},
        "red": None,
    }
    peers = {OURS: Peer(problem.ours), EAGER: Peer(problem.eager, EAGER_NOTES.get(case.op, ""))}
    if case.main and effort.peers:
        found, entry["absent"] = peers_of(case, device)
        peers |= found

    judged = judge(problem, peers, entry["absent"])
    others = (build.problem(case, device, backend=backend, seed=n) for n in range(1, DRAWS))
    error = settled(judged[OURS], judged[EAGER], others)
    if not error <= FACTOR:  # NaN is red
        entry["red"] = f"error is {error:.3g} times eager PyTorch's, {FACTOR:g} are allowed"
        return entry
    calls: dict[str, Implementation] = {}
    for name, errors in judged.items():
        relative = worst_relative(errors)
        if name not in (OURS, EAGER) and not relative <= TOLERANCES[case.dtype]:
            entry["absent"][name] = f"its results are off, relative error {relative:.1e}"
            continue
        calls[name] = peers[name].call
        entry["implementations"][name] = {
            "note": peers[name].note,
            "error": ratio(errors, judged[EAGER]),
            "relative": relative,
        }

    for name, call in calls.items():
        scratch.clear()  # kept from the call before, it would not be counted
        halves = (lambda call=call: forward(problem, call), lambda s: backward(s).values(), device)
        entry["implementations"][name]["memory"] = footprint(*halves)._asdict()
        entry["implementations"][name]["launches"] = launches(*halves)
    turns = {name: lambda call=call: results(problem, call) for name, call in calls.items()}
    times = timing.interleaved(
        {LIMIT: limit(case, device), **turns}, device, rounds=effort.rounds, seconds=effort.seconds
    )
    entry["limit"] = times.pop(LIMIT).device
    for name, taken in times.items():
        entry["implementations"][name] |= {"seconds": taken.device, "call_seconds": taken.call}
    entry["took"] = round(time.perf_counter() - began, 1)
    return entry


def judge(
    problem: Problem, peers: dict[str, Peer], absent: dict[str, str]
) -> dict[str, dict[str, Error]]:
    """The errors of all against float64; peers that fail are noted in `absent`.

    Ours and eager PyTorch may not fail.
    """
    found = {}
    for name, peer in peers.items():
        try:
            found[name] = results(problem, peer.call)
        except Exception as error:  # whatever it is, it is the peer's affair
            if name in (OURS, EAGER):
                raise
            absent[name] = described(error)
    return errors_of(problem, found)


def share_of_roofline(entry: dict[str, Any], name: str = OURS) -> float:
    """The least time over the time taken: 1 is as fast as a copy or a GEMM."""
    taken = entry["implementations"][name]["seconds"]
    return statistics.median(timing.ratios(entry["limit"], taken))


def speedups(entry: dict[str, Any], name: str) -> list[float]:
    """The peer's device time over ours, round by round."""
    taken = entry["implementations"]
    return timing.ratios(taken[name]["seconds"], taken[OURS]["seconds"])


def verdicts(entry: dict[str, Any], device_name: str) -> list[tuple[str, bool]]:
    """Each part of the goal in words, and whether it is reached; none where there is no goal."""
    goal = entry["goal"]
    if not goal or entry["red"] or not device_name.lower().startswith(goal["device"]):
        return []
    taken = entry["implementations"]
    found = []
    seconds = statistics.median(taken[OURS]["seconds"])
    peak = taken[OURS]["memory"]["peak"]
    if goal["seconds"] is not None:
        found.append((f"≤ {duration(goal['seconds'])}", seconds <= goal["seconds"]))
    if goal["memory_bytes"] is not None:
        found.append((f"≤ {size(goal['memory_bytes'])}", peak <= goal["memory_bytes"]))
    if goal.get("launches") and (seen := taken[OURS].get("launches")):
        most = dict(zip(("forward", "backward"), goal["launches"], strict=True))
        words = " + ".join(str(n) for n in goal["launches"] if n)
        few = all(len(seen[half]) <= n for half, n in most.items())
        found.append((f"{words} launches", few))
    against = goal["against"]
    if goal["speedup"] is not None and against in taken:
        faster = statistics.median(speedups(entry, against))
        at_most = statistics.median(timing.ratios(taken[against]["seconds"], entry["limit"]))
        words = f"≥ {goal['speedup']:g}× {against}"
        # Beyond what the machine can do: then no implementation is that fast.
        words += f" (at the limit: {at_most:.2f}×)" if at_most < goal["speedup"] else ""
        found.append((words, faster >= goal["speedup"]))
    if goal["memory_share"] is not None and against in taken:
        most = goal["memory_share"] * taken[against]["memory"]["peak"]
        found.append((f"memory ≤ {goal['memory_share']:.3g} of {against}'s", peak <= most))
    return found


def render(entry: dict[str, Any], device_name: str) -> str:
    """A case's lines for a terminal."""
    lines = [f"{entry['op']}: {entry['label']}"]
    if entry["red"]:
        return f"{lines[0]}\n  RED, no figures: {entry['red']}"
    lines.append(
        f"  {'':<20}{'device time':>28}{'whole call':>12}{'fastrl faster by':>22}"
        f"{'memory':>12}{'error':>9}{'roofline':>10}"
    )
    lines.append(f"  {LIMIT:<20}{spread_of_durations(entry['limit']):>28}  {entry['work']['what']}")
    for name, taken in entry["implementations"].items():
        faster = timing.spread(speedups(entry, name), ".2f") if name != OURS else ""
        lines.append(
            f"  {name:<20}{spread_of_durations(taken['seconds']):>28}"
            f"{duration(statistics.median(taken['call_seconds'])):>12}{faster:>22}"
            f"{size(taken['memory']['peak']):>12}{taken['error']:>8.2f}×"
            f"{share_of_roofline(entry, name):>10.0%}  {_remarks(taken)}"
        )
    lines += [f"  {name}: {reason}" for name, reason in entry["absent"].items()]
    for goal, reached in verdicts(entry, device_name):
        lines.append(f"  goal {goal}: {'reached' if reached else 'MISSED'}")
    return "\n".join(lines)


def _remarks(taken: dict[str, Any]) -> str:
    seen = taken.get("launches")
    return "; ".join(x for x in (f"{in_words(seen)} launches" if seen else "", taken["note"]) if x)


def duration(seconds: float) -> str:
    """`12.3 ms`, in the unit that leaves one to three digits before the point."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError


def spread_of_durations(seconds: list[float]) -> str:
    """`median (lowest–highest)` in one unit."""
    middle = duration(statistics.median(seconds))
    unit = middle.split()[1]
    scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    low, high = (f"{x / scale:.3g}" for x in (min(seconds), max(seconds)))
    return f"{middle} ({low}–{high})"


def size(nbytes: float) -> str:
    """`12.3 MiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} B"
