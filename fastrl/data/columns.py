"""Roles of a data set's columns; from a row to its prompt and answers, texts or chat messages."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastrl.data.chat import (
    PromptAndAnswers,
    TextOrMessages,
    as_messages,
    check_messages,
    is_blank,
    is_chat,
    is_whole,
    split_conversations,
    split_dialogues,
)
from fastrl.data.tables import USUAL_COLUMNS

# Kinds of examples.
PROMPTS, ANSWERS, FEEDBACK, PAIRS = "prompts", "answers", "feedback", "pairs"
KINDS = (PROMPTS, ANSWERS, FEEDBACK, PAIRS)
_USUAL = {
    "prompt": USUAL_COLUMNS,
    "response": ("response", "completion", "messages"),
    "label": ("label", "desired"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
}
# What each kind is read from.
NEEDS = {
    PROMPTS: "a prompt",
    ANSWERS: "a prompt and a response (or messages)",
    FEEDBACK: "a prompt, a response (or messages) and a label, or chosen and rejected",
    PAIRS: "chosen and rejected, with a prompt unless they are whole dialogues",
}


# What reward functions get by keyword, beside a data set's columns.
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")


# Columns of pictures and of what models read of them.
PICTURES = (
    *("image", "images", "videos", "pixel_values", "pixel_values_videos"),
    *("image_grid_thw", "video_grid_thw", "mm_token_type_ids"),
)


def refuse_pictures(columns: Iterable[str], of: str = "the data set") -> None:
    """Raises ValueError for a column of pictures."""
    for name in columns:
        if name in PICTURES:
            raise ValueError(
                f"the column {name!r} of {of} would not be learned from: models of images and "
                "texts are trained on texts alone; remove the column to learn the texts"
            )


def check_reserved(
    columns: Iterable[str], of: str, reserved: Container[str] = REWARD_ARGUMENTS
) -> None:
    """Checks that no column has the name of another argument of reward functions.

    Args:
        of: what has the columns, for errors.
        reserved: names of what reward functions get by keyword, which a column would replace.

    Raises:
        ValueError: a column of such a name, or of pictures.
    """
    columns = list(columns)
    refuse_pictures(columns, of)
    for name in columns:
        if name in reserved:
            raise ValueError(
                f"the column {name!r} of {of} has the name of what reward functions get by "
                "keyword, and would replace it: rename the column"
            )


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
        """Finds the columns by their names in ``named``, or else by usual names.

        Raises:
            ValueError: a name that is not a column.
        """
        names = {}
        for role, usual in _USUAL.items():
            name = named.get(role)
            if name is not None and name not in columns:
                raise ValueError(
                    f"the data set has no column {name!r} ({role}_column): its columns are "
                    f"{', '.join(columns)}"
                )
            names[role] = name or next((c for c in usual if c in columns), None)
        answered = names["response"] or names["chosen"]
        if answered and names["prompt"] == "text" != named.get("prompt"):
            names["prompt"] = None  # "text" beside answers usually holds prompt and answer
        return cls(**names)

    def kind(self) -> str | None:
        """The richest kind of examples that the columns give; None if they give none."""
        if self.chosen and self.rejected:
            return PAIRS
        if self.response:
            return FEEDBACK if self.label else ANSWERS
        return PROMPTS if self.prompt else None

    def read(self, kind: str) -> set[str]:
        """The columns that are read as parts of an example, which keeps all other columns.

        Args:
            kind: the kind of examples that rows are read as.
        """
        parts = [self.prompt]
        parts += {PROMPTS: [], PAIRS: [self.chosen, self.rejected]}.get(kind, [self.response])
        parts += [self.label] if kind == FEEDBACK else []
        return {name for name in parts if name is not None}


def read_row(
    row: Mapping[str, Any], i: int, roles: Roles, kind: str, *, alone: bool = False
) -> PromptAndAnswers:
    """The prompt of row ``i`` and the answers to it, each a text or chat messages.

    Args:
        kind: the kind of examples that the columns give, see :meth:`Roles.kind`.
        alone: allow texts and conversations without a prompt, which is "" then, and messages whose
            content is not a text.

    Raises:
        ValueError: neither text nor chat messages, answers of both kinds, an empty prompt, a
            dialogue without a prompt; names the row and the column.
    """
    sides = (roles.chosen, roles.rejected) if kind == PAIRS else (roles.response,)
    columns = [] if kind == PROMPTS else [column for column in sides if column is not None]
    answers = tuple(read_text_or_chat(row, i, column, not alone) for column in columns)
    prompt = "" if roles.prompt is None else read_text_or_chat(row, i, roles.prompt, not alone)
    unprompted = roles.prompt is None or (alone and not prompt)
    if answers and unprompted and all(is_blank(answer) for answer in answers):
        return "", answers  # the caller drops empty answers
    where = f"{' and '.join(columns)} of row {i}"
    if len({isinstance(answer, str) for answer in answers if answer}) > 1:
        raise ValueError(f"{where} hold a text and chat messages: make both the same")
    whole = any(is_whole(answer) for answer in answers)
    if whole or unprompted:
        try:
            return split_conversations(answers, where) if whole else split_dialogues(answers, where)
        except ValueError:
            if alone:
                return "", answers
            raise
    if is_blank(prompt) and not alone:
        raise ValueError(f"column {roles.prompt!r} of row {i} is empty: every row needs a prompt")
    if isinstance(prompt, str) and any(not isinstance(answer, str) for answer in answers):
        prompt = as_messages(prompt)
    return prompt, answers


def read_label(row: Mapping[str, Any], i: int, column: str) -> bool:
    """The label of row ``i``: whether its response is desired.

    Raises:
        ValueError: neither a boolean nor 0 or 1.
    """
    label = row.get(column)
    if isinstance(label, str) or label not in (0, 1):
        raise ValueError(
            f"column {column!r} of row {i} holds {label!r}: labels are True or False, or 1 or 0"
        )
    return bool(label)


def read_text_or_chat(
    row: Mapping[str, Any], i: int, column: str, texts: bool = True
) -> TextOrMessages:
    """The text or the chat messages in a column of row ``i``; "" for None.

    Args:
        texts: whether contents of messages must be texts.

    Raises:
        ValueError: something else, or messages that :func:`fastrl.data.chat.check_messages`
            refuses; names the row and the column.
    """
    value = row.get(column)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if is_chat(value) or value in ([], ()):
        check_messages(value, f"column {column!r} of row {i}", texts=texts)
        return list(value)
    raise ValueError(
        f"column {column!r} of row {i} holds {value!r:.80}: it must hold text, or chat messages "
        "(dicts with a role and a content of text)"
    )
