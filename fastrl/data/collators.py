"""Collators: padded batches of tokenised texts, and of pairs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from fastrl.data.batch import pad, padding_token

IGNORED = -100  # label of tokens that are not learned
SIDES = ("chosen", "rejected")
TOKEN_COLUMNS = tuple(
    f"{kind}_{side}" for side in SIDES for kind in ("input_ids", "attention_mask")
)
ID_COLUMNS = ("chosen_ids", "rejected_ids")  # TRL 1.x's names of the sides' ids, without masks
_SHOWN = 40  # tokens of a text in a warning


class DataCollatorForCompletionOnlyLM:
    """Finds the tokens of a text to learn: those behind its last response template; or, with an
    instruction template, those behind every response template up to the next instruction. In a text
    that lacks one of the templates nothing is learned, and a warning says so.

    Templates are found as tokens. If the tokenizer joins a template's ends with the text around it,
    pass the template's token ids as they are inside a text. EOS is learned like any other token,
    even if it is the pad token.

    Args:
        response_template: text or token ids in front of what is learned.
        instruction_template: text or token ids in front of what is not learned; for dialogues.
        mlm: only False.
        ignore_index: label of tokens that are not learned, when this is called as a collator.
        padding_free: join the texts of a batch in one row, whose ``position_ids`` restart with
            each text, without an attention_mask.

    Raises:
        ValueError: an empty template, ``mlm=True``.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        tokenizer: Any,
        mlm: bool = False,
        ignore_index: int = IGNORED,
        padding_free: bool = False,
    ):
        if mlm:
            raise ValueError("mlm=True is not for causal language models: leave it False")
        self.tokenizer, self.ignore_index = tokenizer, ignore_index
        self.padding_free = padding_free
        self.response_template = response_template
        self.instruction_template = instruction_template
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
            raise ValueError(f"{name} is empty: pass a text, or token ids, of at least one token")
        return [int(token) for token in template]

    def learned(self, input_ids: Sequence[int]) -> list[bool]:
        """Which tokens of a text are learned."""
        ids = list(input_ids)
        starts = [at + len(self._response) for at in _positions_of(ids, self._response)]
        if self._instruction is None:
            spans = [(start, len(ids)) for start in starts[-1:]]  # a prompt may quote the template
        else:
            instructions = _positions_of(ids, self._instruction)
            turns = [*instructions, len(ids)]
            spans = [(start, min(t for t in turns if t >= start)) for start in starts]
            if not instructions:  # the ends of the answers are not known
                spans = []
        return [any(start <= i < stop for start, stop in spans) for i in range(len(ids))]

    def __call__(self, features: Sequence[Any]) -> dict[str, Tensor]:
        """Makes a padded batch with labels, from token ids or from dicts with ``input_ids``; with
        ``padding_free`` one row [1, T] and its ``position_ids``."""
        rows = [f["input_ids"] if isinstance(f, Mapping) else f for f in features]
        rows = [[int(token) for token in row] for row in rows]
        self._warn_of_missing_templates(rows)
        targets = [
            [
                t if counts else self.ignore_index
                for t, counts in zip(row, self.learned(row), strict=True)
            ]
            for row in rows
        ]
        if self.padding_free:
            labels = [(self.ignore_index, *row[1:]) for row in targets]
            positions = [range(len(row)) for row in rows]
            return {
                name: torch.tensor([[x for row in parts for x in row]])
                for name, parts in (
                    ("input_ids", rows),
                    ("labels", labels),
                    ("position_ids", positions),
                )
            }
        return _batch(rows, targets, self.tokenizer, self.ignore_index)

    torch_call = __call__  # transformers' collators have this name

    def templates(self) -> dict[str, tuple[Any, list[int]]]:
        """The templates by name, each as it was passed, and as token ids."""
        by_name: dict[str, tuple[Any, list[int]]] = {
            "response_template": (self.response_template, self._response)
        }
        if self._instruction is not None:
            by_name["instruction_template"] = (self.instruction_template, self._instruction)
        return by_name

    def _warn_of_missing_templates(self, rows: Sequence[list[int]]) -> None:
        for name, (template, ids) in self.templates().items():
            without = [row for row in rows if not _positions_of(row, ids)]
            if without:
                warnings.warn(
                    f"{name} {template!r} does not occur in {len(without)} of {len(rows)} texts as "
                    f"the tokens {ids}: nothing of them is learned (pass token ids as they are "
                    "inside a text, or cut texts at more tokens); one begins "
                    f"{self.tokenizer.decode(without[0][:_SHOWN])!r}",
                    stacklevel=3,
                )


