"""BatchFactory: examples, and responses of the policy, made into batches for a task."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from fastrl.alignment.annotator import ask_preferences, ask_scores
from fastrl.alignment.batch import Batch, columns_of
from fastrl.alignment.tasks import Task, find_task
from fastrl.data.columns import FEEDBACK, PAIRS
from fastrl.data.examples import Example, Response
from fastrl.models.layout import layout_of
from fastrl.rollout import RolloutOutput, SamplingParams


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
        if self.task.data == PAIRS and not self.task.rewards:
            self.data = self.data.uncut()  # a reward model is scored on whole texts
        self.tokenizer = data.tokenizer
        self.batch_size, self.epochs, self.examples = batch_size, epochs, examples
        self.annotator = annotator
        self.params = params or SamplingParams()
        self.seed, self.shuffle = seed, shuffle
        self.rank, self.world = 0, 1
        self.taken = 0  # batches made so far
        self.sampler: ResponseSampler | None = None
        self._source: Source | None = None
        if engine is not None or not self.task.online:
            self.sample_with(engine)

    def sample_with(self, engine: Any) -> None:
        """Lets ``engine`` sample the responses of an online task."""
        if self.task.online:
            self.sampler = ResponseSampler(engine, self.tokenizer, self.params)
        pad = self.tokenizer.pad_token_id
        self._source = make_source(self.task, self.sampler, self.annotator, pad)

    def share(self, rank: int, world: int) -> None:
        """Makes this factory that of process ``rank`` of ``world``: each gets other samples."""
        self.rank, self.world = rank, world

    def skip(self, batches: int) -> None:
        """Puts so many batches behind: the next :meth:`take` begins there, as a run does that was
        interrupted."""
        self.taken = batches

    def __len__(self) -> int:
        """Batches of a run."""
        if self.examples is None and not self.task.online:
            return self.epochs * self._count(len(self.data))
        return self._count(self.examples or len(self.data) * self.epochs)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of a run, see the class."""
        if not self.task.online:
            self.taken = 0
        return self.take(len(self))

    def take(self, count: int) -> Iterator[Batch]:
        """The next ``count`` batches, pass after pass; of ``examples`` none beyond their number.

        Raises:
            ValueError: nobody is there to write the responses.
        """
        source = self._ready()
        chunks = self._chunks()
        for chunk in itertools.islice(chunks, self.taken, self.taken + count):
            self.taken += 1
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


# ---------------------------------------------------------------------- where responses come from


class Source(Protocol):
    """Makes a batch of examples."""

    def __call__(self, examples: Sequence[Example]) -> Batch: ...


class DataSource:
    """Batches of the data's own responses.

    Args:
        rewards: what an example's responses are worth, or None.
        pad_token_id: of the batches.
    """

    def __init__(
        self, rewards: Callable[[Example], tuple[float, ...] | None], pad_token_id: int | None
    ):
        self.rewards, self.pad_token_id = rewards, pad_token_id

    def __call__(self, examples: Sequence[Example]) -> Batch:
        return Batch([replace(e, rewards=self.rewards(e)) for e in examples], self.pad_token_id)


