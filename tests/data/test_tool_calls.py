"""Calls of tools as chat templates write them: read out of responses, and their results."""

import json
from typing import Any

import pytest

from fastrl.collect.tools import Toolbox
from fastrl.data.chat import render
from fastrl.data.prepare import prepare_texts
from fastrl.data.tool_calls import ToolChat, find_reader
from tests import chat_tokenizer

USER = {"role": "user", "content": "What is 3 times 4?"}
ARGUMENTS = {"a": 3, "unit": "  7 of\n these"}
CALL = {"type": "function", "function": {"name": "multiply", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "name": "multiply", "content": "12"}


def multiply(a: int, unit: str) -> int:
    """Multiplies.

    Args:
        a: A number.
        unit: What it counts.
    """
    return a


BOX = Toolbox([multiply])


def chat_of(tokenizer: Any) -> ToolChat:
    return ToolChat(tokenizer, find_reader(tokenizer, {}), [tokenizer.eos_token_id], {})


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text=text)["input_ids"]


@pytest.mark.parametrize(
    ("family", "thinks"), [*((x, False) for x in chat_tokenizer.CALLS), ("hermes", 1), ("xml", 1)]
)
def test_a_call_and_its_result_are_those_of_the_template(family: str, thinks: bool) -> None:
    tokenizer = chat_tokenizer.tokenizer(family, bool(thinks))
    chat = chat_of(tokenizer)
    front = render([USER], tokenizer, answered=False)
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    whole = render([*said, RESULT], tokenizer, answered=False)
    text = chat_tokenizer.tokenizer(family).apply_chat_template(said, tokenize=False)
    response = text[text.rindex("assistant\n") + len("assistant\n") :].removesuffix("\n")
    if thinks:
        response = "It is 12?\n</think>\n\n" + response
    prompt, ids = encode(tokenizer, front), encode(tokenizer, response)
    message, readable = chat.read(prompt, ids, BOX.schemas)
    assert readable
    assert message["tool_calls"] == [CALL]
    if thinks:
        assert message["reasoning_content"] == "It is 12?"
    found = tokenizer.decode([*ids, *chat.results(ids, [RESULT])])
    behind = whole[whole.rindex("<|end|>\n<|start|>tool") :]
    assert found == response.removesuffix("<|end|>") + behind
    cut = ids[:-1]  # as of a response that stop strings end
    assert tokenizer.decode([*cut, *chat.results(cut, [RESULT])]) == found


def test_each_call_has_its_result() -> None:
    tokenizer = chat_tokenizer.tokenizer()
    chat = chat_of(tokenizer)
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3}}\n</tool_call>'
    ids = encode(tokenizer, f"Both:\n{call}{call}<|end|>")
    message, _ = chat.read([], ids, BOX.schemas)
    assert message["content"] == "Both:"
    assert len(message["tool_calls"]) == 2
    other = {**RESULT, "content": "13"}
    assert tokenizer.decode(chat.results(ids, [RESULT, other])) == (
        "\n<|start|>tool\n12<|end|>\n<|start|>tool\n13<|end|>\n<|start|>assistant\n"
    )


@pytest.mark.parametrize("text", [
    '<tool_call>\n{"arguments": {"a": 3}}\n</tool_call>',
    '<tool_call>\n{"name": "multiply", "arguments": {a: 3}}\n</tool_call>',
    '<tool_call>\n{"name": 3}\n</tool_call>', "<tool_call>\n[1]\n</tool_call>",
    '<tool_call>\n{"name": "mul', "<tool_call>" + "[" * 5000,
])  # fmt: skip
def test_what_is_no_call_is_a_text(text: str) -> None:
    tokenizer = chat_tokenizer.tokenizer()
    ids = encode(tokenizer, f"{text}<|end|>")
    message, readable = chat_of(tokenizer).read([], ids, BOX.schemas)
    assert not readable
    assert message == {"role": "assistant", "content": text}


def test_a_turn_may_end_with_what_begins_its_result() -> None:
    tokenizer = chat_tokenizer.tokenizer()
    marked = tokenizer.chat_template.replace("'<|start|>' + role", "opening(role) + role")
    marked = marked.replace("{{- '<|end|>\n' }}", "")
    tokenizer.chat_template = (
        "{%- macro opening(role) %}{{ '<|pad|>' if role == 'tool' else '<|start|>' }}{% endmacro %}"
        + marked
    )
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    chat = ToolChat(tokenizer, find_reader(tokenizer, {}), ends, {})
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3}}\n</tool_call>'
    ids = encode(tokenizer, f"{call}<|pad|>")
    assert tokenizer.decode(chat.results(ids, [RESULT])).startswith("tool\n12<|end|>")


