"""Rows of preferences as token ids, by the rules of TRL 1.x: a prompt's tokens are those that it
has in front of the completions.

Pairs have ``chosen`` and ``rejected``, and ``prompt``, unless both begin with their prompt;
unpaired rows have ``prompt``, ``completion`` and ``label``. All are texts, or lists of messages.
Where the rows have them, ``tools`` (a list, or JSON) and ``chat_template_kwargs`` go to the chat
template.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.batch import pad
from fastrl.data.cache_key import keyed
from fastrl.data.chat import as_messages, check_messages, is_chat, shared_length, template_arguments
from fastrl.data.columns import read_label, refuse_pictures
from fastrl.data.encode import Encoder
from fastrl.data.padding_free import PaddingFree, right_padded
from fastrl.data.tables import (
    each_row,
    first_row,
    is_stream,
    list_as_dataset,
    map_options,
    row_number,
)
from fastrl.data.token_batch import Padded, TokenBatch

PAIR = ("chosen", "rejected")
OF_A_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
OF_A_COMPLETION = ("prompt_ids", "completion_ids", "label")
Cuts = tuple[int | None, int | None]  # tokens of a prompt and of a completion, at most


def prepare_pairs_of_ids(
    dataset: Any,
    tokenizer: Any,
    num_proc: int | None,
    longest_prompt: int | None,
    cuts: Cuts = (None, None),
) -> Any:
    """The data set with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, which it may have
    already.

    Args:
        dataset: a ``Dataset`` or an ``IterableDataset`` of pairs.
        num_proc: the number of processes; a stream takes none.
        longest_prompt: the most tokens of a prompt; rows with a longer one are dropped. A warning
            counts them, but not those of a stream, which is prepared as it is read.
        cuts: limits: longer prompts keep BOS and their last tokens, completions their first ones.

    Raises:
        ValueError: missing columns, images, no row, messages without a role or a content.
    """
    dataset, options = _keyed(dataset, tokenizer), map_options(dataset, num_proc)
    row = first_row(dataset)
    if all(name in row for name in OF_A_PAIR):
        return _within(_cut(dataset, OF_A_PAIR, cuts, tokenizer, options), longest_prompt, options)
    _check(row, PAIR)
    if "prompt" not in row:
        _warn_of_no_prompt(row)
    dataset = dataset.map(
        _encode_pair, with_indices=True, fn_kwargs={"tokenizer": tokenizer}, **options
    )
    dataset = _cut(dataset, OF_A_PAIR, cuts, tokenizer, options)
    _warn_of_equal_sides(dataset)
    return _within(dataset, longest_prompt, options)


def prepare_completions_of_ids(
    dataset: Any,
    tokenizer: Any,
    num_proc: int | None,
    longest_prompt: int | None,
    mismatched: int | None = None,
    cuts: Cuts = (None, None),
) -> Any:
    """The data set with ``prompt_ids``, ``completion_ids`` and ``label``; pairs become two rows
    each.

    Args:
        mismatched: add ``KL_completion_ids`` to groups of so many rows: the completion of the row
            before; to a group's first row, that of its last.

    Further arguments and errors are those of :func:`prepare_pairs_of_ids`.
    """
    dataset, options = _keyed(dataset, tokenizer), map_options(dataset, num_proc)
    row = first_row(dataset)
    if not all(name in row for name in OF_A_COMPLETION):
        paired = all(name in row for name in PAIR)
        _check(row, PAIR if paired else ("prompt", "completion", "label"))
        dataset = dataset.map(
            _encode_unpaired if paired else _encode_completion,
            with_indices=True,
            batched=paired,
            remove_columns=list(PAIR) if paired else [],
            fn_kwargs={"tokenizer": tokenizer},
            **options,
        )
    dataset = _cut(dataset, OF_A_COMPLETION[:2], cuts, tokenizer, options)
    dataset = _within(dataset, longest_prompt, options)
    if mismatched is not None and "KL_completion_ids" not in row:
        dataset = _mismatched(dataset, mismatched, options)
    return dataset


def _warn_of_equal_sides(dataset: Any) -> None:
    """Warns of pairs with equal sides, unless in a stream, which is prepared as it is read."""
    if is_stream(dataset):
        return
    sides = OF_A_PAIR[1:]
    rows = each_row(dataset.with_format(None).select_columns(list(sides)))
    equal = [i for i, row in enumerate(rows) if row[sides[0]] == row[sides[1]]]
    if equal:
        warnings.warn(
            f"{len(equal)} of {len(dataset)} pairs have equal sides, such as row {equal[0]}: "
            "nothing is learned from them, leave them out",
            stacklevel=5,
        )


def _warn_of_no_prompt(row: Mapping[str, Any]) -> None:
    """Warns where texts begin with nothing in common: a column not read may be the prompt."""
    others = [name for name, x in row.items() if name not in PAIR and isinstance(x, str)]
    if others and isinstance(row["chosen"], str) and not split_prompt(row)["prompt"]:
        warnings.warn(
            f"the data set has no column prompt, and chosen and rejected begin with nothing in "
            f"common: their prompts are empty, and {', '.join(others)} is not read. Where that is "
            f"the prompt: dataset.rename_column({others[0]!r}, 'prompt')",
            stacklevel=4,
        )


def split_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """Splits a pair whose sides begin with the prompt into ``prompt``, ``chosen`` and ``rejected``.
    The prompt is what both begin with, but for a blank at its end, which goes to both sides."""
    chosen, rejected = row["chosen"], row["rejected"]
    same = min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if isinstance(chosen, str) and chosen[same - 1 : same] == " ":
        same -= 1
    same = max(same, 0)
    return {"prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]}


@dataclass
class PairCollator:
    """Makes batches of pairs, padded on the right: all chosen sequences, then all rejected ones.

    Args:
        max_length: the longest sequence, in tokens; longer ones are cut.
        truncation_mode: what stays of them, "keep_start" or "keep_end".
        pad_to_multiple_of: the batch's width is a multiple of it.

    Calling it with rows gives ``input_ids``, ``attention_mask`` and ``completion_mask`` [2B, T],
    and the reference's log-probs [B] where the rows have them.
    """

    pad_token_id: int
    max_length: int | None = None
    truncation_mode: str = "keep_start"
    pad_to_multiple_of: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        sides = [(row["prompt_ids"], row[f"{side}_ids"]) for side in PAIR for row in rows]
        return self._padded(sides) | _numbers(rows, ("ref_chosen_logps", "ref_rejected_logps"))

    def _padded(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
        keep = slice(None)
        if self.max_length is not None:
            ends = self.truncation_mode == "keep_end"
            keep = slice(-self.max_length, None) if ends else slice(None, self.max_length)
        ids = [
            torch.tensor([*prompt, *answer][keep], dtype=torch.int64) for prompt, answer in pairs
        ]
        masks = [
            torch.tensor(([0] * len(prompt) + [1] * len(answer))[keep], dtype=torch.int64)
            for prompt, answer in pairs
        ]
        completions = pad(masks, 0, "right", self.pad_to_multiple_of)["input_ids"]
        padded = pad(ids, self.pad_token_id, "right", self.pad_to_multiple_of)
        return {**padded, "completion_mask": completions}


@dataclass
class CompletionCollator(PairCollator):
    """Makes batches of single completions, padded on the right: ``input_ids``, ``attention_mask``
    and ``completion_mask`` [B, T], and ``label`` [B] bool. ``KL_completion_ids`` give the first
    three again, as ``KL_input_ids`` and so on; log-probs of the reference are stacked, [B]."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = self._padded([(row["prompt_ids"], row["completion_ids"]) for row in rows])
        if "KL_completion_ids" in rows[0]:
            other = self._padded([(row["prompt_ids"], row["KL_completion_ids"]) for row in rows])
            batch |= {f"KL_{name}": x for name, x in other.items()}
        batch |= _numbers(rows, ("ref_logps", "ref_KL_logps"))
        batch["label"] = torch.tensor([read_label(row, i, "label") for i, row in enumerate(rows)])
        return batch


