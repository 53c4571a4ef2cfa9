"""The order of prompts: each is repeated for its responses, and again for each use of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler


class GroupSampler(Sampler[int]):
    """Indices of a data set in chunks of ``prompts``: each index ``size`` times in a row, and the
    whole chunk ``uses`` times, like TRL's RepeatSampler. A chunk that is not full is left out.

    With ``shuffle``, the seed ``seed + e`` shuffles epoch e, whatever was drawn before.
    """

    def __init__(
        self,
        data: Sized,
        size: int,
        prompts: int = 1,
        uses: int = 1,
        shuffle: bool = True,
        seed: int = 0,
    ):
        self.count, self.size, self.prompts, self.uses = len(data), size, prompts, uses
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.count, generator=generator).tolist()
        for start in range(0, self.count - self.prompts + 1, self.prompts):
            chunk = [i for i in order[start : start + self.prompts] for _ in range(self.size)]
            for _ in range(self.uses):
                yield from chunk

    def __len__(self) -> int:
        return self.count // self.prompts * self.prompts * self.size * self.uses


def in_groups(stream: Any, size: int, prompts: int = 1, uses: int = 1) -> Any:
    """The rows of a ``datasets.IterableDataset`` in :class:`GroupSampler`'s order, unshuffled.

    Raises:
        ValueError: as the stream's end is read, if it had rows, but fewer than ``prompts``.
    """

    def repeat(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        count = len(indices)
        if indices[0] == 0 and count < prompts:
            raise ValueError(
                f"the stream has {count} prompts, fewer than the {prompts} that are generated for "
                "at a time, so that no step would be taken: lower generation_batch_size or bring "
                "more prompts"
            )
        rows = list(range(count)) if count == prompts else []
        order = [i for _ in range(uses) for i in rows for _ in range(size)]
        return {name: [copy.deepcopy(column[i]) for i in order] for name, column in batch.items()}

    return stream.map(repeat, with_indices=True, batched=True, batch_size=prompts)
