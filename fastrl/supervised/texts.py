"""Texts to learn from: from a data set's columns to token ids, and which of them are learned."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastrl.supervised.pairs import join

IGNORED = -100
_WAYS = (
    "a text column (dataset_text_field), prompt and completion, messages, input_ids, or pass "
    "formatting_func"
)


class DataCollatorForCompletionOnlyLM:
    """Says which tokens of a text are learned: those behind each response template, up to the next
    instruction template.

    Args:
        response_template: text or token ids in front of what is learned.
        instruction_template: text or token ids in front of what is not; for dialogues.
        tokenizer: of the texts.
        mlm: only False.
        ignore_index: label of tokens that are not learned.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        tokenizer: Any,
        mlm: bool = False,
        ignore_index: int = IGNORED,
    ):
        if mlm:
            raise ValueError("mlm=True is not for causal language models: leave it False")
        self.tokenizer, self.ignore_index = tokenizer, ignore_index
        self.response_template = response_template
        self._response = self._ids("response_template", response_template)
        self._instruction = (
            None
            if instruction_template is None
            else self._ids("instruction_template", instruction_template)
        )

    def _ids(self, name: str, template: str | Sequence[int]) -> list[int]:
        if isinstance(template, str):
            template = self.tokenizer.encode(template, add_special_tokens=False)
        if not len(template):
            raise ValueError(f"{name} is empty: pass the text in front of the responses")
        return [int(token) for token in template]

    def labels(self, input_ids: Sequence[int]) -> list[int]:
        """The tokens that are learned, ``ignore_index`` elsewhere."""
        ids = list(input_ids)
        starts = [at + len(self._response) for at in _places(ids, self._response)]
        labels = [self.ignore_index] * len(ids)
        if self._instruction is None:
            starts = starts[-1:]  # as an answer may quote the template in front of it
            stops = [len(ids)] * len(starts)
        else:
            turns = [*_places(ids, self._instruction), len(ids)]
            stops = [next((turn for turn in turns if turn >= start), len(ids)) for start in starts]
        for start, stop in zip(starts, stops, strict=True):
            labels[start:stop] = ids[start:stop]
        return labels

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A padded batch with labels, for loops of one's own."""
        rows = [{"input_ids": f["input_ids"], "labels": self.labels(f["input_ids"])} for f in features]
        return TextCollator(self.tokenizer, self.ignore_index)(rows)


@dataclass
class TextCollator:
    """Pads ``input_ids`` and ``labels`` on the right; says on the host which tokens are learned.

    ``rows`` [N] are the flat positions b·T + t whose next token ``targets`` [N] counts.
    """

    tokenizer: Any
    ignore_index: int = IGNORED

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pad = self.tokenizer.pad_token_id
        batch = {
            "input_ids": _padded([f["input_ids"] for f in features], pad),
            "attention_mask": _padded([[1] * len(f["input_ids"]) for f in features], 0),
            "labels": _padded([f["labels"] for f in features], self.ignore_index),
        }
        return batch | targets_of(batch["labels"], self.ignore_index)


def targets_of(labels: torch.Tensor, ignored: int = IGNORED) -> dict[str, torch.Tensor]:
    """``rows`` and ``targets`` of labels [B, T]."""
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=ignored).flatten()
    rows = (shifted != ignored).nonzero().squeeze(1)
    return {"rows": rows, "targets": shifted[rows]}


