"""What judges texts for ready rewards in a process of its own: regular expressions and JSON.

It needs the standard library, and for JSON jsonschema: see :mod:`fastrl.rewards.timed_worker`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

DEEPEST = 64  # lists and objects within each other


def make_judge() -> Callable[..., dict[str, Any]]:
    """Makes the function that judges a question's fields; ``is`` tells whether a text passes."""
    kinds: dict[str, Callable[..., bool]] = {"regex": matches, "json_schema": is_valid}
    return lambda kind, **question: {"is": kinds[kind](**question)}


def matches(pattern: str, full: bool, text: str) -> bool:
    try:
        return bool((re.fullmatch if full else re.search)(pattern, text))
    except (MemoryError, RecursionError):  # counts as a search that takes too long
        return False


def is_valid(schema: str, text: str) -> bool:
    """Whether a text is JSON, by RFC 8259 and with no key twice, and valid by the schema."""
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles, parse_constant=_refuse)
        return _depth(value) <= DEEPEST and validator(schema).is_valid(value)
    # Numbers may have thousands of digits.
    except (ValueError, RecursionError, OverflowError, MemoryError):
        return False


@functools.lru_cache(maxsize=16)
def validator(schema: str) -> Any:
    """The validator of a schema's JSON, which loads no other schema from anywhere."""
    import jsonschema
    from referencing import Registry

    loaded = json.loads(schema)
    kind = jsonschema.validators.validator_for(loaded, jsonschema.Draft202012Validator)
    return kind(loaded, registry=Registry())


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands there twice")
    return table


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _depth(value: Any) -> int:
    """How deep lists and objects nest, counted up to one more than DEEPEST."""
    level, depth = [value], 0
    while depth <= DEEPEST:
        level = [x for x in level if isinstance(x, list | dict)]
        if not level:
            break
        level = [y for x in level for y in (x.values() if isinstance(x, dict) else x)]
        depth += 1
    return depth
