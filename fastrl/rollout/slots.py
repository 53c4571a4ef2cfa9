"""What a decode step reads and writes: buffers of fixed size and address, a row per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RUNNING, EOS, LENGTH, STOP, NAN, IDLE = range(6)
REASONS = {EOS: "eos", LENGTH: "length", STOP: "stop", NAN: "nan"}
# Of fp32 numbers kept per token.
FIELDS = ("logprobs", "logprobs_t1", "truncated_logprobs", "cutoffs", "entropies", "values")


class Rows(NamedTuple):
    """Per slot, int64 [S]; the first rows of it in a step."""

    token: Tensor  # the last one, whose keys and values are not stored yet
    position: Tensor  # of that token
    made: Tensor  # tokens generated so far
    limit: Tensor  # of tokens to generate
    sample: Tensor  # the sample's part of the keys of its draws
    reason: Tensor  # RUNNING, or why it ended

    def first(self, count: int) -> Rows:
        return Rows(*(x[:count] for x in self))


class Slots:
    """The state of all slots.

    Args:
        slots: S.
        length: most generated tokens of a sample.
    """

    def __init__(self, slots: int, length: int, device: torch.device):
        def zeros() -> Tensor:
            return torch.zeros(slots, dtype=torch.long, device=device)

        self.rows = Rows(*(zeros() for _ in Rows._fields))
        self.rows.reason.fill_(IDLE)
        # One column more than needed: rows that have ended write there.
        self.tokens = torch.zeros(slots, length + 1, dtype=torch.long, device=device)
        self.figures = torch.zeros(len(FIELDS), slots, length + 1, device=device)
        self.seed = torch.zeros((), dtype=torch.long, device=device)
        self.seen: Tensor | None = None  # [S, V] bool, tokens that occurred
        self.tail: Tensor | None = None  # [S, W] the last tokens, newest last; -1 before the first

    def tensors(self) -> list[Tensor]:
        """All that a step may write."""
        all_ = (*self.rows, self.tokens, self.figures, self.seen, self.tail)
        return [x for x in all_ if x is not None]

    def begin(self, seed: int, vocabulary: int | None, tail: int | None) -> None:
        """For a new call: what its rules need remembered."""
        self.seed.fill_(seed - (1 << 64) if seed >= 1 << 63 else seed)
        self.seen = self._kept(self.seen, vocabulary, torch.bool)
        self.tail = self._kept(self.tail, tail, torch.long)

    def _kept(self, x: Tensor | None, columns: int | None, dtype: torch.dtype) -> Tensor | None:
        """The buffer that is there where it fits: captured steps hold its address."""
        if columns is None or (x is not None and x.shape[1] == columns):
            return None if columns is None else x
        return torch.zeros(len(self.tokens), columns, dtype=dtype, device=self.tokens.device)

    def remember(self, slots: Sequence[int], prompts: Sequence[Tensor]) -> None:
        """What occurred before the first token of new samples."""
        if self.seen is None and self.tail is None:
            return
        for slot, prompt in zip(slots, prompts, strict=True):
            if self.seen is not None:
                self.seen[slot] = False
                self.seen[slot, prompt.to(self.seen.device)] = True
            if self.tail is not None:
                self.tail[slot] = -1

    def fill(self, slots: Sequence[int], **columns: Sequence[int]) -> None:
        """Sets columns of rows, by name, for the given slots."""
        where = self._index(slots)
        for name, values in columns.items():
            target: Tensor = getattr(self.rows, name)
            target[where] = torch.tensor(list(values), dtype=torch.long).to(target.device)

    def empty(self, slots: Sequence[int]) -> None:
        """Their next steps write nothing that anybody looks at."""
        zero = [0] * len(slots)
        self.fill(slots, reason=[IDLE] * len(slots), position=zero, made=zero, token=zero)

    def move(self, source: int, target: int) -> None:
        """A running sample to another slot."""
        for x in (*self.rows, self.tokens, self.seen, self.tail):
            if x is not None:
                x[target] = x[source]
        self.figures[:, target] = self.figures[:, source]
        self.empty([source])

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.long).to(self.tokens.device)
