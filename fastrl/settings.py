"""Settings: fields of dataclasses that command lines, documents and checks read."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
import types
import typing
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from types import MappingProxyType
from typing import Any

_REFUSED = "Not supported: "  # before the remedy, in a setting's help
_IDLE = "Changes nothing: "
_RANGES = {
    "(0, inf)": "be positive",
    "(0, inf]": "be positive",
    "[0, inf)": "be 0 or more",
    "[0, inf]": "be 0 or more",
    "[1, inf)": "be at least 1",
    "(-inf, inf)": "be a number",
    "[-inf, inf]": "be a number",
    "[0, 4294967295]": "lie between 0 and 4294967295",
}
_INT64, _ABOVE_FLOAT32 = 2**63 - 1, 2.0**128
_EXPONENT = re.compile(r"[+-]?\d+[eE][+-]?\d+")
_YAML_HINT = ": YAML reads 1e-5 as a text, write 1.0e-5"
# Names of plain types in messages; a truth value counts as no number.
_NAMES: dict[type, str] = {
    **{bool: "True or False", int: "a whole number", float: "a number", str: "a text"},
    **{list: "a list", dict: "a dict"},
}


class _Bounded(str):
    """The help of a number with a range, or of a text with choices, which it holds as attributes:
    parsers of command lines pass all keys of a field's metadata to argparse."""

    within = ""
    choices: Collection[str] | Callable[[], Iterable[str]] = ()


def setting(
    text: str,
    default: Any = dataclasses.MISSING,
    aliases: Sequence[str] = (),
    within: str = "",
    choices: Collection[str] | Callable[[], Iterable[str]] = (),
    bare: bool = False,
) -> Any:
    """A field of a dataclass, with its text for ``--help``.

    Args:
        default: the default, or a function that makes it.
        aliases: other flags for the setting, such as "--report-to"; YAML files may use the names.
        within: the interval in which :func:`check_ranges` wants a number, or each number of a list,
            such as "[0, inf)".
        choices: what a text, or each text of a list, may be; or a function that returns them, for a
            table that grows.
        bare: the flag alone means True, for settings that may also be None.
    """
    # A table of names is kept as it is, and not read yet: users add to it.
    grows = callable(choices) or isinstance(choices, Mapping)
    if within or grows or choices:
        text = _Bounded(text)
        text.within, text.choices = within, choices if grows else tuple(choices)  # type: ignore[arg-type]
    metadata: dict[str, Any] = {"help": text}
    if bare:
        metadata |= {"nargs": "?", "const": True}
    if aliases:
        both = [x for a in aliases for x in (a, f"--{a[2:].replace('-', '_')}")]
        metadata["aliases"] = list(dict.fromkeys(both))
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def kept_setting(text: str, default: Any = None) -> Any:
    """A field of a dataclass for a setting of another version of TRL or transformers, see
    :mod:`fastrl.eras`; the field is no flag, and no parameter of the dataclass's ``__init__``."""
    return field(default=default, init=False, metadata={"help": text})


def kept_settings(config: Any) -> dict[str, Any]:
    """The settings made by :func:`kept_setting` that were set: their values by name."""
    kept = (x for x in dataclasses.fields(config) if not x.init and "help" in x.metadata)
    return {x.name: getattr(config, x.name) for x in kept if getattr(config, x.name) != x.default}


def setting_like(kind: Any, name: str, default: Any = dataclasses.MISSING) -> Any:
    """A field with the help, and by default the default, of ``kind``'s field ``name``."""
    like = kind.__dataclass_fields__[name]
    default = like.default if default is dataclasses.MISSING else default
    return setting(like.metadata["help"], default)


class _Remedy(str):
    """The help of a setting that is not honoured; its class marks the field."""


def refused(default: Any, remedy: str) -> Any:
    """A dataclass field for a setting of TRL that is not honoured.

    Args:
        default: TRL's default, the only value that :func:`check_refused` lets pass.
        remedy: what to use in its place.
    """
    return field(default=default, metadata={"help": _Remedy(f"{_REFUSED}{remedy}.")})


