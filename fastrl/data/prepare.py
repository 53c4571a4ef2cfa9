"""Data sets of texts for SFT, and of pairs for reward models, as token columns."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fastrl.data.cache_key import keyed
from fastrl.data.chat import as_chatml, check_messages, template_arguments
from fastrl.data.collators import (
    ID_COLUMNS,
    IGNORED,
    SIDES,
    TOKEN_COLUMNS,
    DataCollatorForCompletionOnlyLM,
)
from fastrl.data.columns import ANSWERS, PAIRS, Roles, read_row, refuse_pictures
from fastrl.data.encode import Encoder
from fastrl.data.sft_packing import SEQ_LENGTHS
from fastrl.data.tables import (
    ROW,
    as_dataset,
    columns_of,
    first_row,
    is_stream,
    list_as_dataset,
    map_options,
    row_number,
    stream_columns,
)

_FORMATTED, _USEFUL, _CUT = "_text", "_useful", "_cut"  # columns that are dropped again
_DEFAULT_FIELD = "text"
_MASKS = ("completion_mask", "assistant_masks")  # columns beside input_ids: 1 for what is learned
_SHAREGPT = "conversations"
_OLDER_ID_COLUMNS = ("chosen_input_ids", "rejected_input_ids")  # pairs' ids in older TRL
KEEP_START, KEEP_END = "keep_start", "keep_end"


def prepare_texts(
    dataset: Any,
    tokenizer: Any,
    max_length: int | None = None,
    num_proc: int | None = None,
    *,
    text_field: str = _DEFAULT_FIELD,
    formatting_func: Callable | None = None,
    completions: DataCollatorForCompletionOnlyLM | None = None,
    append_eos: bool = True,
    add_special: bool = True,
    completion_only: bool = True,
    assistant_only: bool = False,
    truncation: str = KEEP_START,
) -> Any:
    """A data set with ``input_ids`` and ``labels``. Texts of more than ``max_length`` tokens lose
    their ends; a prompt with a completion loses the prompt's beginning first, see :class:`Encoder`.
    Texts without a token to learn are dropped. Warnings count the texts that are cut, and those
    that are dropped, but not in a stream, which is prepared as it is read.

    Args:
        dataset: see :func:`fastrl.data.tables.as_dataset`, or a stream (``IterableDataset``). Rows
            have texts, messages (``messages``, or ShareGPT's ``conversations``), a prompt and a
            completion, or ``input_ids``, with ``labels`` or the masks ``completion_mask`` and
            ``assistant_masks`` where not all are learned. ``tools`` and ``chat_template_kwargs`` go
            to the chat template.
        formatting_func: returns a row's text, or a list of texts for a batch of rows.
        completions: finds the tokens to learn behind its response template.
        append_eos: end texts with EOS; chat templates write their own, and token ids stay.
        add_special: add the special tokens that the tokenizer puts at both ends of a text.
        completion_only: learn only the completion of rows with a prompt and a completion.
        assistant_only: learn only the assistant's turns of messages, or of a completion of
            messages.
        truncation: "keep_start", or "keep_end" to cut texts at their beginnings.

    Raises:
        TypeError: not a data set, see :func:`fastrl.data.tables.as_dataset`; a column of texts or
            of messages that holds something else.
        ValueError: columns that are missing, no text left.
    """
    streams = is_stream(dataset)
    if streams:
        dataset = list_as_dataset(dataset)
    else:
        dataset = keyed(as_dataset(dataset), formatting_func, tokenizer)
    if formatting_func is not None:
        dataset, text_field = _formatted(dataset, formatting_func), _FORMATTED
        columns = [_FORMATTED]
    else:
        columns = stream_columns(dataset) if streams else columns_of(dataset)
    refuse_pictures(columns)
    encode_whole, encode_cut = (
        _row_encoder(columns, encoder, text_field, completion_only, assistant_only)
        for encoder in (
            Encoder(tokenizer, limit, add_eos=append_eos, add_special=add_special)
            for limit in (None, max_length)
        )
    )

    def prepare(row: dict[str, Any], i: int) -> dict[str, Any]:
        number = row_number(row, i)
        ids, labels = encode_whole(row, number)
        cut = max_length is not None and len(ids) > max_length
        if cut and truncation == KEEP_END:
            ids, labels = ids[-max_length:], labels[-max_length:]  # type: ignore[operator]
        elif cut:
            ids, labels = encode_cut(row, number)
            ids, labels = ids[:max_length], labels[:max_length]
        if completions is not None:
            learned = completions.learned(ids)
            labels = _labels(ids, learned)
        # Nothing predicts the first token.
        useful = any(label != IGNORED for label in labels[1:])
        return {"input_ids": ids, "labels": labels, _USEFUL: useful, _CUT: cut}

    removed = columns if streams else dataset.column_names
    options = map_options(dataset, num_proc, "tokenising")
    prepared = dataset.map(prepare, with_indices=True, remove_columns=removed, **options)
    if streams:
        return prepared.filter(lambda row: row[_USEFUL]).remove_columns([_USEFUL, _CUT])
    kept = [i for i, useful in enumerate(prepared[_USEFUL]) if useful]
    cuts, whole = sum(prepared[_CUT]), len(prepared)
    prepared = prepared.remove_columns([_USEFUL, _CUT])
    if cuts:
        warnings.warn(
            f"{cuts} of {whole} texts are longer than max_length={max_length} tokens and are cut: "
            "raise max_length if the model takes more, or bring shorter texts",
            stacklevel=2,
        )
    if len(kept) == whole:
        return prepared
    why = "nothing is learned from them: they are empty"
    if max_length is not None:
        why += f", or all of it lies behind max_length={max_length}"
    if completions is not None:
        named = " or ".join(
            f"{k} {template!r}" for k, (template, _) in completions.templates().items()
        )
        why += (
            f", or {named} does not occur in them as these tokens (pass token ids as they are "
            "inside a text)"
        )
    if not kept:
        raise ValueError(f"no text is left of {whole}; {why}")
    warnings.warn(f"{whole - len(kept)} of {whole} texts dropped; {why}", stacklevel=2)
    return prepared.select(kept)


def tokenised_rows(dataset: Any, max_length: int | None = None, num_proc: int | None = None) -> Any:
    """Rows of ``input_ids``, cut behind ``max_length`` tokens, with the ``labels`` that
    :func:`prepare_texts` makes of their labels or masks, and without other columns; rows without
    tokens are dropped. Of packed rows, which are not cut, ``seq_lengths`` stay, and the label of
    each text's first token is -100.

    Raises:
        ValueError: no ``input_ids``; a row's columns that do not fit each other, with its number.
    """

    def prepare(row: dict[str, Any], i: int) -> dict[str, Any]:
        number = row_number(row, i)
        ids, labels = _tokens(row, number)
        lengths = row.get(SEQ_LENGTHS)
        if lengths is None:
            return {"input_ids": ids[:max_length], "labels": labels[:max_length]}
        if sum(lengths) != len(ids) or min(lengths, default=1) < 1:
            raise ValueError(
                f"row {number}: input_ids has {len(ids)} tokens, and {SEQ_LENGTHS} {lengths!r:.80}:"
                " they must be numbers of tokens of texts, which add up to the row's"
            )
        labels = list(labels)
        for start in itertools.accumulate(lengths[:-1], initial=0):
            labels[start : start + 1] = [IGNORED]
        return {"input_ids": ids, "labels": labels, SEQ_LENGTHS: lengths}

    streams = is_stream(dataset)
    dataset = list_as_dataset(dataset) if streams else keyed(as_dataset(dataset))
    removed = stream_columns(dataset) if streams else dataset.column_names
    if "input_ids" not in removed:
        raise ValueError(f"the rows have no input_ids, but {', '.join(removed)}: tokenise them")
    options = map_options(dataset, num_proc, "labelling")
    rows = dataset.map(prepare, with_indices=True, remove_columns=removed, **options)
    return rows.filter(_has_tokens)


def _has_tokens(row: Mapping[str, Any]) -> bool:
    return len(row["input_ids"]) > 0


def check_ready(dataset: Any) -> None:
    """Raises ValueError for rows that ``skip_prepare_dataset`` would take as they are, without
    ``input_ids``, or with masks and without the labels that preparing makes of masks."""
    columns = stream_columns(dataset) if is_stream(dataset) else list(dataset[0])
    if "input_ids" not in columns:
        raise ValueError(
            f"skip_prepare_dataset takes rows with input_ids and labels, and these have "
            f"{', '.join(columns)}: leave it out"
        )
    if "labels" not in columns and set(columns) & set(_MASKS):
        raise ValueError(
            "skip_prepare_dataset makes no labels of the data set's masks, so that all tokens "
            "would be learned: Add a 'labels' column (-100 for tokens that are not learned), or "
            "leave it out"
        )


def _formatted(dataset: Any, formatting_func: Callable) -> Any:
    """A data set with one column: the texts that the function makes of rows, or of batches."""
    errors, streams = [], is_stream(dataset)
    first = first_row(dataset) if streams else dataset[0]
    columns = list(first) if streams else dataset.column_names
    several = {name: [value] for name, value in first.items()} if streams else dataset[:1]
    for batched, rows in ((False, first), (True, several)):
        try:
            formatted = formatting_func(rows)
        except Exception as error:  # it may take the other form, rows or batches
            errors.append(error)
            continue
        texts = formatted if isinstance(formatted, list) else [formatted]
        if isinstance(formatted, list) == batched and all(isinstance(text, str) for text in texts):
            return dataset.map(
                lambda rows: {_FORMATTED: formatting_func(rows)},
                batched=batched,
                remove_columns=columns,
                **({} if streams else {"desc": "formatting"}),
            )
    raise ValueError(
        "formatting_func must return a text for a row, or a list of texts for a batch of rows (a "
        f"dict of lists); the data set has columns {', '.join(columns)}"
    ) from (errors[0] if errors else None)


def _check_numbers(ids: Any, name: str, also: int = 0) -> None:
    """Raises ValueError for anything but a list of numbers that are token ids or ``also``."""
    numbers = np.asarray([] if ids is None else ids)
    whole = numbers.dtype.kind in "iu" or (ids is not None and not numbers.size)
    if numbers.ndim != 1 or not whole or not ((numbers >= 0) | (numbers == also)).all():
        raise ValueError(
            f"{name} holds {ids!r:.80}: it must be a list of token ids, whole numbers of 0 or more"
        )


def _row_encoder(
    columns: Sequence[str],
    encoder: Encoder,
    text_field: str,
    completion_only: bool,
    assistant_only: bool,
) -> Callable[[dict[str, Any], int], tuple[list[int], list[int]]]:
    """Makes the function from a row and its index to token ids and labels, by the columns.

    Raises:
        ValueError: columns without anything to learn.
    """
    roles = Roles("prompt", "completion", None, None, None)

    def text(row: dict[str, Any], i: int) -> tuple[list[int], list[int]]:
        text = row[text_field]
        if not (text is None or isinstance(text, str)):
            raise TypeError(
                f"column {text_field!r} must hold text, but row {i} holds {str(text)[:60]!r}, "
                f"{type(text).__name__}"
            )
        ids, _ = encoder.alone(text or "")
        return ids, ids

    def messages(row: dict[str, Any], i: int) -> tuple[list[int], list[int]]:
        assert chats is not None
        chat = row[chats]
        if isinstance(chat, list) and chats == _SHAREGPT:
            chat = [as_chatml(each) if isinstance(each, Mapping) else each for each in chat]
        if not isinstance(chat, list):
            raise TypeError(
                f"column {chats!r} of row {i} holds {str(chat)[:60]!r}: it must hold chat "
                "messages (dicts with a role and a content)"
            )
        if not chat:
            return [], []  # counted with texts from which nothing is learned
        check_messages(chat, f"column {chats!r} of row {i}")
        templated = encoder.with_template(template_arguments(row, i))
        ids, learned = templated.alone(chat, assistant_only)
        return ids, _labels(ids, learned)

    def completion(row: dict[str, Any], i: int) -> tuple[list[int], list[int]]:
        prompt, (answer,) = read_row(row, i, roles, ANSWERS, alone=True)
        if not answer:
            return [], []
        templated = encoder.with_template(template_arguments(row, i))
        if assistant_only:
            if isinstance(prompt, str) or isinstance(answer, str):
                raise ValueError(f"assistant_only_loss needs messages, row {i} holds texts")
            whole = [*prompt, *answer]
            ids, learned = templated.alone(whole, True)
            if completion_only:
                behind = templated.behind(prompt, whole)
                learned = [a and b for a, b in zip(learned, behind, strict=False)]
            return ids, _labels(ids, learned)
        ids, border = templated.joined(prompt, answer)
        learned = [at >= border or not completion_only for at in range(len(ids))]
        return ids, _labels(ids, learned)

    chats = next((name for name in ("messages", _SHAREGPT) if name in columns), None)
    answers = {"prompt", "completion"} <= set(columns)
    if assistant_only and not chats and not answers and "input_ids" not in columns:
        raise ValueError(
            f"assistant_only_loss needs messages, the data set has columns {', '.join(columns)}"
        )
    if text_field in columns and text_field != _DEFAULT_FIELD:
        return text
    if text_field == _DEFAULT_FIELD:
        if "input_ids" in columns:
            return _tokens
        if chats:
            return messages
        if answers:
            return completion
        if text_field in columns:
            return text
    raise ValueError(
        f"the data set has columns {', '.join(columns)}: it needs {text_field} "
        "(dataset_text_field), prompt and completion, messages, or input_ids; or pass "
        "formatting_func"
    )


def _tokens(row: dict[str, Any], i: int) -> tuple[list[int], list[int]]:
    """The token ids and labels of a tokenised row; raises ValueError for wrong columns."""
    ids, labels = row["input_ids"], row.get("labels")
    masks = [row[name] for name in _MASKS if row.get(name) is not None]
    _check_numbers(ids, f"input_ids of row {i}")
    if labels is not None and len(labels):
        _check_numbers(labels, f"labels of row {i}", IGNORED)
        if len(labels) != len(ids):
            raise ValueError(
                f"row {i}: input_ids has {len(ids)} tokens, its labels {len(labels)}: make "
                "them of one length"
            )
        return ids, labels
    for mask in masks:
        if not set(mask) <= {0, 1}:
            raise ValueError(
                f"row {i}: a mask ({' or '.join(_MASKS)}) holds {list(mask)!r:.80}: 1 is a "
                "token that is learned, 0 one that is not"
            )
    if not masks:
        return ids, ids
    if any(len(mask) != len(ids) for mask in masks):
        raise ValueError(
            f"row {i}: input_ids has {len(ids)} tokens, its masks "
            f"{', '.join(str(len(mask)) for mask in masks)}: make them of one length"
        )
    return ids, _labels(ids, [all(counts) for counts in zip(*masks, strict=True)])


def _labels(ids: Sequence[int], learned: Sequence[bool]) -> list[int]:
    return [t if counts else IGNORED for t, counts in zip(ids, learned, strict=True)]


def prepare_pairs(
    dataset: Any,
    tokenizer: Any,
    max_length: int | None,
    num_proc: int | None = None,
    *,
    add_eos: bool = False,
) -> Any:
    """A data set with ``chosen_ids`` and ``rejected_ids``, or the token columns that it had, and
    ``margin`` if there is one. Pairs with an empty side, with equal sides, or with a side of more
    than ``max_length`` tokens are dropped, and counted in a warning.

    Args:
        dataset: rows with ``chosen`` and ``rejected``, texts or lists of chat messages, which may
            share a ``prompt``, with ``tools`` and ``chat_template_kwargs`` for the chat template;
            or with ``chosen_ids`` and ``rejected_ids``, or the token columns of
            :class:`RewardDataCollatorWithPadding`, which may exceed ``max_length``. A stream
            (``IterableDataset``) is prepared as it is read, and no warning counts its pairs.
        add_eos: see :class:`Encoder`.

    Raises:
        TypeError: not a data set, see :func:`fastrl.data.tables.as_dataset`.
        ValueError: columns that are missing, a margin that is not one finite number, no pair left.
    """
    streams = is_stream(dataset)
    dataset = list_as_dataset(dataset) if streams else keyed(as_dataset(dataset), tokenizer)
    columns = set(stream_columns(dataset) if streams else dataset.column_names)
    margin = ["margin"] if "margin" in columns else []
    if margin and not streams:
        _check_margins(dataset)
    tokens = token_columns(dataset)
    if tokens:
        dataset = dataset.select_columns([*tokens, *margin])
        if tokens == TOKEN_COLUMNS:  # the caller decides their lengths
            max_length = None
    else:
        if not columns >= set(SIDES):
            raise ValueError(
                f"the data set has columns {', '.join(columns_of(dataset))}: it needs chosen and "
                f"rejected (texts or chats, with an optional prompt), {' and '.join(ID_COLUMNS)}, "
                f"or {', '.join(TOKEN_COLUMNS)}"
            )
        roles = Roles("prompt" if "prompt" in columns else None, None, None, *SIDES)
        encoder = Encoder(tokenizer, add_eos=add_eos)

        def tokenise(row: Mapping[str, Any], i: int) -> dict[str, list[int]]:
            number = row_number(row, i)
            prompt, answers = read_row(row, number, roles, PAIRS, alone=True)
            templated = encoder.with_template(template_arguments(row, number))
            return {
                # An empty side stays empty, whatever its prompt: the pair is dropped.
                name: templated.joined(prompt, answer)[0] if answer else []
                for name, answer in zip(ID_COLUMNS, answers, strict=True)
            }

        removed = [c for c in columns if c not in margin]
        options = map_options(dataset, num_proc, "tokenising pairs")
        dataset = dataset.map(tokenise, with_indices=True, remove_columns=removed, **options)
    if streams:
        return dataset.filter(lambda row: not _why_useless(row, max_length) and _has_margin(row))
    return _drop_useless(dataset, max_length, num_proc)


def with_new_names(dataset: Any) -> Any:
    """Renames token columns of pairs from TRL's older names to its newer ones, with a warning."""
    if not set(_pair_columns(dataset)) >= set(_OLDER_ID_COLUMNS):
        return dataset
    warnings.warn(
        f"columns {' and '.join(_OLDER_ID_COLUMNS)} have newer names: call them "
        f"{' and '.join(ID_COLUMNS)}",
        FutureWarning,
        stacklevel=6,
    )
    dataset = dataset if is_stream(dataset) else as_dataset(dataset)
    return dataset.rename_columns(dict(zip(_OLDER_ID_COLUMNS, ID_COLUMNS, strict=True)))


def token_columns(dataset: Any) -> tuple[str, ...]:
    """The columns of token ids and masks of a data set of pairs; none for a data set with texts."""
    columns = set(_pair_columns(dataset))
    return next((names for names in (TOKEN_COLUMNS, ID_COLUMNS) if columns >= set(names)), ())


def _pair_columns(dataset: Any) -> list[str]:
    if is_stream(dataset):
        return stream_columns(dataset)
    return list(as_dataset(dataset).column_names)


def missing_token_columns(dataset: Any) -> list[str]:
    """The columns that :class:`RewardDataCollatorWithPadding` needs and a tokenised data set lacks;
    [] for a data set with texts."""
    columns = set(_pair_columns(dataset))
    if columns >= set(ID_COLUMNS):
        return []
    tokenised = any(name.startswith("input_ids_") for name in columns)
    return [name for name in TOKEN_COLUMNS if name not in columns] if tokenised else []


def _check_margins(dataset: Any) -> None:
    numbers = dataset[ROW] if ROW in dataset.column_names else range(len(dataset))
    for i, margin in zip(numbers, dataset["margin"], strict=True):
        _check_margin(margin, f"margin[{i}]")


def _check_margin(margin: Any, name: str) -> None:
    number = margin[0] if isinstance(margin, list) and len(margin) == 1 else margin
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not math.isfinite(number)
    ):
        raise ValueError(f"{name} is {margin}: margins must be finite numbers, or lists of one")


