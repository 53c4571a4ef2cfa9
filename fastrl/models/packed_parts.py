"""The places of prompts and responses in a packed row, for layers that go from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.models.host_memory import to_device

# A batch costs as much as _BATCH tokens beside its own; a batch begins only where lengths, rounded
# up to multiples of _STEP, differ.
_BATCH, _STEP = 512, 16


class LongerRow:
    """A row with zeros between the tokens of another one.

    Args:
        where: [n] int64, the place of each token in the longer row.
        size: places of the longer row.
    """

    def __init__(self, where: Tensor, size: int, device: torch.device):
        self.size, self.tokens = size, len(where)
        source = torch.full((size,), self.tokens)
        source[where] = torch.arange(self.tokens)
        self.where, self.source = to_device(where, device), to_device(source, device)

    # Both methods copy by places: indexing's backward adds, slowly on CPUs, in any order on GPUs.

    def spread(self, x: Tensor) -> Tensor:
        """The longer row [size, ...] of tokens [n, ...]."""
        return x.new_zeros(self.size, *x.shape[1:]).index_copy_(0, self.where, x)

    def gathered(self, x: Tensor) -> Tensor:
        """The tokens [n, ...] of a longer row [size, ...]."""
        row = x.new_zeros(self.tokens + 1, *x.shape[1:])
        return row.index_copy_(0, self.source, x)[: self.tokens]


class Batches(NamedTuple):
    """The parts of a row, sorted by length into batches [N, L] with padding behind each part. The
    batches, one after the other, are a longer row.

    Attributes:
        order: [parts], the part that stands at each place.
        place: [parts], the place at which each part stands.
    """

    row: LongerRow
    shapes: list[tuple[int, int]]
    order: Tensor
    place: Tensor


class Chunks(NamedTuple):
    """The parts of a row, cut into chunks of one size; each part's last chunk is padded. A longer
    row has the first chunk of all parts, then the second of those that have one, and so on.

    Attributes:
        counts: how many parts have a first chunk, a second, …
        order: [parts], the part that stands at each place: the longest first.
        place: [parts], the place at which each part stands.
    """

    row: LongerRow
    size: int
    counts: list[int]
    order: Tensor
    place: Tensor


class Halos(NamedTuple):
    """A longer row in which some places stand in front of each part, for the tokens before it.

    Attributes:
        places: the places, in the longer row, for the last tokens of prompts before their
            responses.
        sources: the places of these tokens in the row.
    """

    row: LongerRow
    places: Tensor
    sources: Tensor


class Parts:
    """Parts of a row, one after the other.

    Args:
        lengths: the number of tokens of each part.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device):
        self.lengths, self.device = list(lengths), device
        self.tokens = sum(lengths)
        self._starts = [0, *accumulate(lengths)]
        self._chunks: dict[int, Chunks] = {}

    @cached_property
    def ends(self) -> Tensor:
        """The places at which parts begin and the last one ends, [parts + 1] int32."""
        return to_device(torch.tensor(self._starts, dtype=torch.int32), self.device)

    @cached_property
    def batches(self) -> Batches:
        """The parts in batches, each of parts of about one length."""
        groups = _of_about_one_length(self.lengths)
        shapes = [(len(group), max(self.lengths[i] for i in group)) for group in groups]
        at, begins = 0, dict[int, int]()
        for group, (count, longest) in zip(groups, shapes, strict=True):
            begins |= {part: at + i * longest for i, part in enumerate(group)}
            at += count * longest
        return Batches(
            self._longer(begins, at), shapes, *self._ordered([i for group in groups for i in group])
        )

    def chunks(self, size: int) -> Chunks:
        """The parts in chunks of ``size`` tokens."""
        if size not in self._chunks:
            order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
            of_each = [-(-self.lengths[i] // size) for i in order]
            counts = [sum(n > step for n in of_each) for step in range(max(of_each, default=0))]
            before = [0, *accumulate(counts)]
            where = torch.empty(self.tokens, dtype=torch.long)
            for place, i in enumerate(order):
                columns = torch.arange(self.lengths[i])
                chunk = torch.tensor(before)[columns // size] + place
                where[self._starts[i] : self._starts[i + 1]] = chunk * size + columns % size
            row = LongerRow(where, before[-1] * size, self.device)
            self._chunks[size] = Chunks(row, size, counts, *self._ordered(order))
        return self._chunks[size]

    def _longer(self, begins: dict[int, int], size: int) -> LongerRow:
        where = [torch.arange(begins[i], begins[i] + n) for i, n in enumerate(self.lengths)]
        return LongerRow(torch.cat(where), size, self.device)

    def _ordered(self, order: list[int]) -> tuple[Tensor, Tensor]:
        places = torch.tensor(order, dtype=torch.long)
        return to_device(places, self.device), to_device(places.argsort(), self.device)


class PackedParts:
    """Prompts, one after the other, and then responses.

    Args:
        prompts: the prompts' lengths.
        responses: the lengths of each prompt's responses.
        device: the row's device.
    """

    def __init__(
        self, prompts: Sequence[int], responses: Sequence[Sequence[int]], device: torch.device
    ):
        self.prompts = Parts(prompts, device)
        self.responses = Parts([n for each in responses for n in each], device)
        self.device, self.tokens = device, self.prompts.tokens + self.responses.tokens
        self._prompt_of = [i for i, each in enumerate(responses) for _ in each]
        self._halos: dict[int, Halos] = {}

    @property
    def shares(self) -> bool:
        """Whether there are responses."""
        return bool(self._prompt_of)

    @cached_property
    def prompt_of_response(self) -> Tensor:
        """The number of each response's prompt, [R] int64."""
        return to_device(torch.tensor(self._prompt_of, dtype=torch.long), self.device)

    def halos(self, before: int) -> Halos:
        """The row with ``before`` places in front of each part."""
        if before not in self._halos:
            prompts, lengths = self.prompts.lengths, self.prompts.lengths + self.responses.lengths
            ends = list(accumulate(prompts))
            where, places, sources, at = [], [], [], 0
            for i, n in enumerate(lengths):
                where.append(torch.arange(at + before, at + before + n))
                if i >= len(prompts):
                    prompt = self._prompt_of[i - len(prompts)]
                    available = min(before, prompts[prompt])
                    sources.append(torch.arange(ends[prompt] - available, ends[prompt]))
                    places.append(torch.arange(at + before - available, at + before))
                at += before + n
            none = torch.empty(0, dtype=torch.long)
            self._halos[before] = Halos(
                LongerRow(torch.cat(where), at, self.device),
                to_device(torch.cat([none, *places]), self.device),
                to_device(torch.cat([none, *sources]), self.device),
            )
        return self._halos[before]

    def last(self, count: int) -> Tensor:
        """The places of each prompt's last ``count`` tokens, [P, count]; those that a shorter
        prompt lacks are behind the row's last token."""
        lengths = torch.tensor(self.prompts.lengths)[:, None]
        ends = lengths.cumsum(0)
        places = ends - count + torch.arange(count)
        inside = places >= ends - lengths
        return to_device(places.where(inside, torch.tensor(self.tokens)), self.device)


def _of_about_one_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of parts, by index, that cost the least: padded tokens, and _BATCH for each group."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # Groups begin only where the length falls by a step.
    steps = [-(-lengths[i] // _STEP) for i in order]
    begins = [i for i in range(len(order)) if i == 0 or steps[i] != steps[i - 1]]
    least: dict[int, tuple[int, int]] = {len(order): (0, len(order))}  # from here on: cost, end
    for begin in reversed(begins):
        ends = [e for e in (*begins, len(order)) if e > begin]
        costs = [(end - begin) * lengths[order[begin]] + _BATCH + least[end][0] for end in ends]
        best = min(range(len(ends)), key=costs.__getitem__)
        least[begin] = costs[best], ends[best]
    groups, at = [], 0
    while at < len(order):
        end = least[at][1]
        groups.append(order[at:end])
        at = end
    return groups
