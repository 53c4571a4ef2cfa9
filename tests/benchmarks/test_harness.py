"""Turns, memory, gates, goals and results, on clocks and errors that the test sets."""

import json
import math
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gate, report, results, timing
from benchmarks.cases import EAGER, OURS, Case, Goal, verdicts
from benchmarks.gate import Error, Problem
from benchmarks.harness import Measurement, Red, Run
from benchmarks.memory import footprint, replay
from benchmarks.timing import Side, take_turns, timed

CPU = torch.device("cpu")
CASE = Case("ops", "gae", "small", "some work", goals=(Goal("speedup", 1.5, against="peer"),))


class Clock:
    """Time passes only in calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float):
        def run() -> None:
            self.log.append(name)
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


def test_sides_take_turns_and_fastrl_is_what_is_benchmarked(clock: Clock) -> None:
    sides = {name: timed(clock.call(name, s), CPU) for name, s in ((OURS, 1.0), ("peer", 2.0))}
    assert clock.log == [OURS, "peer"], "a first, uncounted call settles how many make a turn"
    clock.log.clear()
    benchmarked = []

    def pedantic(target, *, setup, rounds):
        for _ in range(rounds):
            setup()
            began = clock.now
            target()
            benchmarked.append(clock.now - began)

    take_turns(sides, 3, pedantic)
    assert clock.log == ["peer", OURS] * 3
    assert benchmarked == [1.0] * 3
    assert sides[OURS].seconds == {"call": [1.0] * 3}
    assert sides["peer"].seconds == {"call": [2.0] * 3}


def test_short_calls_are_repeated_in_a_turn_and_the_count_is_known(clock: Clock) -> None:
    side = timed(clock.call("a", 1e-3), CPU)
    assert side.calls == 20
    side.take_turn()
    assert len(clock.log) == 1 + 20
    assert side.seconds["call"] == pytest.approx([1e-3])


@pytest.mark.parametrize(("seconds", "rounds"), [(5.5, 5), (0.5, 3), (math.inf, 9)])
def test_rounds_fit_the_time_but_are_no_fewer_than_three(
    clock: Clock, seconds: float, rounds: int
) -> None:
    side = Side(lambda: clock.call("a", 1.0)() or {"call": 1.0})
    assert timing.rounds_within(seconds, [side], 9) == rounds
    assert timing.rounds_within(0.5, [side], 2) == 2


A, B, C = 1000, 2000, 3000


@pytest.mark.parametrize(("events", "returned", "peak"), [
    ([(A, 8), (A, -8), (B, 6), (B, -6)], set(), 8),
    ([(A, 8), (B, 6), (A, -8), (B, -6)], set(), 14),
    # What is returned is not counted, wherever in the call it was made ...
    ([(A, 8), (B, 6), (B, -6)], {A}, 6),
    # ... but what lay at its address before is.
    ([(A, 8), (A, -8), (A, 6)], {A}, 8),
    # Released, though made before the call: not this call's.
    ([(C, -100), (A, 8), (A, -8)], set(), 8),
], ids=["in turns", "at a time", "returned", "address used again", "made before"])  # fmt: skip
def test_allocations_are_replayed(events, returned, peak) -> None:
    assert replay(events, returned) == peak


def test_memory_is_counted_to_the_byte_with_copies_inside_operators() -> None:
    x = torch.ones(50, 20)  # 4000 bytes, not counted
    # both live while exp is computed, of which the result is returned
    assert footprint(lambda: (x + x).exp(), lambda y: [y], CPU) == 4000
    transposed = footprint(lambda: torch.log_softmax(x.t(), -1), lambda y: [y], CPU)
    assert transposed >= x.nbytes, "the contiguous copy of x"
    w = torch.ones(1000, requires_grad=True)
    assert footprint(lambda: (w * 2).sum(), lambda loss: torch.autograd.grad(loss, w), CPU) < 8100


def lucky(error: float) -> dict:
    return {"loss": Error(error, 1.0)}


def a_draw(mine: float, eager: float) -> Problem:
    """The exact result is 1; these are the errors of ours and of eager PyTorch's."""
    one = {name: 1 + x for name, x in (("ours", mine), ("eager", eager), ("exact", 0.0))}
    scalars = {name: torch.tensor(x, dtype=torch.float64) for name, x in one.items()}
    return Problem({}, **{name: lambda x=x: {"loss": x} for name, x in scalars.items()})


def test_one_lucky_result_of_pytorchs_does_not_fail_an_op() -> None:
    asked = []

    def others(mine, eager):
        for n in range(3):
            asked.append(n)
            yield a_draw(mine, eager)

    assert gate.too_far(lucky(1e-6), lucky(0.0), others(1e-6, 1e-6)) is None
    assert asked == [0]
    assert gate.too_far(lucky(1e-6), lucky(0.0), others(3e-6, 1e-6))
    assert asked == [0, 0, 1, 2]
    assert gate.too_far(lucky(1e-6), lucky(1e-6), others(1.0, 0.0)) is None
    assert asked == [0, 0, 1, 2], "a draw that passes is enough"
    assert "nan times" in gate.too_far(lucky(math.nan), lucky(1e-6), others(1e-6, 1e-6))


@pytest.mark.parametrize("mine", [3e-6, math.nan, math.inf])
def test_an_error_beyond_twice_pytorchs_fails_the_gate(mine: float) -> None:
    assert gate.wrong_numbers(a_draw(1e-6, 1e-6)) is None
    assert "times eager PyTorch's" in gate.wrong_numbers(a_draw(mine, 1e-6))


