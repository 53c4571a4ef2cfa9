"""Calls of tools in chats: read out of responses, and their results as tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fastrl.data.chat import as_written, render, shared_length
from fastrl.data.lark import lark_literal

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
_REST = {"content": "text"}  # text that belongs to no other field

# What stands for a name, an argument and a result where a chat template is tried out.
_NAME, _KEY, _VALUE, _RESULT = "toolnamefkq", "toolkeywzx", "toolvaluevjq", "toolresultqzj"


class Syntax(NamedTuple):
    """How a family of models writes calls of tools.

    Attributes:
        written: a pattern of a call of the tool NAME with KEY=VALUE.
        fields: the ``fields`` of transformers' response template. The response that they parse is
            without its last token if that ends a turn.
        thinks: what begins and what ends a thought; some templates begin it before the response.
    """

    written: str
    fields: dict[str, Any]
    thinks: tuple[str, str] = ("<think>", "</think>")


def _tagged(opening: str, argument: str) -> dict[str, Any]:
    """Fields for calls with arguments as text between tags; their types are in tools' schemas."""
    values = {"name": "text", "args": {"strip": False}}
    calls = {
        "open_pattern": opening,
        "close_pattern": r"</tool_call>\s*",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": argument, "value_parser": values},
        "transform": _CALL,
    }
    return {"reasoning_content": _THOUGHT, "tool_calls": calls, "content": _REST}


# Known syntaxes, by the names of the families.
_KNOWN = {
    "Hermes, Qwen 2.5 and 3": Syntax(
        r'<tool_call>\s*{\s*"name":\s*"NAME",\s*"arguments":\s*{"KEY": "VALUE"',
        {
            "reasoning_content": _THOUGHT,
            "tool_calls": {
                "open": "<tool_call>",
                "close_pattern": r"</tool_call>\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": _REST,
        },
    ),
    "Qwen 3.5, Nemotron 3": Syntax(
        r"<tool_call>\s*<function=NAME>\s*<parameter=KEY>\s*VALUE\s*</parameter>",
        _tagged(
            r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            r"<parameter=(?P<key>[^\n>]+)>\n?(?P<value>.*?)\n?</parameter>",
        ),
    ),
    "GLM 4": Syntax(
        r"<tool_call>NAME\s*<arg_key>KEY</arg_key>\s*<arg_value>VALUE</arg_value>",
        _tagged(
            r"<tool_call>(?P<name>[^\s<]+)\s*",
            r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
    ),
    "Llama 3": Syntax(
        r'{"name":\s*"NAME",\s*"parameters":\s*{"KEY": "VALUE"',
        {
            "tool_calls": {
                "open_pattern": r'^\s*{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
                "close_pattern": r"}\s*$",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            "content": _REST,
        },
    ),
    "gpt-oss": Syntax(
        r'to=functions\.NAME<\|channel\|>commentary json<\|message\|>{"KEY": "VALUE"',
        {
            "thinking": {
                "open": "<|channel|>analysis<|message|>",
                "close_pattern": r"<\|end\|>\s*",
                "content": "text",
            },
            "tool_calls": {
                # The chat template names the tool before the channel, the models behind it.
                "open_pattern": (
                    r"to=functions\.(?P<name>[^\s<]+)\s*(?:<\|channel\|>commentary)?\s*"
                    r"(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
                ),
                "close_pattern": r"<\|call\|>\s*",
                "repeats": True,
                "content": "json",
                "transform": _CALL,
            },
            "content": {
                "open": "<|channel|>final<|message|>",
                "close_pattern": r"<\|return\|>\s*",
                "content": "text",
            },
        },
    ),
    "Gemma 4": Syntax(
        r'<\|tool_call>call:NAME{KEY:<\|"\|>VALUE<\|"\|>}',
        {
            "reasoning_content": {
                "open": "<|channel>thought\n",
                "close_pattern": r"<channel\|>\s*",
                "content": "text",
            },
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{]+)",
                "close_pattern": r"<tool_call\|>\s*",
                "repeats": True,
                "content": "json",
                "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                "transform": _CALL,
            },
            "content": _REST,
        },
        ("<|channel>thought\n", "<channel|>"),
    ),
}


# Reads the assistant's message in a response. Its arguments: the prompt, the response without its
# last token if that ends turns, and the schemas of the tools that the prompt names.
Reader = Callable[[str, str, Sequence[Any]], dict[str, Any]]


def _by_template(tokenizer: Any) -> Reader:
    """A reader of messages by a tokenizer's ``response_template``."""
    return lambda prompt, response, tools: tokenizer.parse_response(
        response, prefix=prompt, tools=list(tools) or None
    )


def _by_syntax(tokenizer: Any, syntax: Syntax) -> Reader:
    """A reader of messages by a known family's syntax, which the chat template writes too."""
    opening, closing = syntax.thinks
    # The response alone is parsed: no anchor has to be found in the prompt.
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor_pattern": r"\A",
        "fields": syntax.fields,
    }

    def read(prompt: str, response: str, tools: Sequence[Any]) -> dict[str, Any]:
        begun = prompt.rstrip().endswith(opening.rstrip())
        # A thought that the template began and nothing ends is no thought: the call is in it.
        prefix = opening if begun and closing in response else ""
        return tokenizer.parse_response(
            response, template, prefix=prefix, tools=list(tools) or None
        )

    return read


