"""The sets that a rollout's tokens were drawn from, taken out of the slots as decode steps go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastrl.models.host_memory import to_device
from fastrl.rollout.kv_cache import Slots
from fastrl_kernels import TokenSets

AT_A_TIME = 512  # sets that are held as bits until they are made shorter, 6 KB each at GPT-2's V


class SupportLog:
    """Collects the sets of all samples of a call of ``generate``, on the host.

    A decode step writes a row of bits for each slot into ``Slots.support``, a ring that holds those
    of the latest steps: what they would take for whole responses is much more than as lists of ids.

    Args:
        vocabulary: V.
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self._rows = 0  # sets collected so far
        self._latest: list[Tensor] = []  # as bits, not yet among the sets
        self._sets: list[TokenSets] = []
        self._places: dict[int, list[int]] = {}  # of a sample's sets among them, by its index

    def take(self, slots: Slots, running: Mapping[int, int], steps: int) -> None:
        """Takes the sets of the latest decode steps.

        Args:
            running: indices of the samples that ran, by their slots.
            steps: the number of decode steps, at most the ring's.
        """
        assert slots.support is not None
        ring, device = slots.support.shape[1], slots.support.device
        before = [len(self._places.setdefault(index, [])) for index in running.values()]
        where = torch.tensor([list(running), before])
        rows, first = to_device(where, device)[:, :, None]
        columns = (first + torch.arange(steps, device=device)) % ring
        self._latest.append(slots.support[rows, columns].flatten(0, 1))
        for index in running.values():
            self._places[index] += range(self._rows, self._rows + steps)
            self._rows += steps
        if sum(map(len, self._latest)) >= AT_A_TIME:
            self._shorten()

    def _shorten(self) -> None:
        self._sets.append(TokenSets.of_words(torch.cat(self._latest), self.vocabulary))
        self._latest = []

    def of_samples(self, sequences: Sequence[Tensor]) -> list[TokenSets]:
        """The sets of each sample's tokens."""
        if self._latest:
            self._shorten()
        whole = TokenSets.joined(self._sets)
        places = (self._places[i][: len(tokens)] for i, tokens in enumerate(sequences))
        return [whole.select(torch.tensor(rows, dtype=torch.long)) for rows in places]


def whole_supports(sequences: Sequence[Tensor], vocabulary: int) -> list[TokenSets]:
    """The sets of tokens that were drawn from the whole vocabulary."""
    return [TokenSets.whole(len(tokens), vocabulary) for tokens in sequences]
