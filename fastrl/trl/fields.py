"""Settings of TRL that fastrl does not honour: any value but TRL's default is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

_REMEDY = "refused"  # key of a field's metadata


def refused(default: Any, remedy: str) -> Any:
    """A dataclass field for a setting of TRL that is not honoured.

    Args:
        default: TRL's, the only value that :func:`check_refused` lets pass.
        remedy: what to use in its place.
    """
    return dataclasses.field(default=default, metadata={"help": remedy, _REMEDY: remedy})


def refusals(config: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a configuration that are not honoured: their defaults and remedies."""
    return {
        field.name: (field.default, field.metadata[_REMEDY])
        for field in dataclasses.fields(config)
        if _REMEDY in field.metadata
    }


def check_refused(config: Any) -> None:
    """
    Raises:
        ValueError: a setting that is not honoured, named with its remedy.
    """
    for name, (default, remedy) in refusals(config).items():
        value = getattr(config, name)
        if value != default:
            raise ValueError(
                f"{name}={value!r} is not supported by {type(config).__name__}: {remedy}"
            )
