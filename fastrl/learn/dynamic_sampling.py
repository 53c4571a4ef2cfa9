"""Dynamic sampling: groups whose scores are all equal teach nothing, and give way to new prompts
(Yu et al., "DAPO", 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastrl.run.processes import Processes
from fastrl.samples import Samples


class DynamicSampling:
    """Replaces groups without spread by groups of new prompts, in at most ``rounds`` rounds: a
    round replaces new groups of the round before that have no spread; the last round's stay."""

    def __init__(self, group_size: int, rounds: int, processes: Processes):
        self.group_size, self.rounds, self.processes = group_size, rounds, processes

    def __call__(
        self,
        samples: Samples,
        groups: int,
        take: Callable[[int], list[int]],
        draw: Callable[[list[int], list[int]], Samples | None],
    ) -> tuple[Samples, dict[int, int], dict[str, float]]:
        """This process's samples; the new prompts by the numbers of the groups, of all processes,
        that they replaced; and statistics, {} where ``rounds`` is 0.

        Args:
            samples: this process's samples.
            groups: the number of groups of all processes.
            take: returns the numbers of as many new prompts as it is called with.
            draw: returns this process's new samples, with rewards, from the numbers of prompts and
                the keys of their draws; None where there are no prompts.
        """
        if not self.rounds:
            return samples, {}, {}
        newest, replaced, rounds = dict[int, int](), 0, 0
        shares, index = self.processes.shares(range(groups)), self.processes.index
        for _ in range(self.rounds):
            flat = self.processes.objects(without_spread(samples.scores, self.group_size))
            if not any(flat):
                break
            count = sum(map(len, flat))
            new, keys = take(count), range(groups + replaced, groups + replaced + count)
            first = sum(map(len, flat[:index]))
            mine = slice(first, first + len(flat[index]))
            drawn = draw(new[mine], list(keys[mine]))
            if drawn is not None:
                order = in_their_places(len(samples), flat[index], self.group_size)
                samples = samples.followed_by(drawn).select(order)
            places = [share[j] for share, chosen in zip(shares, flat, strict=True) for j in chosen]
            newest |= zip(places, new, strict=True)
            replaced, rounds = replaced + count, rounds + 1
        metrics = {"groups/replaced": float(replaced), "groups/sampling_rounds": float(rounds)}
        return samples, newest, metrics


def without_spread(scores: Tensor, size: int) -> list[int]:
    """Numbers of the groups, of ``size`` scores each among [B], with equal scores, NaN left out."""
    groups = scores.view(-1, size)
    high = groups.nan_to_num(nan=-torch.inf).amax(-1)
    low = groups.nan_to_num(nan=torch.inf).amin(-1)
    return (high <= low).nonzero()[:, 0].tolist()


def in_their_places(count: int, groups: Sequence[int], size: int) -> list[int]:
    """The indices that put the samples behind the first ``count`` in the places of ``groups``."""
    order = list(range(count))
    for i, group in enumerate(groups):
        for j in range(size):
            order[group * size + j] = count + i * size + j
    return order
