"""Pairs of a preferred and another text: from a data set's columns to padded batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from fastrl.data.chat import checked, encode, join
from fastrl.trainers.supervised import as_dataset

SIDES = ("chosen", "rejected")
TOKEN_COLUMNS = tuple(
    f"{kind}_{side}" for side in SIDES for kind in ("input_ids", "attention_mask")
)


@dataclass
class RewardDataCollatorWithPadding:
    """Pads both sides of pairs to one width: one forward serves both. Padding that the rows bring
    along is cut off where no row needs it.

    Args:
        tokenizer: gives the pad token.
        padding: as in ``tokenizer.pad``; ``max_length`` pads to that.
        max_length: with ``padding="max_length"``.
        pad_to_multiple_of: of the width.
        return_tensors: "pt".
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """``input_ids_*`` and ``attention_mask_*`` [B, T] for both sides, and ``margin`` if given:
        [B] fp32, or [B, 1] where the rows hold it in a list of one number.

        Raises:
            ValueError: columns that are missing.
        """
        missing = [name for name in TOKEN_COLUMNS if name not in features[0]]
        if missing:
            raise ValueError(
                f"the examples lack {', '.join(missing)}; they have {', '.join(features[0])}"
            )
        rows = [
            {"input_ids": f[f"input_ids_{side}"], "attention_mask": f[f"attention_mask_{side}"]}
            for side in SIDES
            for f in features
        ]
        padded = pad_without_fast_tokenizer_warning(
            self.tokenizer,
            rows,
            padding=self.padding,
            max_length=self.max_length if self.padding == "max_length" else None,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=self.return_tensors,
        )
        width = padded["attention_mask"].shape[1]
        if self.padding is True or self.padding == "longest":
            width = _needed(padded["attention_mask"], self.pad_to_multiple_of or 1)
        batch: dict[str, Any] = {"return_loss": True}
        for name in ("input_ids", "attention_mask"):
            for side, half in zip(SIDES, padded[name][:, :width].chunk(2), strict=True):
                batch[f"{name}_{side}"] = half
        if "margin" in features[0]:
            batch["margin"] = torch.stack(
                [torch.as_tensor(f["margin"], dtype=torch.float32) for f in features]
            )
        return batch


def _needed(mask: Tensor, multiple: int) -> int:
    """Columns up to the last that counts in any row; what is left of it stays, as positions may
    count from there."""
    counted = mask.any(0).nonzero()
    last = int(counted[-1]) + 1 if len(counted) else mask.shape[1]
    return min(-(-last // multiple) * multiple, mask.shape[1])


def prepare_pairs(
    dataset: Any, tokenizer: Any, max_length: int | None, num_proc: int | None = None
) -> Any:
    """A data set with token columns, and ``margin`` where there is one; pairs that teach nothing,
    and texts of more than ``max_length`` tokens, are dropped, and counted in a warning.

    Args:
        dataset: with the columns of :class:`RewardDataCollatorWithPadding`, whose length is the
            caller's affair; or with ``chosen`` and ``rejected``, texts or lists of chat messages,
            which may share a ``prompt``.

    Raises:
        TypeError: no data set, see :func:`fastrl.trainers.supervised.as_dataset`.
        ValueError: columns that are missing, a margin that is not one finite number, no pair left.
    """
    dataset = as_dataset(dataset)
    columns = set(dataset.column_names)
    margin = ["margin"] if "margin" in columns else []
    if margin:
        _check_margins(dataset)
    if columns >= set(TOKEN_COLUMNS):
        dataset, max_length = dataset.select_columns([*TOKEN_COLUMNS, *margin]), None
    else:
        if not columns >= set(SIDES):
            raise ValueError(
                f"the data set has columns {', '.join(dataset.column_names)}: it needs chosen and "
                f"rejected (texts or chats, with an optional prompt), or {', '.join(TOKEN_COLUMNS)}"
            )
        dataset = dataset.map(
            lambda row: tokenize_pair(row, tokenizer),
            num_proc=num_proc,
            remove_columns=[c for c in dataset.column_names if c not in margin],
            desc="tokenising pairs",
        )
    return _drop_useless(dataset, max_length, num_proc)


def tokenize_pair(row: dict[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    """The token columns of one pair of texts or chats."""
    tokens: dict[str, list[int]] = {}
    for side in SIDES:
        # An empty side stays empty, whatever its prompt: it is dropped.
        ids: list[int] = []
        said = checked(row, side)
        if said:
            whole = join(checked(row, "prompt"), said, tokenizer)
            ids = encode(whole, tokenizer, chat=not isinstance(said, str))
        tokens |= {f"input_ids_{side}": ids, f"attention_mask_{side}": [1] * len(ids)}
    return tokens


def missing_token_columns(dataset: Any) -> list[str]:
    """What the collator would miss in a data set with token columns; [] where there are none."""
    columns = set(as_dataset(dataset).column_names)
    tokenised = any(name.startswith("input_ids_") for name in columns)
    return [name for name in TOKEN_COLUMNS if name not in columns] if tokenised else []


def _check_margins(dataset: Any) -> None:
    for i, margin in enumerate(dataset["margin"]):
        number = margin[0] if isinstance(margin, list) and len(margin) == 1 else margin
        if not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(
                f"margin[{i}] is {margin}: margins must be finite numbers, or lists of one"
            )


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
    for side in SIDES:
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


def both_sides(inputs: dict[str, Any], pad: int | None) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` [2B, T]: the chosen, then the rejected. A collator of
    the user's may pad each side by itself; the narrower is widened with ``pad``."""
    joined = {}
    for name, filler in (("input_ids", pad or 0), ("attention_mask", 0)):
        sides = [inputs[f"{name}_{side}"] for side in SIDES]
        width = max(side.shape[1] for side in sides)
        joined[name] = torch.cat(
            [nn.functional.pad(side, (0, width - side.shape[1]), value=filler) for side in sides]
        )
    return joined
