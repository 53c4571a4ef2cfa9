"""What commands refuse before they load anything."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_SEEDS = 2**32  # NumPy's limit
# Where the package has another name than the tracker.
_PACKAGES = {
    "azure_ml": "azureml-mlflow",
    "comet_ml": "comet-ml",
    "flyte": "flytekit",
}


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


def check_output(output: str) -> None:
    """Refuses an output folder that cannot be written.

    Raises:
        ValueError: no name, or a file in the way.
        PermissionError: a folder that cannot be written to.
    """
    if not output.strip():
        raise ValueError("output is empty: name a folder")
    there = Path(output).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ValueError(f"output {output}: {there} is a file, name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"output {output}: {there} cannot be written to")


def check_trackers(flag: str, names: Iterable[str]) -> None:
    """Refuses trackers that are unknown or not installed.

    Args:
        flag: that names them, for messages.

    Raises:
        ValueError: a tracker that neither transformers nor accelerate knows.
        ImportError: one whose package is not installed.
    """
    from accelerate.tracking import get_available_trackers
    from accelerate.utils import LoggerType
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    if flag == "report_to":
        known, ready = set(INTEGRATION_TO_CALLBACK), set(get_available_reporting_integrations())
    else:
        known = {str(kind.value) for kind in LoggerType} - {"all"}
        ready = {str(getattr(t, "value", t)) for t in get_available_trackers()}
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in known:
            raise ValueError(f"unknown tracker {flag}={name!r}: choose one of {_list(known)}")
        if name not in ready:
            package = _PACKAGES.get(name, name)
            raise ImportError(f"{flag}={name} needs a package: pip install {package}")


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


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