def _numbers(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Tensor]:
    return {x: torch.tensor([row[x] for row in rows]) for x in names if x in rows[0]}


def completions_of(batch: Mapping[str, Any], packed: bool = False, prefix: str = "") -> TokenBatch:
    """The completions of a collated batch, behind their prompts.

    Args:
        batch: ``input_ids``, ``attention_mask`` and ``completion_mask`` [B, T].
        packed: run the batch without padding, and shared prompts once, unless a row lacks a
            completion, or a user's collator put padding in front or tokens behind a completion.
        prefix: what the three columns' names in the batch begin with.
    """
    names = ("input_ids", "attention_mask", "completion_mask")
    columns = [batch[f"{prefix}{name}"] for name in names]
    ids, attention, completion = torch.stack(columns).cpu()  # waits for the device once
    mask = completion[:, 1:].bool()
    lengths, counts = attention.sum(-1), mask.sum(-1)
    tokens = TokenBatch.from_padded(ids, attention, (lengths - counts).tolist(), counts.tolist())
    usual = right_padded(attention) is not None and torch.equal(tokens.response_mask, mask)
    padding = PaddingFree() if packed and usual and bool(counts.all()) else Padded()
    masks = {"mask": mask, "response_mask": mask, "position_ids": None}
    return replace(tokens, **masks, padding=padding).to(columns[0].device)


