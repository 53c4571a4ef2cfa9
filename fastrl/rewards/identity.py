"""Hashes of reward functions, so that a run that is resumed with another function says so."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from fastrl.models.utils import checksum
from fastrl.run.checkpoints import OF_CODE
from fastrl.user_code import unnamed

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def identity_of(reward: Any) -> str:
    """A hash of what a reward computes, 12 hex digits. For a function it covers the code, and what
    the code reads by name from its own module or closure: functions, classes, models, plain values.
    For an object it covers the class, public numbers and texts, and the code that it holds; for a
    model its weights. It does not cover other modules, files and servers, nor the paths of any, nor
    what docstrings and comments of fastrl's own code say."""
    lines = _lines_of(unnamed(reward), set())  # without the wrapper that holds its path
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def identities_of(rewards: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Hashes of reward functions with their names, as settings of a run."""
    return {f"{OF_CODE} {name}": identity_of(reward) for name, reward in rewards}


def _lines_of(x: Any, seen: set[int]) -> Iterator[str]:
    """Lines that identify a value."""
    if isinstance(x, _PLAIN):
        yield repr(x)
    elif isinstance(x, list | tuple | set | frozenset | dict):
        yield type(x).__name__
        parts: Iterable[Any] = x.items() if isinstance(x, dict) else x
        lines = ["\n".join(_lines_of(part, seen)) for part in parts]
        yield from sorted(lines) if isinstance(x, set | frozenset) else lines
    elif id(x) not in seen:
        seen.add(id(x))
        yield from _of_code(x, seen)


def _of_code(x: Any, seen: set[int]) -> Iterator[str]:
    if isinstance(x, functools.partial):
        yield from _lines_of([x.func, x.args, x.keywords], seen)
    elif isinstance(x, nn.Module):
        yield checksum({**dict(x.named_parameters()), **dict(x.named_buffers())})
    elif isinstance(x, MethodType):
        yield from _lines_of([x.__func__, x.__self__], seen)
    elif isinstance(x, FunctionType):
        yield _source(x)
        for name in _names(x.__code__):
            value = x.__globals__.get(name)
            if _is_own(value, x.__module__):
                yield name
                yield from _lines_of(value, seen)
        for cell in x.__closure__ or ():
            yield from _lines_of(_content(cell), seen)
    elif isinstance(x, type):
        yield _source(x)
    elif hasattr(x, "__dict__"):
        yield _source(type(x))
        for name, value in sorted(vars(x).items()):
            if not name.startswith("_") and _decides(value):
                yield name
                yield from _lines_of(value, seen)
    else:
        yield f"{type(x).__name__} {getattr(x, '__qualname__', '')}"


def _is_own(value: Any, module: str) -> bool:
    """Whether a value is a plain value, a model, or code of that module."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_own(each, module) for each in value)
    if isinstance(value, dict):
        return all(_is_own(each, module) for pair in value.items() for each in pair)
    if isinstance(value, functools.partial):
        return _is_own(value.func, module)
    if isinstance(value, FunctionType | MethodType | type):
        return value.__module__ == module
    return isinstance(value, (*_PLAIN, nn.Module))


def _decides(attribute: Any) -> bool:
    """Whether an object's attribute decides what the object does, rather than records its past."""
    if isinstance(attribute, bool | int | float | str | nn.Module | FunctionType | MethodType):
        return True
    package = type(attribute).__module__.partition(".")[0]
    return callable(attribute) and package not in ("torch", "transformers", "tokenizers")


def _names(code: CodeType) -> list[str]:
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _names(x)]
    names = dict.fromkeys([*code.co_names, *inner])
    return [name for name in names if name != "__file__"]  # where the code lies


def _source(x: Any) -> str:
    """The source of a function or class; where there is none, its code or its name."""
    try:
        source = textwrap.dedent(inspect.getsource(x))
        is_ours = (getattr(x, "__module__", None) or "").partition(".")[0] == "fastrl"
        return _without_words(source) if is_ours else source
    except SyntaxError:  # of a lambda, a part of whose line is no statement
        return source
    except (OSError, TypeError):
        if isinstance(x, FunctionType):
            consts = [c for c in x.__code__.co_consts if isinstance(c, _PLAIN)]
            return f"{x.__code__.co_code.hex()} {consts} {x.__code__.co_names}"
        return getattr(x, "__qualname__", type(x).__name__)


def _without_words(source: str) -> str:
    """The lines of a source, without docstrings, comments and blank lines."""
    lines = source.splitlines()
    documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for i in range(docstring.lineno - 1, docstring.end_lineno or 0):
                lines[i] = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            at, column = token.start
            lines[at - 1] = lines[at - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell of a closure
        return None
