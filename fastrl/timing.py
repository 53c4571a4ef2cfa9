"""Clocks: time by phase, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch


class HostClock:
    """Wall time of contexts ``clock(phase)``, for synchronous devices; repeated phases add up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - begin

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and ``total`` since construction; call it when the device is idle."""
        return {**self._seconds, "total": time.perf_counter() - self._start}


class DeviceClock(HostClock):
    """Time between CUDA events, which are waited for only in :meth:`seconds`."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((phase, begin, end))

    def seconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        phases: dict[str, float] = {}
        for phase, begin, end in self._events:
            phases[phase] = phases.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        return {**phases, "total": time.perf_counter() - self._start}


Listener = Callable[[str], AbstractContextManager[None]]
_listener: ContextVar[Listener | None] = ContextVar("fastrl_phases", default=None)


class HeardClock(HostClock):
    """A clock whose phases run in a listener's contexts, see :func:`heard_by`."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with self._listener(phase), super().__call__(phase):
            yield


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Context; clocks that are started in it time each phase in a context ``listener(phase)``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def start_clock(device: torch.device) -> HostClock:
    """A clock for a device, which has started; within :func:`heard_by` a :class:`HeardClock`."""
    listener = _listener.get()
    if listener is not None:
        return HeardClock(listener)
    return DeviceClock() if device.type == "cuda" else HostClock()
