"""Keys, values and state of running samples: buffers of fixed size and address, a row per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RUNNING, EOS, LENGTH, STOP, NAN, IDLE = range(6)
FINISH_REASONS = {EOS: "eos", LENGTH: "length", STOP: "stop", NAN: "nan"}
# Numbers kept per token, fp32.
FIELDS = ("logprobs", "logprobs_t1", "entropies", "values")


class Room(NamedTuple):
    """The size of an engine's KV cache; zeros where there is none.

    Decode steps have rows for 1, 2, 3, 4, 6, 8 … or all slots: on some devices, the number of rows
    decides the last bits of a matrix product.
    """

    slots: int = 0
    length: int = 0  # tokens of a slot


class LayerShape(NamedTuple):
    """Shape of one token's keys and values in one layer."""

    heads: int
    key_width: int
    value_width: int


class KVCache:
    """Keys and values of all layers, [slots, length, heads, width] each, zero at first.

    In memory a head's tokens lie together, [slots, heads, length, width]: slots and heads are one
    batch of matrix products.
    """

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
            x = torch.zeros(slots, heads, length, width, dtype=dtype, device=device)
            return x.transpose(1, 2)

        self.keys = [zeros(layer.heads, layer.key_width) for layer in layers]
        self.values = [zeros(layer.heads, layer.value_width) for layer in layers]
        self.windows: list[int | None] = [None] * len(layers)  # filled in as layers attend

    @staticmethod
    def bytes_per_slot(layers: Sequence[LayerShape], length: int, dtype: torch.dtype) -> int:
        widths = sum(layer.heads * (layer.key_width + layer.value_width) for layer in layers)
        return widths * length * dtype.itemsize

    def clear(self, slots: Sequence[int]) -> None:
        """Zeroes slots: a NaN left there would reach the next sample, as 0·NaN is NaN."""
        where = torch.tensor(list(slots)).to(self.keys[0].device)
        for x in (*self.keys, *self.values):
            x.index_fill_(0, where, 0)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copies the first tokens of a slot to another."""
        for x in (*self.keys, *self.values):
            x[target, :tokens] = x[source, :tokens]


class SlotState(NamedTuple):
    """State of the sample in each slot, int64 [S]; a step gets the first rows of it."""

    token: Tensor  # the last one, whose keys and values are not stored yet
    position: Tensor  # of that token
    num_generated: Tensor  # tokens generated so far
    limit: Tensor  # of tokens to generate
    sample: Tensor  # the sample's key, from which its draws' keys are made
    reason: Tensor  # RUNNING, or why it ended

    def first(self, count: int) -> SlotState:
        return SlotState(*(x[:count] for x in self))


class Slots:
    """Buffers of all slots that decode steps read and write, except keys and values.

    Args:
        slots: S.
        length: most generated tokens of a sample.
    """

    def __init__(self, slots: int, length: int, device: torch.device):
        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.long, device=device)

        self.state = SlotState(*(zeros() for _ in SlotState._fields))
        self.state.reason.fill_(IDLE)
        # One column more than needed: rows that have ended write there.
        self.tokens = torch.zeros(slots, length + 1, dtype=torch.long, device=device)
        self.per_token = torch.zeros(len(FIELDS), slots, length + 1, device=device)
        self.seed = torch.zeros((), dtype=torch.long, device=device)
        self.seen: Tensor | None = None  # [S, V] bool, tokens that occurred
        self.tail: Tensor | None = None  # [S, W] the last tokens, newest last; -1 before the first

    def tensors(self) -> list[Tensor]:
        """All buffers that a step may write."""
        all_ = (*self.state, self.tokens, self.per_token, self.seen, self.tail)
        return [x for x in all_ if x is not None]

    def begin(self, seed: int, vocabulary: int | None, tail: int | None) -> None:
        """Prepares a new call.

        Args:
            vocabulary: V where a repetition penalty needs the tokens that have occurred.
            tail: W where stop sequences need the last tokens.
        """
        self.seed.fill_(seed - (1 << 64) if seed >= 1 << 63 else seed)
        self.seen = self._kept(self.seen, vocabulary, torch.bool)
        self.tail = self._kept(self.tail, tail, torch.long)
        self.empty(range(len(self.tokens)))

    def _kept(self, x: Tensor | None, columns: int | None, dtype: torch.dtype) -> Tensor | None:
        """The present buffer where it fits, as captured steps contain its address; else another."""
        if columns is None or (x is not None and x.shape[1] == columns):
            return None if columns is None else x
        return torch.zeros(len(self.tokens), columns, dtype=dtype, device=self.tokens.device)

    def remember(self, slots: Sequence[int], prompts: Sequence[Tensor]) -> None:
        """Records the tokens of new samples' prompts."""
        if self.seen is None and self.tail is None:
            return
        for slot, prompt in zip(slots, prompts, strict=True):
            if self.seen is not None:
                self.seen[slot] = False
                self.seen[slot, prompt.to(self.seen.device)] = True
            if self.tail is not None:
                self.tail[slot] = -1

    def fill(self, slots: Sequence[int], **columns: Sequence[int]) -> None:
        """Sets columns of the state, by name, for the given slots."""
        where = torch.tensor(list(slots), dtype=torch.long).to(self.tokens.device)
        for name, values in columns.items():
            target: Tensor = getattr(self.state, name)
            target[where] = torch.tensor(list(values), dtype=torch.long).to(target.device)

    def empty(self, slots: Sequence[int]) -> None:
        """Marks slots idle: what steps write there is not read."""
        zero = [0] * len(slots)
        self.fill(slots, reason=[IDLE] * len(slots), position=zero, num_generated=zero, token=zero)

    def move(self, source: int, target: int) -> None:
        """Moves a running sample to another slot."""
        for x in (*self.state, self.tokens, self.seen, self.tail):
            if x is not None:
                x[target] = x[source]
        self.per_token[:, target] = self.per_token[:, source]
        self.empty([source])
