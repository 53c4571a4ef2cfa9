"""Collects responses with their rewards, and replaces groups that have no spread of scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from fastrl.collect.respond import Asked, Respond
from fastrl.learn.dynamic_sampling import DynamicSampling
from fastrl.learn.nonfinite import NonFiniteNumbers, samples_left_out
from fastrl.learn.penalties import Penalties
from fastrl.rewards.weighted import RewardBatch
from fastrl.run.processes import Processes
from fastrl.samples import Samples

Judge = Callable[..., RewardBatch]  # is called as fastrl.rewards.weighted.Rewards is


class Collector:
    """Gets responses to prompts, and their rewards.

    Args:
        respond: writes the responses.
        rewards: judges the responses, except those that ended in NaN logits.
        ready: makes the context in which sampling does not wait for other processes.
        nonfinite: raises or warns where responses ended in NaN logits.
        also: returns what reward functions get beside a data set's columns.
        noted: returns the columns that reward functions noted since its last call.
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

    def __call__(self, asked: Asked) -> Samples | None:
        """This process's responses and rewards; None without prompts. All processes call it."""
        # Processes wait at both ends of ready(): it encloses shared_work(), which may break off.
        with self.ready(), self.processes.shared_work():
            if not len(asked.prompts):
                return None
            begin = time.perf_counter()
            responses = self.respond(asked)
            middle = time.perf_counter()
            if "time/rollout" not in responses.stats:
                tokens = sum(int(mask.sum()) for mask in responses.written)
                responses.stats |= {
                    "time/rollout": middle - begin,
                    "perf/rollout_tokens_per_second": tokens / (middle - begin),
                }
            left_out = samples_left_out(
                responses, self.nonfinite, lambda i: repr(responses.prompt_texts[i]), self.processes
            )
            rewards = self._judged(responses, left_out)
            places = range(len(responses))
            return replace(
                responses,
                left_out=[i in left_out for i in places],
                rewards=rewards.total,
                rewards_by_function=rewards.by_function,
                token_rewards=list(rewards.of_tokens),
                unjudged=[i in rewards.unjudged for i in places],
                penalties=self.penalties(responses.ended, list(map(len, responses.sequences))),
                noted={
                    name: [*column, *[None] * (len(responses) - len(column))]
                    for name, column in self.noted().items()
                },
                rooms=[responses.room] * len(responses),
                stats={
                    **responses.stats,
                    **rewards.counts(),
                    "time/reward": time.perf_counter() - middle,
                },
            )

    def _judged(self, responses: Samples, left_out: list[int]) -> RewardBatch:
        rewards = self.rewards(
            responses.prompts,
            responses.completions,
            [response.tolist() for response in responses.sequences],
            responses.columns,
            finished=[reason != "length" for reason in responses.finish_reasons],
            left_out=left_out,
            also=self.also(),
        )
        if rewards.nonfinite:
            self.nonfinite.scores_are_named()
        return rewards

    def resampled(
        self,
        samples: Samples,
        resampling: DynamicSampling,
        groups: int,
        take: Callable[[int], list[int]],
        prompts_of: Callable[[list[int]], Samples],
        seed: int,
    ) -> tuple[Samples, dict[int, int], dict[str, float]]:
        """Replaces groups without a spread of scores by groups of new prompts; returns what
        a call of :class:`fastrl.learn.dynamic_sampling.DynamicSampling` does.

        Args:
            groups: the number of groups of all processes.
            take: gets a count, and returns the numbers of as many new prompts.
            prompts_of: makes prompts from their numbers, each once per response of its group.
            seed: seeds the draws.
        """
        size = resampling.group_size

        def draw(numbers: list[int], keys: list[int]) -> Samples | None:
            return self(Asked(prompts_of(numbers), size, keys, seed))

        return resampling(samples, groups, take, draw)


def tool_statistics(samples: Samples) -> dict[str, float]:
    """Returns the tool calls per sample, and the share of the calls that failed; empty where the
    samples had no tools."""
    if samples.tool_calls is None:
        return {}
    calls, failures = map(sum, zip(*samples.tool_calls, strict=True))
    return {
        "tools/call_frequency": calls / len(samples),
        "tools/failure_frequency": failures / max(calls, 1),
    }
