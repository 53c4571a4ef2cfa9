"""BatchFactory: batches for a task, from examples and, online, the policy's responses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastrl.alignment.annotator import RESERVED
from fastrl.alignment.batch import Batch
from fastrl.alignment.responses import ResponseSampler, compare_responses, score_responses
from fastrl.alignment.tasks import Task, find_task
from fastrl.config import SAMPLED
from fastrl.data.columns import FEEDBACK, PAIRS, check_reserved
from fastrl.data.examples import Example
from fastrl.rollout import SamplingParams
from fastrl.run.random_state import seed_at
from fastrl.samples import Samples
from fastrl.settings import typed_arguments


class BatchFactory:
    """Makes the batches of a task from a :class:`DatasLoader`'s examples.

    Offline tasks use the responses in the data, and their labels. Online tasks use the prompts
    alone: the policy generates the responses, and an annotator judges them.

    ``for batch in factory`` yields the batches of ``epochs`` epochs, or ``examples`` examples.
    Every epoch has another seeded order. An offline factory starts anew with each loop, and each
    epoch's last batch (with ``examples``, the loop's) may be smaller; an online one continues
    through its prompts, epoch after epoch.

    Args:
        task: a name in ``fastrl.alignment.TASKS``.
        data: a :class:`DatasLoader` with the columns that the examples of the task need.
        batch_size: examples (a prompt with its response, or with two) per batch and process.
        epochs: how many times all examples are used.
        examples: in place of ``epochs``, how many examples to use, over all processes.
        annotator: judges the responses of online tasks, see :mod:`fastrl.alignment.annotator`.
        params: how the policy samples; the task sets ``n``.
        engine: generates the responses of online tasks, such as :class:`fastrl.RolloutEngine`;
            None: a trainer makes one.
        seed: seeds the order, what losses draw, and the responses of evaluations.
        shuffle: False keeps the data's order.

    Raises:
        ValueError: an unknown task; an online task without an annotator, or an offline one with
            one; sizes below 1; a seed out of range; data that the task cannot use; online, a column
            with the name of an annotator's argument.
        TypeError: a size, seed or truth value of another type.
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
        sizes: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "examples": examples}
        settings = {**sizes, "seed": seed, "shuffle": shuffle}
        batch_size, epochs, examples, seed, shuffle = typed_arguments(
            BatchFactory.__init__, **settings
        )
        for name, x in sizes.items():
            if x is not None and not x >= 1:
                raise ValueError(f"{name} must be at least 1, got {x}")
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"seed must lie between 0 and 4294967295, got {seed}")
        if self.task.online and annotator is None:
            raise ValueError(
                f"the task {self.task.name} needs an annotator to judge the policy's responses: "
                "pass annotator=RewardAnnotator(…), say"
            )
        if annotator is not None and not self.task.online:
            raise ValueError(
                f"the task {self.task.name} takes its responses and their rewards from the data: "
                "leave out annotator"
            )
        self.data = data.as_kind(self.task.data)
        if self.task.online:
            check_reserved(self.data[0].columns, "the data", RESERVED)
        self._settle_lengths()
        self.tokenizer = data.tokenizer
        self.batch_size, self.epochs, self.examples = batch_size, epochs, examples
        self.annotator = annotator
        self.params = params or SamplingParams()
        if self.params.policy_support == SAMPLED:
            raise ValueError(
                "policy_support='sampled' is for PPO, GRPO and RLOO; the losses here score "
                "responses over the whole vocabulary: leave it at 'full'"
            )
        self.seed, self.shuffle = seed, shuffle
        self.rank, self.world = 0, 1
        self.draws: int | None = None  # seed of the next responses; None leaves it to the engine
        self.taken = 0  # batches made so far
        self.sampler: ResponseSampler | None = None
        # Answers prompts and judges the responses, online; a replay of a run sets another function.
        self.answer = self._sampled_and_judged
        if engine is not None and self.task.online:
            self.sample_with(engine)

    def _settle_lengths(self) -> None:
        if self.task.data == PAIRS and not self.task.rewards:
            self.data = self.data.uncut()  # a reward model reads whole texts
        else:
            self.data.warn_of_cuts()

    def limit(self, max_length: int) -> None:
        """Limits prompts with their responses to ``max_length`` tokens, as a loader with that limit
        would: longer examples are cut, or left out for reward models, and counted in a warning;
        online, prompts leave room for responses of full length.

        Raises:
            ValueError: no example left, or no room for prompts.
        """
        room = max_length - self.params.longest if self.task.online else None
        if room is not None and room < 1:
            raise ValueError(
                f"max_new_tokens={self.params.longest} leaves nothing of max_length={max_length} "
                "(of AlignmentConfig, the model or its tokenizer) for prompts: lower the first, or "
                "raise max_length"
            )
        limited = self.data.limited(max_length, room)
        if limited is not self.data:
            self.data = limited
            self._settle_lengths()

    def sample_with(self, engine: Any) -> None:
        """Sets the engine that generates the responses of an online task."""
        self.sampler = ResponseSampler(engine, self.tokenizer, self.params, self.rank)

    def share(self, rank: int, world: int) -> None:
        """Makes this factory yield the shares of process ``rank`` of ``world``: together the
        processes make the batches that one process with ``world`` × ``batch_size`` would make."""
        self.rank, self.world = rank, world
        if self.sampler is not None:
            self.sampler.process = rank

    def skip(self, batches: int) -> None:
        """Lets the next :meth:`take` begin behind the run's first ``batches`` batches."""
        self.taken = batches

    def __len__(self) -> int:
        """The number of batches of a run."""
        if self.examples is None and not self.task.online:
            return self.epochs * self._count(len(self.data))
        return self._count(self.examples or len(self.data) * self.epochs)

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches of a run, see the class."""
        if not self.task.online:
            self.taken = 0
        return self.take(len(self))

    def take(self, count: int) -> Iterator[Batch]:
        """Yields the next ``count`` batches; an offline factory no more than its ``examples`` make.

        Raises:
            ValueError: an online task without an engine.
        """
        for chunk in itertools.islice(self._chunks(), self.taken, self.taken + count):
            batch = self.share_of(chunk)
            batch.seed = seed_at(self.seed, "batch", self.taken)
            self.taken += 1
            yield batch

    def preview(self) -> Iterator[Batch]:
        """Yields the batches of an offline task's whole run, without counting them as taken."""
        yield from map(self.share_of, itertools.islice(self._chunks(), len(self)))

    def sizes(self, *, together: bool) -> Iterator[int]:
        """Yields the number of tokens of each example's prompt with its longest response, or, if
        ``together``, with all; responses of online tasks count as long as they may become."""
        longest = self.params.longest if self.task.online else 0
        for example in self.data:
            if self.task.online:
                lengths = [longest] * self.task.generations
            else:
                lengths = [len(each.ids) for each in example.responses]
            yield len(example.prompt_ids) + (sum(lengths) if together else max(lengths))

    def in_order(self) -> Iterator[list[int]]:
        """Yields the indices of all examples once, in the data's order, a list for each batch of
        all processes, for evaluations."""
        return _pieces(range(len(self.data)), self._step)

    def own(self, chunk: Sequence[int]) -> range:
        """The places of this process's examples in ``chunk``, a batch of all processes; there may
        be none where the last chunk has fewer examples than there are processes."""
        return range(len(chunk))[self.rank :: self.world]

    def share_of(self, chunk: Sequence[int]) -> Batch:
        """Makes this process's share of the batch that all processes make of the examples with the
        indices ``chunk``. A process without an example gets one of weight 0."""
        share = self.own(chunk)
        batch = self.batch([self.data[chunk[i]] for i in share or [0]], share or [0])
        batch.places, batch.total = share, len(chunk)
        if not share:
            for i in range(1, batch.generations + 1):
                batch.weigh(i, [0.0])
        return batch

    def batch(self, examples: Sequence[Example], ids: Sequence[int] | None = None) -> Batch:
        """Makes a batch of the task from examples; online, with responses that are sampled now.

        Args:
            ids: the examples' numbers, which key a RolloutEngine's draws; None: 0, 1, 2, ….

        Raises:
            ValueError: an online task without an engine.
        """
        pad = self.tokenizer.pad_token_id
        if not self.task.online:
            return Batch([replace(e, rewards=self._rewards_in_data(e)) for e in examples], pad)
        judged, scores, rollout = self.answer(examples, ids)
        batch, n = Batch(judged, pad), self.task.generations
        batch.rollout = rollout
        if scores is not None:  # fp32, as rewards and ledgers are
            batch.scores = [torch.tensor(side).float().tolist() for side in scores]
        if rollout.logprobs_t1 is not None:
            batch.rollout_logprobs = [rollout.logprobs_t1[i::n] for i in range(n)]
        return batch

    def _sampled_and_judged(
        self, examples: Sequence[Example], ids: Sequence[int] | None
    ) -> tuple[list[Example], list[list[float]] | None, Samples]:
        """The examples with responses and their rewards; the annotator's scores, B numbers for each
        response to a prompt, or None where it only compares; and what the engine returned, whose
        sequences follow the examples' order."""
        if self.sampler is None:
            raise ValueError(
                f"no engine generates the responses of {self.task.name}: pass "
                "engine=RolloutEngine(…), or hand the factory to a Trainer"
            )
        n = self.task.generations
        seed = self.draws if self.params.seed is None else None
        sampled, output = self.sampler(examples, n, seed, ids)
        judge = score_responses if n == 1 else compare_responses
        return *judge(self.annotator, sampled), output

    def _rewards_in_data(self, example: Example) -> tuple[float, ...] | None:
        if not self.task.rewards:
            return None
        return (float(bool(example.desired)),) if self.task.data == FEEDBACK else (1.0, 0.0)

    def _chunks(self) -> Iterator[list[int]]:
        """Yields the indices of the examples of each batch of all processes. A batch may span two
        epochs, unless the task is offline and ``examples`` is None."""
        rows = itertools.chain.from_iterable(self._orders())
        if self.task.online:
            yield from _pieces(rows, self._step)
        if self.examples is not None:
            yield from _pieces(itertools.islice(rows, self.examples), self._step)
            return
        for order in self._orders():
            yield from itertools.islice(_pieces(order, self._step), self._count(len(order)))

    def _orders(self) -> Iterator[list[int]]:
        """Yields the indices of all examples, once per epoch, in a new order if ``shuffle``."""
        rng, count = np.random.RandomState(self.seed), len(self.data)
        while True:
            yield rng.permutation(count).tolist() if self.shuffle else list(range(count))

    @property
    def _step(self) -> int:
        """Examples per batch, over all processes."""
        return self.batch_size * self.world

    def _count(self, samples: int) -> int:
        """How many batches ``samples`` samples make."""
        return -(-samples // self._step)


def _pieces(indices: Iterable[int], size: int) -> Iterator[list[int]]:
    stream = iter(indices)
    while piece := list(itertools.islice(stream, size)):
        yield piece
