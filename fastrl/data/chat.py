"""A prompt and an answer, texts or chat messages, as one text and as tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Said = str | list[dict[str, Any]]  # a text, or chat messages


def is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def is_chat(said: Any) -> bool:
    """Whether something is a list of dicts, as chats are, and neither a text nor token ids."""
    return isinstance(said, list | tuple) and any(isinstance(each, Mapping) for each in said)


def is_blank(said: Said) -> bool:
    if isinstance(said, str):
        return not said.strip()
    return not any(message["content"].strip() for message in said)


def checked(row: dict[str, Any], column: str) -> Said | None:
    """What a row's column says; None where it has none.

    Raises:
        TypeError: something else than a text or chat messages.
    """
    said = row.get(column)
    chat = isinstance(said, list) and all(isinstance(m, dict) and "role" in m for m in said)
    if not (said is None or isinstance(said, str) or chat):
        raise TypeError(
            f"column {column!r} holds {str(said)[:60]!r} in some row: it must hold text, or chat "
            "messages (dicts with a role and a content)"
        )
    return said


def is_whole(said: Said | None) -> bool:
    """Whether chat messages have their prompt in front of the answer."""
    return bool(said) and not isinstance(said, str) and said[0]["role"] != "assistant"  # type: ignore[index]


def as_messages(prompt: Said | None) -> list[dict[str, Any]]:
    """A text is what a user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []


def join(prompt: Said | None, answer: Said, tokenizer: Any) -> str:
    """Prompt and answer as one text; chats through the tokenizer's template. A whole conversation
    brings its prompt along."""
    if isinstance(answer, str):
        if prompt is not None and not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        return (prompt or "") + answer  # type: ignore[operator]
    messages = answer if is_whole(answer) else [*as_messages(prompt), *answer]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def is_complete(text: str, tokenizer: Any, chat: bool) -> bool:
    """Whether a text brings its special tokens along: chat templates do, and texts that begin with
    one."""
    start = tokenizer.bos_token or tokenizer.cls_token
    return chat or bool(start and text.startswith(start))


def encode(text: str, tokenizer: Any, chat: bool = False) -> list[int]:
    """Token ids with special tokens."""
    return tokenizer(text, add_special_tokens=not is_complete(text, tokenizer, chat))["input_ids"]


def ended(ids: list[int], tokenizer: Any) -> list[int]:
    """With EOS at the end, once, if the tokenizer has one."""
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def prompt_text(said: Said, tokenizer: Any, name: str) -> str:
    """A prompt as one text: a text as it is, a chat by the tokenizer's template, up to where the
    answer begins.

    Args:
        name: of the prompt, for messages.

    Raises:
        ValueError: messages without a role or a content of text, without anything said, or ending
            in the assistant's; a tokenizer without a chat template, or one that refuses them.
    """
    if isinstance(said, str):
        return said
    for message in said:
        if not is_message(message):
            raise ValueError(
                f"{name} holds {message!r:.80}: chat messages are dicts with a role and a content "
                "of text"
            )
    if is_blank(said):
        raise ValueError(f"{name} is empty: nothing is said in its messages")
    if said[-1]["role"] == "assistant":
        raise ValueError(
            f"{name} ends with an assistant's message, which is what the policy is to write: leave "
            "it out of the prompt"
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{name} holds chat messages, and the tokenizer ({type(tokenizer).__name__} "
            f"{tokenizer.name_or_path!r}) has no chat template: set tokenizer.chat_template, or "
            "bring texts"
        )
    from jinja2 import TemplateError

    try:
        return join(said, "", tokenizer)
    except TemplateError as error:
        raise ValueError(f"{name}: the chat template refuses these messages: {error}") from error
