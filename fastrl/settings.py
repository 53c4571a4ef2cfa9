"""Settings: fields of dataclasses that command lines, documents and checks read."""

from __future__ import annotations

import dataclasses
import numbers
import os
import types
import typing
import warnings
from collections.abc import Container, Sequence
from dataclasses import field
from functools import cache
from typing import Any

_REFUSED = "Not supported: "  # before the remedy, in a setting's help
_IDLE = "Changes nothing: "
# Of which a truth value is no number.
_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}


def setting(text: str, default: Any = dataclasses.MISSING, aliases: Sequence[str] = ()) -> Any:
    """A field of a dataclass, with its text for ``--help``.

    Args:
        default: the default, or a function that makes it.
        aliases: other flags for it, such as "--report-to", whose names YAML files may use, too.
    """
    metadata: dict[str, Any] = {"help": text}
    if aliases:
        both = [x for a in aliases for x in (a, f"--{a[2:].replace('-', '_')}")]
        metadata["aliases"] = list(dict.fromkeys(both))
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def setting_like(kind: Any, name: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with the help of field ``name`` of the dataclass ``kind``, and its default unless
    another is given."""
    like = kind.__dataclass_fields__[name]
    default = like.default if default is dataclasses.MISSING else default
    return setting(like.metadata["help"], default)


class _Remedy(str):
    """The help of a setting that is not honoured. Parsers of command lines hand all of a field's
    metadata to argparse, so that no key of its own can mark it."""


def refused(default: Any, remedy: str) -> Any:
    """A dataclass field for a setting of TRL that is not honoured.

    Args:
        default: TRL's, the only value that :func:`check_refused` lets pass.
        remedy: what to use in its place.
    """
    return field(default=default, metadata={"help": _Remedy(f"{_REFUSED}{remedy}.")})


def refusals(config: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a configuration that are not honoured: their defaults and remedies."""
    found = {}
    for each in dataclasses.fields(config):
        text = each.metadata.get("help")
        if isinstance(text, _Remedy):
            found[each.name] = (each.default, text[len(_REFUSED) : -1])
    return found


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


class _Likeness(str):
    """The help of a setting that changes nothing, as :class:`_Remedy`."""


def idle(default: Any, instead: str) -> Any:
    """A dataclass field for a setting of TRL that is taken and changes nothing, as it chooses
    how something is computed and not what.

    Args:
        default: TRL's; of another value :func:`warn_of_idle` warns.
        instead: what has its meaning.
    """
    return field(default=default, metadata={"help": _Likeness(f"{_IDLE}{instead}.")})


def idle_settings(config: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a configuration that change nothing: their defaults, and what to use."""
    found = {}
    for each in dataclasses.fields(config):
        text = each.metadata.get("help")
        if isinstance(text, _Likeness):
            found[each.name] = (each.default, text[len(_IDLE) : -1])
    return found


def warn_of_idle(config: Any, stacklevel: int) -> None:
    """Warns once of all settings that change nothing and were set, with what to use."""
    given: dict[str, list[str]] = {}
    for name, (default, instead) in idle_settings(config).items():
        value = getattr(config, name)
        if value != default:
            given.setdefault(instead, []).append(f"{name}={value!r}")
    if given:
        parts = [f"{', '.join(names)} ({instead})" for instead, names in given.items()]
        text = f"settings that change nothing in {type(config).__name__}: {'; '.join(parts)}"
        warnings.warn(text, stacklevel=stacklevel + 1)


def check_types(config: Any, kind: type, but: Container[str] = ()) -> None:
    """Makes whole floats of ``int`` settings whole numbers, as in ``steps=1e5``.

    Args:
        config: an instance of a dataclass.
        kind: the dataclass, or one that it is made of, whose settings are checked: those that are
            truth values, numbers or texts.
        but: settings that are not. Nor are those that change nothing or are not honoured.

    Raises:
        TypeError: a value of another type, named with the one that it must have.
    """
    for name, wanted in _plain_types(kind).items():
        if name in but:
            continue
        value = getattr(config, name)
        if int in wanted and float not in wanted and _is(value, float) and value == value // 1:
            setattr(config, name, int(value))
        elif not any(_is(value, each) for each in wanted):
            allowed = [_NAMES[each] for each in wanted if each in _NAMES]
            nothing = ["None"] if types.NoneType in wanted else []
            raise TypeError(
                f"{name} must be {' or '.join(allowed + nothing)}, got {value!r} "
                f"({type(value).__name__})"
            )


@cache
def _plain_types(kind: type) -> dict[str, tuple[type, ...]]:
    """The types of those settings that have only such as :func:`_is` tells apart."""
    found = {}
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        hint = hints[each.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        wanted = typing.get_args(hint) if is_union else (hint,)
        unread = isinstance(each.metadata.get("help"), (_Remedy, _Likeness))
        if each.init and not unread and all(x in (*_NAMES, types.NoneType) for x in wanted):
            found[each.name] = wanted
    return found


def _is(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is str:
        return isinstance(value, (str, os.PathLike))
    number = {int: numbers.Integral, float: numbers.Real}
    return isinstance(value, number.get(kind, kind))
