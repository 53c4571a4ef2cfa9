"""The processes of a run: how many there are, which one this is, and what they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Processes(Protocol):
    """The processes that together do a run, numbered from 0.

    Its methods, but :meth:`shares`, wait until every process has called the same one.
    """

    count: int
    index: int  # of this process

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes, prints and shows progress."""

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Each process's part of some items: all are as long, but for one item."""

    def objects(self, own: T) -> list[T]:
        """What each process has."""

    def from_main(self, value: T) -> T:
        """What the main process has."""

    def joined(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        """The parts of all processes, one after the other.

        Args:
            own: this process's part, [lengths[index], ...].
            lengths: of each process's part.
        """

    def sums(self, own: Tensor) -> Tensor:
        """The sum over all processes."""


class OneProcess:
    """A run that is one process."""

    count, index, is_main = 1, 0, True

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        return [items]

    def objects(self, own: T) -> list[T]:
        return [own]

    def from_main(self, value: T) -> T:
        return value

    def joined(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        return own

    def sums(self, own: Tensor) -> Tensor:
        return own


class SeveralProcesses:
    """Those that accelerate has found."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.count, self.index = accelerator.num_processes, accelerator.process_index

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        size, more = divmod(len(items), self.count)
        ends = [size * (i + 1) + min(i + 1, more) for i in range(self.count)]
        return [items[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def objects(self, own: T) -> list[T]:
        from accelerate.utils import gather_object

        return gather_object([own])

    def from_main(self, value: T) -> T:
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def joined(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        longest, device = max(lengths), self.accelerator.device
        padded = torch.zeros((longest, *own.shape[1:]), dtype=own.dtype, device=device)
        padded[: len(own)] = own
        parts: Any = self.accelerator.gather(padded)
        cut = [part[:n] for part, n in zip(parts.split(longest), lengths, strict=True)]
        return torch.cat(cut).to(own.device)

    def sums(self, own: Tensor) -> Tensor:
        found: Any = self.accelerator.reduce(own.to(self.accelerator.device), reduction="sum")
        return found.to(own.device)


def processes_of(accelerator: Accelerator) -> Processes:
    """By the number of processes that accelerate has found."""
    several = accelerator.num_processes > 1
    return SeveralProcesses(accelerator) if several else OneProcess()
