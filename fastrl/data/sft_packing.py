"""Packing: several texts in one row, without attention between them."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from fastrl.data.cache_key import keyed
from fastrl.data.collators import IGNORED, targets_of
from fastrl.data.tables import is_stream, stream_columns
from fastrl.models.probes import narrowed, reach
from fastrl.models.utils import base_of, evaluating
from fastrl.run.fingerprint import fingerprint, hash_of

_ROWS = ((5, 3, 6), (4, 7))  # least lengths of the texts in rows with which a model is checked
BFD, BFD_SPLIT, WRAPPED = PACKINGS = ("bfd", "bfd_split", "wrapped")
SEQ_LENGTHS = "seq_lengths"  # a column of packed rows: the texts' numbers of tokens
_TOLERANCE = 1e-4, 5e-2  # allowed differences of logits: in fp32, and in lower precision


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of the texts in each row of ``room`` tokens: best fit, the longest text first."""
    rows: list[list[int]] = []
    by_space: dict[int, list[list[int]]] = {}  # rows by what is left in them
    spaces: list[int] = []  # the keys of by_space, in order
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(spaces, lengths[i])
        if at < len(spaces):
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        else:
            row, space = [], room
            rows.append(row)
        row.append(i)
        left = space - lengths[i]
        if left not in by_space:
            bisect.insort(spaces, left)
        by_space.setdefault(left, []).append(row)
    return [sorted(row) for row in rows]


def are_packed(rows: Any) -> bool:
    """Whether a list, data set or stream has rows of several texts, with their ``seq_lengths``."""
    if isinstance(rows, list | tuple):
        columns: Any = rows[0] if rows and isinstance(rows[0], Mapping) else None
    else:
        columns = stream_columns(rows) if is_stream(rows) else getattr(rows, "column_names", None)
    return isinstance(columns, list | Mapping) and {"input_ids", SEQ_LENGTHS} <= set(columns)


def packed(texts: Any, room: int, strategy: str) -> Any:
    """A data set of packed rows.

    Args:
        texts: a data set or a stream with ``input_ids`` and ``labels``. A stream is packed in
            groups of 1000 texts, and so is a data set with "wrapped".
        room: tokens in a row.
        strategy: "bfd" (best fit, the longest text first), "bfd_split" (the same, with texts that
            are longer than a row cut into pieces), or "wrapped" (all texts one after the other, cut
            where a row is full: a row is one text, whose tokens attend to all before them in it).
    """
    if strategy in (BFD_SPLIT, WRAPPED) and not is_stream(texts):
        texts = keyed(texts)
    if strategy == BFD_SPLIT:
        texts = texts.map(partial(_pieces, room=room), batched=True)
    if strategy == WRAPPED:
        return texts.map(partial(_wrapped, room=room), batched=True)
    if is_stream(texts):
        return texts.map(partial(_packed_group, room=room), batched=True)
    return PackedTexts(texts, room)


def _pieces(texts: dict[str, list[Any]], room: int) -> dict[str, list[Any]]:
    return {
        name: [row[at : at + room] for row in texts[name] for at in range(0, len(row), room)]
        for name in ("input_ids", "labels")
    }


def _wrapped(texts: dict[str, list[Any]], room: int) -> dict[str, list[Any]]:
    joined = {name: [[x for row in rows for x in row]] for name, rows in texts.items()}
    return _pieces(joined, room)


def _packed_group(texts: dict[str, list[Any]], room: int) -> dict[str, list[Any]]:
    return PackedTexts(_Columns(texts), room)[:]


