"""Ctrl-C and SIGTERM: a run stops at the end of its step, with its state saved."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from fastrl.run.launcher import is_main_process

_asked: int | None = None  # the signal: handlers belong to the process, as this does


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has.

    Attributes:
        status: the exit status, 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, *message: str):
        super().__init__(*message)
        self.status = 128 + (_asked or signal.SIGINT)


def asked() -> bool:
    """Whether the run is to stop at the end of its step."""
    return _asked is not None


@contextlib.contextmanager
def stop_at_a_steps_end() -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM are kept until :func:`asked` is read; a second one
    interrupts at once. A signal that the process was started to ignore, as a shell has background
    jobs ignore Ctrl-C, stays ignored. Handlers are restored at the end. Without effect outside the
    main thread, where there are no signals."""
    global _asked
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked = None
    before = {
        number: signal.signal(number, _handle)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _asked = None


def _handle(number: int, frame: FrameType | None) -> None:
    global _asked
    if _asked is not None:
        raise KeyboardInterrupt
    _asked = number
    if is_main_process():
        print(
            "\nfastrl: the run stops as soon as it can save its state; once more stops it at once",
            file=sys.stderr,
            flush=True,
        )
