"""Forward passes without padding: all tokens in one row, where shared beginnings stand once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastrl.data.token_batch import ModelPass, TokenBatch
from fastrl.models.host_memory import to_device
from fastrl.models.packed_attention import Group, PackedAttention, PackedLayout


class PaddingFree:
    """The kind of batch with all tokens in one row [1, T] without padding; samples with the same
    prompt share its tokens, so that it is run once."""

    def model_pass(self, batch: TokenBatch) -> ModelPass:
        packed = PackedTokens(batch)
        device, layout = batch.input_ids.device, packed.layout
        ids = batch.input_ids.flatten()[to_device(packed.sources, device)]
        inputs = _inputs(ids, layout)
        if batch.boundaries is not None:
            inputs["boundary"] = batch.boundaries.packed(batch.samples, packed.groups)
        rows = to_device(packed.rows, device)
        return ModelPass(inputs, rows, packed.places)

    def tokens(self, batch: TokenBatch, samples: Sequence[int]) -> int:
        prompts, lengths = batch.prompts, batch.query_lengths
        unique = {prompts[i]: lengths[i] for i in samples}
        return sum(unique.values()) + sum(batch.response_lengths[i] for i in samples)


class PackedTokens:
    """The places of a batch's tokens in a packed row.

    Attributes:
        layout: the row's layout.
        groups: the samples of each group, whose prompt is taken from the first of them.
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
        starts = batch.starts
        sources: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])  # of prompts, of responses
        places = [np.arange(0)] * len(batch)
        begin, behind = 0, self.layout.first_response
        for group, prompt in zip(self.groups, self.layout.prompts, strict=True):
            prompt_places = np.arange(begin, begin + prompt)
            begin += prompt
            sources[0].append(starts[group[0]] + np.arange(prompt))
            for i in group:
                places[i] = prompt_places
                if len(group) > 1:
                    n = responses[i]
                    places[i] = np.concatenate([prompt_places, np.arange(behind, behind + n)])
                    sources[1].append(starts[i] + prompt + np.arange(n))
                    behind += n
        self.sources = torch.from_numpy(np.concatenate([*sources[0], *sources[1]]))
        self.places = torch.from_numpy(np.concatenate(places))
        predicting = [x[n - 1 : -1] for x, n in zip(places, prompts, strict=True)]
        self.rows = torch.from_numpy(np.concatenate(predicting))[batch.mask_of_responses()]


def join_texts(
    input_ids: Tensor, rows: Tensor, lengths: Sequence[Sequence[int]]
) -> tuple[ModelPass, Tensor]:
    """Makes a forward pass over texts without padding.

    Args:
        input_ids: [B, T] padded on the right; a row may hold several texts, one after the other.
        rows: [N] flat positions b·T + t to score.
        lengths: the lengths of the texts in each row.

    Returns:
        the pass, whose rows are the places of ``rows`` in it; its tokens' positions b·T + t, [T'].
    """
    device, width = input_ids.device, input_ids.shape[1]
    layout = PackedLayout([Group(n) for row in lengths for n in row], device)
    used = [sum(row) for row in lengths]
    begins = np.cumsum([0, *used[:-1]])
    places = np.concatenate([np.arange(b * width, b * width + n) for b, n in enumerate(used)])
    sources = to_device(torch.from_numpy(places), device)
    shift = to_device(torch.from_numpy(np.arange(len(used)) * width - begins), device)
    inputs = _inputs(input_ids.flatten()[sources], layout)
    return ModelPass(inputs, rows - shift[rows // width], torch.arange(layout.tokens)), sources


def join_sides(
    sides: Sequence[Sequence[Tensor]], device: torch.device | str, padding: int | None = None
) -> ModelPass:
    """Makes a forward pass over sequences, such as both sides of pairs, without padding. What all
    sides of an example begin with is run once.

    Args:
        sides: 1-D token ids on the CPU, of each side's examples.
        padding: the token that transformers' classifiers take for padding, wherever it stands: they
            read a sequence's reward from the last other token.

    Returns:
        the pass; its rows are the tokens that rewards are read from, side after side.
    """
    groups: list[Group] = []
    prompts: list[Tensor] = []
    responses: list[Tensor] = []
    for first, *others in zip(*sides, strict=True):
        shortest = min(map(len, (first, *others)))
        same = torch.ones(shortest, dtype=torch.bool)
        for other in others:
            same &= first[:shortest] == other[:shortest]
        # Each side keeps a token to read its reward from.
        prompt = min(int(same.cumprod(0).sum()), shortest - 1) if others else 0
        if prompt:
            groups.append(Group(prompt, tuple(len(x) - prompt for x in (first, *others))))
            prompts.append(first[:prompt])
            responses += [x[prompt:] for x in (first, *others)]
        else:
            groups += [Group(len(x)) for x in (first, *others)]
            prompts += [first, *others]
    layout = PackedLayout(groups, torch.device(device))
    row = torch.cat(prompts + responses)
    ends, begin, behind = [], 0, layout.first_response
    for group in groups:
        places = np.arange(begin, begin + group.prompt)
        begin += group.prompt
        for n in group.responses:
            response_places = np.arange(behind, behind + n)
            ends.append(_read(row, np.concatenate([places, response_places]), padding))
            behind += n
        if not group.responses:
            ends.append(_read(row, places, padding))
    ids = to_device(row, device)
    # The ends lie example after example, the rows side after side.
    rows = to_device(torch.tensor(ends).view(-1, len(sides)).t().flatten(), device)
    return ModelPass(_inputs(ids, layout), rows, torch.arange(layout.tokens))


def _read(row: Tensor, places: np.ndarray, padding: int | None) -> int:
    """The one of a sequence's ``places`` in a row from which a classifier reads its reward."""
    if padding is None:
        return int(places[-1])
    real = np.flatnonzero(row.numpy()[places] != padding)
    return int(places[real[-1] if len(real) else 0])


def right_padded(attention_mask: Tensor) -> list[int] | None:
    """Lengths of the rows of a batch padded on the right; None if it is not, or a row is empty."""
    mask = attention_mask.cpu()
    lengths = mask.sum(-1)
    real = torch.arange(mask.shape[1]) < lengths[:, None]
    return lengths.tolist() if torch.equal(real, mask.bool()) and bool(lengths.all()) else None


def unpadded(input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
    """The rows of a padded batch without padding, on the CPU."""
    rows = zip(input_ids.cpu(), attention_mask.cpu().bool(), strict=True)
    return [row[mask] for row, mask in rows]


def _inputs(ids: Tensor, layout: PackedLayout) -> dict[str, Any]:
    """Arguments of the model's forward on packed tokens [T]."""
    return {
        "input_ids": ids.unsqueeze(0),
        # Without a mask some models search the tokens for padding.
        "attention_mask": torch.ones_like(ids).unsqueeze(0),
        "position_ids": layout.positions.unsqueeze(0),
        "attention": PackedAttention(layout),
    }
