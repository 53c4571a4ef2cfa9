"""What a row of a data set says: a prompt and answers to it, as texts or as chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fastrl.data.chat import Said, as_messages, is_blank, is_message, is_whole
from fastrl.data.tables import USUAL_COLUMNS
from fastrl.data.tasks import ANSWERS, FEEDBACK, PAIRS, PROMPTS

_TURN = "\n\nAssistant:"
_USUAL = {
    "prompt": USUAL_COLUMNS,
    "response": ("response", "completion", "messages"),
    "label": ("label", "desired"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}
# What a kind of examples is read from.
NEEDS = {
    PROMPTS: "a prompt",
    ANSWERS: "a prompt and a response (or messages)",
    FEEDBACK: "a prompt, a response (or messages) and a label, or chosen and rejected",
    PAIRS: "chosen and rejected, with a prompt unless they are whole dialogues",
}


@dataclass(frozen=True)
class Roles:
    """Names of the columns that hold the parts of an example; None where no column does."""

    prompt: str | None
    response: str | None
    label: str | None
    chosen: str | None
    rejected: str | None

    @classmethod
    def find(cls, columns: Sequence[str], named: Mapping[str, str | None]) -> Roles:
        """By the names that were given, else by usual ones.

        Raises:
            ValueError: a name that was given and is no column.
        """
        found = {}
        for role, usual in _USUAL.items():
            name = named.get(role)
            if name is not None and name not in columns:
                raise ValueError(
                    f"the data set has no column {name!r} ({role}_column): its columns are "
                    f"{', '.join(columns)}"
                )
            found[role] = name or next((c for c in usual if c in columns), None)
        answered = found["response"] or found["chosen"]
        if answered and found["prompt"] == "text" != named.get("prompt"):
            found["prompt"] = None  # texts beside answers are usually the whole of it
        return cls(**found)

    def kind(self) -> str | None:
        """The richest kind of examples that the columns make."""
        if self.chosen and self.rejected:
            return PAIRS
        if self.response:
            return FEEDBACK if self.label else ANSWERS
        return PROMPTS if self.prompt else None

    def read(self, kind: str) -> set[str]:
        """The columns that become parts of an example, the others go along."""
        if kind == PROMPTS:
            return {self.prompt} if self.prompt else set()
        return {name for f in fields(self) if (name := getattr(self, f.name)) is not None}


class Parts(NamedTuple):
    """A prompt and answers to it, each a text or chat messages."""

    prompt: Said
    answers: tuple[Said, ...] = ()


def read_parts(row: Mapping[str, Any], i: int, roles: Roles, kind: str) -> Parts:
    """The parts of row ``i``, of the richest kind that its columns make.

    Raises:
        ValueError: neither text nor chat messages, an empty prompt, a dialogue without one; names
            the row and the column.
    """
    sides = (roles.chosen, roles.rejected) if kind == PAIRS else (roles.response,)
    columns = [] if kind == PROMPTS else [column for column in sides if column is not None]
    answers = [_said(row, i, column) for column in columns]
    if all(is_blank(answer) for answer in answers) and roles.prompt is None and answers:
        return Parts("", tuple(answers))  # to be dropped, as empty answers are
    where = f"{' and '.join(columns)} of row {i}"
    if len({isinstance(answer, str) for answer in answers if answer}) > 1:
        raise ValueError(f"{where} hold a text and chat messages: make both the same")
    if any(is_whole(answer) for answer in answers):
        return _split_chats(answers, where)
    if roles.prompt is None:
        return _split_texts(answers, where)
    prompt = _said(row, i, roles.prompt)
    if is_blank(prompt):
        raise ValueError(f"column {roles.prompt!r} of row {i} is empty: every row needs a prompt")
    if isinstance(prompt, str) and any(not isinstance(answer, str) for answer in answers):
        prompt = as_messages(prompt)
    return Parts(prompt, tuple(answers))


def read_label(row: Mapping[str, Any], i: int, column: str) -> bool:
    """Whether row ``i`` is desired.

    Raises:
        ValueError: neither a boolean nor 0 or 1.
    """
    label = row.get(column)
    if isinstance(label, str) or label not in (0, 1):
        raise ValueError(
            f"column {column!r} of row {i} holds {label!r}: labels are True or False, or 1 or 0"
        )
    return bool(label)


def _said(row: Mapping[str, Any], i: int, column: str) -> Said:
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(is_message(message) for message in value):
        return list(value)
    raise ValueError(
        f"column {column!r} of row {i} holds {value!r:.80}: it must hold text, or chat messages "
        "(dicts with a role and a content of text)"
    )


def _split_chats(chats: Sequence[Said], where: str) -> Parts:
    """Whole conversations: what they share up to an assistant's turn is the prompt; of a single one
    all but its last turn."""
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
    prompt = full[0][:shared]
    return Parts(prompt, tuple(chat[shared:] if chat else "" for chat in chats))


def _split_texts(texts: Sequence[Any], where: str) -> Parts:
    """Whole dialogues as text: the prompt is what both have up to their last common
    "\\n\\nAssistant:"."""
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} has no prompt: bring a column of prompts (prompt_column)")
    first, other = sorted(texts, key=is_blank)  # an empty side shares nothing, and is dropped later
    end = len(first)
    while (at := first.rfind(_TURN, 0, end)) >= 0:
        border = at + len(_TURN)
        if is_blank(other) or other.startswith(first[:border]):
            if not first[:at].strip():
                break
            return Parts(first[:border], tuple(text[border:] for text in texts))
        end = border - 1
    raise ValueError(
        f"{where} have no prompt, and share none that ends in {_TURN!r}: bring a column of prompts "
        "(prompt_column)"
    )
