"""Times of phases add up."""

import torch

from fastrl import timing
from fastrl.timing import DeviceClock, HostClock, start_clock


def test_phases_add_up_and_the_rest_is_in_the_total(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 20.0, 21.0, 50.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    measured = HostClock()
    for phase in ("a", "b", "a"):
        with measured(phase):
            pass
    assert measured.seconds() == {"a": 3.0, "b": 4.0, "total": 50.0}


def test_a_cpu_is_timed_by_the_host():
    assert type(start_clock(torch.device("cpu"))) is HostClock
    assert type(start_clock(torch.device("cuda"))) is DeviceClock


def test_a_device_is_waited_for_when_times_are_read(monkeypatch):
    waited, now = [], iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(timing.time, "perf_counter", iter([0.0, 20.0]).__next__)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(now)

        def elapsed_time(self, end):
            assert waited
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    measured = DeviceClock()
    for _ in range(2):
        with measured("a"):
            pass
    assert not waited
    assert measured.seconds() == {"a": 8.0, "total": 20.0}