def test_templates_that_do_not_do_are_named() -> None:
    tokenizer = chat_tokenizer.tokenizer()
    whole = tokenizer.chat_template
    tokenizer.chat_template = whole.replace("m.tool_calls or []", "[]")
    with pytest.raises(ValueError, match="does not write the name of a call"):
        find_reader(tokenizer, {})
    tokenizer.chat_template = whole.replace("turn('tool', m.content)", "''")
    with pytest.raises(ValueError, match="does not write the result of a call"):
        find_reader(tokenizer, {})
    tokenizer.chat_template = "{{ raise_exception('no roles') }}"
    with pytest.raises(ValueError, match="refuses calls of tools"):
        find_reader(tokenizer, {})
    tokenizer.chat_template = whole.replace("<tool_call>", "<call>")
    with pytest.raises(ValueError, match="tools need tokenizer"):
        find_reader(tokenizer, {})
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant\n",
        "fields": {"content": {"content": "text"}},
    }
    with pytest.raises(ValueError, match="does not read"):
        find_reader(tokenizer, {})


def test_a_response_template_of_the_tokenizer_is_used() -> None:
    tokenizer = chat_tokenizer.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "<call>")
    calls = {
        "open": "<call>", "close": "</tool_call>", "repeats": True, "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }  # fmt: skip
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|start|>assistant\n",
        "fields": {"tool_calls": calls, "content": {"content": "text"}},
    }
    text = '<call>\n{"name": "multiply", "arguments": {"a": 3}}\n</tool_call><|end|>'
    prompt = encode(tokenizer, render([USER], tokenizer, answered=False))
    message, _ = chat_of(tokenizer).read(prompt, encode(tokenizer, text), BOX.schemas)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["multiply"]


_TEXTS_ALONE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        _TEXTS_ALONE,
        _TEXTS_ALONE.replace("m.content", "m.content.strip()"),
        _TEXTS_ALONE.replace("{{ m.content", "{{ ' ' + m.content"),
    ],
)
def test_blocks_are_written_as_their_texts_where_a_template_takes_texts_alone(
    template: str,
) -> None:
    tokenizer = chat_tokenizer.tokenizer("hermes")
    blocks = [{"type": "text", "text": "What"}, {"type": "text", "text": " is it?"}]
    messages = [{"role": "user", "content": blocks}, {"role": "assistant", "content": "Four."}]
    plain = [{"role": "user", "content": "What is it?"}, messages[1]]
    tokenizer.chat_template = template
    assert render(messages, tokenizer) == render(plain, tokenizer)
    tokenizer.chat_template = template.replace("m.content", "m.content[0].text")
    assert "What" in render(messages[:1], tokenizer), "a template that reads blocks gets them"


def test_a_block_that_a_template_would_write_as_python_does_is_refused() -> None:
    tokenizer = chat_tokenizer.tokenizer("hermes")
    tokenizer.chat_template = _TEXTS_ALONE
    chat = [{"role": "user", "content": [{"type": "document", "id": 3}]}]
    with pytest.raises(ValueError, match="takes texts alone, and a message has the content block"):
        render(chat, tokenizer)


def test_a_conversation_without_messages_is_dropped_and_counted() -> None:
    tokenizer = chat_tokenizer.tokenizer("hermes")
    rows = [{"messages": [USER, {"role": "assistant", "content": "12"}]}, {"messages": []}]
    with pytest.warns(UserWarning, match="1 of 2 texts dropped; nothing is learned from them"):
        assert len(prepare_texts(rows, tokenizer)) == 1


@pytest.mark.parametrize("reads_blocks", [False, True])
@pytest.mark.parametrize("family", ["hermes", "xml"])
def test_blocks_stand_beside_arguments_of_json(family: str, reads_blocks: bool) -> None:
    """A template may take blocks alone or texts alone, and mappings alone or JSON alone."""
    tokenizer = chat_tokenizer.tokenizer(family)
    written = {**CALL, "function": {"name": "multiply", "arguments": json.dumps(ARGUMENTS)}}

    def chat(content: Any, call: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]

    expected = render(chat("What?", CALL), tokenizer)
    if reads_blocks:
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "turn(m.role, m.content)", "turn(m.role, m.content[0].text)"
        )
    assert render(chat([{"type": "text", "text": "What?"}], written), tokenizer) == expected
