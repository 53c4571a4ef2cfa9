"""Settings of TRL that fastrl does not honour: any value but TRL's default is an error."""

from __future__ import annotations

import dataclasses
from typing import Any


class _Refusal(str):
    """A refused field's help. The metadata has no key of its own for it: transformers'
    HfArgumentParser, with which scripts read their configurations, hands every key to argparse."""

    @property
    def remedy(self) -> str:
        return self.removeprefix(_NOT)


_NOT = "Not supported: "


def refused(default: Any, remedy: str) -> Any:
    """A dataclass field for a setting of TRL that is not honoured.

    Args:
        default: TRL's, the only value that :func:`check_refused` lets pass.
        remedy: what to use in its place.
    """
    return dataclasses.field(default=default, metadata={"help": _Refusal(_NOT + remedy)})


def refusals(config: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a configuration that are not honoured: their defaults and remedies."""
    return {
        field.name: (field.default, field.metadata["help"].remedy)
        for field in dataclasses.fields(config)
        if isinstance(field.metadata.get("help"), _Refusal)
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
