"""Errors in a user's functions: rewards, annotators, judges, reweighters.

Their exceptions are raised as they are, but marked with the function's name, so that a command can
show the user's lines of the traceback only.
"""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MARK, _NAME = "_fastrl_user_code", "_fastrl_name"
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(__file__),
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


@dataclass(frozen=True)
class Fault:
    """An exception in a user's function, or in the file it is in.

    Attributes:
        where: the user's frames, as in a traceback; "" if the call itself failed.
        message: one line: the function, the exception's type and message, and its line.
    """

    where: str
    message: str


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its exceptions marked by ``name``; other callables are returned as they
    are, because callers may use their methods. An async function stays one."""
    if not inspect.isroutine(function):
        return function
    call: Callable[..., Any]
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            with running(name):
                return await function(*args, **kwargs)
    else:

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with running(name):
                return function(*args, **kwargs)

    setattr(call, _NAME, name)
    return call


def name_of(function: Any, otherwise: str) -> str:
    """The name of a function that :func:`named` returned, for messages."""
    return getattr(function, _NAME, otherwise)


def own_copy(value: Any) -> Any:
    """Lists and dicts, whatever they hold of such in turn, as a function's own: what it changes in
    them reaches neither the data nor the next function. Other objects stay the same."""
    if type(value) is list:
        return [own_copy(x) if type(x) in (list, dict) else x for x in value]
    if type(value) is dict:
        return {name: own_copy(x) for name, x in value.items()}
    return value


@contextmanager
def running(name: str) -> Iterator[None]:
    """Marks exceptions in the block as errors of the user's ``name``."""
    try:
        yield
    except (Exception, SystemExit) as error:
        setattr(error, _MARK, name)
        raise


class ExitCalled(RuntimeError):
    """A user's function has called ``sys.exit()`` in the midst of a run."""


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raises :class:`ExitCalled` where code in the block calls ``sys.exit()``: the run would end as
    one that is done does, and nothing of it would be saved."""
    try:
        yield
    except KeyboardInterrupt:  # a run that SIGTERM has ended is an exit, too
        raise
    except SystemExit as exits:
        trace = exits.__traceback__
        error = ExitCalled(
            f"it called sys.exit({exits.code!r}), which would pass for the end of the run: raise "
            "an exception instead"
        )
        last = _users(traceback.extract_tb(trace))[-1]
        setattr(error, _MARK, getattr(exits, _MARK, last.name))
        raise error.with_traceback(trace) from None


def fault_of(error: BaseException) -> Fault | None:
    """What to show of an exception that :func:`running` marked; None for other exceptions."""
    name = getattr(error, _MARK, None)
    if name is None:
        return None
    text = " ".join(str(error).split())
    kind = type(error).__name__
    message = f"{name} raised {kind}: {text}" if text else f"{name} raised {kind}"
    if isinstance(error, SyntaxError):
        return Fault(
            "", f"{name} raised {kind}: {error.msg} ({error.filename}, line {error.lineno})"
        )
    frames = _users(traceback.extract_tb(error.__traceback__))
    if not frames:
        return Fault("", message)
    last = frames[-1]
    return Fault(
        "".join(traceback.format_list(frames)), f"{message} ({last.filename}, line {last.lineno})"
    )


def _users(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """The frames below the last one of this file that are not in a library; all of them if the
    function itself is in one."""
    ours = max((i for i, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    below = [frame for frame in frames[ours + 1 :] if not frame.filename.startswith("<")]
    return [frame for frame in below if not frame.filename.startswith(_LIBRARIES)] or below
