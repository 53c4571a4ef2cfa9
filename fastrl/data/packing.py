"""How a batch's tokens stand in the model's input: padded, or packed in one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fastrl.models.packed_attention import Group, PackedAttention, PackedLayout

if TYPE_CHECKING:
    from fastrl.data.batch import TokenBatch


class ModelPass(NamedTuple):
    """One forward over a batch: what the model is called with, and where its tokens stand."""

    inputs: dict[str, Any]
    rows: Tensor  # [N] int64, flat positions that predict the response tokens that count
    places: Tensor  # [Σ L] int64 on the CPU, those of all tokens, sample after sample


class Packing(Protocol):
    """How a batch's tokens stand in the model's input."""

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        """The forward over a batch."""

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> int:
        """Positions that a forward over some of its samples runs."""


class Padded:
    """A row for each sample, [B, T].

    Args:
        masked: False for models to which a right-padded batch needs no attention mask: a causal one
            hides padding from real tokens, and without a mask flash attention can run.
    """

    def __init__(self, masked: bool = True):
        self.masked = masked

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        inputs = batch.padded_inputs
        if not self.masked and not batch.left_padded:
            inputs["attention_mask"] = None
        if batch.boundaries is not None:
            inputs["boundary"] = batch.boundaries.padded(batch.samples, batch.left_padded)
        starts = _starts(batch)
        places = [
            np.arange(start, start + n) for start, n in zip(starts, batch.lengths, strict=True)
        ]
        return ModelPass(inputs, batch.rows(), torch.from_numpy(np.concatenate(places)))

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> int:
        lengths = batch.lengths
        return len(samples) * max(lengths[i] for i in samples)


class PaddingFree:
    """All tokens in one row [1, T] without padding; samples with the same prompt share its tokens,
    so that it is run once."""

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        packed = PackedTokens(batch)
        device, layout = batch.input_ids.device, packed.layout
        ids = batch.input_ids.flatten()[packed.sources.to(device, non_blocking=True)]
        inputs: dict[str, Any] = {
            "input_ids": ids.unsqueeze(0),
            # Without a mask some models search the tokens for padding.
            "attention_mask": torch.ones_like(ids).unsqueeze(0),
            "position_ids": layout.positions.unsqueeze(0),
            "attention": PackedAttention(layout),
        }
        if batch.boundaries is not None:
            inputs["boundary"] = batch.boundaries.packed(batch.samples, packed.groups)
        rows = packed.rows.to(device, non_blocking=True)
        return ModelPass(inputs, rows, packed.places)

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> int:
        prompts, lengths = batch.prompts, batch.query_lengths
        unique = {prompts[i]: lengths[i] for i in samples}
        return sum(unique.values()) + sum(batch.response_lengths[i] for i in samples)


class PackedTokens:
    """The places of a batch's tokens in a packed row.

    Attributes:
        layout: of the row.
        groups: the samples of each group; a prompt's tokens are those of the first.
        sources: [T] int64, the flat position of each token in the padded batch.
        places: [Σ L] int64, the place of each sample's tokens, sample after sample.
        rows: [N] int64, the places that predict the response tokens that count, sample by sample.
    """

    def __init__(self, batch: TokenBatch):
        self.groups = batch.groups()
        lengths, prompts, responses = batch.lengths, batch.query_lengths, batch.response_lengths
        self.layout = PackedLayout(
            [
                Group(prompts[group[0]], tuple(responses[i] for i in group))
                if len(group) > 1
                else Group(lengths[group[0]])
                for group in self.groups
            ],
            batch.input_ids.device,
        )
        starts = _starts(batch)
        sources: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])  # of prompts, of responses
        places = [np.arange(0)] * len(batch)
        begin, behind = 0, self.layout.first_response
        for group, prompt in zip(self.groups, self.layout.prompts, strict=True):
            own = np.arange(begin, begin + prompt)
            begin += prompt
            sources[0].append(starts[group[0]] + np.arange(prompt))
            for i in group:
                places[i] = own
                if len(group) > 1:
                    n = responses[i]
                    places[i] = np.concatenate([own, np.arange(behind, behind + n)])
                    sources[1].append(starts[i] + prompt + np.arange(n))
                    behind += n
        self.sources = torch.from_numpy(np.concatenate([*sources[0], *sources[1]]))
        self.places = torch.from_numpy(np.concatenate(places))
        predicting = [x[n - 1 : -1] for x, n in zip(places, prompts, strict=True)]
        self.rows = torch.from_numpy(np.concatenate(predicting))[batch.mask_of_responses()]


def _starts(batch: TokenBatch) -> list[int]:
    """The flat position of each sample's first token in the padded batch."""
    width = batch.input_ids.shape[1]
    return [
        i * width + (width - n if batch.left_padded else 0) for i, n in enumerate(batch.lengths)
    ]
