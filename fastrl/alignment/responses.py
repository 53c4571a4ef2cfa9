"""Responses that the policy writes for online tasks, and what an annotator says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fastrl.alignment.annotator import ask_preferences, ask_scores
from fastrl.alignment.batch import columns_of
from fastrl.data.chat import TextOrMessages, as_answer
from fastrl.data.examples import Example, Response
from fastrl.models.layout import layout_of
from fastrl.rollout import GenerateEngine, SamplingParams
from fastrl.samples import Samples


class ResponseSampler:
    """Samples responses of the policy, as text and tokens.

    Args:
        engine: generates the responses, such as :class:`fastrl.RolloutEngine`.
        tokenizer: the policy's tokenizer.
        params: how to sample.
        process: the number of this process.
    """

    def __init__(self, engine: Any, tokenizer: Any, params: SamplingParams, process: int = 0):
        self.engine, self.tokenizer, self.params = engine, tokenizer, params
        self.process = process
        self.layout = layout_of(engine.model)
        self.stats: dict[str, float] = {}  # statistics of the last call

    def __call__(
        self,
        examples: Sequence[Example],
        n: int = 1,
        seed: int | None = None,
        ids: Sequence[int] | None = None,
    ) -> tuple[list[Example], Samples]:
        """Returns the examples with ``n`` sampled responses each, and the engine's output, whose
        sequences follow the examples' order.

        Args:
            seed: seeds the draws; None: the seed of ``params`` does, or else torch's generator.
            ids: the examples' numbers, which with the seed key a RolloutEngine's draws.
        """
        prompts = [torch.tensor(example.prompt_ids) for example in examples]
        params = replace(self.params, n=n)
        if seed is not None:
            params = replace(params, seed=seed)
        if self.process and params.seed is not None and isinstance(self.engine, GenerateEngine):
            params = replace(params, seed=params.seed ^ self.process)  # ids do not key its draws
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


def score_responses(
    annotator: Any, examples: Sequence[Example]
) -> tuple[list[Example], list[list[float]]]:
    """Returns the examples, of one response each, with scores as rewards; and [the scores]."""
    scores = ask_scores(
        annotator,
        prompts_of(examples),
        answers_of(examples),
        columns_of(examples),
        finished_of(examples),
    )
    return [replace(e, rewards=(s,)) for e, s in zip(examples, scores, strict=True)], [scores]


def compare_responses(
    annotator: Any, examples: Sequence[Example]
) -> tuple[list[Example], list[list[float]] | None]:
    """Returns the examples, of two responses each, with the annotator's preferences as rewards; and
    its scores of the first and of the second responses, or None if it gave no scores.

    The first response has the preference p in [0, 1] as its reward, the second 1 - p; both have 0.5
    where the annotator has no opinion, which also sets their weights to 0. Of two equal texts it is
    not asked: they have the rewards 0.5, the weights 1 and the scores 0.
    """
    judged = [replace(e, rewards=(0.5, 0.5), weights=(1.0, 1.0)) for e in examples]
    asked = [i for i, e in enumerate(examples) if e.responses[0].text != e.responses[1].text]
    scores = [[0.0] * len(examples) for _ in range(2)]
    if not asked:
        return judged, scores if hasattr(annotator, "last_scores") else None
    chosen = [examples[i] for i in asked]
    preferences = ask_preferences(
        annotator,
        prompts_of(chosen),
        answers_of(chosen, 0),
        answers_of(chosen, 1),
        columns_of(chosen),
        (finished_of(chosen, 0), finished_of(chosen, 1)),
    )
    for i, preference in zip(asked, preferences, strict=True):
        if preference is None:
            judged[i] = replace(judged[i], weights=(0.0, 0.0))
        else:
            judged[i] = replace(judged[i], rewards=(preference, 1.0 - preference))
    asked_scores = getattr(annotator, "last_scores", None)
    if asked_scores is None:
        return judged, None
    for i, *both in zip(asked, *asked_scores, strict=True):
        scores[0][i], scores[1][i] = both
    return judged, scores


def prompts_of(examples: Sequence[Example]) -> list[TextOrMessages]:
    """The examples' prompts as annotators get them: texts, or lists of messages."""
    return [example.said for example in examples]


def answers_of(examples: Sequence[Example], i: int = 0) -> list[TextOrMessages]:
    """The examples' responses ``i``, 0 or 1: texts, or lists of messages where prompts are."""
    return [as_answer(example.said, example.responses[i].text) for example in examples]


def finished_of(examples: Sequence[Example], i: int = 0) -> list[bool]:
    """Which of the examples' responses ``i`` were not cut by a length limit."""
    return [example.responses[i].finished for example in examples]
