"""Texts and chat messages: the chat template, and splitting conversations at the last prompt."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

TextOrMessages = str | list[dict[str, Any]]
PromptAndAnswers = tuple[TextOrMessages, tuple[TextOrMessages, ...]]

_TURN = "\n\nAssistant:"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_MISSPELT = 0.8  # difflib's ratio from which an unknown role is taken for a known one, misspelt


# The tags by which a template marks the assistant's text, and characters that replace the tags, or
# a message's text (_SIGN): Unicode reserves the characters for use within a program.
_MARK = re.compile(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})")
_OPEN, _CLOSE, _SIGN = "\ufdd0", "\ufdd1", "\ufdd2"
_BORDERED = (
    "{% macro fastrl_generation() %}{{ '"
    + _OPEN
    + "' ~ caller() ~ '"
    + _CLOSE
    + "' }}{% endmacro +%}"
)

_NOT_TEXT = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")


def is_chat(prompt: Any) -> bool:
    """Whether something is a list or tuple with a dict in it, unlike a text or token ids."""
    return isinstance(prompt, list | tuple) and any(isinstance(each, Mapping) for each in prompt)


def check_messages(messages: Sequence[Any], where: str, *, texts: bool = False) -> None:
    """Checks that messages have a role and a content. A role that is unlike all known ones is left
    to the chat template.

    Args:
        where: where the messages are from, for errors.
        texts: contents must be texts; else they may be content blocks, or missing beside
            ``tool_calls``.

    Raises:
        ValueError: something that is no message, a role that is missing, blank or misspelt, a
            content that is missing, of another type or with pictures or sound; names the message.
    """
    for i, message in enumerate(messages):
        at = f"{where}, message {i}"
        if not isinstance(message, Mapping):
            raise ValueError(
                f"{at} is {message!r:.80}: chat messages are dicts with a role and a content"
            )
        _check_role(message, at)
        content = message.get("content")
        if texts and not isinstance(content, str):
            raise ValueError(f"{at} has the content {content!r:.80}: it must be a text")
        if content is None and not message.get("tool_calls"):
            raise ValueError(
                f"{at} ({message['role']}) has no content: give it a text, or tool_calls"
            )
        if not isinstance(content, str | list | Mapping | None):
            raise ValueError(
                f"{at} has the content {content!r:.80}: it must be a text, or content blocks"
            )
        for block in content if isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind in _NOT_TEXT:
                raise ValueError(
                    f"{at} has content of the type {kind!r}, which would not be learned from: "
                    "models of images and texts are trained on texts alone; leave the message out"
                )


def _check_role(message: Mapping[str, Any], at: str) -> None:
    role = message.get("role")
    if role in ROLES:
        return
    if not isinstance(role, str) or not role.strip():
        problem = f"the role {role!r:.80}" if "role" in message else "no role"
        raise ValueError(f"{at} has {problem}: a role is a text, one of {', '.join(ROLES)}")
    # Only words can be misspelt: templates may tell "user_1" from "user_2".
    word = role.strip().lower()
    close = get_close_matches(word, ROLES, 1, _MISSPELT) if word.isalpha() else []
    if close:
        raise ValueError(f"{at} has the role {role!r}: did you mean {close[0]!r}?")


def check_unicode(text: str, where: str = "a text holds") -> str:
    """Returns the text; raises ValueError for half a surrogate pair, which no tokenizer encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} {text[error.start]!r} at {error.start}, half of a surrogate pair and no "
            "character: leave it out, as text.encode('utf-8', 'ignore').decode() does"
        ) from error
    return text


def shared_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, tokens or messages two sequences have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))


def is_blank(prompt: TextOrMessages) -> bool:
    """Whether a text, or the content of each message, is blank; calls of tools are a content."""
    if isinstance(prompt, str):
        return not prompt.strip()
    contents = [m.get("content") or m.get("tool_calls") for m in prompt]
    return not any(c.strip() if isinstance(c, str) else c for c in contents)


def bytes_of(prompt: TextOrMessages) -> int:
    """The bytes of a text, or of the contents of messages."""
    if isinstance(prompt, str):
        return len(prompt.encode())
    return sum(len(str(message.get("content")).encode()) for message in prompt)


def is_whole(prompt: TextOrMessages) -> bool:
    """Whether something is chat messages that begin with a prompt, not the assistant's answer."""
    return bool(prompt) and not isinstance(prompt, str) and prompt[0]["role"] != "assistant"


