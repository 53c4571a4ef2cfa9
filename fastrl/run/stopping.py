"""Ctrl-C and SIGTERM: a run stops at the end of its step, with its state saved."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from fastrl.run.launcher import is_main_process, process_count

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = 5.0  # seconds after Ctrl-C within which a launcher sends it once more to its processes
_asked: int | None = None  # the signal that came; global, as a process has one set of handlers
_asked_at = 0.0


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and has stopped.

    Attributes:
        status: the exit status, 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, *message: str):
        super().__init__(*message)
        self.status: int = 128 + (_asked or signal.SIGINT)


class Terminated(Stopped, SystemExit):
    """A run was stopped by SIGTERM; a program that does not catch it ends with status 143."""

    def __init__(self, *message: str):
        super().__init__(*message)
        self.status = self.code = int(128 + signal.SIGTERM)


def asked() -> bool:
    """Whether the run is to stop at the end of its step."""
    return _asked is not None


@contextlib.contextmanager
def stop_at_a_steps_end() -> Iterator[None]:
    """Context in which Ctrl-C and SIGTERM only make :func:`asked` true; a second Ctrl-C interrupts
    at once. A signal that the process was started to ignore, as a shell has background jobs ignore
    Ctrl-C, stays ignored, and one that the program handles itself is left to it. At the end
    handlers are restored, and a signal that came acts if the block raised nothing. The context has
    no effect outside the main thread, which alone gets signals, nor within another such context.

    Raises:
        KeyboardInterrupt, Terminated: the block raised :class:`Stopped`, after Ctrl-C or SIGTERM.
    """
    global _asked
    usual = (signal.SIG_DFL, signal.default_int_handler)
    taken = {}
    if threading.current_thread() is threading.main_thread():
        taken = {x: present for x in _SIGNALS if (present := signal.getsignal(x)) in usual}
    if not taken:
        yield
        return
    _asked = None
    for number in taken:
        signal.signal(number, _handle)
    try:
        yield
    except Stopped as stopped:
        if _asked == signal.SIGTERM:
            if is_main_process():  # SystemExit shows no message
                print(f"fastrl: {stopped}", file=sys.stderr, flush=True)
            raise Terminated(*stopped.args) from None
        if _asked == signal.SIGINT:  # Python looks for this very class as it exits
            raise KeyboardInterrupt(*stopped.args) from None
        raise
    else:
        late = _asked
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        _asked = None
    if late is not None:  # a signal came after the block's last call of asked()
        signal.raise_signal(late)


def _handle(number: int, frame: FrameType | None) -> None:
    global _asked, _asked_at
    if _asked is None:
        _asked, _asked_at = number, time.monotonic()
        if is_main_process():
            print(
                "\nfastrl: the run stops as soon as it can save its state; Ctrl-C (once more) "
                "stops it at once",
                file=sys.stderr,
                flush=True,
            )
    elif number == signal.SIGINT and not _is_forwarded(_asked_at):
        raise KeyboardInterrupt


def _is_forwarded(first: float) -> bool:
    """Whether a second Ctrl-C is the launcher's, which sends on to its processes what the terminal
    has sent them already."""
    return process_count() > 1 and time.monotonic() - first < _FORWARDED


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context of what must be written as a whole: Ctrl-C and SIGTERM act at its end, a second
    Ctrl-C within it at once. It has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept: dict[int, float] = {}  # signals, and when they came first

    def keep(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in kept and not _is_forwarded(kept[number]):
            raise KeyboardInterrupt
        kept.setdefault(number, time.monotonic())

    # Ignored signals stay ignored; handlers that Python did not set (None) cannot be restored.
    others = (signal.SIG_IGN, None)
    before = {int(x): present for x in _SIGNALS if (present := signal.getsignal(x)) not in others}
    for number in before:
        signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in kept:
            signal.raise_signal(number)
