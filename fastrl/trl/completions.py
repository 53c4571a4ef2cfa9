"""Batches of completions, and how a model's forward runs on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastrl.data.padding_free import PaddingFree, right_padded
from fastrl.data.token_batch import TokenBatch
from fastrl.models.scoring import ScoringRequest


@dataclass(frozen=True)
class Completions:
    """The completions of a batch [B, T], behind their prompts.

    Attributes:
        inputs: arguments of a forward, padded or packed; where they are packed, with ``attention``.
        rows: [N] int64, the places in that forward which predict the completions' tokens.
        labels: [N] int64, those tokens.
        places: [N] int64, their flat positions in [B, T-1].
        mask: [B, T-1] bool, True at them.
    """

    inputs: dict[str, Any]
    rows: Tensor
    labels: Tensor
    places: Tensor
    mask: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any], packed: bool = False, prefix: str = "") -> Completions:
        """
        Args:
            batch: ``input_ids``, ``attention_mask`` and ``completion_mask`` [B, T].
            packed: run it without padding, and once what several completions begin with, where all
                completions end their rows.
            prefix: of those names.
        """
        names = ("input_ids", "attention_mask", "completion_mask")
        ids, attention, completion = (batch[f"{prefix}{name}"] for name in names)
        mask = completion[:, 1:].bool()
        places = mask.flatten().nonzero()[:, 0]
        rows = places + places // mask.shape[1]
        labels = ids.flatten()[rows + 1]
        inputs = {"input_ids": ids, "attention_mask": attention}
        tokens = _packed(ids, attention, mask) if packed else None
        if tokens is not None:
            model_pass = tokens.model_pass
            inputs, rows = model_pass.inputs, model_pass.rows
        return cls(inputs, rows, labels, places, mask)

    def request(self, **options: Any) -> ScoringRequest:
        """What a model is to say of the completions."""
        return ScoringRequest(self.rows, self.labels, values=False, **options)

    def spread(self, x: Tensor) -> Tensor:
        """[N] at the places of the tokens in [B, T-1], 0 elsewhere."""
        out = x.new_zeros(self.mask.numel()).index_copy(0, self.places, x)
        return out.view(self.mask.shape)

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of each completion, at least 1."""
        return self.mask.sum(1).clamp(min=1)


def _packed(ids: Tensor, attention: Tensor, mask: Tensor) -> TokenBatch | None:
    """The batch without padding; None where a row has padding in front, or tokens behind its
    completion, as those of a user's collator may."""
    lengths, host_mask = right_padded(attention), mask.cpu()
    if lengths is None:
        return None
    counts = host_mask.sum(1).tolist()
    behind = [n - count for n, count in zip(lengths, counts, strict=True)]
    columns = torch.arange(1, ids.shape[1])
    begins, ends = torch.tensor(behind)[:, None], torch.tensor(lengths)[:, None]
    if not all(counts) or not torch.equal(host_mask, (columns >= begins) & (columns < ends)):
        return None
    tokens = TokenBatch.from_padded(ids.cpu(), attention.cpu(), behind, counts)
    return replace(tokens.to(ids.device), padding=PaddingFree())
