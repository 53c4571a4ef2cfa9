"""Where the responses and rewards of a batch come from: the data, or the policy and an annotator.

:func:`make_source` chooses by the task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fastrl.alignment.annotator import ask_preferences, ask_scores
from fastrl.alignment.batch import Batch, Sample
from fastrl.alignment.tasks import Task
from fastrl.data.columns import FEEDBACK
from fastrl.data.examples import Example, Response
from fastrl.models.layout import layout_of
from fastrl.rollout import RolloutOutput, SamplingParams

Verdict = tuple[tuple[float, ...], tuple[float, ...]]  # rewards and weights of the responses
Scores = list[list[float]]  # by generation


class Source(Protocol):
    """Makes a batch of examples."""

    def __call__(self, examples: Sequence[Example]) -> Batch: ...


class DataSource:
    """Responses and rewards are the data's.

    Args:
        rewards: what an example's responses are worth, or None.
        pad_token_id: of the batches.
    """

    def __init__(
        self, rewards: Callable[[Example], tuple[float, ...] | None], pad_token_id: int | None
    ):
        self.rewards, self.pad_token_id = rewards, pad_token_id

    def __call__(self, examples: Sequence[Example]) -> Batch:
        samples = [Sample(e, e.responses, self.rewards(e)) for e in examples]
        return Batch(samples, self.pad_token_id)


class Writer:
    """Responses of the policy, as text and tokens.

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
    ) -> tuple[list[tuple[Response, ...]], RolloutOutput]:
        """n responses per example, and what the engine says of them, example by example.

        Args:
            seed: of the draws; None takes one from torch's generator.
            ids: of the examples, which key the draws.
        """
        prompts = [torch.tensor(example.prompt_ids) for example in examples]
        params = dataclasses.replace(self.params, n=n)
        if seed is not None:
            params = dataclasses.replace(params, seed=seed)
        output = self.engine.generate(prompts, params, ids)
        self.stats = output.stats
        responses = [
            Response(self.layout.decode(self.tokenizer, prompts[i // n], row), tuple(row.tolist()))
            for i, row in enumerate(output.sequences)
        ]
        return [tuple(responses[i : i + n]) for i in range(0, len(responses), n)], output


class PolicySource:
    """One response per prompt, with the annotator's score."""

    generations = 1

    def __init__(self, writer: Writer, annotator: Any, pad_token_id: int | None):
        self.writer, self.annotator, self.pad_token_id = writer, annotator, pad_token_id

    def __call__(self, examples: Sequence[Example]) -> Batch:
        written, output = self.writer(examples, self.generations)
        judged, scores = self._judged(examples, written)
        samples = [
            Sample(example, responses, rewards, weights)
            for example, responses, (rewards, weights) in zip(
                examples, written, judged, strict=True
            )
        ]
        batch = Batch(samples, self.pad_token_id)
        if output.logprobs_t1 is not None:
            n = self.generations
            batch.known["logprobs"] = [output.logprobs_t1[i::n] for i in range(n)]
        if scores is not None:
            batch.known["scores"] = [list(torch.tensor(side)) for side in scores]
        return batch

    def _judged(
        self, examples: Sequence[Example], written: list[tuple[Response, ...]]
    ) -> tuple[list[Verdict], Scores | None]:
        """Rewards and weights of each example's responses; and their scores, where there are any,
        a list per generation."""
        texts = [responses[0].text for responses in written]
        scores = ask_scores(self.annotator, prompts_of(examples), texts, columns_of(examples))
        return [((score,), (1.0,)) for score in scores], [scores]


class PairSource(PolicySource):
    """Two responses per prompt, of which the annotator prefers one: its reward is 1.0, the other's
    0.0; 0.5 each where they are worth the same, or nothing can be said and their weights are 0."""

    generations = 2

    def _judged(
        self, examples: Sequence[Example], written: list[tuple[Response, ...]]
    ) -> tuple[list[Verdict], Scores | None]:
        # Two responses that are the same need no judge.
        asked = [i for i, (one, two) in enumerate(written) if one.text != two.text]
        judged: list[Verdict] = [((0.5, 0.5), (1.0, 1.0))] * len(written)
        scores: Scores = [[0.0] * len(written) for _ in range(2)]
        if not asked:
            return judged, None
        chosen = [examples[i] for i in asked]
        firsts, seconds = ([written[i][side].text for i in asked] for side in (0, 1))
        verdicts = ask_preferences(
            self.annotator, prompts_of(chosen), firsts, seconds, columns_of(chosen)
        )
        for i, first in zip(asked, verdicts, strict=True):
            if first is None:
                judged[i] = (0.5, 0.5), (0.0, 0.0)
            else:
                judged[i] = (first, 1.0 - first), (1.0, 1.0)
        of_asked = getattr(self.annotator, "last_scores", None)
        if of_asked is None:
            return judged, None
        for i, *both in zip(asked, *of_asked, strict=True):
            scores[0][i], scores[1][i] = both
        return judged, scores


def scores_pairs(annotator: Any) -> bool:
    """Whether it compares responses by scores of theirs."""
    return hasattr(annotator, "last_scores")


def make_source(
    task: Task, writer: Writer | None, annotator: Any, pad_token_id: int | None
) -> Source:
    """By the task."""
    if task.online:
        assert writer is not None
        kind = PairSource if task.generations == 2 else PolicySource
        return kind(writer, annotator, pad_token_id)
    if not task.rewards:
        return DataSource(lambda _: None, pad_token_id)
    return DataSource(_desired if task.data == FEEDBACK else _first_preferred, pad_token_id)


def _desired(example: Example) -> tuple[float, ...]:
    return (1.0 if example.desired else 0.0,)


def _first_preferred(example: Example) -> tuple[float, ...]:
    return 1.0, 0.0


def prompts_of(examples: Sequence[Example]) -> list[str]:
    return [example.prompt for example in examples]


def columns_of(examples: Sequence[Example]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for example in examples for name in example.columns)
    return {name: [example.columns.get(name) for example in examples] for name in names}
