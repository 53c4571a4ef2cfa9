"""Of a configuration, the settings as a table for the API's pages: type, default, meaning.

They come from the dataclass itself, so that none of its helpers is to be seen. Settings that
transformers declares are left out: they are its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from fastrl.settings import idle_settings, refusals

_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)
_PIPE = re.compile(r"`[^`]*`|\|")  # those in code need no escape
_SIGNS = {"[0, inf)": "≥ 0", "(0, inf)": "> 0", "[1, inf)": "≥ 1"}


def settings(config: Any) -> list[dataclasses.Field[Any]]:
    """Those that a class of this project declares and that its constructor takes."""
    own = [inspect.get_annotations(c) for c in config.__mro__ if _is_ours(c)]
    every = (x for x in dataclasses.fields(config) if x.init and "help" in x.metadata)
    return [x for x in every if any(x.name in names for names in own)]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("fastrl", "fastrl_kernels")


def default_of(field: dataclasses.Field[Any]) -> str:
    """As Python writes it; "" where it is required or depends on the machine."""
    made, value = field.default_factory, field.default
    if made is not dataclasses.MISSING:
        value = made() if isinstance(made, type) or _is_constant(made) else dataclasses.MISSING
    return repr(value) if isinstance(value, _PLAIN) else ""


def _is_constant(made: Callable[[], Any]) -> bool:
    """Whether a function looks nothing up."""
    return not made.__code__.co_names


def type_of(field: dataclasses.Field[Any]) -> str:
    """As it is annotated, with its range."""
    said = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
    within = getattr(field.metadata["help"], "within", "")
    return f"`{said}`" + (f" {_SIGNS.get(within, f'in {within}')}" if within else "")


def meaning(field: dataclasses.Field[Any]) -> str:
    """Its sentence, with the texts that it may be."""
    text = field.metadata["help"]
    choices = getattr(text, "choices", ())
    choices = tuple(choices()) if callable(choices) else tuple(choices)
    named = [f"`{x}`" for x in choices if x not in text]
    return f"{text} One of {', '.join(named)}." if len(named) == len(choices) > 0 else str(text)


def tables(config: Any) -> str:
    """Markdown: what is honoured, then what is refused, then what changes nothing."""
    refused, idle = refusals(config), idle_settings(config)
    shown = [x for x in settings(config) if x.name not in refused and x.name not in idle]
    rows = [(f"`{x.name}`", type_of(x), _code(default_of(x)), meaning(x)) for x in shown]
    parts = [_table(("setting", "type", "default", "meaning"), rows)]
    for title, found in (
        ("Refused, unless left as they are:", refused),
        ("Accepted, with a warning, and without effect:", idle),
    ):
        if found:
            rows_ = [(f"`{n}`", _code(repr(d)), text) for n, (d, text) in found.items()]
            parts += [title, _table(("setting", "default", "instead"), rows_)]
    if not all(map(_is_ours, filter(dataclasses.is_dataclass, config.__mro__))):
        parts.append("All other settings are those of transformers' `TrainingArguments`.")
    return "\n\n".join(parts)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    every = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in every)


def _cell(text: str) -> str:
    return _PIPE.sub(lambda m: r"\|" if m[0] == "|" else m[0], " ".join(text.split()))
