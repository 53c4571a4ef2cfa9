"""Checks that commands make before they load anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastrl.run.folder import RunFolder

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_SEEDS = 2**32  # NumPy's limit


def check_dtype(name: str) -> None:
    """
    Raises:
        ValueError: a dtype that weights cannot have.
    """
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}: choose one of {', '.join(DTYPES)}")


def check_seed(seed: int) -> None:
    """
    Raises:
        ValueError: a seed that NumPy does not take.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed must lie between 0 and {_SEEDS - 1}, got {seed}")


def check_model(job: Any) -> str:
    """The folder of the model that a job starts from.

    Args:
        job: with ``model``, ``lora_r`` and ``output``.

    Raises:
        FileNotFoundError: there is no model.
        ValueError: the run would save an adapter in place of its base model.
    """
    from fastrl.models.load import base_folder, is_adapter, model_folder

    folder, target = model_folder(job.model), RunFolder(job.output).model
    if not target.is_dir() or not (job.lora_r or is_adapter(job.model)):
        return folder
    if Path(base_folder(job.model)).resolve() == target.resolve():
        raise ValueError(
            f"output {job.output}: {target} is the base of the adapter, which would be saved in "
            "its place: name another output"
        )
    return folder


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
