"""DatasLoader: data sets of prompts, answers, feedback or pairs, as encoded examples."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from fastrl.data.chat import PromptAndAnswers, is_blank, template_arguments
from fastrl.data.columns import (
    ANSWERS,
    FEEDBACK,
    KINDS,
    NEEDS,
    PAIRS,
    PROMPTS,
    Roles,
    read_label,
    read_row,
)
from fastrl.data.encode import Encoder
from fastrl.data.examples import Example
from fastrl.data.tables import ROW, columns_of, each_row, open_rows, row_number
from fastrl.models.fast_tokenizer import as_fast
from fastrl.run.fingerprint import fingerprint, hash_of

# What each kind of data can be read as.
_READABLE_AS = {
    PROMPTS: (PROMPTS,),
    ANSWERS: (ANSWERS, PROMPTS),
    FEEDBACK: (FEEDBACK, ANSWERS, PROMPTS),
    PAIRS: (PAIRS, FEEDBACK, ANSWERS, PROMPTS),
}
_LOOKED_AT = 1000  # the examples of which a warning says how many are cut
_REASONS = {"empty": "have an empty response", "equal": "have equal sides"}


class DatasLoader(Sequence[Example]):
    """A sequence of examples of one kind.

    ``prompts`` are read from a column of prompts; ``answers`` also have a response; ``feedback`` a
    response and a label; ``pairs`` chosen and rejected. Richer data can be read as poorer: pairs as
    feedback (chosen: desired, rejected: not), as answers (chosen) or as prompts, feedback as
    answers (the desired ones), all of them as prompts; see :meth:`as_kind`.

    Prompts and responses are texts, or chat messages, which the tokenizer's chat template writes
    with the columns ``tools`` and ``chat_template_kwargs``. The prompt may also be inside the
    responses: if chat messages, these may be whole conversations; chosen and rejected may be
    texts of the form "\\n\\nHuman: …\\n\\nAssistant: …", whose prompt is what both have up to their
    last common "\\n\\nAssistant:".

    The constructor checks all texts: examples with an empty response, or with chosen equal to
    rejected, are left out, and counted in a warning. The others are tokenised when they are read;
    pairs whose two responses become equal by a length limit stay.

    Args:
        source: a file, a folder or a Hub id, see :func:`fastrl.data.tables.load_table`; a Hugging
            Face data set; a list of rows.
        tokenizer: the tokenizer of the model to train.
        kind: "prompts", "answers", "feedback" or "pairs"; None: the richest kind that the columns
            give.
        split: the split to read, of a data set with several.
        max_length, max_prompt_length, truncation, add_eos: see
            :class:`fastrl.data.encode.Encoder`.
        prompt_column: by default "prompt" or "query", or "text" where there are only prompts.
        response_column: by default "response", "completion" or "messages".
        label_column: a column of booleans, or of 1 and 0; by default "label" or "desired".
        chosen_column, rejected_column: by default "chosen" and "rejected".

    Raises:
        ValueError: no such column, a kind that the columns do not give; something that is neither
            text nor chat messages, an empty prompt, a label that is not boolean, named by row and
            column; no example left.
        TypeError: not a data set, see :func:`fastrl.data.tables.as_dataset`.
    """

    def __init__(
        self,
        source: Any,
        tokenizer: Any,
        kind: str | None = None,
        *,
        split: str = "train",
        max_length: int | None = None,
        max_prompt_length: int | None = None,
        truncation: str = "keep_end",
        add_eos: bool = True,
        prompt_column: str | None = None,
        response_column: str | None = None,
        label_column: str | None = None,
        chosen_column: str | None = None,
        rejected_column: str | None = None,
    ):
        tokenizer = as_fast(tokenizer)
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, max_length, max_prompt_length, truncation, add_eos)
        self._rows = open_rows(source, split)
        self.columns = columns_of(self._rows)
        named = {
            "prompt": prompt_column,
            "response": response_column,
            "label": label_column,
            "chosen": chosen_column,
            "rejected": rejected_column,
        }
        self._roles = Roles.find(self.columns, named)
        richest = self._roles.kind()
        if richest is None:
            raise ValueError(
                f"the data set has columns {', '.join(self.columns)}: it needs {NEEDS[PROMPTS]} at "
                "least; name its columns, with prompt_column say"
            )
        self._richest: str = richest
        self._take(kind or richest)

    def as_kind(self, kind: str) -> DatasLoader:
        """The same data as examples of another kind.

        Raises:
            ValueError: the columns do not give that kind, or no example is left.
        """
        if kind == self.kind:
            return self
        loader = copy.copy(self)
        loader._take(kind)
        return loader

    def limited(self, max_length: int, of_prompt: int | None = None) -> DatasLoader:
        """The same examples, where a prompt with a response has at most ``max_length`` tokens, and
        a prompt at most ``of_prompt``; raises ValueError if :class:`Encoder` refuses the limits."""
        old = self.encoder
        longest = min(max_length, old.max_length or max_length)
        prompt = min((x for x in (of_prompt, old.max_prompt_length) if x is not None), default=None)
        if (longest, prompt) == (old.max_length, old.max_prompt_length):
            return self
        loader = copy.copy(self)
        loader.encoder = replace(old, max_length=longest, max_prompt_length=prompt)
        return loader

    def uncut(self) -> DatasLoader:
        """The same examples without those that a length limit would cut, counted in a warning.

        Raises:
            ValueError: no example left.
        """
        if self.encoder.max_length is None and self.encoder.max_prompt_length is None:
            return self
        loader = copy.copy(self)
        loader.encoder = Encoder(self.tokenizer, add_eos=self.encoder.add_eos)
        kept = [i for i, example in enumerate(loader) if self._fits(example)]
        loader.encoder, loader._picks = self.encoder, [self._picks[i] for i in kept]
        dropped = len(self) - len(kept)
        if dropped:
            rows = (
                f"{dropped} of {len(self)} examples are longer than max_length="
                f"{self.encoder.max_length}, max_prompt_length={self.encoder.max_prompt_length}"
            )
            if not kept:
                raise ValueError(f"no example is left: {rows}")
            warnings.warn(f"{rows}: dropped", stacklevel=3)
        return loader

    def warn_of_cuts(self) -> None:
        """Warns, if a length limit cuts some of the first 1000 examples, of how many."""
        limits = {k: getattr(self.encoder, k) for k in ("max_length", "max_prompt_length")}
        limits = {k: limit for k, limit in limits.items() if limit is not None}
        if not limits:
            return
        unlimited = copy.copy(self)
        unlimited.encoder = Encoder(self.tokenizer, add_eos=self.encoder.add_eos)
        seen = min(len(self), _LOOKED_AT)
        cuts = sum(not self._fits(unlimited[i]) for i in range(seen))
        if cuts:
            counted = f"{seen}" if seen == len(self) else f"the first {seen}"
            names = ", ".join(f"{k}={limit}" for k, limit in limits.items())
            warnings.warn(
                f"{cuts} of {counted} examples are longer than {names} tokens and are cut: raise "
                f"{' or '.join(limits)} if the model takes more, or bring shorter ones",
                stacklevel=3,
            )

    def _fits(self, whole: Example) -> bool:
        longest = max((len(response.ids) for response in whole.responses), default=0)
        prompt, limits = len(whole.prompt_ids), self.encoder
        return (limits.max_length is None or prompt + longest <= limits.max_length) and (
            limits.max_prompt_length is None or prompt <= limits.max_prompt_length
        )

    @property
    def fingerprint(self) -> str:
        """A hash of the rows, and of how they are read."""
        encoder, limits = self.encoder, (self.encoder.max_length, self.encoder.max_prompt_length)
        how = [self.kind, self._roles, *limits, encoder.truncation, encoder.add_eos, *self._picks]
        return f"{fingerprint(self._rows, [ROW])}, read as {hash_of(how)}"

    def __len__(self) -> int:
        return len(self._picks)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        pick = self._picks[index]
        row = self._rows[pick.row]
        number = row_number(row, pick.row)
        prompt, answers = read_row(row, number, self._roles, self._richest)
        parts = {ROW, *self._roles.read(PROMPTS if self.kind == PROMPTS else self._richest)}
        columns = {k: v for k, v in row.items() if k not in parts}
        chosen = [answers[side] for side in pick.sides]
        encoder = self.encoder
        if not isinstance(prompt, str):
            encoder = encoder.with_template(template_arguments(row, number))
        try:
            return encoder(prompt, chosen, desired=pick.desired, columns=columns)
        except ValueError as error:
            raise ValueError(f"row {number} of the data set: {error}") from error

    def _take(self, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}: choose one of {', '.join(KINDS)}")
        if kind not in _READABLE_AS[self._richest]:
            raise ValueError(
                f"{kind} are needed, which are read from {NEEDS[kind]}; the data set's columns "
                f"give {self._richest} only: {', '.join(self.columns)}"
            )
        self.kind = kind
        self._picks, dropped = self._picked()
        count = sum(dropped.values())
        why = ", ".join(f"{dropped[x]} {reason}" for x, reason in _REASONS.items() if dropped[x])
        if not self._picks:
            raise ValueError(
                f"no example is left of {len(self._rows)} rows: {why or 'none is desired'}"
            )
        if count:
            warnings.warn(f"{count} of {len(self._rows)} rows dropped: {why}", stacklevel=3)
        self[0]  # raises now if the chat template does not fit

    def _picked(self) -> tuple[list[_Pick], Counter[str]]:
        picks, dropped = [], Counter[str]()
        for i, row in enumerate(each_row(self._rows)):
            number = row_number(row, i)
            texts = read_row(row, number, self._roles, self._richest)
            useless = _why_useless(texts, self.kind)
            if useless:
                dropped[useless] += 1
            elif self.kind == PROMPTS:
                picks.append(_Pick(i))
            elif self._richest == PAIRS:
                picks += _FROM_PAIRS[self.kind](i)
            elif self._richest == FEEDBACK:
                assert self._roles.label is not None
                desired = read_label(row, number, self._roles.label)
                if desired or self.kind == FEEDBACK:
                    picks.append(_Pick(i, (0,), desired if self.kind == FEEDBACK else None))
            else:
                picks.append(_Pick(i, (0,)))
        return picks, dropped


class _Pick(NamedTuple):
    """Which answers of a row make an example."""

    row: int
    sides: tuple[int, ...] = ()
    desired: bool | None = None


_FROM_PAIRS = {
    PAIRS: lambda i: [_Pick(i, (0, 1))],
    FEEDBACK: lambda i: [_Pick(i, (0,), True), _Pick(i, (1,), False)],
    ANSWERS: lambda i: [_Pick(i, (0,))],
}


def _why_useless(row: PromptAndAnswers, kind: str) -> str:
    prompt, answers = row
    if kind == PROMPTS:  # blank where the prompt should have been inside the responses
        return "empty" if is_blank(prompt) else ""
    if any(is_blank(answer) for answer in answers):
        return "empty"
    return "equal" if len(answers) == 2 and answers[0] == answers[1] else ""
