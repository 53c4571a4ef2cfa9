"""What training scripts do with rows of data sets, under TRL's names."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from fastrl.data.chat import as_chatml, as_said, is_chat, shared_length, without_nulls
from fastrl.data.preferences import split_prompt
from fastrl.data.prepare import tokenised_rows
from fastrl.data.sft_packing import BFD, PACKINGS, are_packed, packed

_SAID = ("prompt", "chosen", "rejected", "completion", "messages")


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row holds chat messages, with roles."""
    column = next((example[name] for name in _SAID if name in example), None)
    return is_chat(column) and bool(column) and "role" in column[0]  # type: ignore[index]


def apply_chat_template(
    example: Mapping[str, Any],
    tokenizer: Any = None,
    tools: Any = None,
    *,
    processing_class: Any = None,
    **template_kwargs: Any,
) -> dict[str, Any]:
    """Renders a row's messages: ``messages`` as ``text``; a prompt up to where the answer begins,
    and an answer as what follows the prompt when both are rendered as one chat.

    Args:
        tokenizer, processing_class: a tokenizer or a processor with a chat template, by its older
            or its newer name.
        tools: an argument of the template, as are ``template_kwargs`` and the entries of the row's
            column ``chat_template_kwargs``. In ``tools``, that column and messages, keys whose
            value is None are left out, but for ``content``: tables add them for other rows' sake.

    Raises:
        TypeError: no tokenizer.
        ValueError: ``messages`` beside a prompt or an answer, or none of these columns.
    """
    writer = tokenizer if processing_class is None else processing_class
    if writer is None:
        raise TypeError("pass the tokenizer as processing_class")
    of_row = without_nulls(example.get("chat_template_kwargs") or {})
    options = {"tools": without_nulls(tools), **of_row, **template_kwargs}

    def written(messages: list[Any], **more: Any) -> str:
        written_out = [as_said(message) for message in messages]
        return writer.apply_chat_template(written_out, tokenize=False, **options, **more)

    columns = set(_SAID) & set(example)
    if columns == {"messages"}:
        return {"text": written(example["messages"])}
    sides = [name for name in ("chosen", "rejected", "completion") if name in columns]
    if "messages" in columns or not (sides or columns == {"prompt"}):
        raise ValueError(
            f"a row has {', '.join(example)}: bring messages, or prompt, chosen and rejected, or "
            "prompt and completion"
        )
    label = {"label": example["label"]} if "label" in example else {}
    if "prompt" not in columns:
        return {**{name: written(example[name]) for name in sides}, **label}
    answered = example["prompt"][-1]["role"] == "assistant"  # the prompt begins the answer
    prompt = written(
        example["prompt"], add_generation_prompt=not answered, continue_final_message=answered
    )
    whole = {name: written([*example["prompt"], *example[name]]) for name in sides}
    for text in whole.values():  # a template may end prompts otherwise in front of an answer
        prompt = prompt[: shared_length(prompt, text)]
    return {
        "prompt": prompt,
        **{name: text[len(prompt) :] for name, text in whole.items()},
        **label,
    }


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any = None, tools: Any = None, **template_kwargs: Any
) -> Any:
    """:func:`apply_chat_template` of a row with messages; another row stays as it is."""
    if not is_conversational(example):
        return example
    return apply_chat_template(example, tokenizer, tools, **template_kwargs)


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Moves what both sides of a pair begin with to ``prompt``, by :func:`split_prompt`."""
    return split_prompt(example)


def maybe_extract_prompt(example: Mapping[str, Any]) -> Any:
    """:func:`extract_prompt` of a pair whose sides begin with the prompt; other rows stay."""
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example and is_chat(example["prompt"]) == is_chat(example["chosen"]):
        return example
    return extract_prompt(example)


def unpair_preference_dataset(dataset: Any, **map_kwargs: Any) -> Any:
    """Pairs as two rows each, with ``completion`` and ``label``: all chosen sides of a batch of
    ``map``, then all rejected ones.

    Args:
        dataset: a Dataset, an IterableDataset, or a DatasetDict or IterableDatasetDict.
        map_kwargs: further arguments of the data set's ``map``.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def maybe_unpair_preference_dataset(
    dataset: Any, num_proc: int | None = None, desc: str | None = None
) -> Any:
    """:func:`unpair_preference_dataset` of pairs; other data as they are."""
    part = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
    if not {"chosen", "rejected"} <= set(part.column_names):
        return dataset
    return unpair_preference_dataset(dataset, num_proc=num_proc, desc=desc)


