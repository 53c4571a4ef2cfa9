"""Checks that commands make before they load anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

_SEEDS = 2**32  # NumPy's limit


def check_seed(seed: int) -> None:
    """
    Raises:
        ValueError: a seed that NumPy does not take.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed must lie between 0 and {_SEEDS - 1}, got {seed}")


def check_call(
    name: str, function: Callable[..., Any], arguments: Sequence[str], columns: Sequence[str]
) -> None:
    """
    Args:
        arguments, columns: the names of the arguments that the function is called with.

    Raises:
        ValueError: a function that does not take these arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some functions written in C
        return
    try:
        signature.bind(**dict.fromkeys([*arguments, *columns]))
    except TypeError as error:
        given = f"{', '.join(arguments)}" + (
            f" and the data set's other columns ({', '.join(columns)})" if columns else ""
        )
        raise ValueError(
            f"{name} cannot be called: {error}; it is given {given} by name: let it take those it "
            "needs, and **columns"
        ) from None
