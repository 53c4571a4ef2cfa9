"""Every op beside its peers, on the shapes of real models; on a GPU after a check of its kernels.

A gate comes first: an op whose error against float64 exceeds twice that of eager PyTorch gets no
figure. A machine's speed changes while it is measured, so what it can do at best, a copy or the
library's matrix products of the same shapes, takes turns with the others.
"""

from __future__ import annotations

import dataclasses
import subprocess
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import memory, ops, peers, products, profilers, results, timing
from benchmarks.cases import EAGER, OURS, Case
from benchmarks.conftest import RUN
from benchmarks.gate import (
    DRAWS,
    Problem,
    backward,
    error_ratio,
    errors,
    too_far,
    worst_relative,
    wrong_numbers,
)  # fmt: skip
from benchmarks.harness import Measurement, Run
from benchmarks.ops import Shape, Sizes
from benchmarks.timing import Side
from fastrl_kernels import workspace

TOY = Sizes(rows=5, vocabulary=(61, 64), steps=(37, 48), hidden=16, tokens=(37, 260), width=16)


def cases(run: Run) -> list[Case]:
    """The cases that fit into half of the memory."""
    if run.toy:
        shapes = [list(ops.OPS[op].checked(TOY))[-1] for op in ops.available()]
        return [Case("ops", s.op, s.label, ops.work(s).what, s, seconds=1.0) for s in shapes]
    found = [case for op in ops.available() for case in ops.cases(op, run.device.type, run.full)]
    room = memory.all_memory(run.device) / 2
    return [case for case in found if case.of.needed_bytes + ops.work(case.of).bytes <= room]


def pytest_generate_tests(metafunc: Any) -> None:
    """Checks and profilers are for GPUs: on a CPU the kernels' own tests run in the interpreter."""
    on_gpu = metafunc.config.stash[RUN].device.type == "cuda"
    every = {
        "op": ops.available,
        "shape": lambda: [case.of for op in ops.available() for case in ops.cases(op, "cuda")],
        "tool": lambda: list(profilers.TOOLS),
    }
    for name in every.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, every[name]() if on_gpu else [], ids=str)


def test_kernels(op: str, run: Run) -> None:
    """Results and gradients at odd and even lengths, in every dtype, with masks: within the gate,
    and without waiting for the device. An op that fails is not timed."""
    gates = run.result("ops").setdefault("gates", [])
    wrong = []
    for shape in ops.OPS[op].checked(Sizes()):
        for name, check in (("exact", exact), ("waits for nothing", waits_for_nothing)):
            try:
                why = check(shape, run.device)
            except Exception as error:
                why = peers.why_absent(error)
            gates.append({"op": op, "check": f"{name}: {shape.label}", "wrong": why})
            wrong += [f"{name}: {shape.label}: {why}"] if why else []
        memory.free(run.device)
    if wrong:
        run.red_ops.add(op)
    run.save("ops")
    assert not wrong, "\n".join(wrong)


def exact(shape: Shape, device: torch.device, backend: str = "auto") -> str | None:
    """Why an op fails the gate on a shape, all rows and the mask given."""
    make = partial(ops.problem, shape, device, backend=backend, pick_rows=False)
    return wrong_numbers(make(), (make(seed=seed) for seed in range(1, DRAWS)))


def waits_for_nothing(shape: Shape, device: torch.device) -> str | None:
    """Whether the host waits for the device, forward or backward."""
    problem = ops.problem(shape, device, pick_rows=False)
    problem.results(problem.ours)  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.results(problem.ours)
    except RuntimeError as error:
        return f"it waits for the device: {error}"[:300]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def test_speed(measurement: Measurement, case: Case, run: Run) -> None:
    result = run.result("ops")
    result["versions"] = results.versions(*peers.PACKAGES)
    if "roofline" not in result and not run.toy:
        result["roofline"] = products.roofline(run.device)
    with timing.threads(case.of.threads):
        _measure(measurement, case.of, run)