def prepare_texts(
    dataset: Any,
    tokenizer: Any,
    *,
    text_field: str,
    max_length: int | None,
    formatting_func: Callable | None = None,
    completions: DataCollatorForCompletionOnlyLM | None = None,
    append_eos: bool = True,
    num_proc: int | None = None,
) -> Any:
    """A data set with ``input_ids`` and ``labels``; of a prompt nothing is learned. Texts in which
    nothing is left to learn are dropped, and counted in a warning.

    Raises:
        ValueError: columns that are missing, no text left.
    """
    encode = _encoder(dataset, tokenizer, text_field, formatting_func, append_eos)

    def prepare(row: dict[str, Any]) -> dict[str, Any]:
        ids, labels = encode(row)
        ids, labels = ids[:max_length], labels[:max_length]
        if completions is not None:
            labels = completions.labels(ids)
        return {"input_ids": ids, "labels": labels}

    if formatting_func is not None:
        dataset = _formatted(dataset, formatting_func)
    prepared = dataset.map(
        prepare, num_proc=num_proc, remove_columns=dataset.column_names, desc="tokenising"
    )
    # The first token is predicted by nothing.
    kept = [i for i, labels in enumerate(prepared["labels"]) if any(x != IGNORED for x in labels[1:])]
    if len(kept) == len(prepared):
        return prepared
    why = "nothing is learned from them"
    if max_length is not None:
        why += f": they are empty, or what would be learned lies behind max_length={max_length}"
    if completions is not None:
        why += f", or response_template {completions.response_template!r} does not occur in them"
    if not kept:
        raise ValueError(f"no text is left of {len(prepared)}; {why}")
    warnings.warn(
        f"{len(prepared) - len(kept)} of {len(prepared)} texts dropped; {why}", stacklevel=4
    )
    return prepared.select(kept)


Encoder = Callable[[dict[str, Any]], tuple[list[int], list[int]]]
_FORMATTED = "__text"


def _formatted(dataset: Any, formatting_func: Callable) -> Any:
    """One column of texts: of a function of a row, or of a batch of rows, that returns texts."""
    first = formatting_func(dataset[0])
    if isinstance(first, str):
        return dataset.map(
            lambda row: {_FORMATTED: formatting_func(row)}, remove_columns=dataset.column_names
        )
    if not isinstance(formatting_func(dataset[:1]), list):
        raise ValueError(
            "formatting_func must return a text for a row, or a list of texts for a batch of rows; "
            f"it returned {type(first).__name__}"
        )
    return dataset.map(
        lambda rows: {_FORMATTED: formatting_func(rows)},
        batched=True,
        remove_columns=dataset.column_names,
    )


def _encoder(
    dataset: Any,
    tokenizer: Any,
    text_field: str,
    formatting_func: Callable | None,
    append_eos: bool,
) -> Encoder:
    """By the columns that there are."""
    columns = dataset.column_names

    def ended(ids: list[int]) -> list[int]:
        eos = tokenizer.eos_token_id
        ends = append_eos and eos is not None and ids[-1:] != [eos]
        return [*ids, eos] if ends and ids else ids

    def whole(text: str, **options: Any) -> tuple[list[int], list[int]]:
        ids = ended(tokenizer(text, **options)["input_ids"]) if text else []
        return ids, ids

    def completion(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        text = join(row["prompt"], row["completion"], tokenizer)
        before = join(row["prompt"], "", tokenizer)
        special = isinstance(row["completion"], str) and isinstance(row["prompt"], str)
        ids = ended(tokenizer(text, add_special_tokens=special)["input_ids"])
        prompt = tokenizer(before, add_special_tokens=special)["input_ids"]
        # A token that spans the border belongs to the completion.
        same = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), None)
        length = min(len(prompt), len(ids)) if same is None else same
        return ids, [IGNORED] * length + ids[length:]

    if formatting_func is not None:
        return lambda row: whole(row[_FORMATTED])
    if "input_ids" in columns:
        return lambda row: (row["input_ids"], row.get("labels") or row["input_ids"])
    if "messages" in columns:
        return lambda row: whole(join(None, row["messages"], tokenizer), add_special_tokens=False)
    if {"prompt", "completion"} <= set(columns):
        return completion
    if text_field in columns:
        return lambda row: whole(row[text_field])
    raise ValueError(f"the data set has columns {', '.join(columns)}: it needs {_WAYS}")


def _places(ids: list[int], template: list[int]) -> list[int]:
    width = len(template)
    return [i for i in range(len(ids) - width + 1) if ids[i : i + width] == template]


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(list(row), dtype=torch.long) for row in rows],
        batch_first=True,
        padding_value=value,
    )


def takes(function: Callable, name: str) -> bool:
    """Whether a function has an argument of this name."""
    return name in inspect.signature(function).parameters
