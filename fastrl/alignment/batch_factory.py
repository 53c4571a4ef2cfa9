"""BatchFactory: examples, and responses of the policy, made into batches for a task."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fastrl.alignment.batch import Batch
from fastrl.alignment.sources import Source, Writer, make_source
from fastrl.alignment.tasks import Task, find_task
from fastrl.data.examples import Example
from fastrl.rollout import SamplingParams


class BatchFactory:
    """Makes the batches of a task out of a :class:`DatasLoader`'s examples.

    Offline tasks keep the data's responses and what the data say of them. Online tasks take the
    prompts alone: a policy writes the responses, an annotator judges them.

    ``for batch in factory`` yields all batches, of ``epochs`` passes over the data or of
    ``examples`` examples. Every pass has a seeded order of its own. An offline factory begins anew
    with each loop, and its last batch may be smaller; an online one goes on through its prompts,
    pass after pass, and never restarts them.

    Args:
        task: a name out of ``fastrl.alignment.TASKS``.
        data: examples; a loader of richer ones gives those that the task needs.
        batch_size: samples per batch, and per process.
        epochs: passes over the data.
        examples: in place of that, how many samples to make, over all processes.
        annotator: of online tasks, see :mod:`fastrl.alignment.annotator`.
        params: how the policy samples; ``n`` is the task's.
        engine: what writes, such as :class:`fastrl.RolloutEngine`; a trainer brings its own.
        seed: of the order.
        shuffle: False keeps the data's order.

    Raises:
        ValueError: an unknown task; an online task without an annotator, or another one with one;
            sizes below 1; data that the task cannot use.
    """

    def __init__(
        self,
        task: str | Task,
        data: Any,
        *,
        batch_size: int = 8,
        epochs: int = 1,
        examples: int | None = None,
        annotator: Any = None,
        params: SamplingParams | None = None,
        engine: Any = None,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self.task = find_task(task)
        for name, x in (("batch_size", batch_size), ("epochs", epochs), ("examples", examples)):
            if x is not None and x < 1:
                raise ValueError(f"{name} must be at least 1, got {x}")
        if self.task.online and annotator is None:
            raise ValueError(
                f"the task {self.task.name} needs an annotator, which judges the policy's "
                "responses: pass annotator=RewardAnnotator(…) or another"
            )
        if annotator is not None and not self.task.online:
            raise ValueError(
                f"the task {self.task.name} takes its responses and what they are worth from the "
                "data: leave out annotator"
            )
        self.data = data.as_kind(self.task.data)
        self.tokenizer = data.tokenizer
        self.batch_size, self.epochs, self.examples = batch_size, epochs, examples
        self.annotator = annotator
        self.params = params or SamplingParams()
        self.seed, self.shuffle = seed, shuffle
        self.rank, self.world = 0, 1
        self._taken = 0  # batches that are behind
        self.writer: Writer | None = None
        self._source: Source | None = None
        if engine is not None or not self.task.online:
            self.write_with(engine)

    def write_with(self, engine: Any) -> None:
        """Lets ``engine`` write the responses of an online task."""
        self.writer = Writer(engine, self.tokenizer, self.params) if self.task.online else None
        pad = self.tokenizer.pad_token_id
        self._source = make_source(self.task, self.writer, self.annotator, pad)

    def share(self, rank: int, world: int) -> None:
        """Makes this factory that of process ``rank`` of ``world``: each gets other samples."""
        self.rank, self.world = rank, world

    def skip(self, batches: int) -> None:
        """Puts so many batches behind: the next :meth:`take` begins there, as a run does that was
        interrupted."""
        self._taken = batches

    def __len__(self) -> int:
        """Batches of a run."""
        if self.examples is None and not self.task.online:
            return self.epochs * self._count(len(self.data))
        return self._count(self.examples or len(self.data) * self.epochs)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of a run, see the class."""
        if not self.task.online:
            self._taken = 0
        return self.take(len(self))

    def take(self, count: int) -> Iterator[Batch]:
        """The next ``count`` batches, pass after pass; of ``examples`` none beyond their number.

        Raises:
            ValueError: nobody is there to write the responses.
        """
        source = self._ready()
        chunks = self._chunks()
        for chunk in itertools.islice(chunks, self._taken, self._taken + count):
            self._taken += 1
            yield source([self.data[i] for i in chunk[self.rank :: self.world]])

    def preview(self) -> Iterator[Batch]:
        """The batches of an offline task's run, wherever it stands."""
        source = self._ready()
        for chunk in itertools.islice(self._chunks(), len(self)):
            yield source([self.data[i] for i in chunk[self.rank :: self.world]])

    def in_order(self) -> Iterator[tuple[list[int], list[Example]]]:
        """All examples once, with their indices, in the data's order and in batches of this
        process, whatever has been drawn: for evaluations. What is left for the last batch may be
        too little for a share of it: then that is empty."""
        for start in range(0, len(self.data), self._step):
            chosen = range(start, min(start + self._step, len(self.data)))[self.rank :: self.world]
            yield list(chosen), [self.data[i] for i in chosen]

    def batch(self, examples: Sequence[Example]) -> Batch:
        """These examples as a batch of the task."""
        return self._ready()(examples)

    def _chunks(self) -> Iterator[list[int]]:
        """Indices of examples, a list per batch, over all processes. A batch goes from one pass
        into the next, but where a run is a number of whole passes over data."""
        every = itertools.chain.from_iterable(self._passes())
        if self.task.online:
            yield from _pieces(every, self._step)
        if self.examples is not None:
            yield from _pieces(itertools.islice(every, self.examples), self._step)
            return
        for order in self._passes():
            yield from itertools.islice(_pieces(order, self._step), self._count(len(order)))

    def _passes(self) -> Iterator[list[int]]:
        """All examples, in an order of its own for every pass."""
        rng = np.random.RandomState(self.seed)
        indices = range(len(self.data))
        while True:
            yield rng.permutation(len(self.data)).tolist() if self.shuffle else list(indices)

    @property
    def _step(self) -> int:
        """Samples per batch, over all processes."""
        return self.batch_size * self.world

    def _count(self, samples: int) -> int:
        """Batches of so many samples. Several processes step together: none may be left without
        one."""
        whole, rest = divmod(samples, self._step)
        return whole + (rest > 0 and self.world == 1)

    def _ready(self) -> Source:
        if self._source is None:
            raise ValueError(
                f"nobody writes the responses of {self.task.name}: pass engine=RolloutEngine(…), "
                "or hand the factory to a Trainer"
            )
        return self._source


def _pieces(indices: Iterable[int], size: int) -> Iterator[list[int]]:
    stream = iter(indices)
    while piece := list(itertools.islice(stream, size)):
        yield piece
