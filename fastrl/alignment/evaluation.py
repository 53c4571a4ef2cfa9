"""How a trainer's model does on held-out examples: by its loss, or by what an annotator says of the
responses that it writes now.

:func:`make_evaluation` chooses by the task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl.alignment.annotator import ask_preferences, ask_scores
from fastrl.alignment.batch import Batch, columns_of
from fastrl.alignment.batch_factory import (
    BatchFactory,
    ends_of,
    prompts_of,
    scores_pairs,
    texts_of,
)
from fastrl.alignment.losses import Loss


class Means:
    """Means of metrics over samples, or over batches where they are given by batches; fetched from
    the device when they are asked for."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Tensor]] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, values in metrics.items():
            self._seen.setdefault(name, []).append(values.detach().float().flatten())

    def take(self, accelerator: Any) -> dict[str, float]:
        """Over all processes, which all have seen the same metrics; begins anew."""
        names = sorted(self._seen)
        if not names:
            return {}
        joined = [torch.cat(self._seen[name]) for name in names]
        self._seen = {}
        sums = torch.stack([torch.stack([x.sum(), x.new_tensor(len(x))]) for x in joined])
        totals = accelerator.reduce(sums, reduction="sum").tolist()
        return {n: total / count for n, (total, count) in zip(names, totals, strict=True) if count}


class OfflineEvaluation:
    """Loss and metrics of the examples' own responses."""

    def __init__(self, factory: BatchFactory, loss: Loss):
        self.factory, self.loss = factory, loss

    @torch.no_grad()
    def __call__(self, policy: Any, reference: Any, accelerator: Any) -> dict[str, float]:
        means = Means()
        for batch, counts in self.batches():
            loss, metrics = self.loss(batch, policy, reference)
            found = {"loss": loss.expand(batch.size), **metrics}
            means.add(found if counts else {name: x.flatten()[:0] for name, x in found.items()})
        return means.take(accelerator)

    def batches(self) -> Iterator[tuple[Batch, bool]]:
        """This process's, and whether they count: one whose share is empty goes along with the
        others, whose losses may wait for it."""
        for _, examples in self.factory.in_order():
            yield self.factory.batch(examples or [self.factory.data[0]]), bool(examples)


@dataclass(frozen=True)
class Judged:
    """Responses to the held-out prompts, and what they are worth."""

    prompts: list[str]
    completions: list[str]
    rewards: list[float]


@dataclass
class OnlineEvaluation:
    """Responses written with one seed, and their rewards; or, where the annotator compares alone,
    how often they are preferred to those of the first evaluation."""

    factory: BatchFactory
    judged: list[Judged] = field(default_factory=list)  # one per evaluation, on this process

    def __call__(self, policy: Any, reference: Any, accelerator: Any) -> dict[str, float]:
        now = self._judge()
        self.judged.append(now)
        rewards = torch.tensor(now.rewards, dtype=torch.float64, device=accelerator.device)
        sums = torch.stack([rewards.new_tensor(len(rewards)), rewards.sum(), (rewards**2).sum()])
        count, total, squares = accelerator.reduce(sums, reduction="sum").tolist()
        mean = total / count
        spread = max(squares / count - mean**2, 0.0) * count / max(count - 1, 1)
        return {self.name: mean, f"{self.name}_sem": (spread / count) ** 0.5}

    @property
    def name(self) -> str:
        return "reward" if self._scores else "win_rate"

    @property
    def _scores(self) -> bool:
        """Whether the annotator's verdicts in training are scores, or come from them."""
        one = self.factory.task.generations == 1
        return one or scores_pairs(self.factory.annotator)

    def _judge(self) -> Judged:
        prompts: list[str] = []
        responses: list[str] = []
        rewards: list[float] = []
        sampler, annotator = self.factory.sampler, self.factory.annotator
        assert sampler is not None
        for ids, examples in self.factory.in_order():
            if not examples:
                continue
            # By their numbers in the data, an example's draws are those of any share of the work.
            sampled, _ = sampler(examples, 1, self.factory.seed, ids)
            texts, ends = texts_of(sampled), ends_of(sampled)
            asked, columns = prompts_of(examples), columns_of(examples)
            if self._scores:
                rewards += ask_scores(annotator, asked, texts, columns, ends)
            elif not self.judged:
                rewards += [0.5] * len(texts)
            else:
                first = self.judged[0].completions[len(responses) :][: len(texts)]
                verdicts = ask_preferences(annotator, asked, texts, first, columns)
                rewards += [0.5 if verdict is None else verdict for verdict in verdicts]
            prompts += asked
            responses += texts
        return Judged(prompts, responses, rewards)


def make_evaluation(factory: BatchFactory, loss: Loss) -> OfflineEvaluation | OnlineEvaluation:
    """By the task."""
    return OnlineEvaluation(factory) if factory.task.online else OfflineEvaluation(factory, loss)