class ResponseSampler:
    """Samples responses of the policy, as text and tokens.

    Args:
        engine: such as :class:`fastrl.RolloutEngine`.
        tokenizer: of the policy.
        params: how to sample.
    """

    def __init__(self, engine: Any, tokenizer: Any, params: SamplingParams):
        self.engine, self.tokenizer, self.params = engine, tokenizer, params
        self.layout = layout_of(engine.model)
        self.stats: dict[str, float] = {}  # of the last call

    def __call__(
        self,
        examples: Sequence[Example],
        n: int = 1,
        seed: int | None = None,
        ids: Sequence[int] | None = None,
    ) -> tuple[list[Example], RolloutOutput]:
        """The examples with n sampled responses each, and what the engine says of these, example by
        example.

        Args:
            seed: of the draws; None takes one from torch's generator.
            ids: of the examples, which key the draws.
        """
        prompts = [torch.tensor(example.prompt_ids) for example in examples]
        params = replace(self.params, n=n)
        if seed is not None:
            params = replace(params, seed=seed)
        output = self.engine.generate(prompts, params, ids)
        self.stats = output.stats
        responses = [
            Response(
                self.layout.decode(self.tokenizer, prompts[i // n], row),
                tuple(row.tolist()),
                finished=reason != "length",
            )
            for i, (row, reason) in enumerate(
                zip(output.sequences, output.finish_reasons, strict=True)
            )
        ]
        sampled = [
            replace(example, responses=tuple(responses[i * n : (i + 1) * n]))
            for i, example in enumerate(examples)
        ]
        return sampled, output


class PolicySource:
    """Batches of the policy's responses, which an annotator judges.

    Args:
        sampler: of the responses.
        generations: responses per prompt: 1 has the annotator's score for its reward; of 2 the
            preferred one has 1.0, the other 0.0; 0.5 each where they are worth the same, or nothing
            can be said and their weights are 0.
    """

    def __init__(
        self,
        sampler: ResponseSampler,
        annotator: Any,
        generations: int,
        pad_token_id: int | None,
    ):
        self.sampler, self.annotator, self.pad_token_id = sampler, annotator, pad_token_id
        self.generations = generations

    def __call__(self, examples: Sequence[Example]) -> Batch:
        n = self.generations
        sampled, output = self.sampler(examples, n)
        judge = score_responses if n == 1 else compare_responses
        judged, scores = judge(self.annotator, sampled)
        batch = Batch(judged, self.pad_token_id)
        batch.scores = scores
        if output.logprobs_t1 is not None:
            batch.rollout_logprobs = [output.logprobs_t1[i::n] for i in range(n)]
        return batch


def score_responses(
    annotator: Any, examples: Sequence[Example]
) -> tuple[list[Example], list[list[float]]]:
    """Examples of one response each with the annotator's scores for rewards; and the scores."""
    scores = ask_scores(
        annotator, prompts_of(examples), texts_of(examples), columns_of(examples), ends_of(examples)
    )
    return [replace(e, rewards=(s,)) for e, s in zip(examples, scores, strict=True)], [scores]


def compare_responses(
    annotator: Any, examples: Sequence[Example]
) -> tuple[list[Example], list[list[float]] | None]:
    """Examples of two responses each with what the annotator prefers for rewards; and the scores by
    which it does, of the first and of the second responses, where there are any."""
    judged = [replace(e, rewards=(0.5, 0.5), weights=(1.0, 1.0)) for e in examples]
    # Two responses that are the same need no judge.
    asked = [i for i, e in enumerate(examples) if e.responses[0].text != e.responses[1].text]
    if not asked:
        return judged, None
    chosen = [examples[i] for i in asked]
    verdicts = ask_preferences(
        annotator,
        prompts_of(chosen),
        texts_of(chosen, 0),
        texts_of(chosen, 1),
        columns_of(chosen),
        (ends_of(chosen, 0), ends_of(chosen, 1)),
    )
    for i, first in zip(asked, verdicts, strict=True):
        if first is None:
            judged[i] = replace(judged[i], weights=(0.0, 0.0))
        else:
            judged[i] = replace(judged[i], rewards=(first, 1.0 - first))
    of_asked = getattr(annotator, "last_scores", None)
    if of_asked is None:
        return judged, None
    scores = [[0.0] * len(examples) for _ in range(2)]
    for i, *both in zip(asked, *of_asked, strict=True):
        scores[0][i], scores[1][i] = both
    return judged, scores


def prompts_of(examples: Sequence[Example]) -> list[str]:
    return [example.prompt for example in examples]


def texts_of(examples: Sequence[Example], i: int = 0) -> list[str]:
    """Of the examples' responses ``i``, 0 or 1."""
    return [example.responses[i].text for example in examples]


def ends_of(examples: Sequence[Example], i: int = 0) -> list[bool]:
    """Which of the examples' responses ``i`` no length has cut."""
    return [example.responses[i].finished for example in examples]


def scores_pairs(annotator: Any) -> bool:
    """Whether it compares responses by scores of theirs."""
    return hasattr(annotator, "last_scores")


def make_source(
    task: Task, sampler: ResponseSampler | None, annotator: Any, pad_token_id: int | None
) -> Source:
    """By the task."""
    if task.online:
        assert sampler is not None
        return PolicySource(sampler, annotator, task.generations, pad_token_id)
    if not task.rewards:
        return DataSource(lambda _: None, pad_token_id)
    return DataSource(_desired if task.data == FEEDBACK else _first_preferred, pad_token_id)


def _desired(example: Example) -> tuple[float, ...]:
    return (1.0 if example.desired else 0.0,)


def _first_preferred(example: Example) -> tuple[float, ...]:
    return 1.0, 0.0
