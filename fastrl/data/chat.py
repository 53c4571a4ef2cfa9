"""Texts and chat messages: the chat template, and splitting conversations at the last prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

TextOrMessages = str | list[dict[str, Any]]
PromptAndAnswers = tuple[TextOrMessages, tuple[TextOrMessages, ...]]

_TURN = "\n\nAssistant:"


def is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def is_chat(said: Any) -> bool:
    """Whether something is a list of dicts, and neither a text nor token ids."""
    return isinstance(said, list | tuple) and any(isinstance(each, Mapping) for each in said)


def has_role(message: Any) -> bool:
    """Whether something is a message, whatever its content: a tool call has no text."""
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def is_blank(said: TextOrMessages) -> bool:
    if isinstance(said, str):
        return not said.strip()
    contents = [m.get("content") or m.get("tool_calls") for m in said]
    return not any(c.strip() if isinstance(c, str) else c for c in contents)


def is_whole(said: TextOrMessages) -> bool:
    """Whether chat messages begin with their prompt, and not with the answer."""
    return bool(said) and not isinstance(said, str) and said[0]["role"] != "assistant"


def as_messages(prompt: TextOrMessages) -> list[dict[str, Any]]:
    """A prompt as chat messages; a text becomes a user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def as_answer(prompt: TextOrMessages, text: str) -> TextOrMessages:
    """A completion as reward functions get it in TRL 1.x: a text, or behind chat messages a list of
    one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def as_text(said: TextOrMessages) -> str:
    """A text as it is; of a single message what it says, of several who says what."""
    if isinstance(said, str):
        return said
    if len(said) == 1:
        return said[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in said)


def render(
    messages: list[dict[str, Any]], tokenizer: Any, *, answered: bool = True, **options: Any
) -> str:
    """Messages as the tokenizer's chat template writes them; unless ``answered``, up to where the
    assistant's answer begins. ``options`` are further arguments of the template.

    Raises:
        ValueError: a tokenizer without a chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer ({type(tokenizer).__name__} {tokenizer.name_or_path!r}) has no chat "
            "template, and the data hold chat messages: set tokenizer.chat_template, or bring texts"
        )
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=not answered, **options
    )


def prompt_text(prompt: TextOrMessages, tokenizer: Any, name: str) -> str:
    """A prompt as one text: a text as it is, a chat by the tokenizer's template, up to where the
    answer begins.

    Args:
        name: of the prompt, for messages.

    Raises:
        ValueError: messages that lack a role or a text, are all blank, or end with the assistant's;
            a tokenizer without a chat template, or a template that refuses the messages.
    """
    if isinstance(prompt, str):
        return prompt
    for message in prompt:
        if not is_message(message):
            raise ValueError(
                f"{name} holds {message!r:.80}: chat messages are dicts with a role and a content "
                "of text"
            )
    if is_blank(prompt):
        raise ValueError(f"{name} is empty: nothing is said in its messages")
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{name} ends with an assistant's message, which the policy is to write: leave it out "
            "of the prompt"
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{name} holds chat messages, and the tokenizer ({type(tokenizer).__name__} "
            f"{tokenizer.name_or_path!r}) has no chat template: set tokenizer.chat_template, or "
            "bring texts"
        )
    from jinja2 import TemplateError

    try:
        return render(prompt, tokenizer, answered=False)
    except TemplateError as error:
        raise ValueError(f"{name}: the chat template refuses these messages: {error}") from error


def split_conversations(chats: Sequence[TextOrMessages], where: str) -> PromptAndAnswers:
    """Splits whole conversations into prompt and answers: the prompt is what they share up to an
    assistant's turn; of a single conversation all but its last turn.

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
