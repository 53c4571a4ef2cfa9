"""Work that is broken off from outside: by a signal, or by news of another process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_EVERY = 0.5  # seconds between two calls of ``news``
# A signal that ends a sleep or a wait for the network, and is ignored without a handler.
_SIGNAL = getattr(signal, "SIGURG", None)


class BrokenOff(BaseException):
    """Ends the work of :func:`broken_off_by`; no Exception, as users' functions may catch those."""


@contextmanager
def broken_off_by(news: Callable[[], bool]) -> Iterator[None]:
    """Context of work that is left with :class:`BrokenOff` soon after there is news. Outside of the
    main thread, and where the system has no signals, it goes on to its end.

    Args:
        news: whether to break off; called twice a second, in another thread.
    """
    main = threading.main_thread()
    if _SIGNAL is None or threading.current_thread() is not main:
        yield
        return
    ended, thread_id = threading.Event(), main.ident
    assert thread_id is not None
    working = True  # set to False by one instruction, within which no signal comes

    def leave(signal_number: int, frame: FrameType | None) -> None:
        if working:
            raise BrokenOff

    def watch() -> None:
        # Again and again: a function may have caught BrokenOff.
        while not ended.wait(_EVERY):
            if news() and not ended.is_set():
                signal.pthread_kill(thread_id, _SIGNAL)

    earlier_handler = signal.signal(_SIGNAL, leave)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        working = False
        ended.set()
        signal.signal(_SIGNAL, signal.SIG_DFL if earlier_handler is None else earlier_handler)
