"""Turns and rounds, on a clock that the test winds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.before import timing
from benchmarks.before.timing import interleaved

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


def test_implementations_take_turns():
    clock = Clock()
    calls = {"a": clock.call("a", 1.0), "b": clock.call("b", 2.0)}
    times = interleaved(calls, CPU, rounds=3, seconds=100, clock=clock)
    assert "".join(clock.log) == "ab" + "ababab"  # the first pair settles how many make a sample
    assert times["a"].device == [1.0] * 3
    assert times["b"].call == [2.0] * 3


def test_the_time_allowed_ends_the_rounds_after_three():
    clock = Clock()
    times = interleaved({"a": clock.call("a", 1.0)}, CPU, rounds=100, seconds=5.5, clock=clock)
    assert len(times["a"].device) == 5
    times = interleaved({"a": clock.call("a", 9.0)}, CPU, rounds=100, seconds=5.5, clock=clock)
    assert len(times["a"].device) == timing.LEAST_ROUNDS


def test_short_calls_are_sampled_many_at_a_time():
    clock = Clock()
    times = interleaved({"a": clock.call("a", 1e-3)}, CPU, rounds=2, seconds=1, clock=clock)
    assert len(clock.log) == 1 + 2 * 20
    assert times["a"].device == pytest.approx([1e-3, 1e-3])
