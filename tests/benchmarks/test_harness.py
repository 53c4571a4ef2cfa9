"""Turns, memory, gates, goals and results, on clocks and errors that the test sets."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import (
    EAGER,
    OURS,
    Case,
    Error,
    Footprint,
    Goal,
    Measurement,
    Problem,
    Red,
    Run,
    Side,
    footprint,
    replay,
    take_turns,
    timed,
)

CPU = torch.device("cpu")


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


# --- turns ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("seconds", "rounds"), [(5.5, 5), (0.5, 3), (100.0, 9), (math.inf, 9)])
def test_rounds_fit_the_time_but_are_no_fewer_than_three(
    clock: Clock, seconds: float, rounds: int
) -> None:
    side = Side(lambda: clock.call("a", 1.0)() or {"call": 1.0})
    assert harness.rounds_within(seconds, [side], 9) == rounds
    assert harness.rounds_within(0.5, [side], 2) == 2


# --- memory --------------------------------------------------------------------------------------

A, B, C = 1000, 2000, 3000


@pytest.mark.parametrize(
    ("events", "returned", "expected"),
    [
        ([(A, 8), (A, -8), (B, 6), (B, -6)], set(), Footprint(8, 14, 8)),
        ([(A, 8), (B, 6), (A, -8), (B, -6)], set(), Footprint(14, 14, 8)),
        # What is returned is not held against the call, wherever in it it was made ...
        ([(A, 8), (B, 6), (B, -6)], {A}, Footprint(6, 14, 8)),
        # ... but what lay at its address before is.
        ([(A, 8), (A, -8), (A, 6)], {A}, Footprint(8, 14, 8)),
        # Released, though made before the call: not this call's.
        ([(C, -100), (A, 8), (A, -8)], set(), Footprint(8, 8, 8)),
    ],
    ids=["in turns", "at a time", "returned", "address used again", "made before"],
)
def test_allocations_are_replayed(events, returned, expected) -> None:
    assert replay(events, returned) == expected


def test_a_chain_of_operations_is_counted_to_the_byte() -> None:
    x = torch.ones(1000)  # 4000 bytes, not counted
    # both live when exp is worked out
    assert footprint(lambda: (x + x).exp(), lambda y: [y], CPU) == Footprint(4000, 8000, 4000)


def test_a_copy_that_an_operator_makes_inside_is_seen() -> None:
    x = torch.ones(50, 40)
    inside = footprint(lambda: torch.log_softmax(x.t(), -1), lambda y: [y], CPU)
    assert inside.largest == x.nbytes
    assert inside.peak >= x.nbytes, "the contiguous copy of x"


def test_gradients_that_are_returned_are_not_counted() -> None:
    w = torch.ones(1000, requires_grad=True)
    room = footprint(lambda: (w * 2).sum(), lambda loss: torch.autograd.grad(loss, w), CPU)
    assert room.allocated >= 8000
    assert room.peak < 8000 + 100


# --- the gate against float64 --------------------------------------------------------------------


def lucky(error: float) -> dict:
    return {"loss": Error(error, 1.0)}


def a_draw(mine: float, eager: float) -> Problem:
    """One whose exact result is 1, and ours and eager PyTorch's off by as much."""
    return Problem(
        {},
        ours=lambda: {"loss": torch.tensor(1 + mine, dtype=torch.float64)},
        eager=lambda: {"loss": torch.tensor(1 + eager, dtype=torch.float64)},
        exact=lambda: {"loss": torch.tensor(1.0, dtype=torch.float64)},
    )


