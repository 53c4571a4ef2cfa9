"""Batches shared by several processes: those that one process would draw."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from fastrl.run.processes import Processes


class SharedBatches(BatchSampler):
    """This process's share of each batch of all processes: as many examples as others have, and
    about as many tokens.

    The last batch of an epoch may be smaller: it is shared as evenly as can be. A process that gets
    no example of it runs one that does not count, because the others wait for that process.

    Args:
        sampler: the order of the data; the main process's is used.
        batch_size: the number of examples of all processes together.
        sizes: tokens of each example; empty where they are not known.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool,
        processes: Processes,
        sizes: Sequence[int],
    ):
        super().__init__(sampler, batch_size, drop_last)
        self.processes, self.sizes = processes, sizes

    def __iter__(self) -> Iterator[list[int]]:
        order = self.sampler
        if not isinstance(order, SeedableRandomSampler):  # which depends on its seed alone
            order = self.processes.from_main(list(order))
        for batch in BatchSampler(order, self.batch_size, self.drop_last):
            share = self._own([self.sizes[i] if self.sizes else 0 for i in batch])
            yield [batch[k] for k in share] or batch[:1]

    def part(self, number: int) -> float:
        """The fraction that this process has of the examples of batch ``number`` of the epoch."""
        size = self.size(number)
        return len(self._own([0] * size)) / size

    def size(self, number: int) -> int:
        """How many examples batch ``number`` of the epoch has on all processes together."""
        return min(self.batch_size, len(self.sampler) - number * self.batch_size)  # type: ignore[arg-type]

    def _own(self, sizes: Sequence[int]) -> Sequence[int]:
        """The indices of this process's share of examples of these sizes; how many there are does
        not depend on the sizes."""
        return self.processes.balanced(sizes)[self.processes.index]


def weights_of(sizes: Sequence[int | None]) -> list[float]:
    """Factors by which the mean of an optimizer step's batch losses is the mean over its examples;
    no factors where all batches have as many examples, or where a size is not known (None)."""
    if None in sizes or len({*sizes}) < 2:
        return []
    total = sum(sizes)  # type: ignore[arg-type]
    return [n * len(sizes) / total for n in sizes]  # type: ignore[operator]


def share_batches(loader: Any, processes: Processes, sizes: Sequence[int]) -> SharedBatches | None:
    """Makes a loader that accelerate has prepared yield :class:`SharedBatches`, and returns these;
    accelerate itself fills up the last batches with examples that were there before. None, with a
    warning, where the data set is a stream or the loader has a batch sampler of its own.

    Raises:
        ValueError: accelerate is to split batches by itself.
    """
    wrapper: Any = getattr(loader, "batch_sampler", None)
    batches = getattr(wrapper, "batch_sampler", None)
    if not isinstance(wrapper, BatchSamplerShard) or type(batches) is not BatchSampler:
        warnings.warn(
            "train_dataset has no length, or a batch sampler of its own, so that accelerate shares "
            "it among the processes: where it ends, the last batch is filled up with examples that "
            "were there before. Pass a data set with a length, or end before it does (max_steps)",
            stacklevel=4,
        )
        return None
    if wrapper.split_batches:
        raise ValueError(
            "accelerator_config: leave split_batches at False, per_device_train_batch_size is the "
            "number of examples of each process"
        )
    sampler, count = batches.sampler, processes.count
    if isinstance(sampler, LengthGroupedSampler):  # it groups whole optimizer steps
        sampler.batch_size *= count
    size = batches.batch_size * count
    shared = SharedBatches(sampler, size, batches.drop_last, processes, sizes)
    # accelerate's wrapper hands on each share whole, as if there were one process.
    wrapper.batch_sampler, wrapper.num_processes, wrapper.process_index = shared, 1, 0
    wrapper.even_batches = False
    return shared