def _has_margin(row: Mapping[str, Any]) -> bool:
    """Checks the margin of a stream's row, if it has one; returns True, so that the row stays."""
    if "margin" in row:
        _check_margin(row["margin"], "a row's margin")
    return True


def _drop_useless(dataset: Any, max_length: int | None, num_proc: int | None) -> Any:
    reasons = {
        "empty": "have an empty side",
        "equal": "have equal sides",
        "long": f"have a side of more than max_length={max_length} tokens",
    }
    causes = list(
        dataset.map(
            lambda row: {"_why": _why_useless(row, max_length)},
            num_proc=num_proc,
            remove_columns=dataset.column_names,
            desc="checking pairs",
        )["_why"]
    )
    kept = [i for i, cause in enumerate(causes) if not cause]
    if len(kept) == len(causes):
        return dataset
    counted = ", ".join(
        f"{causes.count(cause)} {text}" for cause, text in reasons.items() if cause in causes
    )
    if not kept:
        raise ValueError(f"no pair is left of {len(causes)}: {counted}")
    warnings.warn(
        f"{len(causes) - len(kept)} of {len(causes)} pairs dropped: {counted}", stacklevel=2
    )
    return dataset.select(kept)


def _why_useless(row: dict[str, Any], max_length: int | None) -> str:
    counted = []
    if ID_COLUMNS[0] in row:
        counted = [row[name] for name in ID_COLUMNS]
    for side in () if counted else SIDES:
        ids, mask = row[f"input_ids_{side}"], row[f"attention_mask_{side}"]
        if len(ids) != len(mask):
            raise ValueError(
                f"input_ids_{side} has {len(ids)} tokens, attention_mask_{side} {len(mask)}: "
                "make them of one length"
            )
        counted.append([token for token, counts in zip(ids, mask, strict=True) if counts])
    chosen, rejected = counted
    if not chosen or not rejected:
        return "empty"
    if chosen == rejected:
        return "equal"
    too_long = max_length is not None and max(len(chosen), len(rejected)) > max_length
    return "long" if too_long else ""