def _unpaired(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    count = len(rows["chosen"])
    others = {k: v * 2 for k, v in rows.items() if k not in ("chosen", "rejected")}
    completion = [*rows["chosen"], *rows["rejected"]]
    return {**others, "completion": completion, "label": [True] * count + [False] * count}


def maybe_convert_to_chatml(example: Mapping[str, Any]) -> dict[str, Any]:
    """Renames ShareGPT's keys in a row to ChatML's: ``from`` to ``role``, ``value`` to ``content``,
    ``conversations`` to ``messages``."""
    row = dict(example)
    for name in (*_SAID, "conversations"):
        if is_chat(row.get(name)):
            row[name] = [as_chatml(message) for message in row[name]]
    if "conversations" in row:
        row["messages"] = row.pop("conversations")
    return row


def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd") -> Any:
    """Packs token ids in rows of ``seq_length`` tokens, see :func:`packed`. ``SFTTrainer`` takes
    the rows, and keeps the texts in them apart.

    Args:
        dataset: rows of ``input_ids``, and of ``labels`` or masks as in
            :func:`fastrl.data.prepare.prepare_texts`: a Dataset, an IterableDataset, or a dict of
            these. Other columns are left out; "bfd" cuts the ends of longer rows.

    Raises:
        ValueError: an unknown strategy, a ``seq_length`` below 1, rows that have no ``input_ids``,
            do not fit their labels or masks, or are packed.
    """
    if strategy not in PACKINGS:
        raise ValueError(f"strategy is {strategy!r}: it must be one of {', '.join(PACKINGS)}")
    if seq_length < 1:
        raise ValueError(f"seq_length must be at least 1, got {seq_length}")
    if isinstance(dataset, dict):
        return {name: pack_dataset(part, seq_length, strategy) for name, part in dataset.items()}
    if are_packed(dataset):
        raise ValueError("the rows are packed already: they have seq_lengths")
    rows = tokenised_rows(dataset, seq_length if strategy == BFD else None)
    return packed(rows, seq_length, strategy)


def conversations_formatting_function(
    tokenizer: Any, messages_field: str, tools: Any = None
) -> Callable[[Mapping[str, Any]], Any]:
    """Makes a ``formatting_func`` that renders the messages of a row, or of a batch of rows."""

    def format_rows(rows: Mapping[str, Any]) -> Any:
        texts = [
            [as_said(x) for x in chat] if isinstance(chat, list) else as_said(chat)
            for chat in rows[messages_field]
        ]
        return tokenizer.apply_chat_template(texts, tokenize=False, tools=tools)

    return format_rows


class ConstantLengthDataset(IterableDataset):
    """Rows of ``input_ids`` and ``labels``, [seq_length] each, cut from texts one behind the other,
    as TRL 0.22 and before had it; rows that are not full are left out.

    Args:
        dataset_text_field: the column of the texts.
        formatting_func: returns a row's text, in place of that column.
        infinite: begin again at the end.
        num_of_sequences, chars_per_token: texts of num_of_sequences·chars_per_token·seq_length
            characters are read at a time.
        eos_token_id: the token between texts, if the tokenizer has no EOS.
        shuffle: shuffle the texts read at a time, and then their rows, by Python's generator.
        append_concat_token, add_special_tokens: end texts with EOS; add the tokenizer's special
            tokens to them.
    """

    def __init__(
        self,
        tokenizer: Any,
        dataset: Any,
        dataset_text_field: str | None = None,
        formatting_func: Callable[[Any], str] | None = None,
        infinite: bool = False,
        seq_length: int = 1024,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        eos_token_id: int = 0,
        shuffle: bool = True,
        append_concat_token: bool = True,
        add_special_tokens: bool = True,
    ):
        if dataset_text_field is None and formatting_func is None:
            raise ValueError("name the texts by dataset_text_field, or pass a formatting_func")
        self.tokenizer, self.dataset, self.seq_length = tokenizer, dataset, seq_length
        self.formatting_func = formatting_func or (lambda row: row[dataset_text_field])
        self.infinite, self.shuffle = infinite, shuffle
        self.max_buffer_size = seq_length * chars_per_token * num_of_sequences
        eos = tokenizer.eos_token_id
        self.concat_token_id = eos_token_id if eos is None else eos
        self.append_concat_token = append_concat_token
        self.add_special_tokens = add_special_tokens

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self) -> Any:
        """The rows as a set of ``datasets``; a stream if ``infinite``, or if ``dataset`` is one."""
        import datasets

        if self.infinite or not hasattr(type(self.dataset), "__len__"):
            return datasets.IterableDataset.from_generator(self._lists)
        return datasets.Dataset.from_list(list(self._lists()))

    def _lists(self) -> Iterator[dict[str, list[int]]]:
        for row in self:
            yield {name: x.tolist() for name, x in row.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        texts = self._texts()
        while buffer := list(self._some(texts)):
            if self.shuffle:
                random.shuffle(buffer)
            encoded = self.tokenizer(buffer, add_special_tokens=self.add_special_tokens)
            end = [self.concat_token_id] if self.append_concat_token else []
            ids = [i for text in encoded["input_ids"] for i in (*text, *end)]
            whole = len(ids) - len(ids) % self.seq_length
            rows = [ids[i : i + self.seq_length] for i in range(0, whole, self.seq_length)]
            if self.shuffle:
                random.shuffle(rows)
            for row in rows:
                yield {"input_ids": torch.tensor(row), "labels": torch.tensor(row)}

    def _texts(self) -> Iterator[str]:
        while True:
            yield from map(self.formatting_func, self.dataset)
            if not self.infinite:
                return

    def _some(self, texts: Iterator[str]) -> Iterator[str]:
        size = 0.0
        while size < self.max_buffer_size:
            text = next(texts, None)
            if text is None:
                return
            size += len(text)
            yield text