def find_reader(tokenizer: Any, template: Mapping[str, Any]) -> Reader:
    """A reader of the calls of tools in the responses of a tokenizer's model. It reads by the
    tokenizer's ``response_template``, or else as the chat template writes calls.

    Args:
        template: further arguments of the chat template.

    Raises:
        ValueError: a chat template that does not write calls or their results; calls that nothing
            can read.
    """
    alone, whole = _tried(tokenizer, template)
    missing = [
        what
        for what, sign, text in (
            ("the name of a call", _NAME, alone),
            ("the arguments of a call", _VALUE, alone),
            ("the result of a call", _RESULT, whole),
        )
        if sign not in text
    ]
    if missing:
        raise ValueError(
            f"the tokenizer's chat template does not write {' or '.join(missing)}: tools need one "
            "that renders an assistant's tool_calls and messages of the role tool, set "
            "tokenizer.chat_template"
        )
    front = render([_ASKS], tokenizer, answered=False, template=template)
    turn = alone[shared_length(front, alone) :]
    end = turn.rfind(tokenizer.eos_token) if tokenizer.eos_token else -1
    turn = turn.rstrip() if end < 0 else turn[:end]
    reader = _reader(tokenizer, alone)
    try:
        calls = as_message(reader(front, turn, [_TOOL])).get("tool_calls") or []
    except Exception as error:
        raise ValueError(_unread(turn)) from error
    functions = [call["function"] for call in calls]
    if [x["name"] for x in functions] != [_NAME] or functions[0]["arguments"] != {_KEY: _VALUE}:
        raise ValueError(_unread(turn))
    return reader


def _unread(turn: str) -> str:
    return (
        f"tokenizer.response_template does not read {turn!r}, which is how the chat template "
        f"writes a call of the tool {_NAME}: set one that does"
    )


def _reader(tokenizer: Any, written: str) -> Reader:
    if getattr(tokenizer, "response_template", None) is not None:
        return _by_template(tokenizer)
    signs = {"NAME": _NAME, "KEY": _KEY, "VALUE": _VALUE}
    for syntax in _KNOWN.values():
        pattern = re.sub("NAME|KEY|VALUE", lambda m: signs[m[0]], syntax.written)
        if re.search(pattern, written):
            return _by_syntax(tokenizer, syntax)
    raise ValueError(
        "tools need tokenizer.response_template, which says how calls are read out of a response: "
        f"the chat template writes them otherwise than the families that are known "
        f"({', '.join(_KNOWN)})"
    )