def warn_of_unread_settings(
    config: Any, unread: Iterable[tuple[str, str]], stacklevel: int
) -> None:
    """Warns of settings that were set and that nothing reads, once.

    Args:
        unread: names, and why nothing reads them.
    """
    defaults = type(config).__dataclass_fields__
    shown = [
        f"{name}={getattr(config, name)!r} ({why})"
        for name, why in unread
        if getattr(config, name) != defaults[name].default
    ]
    if shown:
        message = f"settings that nothing reads: {', '.join(shown)}"
        warnings.warn(message, stacklevel=stacklevel + 1)


def refusals(config: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a configuration that are not honoured: their defaults and remedies. A class
    lists fields of its bases that it does not honour in ``not_supported``."""
    return _helped_by(config, _Remedy, len(_REFUSED), "not_supported")


def check_refused(config: Any) -> None:
    """Raises ValueError for a setting that is not honoured, named with its remedy: as the flag that
    it is where the class, of a command's settings, is ``of_command``."""
    for name, (default, remedy) in refusals(config).items():
        value = getattr(config, name)
        if value == default:
            continue
        if getattr(config, "of_command", False):
            raise ValueError(f"--{name.replace('_', '-')} {value} is not supported: {remedy}")
        raise ValueError(f"{name}={value!r} is not supported by {type(config).__name__}: {remedy}")


class _Likeness(str):
    """The help of a setting that changes nothing; its class marks the field."""


def idle(default: Any, instead: str) -> Any:
    """A dataclass field for a setting of TRL that is accepted and changes nothing: it would choose
    how something is computed, not what.

    Args:
        default: TRL's default; :func:`warn_of_idle` warns of another value.
        instead: what has this meaning in fastrl.
    """
    return field(default=default, metadata={"help": _Likeness(f"{_IDLE}{instead}.")})


def idle_settings(config: Any) -> dict[str, tuple[Any, str]]:
    """The settings of a configuration that change nothing: their defaults, and what to use. A class
    lists such fields of its bases in ``changes_nothing``."""
    return _helped_by(config, _Likeness, len(_IDLE), "changes_nothing")


def _helped_by(config: Any, kind: type[str], begin: int, table: str) -> dict[str, tuple[Any, str]]:
    """The settings that a configuration's class lists in ``table``, and those whose help is a
    ``kind``: their defaults, and the listed text, or the help from ``begin`` to its full stop."""
    fields = {each.name: each for each in dataclasses.fields(config)}
    listed: Mapping[str, str] = getattr(config, table, {})
    # Some versions of transformers lack a listed field.
    texts = {name: text for name, text in listed.items() if name in fields}
    for name, each in fields.items():
        if isinstance(text := each.metadata.get("help"), kind):
            texts[name] = text[begin:-1]
    return {
        name: (each.default_factory() if callable(each.default_factory) else each.default, text)
        for name, text in texts.items()
        for each in (fields[name],)
    }


def warn_of_idle(config: Any, stacklevel: int) -> None:
    """Warns once of all settings that change nothing and were set, with what to use."""
    by_remedy: dict[str, list[str]] = {}
    for name, (default, instead) in idle_settings(config).items():
        value = getattr(config, name)
        if value != default:
            by_remedy.setdefault(instead, []).append(f"{name}={value!r}")
    if by_remedy:
        parts = [f"{', '.join(names)} ({instead})" for instead, names in by_remedy.items()]
        text = f"settings that change nothing in {type(config).__name__}: {'; '.join(parts)}"
        warnings.warn(text, stacklevel=stacklevel + 1)


def check_types(config: Any, kind: type, but: Container[str] = ()) -> None:
    """Checks types of settings; makes whole floats of ``int`` settings ints, as in ``steps=1e5``.

    Args:
        config: an instance of a dataclass.
        kind: the dataclass, or a base of it, whose settings are checked: those that are truth
            values, numbers, texts, lists or dicts, unless they change nothing or are not honoured.
        but: names of settings that are not checked.

    Raises:
        TypeError: a value of another type than its setting's; names both.
        ValueError: a number that is beyond float32.
    """
    for name, wanted in _plain_types(kind).items():
        if name not in but:
            value = getattr(config, name)
            typed = _typed(name, value, wanted)
            if typed is not value:
                object.__setattr__(config, name, typed)  # sets fields of frozen dataclasses, too


def typed_arguments(function: Callable[..., Any], **values: Any) -> tuple[Any, ...]:
    """Arguments of a function, converted to the types that it declares, as :func:`check_types` does
    with settings: whole floats become whole numbers.

    Raises:
        TypeError, ValueError: see :func:`check_types`.
    """
    hints = typing.get_type_hints(function)
    return tuple(_typed(name, value, _kinds(hints[name])) for name, value in values.items())


def _typed(name: str, value: Any, wanted: tuple[Any, ...]) -> Any:
    if int in wanted and float not in wanted and _is(value, float) and value == value // 1:
        return value if isinstance(value, int) else int(value)
    if float in wanted and _is(value, float) and _INT64 < abs(value) < math.inf:
        if abs(value) >= _ABOVE_FLOAT32:
            raise ValueError(f"{name} must be less than 3.4e38, float32's largest, got {value}")
        return float(value)  # torch takes no larger whole numbers
    if not any(_is(value, each) for each in wanted):
        allowed = [_NAMES[each] for each in wanted if each in _NAMES]
        nothing = ["None"] if types.NoneType in wanted else []
        yaml = isinstance(value, str) and _EXPONENT.fullmatch(value)
        raise TypeError(
            f"{name} must be {' or '.join(allowed + nothing)}, got {value!r} "
            f"({type(value).__name__})" + (_YAML_HINT if yaml else "")
        )
    return value


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows: the members of a union, and list for list[int]."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    return tuple(typing.get_origin(each) or each for each in kinds)


def check_ranges(
    config: Any, kind: type, of_others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Checks that numbers lie in their settings' intervals, NaN in none, and texts are choices.

    Args:
        config: an instance of a dataclass, whose types were checked.
        kind: the dataclass, or a base of it, whose settings are checked.
        of_others: intervals of settings that another library declares.

    Raises:
        ValueError: a number outside its interval, or a text that is no choice; names the setting.
        TypeError: a value, or an entry of a list, that must be a number and is none.
    """
    for entry in dataclasses.fields(kind):
        text, value = entry.metadata.get("help"), getattr(config, entry.name)
        within = getattr(text, "within", "") or of_others.get(entry.name, "")
        choices = getattr(text, "choices", ())
        choices = tuple(choices()) if callable(choices) else choices
        # A table that is no dict also loads functions that are named by their file.
        loads = isinstance(choices, Mapping) and not isinstance(choices, dict)
        or_a_function = "; or name a function of yours, file.py:function" if loads else ""
        if value is None or not (within or choices):
            continue
        several = isinstance(value, list | tuple)
        for text in (value if several else [value]) if choices else ():
            if text not in choices:
                raise ValueError(
                    f"unknown {entry.name} {text!r}: choose {'some' if several else 'one'} of "
                    f"{', '.join(choices)}{or_a_function}"
                )
        if choices:
            continue
        for i, number in enumerate(value if several else [value]):
            name = f"{entry.name}[{i}]" if several else entry.name
            if not is_number(number):
                raise TypeError(f"{name} must be a number, got {number!r}")
            if not _lies(number, within):
                nothing = " or None" if entry.default is None and not several else ""
                demand = _RANGES.get(within, f"lie in {within}")
                if not math.isfinite(number) and within.endswith("inf)"):
                    demand += " and finite"
                raise ValueError(f"{name} must {demand}{nothing}, got {number}")


def is_number(value: Any) -> bool:
    """Whether a value is a number; a truth value is none."""
    return _is(value, float)


def _lies(number: Any, within: str) -> bool:
    low, high = map(float, within[1:-1].split(","))
    above = number > low or (within[0] == "[" and number == low)
    return above and (number < high or (within[-1] == "]" and number == high))


@cache
def _plain_types(kind: type) -> dict[str, tuple[type, ...]]:
    """The types of a dataclass's settings, by name, where :func:`_is` tells them all apart."""
    plain_types = {}
    hints = typing.get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        wanted = _kinds(hints[entry.name])
        unread = isinstance(entry.metadata.get("help"), (_Remedy, _Likeness))
        if entry.init and not unread and all(x in (*_NAMES, types.NoneType) for x in wanted):
            plain_types[entry.name] = wanted
    return plain_types


def _is(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is str:
        return isinstance(value, (str, os.PathLike))
    if kind is list:
        return isinstance(value, (list, tuple))
    number = {int: numbers.Integral, float: numbers.Real}
    return isinstance(value, number.get(kind, kind))
