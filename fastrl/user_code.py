"""A user's functions (rewards, annotators, judges, losses): loaded by name, and their errors.

Their exceptions are raised as they are, but marked with the function's name, so that a command can
show the user's lines of the traceback only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastrl.nearest import did_you_mean, did_you_mean_path

_MARK, _NAME = "_fastrl_user_code", "_fastrl_name"
_files: dict[tuple[Path, int, int], Any] = {}  # modules by path, time of change and size
_loaded: set[str] = set()  # names of modules that were loaded as files, once at least
_KERNELS = importlib.util.find_spec("fastrl_kernels")
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        os.path.dirname(__file__),
        os.path.realpath(os.path.dirname(__file__)),  # the path of an editable installation
        *(os.path.realpath(x) for x in getattr(_KERNELS, "submodule_search_locations", None) or ()),
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)


@dataclass(frozen=True)
class Fault:
    """An exception in a user's function, or in its file.

    Attributes:
        where: the user's frames, as in a traceback; "" if there are none.
        message: one line: the function, the exception's type and message, and its line.
    """

    where: str
    message: str


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its exceptions marked by ``name``; an async function stays async. Callable
    objects and classes are returned unchanged, because callers may use their methods."""
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
    """The name of a function that :func:`named` returned; ``otherwise`` for any other."""
    return getattr(function, _NAME, otherwise)


def unnamed(function: Any) -> Any:
    """The function that :func:`named` has wrapped; any other function is returned as it is."""
    return function.__wrapped__ if hasattr(function, _NAME) else function


def own_copy(value: Any) -> Any:
    """A copy of nested lists and dicts for one function: its changes reach neither the data nor the
    next function. Other objects are not copied."""
    if type(value) is list:
        return [own_copy(x) if type(x) in (list, dict) else x for x in value]
    if type(value) is dict:
        return {name: own_copy(x) for name, x in value.items()}
    return value


@contextmanager
def running(name: str) -> Iterator[None]:
    """Marks exceptions in the block as errors of the user's function or file ``name``."""
    try:
        yield
    except (Exception, SystemExit) as error:
        setattr(error, _MARK, name)
        raise


class ExitCalled(RuntimeError):
    """A user's function has called ``sys.exit()`` during a run."""


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Raises :class:`ExitCalled` where code in the block calls ``sys.exit()``: else the run would
    end as if it were done, and nothing would be saved."""
    try:
        yield
    except KeyboardInterrupt:  # SIGTERM raises a KeyboardInterrupt that is a SystemExit, too
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
    """The frames below this file's last one that are in no library; without any, all below it."""
    ours = max((i for i, frame in enumerate(frames) if frame.filename == __file__), default=-1)
    below = [frame for frame in frames[ours + 1 :] if not frame.filename.startswith("<")]
    return [frame for frame in below if not frame.filename.startswith(_LIBRARIES)] or below


def is_users(file: str | None) -> bool:
    """Whether a Python file is a user's: not a library's, Python's or fastrl's."""
    return file is not None and _is_users(file)


@functools.lru_cache(maxsize=65536)
def _is_users(file: str) -> bool:
    if file.startswith((*_LIBRARIES, "<")) or os.path.realpath(file).startswith(_LIBRARIES):
        return False
    return not {"site-packages", "dist-packages"} & {*Path(file).parts}  # other environments


def load_function(name: str) -> Callable[..., Any]:
    """Loads the function of "module:function" or "path/to/file.py:function".

    Errors of the function are marked with ``name``, those of its module with the module's name or
    path. A file is run once, even if several of its functions are loaded: they share its globals.
    It imports files beside it as a program does, but for those named as an installed module.

    Raises:
        ValueError: a name that is not of these forms.
        TypeError: the name of something that cannot be called.
        ImportError, FileNotFoundError: a module, function or file that does not exist.
    """
    if ":" not in name:
        raise ValueError(f"name a function as module:function or file.py:function, not {name!r}")
    location, function_name = name.rsplit(":", 1)
    relative = location.startswith(".") and not location.endswith(".py")
    if not location or not function_name or relative:
        raise ValueError(f"name a function as module:function or file.py:function, not {name!r}")
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    try:
        function = getattr(module, function_name)
    except AttributeError:
        functions = [x for x in dir(module) if callable(getattr(module, x))]
        near = did_you_mean(function_name, functions)
        raise ImportError(f"{location} has no function {function_name!r}{near}") from None
    if not callable(function):
        raise TypeError(f"{name} is not a function but {type(function).__name__}")
    return named(name, function)


def _load_module(name: str) -> Any:
    # A console script has its own folder on the path, not the current one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with running(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise ImportError(f"there is no module {name!r}") from error
        raise


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}{did_you_mean_path(path)}")
    status = path.stat()
    key = path.resolve(), status.st_mtime_ns, status.st_size
    if key in _files:
        return _files[key]
    name = _module_name(path)
    if name in sys.modules and name not in _loaded:  # imported by the program itself
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # The file may import files beside it; their folder comes last, so that they hide no package.
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    with running(str(path)):
        spec.loader.exec_module(module)
    _files[key] = module
    _loaded.add(name)
    return module


def forget_files() -> None:
    """Makes :func:`load_function` run files anew."""
    _files.clear()


def _module_name(path: Path) -> str:
    """The module name of a file, by which other processes import pickled objects: the file's name,
    or a new one where another module, such as the standard library's json, has that name."""
    name, whole = path.stem, path.resolve()
    module = sys.modules.get(name)
    if module is None and name.isidentifier():
        spec = importlib.util.find_spec(name)
        origin = whole if spec is None else spec.origin
    else:
        origin = whole if module is None else getattr(module, "__file__", None)
    if origin is not None and Path(origin).resolve() == whole:
        return name
    return f"_fastrl_{name}_{zlib.crc32(os.fsencode(whole)):08x}"
