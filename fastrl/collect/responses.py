"""Responses to prompts, and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.data.prompts import Prompts
from fastrl.rewards.weighted import RewardBatch
from fastrl.rollout import RolloutOutput
from fastrl.rollout.kv_cache import Room
from fastrl.rollout.sampling_params import joined_statistics
from fastrl.run.processes import Processes


class ToolCalls(NamedTuple):
    """How often tools were called, and how many of the calls failed."""

    calls: int
    failures: int


@dataclass(frozen=True)
class Responses:
    """B responses, each with its prompt.

    Attributes:
        prompts: one for each response, as the model read it.
        rollout: their tokens, those of tools and environments among them, and what is known of
            them.
        texts: what they say.
        completions: the same as reward functions get it: texts, or messages behind chats.
        masks: bool, which of their tokens the policy wrote; None: all.
        tool_calls: of each response, how often it called tools; None: it had none to call.
    """

    prompts: Prompts
    rollout: RolloutOutput
    texts: list[str]
    completions: list[Any]
    masks: list[Tensor] | None = None
    tool_calls: list[ToolCalls] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def ended(self) -> list[bool]:
        """Whether each ends by itself, in EOS or at a stop."""
        return [reason in ("eos", "stop") for reason in self.rollout.finish_reasons]

    @property
    def written(self) -> list[Tensor]:
        """Of each response, which of its tokens the policy wrote, bool."""
        return all_written(self.rollout.sequences) if self.masks is None else self.masks

    def statistics(self) -> dict[str, float]:
        """Of the rollout, and of calls of tools."""
        found = dict(self.rollout.stats)
        if self.tool_calls is not None:
            calls, failures = map(sum, zip(*self.tool_calls, strict=True))
            found["tools/call_frequency"] = calls / len(self)
            found["tools/failure_frequency"] = failures / max(calls, 1)
        return found

    def joined(self, more: Responses) -> Responses:
        """With further responses behind, which came about in the same way. Times are sums, other
        statistics the first ones', of the whole batch."""
        rollout = RolloutOutput.joined([self.rollout, more.rollout])
        stats = {
            name: value + more.rollout.stats.get(name, 0.0) if name.startswith("time/") else value
            for name, value in self.rollout.stats.items()
        }
        return Responses(
            self.prompts.joined(more.prompts),
            replace(rollout, stats=stats),
            self.texts + more.texts,
            self.completions + more.completions,
            joined_masks([(x.rollout.sequences, x.masks) for x in (self, more)]),
            None if self.tool_calls is None else self.tool_calls + (more.tool_calls or []),
        )

    def select(self, order: Sequence[int]) -> Responses:
        """Some of the responses, in that order."""

        def some(column: list[Any]) -> list[Any]:
            return [column[i] for i in order]

        return replace(
            self,
            prompts=self.prompts.take(order),
            rollout=self.rollout.take(order),
            texts=some(self.texts),
            completions=some(self.completions),
            masks=None if self.masks is None else some(self.masks),
            tool_calls=None if self.tool_calls is None else some(self.tool_calls),
        )


@dataclass(frozen=True)
class Collected:
    """Responses with their rewards.

    Attributes:
        rewards: NaN for responses that are left out.
        penalties: for how responses ended, and for their length, [B] fp32.
        left_out: those that ended in NaN logits.
        seconds: that the rewards took.
        extra: columns that reward functions noted, None where they noted nothing of a response.
        rooms: for each response, that of the engine it was drawn by; of all processes' alone.
    """

    responses: Responses
    rewards: RewardBatch
    penalties: Tensor
    left_out: list[int] = field(default_factory=list)
    seconds: float = 0.0
    extra: dict[str, list[Any]] = field(default_factory=dict)
    rooms: Sequence[Room] = ()

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def scores(self) -> Tensor:
        """Rewards less penalties, [B] fp32."""
        return self.rewards.total.float() - self.penalties

    @property
    def has_token_rewards(self) -> bool:
        """Whether a reward function gave a number for each token."""
        return any(each is not None for each in self.rewards.of_tokens)

    def scores_of_tokens(self) -> list[Tensor]:
        """The scores of each response's tokens, [L] fp32 each; penalties, and rewards of whole
        responses, are the last token's."""
        scores, found = self.scores, []
        for i, response in enumerate(self.responses.rollout.sequences):
            of_tokens, given = torch.zeros(len(response)), self.rewards.of_tokens[i]
            if given is None:
                of_tokens[-1:] = scores[i]
            else:
                of_tokens.copy_(given)
                of_tokens[-1] -= self.penalties[i]
            found.append(of_tokens)
        return found

    def joined(self, more: Collected) -> Collected:
        """With further responses behind."""
        extra = dict[str, list[Any]]()
        for name in dict.fromkeys([*self.extra, *more.extra]):
            extra[name] = [
                value for part in (self, more) for value in part.extra.get(name, [None] * len(part))
            ]
        return Collected(
            self.responses.joined(more.responses),
            self.rewards.joined(more.rewards),
            torch.cat([self.penalties, more.penalties]),
            [*self.left_out, *(len(self) + i for i in more.left_out)],
            self.seconds + more.seconds,
            extra,
        )

    def select(self, order: list[int]) -> Collected:
        """Some of the responses, in that order."""
        places = {row: i for i, row in enumerate(order)}
        return replace(
            self,
            responses=self.responses.select(order),
            rewards=self.rewards.select(order),
            penalties=self.penalties[order],
            left_out=[places[i] for i in self.left_out if i in places],
            extra={name: [x[i] for i in order if i < len(x)] for name, x in self.extra.items()},
        )

    def of_all(self, processes: Processes, prompts: Prompts | None = None) -> Collected:
        """The responses of all processes, in the processes' order; their tokens, and what is known
        of these, in the main process alone, which keeps the ledger.

        Args:
            prompts: of all of them, where each process knows them; None: they are exchanged,
                without their columns.
        """
        own = self.responses
        if prompts is None:
            prompts = Prompts.of_parts(processes.objects(own.prompts.without_columns()))
        parts = processes.objects(
            (own.texts, own.tool_calls, own.rollout.stats, self.penalties, self.seconds)
        )
        texts, calls, stats, penalties, seconds = zip(*parts, strict=True)
        tokens = processes.objects_at_main((own.rollout.recorded(), own.masks))
        rollouts, masks = zip(*(tokens or [(own.rollout, own.masks)]), strict=True)
        responses = replace(
            own,
            prompts=prompts,
            rollout=replace(RolloutOutput.joined(rollouts), stats=joined_statistics(stats)),
            texts=[each for part in texts for each in part],
            completions=[],  # these and what follows are not told
            masks=joined_masks([(x.sequences, m) for x, m in zip(rollouts, masks, strict=True)]),
            tool_calls=None if own.tool_calls is None else [x for part in calls for x in part],
        )
        return Collected(
            responses,
            self.rewards.of_all(processes),
            torch.cat(penalties),
            seconds=max(seconds),
            rooms=[each.room for each in rollouts for _ in each.sequences],
        )


def joined_masks(
    parts: Sequence[tuple[Sequence[Tensor], list[Tensor] | None]],
) -> list[Tensor] | None:
    """Masks of responses one after the other, from parts with their tokens; None where no part has
    any."""
    if all(masks is None for _, masks in parts):
        return None
    return [mask for sequences, masks in parts for mask in masks or all_written(sequences)]


def all_written(sequences: Sequence[Tensor]) -> list[Tensor]:
    """Masks of responses that the policy wrote alone."""
    return [torch.ones(len(x), dtype=torch.bool) for x in sequences]
