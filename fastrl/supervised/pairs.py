"""Pairs of a preferred and another text: from a data set's columns to padded batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIDES = ("chosen", "rejected")
TOKEN_COLUMNS = tuple(f"{kind}_{side}" for side in SIDES for kind in ("input_ids", "attention_mask"))


@dataclass
class RewardDataCollatorWithPadding:
    """Pads both sides of pairs to one width: one forward serves both.

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
        """``input_ids_*`` and ``attention_mask_*`` [B, T] for both sides, ``margin`` [B] if given.

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
        padded = self.tokenizer.pad(
            rows,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=self.return_tensors,
        )
        batch: dict[str, Any] = {"return_loss": True}
        for name in ("input_ids", "attention_mask"):
            for side, half in zip(SIDES, padded[name].chunk(2), strict=True):
                batch[f"{name}_{side}"] = half
        if "margin" in features[0]:
            batch["margin"] = torch.tensor([float(f["margin"]) for f in features])
        return batch


def prepare_pairs(
    dataset: Any, tokenizer: Any, max_length: int | None, num_proc: int | None = None
) -> Any:
    """A data set with token columns, and ``margin`` where there is one; pairs that teach nothing,
    or are too long, are dropped, and counted in a warning.

    Args:
        dataset: a ``datasets.Dataset`` with the columns of :class:`RewardDataCollatorWithPadding`,
            or with ``chosen`` and ``rejected``, texts or lists of chat messages, which may share a
            ``prompt``.

    Raises:
        ValueError: columns that are missing, a margin that is not finite, no pair left.
    """
    columns = set(dataset.column_names)
    margin = ["margin"] if "margin" in columns else []
    if margin:
        _check_margins(dataset)
    if not columns >= set(TOKEN_COLUMNS):
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
    else:
        dataset = dataset.select_columns([*TOKEN_COLUMNS, *margin])
    return _drop_useless(dataset, max_length, num_proc)


def tokenize_pair(row: dict[str, Any], tokenizer: Any) -> dict[str, list[int]]:
    """The token columns of one pair of texts or chats."""
    tokens = {}
    for side in SIDES:
        whole = join(row.get("prompt"), row[side], tokenizer)
        # A chat template brings its special tokens along.
        chat = not isinstance(row[side], str)
        encoded = tokenizer(whole, add_special_tokens=not chat)
        # An empty side stays empty, whatever its prompt: it is dropped.
        for name in ("input_ids", "attention_mask"):
            tokens[f"{name}_{side}"] = encoded[name] if len(row[side]) else []
    return tokens


def join(prompt: Any, answer: Any, tokenizer: Any) -> str:
    """Prompt and answer as one text; chats through the tokenizer's template."""
    if isinstance(answer, str):
        if prompt is not None and not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
        return (prompt or "") + answer
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return tokenizer.apply_chat_template([*messages, *answer], tokenize=False)


def _check_margins(dataset: Any) -> None:
    for i, margin in enumerate(dataset["margin"]):
        if margin is None or not math.isfinite(margin):
            raise ValueError(f"margin[{i}] is {margin}: margins must be finite numbers")


def _drop_useless(dataset: Any, max_length: int | None, num_proc: int | None) -> Any:
    def why(row: dict[str, Any]) -> dict[str, str]:
        chosen, rejected = (
            [t for t, m in zip(row[f"input_ids_{s}"], row[f"attention_mask_{s}"], strict=True) if m]
            for s in SIDES
        )
        if not chosen or not rejected:
            return {"_why": "empty"}
        if chosen == rejected:
            return {"_why": "equal"}
        longest = max(len(row[f"input_ids_{s}"]) for s in SIDES)
        return {"_why": "long" if max_length is not None and longest > max_length else ""}

    causes = list(dataset.map(why, num_proc=num_proc, desc="checking pairs")["_why"])
    kept = [i for i, cause in enumerate(causes) if not cause]
    if len(kept) == len(causes):
        return dataset
    reasons = {
        "empty": "have an empty side",
        "equal": "have equal sides",
        "long": f"have a side of more than max_length={max_length} tokens",
    }
    counted = ", ".join(
        f"{causes.count(cause)} {text}" for cause, text in reasons.items() if cause in causes
    )
    if not kept:
        raise ValueError(f"no pair is left of {len(causes)}: {counted}")
    warnings.warn(f"{len(causes) - len(kept)} of {len(causes)} pairs dropped: {counted}", stacklevel=4)
    return dataset.select(kept)


def both_sides(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` [2B, T]: the chosen, then the rejected."""
    joined = {}
    for name in ("input_ids", "attention_mask"):
        sides = [inputs[f"{name}_{side}"] for side in SIDES]
        width = max(side.shape[1] for side in sides)
        # A collator of the user's may pad each side by itself; a mask of 0 hides what is added.
        joined[name] = torch.cat(
            [torch.nn.functional.pad(side, (0, width - side.shape[1])) for side in sides]
        )
    return joined
