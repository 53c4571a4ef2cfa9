"""Calls that end in time: in a thread with a time limit, or on an event loop in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Container, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

_CLOSING_SECONDS = 1.0  # for the tasks of a loop as it is closed


class TimeLimitExceeded(Exception):
    """A call did not return in time; it may be running still."""


class LoopBlocked(Exception):
    """A call does not return and blocks its event loop, which can therefore end no other call."""


class _Stopped(BaseException):
    """Carries a KeyboardInterrupt or SystemExit, its cause, out of an event loop: the loop would
    end on either, and a caller that waits for its results would wait forever."""


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine, as that of an ``async def``, of an object with an async
    ``__call__``, or of a ``functools.partial`` of these does."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    )


def wants_finished(function: Callable[..., Any], columns: Container[str] = ()) -> bool:
    """Whether a reward function is told by ``finished`` which responses were not cut: its attribute
    ``wants_finished`` says so, or without one it has a parameter ``finished`` no column fills."""
    declared = getattr(function, "wants_finished", None)
    if declared is not None:
        return bool(declared)
    try:
        return "finished" not in columns and "finished" in inspect.signature(function).parameters
    except ValueError:  # some functions written in C have no signature
        return False


def call_within(seconds: float, function: Callable[[], Any], name: str) -> Any:
    """Calls a function in a new thread called ``name``; returns its result, or raises its error.

    A thread cannot be ended from outside: one that is late runs on, its result is dropped. It is a
    daemon, so that the process can end before it does. Ctrl-C acts as the caller waits.

    Raises:
        TimeLimitExceeded: it did not return in time.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeLimitExceeded
    return outcome.result()


async def await_within(
    seconds: float | None, function: Callable[[], Coroutine[Any, Any, Any]]
) -> Any:
    """Awaits what a function returns, on an :class:`EventLoop`, and cancels it where it is late.

    Args:
        seconds: the limit; None: there is none.

    Raises:
        TimeLimitExceeded: it did not return in time.
        RuntimeError: it was cancelled from elsewhere.
    """

    async def guarded() -> Any:
        try:
            return await function()
        except (KeyboardInterrupt, SystemExit) as error:
            raise _Stopped from error

    task = asyncio.ensure_future(guarded())
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TimeLimitExceeded
        if task.cancelled():
            raise RuntimeError("the call was cancelled (asyncio.CancelledError)")
        return task.result()
    finally:
        task.cancel()


class EventLoop:
    """An asyncio event loop in a daemon thread, which ends with this object.

    One loop serves all calls, so that the clients and locks that functions keep stay valid. It can
    be used where the caller's thread runs a loop itself, as in a notebook.
    """

    def __init__(self) -> None:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def serve() -> None:
            stop = asyncio.Event()
            ready.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()

        thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name="fastrl-rewards", daemon=True
        )
        thread.start()
        self._loop, stop = ready.result()
        self._close = functools.partial(_close, self._loop, stop, thread)
        self._at_end = weakref.finalize(self, self._close, _CLOSING_SECONDS)

    def gather(
        self, coroutines: list[Coroutine[Any, Any, Any]], seconds: float | None = None
    ) -> list[Any]:
        """The results of coroutines that run at the same time; the first error cancels the others.

        Args:
            seconds: the time for which a coroutine may block the loop, awaiting nothing; None: any.

        Raises:
            LoopBlocked: the loop was blocked for longer, and cannot be used any more.
        """

        async def all_of_them() -> list[Any]:
            tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        future = asyncio.run_coroutine_threadsafe(all_of_them(), self._loop)
        try:
            while not wait([future], seconds).done:
                assert seconds is not None
                self._check_alive(seconds)
            return future.result()
        except _Stopped as stopped:
            raise stopped.__cause__ from None  # type: ignore[misc]
        finally:
            future.cancel()

    def _check_alive(self, seconds: float) -> None:
        answer: Future[None] = Future()
        self._loop.call_soon_threadsafe(answer.set_result, None)
        if not wait([answer], seconds).done:
            self._at_end.detach()
            self._close(0)
            raise LoopBlocked


def _close(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, thread: threading.Thread, seconds: float
) -> None:
    with suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(stop.set)
    if thread is not threading.current_thread():
        thread.join(seconds)
