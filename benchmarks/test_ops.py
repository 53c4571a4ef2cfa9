"""Every op beside its peers, on the shapes of real models; on a GPU after checks of its kernels.

A gate comes first: an op whose error against float64 exceeds twice that of eager PyTorch gets no
figure. A machine's speed changes while it is measured, so what it can do at best, a copy or the
library's matrix products of the same shapes, takes turns with the others.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu, harness, ops, peers
from benchmarks.conftest import RUN
from benchmarks.harness import (
    DRAWS,
    EAGER,
    OURS,
    Case,
    Measurement,
    Problem,
    Results,
    Run,
    Side,
    backward,
    described,
    error_ratio,
    errors,
    footprint,
    settled,
    too_far,
    worst_relative,
    wrong_numbers,
)
from benchmarks.ops import Shape, Sizes
from fastrl_kernels import workspace

TOY = Sizes(rows=5, vocabulary=(61, 64), steps=(37, 48), hidden=16, tokens=(37, 260), width=16)


def cases(run: Run) -> list[Case]:
    """Those that fit into half of the memory."""
    if run.toy:
        shapes = [list(ops.OPS[op].checked(TOY))[-1] for op in ops.available()]
        return [Case("ops", s.op, s.label, ops.work(s).what, s, seconds=1.0) for s in shapes]
    found = [case for op in ops.available() for case in ops.cases(op, run.device.type, run.full)]
    room = harness.all_memory(run.device) / 2
    return [case for case in found if case.of.needed_bytes + ops.work(case.of).bytes <= room]


# --- checks of the kernels -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Check:
    """`run` says what is wrong, or None."""

    name: str
    run: Callable[[], str | None]


def pytest_generate_tests(metafunc: Any) -> None:
    """Checks and profilers are for GPUs: on a CPU the kernels' own tests run in the interpreter."""
    on_gpu = metafunc.config.stash[RUN].device.type == "cuda"
    every = {
        "op": ops.available,
        "shape": lambda: [case.of for op in ops.available() for case in ops.cases(op, "cuda")],
        "tool": lambda: list(gpu.TOOLS),
    }
    for name in every.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, every[name]() if on_gpu else [], ids=str)


def test_kernels(op: str, run: Run) -> None:
    """What must hold before a time on a GPU counts: forward and backward at odd and even lengths in
    every dtype, strided inputs, masks, no wait for the device, and the same bits for a row alone
    and in a batch, and for two runs. An op that fails is not timed."""
    wrong = []
    gates = run.result("ops").setdefault("gates", [])
    for check in checks(op, run.device):
        try:
            why = check.run()
        except Exception as error:
            why = described(error)
        gates.append({"op": op, "check": check.name, "wrong": why})
        wrong += [f"{check.name}: {why}"] if why else []
        harness.free(run.device)
    if wrong:
        run.red_ops.add(op)
    run.save("ops")
    assert not wrong, "\n".join(wrong)


def checks(
    op: str, device: torch.device, backend: str = "auto", sizes: Sizes | None = None
) -> Iterator[Check]:
    """An op's checks, the most telling first."""
    record = ops.OPS[op]
    for shape in record.checked(sizes or Sizes()):
        make = partial(ops.problem, shape, device, backend=backend, pick_rows=False)
        yield Check(f"exact: {shape.label}", lambda make=make: exact(make))
        if op == "decode_attention":  # it leaves out what is dead in a way for each dtype
            yield Check(f"dead is unread: {shape.label}", lambda make=make: dead_is_unread(make()))
    # The last shape has masks, where the op has any.
    yield Check(f"strided: {shape.label}", lambda: exact(lambda seed=0: strided(make(seed=seed))))
    if op != "decode_attention":
        yield Check(f"zero where masked: {shape.label}", lambda: zero_where_masked(make()))
    yield Check(f"same bits twice: {shape.label}", lambda: same_twice(make()))
    if device.type == "cuda":
        yield Check(f"waits for nothing: {shape.label}", lambda: waits_for_nothing(make()))
    if record.row_bits:
        plain = dataclasses.replace(shape, whiten=False)
        alone = partial(ops.problem, plain, device, backend=backend)
        yield Check(f"same bits alone: {plain.label}", lambda: same_alone(alone()))


