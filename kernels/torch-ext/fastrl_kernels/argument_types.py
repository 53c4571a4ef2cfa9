"""Errors for arguments of another type than an op's annotations say, and for functions that take
others than they are called with."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import types
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_RAISED = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
_WORDS = {Tensor: "a tensor", float: "a number", int: "an integer", str: "a string"}
_KINDS: dict[Any, tuple[Any, ...]] = {
    float: (numbers.Real, torch.SymFloat, torch.SymInt),
    int: (numbers.Integral, torch.SymInt),
}


def explains_types(op: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public op: where a call fails that has an argument of another type than
    annotated, the error is a TypeError that names it and says what it must be.

    Calls are judged only when they have failed, so that other calls cost nothing more. An error
    that names the argument stays as it is.
    """

    @functools.wraps(op)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return op(*args, **kwargs)
        except _RAISED as error:
            if torch.compiler.is_compiling():
                raise
            found = _first_misfit(op, args, kwargs)
            if found is None or re.search(rf"\b{re.escape(found[0])}\b", str(error)):
                raise
            raise TypeError(found[1]) from error

    return explained


def check_takes(function: Callable[..., Any], *names: str) -> None:
    """Raises TypeError for a function that cannot be called with so many arguments, by their
    places."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        named = getattr(function, "__name__", "the function")
        raise TypeError(f"{named} must take {', '.join(names)}, in this order: {error}") from error


def _first_misfit(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, str] | None:
    """The name of the first argument of another type than annotated, and what is wrong with it."""
    try:
        given = inspect.signature(op).bind(*args, **kwargs).arguments
    except TypeError:  # too many, too few, or of no such name: Python says which
        return None
    hints = typing.get_type_hints(op)
    for name, value in given.items():
        if name in hints and (message := misfit(name, value, hints[name])):
            return name, message
    return None


def misfit(name: str, value: Any, hint: Any) -> str | None:
    """What is wrong with a value of a type that its annotation does not allow, or with a field of
    it; None where it does."""
    choices, cause = _choices(hint), None
    for choice in choices:
        if _is_a(value, choice):
            cause = _misfit_of_fields(name, value, choice)
            if cause is None:
                return None
    if cause is not None:
        return cause
    got = type(value).__name__
    if isinstance(value, tuple | list):
        got += f" of {len(value)}"
    return f"{name} must be {' or '.join(map(_words, choices))}, got {got}"


def _choices(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; fields of named tuples are not looked at."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is tuple and Ellipsis not in inner:
        fitting = isinstance(value, tuple | list) and len(value) == len(inner)
        return fitting and all(map(_is_a, value, inner))
    if origin is not None:
        return isinstance(value, origin)
    return isinstance(value, _KINDS.get(hint, hint))


def _misfit_of_fields(name: str, value: Any, hint: Any) -> str | None:
    if not hasattr(hint, "_fields"):
        return None
    hints = typing.get_type_hints(hint)
    pairs = zip(hint._fields, value, strict=True)
    messages = (misfit(f"{name}.{field}", x, hints[field]) for field, x in pairs)
    return next(filter(None, messages), None)


def _words(hint: Any) -> str:
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and Ellipsis not in inner:
        return f"({', '.join(map(_words, inner))})"
    if hint is type(None):
        return "None"
    return str(_WORDS.get(hint) or getattr(hint, "__name__", hint))