_ASKS = {"role": "user", "content": "-"}
_ARGUMENTS = {"type": "object", "properties": {_KEY: {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "parameters": _ARGUMENTS}}


def _calls(names: Sequence[str]) -> dict[str, Any]:
    """An assistant's message that calls the tools of these names."""
    calls = [
        {"type": "function", "function": {"name": name, "arguments": {_KEY: _VALUE}}}
        for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _tried(tokenizer: Any, template: Mapping[str, Any]) -> tuple[str, str]:
    """The text of a chat that ends with a call, and of the same chat with the call's result."""
    chat = [_ASKS, _calls([_NAME])]
    result = {"role": "tool", "name": _NAME, "content": _RESULT}
    try:
        alone = render(chat, tokenizer, template=template)
        return alone, render([*chat, result], tokenizer, answered=False, template=template)
    except ValueError as error:
        raise ValueError(
            f"the tokenizer's chat template refuses calls of tools ({error}): set a "
            "tokenizer.chat_template that renders an assistant's tool_calls and messages of the "
            "role tool"
        ) from error


def as_message(parsed: Any) -> dict[str, Any]:
    """A parsed response as a message: with a text, and calls with type, name and arguments.

    Raises:
        ValueError: the response is no mapping, its calls no list, or a call names no tool.
    """
    if not isinstance(parsed, Mapping):
        raise ValueError(f"a response was parsed to {parsed!r:.80}")
    message = {"role": "assistant", **parsed}
    message["content"] = message.get("content") or ""
    calls = message.pop("tool_calls", None)
    if not isinstance(calls, list | None):
        raise ValueError(f"tool_calls is {calls!r:.80}, no list")
    if calls:
        message["tool_calls"] = [_as_call(call) for call in calls]
    return message


def _as_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{call!r:.80} names no tool")
    arguments = function.get("arguments")
    mapping = {} if arguments is None else as_written(arguments)
    return {
        "type": call.get("type", "function"),
        "function": {"name": function["name"], "arguments": mapping},
    }


def call_grammar(
    tokenizer: Any, template: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]
) -> str:
    """A grammar, in Lark, of a response that calls one of some tools, as the chat template writes
    it, with arguments by the tool's schema.

    Args:
        template: further arguments of the chat template.
        schemas: the tools' JSON schemas.

    Raises:
        ValueError: a template that does not write arguments as JSON.
    """
    alone, _ = _tried(tokenizer, template)
    front = render([_ASKS], tokenizer, answered=False, template=template)
    turn = alone[shared_length(front, alone) :]
    end = turn.rfind(tokenizer.eos_token) if tokenizer.eos_token else -1
    turn = turn.rstrip() if end < 0 else turn[:end].rstrip()
    arguments = re.search(rf'\{{\s*"{_KEY}":\s*"{_VALUE}"\s*\}}', turn)
    if arguments is None or _NAME not in turn[: arguments.start()]:
        raise ValueError(
            f"tool_choice='required' needs calls whose arguments are JSON; the chat template "
            f"writes {turn!r}: set tool_choice='auto'"
        )
    before, behind = turn[: arguments.start()], turn[arguments.end() :]
    rules = []
    for i, schema in enumerate(schemas):
        function = schema["function"]
        body = {"additionalProperties": False, **(function.get("parameters") or {"type": "object"})}
        body["x-guidance"] = {"whitespace_flexible": False}
        first = lark_literal(before.replace(_NAME, function["name"]), tokenizer)
        last = lark_literal(behind, tokenizer)
        rules += [f"call_{i}: {first} arguments_{i} {last}".rstrip()]
        rules += [f"arguments_{i}: %json {json.dumps(body)}"]
    start = " | ".join(f"call_{i}" for i in range(len(schemas)))
    return "\n".join([f"start: {start}", *rules])


class ToolChat:
    """Conversations in which an assistant calls tools, as tokens. Sampled tokens stay as they are:
    only results are rendered, behind them.

    Args:
        ends: ids of tokens that end a response.
        template: further arguments of the chat template.
    """

    def __init__(
        self, tokenizer: Any, reader: Reader, ends: Collection[int], template: Mapping[str, Any]
    ):
        self.tokenizer, self.reader, self.template = tokenizer, reader, dict(template)
        self.ends = {i: tokenizer.decode([i]) for i in ends if i is not None}

    def read(
        self, prompt: Sequence[int], response: Sequence[int], tools: Sequence[Any]
    ) -> tuple[dict[str, Any], bool]:
        """The message in an assistant's response, and whether it could be read; if not, as with
        calls that are no JSON, the message is the response's text.

        Args:
            prompt, response: token ids.
            tools: the schemas of the tools that the prompt names.
        """
        ids = list(response)
        message_ids = ids[:-1] if ids and ids[-1] in self.ends else ids
        try:
            decode: Callable[..., str] = self.tokenizer.decode
            return as_message(self.reader(decode(list(prompt)), decode(message_ids), tools)), True
        except Exception:  # a policy may write anything, and a parser fail at it in any way
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            return {"role": "assistant", "content": text}, False

    def results(
        self,
        response: Sequence[int],
        results: Sequence[dict[str, Any]],
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The tokens between a response that calls tools and the next response: the results, up to
        where the assistant is to go on.

        Args:
            results: a message of the role tool for each call, with the tool's ``name``.
            template: arguments of the chat template, which replace the object's of the same names.

        Raises:
            ValueError: a chat template that changes the end of a turn with what follows.
        """
        call = _calls([result["name"] for result in results])
        template = {**self.template, **template}
        alone = render([_ASKS, call], self.tokenizer, template=template)
        whole = render([_ASKS, call, *results], self.tokenizer, answered=False, template=template)
        # What a template writes in front of the last call, such as thoughts that it leaves out of
        # turns in the past, does not matter here.
        count = alone.count(_VALUE)
        closing = alone.rpartition(_VALUE)[2]
        behind = whole.split(_VALUE, count)[-1]
        placed = [(closing.rfind(text) + len(text), i) for i, text in self.ends.items()]
        at, end = max((x for x in placed if self.ends[x[1]] in closing), default=(0, None))
        if end is None:
            at = shared_length(closing, behind)
        if whole.count(_VALUE) < count or not behind.startswith(closing[:at]):
            raise ValueError(
                f"the chat template ends a call of the tool {results[0]['name']} with {closing!r}, "
                f"and before its result with {behind[: len(closing)]!r}: set a "
                "tokenizer.chat_template that writes both alike"
            )
        ids = self._behind(whole[: len(whole) - len(behind) + at], behind[at:])
        if end is not None and response[-1] not in self.ends:
            return [end, *ids]
        # Some turns end with the token that begins a result.
        return ids[1:] if ids and ids[0] == response[-1] and end is None else ids

    def _behind(self, front: str, text: str) -> list[int]:
        """The tokens that ``text`` has behind ``front``."""
        before = self._encode(front)
        both = self._encode(front + text)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text=text, add_special_tokens=False)["input_ids"]
