"""From prompts to rewarded responses, and from groups without spread to others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fastrl.collect.respond import Asked, Respond
from fastrl.collect.responses import Collected, Responses
from fastrl.data.prompts import Prompts
from fastrl.learn.dynamic_sampling import DynamicSampling, Redraw
from fastrl.learn.nonfinite import NonFiniteNumbers, samples_left_out
from fastrl.learn.penalties import Penalties
from fastrl.rewards.weighted import RewardBatch
from fastrl.run.processes import Processes

Judge = Callable[..., RewardBatch]  # as fastrl.rewards.weighted.Rewards is called


class Collector:
    """Has prompts answered and the responses judged.

    Args:
        respond: answers.
        rewards: judges; responses that ended in NaN logits are not shown to it.
        ready: makes the context in which sampling does not wait for other processes.
        nonfinite: handles NaN logits.
        also: what reward functions get beside a data set's columns.
        noted: takes the columns that reward functions noted.
    """

    def __init__(
        self,
        respond: Respond,
        rewards: Judge,
        penalties: Penalties,
        processes: Processes,
        ready: Callable[[], AbstractContextManager[None]],
        nonfinite: NonFiniteNumbers,
        also: Callable[[], Mapping[str, Any]] = dict,
        noted: Callable[[], dict[str, list[Any]]] = dict,
    ):
        self.respond, self.rewards, self.penalties = respond, rewards, penalties
        self.processes, self.ready, self.nonfinite = processes, ready, nonfinite
        self.also, self.noted = also, noted

    def __call__(self, asked: Asked) -> Collected | None:
        """This process's responses; None where it has no prompt. All processes call it."""
        # What waits for all processes comes first: work that is broken off must not be within it.
        with self.ready(), self.processes.shared_work():
            if not len(asked.prompts):
                return None
            begin = time.perf_counter()
            responses = self.respond(asked)
            middle = time.perf_counter()
            if "time/rollout" not in responses.rollout.stats:
                tokens = sum(int(mask.sum()) for mask in responses.written)
                responses.rollout.stats |= {
                    "time/rollout": middle - begin,
                    "perf/rollout_tokens_per_second": tokens / (middle - begin),
                }
            left_out = samples_left_out(
                responses.rollout,
                self.nonfinite,
                lambda i: repr(responses.prompts.texts[i]),
                self.processes,
            )
            rewards = self._judged(responses, left_out)
            return Collected(
                responses,
                rewards,
                self.penalties(responses.ended, list(map(len, responses.rollout.sequences))),
                left_out,
                time.perf_counter() - middle,
                {
                    name: [*column, *[None] * (len(responses) - len(column))]
                    for name, column in self.noted().items()
                },
            )

    def _judged(self, responses: Responses, left_out: list[int]) -> RewardBatch:
        rewards = self.rewards(
            responses.prompts.said,
            responses.completions,
            [response.tolist() for response in responses.rollout.sequences],
            responses.prompts.columns,
            finished=[reason != "length" for reason in responses.rollout.finish_reasons],
            left_out=left_out,
            also=self.also(),
        )
        if rewards.nonfinite:
            self.nonfinite.scores_are_named()
        return rewards

    def resampled(
        self,
        collected: Collected,
        resampling: DynamicSampling,
        groups: int,
        take: Callable[[int], list[int]],
        prompts_of: Callable[[list[int]], Prompts],
        seed: int,
    ) -> tuple[Collected, dict[int, int], dict[str, float]]:
        """With groups of new prompts in the place of those without a spread of scores, see
        :class:`fastrl.learn.dynamic_sampling.DynamicSampling`, whose results these are.

        Args:
            groups: of all processes.
            take: gives the numbers of so many new prompts.
            prompts_of: makes one prompt for each response of such numbers.
            seed: of the draws.
        """
        size = resampling.group_size

        def draw(numbers: list[int], keys: list[int]) -> Collected | None:
            return self(Asked(prompts_of(numbers), size, keys, seed))

        redraw = Redraw(take, draw, lambda samples: samples.scores)
        return resampling(collected, groups, redraw)
