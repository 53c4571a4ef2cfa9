"""Checks that commands make before they load anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def check_call(
    name: str, function: Callable[..., Any], arguments: Sequence[str], columns: Sequence[str]
) -> None:
    """Checks that a user's function can be called with these arguments.

    Args:
        arguments, columns: the names of the arguments that the function is called with.

    Raises:
        ValueError: a function that does not take these arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(**dict.fromkeys([*arguments, *columns]))
    except TypeError as error:
        passed = f"{', '.join(arguments)}" + (
            f" and the data set's other columns ({', '.join(columns)})" if columns else ""
        )
        raise ValueError(
            f"{name} cannot be called: {error}; it is given {passed} by name: let it take those it "
            "needs, and **columns"
        ) from None


def check_label(name: str, label: str | None, rewards: Iterable[Any]) -> None:
    """Raises ValueError where the setting ``name`` has a ``label``, and none of the rewards is a
    classifier."""
    from fastrl.rewards.classifier import ClassifierReward

    if label is not None and not any(isinstance(each, ClassifierReward) for each in rewards):
        raise ValueError(
            f"{name}={label!r} is a label of a classifier, and none is named: leave it out"
        )
