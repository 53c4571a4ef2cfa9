"""The processes of a run: how many there are, which one this is, and what they tell each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from fastrl.run.breaking_off import BrokenOff, broken_off_by
from fastrl.run.stopping import Stopped, asked
from fastrl.user_code import exits_are_errors

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

T = TypeVar("T")
_AT_ONCE = 1 << 10  # bytes of an object that travel with its size
# The numbers of contexts of shared work, the same in all processes. All trainers share the counter,
# since a note (see _News) stays in torch's store as long as the processes live.
_works = itertools.count(1)


class PeerFailed(RuntimeError):
    """Another process raised an exception, or answers no more, so that this one cannot go on."""


class Processes:
    """The processes that together do a run, numbered from 0: one, but for
    :class:`SeveralProcesses`.

    Its methods wait until every process has called the same method, but for :meth:`shares`,
    :meth:`balanced` and :meth:`all_know`.

    Raises:
        PeerFailed: a method that waits: another process answers no more, or not in time.
    """

    count, index = 1, 0  # the number of processes, and which one this is

    @property
    def of_machine(self) -> tuple[int, int]:
        """This process's number among those on its machine, and how many these are."""
        return 0, 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes, prints and shows progress."""
        return True

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        """Each process's part of some items; their lengths differ by one at most."""
        return [items]

    def balanced(self, sizes: Sequence[int]) -> list[Sequence[int]]:
        """Each process's part of items of these sizes, as indices: the numbers of items differ by
        one at most, and the sums of their sizes are about equal."""
        return [range(len(sizes))]

    def objects(self, value: T) -> list[T]:
        """The ``value`` of each process, in their order."""
        return [value]

    def objects_at_main(self, value: T) -> list[T]:
        """The ``value`` of each process, in the main process; [] in the others."""
        return [value]

    def from_main(self, value: T) -> T:
        """The main process's ``value``."""
        return value

    def joined(self, value: Tensor, lengths: Sequence[int]) -> Tensor:
        """The parts of all processes, one after the other: [sum(lengths), ...].

        Args:
            value: this process's part, [lengths[index], ...].
            lengths: the lengths of all processes' parts.
        """
        return value

    def sums(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over all processes."""
        return value

    def any(self, value: bool) -> bool:
        """Whether ``value`` is true in one of the processes."""
        return value

    def one_first(self) -> AbstractContextManager[None]:
        """Context of work that one process of each machine does first, and caches for the rest."""
        return nullcontext()

    def together(self) -> AbstractContextManager[None]:
        """Context of work that each process does by itself; after it all processes go on, or none.

        Raises:
            PeerFailed: another process raised an exception in it; the message names both.
        """
        return nullcontext()

    def shared_work(self) -> AbstractContextManager[None]:
        """Context like :meth:`together` for work that may take long: with several processes it is
        broken off as soon as another process fails, or a signal asks the run to stop.

        Raises:
            Stopped: in all processes, after a signal to one.
            PeerFailed: see :meth:`together`.
        """
        return nullcontext()

    def all_know(self, error: BaseException) -> bool:
        """Whether every process left :meth:`together` or :meth:`shared_work` with an exception,
        this one with ``error``; so that they can still do something together."""
        return True

    def check_same(self, what: str, values: Mapping[str, Any]) -> None:
        """Compares the processes' ``values``, by name; ``what`` begins the error's message.

        Raises:
            ValueError: in all processes, if a value differs; the message names it.
        """


OneProcess = Processes  # the class's name for a run of one process


class SeveralProcesses(Processes):
    """A run of several processes, which accelerate has connected."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.count, self.index = accelerator.num_processes, accelerator.process_index
        self._known: BaseException | None = None  # the error with which all left the last work

    @property
    def of_machine(self) -> tuple[int, int]:
        """This process's number among those on its machine, and how many these are, by the
        launcher's variables; (0, 1) where they are not set."""
        index, count = (int(os.environ.get(f"LOCAL_{x}", -1)) for x in ("RANK", "WORLD_SIZE"))
        return (index, count) if 0 <= index < count else (0, 1)

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def shares(self, items: Sequence[T]) -> list[Sequence[T]]:
        size, rest = divmod(len(items), self.count)
        ends = [size * (i + 1) + min(i + 1, rest) for i in range(self.count)]
        return [items[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def balanced(self, sizes: Sequence[int]) -> list[Sequence[int]]:
        # Items are dealt by size, forth and back: the process that gets the largest of a round
        # gets the smallest of the next round.
        order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        parts: list[list[int]] = [[] for _ in range(self.count)]
        for start in range(0, len(order), self.count):
            dealt = order[start : start + self.count]
            turned = start // self.count % 2 and len(dealt) == self.count
            for part, i in zip(parts, reversed(dealt) if turned else dealt, strict=False):
                part.append(i)
        return [sorted(part) for part in parts]

    def objects(self, value: T) -> list[T]:
        import torch

        from fastrl.run.parcels import opened, parcel

        data = parcel(value)
        first = torch.zeros(8 + _AT_ONCE, dtype=torch.uint8)
        first[:8] = torch.tensor([len(data)]).view(torch.uint8)
        first[8 : 8 + len(data)] = data[:_AT_ONCE]
        firsts = self.joined(first, [len(first)] * self.count).view(self.count, -1)
        lengths = firsts[:, :8].flatten().view(torch.int64).tolist()
        if max(lengths) <= _AT_ONCE:
            return [opened(x[8 : 8 + n]) for x, n in zip(firsts, lengths, strict=True)]
        return [opened(x) for x in self.joined(data, lengths).split(lengths)]

    def objects_at_main(self, value: T) -> list[T]:
        import torch

        from fastrl.run.parcels import opened, parcel

        data = parcel(value)
        lengths = self.joined(torch.tensor([len(data)]), [1] * self.count).tolist()
        device = self.accelerator.device
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in lengths] if self.is_main else None
        with _answers():
            torch.distributed.gather(padded, parts)
        return [opened(x[:n].cpu()) for x, n in zip(parts or (), lengths, strict=self.is_main)]

    def from_main(self, value: T) -> T:
        from accelerate.utils import broadcast_object_list

        with _answers():
            return broadcast_object_list([value])[0]

    def joined(self, value: Tensor, lengths: Sequence[int]) -> Tensor:
        import torch
        from accelerate.utils import gather

        longest, device = max(lengths), self.accelerator.device
        padded = torch.zeros((longest, *value.shape[1:]), dtype=value.dtype, device=device)
        padded[: len(value)] = value
        with _answers():
            parts: Any = gather(padded)
        cut = [part[:n] for part, n in zip(parts.split(longest), lengths, strict=True)]
        return torch.cat(cut).to(value.device)

    def sums(self, value: Tensor) -> Tensor:
        from accelerate.utils import reduce

        with _answers():
            summed: Any = reduce(value.to(self.accelerator.device), reduction="sum")
        return summed.to(value.device)

    def any(self, value: bool) -> bool:
        import torch

        return bool(self.sums(torch.tensor(float(value))) > 0)

    @contextmanager
    def one_first(self) -> Iterator[None]:
        first = self.accelerator.is_local_main_process
        if not first:
            self.any(False)  # waits until the first ones have done the work
        try:
            yield
        finally:
            if first:
                self.any(False)

    @contextmanager
    def together(self) -> Iterator[None]:
        error: Exception | None = None
        try:
            with exits_are_errors():
                yield
        except Exception as caught:
            error = caught
        self._agree(error, stops=False)

    @contextmanager
    def shared_work(self) -> Iterator[None]:
        news, error = _News(next(_works)), None
        try:
            with exits_are_errors(), broken_off_by(lambda: asked() or news.there()):
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

    def check_same(self, what: str, values: Mapping[str, Any]) -> None:
        first, *others = self.objects(dict(values))
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
        failed = None if error is None else f"{type(error).__name__}: {error}"
        try:
            outcomes = self.objects((failed, stops))
        except PeerFailed as gone:
            raise (error or gone) from None
        cause: BaseException | None = error
        for index, (failure, _) in enumerate(outcomes):
            if failure is not None and cause is None:
                cause = PeerFailed(f"process {index} of {self.count} failed: {failure}")
        if cause is None and any(stop for _, stop in outcomes):
            cause = Stopped()
        self._known = cause
        if cause is not None:
            raise cause


class _News:
    """A note for all processes that part ``number`` of their work has failed, or is to stop."""

    def __init__(self, number: int):
        from torch.distributed import distributed_c10d

        # A note in the store reaches processes at work without their answer or main thread.
        self._store = distributed_c10d._get_default_store()
        self._key = f"fastrl/broken-off/{number}"

    def spread(self) -> None:
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            self._store.set(self._key, "")

    def there(self) -> bool:
        try:
            return self._store.check([self._key])
        except RuntimeError:
            return False


@contextmanager
def _answers() -> Iterator[None]:
    """Context of a message to all processes and their answers; raises PeerFailed without them."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise PeerFailed(
            "another process has ended, or did not answer within the seconds of ddp_timeout: "
            f"{first_line}"
        ) from error


def processes_of(accelerator: Accelerator) -> Processes:
    """The run's processes, one or several, by accelerate's number of them."""
    several = accelerator.num_processes > 1
    return SeveralProcesses(accelerator) if several else OneProcess()
