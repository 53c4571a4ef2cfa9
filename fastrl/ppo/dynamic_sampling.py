"""Dynamic sampling: groups whose scores are all equal teach nothing, and give way to new prompts
(Yu et al., "DAPO", 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastrl.ppo.ledger import RewardedSamples
from fastrl.rewards.weighted import RewardBatch
from fastrl.rollout import RolloutOutput
from fastrl.run.processes import Processes


class Redraw(NamedTuple):
    """How groups of new prompts come about.

    Attributes:
        take: gives the numbers of so many new prompts.
        draw: samples this process's responses to prompts, and rewards them; with the keys of their
            draws; None of no prompts.
        scores: [B] of samples.
    """

    take: Callable[[int], list[int]]
    draw: Callable[[list[int], list[int]], RewardedSamples | None]
    scores: Callable[[RewardedSamples], Tensor]


class DynamicSampling:
    """Groups without spread are replaced by groups of new prompts, and what of these has no spread
    again, in at most ``rounds`` rounds; what is left then stays."""

    def __init__(self, group_size: int, rounds: int, processes: Processes):
        self.group_size, self.rounds, self.processes = group_size, rounds, processes

    def __call__(
        self, samples: RewardedSamples, chosen: list[int], redraw: Redraw
    ) -> tuple[RewardedSamples, list[int], dict[str, float]]:
        """This process's samples, the prompts of all processes' groups, and statistics; none
        without a round.

        Args:
            samples: this process's.
            chosen: the prompts of all processes' groups.
        """
        if not self.rounds:
            return samples, chosen, {}
        chosen, replaced, rounds = list(chosen), 0, 0
        shares = self.processes.shares(range(len(chosen)))
        keys = len(chosen)  # of the draws of prompts, all different
        for _ in range(self.rounds):
            flat = self.processes.objects(without_spread(redraw.scores(samples), self.group_size))
            if not any(flat):
                break
            count = sum(map(len, flat))
            new = redraw.take(count)
            first = sum(map(len, flat[: self.processes.index]))
            mine = slice(first, first + len(flat[self.processes.index]))
            drawn = redraw.draw(new[mine], list(range(keys, keys + count))[mine])
            if drawn is not None:
                samples = with_groups(samples, flat[self.processes.index], drawn, self.group_size)
            places = [share[j] for share, own in zip(shares, flat, strict=True) for j in own]
            for place, prompt in zip(places, new, strict=True):
                chosen[place] = prompt
            keys, replaced, rounds = keys + count, replaced + count, rounds + 1
        found = {"groups/replaced": float(replaced), "groups/sampling_rounds": float(rounds)}
        return samples, chosen, found


def without_spread(scores: Tensor, size: int) -> list[int]:
    """The groups of ``size`` scores [B] each that are all equal, but for those that are NaN."""
    groups = scores.view(-1, size)
    high = groups.nan_to_num(nan=-torch.inf).amax(-1)
    low = groups.nan_to_num(nan=torch.inf).amin(-1)
    return (high <= low).nonzero()[:, 0].tolist()


def with_groups(
    samples: RewardedSamples, groups: Sequence[int], drawn: RewardedSamples, size: int
) -> RewardedSamples:
    """The samples with those of ``drawn`` in the place of some groups."""
    order = list(range(len(samples.completions)))
    for i, group in enumerate(groups):
        for j in range(size):
            order[group * size + j] = len(samples.completions) + i * size + j
    rewards, more = samples.rewards, drawn.rewards
    return replace(
        samples,
        prompts=samples.prompts.joined(drawn.prompts).take(order),
        completions=[(samples.completions + drawn.completions)[i] for i in order],
        rollout=_in_order(samples.rollout, drawn.rollout, order),
        rewards=RewardBatch(
            torch.cat([rewards.total, more.total])[order],
            {
                name: torch.cat([of_each, more.by_function[name]])[order]
                for name, of_each in rewards.by_function.items()
            },
            {name: rewards.seconds[name] + more.seconds[name] for name in rewards.seconds},
            rewards.nonfinite + more.nonfinite,
            rewards.retries + more.retries,
            [(*rewards.of_tokens, *more.of_tokens)[i] for i in order],
        ),
        seconds=samples.seconds + drawn.seconds,
    )


def _in_order(first: RolloutOutput, second: RolloutOutput, order: Sequence[int]) -> RolloutOutput:
    """Times are sums; other statistics are the first rollout's, of the whole batch."""
    stats = {
        name: value + second.stats.get(name, 0.0) if name.startswith("time/") else value
        for name, value in first.stats.items()
    }
    return replace(RolloutOutput.joined([first, second]).take(order), stats=stats)