def test_a_lucky_hit_of_pytorchs_is_not_the_measure() -> None:
    asked = []

    def others(mine, eager):
        for n in range(3):
            asked.append(n)
            yield a_draw(mine, eager)

    assert harness.settled(lucky(1e-6), lucky(0.0), others(1e-6, 1e-6)) <= harness.FACTOR
    assert asked == [0]
    assert harness.settled(lucky(1e-6), lucky(0.0), others(3e-6, 1e-6)) > harness.FACTOR
    assert asked == [0, 0, 1, 2]
    assert harness.settled(lucky(1e-6), lucky(1e-6), others(1.0, 0.0)) == pytest.approx(
        0.95, abs=0.1
    )
    assert asked == [0, 0, 1, 2]
    assert math.isnan(harness.settled(lucky(math.nan), lucky(1e-6), others(1e-6, 1e-6)))


@pytest.mark.parametrize("mine", [3e-6, math.nan, math.inf])
def test_an_error_beyond_twice_pytorchs_is_red(mine: float) -> None:
    assert harness.wrong_numbers(a_draw(1e-6, 1e-6)) is None
    assert "times eager PyTorch's" in harness.wrong_numbers(a_draw(mine, 1e-6))


# --- goals ---------------------------------------------------------------------------------------


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
             Goal("memory", 9), Goal("roofline", 0.25))  # fmt: skip
    reached = [ok for _, ok in harness.verdicts(an_entry(*goals), "cpu")]
    assert reached == [True, True, False, False, True]
    higher = an_entry(Goal("speedup", 2.1), Goal("memory share", 1 / 11), Goal("roofline", 0.3))
    assert not any(ok for _, ok in harness.verdicts(higher, "cpu"))


def test_a_goal_beyond_the_limit_of_the_machine_says_so() -> None:
    entry = an_entry(Goal("speedup", 4.0), eager=(3.0, 3.0), limit=(1.0, 1.5))
    assert harness.verdicts(entry, "cpu") == [("≥ 4× eager (at the limit: 2.50×)", False)]


def test_a_goal_is_for_its_devices_and_for_what_was_measured() -> None:
    entry = an_entry(Goal("seconds", 1.0, ("nvidia h",)), Goal("backward launches", 1))
    assert harness.verdicts(entry, "cpu") == [], "nobody counted backward launches"
    assert harness.verdicts(entry, "NVIDIA H100 80GB HBM3") == [("≤ 1 s", True)]


@pytest.mark.parametrize(("most", "reached"), [(1, False), (2, True)])
def test_a_fact_has_a_bound(most: int, reached: bool) -> None:
    [(words, found)] = harness.verdicts(an_entry(Goal("forward launches", most)), "cpu")
    assert (words, found) == (f"forward launches ≤ {most}", reached)


# --- a session -----------------------------------------------------------------------------------

CASE = Case("ops", "gae", "small", "some work", goals=(Goal("speedup", 1.5, against="peer"),))


def a_side(seconds: float) -> Side:
    return Side(lambda: {"call": seconds})


def test_what_is_measured_is_saved_and_told_in_short(tmp_path: Path) -> None:
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


def test_measured_again_a_case_takes_the_place_of_its_first_entry(tmp_path: Path) -> None:
    run = Run(CPU, rounds=1)
    for seconds in (1.0, 2.0):
        Measurement(run, CASE).measure({OURS: a_side(seconds)}, 1)
    (entry,) = run.results["ops"]["entries"]
    assert entry["sides"][OURS]["seconds"]["call"] == [2.0]
    assert not run.saved


def test_a_red_gate_shows_no_figures(tmp_path: Path) -> None:
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


def test_an_op_with_a_red_check_is_not_timed() -> None:
    run = Run(CPU)
    run.red_ops.add("gae")
    assert run.obstacle(CASE) == "a check of the op is red"
    assert run.obstacle(Case("ops", "whiten", "small")) is None


def test_a_result_is_filed_by_device_date_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTRL_COMMIT", "abc1234")
    result = harness.start_of_result("ppo", CPU)
    cores = result["machine"]["cores"]
    assert harness.place(result) == Path(f"cpu-{cores}core/{result['date']}-abc1234-ppo.json")
    result["machine"]["accelerator"] = "NVIDIA H100 80GB HBM3"
    assert harness.place(result).parent == Path("nvidia-h100-80gb-hbm3")
