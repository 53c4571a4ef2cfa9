"""The processes of a run: how many there are, which one this is, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

T = TypeVar("T")
# Variables set by launchers (torchrun, accelerate launch, mpirun); accelerate reads the same.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class PeerFailed(RuntimeError):
    """Another process raised an exception, so that this one cannot go on."""


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

    def any(self, own: bool) -> bool:
        """Whether it holds in one of them."""

    def together(self) -> AbstractContextManager[None]:
        """Context of work that each process does by itself; behind it all go on, or none does.

        Raises:
            PeerFailed: another process raised an exception in it; names both.
        """


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

    def any(self, own: bool) -> bool:
        return own

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


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
        import torch

        longest, device = max(lengths), self.accelerator.device
        padded = torch.zeros((longest, *own.shape[1:]), dtype=own.dtype, device=device)
        padded[: len(own)] = own
        parts: Any = self.accelerator.gather(padded)
        cut = [part[:n] for part, n in zip(parts.split(longest), lengths, strict=True)]
        return torch.cat(cut).to(own.device)

    def sums(self, own: Tensor) -> Tensor:
        found: Any = self.accelerator.reduce(own.to(self.accelerator.device), reduction="sum")
        return found.to(own.device)

    def any(self, own: bool) -> bool:
        import torch

        return bool(self.sums(torch.tensor(float(own))) > 0)

    @contextmanager
    def together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = self.objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for index, failure in enumerate(failures):
            if failure is not None:
                raise PeerFailed(f"process {index} of {self.count} failed: {failure}")


def is_main_process() -> bool:
    """Whether this process is the main one, or the only one, before accelerate is there to ask."""
    return all(int(os.environ.get(name) or 0) == 0 for name in _RANKS)


def process_count() -> int:
    """How many processes a launcher has started."""
    return max(int(os.environ.get(name) or 1) for name in _COUNTS)


def check_one_process(what: str) -> None:
    """
    Raises:
        ValueError: a launcher has started several.
    """
    count = process_count()
    if count > 1:
        raise ValueError(
            f"{what} runs as one process, and was started as {count}: start it without torchrun or "
            "accelerate launch"
        )


def connect_cpus() -> None:
    """Has accelerate connect several processes on a machine without GPUs, too; it would take each
    for a run of its own. To be called before accelerate looks."""
    import torch

    if process_count() > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def check_found(found: int) -> None:
    """
    Args:
        found: the number of processes that accelerate has found.

    Raises:
        ValueError: a launcher has started several, and accelerate takes each for a single one.
    """
    count = process_count()
    if found == 1 < count:
        raise ValueError(
            f"{count} processes were started, and accelerate takes each for a run of its own: each "
            "would do the same work and save its own model. Start them with torchrun "
            "--nproc-per-node or accelerate launch; without GPUs, with ACCELERATE_USE_CPU=true"
        )


def launched_accelerator(**settings: Any) -> Accelerator:
    """accelerate's view of the processes; on a machine without GPUs they talk by gloo.

    Raises:
        ValueError: accelerate takes the processes that were started for single ones; DeepSpeed, or
            FSDP where accelerate makes DDP of it.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    connect_cpus()
    accelerator = Accelerator(**settings)
    check_found(accelerator.num_processes)
    kind = accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise ValueError(
            "DeepSpeed steps the optimizer within backward(), so that mini-batches whose ratio is "
            "too large cannot be left out of a step, and early stopping comes too late: use DDP "
            "(accelerate launch --multi_gpu, or torchrun)"
        )
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if wants_fsdp and kind != DistributedType.FSDP:
        raise ValueError(
            "FSDP was asked for, and accelerate shards no weights on this machine, which has no "
            "GPU: start without --use_fsdp, or on GPUs"
        )
    return accelerator


def processes_of(accelerator: Accelerator) -> Processes:
    """By the number of processes that accelerate has found."""
    several = accelerator.num_processes > 1
    return SeveralProcesses(accelerator) if several else OneProcess()
