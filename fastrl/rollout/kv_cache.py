"""Memory for keys and values: a slot per running sample, a fixed number of tokens per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from fastrl.rollout.attention import Attention, Variant
from fastrl.rollout.decode import choose_decode


class LayerShape(NamedTuple):
    """Of one token in one layer."""

    heads: int
    key_width: int
    value_width: int


class Arena:
    """Keys and values of all layers, [slots, length, heads, width] each, zero at first."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        slots: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.layers, self.slots, self.length = tuple(layers), slots, length

        def zeros(heads: int, width: int) -> Tensor:
            return torch.zeros(slots, length, heads, width, dtype=dtype, device=device)

        self.keys = [zeros(layer.heads, layer.key_width) for layer in layers]
        self.values = [zeros(layer.heads, layer.value_width) for layer in layers]
        self.windows: list[int | None] = [None] * len(layers)  # filled in as layers attend
        widths = [(layer.key_width, layer.value_width) for layer in layers]
        self.decode = choose_decode(widths, dtype, device)

    @staticmethod
    def bytes_per_slot(layers: Sequence[LayerShape], length: int, dtype: torch.dtype) -> int:
        widths = sum(layer.heads * (layer.key_width + layer.value_width) for layer in layers)
        return widths * length * dtype.itemsize

    def clear(self, slots: Sequence[int]) -> None:
        """What a sample left behind must not reach the next one: a weight of 0 hides no NaN."""
        where = torch.tensor(list(slots)).to(self.keys[0].device)
        for x in (*self.keys, *self.values):
            x.index_fill_(0, where, 0)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copies the first tokens of a slot to another."""
        for x in (*self.keys, *self.values):
            x[target, :tokens] = x[source, :tokens]


class SlotCache(Cache):
    """What a model is given as its cache: hands keys and values to the pass in progress."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.attention: Attention

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.attention.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # every row has its own: models are told positions


class DecodeAttention:
    """One new token for each of the first slots, at the positions [b]."""

    def __init__(self, arena: Arena, positions: Tensor, span: int):
        self.arena, self.positions, self.span = arena, positions, span
        rows = torch.arange(len(positions), device=positions.device)
        self.places = rows * arena.length + positions
        self.lengths = (positions + 1).int()  # the integers of all kernels, once for all layers
        self.layer = 0  # that is being run

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.layer = layer
        stored = self.arena.keys[layer], self.arena.values[layer]
        for whole, new in zip(stored, (keys, values), strict=True):
            whole.flatten(0, 1).index_copy_(0, self.places, new.squeeze(2).to(whole.dtype))
        return stored

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        self.arena.windows[self.layer] = variant.window
        return self.arena.decode(query, keys, values, self.lengths, self.span, variant)


class PrefillAttention:
    """Prompts one after the other in one row [1, T], each attending to itself alone.

    Args:
        lengths: of the prompts, Σ = T.
        slots: of each prompt, those that get its keys and values.
    """

    def __init__(self, arena: Arena, lengths: list[int], slots: list[list[int]]):
        self.arena, self.longest = arena, max(lengths)
        device = arena.keys[0].device
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        sources, places = [], []
        for start, length, targets in zip(starts.tolist(), lengths, slots, strict=True):
            tokens = torch.arange(length)
            sources.append((start + tokens).repeat(len(targets)))
            places.append((torch.tensor(targets)[:, None] * arena.length + tokens).flatten())
        self.sources, self.places = (torch.cat(x).to(device) for x in (sources, places))
        # [prompts, longest] in the row; past a prompt's end its last token again: another prompt's
        # might be NaN, which a weight of 0 does not hide
        columns, ends = torch.arange(self.longest), torch.tensor(lengths)[:, None]
        self.padded = (starts[:, None] + torch.minimum(columns, ends - 1)).to(device)
        here = columns < ends
        self.real = here.flatten().nonzero().squeeze(1).to(device)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = self.arena.keys[layer], self.arena.values[layer]
        for whole, new in zip(stored, (keys, values), strict=True):
            tokens = new[0].transpose(0, 1)[self.sources]
            whole.flatten(0, 1).index_copy_(0, self.places, tokens.to(whole.dtype))
        return keys, values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        # Right-padded, so that causality alone keeps real tokens from padding.
        q, k, v = (x[0].transpose(0, 1)[self.padded].transpose(1, 2) for x in (query, keys, values))
        window = variant.window
        if variant.softcap is not None:
            out = _capped_attention(q, k, v, variant)
        else:
            masked = window is not None and window < self.longest
            out = F.scaled_dot_product_attention(
                q, k, v, scale=variant.scale, enable_gqa=True, is_causal=not masked,
                attn_mask=_band(self.longest, window, q.device) if masked else None,
            )  # fmt: skip
        return out.transpose(1, 2).flatten(0, 1)[self.real].unsqueeze(0)


def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys [q, k] a query sees."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _capped_attention(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    scale, window, softcap = variant
    assert softcap is not None
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_band(q.shape[2], window, q.device), -torch.inf)
    return scores.float().softmax(-1).to(v.dtype) @ v
