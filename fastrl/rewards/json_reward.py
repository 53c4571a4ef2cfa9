"""A ready reward: is a response JSON that a schema describes?"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastrl.data.chat import TextOrMessages, as_text
from fastrl.rewards import text_worker
from fastrl.rewards.text_rewards import last_block
from fastrl.rewards.timed import TimedChild

LONGEST = 1_000_000  # characters of a block that is parsed
SECONDS = 2.0  # for one response
_CHILD = TimedChild(text_worker.__file__, "jsonschema")


def make_json_schema_reward(
    schema: Mapping[str, Any] | bool | str | Path,
) -> Callable[..., list[float]]:
    """The ready reward ``json_schema``: 1 where a response is JSON and valid by a schema, else 0.

    The reward judges the response's last block fenced as ``json`` or without a language, or the
    whole response without such a block. It is 0, too, for more than a million characters, lists and
    objects more than 64 deep, a key twice in an object, or where judging, in another process, takes
    longer than 2 seconds.

    Args:
        schema: a JSON Schema, or the path of its file. Its ``$schema`` says which draft, by default
            2020-12. No other schema is loaded: each ``$ref`` begins with #.

    Raises:
        ImportError: jsonschema is not installed.
        FileNotFoundError: a path without a file.
        ValueError: something that is no schema, or refers to another schema.
    """
    if importlib.util.find_spec("jsonschema") is None:
        raise ImportError(
            "the reward json_schema needs jsonschema, which is not installed: "
            "pip install 'jsonschema>=4.18'"
        )
    from jsonschema.exceptions import SchemaError

    if isinstance(schema, str | Path):
        schema = json.loads(Path(schema).read_text(encoding="utf-8"))
    for name in _references(schema):
        if not name.startswith("#"):
            raise ValueError(
                f"the schema refers to {name!r}, and no other schema is loaded: put it under $defs "
                "and refer to it as #/$defs/…"
            )
    text = json.dumps(schema)
    try:
        text_worker.validator(text).check_schema(schema)
    except (SchemaError, AttributeError, TypeError) as error:
        reason = getattr(error, "message", error)
        raise ValueError(f"this is no JSON Schema: {reason}") from None

    def is_valid(completion: str) -> bool:
        block = last_block(completion, ("json", ""))
        if len(block) > LONGEST:
            return False
        answer = _CHILD.ask(SECONDS, kind="json_schema", schema=text, text=block)
        return answer is not None and answer["is"]

    def json_schema_reward(completions: Sequence[TextOrMessages], **_: Any) -> list[float]:
        return [float(is_valid(as_text(completion))) for completion in completions]

    return json_schema_reward


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for name, value in schema.items():
            if name in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
