"""What commands refuse before they load anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastrl.run.folder import RunFolder

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_SEEDS = 2**32  # NumPy's limit


def check_dtype(name: str) -> None:
    """Refuses an unknown dtype.

    Raises:
        ValueError: a dtype that weights cannot have.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")


def check_seed(seed: int) -> None:
    """Refuses a seed out of range.

    Raises:
        ValueError: a seed that NumPy does not take.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed must lie between 0 and {_SEEDS - 1}, got {seed}")


def check_base(job: Any) -> None:
    """Refuses a run that would save an adapter in the place of its base.

    Args:
        job: with ``model``, ``lora_r`` and ``output``.

    Raises:
        ValueError: the base is the model in the output folder.
    """
    from fastrl.models.load import base_folder, is_adapter

    there = RunFolder(job.output).model
    if not there.is_dir() or not (job.lora_r or is_adapter(job.model)):
        return
    if Path(base_folder(job.model)).resolve() == there.resolve():
        raise ValueError(
            f"output {job.output}: {there} is the base of the adapter, which would be saved in its "
            "place: name another output"
        )


def check_call(
    name: str, function: Callable[..., Any], arguments: Sequence[str], columns: Sequence[str]
) -> None:
    """Refuses a function that cannot be called with these names.

    Args:
        arguments, columns: what the function is called with, by name.

    Raises:
        ValueError: a function that cannot be called so.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(**dict.fromkeys([*arguments, *columns]))
    except TypeError as error:
        given = f"{', '.join(arguments)}" + (
            f" and the data set's other columns ({', '.join(columns)})" if columns else ""
        )
        raise ValueError(
            f"{name} cannot be called: {error}; it is given {given} by name: take those that it "
            "needs, and **columns"
        ) from None