def _measure(measurement: Measurement, shape: Shape, run: Run) -> None:
    """Gate, then turns with the least work of the shape."""
    sides = sides_of(measurement, shape)
    rounds, seconds = (15, 3.0) if run.device.type == "cuda" else (9, 60.0)
    least, measurement.entry["roofs"] = ops.least(shape, run.device)
    limit = timing.timed(least, run.device)
    measurement.measure(sides, rounds, limit, within=seconds)


def sides_of(measurement: Measurement, shape: Shape) -> dict[str, Side]:
    """Fastrl's op, eager PyTorch and the peers whose results are right, with memory and launches.

    Peers that fail are absent; fastrl and eager PyTorch may not fail.
    """
    run, entry, record = measurement.run, measurement.entry, ops.OPS[shape.op]
    entry["work"] = dataclasses.asdict(ops.work(shape))
    entry["shape"] = dataclasses.asdict(shape)
    problem = ops.problem(shape, run.device)
    calls = {OURS: peers.Peer(problem.ours), EAGER: peers.Peer(problem.eager, record.eager)}
    found = {name: problem.results(peer.call) for name, peer in calls.items()}
    if measurement.case.main and run.peers and not run.toy:
        for name, peer in others(measurement, record, problem).items():
            try:
                found[name] = problem.results(peer.call)
                calls[name] = peer
            except Exception as error:  # other libraries fail in any way
                measurement.absent(name, peers.why_absent(error))
    judged = errors(problem, found)
    del found  # its memory
    draws = (ops.problem(shape, run.device, seed=n) for n in range(1, DRAWS))
    if red := too_far(judged[OURS], judged[EAGER], draws):
        measurement.refuse(red)
    sides = {}
    for name, error in judged.items():
        relative = worst_relative(error)
        if name not in (OURS, EAGER) and not relative <= peers.TOLERANCES[shape.dtype]:
            measurement.absent(name, f"its results are off, relative error {relative:.1e}")
            continue
        call, note = calls[name]
        workspace.clear()  # else the call's workspace would exist already, and not be counted
        halves = (partial(problem.forward, call), lambda s: backward(s).values(), run.device)
        peak, launched = memory.footprint(*halves), memory.launches(*halves)
        side = sides[name] = timing.timed(partial(problem.results, call), run.device)
        side.note, side.memory = note, {"peak": peak}
        side.facts = {"error": error_ratio(error, judged[EAGER]), **launched}
    return sides


def others(measurement: Measurement, record: ops.Op, problem: Problem) -> dict[str, peers.Peer]:
    """The peers that can take the case; the entry notes why the others cannot."""
    makers = {"torch.compile": peers.torch_compile(problem.eager)} if record.torch_compile else {}
    shape, device = measurement.case.of, measurement.run.device
    found, absent = peers.peers_of({**makers, **record.peers}, shape, device)
    measurement.entry["absent"] |= absent
    return found


def test_bytes(shape: Shape, run: Run) -> None:
    """Bytes that a main case's kernels move, as Nsight Compute counts them."""
    result = run.result("ops")
    try:
        counted = profilers.count_bytes(shape)
    except (profilers.Refused, subprocess.TimeoutExpired) as reason:
        pytest.skip(f"ncu cannot count here: {reason}")
    result.setdefault("bytes", []).append({"op": shape.op, "label": shape.label, **counted})
    run.save("ops")


def test_sanitizer(tool: str, run: Run) -> None:
    """A pass of every kernel under a tool that finds faults which results do not show."""
    try:
        found = profilers.sanitize(tool)
    except (profilers.Refused, subprocess.TimeoutExpired) as reason:
        pytest.skip(f"{tool} cannot work here: {reason}")
    run.result("ops").setdefault("sanitizer", []).append(found)
    run.save("ops")
    assert not found["errors"], "\n".join(found["first"])
