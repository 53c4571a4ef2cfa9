"""Contexts in which attributes of objects, or a context variable, have other values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_OF_ITS_CLASS = object()


@contextmanager
def attributes_set(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Context in which attributes of objects (object, name, value) have other values."""
    # Not by setattr, in which nn.Module looks for parameters.
    places = [(vars(owner), name, value) for owner, name, value in attributes]
    before = [(held, name, held.get(name, _OF_ITS_CLASS)) for held, name, _ in places]
    try:
        for held, name, value in places:
            held[name] = value
        yield
    finally:
        for held, name, value in before:
            if value is _OF_ITS_CLASS:
                held.pop(name, None)
            else:
                held[name] = value


@contextmanager
def variable_set(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Context in which a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
