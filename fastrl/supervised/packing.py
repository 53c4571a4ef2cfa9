"""Several texts in one row, each as if it were alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastrl.models.modes import evaluating
from fastrl.supervised.texts import IGNORED, targets_of

_TEXTS = (5, 3, 6)  # lengths, of the check
_TOLERANCE = 1e-4, 5e-2  # of logits: in fp32, and less


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which texts share a row: the longest first, each into the fullest row that holds it."""
    rows: list[list[int]] = []
    left: list[int] = []
    by_room: dict[int, list[int]] = {}  # rows by what is left in them
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [space for space in range(lengths[i], room + 1) if by_room.get(space)]
        if fits:
            row = by_room[fits[0]].pop()
        else:
            row = len(rows)
            rows.append([])
            left.append(room)
        rows[row].append(i)
        left[row] -= lengths[i]
        by_room.setdefault(left[row], []).append(row)
    return [sorted(row) for row in rows]


def pack_dataset(dataset: Any, room: int) -> Any:
    """Rows of texts: ``input_ids`` and ``labels`` one after the other, ``lengths`` of each text."""
    from datasets import Dataset

    ids, labels = dataset["input_ids"], dataset["labels"]
    ids, labels = list(ids), list(labels)

    def rows() -> Any:
        for row in pack([len(x) for x in ids], room):
            yield {
                "input_ids": [t for i in row for t in ids[i]],
                # The first token of a text is not what follows the one before.
                "labels": [t for i in row for t in (IGNORED, *labels[i][1:])],
                "lengths": [len(ids[i]) for i in row],
            }

    return Dataset.from_list(list(rows()))


@dataclass
class PackedCollator:
    """Rows of texts, padded on the right; ``position_ids`` begin anew with each text.

    Args:
        mask: also the mask [B, 1, T, T] by which a text sees itself alone, for models that do not
            read it off the positions.
    """

    tokenizer: Any
    mask: bool = False

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        width = max(len(f["input_ids"]) for f in features)
        shape = len(features), width
        ids = torch.full(shape, self.tokenizer.pad_token_id)
        labels, positions, texts = (torch.full(shape, x) for x in (IGNORED, 0, -1))
        for row, feature in enumerate(features):
            end = len(feature["input_ids"])
            ids[row, :end] = torch.as_tensor(feature["input_ids"])
            labels[row, :end] = torch.as_tensor(feature["labels"])
            # Padding is a text of its own.
            parts = [*feature["lengths"], width - end]
            positions[row] = torch.cat([torch.arange(n) for n in parts])
            texts[row] = torch.cat([torch.full((n,), i) for i, n in enumerate(parts)])
        batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
        if self.mask:
            same = texts[:, :, None] == texts[:, None, :]
            batch["attention_mask"] = (same & torch.ones(width, width).tril().bool())[:, None]
        return batch | targets_of(labels)


def choose_packing(model: Any, tokenizer: Any) -> PackedCollator:
    """How this model is told where texts begin: by positions alone, or by a mask.

    Raises:
        ValueError: neither keeps a text from its neighbours.
    """
    for mask in (False, True):
        collator = PackedCollator(tokenizer, mask)
        if _isolates(model, collator):
            return collator
    raise ValueError(
        f"{type(model).__name__} lets packed texts see each other: pass packing=False"
    )


@torch.no_grad()
def _isolates(model: Any, collator: PackedCollator) -> bool:
    """Whether texts in one row have the logits that they have alone."""
    start = 1 if model.config.get_text_config().vocab_size > sum(_TEXTS) + 1 else 0
    texts = torch.arange(start, start + sum(_TEXTS)) % model.config.get_text_config().vocab_size
    feature = {"input_ids": texts.tolist(), "labels": texts.tolist(), "lengths": list(_TEXTS)}
    batch = {k: v.to(model.device) for k, v in collator([feature]).items()}
    inputs = {k: batch[k] for k in ("input_ids", "position_ids", "attention_mask") if k in batch}
    exact = all(p.dtype == torch.float32 for p in model.parameters())
    tolerance = _TOLERANCE[0 if exact else 1]
    with evaluating(model):
        try:
            packed = model(**inputs, use_cache=False).logits[0].split(list(_TEXTS))
        except (RuntimeError, ValueError, TypeError):
            return False
        for text, together in zip(texts.split(list(_TEXTS)), packed, strict=True):
            alone = model(input_ids=text[None].to(model.device), use_cache=False).logits[0]
            if not torch.allclose(alone.float(), together.float(), tolerance, tolerance):
                return False
    return True
