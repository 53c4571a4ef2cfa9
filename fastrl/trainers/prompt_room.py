"""The room that a model's context leaves for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from fastrl.data.chat import TEMPLATE_COLUMNS, bytes_of, is_blank, template_arguments
from fastrl.data.prompt_ids import ids_of_prompts
from fastrl.data.tables import ROW, each_row, is_stream, row_number
from fastrl.models.layout import layout_of

_AT_A_TIME = 1 << 10  # prompts that are tokenized together


class PromptRoom:
    """The room that a model's context leaves for prompts, beside responses of full length.

    Args:
        most: the most tokens of a response; None: as many as there is room for, but 1 at least.
        template: further arguments of the chat template.
        most_of_a_pass: ``micro_batch_tokens``, the most tokens of a prompt with its response; None:
            no limit but the context.
        longest: tokens that prompts are cut to; None: they are not.
        limit: the setting that ``most`` is.
        whose: whose model it is, for messages.
    """

    def __init__(
        self,
        model: Any,
        most: int | None,
        tokenizer: Any,
        template: Mapping[str, Any],
        most_of_a_pass: int | None = None,
        longest: int | None = None,
        limit: str = "max_completion_length",
        whose: str = "the",
    ):
        self._layout, self._most, self._most_of_a_pass = layout_of(model), most, most_of_a_pass
        self._tokenizer, self._template, self._longest = tokenizer, template, longest
        self._limit, self._whose = limit, whose

    def check_data(self, train: Any, evaluation: Any) -> None:
        """Does :meth:`check_rows` for data to train and evaluate on."""
        for name, data in data_by_name(train, evaluation).items():
            self.check_rows(data, name)

    def check_rows(self, data: Any, name: str) -> None:
        """Checks the first row, blank rows, and rows whose texts have more bytes than there is room
        for tokens. Rows of streams, and rows that only a chat template makes too long, are checked
        as they are learned from.

        Raises:
            ValueError: a prompt too long, or blank and without a token; the message names its row.
        """
        doubtful = (
            (f"the prompt of row {i} of {name}", row["prompt"], self._template_of(row, i))
            for first, (i, row) in enumerate(rows_of(data))
            if not first
            or is_blank(row["prompt"])
            or self._exceeded(bytes_of(row["prompt"])) is not None
        )
        while chunk := list(itertools.islice(doubtful, _AT_A_TIME)):
            names, prompts, templates = zip(*chunk, strict=True)
            rows = ids_of_prompts(prompts, self._tokenizer, templates, names, self._longest)
            for where, ids in zip(names, rows, strict=True):
                self.check(ids, where)

    def longest_of(self, data: Any) -> int:
        """The most tokens of a data set's prompts, as they are cut; 0 where they are not known."""
        rows = (row for _, row in rows_of(data))
        longest = 0
        while part := list(itertools.islice(rows, _AT_A_TIME)):
            prompts = [row["prompt"] for row in part]
            templates = [self._template_of(row, i) for i, row in enumerate(part)]
            names = ["a prompt"] * len(part)
            ids = ids_of_prompts(prompts, self._tokenizer, templates, names, self._longest)
            longest = max(longest, *map(len, ids))
        return longest

    def _template_of(self, row: Mapping[str, Any], i: int) -> dict[str, Any]:
        if isinstance(row["prompt"], str):
            return {}
        return {**self._template, **template_arguments(row, i)}

    def check(self, ids: Any, name: str) -> None:
        """Raises ValueError where the prompt ``name`` has too many token ids."""
        limit = self._exceeded(len(ids))
        if limit is not None:
            raise ValueError(
                f"{name} has {len(ids)} tokens; with {self._most or 1} of its response "
                f"({self._limit}) it exceeds {self._whose} {limit}: leave such prompts out of the "
                f"data set, or lower {self._limit}"
            )

    def _exceeded(self, tokens: int) -> str | None:
        """The limit, in words, that a prompt of so many tokens exceeds; None: it fits."""
        most, whole = self._most_of_a_pass, tokens + (self._most or 1)
        if most is not None and whole > most:
            return f"micro_batch_tokens of {most}"
        return self._layout.exceeded(tokens, self._most or 1)


def data_by_name(train: Any, evaluation: Any) -> dict[str, Any]:
    """Data sets by the names of their arguments."""
    held_out = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    named = {f"eval_dataset[{x!r}]" if x else "eval_dataset": y for x, y in held_out.items()}
    return {"train_dataset": train, **named}


def rows_of(data: Any, *further: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbers of rows, and rows with their prompt, columns for the chat template and ``further``
    ones; none for a stream, or where a function makes the rows as they are read."""
    if getattr(data, "column_names", None) is None or is_stream(data):
        return
    if data.format["type"] != "custom":
        read = ("prompt", ROW, *TEMPLATE_COLUMNS, *further)
        columns = [name for name in data.column_names if name in read]
        for i, row in enumerate(each_row(data.with_format(None).select_columns(columns))):
            yield row_number(row, i), row