def exact(make: Callable[..., Problem]) -> str | None:
    """Error against float64 within twice that of eager PyTorch."""
    others: Iterable[Problem] = (make(seed=seed) for seed in range(1, DRAWS))
    return wrong_numbers(make(seed=0), others)


def strided(problem: Problem) -> Problem:
    """The same inputs as slices of wider memory."""

    def slice_of_more(x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        room = x.new_empty(*x.shape[:-1], x.shape[-1] + 3)
        room[..., : x.shape[-1]] = x
        return room[..., : x.shape[-1]]

    inputs = {name: slice_of_more(x) for name, x in problem.inputs.items()}
    return dataclasses.replace(problem, inputs=inputs)


def zero_where_masked(problem: Problem) -> str | None:
    """Results and gradients are exactly 0 there, also where inputs are NaN.

    Hidden states stay as they are: a head's gradient is a product with all of them.
    """
    mask = problem.inputs.get("mask")
    if mask is None:
        return None
    dirty = _with_nan(problem, ~mask)
    for name, result in dirty.results(dirty.ours).items():
        if result.shape[: mask.dim()] == mask.shape and not (result[~mask] == 0).all():
            return f"{name} is not 0 where masked"
        if not result.isfinite().all():
            return f"{name} is not finite: what is masked got in"
    return None


def dead_is_unread(problem: Problem) -> str | None:
    """NaN among the tokens of a cache that do not count changes no bit of any result."""
    plain = problem.results(problem.ours)
    dead = _with_nan(problem, ~problem.inputs["mask"])
    return _difference(dead.results(dead.ours), plain)


def _with_nan(problem: Problem, where: Tensor) -> Problem:
    def nan_where(x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.shape[: where.dim()] != where.shape:
            return x
        shape = where.shape + (1,) * (x.dim() - where.dim())
        return x.masked_fill(where.reshape(shape), torch.nan)

    dirty = problem.by_row - {"hidden"}
    inputs = {name: nan_where(x) if name in dirty else x for name, x in problem.inputs.items()}
    return dataclasses.replace(problem, inputs=inputs)


def same_twice(problem: Problem) -> str | None:
    """Two runs give the same bits."""
    return _difference(*(problem.results(problem.ours) for _ in range(2)))


def waits_for_nothing(problem: Problem) -> str | None:
    """The host asks the device for nothing, neither forward nor backward."""
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


def same_alone(problem: Problem) -> str | None:
    """A row gives the same bits alone and in the batch: the first, the last and one between."""
    together = problem.results(problem.ours)
    rows = next(len(x) for name, x in problem.inputs.items() if name in problem.by_row)
    for row in sorted({0, rows // 2, rows - 1}):
        here = slice(row, row + 1)

        def own(named: dict, here: slice = here) -> dict:
            return {k: x[here] if k in problem.by_row else x for k, x in named.items()}

        part = dataclasses.replace(
            problem, inputs=own(problem.inputs), upstream=own(problem.upstream)
        )
        expected = {name: x[here] for name, x in together.items()}
        if wrong := _difference(part.results(part.ours), expected):
            return f"row {row}: {wrong}"
    return None


def _difference(first: Results, second: Results) -> str | None:
    for name, x in first.items():
        if not torch.equal(x, second[name]):
            return f"{name} differs in {(x != second[name]).sum()} of {x.numel()} places"
    return None


# --- speed ---------------------------------------------------------------------------------------


def test_speed(measurement: Measurement, case: Case, run: Run) -> None:
    result = run.result("ops")
    result["versions"] = peers.versions()
    if "roofline" not in result and not run.toy:
        result["roofline"] = harness.roofline(run.device)
    sides = sides_of(measurement, case.of)
    least = ops.least(case.of, run.device)
    least = least or harness.copying(ops.work(case.of).bytes, run.device)
    rounds, seconds = (15, 3.0) if run.device.type == "cuda" else (9, 60.0)
    measurement.measure(sides, rounds, harness.timed(least, run.device), within=seconds)


def sides_of(measurement: Measurement, shape: Shape, backend: str = "auto") -> dict[str, Side]:
    """Fastrl's op, eager PyTorch and the peers whose results are right, with what they need."""
    run, entry = measurement.run, measurement.entry
    entry["work"] = dataclasses.asdict(ops.work(shape))
    entry["shape"] = dataclasses.asdict(shape)
    problem = ops.problem(shape, run.device, backend=backend)
    calls = {
        OURS: peers.Peer(problem.ours),
        EAGER: peers.Peer(problem.eager, ops.OPS[shape.op].eager),
    }
    if measurement.case.main and run.peers and not run.toy:
        found, entry["absent"] = peers.peers_of(shape, run.device)
        calls |= found
    judged = judge(measurement, problem, calls)
    others = (ops.problem(shape, run.device, backend=backend, seed=n) for n in range(1, DRAWS))
    if red := too_far(settled(judged[OURS], judged[EAGER], others)):
        measurement.refuse(red)
    sides = {}
    for name, found in judged.items():
        relative = worst_relative(found)
        if name not in (OURS, EAGER) and not relative <= peers.TOLERANCES[shape.dtype]:
            measurement.absent(name, f"its results are off, relative error {relative:.1e}")
            continue
        call = calls[name].call
        workspace.clear()  # kept from the call before, it would not be counted
        halves = (partial(problem.forward, call), lambda s: backward(s).values(), run.device)
        memory = footprint(*halves)
        launched = harness.launches(*halves)
        side = sides[name] = harness.timed(partial(problem.results, call), run.device)
        side.note = calls[name].note
        side.facts = {"error": error_ratio(found, judged[EAGER])}
        side.memory = {"peak": memory.peak}
        if launched:
            names = ("forward launches", "backward launches")
            side.facts |= dict(zip(names, launched, strict=True))
    return sides


def judge(
    measurement: Measurement, problem: Problem, calls: dict[str, peers.Peer]
) -> dict[str, harness.Errors]:
    """The errors of all against float64. Peers that fail are absent; ours and eager PyTorch may
    not fail."""
    found = {}
    for name, peer in calls.items():
        try:
            found[name] = problem.results(peer.call)
        except Exception as error:  # whatever it is, it is the peer's affair
            if name in (OURS, EAGER):
                raise
            measurement.absent(name, described(error))
    return errors(problem, found)


# --- what profilers say --------------------------------------------------------------------------


def test_bytes(shape: Shape, run: Run) -> None:
    """Bytes that a main case's kernels move, as Nsight Compute counts them."""
    result = run.result("ops")
    if not gpu.available("ncu"):
        pytest.skip("ncu is not on the path")
    try:
        counted = gpu.count_bytes(shape)
    except (gpu.Refused, subprocess.TimeoutExpired) as reason:
        pytest.skip(f"ncu cannot count here: {reason}")
    result.setdefault("bytes", []).append({"op": shape.op, "label": shape.label, **counted})
    run.save("ops")


def test_sanitizer(tool: str, run: Run) -> None:
    """A pass of every kernel under a tool that looks for what no result shows."""
    if not gpu.available("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not on the path")
    try:
        found = gpu.sanitize(tool)
    except (gpu.Refused, subprocess.TimeoutExpired) as reason:
        pytest.skip(f"{tool} cannot work here: {reason}")
    run.result("ops").setdefault("sanitizer", []).append(found)
    run.save("ops")
    assert not found["errors"], "\n".join(found["first"])