def _keyed(dataset: Any, tokenizer: Any) -> Any:
    dataset = list_as_dataset(dataset)
    return dataset if is_stream(dataset) else keyed(dataset, tokenizer)


def _check(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Raises ValueError for a row without these columns, or with images."""
    refuse_pictures(row)
    missing = [name for name in columns if name not in row]
    if missing:
        raise ValueError(
            f"the data set has columns {', '.join(row)}, and lacks {', '.join(missing)}: rename "
            "them with dataset.rename_column"
        )


def _cut(
    dataset: Any, columns: Sequence[str], cuts: Cuts, tokenizer: Any, options: dict[str, Any]
) -> Any:
    if cuts == (None, None):
        return dataset
    arguments = {"columns": columns, "cuts": cuts, "tokenizer": tokenizer}
    return dataset.map(_cut_row, fn_kwargs=arguments, **options)


def _cut_row(
    row: Mapping[str, Any], columns: Sequence[str], cuts: Cuts, tokenizer: Any
) -> dict[str, Any]:
    prompt, *completions = columns
    ends = {name: row[name][: cuts[1]] for name in completions}
    return {prompt: Encoder(tokenizer, max_prompt_length=cuts[0]).cut_prompt(row[prompt]), **ends}


def _within(dataset: Any, longest_prompt: int | None, options: dict[str, Any]) -> Any:
    if longest_prompt is None:
        return dataset
    kept = dataset.filter(_fits, fn_kwargs={"longest": longest_prompt}, **options)
    if is_stream(kept) or len(kept) == len(dataset):
        return kept if is_stream(kept) else dataset
    why = (
        f"prompts longer than {longest_prompt} tokens leave no room for a completion within "
        "max_length, or what model and tokenizer take at most: raise max_length if they take more, "
        "or bring shorter prompts"
    )
    if not len(kept):
        raise ValueError(f"no row is left of {len(dataset)}: {why}")
    dropped = len(dataset) - len(kept)
    warnings.warn(f"{dropped} of {len(dataset)} rows dropped: {why}", stacklevel=2)
    return kept


def _fits(row: Mapping[str, Any], longest: int) -> bool:
    return len(row["prompt_ids"]) <= longest


def _split_row(row: Mapping[str, Any], i: int) -> dict[str, Any]:
    """:func:`split_prompt` of a row, which is checked first; {} where the row has a prompt."""
    if "prompt" in row:
        return {}
    _check_parts(row, PAIR, i)
    split = split_prompt(row)
    if not split["prompt"] and is_chat(row["chosen"]):
        raise ValueError(
            f"chosen and rejected of row {i} do not begin with the same message: bring a prompt"
        )
    return split


def _encode_pair(row: Mapping[str, Any], i: int, tokenizer: Any) -> dict[str, Any]:
    number = row_number(row, i)
    split = _split_row(row, number)
    prompt, sides = _encode({**row, **split}, PAIR, tokenizer, number)
    return {**split, **dict(zip(OF_A_PAIR, [prompt, *sides], strict=True))}


def _encode_completion(row: Mapping[str, Any], i: int, tokenizer: Any) -> dict[str, Any]:
    number = row_number(row, i)
    prompt, (completion,) = _encode(row, ("completion",), tokenizer, number)
    label = read_label(row, number, "label")
    return {"prompt_ids": prompt, "completion_ids": completion, "label": label}


def _encode_unpaired(
    rows: Mapping[str, list[Any]], numbers: list[int], tokenizer: Any
) -> dict[str, list[Any]]:
    """Encodes pairs as rows of single completions: all chosen sides, then all rejected ones."""
    pairs = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    encoded = []
    for side, label in zip(PAIR, (True, False), strict=True):
        for pair, i in zip(pairs, numbers, strict=True):
            row = {**pair, **_split_row(pair, row_number(pair, i))}
            row |= {"completion": row[side], "label": label}
            encoded.append({**row, **_encode_completion(row, i, tokenizer)})
    return {name: [row[name] for row in encoded] for name in encoded[0] if name not in PAIR}


def _mismatched(dataset: Any, size: int, options: Mapping[str, Any]) -> Any:
    """Gives each row of a group of ``size`` the completion of another one, as KL_completion_ids.

    A single row that is left over joins the last group; in a stream, where that group has gone by,
    it is dropped.

    Raises:
        ValueError: there is one row alone.
    """
    if is_stream(dataset):
        return dataset.map(_rotate, batched=True, batch_size=size, **options)
    count = len(dataset)
    if count == 1:
        raise ValueError(
            "one row has no other, whose completion the KL of KTO is measured on: bring two rows, "
            "or choose loss_type='apo_zero_unpaired'"
        )
    import datasets

    # Each of several processes could have a row left over.
    options = {name: x for name, x in options.items() if name != "num_proc"}
    last = size + 1 if count % size == 1 else 0
    parts = [(dataset.select(range(count - last)), size)] if count > last else []
    parts += [(dataset.select(range(count - last, count)), last)] if last else []
    rotated = [part.map(_rotate, batched=True, batch_size=n, **options) for part, n in parts]
    return rotated[0] if len(rotated) == 1 else datasets.concatenate_datasets(rotated)


def _rotate(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    completions = rows["completion_ids"]
    if len(completions) == 1:
        warnings.warn(
            "the last row of a stream is dropped: KTO has no other beside it", stacklevel=2
        )
        return {name: [] for name in (*rows, "KL_completion_ids")}
    return {"KL_completion_ids": [completions[-1], *completions[:-1]]}


def _encode(
    row: Mapping[str, Any], sides: Sequence[str], tokenizer: Any, i: int
) -> tuple[list[int], list[list[int]]]:
    """The ids of row ``i``'s prompt, and those of the completions behind it in the columns
    ``sides``."""
    row = _as_one_kind(row, sides)
    _check_parts(row, ("prompt", *sides), i)
    encoder, prompt = Encoder(tokenizer), row["prompt"]
    if is_chat(prompt):
        encoder = encoder.with_template(template_arguments(row, i))
    return encoder.together(prompt, [row[side] for side in sides])


def _as_one_kind(row: Mapping[str, Any], sides: Sequence[str]) -> Mapping[str, Any]:
    """A row in which completions that are chats follow a chat: a prompt that is a text becomes a
    chat, and the prompt is taken off completions that all begin with it. Other rows stay."""
    answers = [row[side] for side in sides]
    if not all(is_chat(answer) for answer in answers):
        return row
    prompt = as_messages(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"]
    whole = bool(prompt) and all(
        [*map(_words, answer[: len(prompt)])] == [*map(_words, prompt)] for answer in answers
    )
    if whole:
        warnings.warn(
            f"{' and '.join(sides)} begin with the whole prompt: it is cut off there",
            stacklevel=2,
        )
        answers = [answer[len(prompt) :] for answer in answers]
    return {**row, "prompt": prompt, **dict(zip(sides, answers, strict=True))}


def _words(message: Any) -> Any:
    return (message.get("role"), message.get("content")) if isinstance(message, Mapping) else None


def _check_parts(row: Mapping[str, Any], columns: Sequence[str], i: int) -> None:
    """Raises ValueError for columns of row ``i`` that are neither all texts nor all chats, or
    messages that :func:`fastrl.data.chat.check_messages` refuses."""
    for name in columns:
        where = f"{name} of row {i}"
        if is_chat(row[name]):
            check_messages(row[name], where)
        elif not isinstance(row[name], str):
            raise ValueError(
                f"{where} is {row[name]!r:.80}: bring a text, or a list of chat messages"
            )
    if len({isinstance(row[name], str) for name in columns}) > 1:
        raise ValueError(
            f"{', '.join(columns)} of row {i} hold texts and chat messages: make all the same"
        )