def an_entry(
    *goals: Goal, ours=(1.0, 1.0), eager=(3.0, 1.0), peaks=(10, 100), limit=(0.25, 0.25)
) -> dict:
    both = zip((OURS, EAGER), (ours, eager), peaks, strict=True)
    sides = {
        name: Side(dict, seconds={"call": list(taken)}, memory={"peak": peak}).described()
        for name, taken, peak in both
    }
    sides[OURS] |= {"limit": list(limit), "facts": {"forward launches": 2}}
    return Case("ops", "gae", "x", goals=goals).entry() | {"sides": sides}


def test_goals_are_judged_by_medians_of_paired_rounds() -> None:
    goals = (Goal("speedup", 2.0), Goal("memory share", 1 / 8), Goal("seconds", 0.5),
             Goal("memory", 9), Goal("roofline", 0.25), Goal("forward launches", 1))  # fmt: skip
    found = dict(verdicts(an_entry(*goals), "cpu"))
    assert list(found.values()) == [True, True, False, False, True, False]
    assert "forward launches ≤ 1" in found
    higher = an_entry(Goal("speedup", 2.1), Goal("memory share", 1 / 11), Goal("roofline", 0.3))
    assert not any(ok for _, ok in verdicts(higher, "cpu"))


def test_a_goal_beyond_the_limit_of_the_machine_says_so() -> None:
    entry = an_entry(Goal("speedup", 4.0), eager=(3.0, 3.0), limit=(1.0, 1.5))
    assert verdicts(entry, "cpu") == [("≥ 4× eager (at the limit: 2.50×)", False)]


def test_a_goal_is_for_its_devices_and_for_what_was_measured() -> None:
    entry = an_entry(Goal("seconds", 1.0, ("nvidia h",)), Goal("backward launches", 1))
    assert verdicts(entry, "cpu") == [], "nobody counted backward launches"
    assert verdicts(entry, "NVIDIA H100 80GB HBM3") == [("≤ 1 s", True)]


def a_side(seconds: float) -> Side:
    return Side(lambda: {"call": seconds})


def test_a_measured_case_is_saved_and_its_figures_are_in_extra_info(tmp_path: Path) -> None:
    run, info = Run(CPU, rounds=2, results=tmp_path), {}
    measurement = Measurement(run, CASE, info=info)
    measurement.entry["work"] = {"bytes": 8e9, "flops": 0, "what": "all of it"}
    sides = {OURS: a_side(2.0), "peer": a_side(3.0)}
    sides[OURS].memory = {"peak": 7}
    measurement.measure(sides, 9, a_side(1.0))
    (path,) = tmp_path.glob("cpu-*/*-ops.json")
    saved = json.loads(path.read_text())
    assert "accelerator" not in saved["machine"]
    (entry,) = saved["entries"]
    assert entry["sides"][OURS]["seconds"] == {"call": [2.0, 2.0]}
    assert entry["sides"]["peer"]["limit"] == [1.0, 1.0]
    assert info["ratio"] == {"peer": 1.5}
    assert (info["bytes"], info["GB/s"], info["of the roofline"]) == (8e9, 4.0, 0.5)
    assert (info["memory, peak"], info["goals"]) == (7, {"≥ 1.5× peer": True})


def test_measured_again_a_case_takes_the_place_of_its_first_entry() -> None:
    run = Run(CPU, rounds=1)
    for seconds in (1.0, 2.0):
        Measurement(run, CASE).measure({OURS: a_side(seconds)}, 1)
    (entry,) = run.results["ops"]["entries"]
    assert entry["sides"][OURS]["seconds"]["call"] == [2.0]
    assert not run.saved


def test_a_failed_gate_shows_no_figures(tmp_path: Path) -> None:
    run = Run(CPU, results=tmp_path)
    with pytest.raises(Red, match="it is off"):
        Measurement(run, CASE).refuse("it is off")
    (entry,) = json.loads(run.saved["ops"].read_text())["entries"]
    assert (entry["red"], entry["sides"]) == ("it is off", {})


def test_a_case_that_would_not_end_in_time_is_not_begun_and_noted(tmp_path: Path) -> None:
    clock = Clock()
    run = Run(CPU, minutes=2.0, results=tmp_path, clock=clock)
    assert run.obstacle(CASE) is None
    clock.now = 70.0
    assert run.obstacle(CASE) == "about 60 s, 50 s were left"
    left = json.loads(run.saved["ops"].read_text())["left"]
    assert left == {"gae: small": "about 60 s, 50 s were left"}


def test_a_result_is_filed_by_device_date_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTRL_COMMIT", "abc1234")
    result = results.start_of_result("ppo", CPU)
    cores = result["machine"]["cores"]
    assert results.place(result) == Path(f"cpu-{cores}core/{result['date']}-abc1234-ppo.json")
    result["machine"]["accelerator"] = "NVIDIA H100 80GB HBM3"
    assert results.place(result).parent == Path("nvidia-h100-80gb-hbm3")


def test_a_result_says_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, saved in ((None, True), ("active", True), ("PASSIVE", False)):
        monkeypatch.delenv(results.WAIT_POLICY, raising=False)
        if said is not None:
            monkeypatch.setenv(results.WAIT_POLICY, said)
        result = results.start_of_result("ppo", CPU)
        assert result["machine"]["wait_policy"] == said
        assert (report.WAIT_POLICY in report.processor(result)) == (said is not None)
        assert (results.why_not_recorded() is None) == saved