def as_messages(prompt: TextOrMessages) -> list[dict[str, Any]]:
    """A prompt as chat messages; a text becomes a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def as_answer(prompt: TextOrMessages, text: str) -> TextOrMessages:
    """A completion as reward functions get it in TRL 1.x: a text, or, if the prompt is a chat, a
    list of one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def as_text(prompt: TextOrMessages) -> str:
    """A prompt as plain text: a single message's content, or several messages with roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return content_text(prompt[0])
    return "\n\n".join(f"{message['role']}: {content_text(message)}" for message in prompt)


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message: its content, or the joined texts of content blocks; "" without any."""
    content = message.get("content") or ""
    return "".join(map(_block_text, content if isinstance(content, list) else [content]))


def _block_text(block: Any) -> str:
    return str(block.get("text") or "") if isinstance(block, Mapping) else str(block)


def _is_text_block(block: Any) -> bool:
    return isinstance(block.get("text") if isinstance(block, Mapping) else block, str)


def render(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    *,
    answered: bool = True,
    template: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Messages as the chat template writes them; unless ``answered``, up to where the assistant's
    next message begins.

    Args:
        template: further arguments of the chat template, such as ``tools``.

    Raises:
        ValueError: a tokenizer without a chat template; a template that fails, or writes nothing.
    """
    return _written(
        messages, tokenizer, tokenize=False, add_generation_prompt=not answered, **template
    )


def _written(messages: Sequence[Any], tokenizer: Any, **options: Any) -> Any:
    _check_template(tokenizer, "the data hold chat messages")
    conversation = [as_said(message) for message in messages]
    conversation = _with_blocks(conversation, tokenizer, options)
    if any(_texts_of_arguments(conversation)):
        conversation = _with_arguments(conversation, tokenizer, options)
        conversation = _with_blocks(conversation, tokenizer, options)
    try:
        output = tokenizer.apply_chat_template(conversation, **options)
    except Exception as error:  # a template's code may raise anything
        raise ValueError(
            f"the chat template refuses these messages: {type(error).__name__}: {error}"
        ) from error
    has_turns = any(message["role"] not in ("system", "developer") for message in messages)
    if has_turns and not (output["input_ids"] if isinstance(output, Mapping) else output):
        raise ValueError(
            "the chat template writes nothing for these messages: mend tokenizer.chat_template"
        )
    return output


class Written(dict[str, Any]):
    """A mapping that has just the keys that it was written with: no table has added any."""


def as_written(value: Any) -> Any:
    """Makes each mapping in a value, at any depth of lists and mappings, a :class:`Written`."""
    if isinstance(value, Mapping):
        return Written({name: as_written(x) for name, x in value.items()})
    return type(value)(map(as_written, value)) if type(value) in (list, tuple) else value


def without_nulls(value: Any) -> Any:
    """A value without those keys of mappings, at any depth, whose value is None: a table adds such
    keys where only other rows have them, and they look like a None that was written. A
    :class:`Written`, None in a list, and JSON in a text do not change."""
    if isinstance(value, Written):
        return value
    if isinstance(value, Mapping):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    return [without_nulls(x) for x in value] if isinstance(value, list | tuple) else value


def as_said(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message by :func:`without_nulls`, but for its own ``content``, which may be None."""
    content = {"content": None} if "content" in message else {}
    return {**content, **without_nulls(dict(message))}


def _texts_of_arguments(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The arguments of tool calls that are JSON texts of objects, as in OpenAI's messages."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(_arguments(call), Mapping):
                yield call["function"]["arguments"]


def _arguments(call: Any) -> Any:
    """The value of a tool call's arguments if they are a text of JSON, else None."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        return json.loads(arguments) if isinstance(arguments, str) else None
    except json.JSONDecodeError:
        return None


def _text_of(messages: list[Any], tokenizer: Any, options: Mapping[str, Any]) -> str | None:
    """The text of messages by the chat template; None where it fails."""
    for_text = {**options, "tokenize": False, "return_dict": False}
    try:
        return tokenizer.apply_chat_template(messages, **for_text)
    except Exception:  # a template's code may raise anything
        return None


def _with_blocks(
    messages: list[dict[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The messages; content blocks become their joined texts where the template takes texts alone:
    it fails with blocks and not with texts, or writes them as Python writes lists."""
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    text = _text_of(messages, tokenizer, options)

    def joined(message: dict[str, Any]) -> dict[str, Any]:
        blocks = message.get("content")
        if not isinstance(blocks, list) or (text is not None and str(blocks) not in text):
            return message
        others = [block for block in blocks if not _is_text_block(block)]
        if others and text is not None:
            raise ValueError(
                "the chat template takes texts alone, and a message has the content block "
                f"{others[0]!r:.80}: give each block a text, or the tokenizer a template of blocks"
            )
        return message if others else {**message, "content": content_text(message)}

    texts = [joined(message) for message in messages]
    fails = text is None and _text_of(texts, tokenizer, options) is None
    return messages if fails else texts


def _with_arguments(
    messages: list[dict[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The messages; tool calls' arguments that are texts of JSON become mappings, unless the
    template writes such texts unchanged: most write mappings as JSON, and texts in quotes."""
    # None: the template takes mappings alone, or fails again with them.
    text = _text_of(messages, tokenizer, options) or ""
    arguments = set(_texts_of_arguments(messages))
    if all(x in text and json.dumps(x, ensure_ascii=False) not in text for x in arguments):
        return messages

    def read(call: Any) -> Any:
        arguments = _arguments(call)
        if not isinstance(arguments, Mapping):
            return call
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**message, "tool_calls": [read(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def chat_ids(
    messages: Sequence[Any],
    tokenizer: Any,
    *,
    answered: bool = True,
    template: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """The token ids of the text of :func:`render`; arguments and errors are the same."""
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": not answered}
    return list(_written(messages, tokenizer, **options, **template)["input_ids"])


def _check_template(tokenizer: Any, held: str) -> None:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{held}, and the tokenizer ({type(tokenizer).__name__} {tokenizer.name_or_path!r}) "
            "has no chat template: set tokenizer.chat_template, or bring texts"
        )


TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # columns for the chat template


def template_arguments(row: Mapping[str, Any], i: int) -> dict[str, Any]:
    """The arguments of the chat template in the columns ``tools`` (a list, or its JSON) and
    ``chat_template_kwargs`` (a dict) of row ``i``, without keys that the table may have added.

    Raises:
        ValueError: a column of another type, or a text that is not JSON; names the row.
    """
    tools, others = row.get("tools"), row.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"column 'tools' of row {i} is not valid JSON: {error}") from error
    else:  # unlike in a JSON text, the table may have added keys here
        tools = without_nulls(tools)
    if not isinstance(tools, list | None) or not isinstance(others, Mapping):
        raise ValueError(
            f"row {i}: column 'tools' must hold a list of tools (or its JSON), and "
            "'chat_template_kwargs' a dict"
        )
    options = without_nulls(others)
    return {"tools": tools, **options} if tools else options


def templates_of(
    prompts: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    rows: Sequence[int],
    common: Mapping[str, Any] = MappingProxyType({}),
) -> list[Mapping[str, Any]]:
    """Further arguments of the chat template for each prompt: the ``common`` ones, and those of
    :func:`template_arguments` for its row, whose errors are raised. A text's row is not read.

    Args:
        columns: values of each prompt's row, by column; only :data:`TEMPLATE_COLUMNS` are read.
        rows: the numbers of the prompts' rows, for errors.
    """
    by_column = {name: columns[name] for name in TEMPLATE_COLUMNS if name in columns}
    if not by_column:
        return [common] * len(prompts)
    return [
        {**common, **template_arguments({name: x[i] for name, x in by_column.items()}, row)}
        if is_chat(prompt)
        else {}
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]


def as_chatml(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with ``role`` and ``content``, from one in ShareGPT's words (``from``, ``value``,
    ``human``, ``gpt``)."""
    names = {"from": "role", "value": "content"}
    renamed = {names.get(name, name): x for name, x in message.items()}
    if "from" in message:
        renamed["role"] = _SHAREGPT.get(renamed["role"], renamed["role"])
    return renamed


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template says which part of its text the assistant generates."""
    return bool(re.search(r"{%-?\s*generation\b", tokenizer.get_chat_template()))


def marked_spans(
    messages: Sequence[dict[str, Any]], tokenizer: Any, template: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """The spans, in characters, of a conversation's text that the chat template marks as generated
    by the assistant.

    Each marked part is written between two characters that no text has, so that it is found in the
    final text, even behind a macro, a ``{% set %}`` or a ``{% filter %}``.

    Raises:
        ValueError: a template whose text depends on the marks.
    """
    source = _BORDERED + _MARK.sub(
        lambda tag: f"{tag[1]}{'endcall' if tag[2] else 'call fastrl_generation()'}{tag[3]}",
        tokenizer.get_chat_template(tools=template.get("tools")),
    )
    made = render(list(messages), tokenizer, template={**template, "chat_template": source})
    spans, text = [], ""
    for part in re.split(f"([{_OPEN}{_CLOSE}])", made):
        if part == _OPEN:
            spans.append((len(text), len(text)))
        elif part == _CLOSE and spans:
            spans[-1] = (spans[-1][0], len(text))
        else:
            text += part
    if text != render(list(messages), tokenizer, template=template):
        raise ValueError(
            "the chat template changes its text by what it marks with {% generation %}, so that "
            "the assistant's turns cannot be found: mark them where they are written"
        )
    return spans


def assistant_spans(
    messages: Sequence[dict[str, Any]], tokenizer: Any, template: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """The spans, in characters, of the assistant's turns in the text of a conversation: from where
    the template asks for the answer to the end of its turn, without the blanks behind.

    Raises:
        ValueError: a template that writes a turn differently once another follows, or a turn of the
            assistant that comes first, so that the turns cannot be found.
    """
    turns, spans = list(messages), []
    whole = render(turns, tokenizer, template=template)
    ends = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    for i, message in enumerate(turns):
        if message["role"] != "assistant":
            continue
        front = render(turns[:i], tokenizer, answered=False, template=template) if i else ""
        alone = render(turns[: i + 1], tokenizer, template=template).rstrip()
        content = message.get("content")
        end = -1
        if i and whole.startswith(front):
            answer = content.strip() if isinstance(content, str) else ""
            end = _end_of_turn(whole, alone, len(front), answer, ends)
        if end < 0:
            raise ValueError(
                f"message {i}: the assistant's turn cannot be found in what the chat template "
                "writes: mark it there with {% generation %} and {% endgeneration %}"
            )
        spans.append((len(front), end))
    return spans


def check_spans(
    find: Callable[..., list[tuple[int, int]]],
    messages: Sequence[dict[str, Any]],
    tokenizer: Any,
    template: Mapping[str, Any],
) -> list[tuple[int, int]]:
    """The spans by :func:`marked_spans` or :func:`assistant_spans`, checked to hold the assistant's
    text alone. Where the spans' text leaves a doubt, a sign takes the place of each message's
    text, and is looked for. Warns of an assistant's text that lies in no span.

    Args:
        find: one of these two functions.

    Raises:
        ValueError: what ``find`` refuses; spans with text that is not the assistant's.
    """
    answers = find(messages, tokenizer, template)
    text = render(list(messages), tokenizer, template=template)
    marked = left = "\n".join(text[begin:end] for begin, end in answers)
    for message in messages:
        content = _said_in(message)
        if content and message["role"] != "assistant" and content in marked:
            break
        if message["role"] == "assistant":
            _, separator, left = left.partition(content) if content else ("", content, left)
            if separator != content:
                break
    else:
        return answers
    signs = [f"{_SIGN}{i}{_SIGN}" for i in range(len(messages))]
    signed = [_signed(*each) for each in zip(messages, signs, strict=True)]
    try:
        spans = find(signed, tokenizer, template)
        text = render(signed, tokenizer, template=template)
    except ValueError:  # a template whose code depends on the messages' text
        return answers
    for i, (message, sign) in enumerate(zip(messages, signs, strict=True)):
        place, is_answer = text.find(sign), message["role"] == "assistant"
        if place < 0 or is_answer == any(begin <= place < end for begin, end in spans):
            continue
        if not is_answer:
            raise ValueError(
                f"message {i}: the chat template marks what the {message['role']} says as the "
                "assistant's: write {% generation %} and {% endgeneration %} around the "
                "assistant's turns alone"
            )
        warnings.warn(
            f"message {i}: the chat template does not mark what the assistant says there with "
            "{% generation %}, so that such turns are not learned",
            stacklevel=2,
        )
    return answers


def _said_in(message: Mapping[str, Any]) -> str:
    """A message's text without blanks around it, or, without a text, the name of the first tool
    that it calls; "" for content blocks."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        return ""
    names = [str(_function(call).get("name", "")) for call in message.get("tool_calls") or ()]
    return content.strip() or (names[0] if names else "")


def _signed(message: dict[str, Any], sign: str) -> dict[str, Any]:
    """The message with a sign in place of the text of :func:`_said_in`."""
    text = _said_in(message)
    if not text or text == str(message.get("content") or "").strip():
        return {**message, "content": sign} if text else message
    first, *others = message["tool_calls"]
    named = {**_function(first), "name": sign}
    return {
        **message,
        "tool_calls": [{**first, "function": named} if "function" in first else named, *others],
    }


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _end_of_turn(whole: str, alone: str, front: int, answer: str, ends: Sequence[str]) -> int:
    """The place at which the assistant's turn ends in a conversation's text; -1: not found.

    Args:
        alone: the text of the conversation up to the turn's end, without blanks behind it.
        front: the length of the text in front of the turn.
        answer: the assistant's text in the turn, without its calls.
        ends: special tokens; a turn that is not the last one may end with one of them.
    """
    if len(alone) > front and whole.startswith(alone):
        return len(alone)
    # A template may end the last turn with another token than the others.
    turn = alone.removesuffix(next(filter(alone.endswith, ends), ""))
    if front <= len(turn) < len(alone) and whole.startswith(turn):
        for end in ends:
            if whole.startswith(end, len(turn)):
                return len(turn) + len(end)
    place = alone.rfind(answer)
    at = whole.find(answer, front)
    if not answer or place < front or at < 0:
        return -1
    ending = alone[place + len(answer) :]
    behind = at + len(answer)
    if ending and whole.startswith(ending, behind):
        return behind + len(ending)
    token = ending.lstrip()
    behind += len(ending) - len(token)
    closing = (end for end in ends if token in ends and whole.startswith(end, behind))
    return next((behind + len(end) for end in closing), -1)


def prompt_text(
    prompt: TextOrMessages,
    tokenizer: Any,
    name: str,
    template: Mapping[str, Any] = MappingProxyType({}),
    *,
    plain: bool = True,
) -> str:
    """A prompt as one text; a chat is written by the template, up to where the answer begins.

    Args:
        name: the prompt's name, for errors.
        template: further arguments of the chat template.
        plain: require that messages hold texts, not all blank, and do not end with the assistant's.

    Raises:
        ValueError: neither a text nor messages; messages that :func:`check_messages` refuses, or
            that are not ``plain``; a tokenizer without a chat template, or a template that refuses
            the messages.
    """
    check_prompt(prompt, name, texts=plain)
    if isinstance(prompt, str):
        return check_unicode(prompt, f"{name} holds")
    if plain and is_blank(prompt):
        raise ValueError(
            f"{name} is empty: nothing is said in its messages; write a text in one, or, with an "
            "environment, let its reset return one"
        )
    if plain and prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{name} ends with an assistant's message, which the policy is to write: leave it out "
            "of the prompt"
        )
    _check_template(tokenizer, f"{name} holds chat messages")
    try:
        return check_unicode(render(prompt, tokenizer, answered=False, template=template))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def check_prompt(prompt: Any, where: str, *, texts: bool = False) -> None:
    """Raises ValueError for a prompt that is neither a text nor chat messages, or messages that
    :func:`check_messages` refuses; the error names ``where`` it is from."""
    if isinstance(prompt, str):
        return
    if not is_chat(prompt):
        raise ValueError(
            f"{where} is {prompt!r:.80}: the column prompt holds texts, or lists of messages"
        )
    check_messages(prompt, where, texts=texts)


def split_conversations(chats: Sequence[TextOrMessages], where: str) -> PromptAndAnswers:
    """Splits whole conversations into prompt and answers. The prompt is the messages that all share
    up to one of the assistant's; for a single conversation all but its last message. The answer of
    an empty conversation is "".

    Raises:
        ValueError: a conversation that does not end with the assistant's message, or shares no
            prompt with the others.
    """
    full: list[Any] = [chat for chat in chats if chat]
    if any(chat[-1]["role"] != "assistant" for chat in full):
        raise ValueError(f"{where}: a conversation must end with an assistant's message")
    shared = min(len(chat) for chat in full) - 1
    while shared > 0 and not all(
        chat[:shared] == full[0][:shared] and chat[shared]["role"] == "assistant" for chat in full
    ):
        shared -= 1
    if shared < 1:
        raise ValueError(
            f"{where}: the conversations do not share a prompt that an assistant's message follows"
        )
    return full[0][:shared], tuple(chat[shared:] if chat else "" for chat in chats)


def split_dialogues(texts: Sequence[Any], where: str) -> PromptAndAnswers:
    """Splits two dialogues, as texts, into prompt and answers: the prompt is their common beginning
    up to the last "\\n\\nAssistant:".

    Raises:
        ValueError: not two texts, or two that share no prompt.
    """
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} has no prompt: bring a column of prompts (prompt_column)")
    first, other = sorted(texts, key=is_blank)  # an empty side shares nothing, and is dropped later
    end = len(first)
    while (at := first.rfind(_TURN, 0, end)) >= 0:
        border = at + len(_TURN)
        if is_blank(other) or other.startswith(first[:border]):
            if not first[:at].strip():
                break
            return first[:border], tuple(text[border:] for text in texts)
        end = border - 1
    raise ValueError(
        f"{where} have no prompt, and share none that ends in {_TURN!r}: bring a column of prompts "
        "(prompt_column)"
    )
