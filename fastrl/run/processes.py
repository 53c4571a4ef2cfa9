"""The processes of a run: how many there are, which one this is, and what they tell each other."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastrl.run.breaking_off import BrokenOff, broken_off_by
from fastrl.run.stopping import Stopped, asked

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

T = TypeVar("T")
# Variables set by launchers (torchrun, accelerate launch, mpirun); accelerate reads the same.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


class PeerFailed(RuntimeError):
    """Another process raised an exception, or answers no more, so that this one cannot go on."""


class Processes(Protocol):
    """The processes that together do a run, numbered from 0.

    Its methods, but :meth:`shares` and :meth:`all_know`, wait until every process has called the
    same one.

    Raises:
        PeerFailed: each of these, where another process answers no more, or not in time.
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

    def shared_work(self) -> AbstractContextManager[None]:
        """The same for work that may take long: it is broken off where another process has failed,
        and, of several, where a signal asks the run to stop.

        Raises:
            Stopped: in all processes, after a signal to one.
            PeerFailed: as in :meth:`together`.
        """

    def all_know(self, error: BaseException) -> bool:
        """Whether every process left :meth:`together` or :meth:`shared_work` with an exception,
        this one with ``error``; so that they can still do something together."""

    def check_same(self, what: str, own: Mapping[str, Any]) -> None:
        """Compares what each process was started with.

        Raises:
            ValueError: in all processes; names what differs.
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

    def shared_work(self) -> AbstractContextManager[None]:
        return nullcontext()

    def all_know(self, error: BaseException) -> bool:
        return True

    def check_same(self, what: str, own: Mapping[str, Any]) -> None:
        """There is nothing to compare with."""


class SeveralProcesses:
    """Those that accelerate has found."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.count, self.index = accelerator.num_processes, accelerator.process_index
        self._works = 0  # shared ones so far: the same number in all processes
        self._known: BaseException | None = None  # with which all left the last work

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        size, more = divmod(len(items), self.count)
        ends = [size * (i + 1) + min(i + 1, more) for i in range(self.count)]
        return [items[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def objects(self, own: T) -> list[T]:
        from accelerate.utils import gather_object

        with _answers():
            return gather_object([own])

    def from_main(self, value: T) -> T:
        from accelerate.utils import broadcast_object_list

        with _answers():
            return broadcast_object_list([value])[0]

    def joined(self, own: Tensor, lengths: Sequence[int]) -> Tensor:
        import torch

        longest, device = max(lengths), self.accelerator.device
        padded = torch.zeros((longest, *own.shape[1:]), dtype=own.dtype, device=device)
        padded[: len(own)] = own
        with _answers():
            parts: Any = self.accelerator.gather(padded)
        cut = [part[:n] for part, n in zip(parts.split(longest), lengths, strict=True)]
        return torch.cat(cut).to(own.device)

    def sums(self, own: Tensor) -> Tensor:
        with _answers():
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
        self._agree(error, stops=False)

    @contextmanager
    def shared_work(self) -> Iterator[None]:
        self._works += 1
        news, error = _News(self._works), None
        try:
            with broken_off_by(lambda: asked() or news.there()):
                yield
        except BrokenOff:
            pass
        except Exception as caught:
            error = caught
        if error is not None or asked():
            news.spread()
        self._agree(error, stops=asked())

    def all_know(self, error: BaseException) -> bool:
        return error is self._known

    def check_same(self, what: str, own: Mapping[str, Any]) -> None:
        first, *others = self.objects(dict(own))
        for index, other in enumerate(others, start=1):
            for name in dict.fromkeys([*first, *other]):
                one, two = first.get(name), other.get(name)
                if one != two:
                    shown = "" if len(f"{one}{two}") > 80 else f" ({one!r} and {two!r})"
                    raise ValueError(
                        f"{what}: {name} differs between processes 0 and {index}{shown}: start all "
                        "processes with the same settings, model and data"
                    )

    def _agree(self, error: Exception | None, *, stops: bool) -> None:
        """Raises an exception in all processes, if one of them has an error, or is to stop."""
        said = None if error is None else f"{type(error).__name__}: {error}"
        try:
            found = self.objects((said, stops))
        except PeerFailed as gone:
            raise (error or gone) from None
        known: BaseException | None = error
        for index, (failure, _) in enumerate(found):
            if failure is not None and known is None:
                known = PeerFailed(f"process {index} of {self.count} failed: {failure}")
        if known is None and any(stop for _, stop in found):
            known = Stopped()
        self._known = known
        if known is not None:
            raise known


class _News:
    """A note for all processes that a part of their work has failed, or is to stop.

    Args:
        number: of the part.
    """

    def __init__(self, number: int):
        from torch.distributed import distributed_c10d

        # A message to those that work needs neither their answer nor their main thread.
        self._store = distributed_c10d._get_default_store()
        self._key = f"fastrl/broken-off/{number}"

    def spread(self) -> None:
        with suppress(RuntimeError):  # the process that keeps it may be gone
            self._store.set(self._key, "")

    def there(self) -> bool:
        try:
            return self._store.check([self._key])
        except RuntimeError:
            return False


@contextmanager
def _answers() -> Iterator[None]:
    """Context of a message to all processes, and its answers."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        raise PeerFailed(
            "another process has ended, or did not answer within the seconds of ddp_timeout: "
            f"{told}"
        ) from error


def is_main_process() -> bool:
    """Whether this process is the main one, or the only one, before accelerate is there to ask."""
    return process_index() == 0


def process_index() -> int:
    """The number that a launcher gave this process; 0 without one."""
    return max(int(os.environ.get(name) or 0) for name in _RANKS)


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
    for a run of its own. To be called before accelerate looks. Warns of a launcher that has started
    a single process in place of several."""
    import torch

    # What accelerate launch sets for a number above 1, and what it then leaves to torchrun.
    told = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= os.environ.keys()
    if told and process_count() == 1 and "WORLD_SIZE" not in os.environ:
        _warn_of_a_single_process()
    if process_count() > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


@functools.cache
def _warn_of_a_single_process() -> None:
    """Once: it is found in several places."""
    warnings.warn(
        "accelerate launch was told to start several processes, and has started one, as it does "
        "with --cpu or without GPUs: add --multi_gpu, which starts them on CPUs, too, or use "
        "torchrun --nproc-per-node",
        stacklevel=3,
    )


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


def launched_accelerator(*, timeout: float | None = None, **settings: Any) -> Accelerator:
    """accelerate's view of the processes; on a machine without GPUs they talk by gloo.

    Args:
        timeout: seconds that a process waits for the others; of the first call in a process. None:
            as torch does.
        settings: of the Accelerator.

    Raises:
        ValueError: accelerate takes the processes that were started for single ones; DeepSpeed, or
            FSDP where accelerate makes DDP of it.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DistributedType

    connect_cpus()
    handlers = list(settings.pop("kwargs_handlers", None) or [])
    if timeout is not None and not any(isinstance(x, InitProcessGroupKwargs) for x in handlers):
        handlers.append(InitProcessGroupKwargs(timeout=timedelta(seconds=timeout)))
    settings["kwargs_handlers"] = handlers
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