@dataclass
class TextCollator:
    """Pads ``input_ids`` and ``labels`` on the right, and lists the tokens to learn: ``rows`` [N]
    are the flat positions b·T + t that predict them, ``targets`` [N] the tokens at t+1. Of a text
    without labels all tokens but the first are learned.

    Args:
        pad_to_multiple_of: a number that the width T is to be a multiple of.
    """

    tokenizer: Any
    pad_to_multiple_of: int | None = None

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [f["input_ids"] for f in features]
        labels = [f.get("labels", f["input_ids"]) for f in features]
        batch = _batch(ids, labels, self.tokenizer, multiple=self.pad_to_multiple_of)
        batch["labels"][:, 0] = IGNORED  # no position predicts a first token
        return batch | targets_of(batch["labels"])


def _batch(
    ids: Sequence[Any],
    labels: Sequence[Any],
    tokenizer: Any,
    ignored: int = IGNORED,
    multiple: int | None = None,
) -> dict[str, Tensor]:
    """A batch padded on the right: ``input_ids``, ``attention_mask`` and ``labels``, [B, T]."""
    padding = padding_token(map(len, ids), tokenizer)
    rows, targets = (
        [torch.tensor(list(row), dtype=torch.long) for row in part] for part in (ids, labels)
    )
    labelled = pad(targets, ignored, "right", multiple)["input_ids"]
    return {**pad(rows, padding, "right", multiple), "labels": labelled}


def targets_of(labels: Tensor) -> dict[str, Tensor]:
    """``rows`` and ``targets`` of labels [B, T], see :class:`TextCollator`."""
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    rows = (shifted != IGNORED).nonzero().squeeze(1)
    return {"rows": rows, "targets": shifted[rows]}


@dataclass
class RewardDataCollatorWithPadding:
    """Pads both sides of pairs to one width, for one forward pass. Padding in the rows themselves
    is cut off where no row needs it.

    Args:
        tokenizer: gives the pad token.
        padding: the argument of ``tokenizer.pad``; "max_length" pads to ``max_length``.
        max_length: the width for ``padding="max_length"``.
        pad_to_multiple_of: a number that the width is to be a multiple of.
        return_tensors: "pt".
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns ``input_ids_*`` and ``attention_mask_*`` [B, T] for both sides, and ``margin`` if
        the rows have it: [B] fp32, or [B, 1] if they hold lists of one number.

        Raises:
            ValueError: a row lacks one of these columns, and ``chosen_ids`` or ``rejected_ids``,
                which can replace them; or the margin that others have.
        """
        features = [_with_masks(row) if {*ID_COLUMNS} <= row.keys() else row for row in features]
        margins = any("margin" in row for row in features)
        columns = (*TOKEN_COLUMNS, "margin") if margins else TOKEN_COLUMNS
        for row in features:
            if missing := [name for name in columns if name not in row]:
                raise ValueError(
                    f"the examples lack {', '.join(missing)}; they have {', '.join(row)}"
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
            width = _used_width(padded["attention_mask"], self.pad_to_multiple_of or 1)
        batch: dict[str, Any] = {"return_loss": True}
        for name in ("input_ids", "attention_mask"):
            for side, half in zip(SIDES, padded[name][:, :width].chunk(2), strict=True):
                batch[f"{name}_{side}"] = half
        if margins:
            batch["margin"] = torch.stack(
                [torch.as_tensor(f["margin"], dtype=torch.float32) for f in features]
            )
        return batch


def _with_masks(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ``chosen_ids`` and ``rejected_ids`` by the batch's names, and with masks."""
    sides: dict[str, Any] = {name: row[name] for name in ("margin",) if name in row}
    for side, name in zip(SIDES, ID_COLUMNS, strict=True):
        sides |= {f"input_ids_{side}": row[name], f"attention_mask_{side}": [1] * len(row[name])}
    return sides


def _used_width(mask: Tensor, multiple: int) -> int:
    """The number of columns up to the last that a row uses; padding on the left stays, because
    positions may count from there."""
    counted = mask.any(0).nonzero()
    last = int(counted[-1]) + 1 if len(counted) else mask.shape[1]
    return min(-(-last // multiple) * multiple, mask.shape[1])


def both_sides(inputs: dict[str, Any], pad: int | None) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` [2B, T]: the chosen, then the rejected. If a collator of
    the user padded each side by itself, the narrower is widened with ``pad``."""
    joined = {}
    for name, filler in (("input_ids", pad or 0), ("attention_mask", 0)):
        sides = [inputs[f"{name}_{side}"] for side in SIDES]
        width = max(side.shape[1] for side in sides)
        joined[name] = torch.cat(
            [nn.functional.pad(side, (0, width - side.shape[1]), value=filler) for side in sides]
        )
    return joined


def _positions_of(ids: list[int], template: list[int]) -> list[int]:
    width = len(template)
    return [i for i in range(len(ids) - width + 1) if ids[i : i + width] == template]
