"""Where the prompts and responses of a packed row lie, for layers that go from token to token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.models.host_memory import to_device

# What a call takes beside its tokens, in tokens; lengths are told apart by so many.
_CALL, _STEP = 512, 16


class PaddedParts(NamedTuple):
    """Some parts of a row, each padded behind its end.

    Attributes:
        places: [N, L] of their tokens in the row; that behind the row's last is padding.
        numbers: [N] of the parts among the prompts, or the responses.
        real: [n] those of the N·L that are no padding.
    """

    places: Tensor
    numbers: Tensor
    real: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.places.shape


class PackedParts:
    """Prompts, one after the other, and then responses.

    Args:
        prompts: their lengths.
        responses: of each prompt, theirs.
        device: of the row.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        responses: Sequence[Sequence[int]],
        device: torch.device,
    ):
        self.prompts, self.device = list(prompts), device
        self.responses = [n for each in responses for n in each]
        self.first_response, self.tokens = sum(prompts), sum(prompts) + sum(self.responses)
        self._prompt_of = [i for i, each in enumerate(responses) for _ in each]
        self._halos: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def shares(self) -> bool:
        """Whether there are responses."""
        return bool(self.responses)

    @cached_property
    def prompt_of_response(self) -> Tensor:
        """[R] int64."""
        return self._on_device(torch.tensor(self._prompt_of, dtype=torch.long))

    @cached_property
    def ends_of_prompts(self) -> Tensor:
        """[P + 1] int32, from 0."""
        return self._on_device(torch.tensor([0, *accumulate(self.prompts)], dtype=torch.int32))

    @cached_property
    def ends_of_responses(self) -> Tensor:
        """[R + 1] int32, from 0 at the first response."""
        return self._on_device(torch.tensor([0, *accumulate(self.responses)], dtype=torch.int32))

    @cached_property
    def prompts_in_batches(self) -> list[PaddedParts]:
        return self._batches(self.prompts, 0)

    @cached_property
    def responses_in_batches(self) -> list[PaddedParts]:
        return self._batches(self.responses, self.first_response)

    @cached_property
    def order_of_prompts(self) -> Tensor:
        """[P], where each stands in the batches one after the other."""
        return torch.cat([batch.numbers for batch in self.prompts_in_batches]).argsort()

    @cached_property
    def order_of_tokens(self) -> Tensor:
        """[T], likewise of the real tokens of prompts and responses."""
        batches = [*self.prompts_in_batches, *self.responses_in_batches]
        return torch.cat([each.places.flatten()[each.real] for each in batches]).argsort()

    def with_halos(self, before: int) -> tuple[Tensor, Tensor]:
        """A longer row in which ``before`` places stand in front of each part: the tokens before a
        response, and where there are none the place behind the row's last token.

        Returns:
            the places in this row of the longer one's tokens; those of this row's tokens in that.
        """
        if before not in self._halos:
            places, own, at = [], [], 0
            ends = list(accumulate(self.prompts))
            starts = [0, *accumulate(self.prompts + self.responses)]
            for i, n in enumerate(self.prompts + self.responses):
                if i < len(self.prompts):
                    halo = torch.full((before,), self.tokens)
                else:
                    prompt = self._prompt_of[i - len(self.prompts)]
                    halo = torch.arange(ends[prompt] - before, ends[prompt])
                    halo[halo < ends[prompt] - self.prompts[prompt]] = self.tokens
                places += [halo, torch.arange(starts[i], starts[i] + n)]
                own.append(torch.arange(at + before, at + before + n))
                at += before + n
            found = self._on_device(torch.cat(places)), self._on_device(torch.cat(own))
            self._halos[before] = found
        return self._halos[before]

    def last(self, count: int) -> Tensor:
        """[P, count], places of the last tokens of each prompt; behind the row's last token where
        it is shorter."""
        ends = torch.tensor(list(accumulate(self.prompts)))[:, None]
        places = ends - count + torch.arange(count)
        begins = ends - torch.tensor(self.prompts)[:, None]
        return self._on_device(places.where(places >= begins, torch.tensor(self.tokens)))

    def _batches(self, lengths: Sequence[int], first: int) -> list[PaddedParts]:
        starts = [first, *(first + end for end in accumulate(lengths))]
        found = []
        for numbers in _of_about_one_length(lengths):
            longest = max(lengths[i] for i in numbers)
            columns = torch.arange(longest)
            of = torch.tensor([lengths[i] for i in numbers])[:, None]
            real = columns < of
            places = torch.tensor([starts[i] for i in numbers])[:, None] + columns
            places = places.where(real, torch.tensor(self.tokens))
            where = real.flatten().nonzero().squeeze(1)
            parts = places, torch.tensor(numbers), where
            found.append(PaddedParts(*map(self._on_device, parts)))
        return found

    def _on_device(self, x: Tensor) -> Tensor:
        return to_device(x, self.device)


def _of_about_one_length(lengths: Sequence[int]) -> list[list[int]]:
    """Groups of parts, of which the least is computed: all padded tokens, and :data:`_CALL` for
    each group."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    # Groups begin only where the length falls by a step.
    steps = [-(-lengths[i] // _STEP) for i in order]
    begins = [i for i in range(len(order)) if i == 0 or steps[i] != steps[i - 1]]
    least: dict[int, tuple[int, int]] = {len(order): (0, len(order))}  # from here on: cost, end
    for begin in reversed(begins):
        ends = [e for e in (*begins, len(order)) if e > begin]
        costs = [(end - begin) * lengths[order[begin]] + _CALL + least[end][0] for end in ends]
        best = min(range(len(ends)), key=costs.__getitem__)
        least[begin] = costs[best], ends[best]
    groups, at = [], 0
    while at < len(order):
        end = least[at][1]
        groups.append(order[at:end])
        at = end
    return groups