class _Columns(dict):
    """Columns in memory by name; a list of indices in place of a name takes rows of each column."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, list):
            return {name: [rows[i] for i in key] for name, rows in self.items()}
        return super().__getitem__(key)


class PackedTexts(Dataset):
    """A data set of packed rows: ``input_ids`` and ``labels`` of several texts one after the other,
    and the texts' ``seq_lengths``. As in a ``datasets.Dataset``, a name gives a column, and a slice
    a dict of columns.

    Args:
        texts: a data set with ``input_ids`` and ``labels``.
        room: tokens in a row.
    """

    def __init__(self, texts: Any, room: int):
        self.texts = texts
        self.lengths = [len(ids) for ids in texts["input_ids"]]
        self.rows = pack(self.lengths, room)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fingerprint(self) -> str:
        return f"{fingerprint(self.texts)}, packed as {hash_of(self.rows)}"

    def sizes(self) -> list[int]:
        """Tokens of each row."""
        return [sum(self.lengths[i] for i in row) for row in self.rows]

    @property
    def column_names(self) -> list[str]:
        return ["input_ids", "labels", "seq_lengths"]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            return [self._row(i)[index] for i in range(len(self))]
        if isinstance(index, slice):
            rows = [self._row(i) for i in range(len(self))[index]]
            return {name: [row[name] for row in rows] for name in self.column_names}
        return self._row(index)

    def _row(self, index: int) -> dict[str, list[int]]:
        texts = self.texts[self.rows[index]]
        return {
            "input_ids": [token for ids in texts["input_ids"] for token in ids],
            "labels": [label for labels in texts["labels"] for label in (IGNORED, *labels[1:])],
            "seq_lengths": [len(ids) for ids in texts["input_ids"]],
        }


@dataclass
class PackedCollator:
    """Pads packed rows on the right; ``position_ids`` restart with each text. ``lengths`` [B,
    texts] has the lengths of each row's texts, filled up with 0; ``rows`` and ``targets`` are those
    of :class:`fastrl.data.collators.TextCollator`.

    Args:
        mask: dtype of the attention mask [B, 1, T, T] that separates the texts, for models that do
            not derive it from the positions: torch.bool, or the dtype of the scores to which eager
            attention adds it. None: there is none.
        pad_to_multiple_of: a number that the width T is to be a multiple of.
    """

    tokenizer: Any
    mask: torch.dtype | None = None
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        width = max(len(f["input_ids"]) for f in features)
        width += -width % (self.pad_to_multiple_of or 1)
        shape = len(features), width
        ids = torch.full(shape, self.tokenizer.pad_token_id)
        labels, positions, texts = (torch.full(shape, x) for x in (IGNORED, 0, -1))
        for row, feature in enumerate(features):
            end = len(feature["input_ids"])
            ids[row, :end] = torch.as_tensor(feature["input_ids"])
            labels[row, :end] = torch.as_tensor(feature["labels"])
            # Padding is a text of its own.
            parts = [*feature.get("seq_lengths", [end]), width - end]
            positions[row] = torch.cat([torch.arange(n) for n in parts])
            texts[row] = torch.cat([torch.full((n,), i) for i, n in enumerate(parts)])
        labels[:, 0] = IGNORED  # no position predicts a first token
        batch: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "labels": labels}
        lengths = [torch.tensor(f.get("seq_lengths", [len(f["input_ids"])])) for f in features]
        batch["lengths"] = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
        if self.mask is not None:
            same = texts[:, :, None] == texts[:, None, :]
            seen = (same & torch.ones(width, width).tril().bool())[:, None]
            if self.mask.is_floating_point:
                added = torch.zeros_like(seen, dtype=self.mask)
                seen = added.masked_fill(~seen, torch.finfo(self.mask).min)
            batch["attention_mask"] = seen
        return batch | targets_of(labels)


@dataclass
class JoinedCollator:
    """Joins a whole batch in one row without padding, [1, T]."""

    packed: PackedCollator

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        joined: dict[str, list[int]] = {"input_ids": [], "labels": [], "seq_lengths": []}
        for feature in features:
            joined["input_ids"] += feature["input_ids"]
            joined["labels"] += [IGNORED, *feature["labels"][1:]]
            joined["seq_lengths"] += feature.get("seq_lengths", [len(feature["input_ids"])])
        return self.packed([joined])


def choose_collator(
    model: Any, tokenizer: Any, autocast: contextlib.AbstractContextManager | None = None
) -> PackedCollator:
    """The collator that keeps this model's packed texts apart: by positions alone, or by a mask.

    Raises:
        ValueError: neither keeps them apart.
    """
    with evaluating(model), torch.no_grad(), narrowed(model), autocast or contextlib.nullcontext():
        for mask in (None, torch.bool, model.dtype):
            collator = PackedCollator(tokenizer, mask)
            if _isolates(model, collator):
                return collator
    raise ValueError(
        f"{_name_of(model)} lets packed texts attend to each other: leave packing out (packing="
        "False; commands: --packing false), or pass a data collator with padding_free=False"
    )


def _name_of(model: Any) -> str:
    return type(base_of(model)).__name__


def _isolates(model: Any, collator: PackedCollator) -> bool:
    """Whether texts have the same logits packed as alone."""
    vocabulary = model.config.get_text_config().vocab_size
    longest = max(map(sum, _ROWS))
    rows = [
        [n + reach(model, longest) for n in lengths[:1]] + list(lengths[1:]) for lengths in _ROWS
    ]
    features = []
    for row, lengths in enumerate(rows):
        ids = [(row + 3 * i) % vocabulary for i in range(1, sum(lengths) + 1)]
        features.append({"input_ids": ids, "labels": ids, "seq_lengths": lengths})
    batch = collator(features)
    inputs = {
        k: batch[k].to(model.device)
        for k in ("input_ids", "position_ids", "attention_mask")
        if k in batch
    }
    exact = not torch.is_autocast_enabled(model.device.type) and all(
        p.dtype == torch.float32 for p in model.parameters() if p.is_floating_point()
    )
    tolerance = _TOLERANCE[0 if exact else 1]
    try:
        packed = model(**inputs, use_cache=False).logits
    except torch.OutOfMemoryError:
        raise
    except Exception:  # models raise anything for a mask, or positions, that they do not take
        return False
    for ids, logits, lengths in zip(inputs["input_ids"], packed, rows, strict=True):
        used = sum(lengths)
        for text, together in zip(
            ids[:used].split(lengths), logits[:used].split(lengths), strict=True
        ):
            alone = model(input_ids=text[None], use_cache=False).logits[0]
            if not torch.allclose(alone.float(), together.float(), tolerance, tolerance):
                return False
    return True
