"""Evaluation on held-out examples: by the loss, or by an annotator of new responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastrl.alignment.annotator import ask_preferences, ask_scores
from fastrl.alignment.batch import Batch, columns_of
from fastrl.alignment.batch_factory import BatchFactory
from fastrl.alignment.losses import Loss
from fastrl.alignment.losses.base import output_of
from fastrl.alignment.responses import answers_of, finished_of, prompts_of
from fastrl.data.chat import as_answer
from fastrl.rollout.sampling_params import joined_statistic
from fastrl.run.callbacks import Samples
from fastrl.run.processes import Processes

ACCURACY = "rewards/accuracies"


class Means:
    """Means of metrics over all elements that were added, kept on the device until asked for."""

    def __init__(self) -> None:
        self._seen: dict[str, list[Tensor]] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        for name, values in metrics.items():
            self._seen.setdefault(name, []).append(values.detach().float().flatten())

    def lengths(self) -> dict[str, int]:
        """How often each metric was added, for :meth:`cut`."""
        return {name: len(values) for name, values in self._seen.items()}

    def cut(self, lengths: dict[str, int]) -> None:
        """Forgets what was added since the lengths were these."""
        self._seen = {name: self._seen[name][:count] for name, count in lengths.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: torch.cat(values) for name, values in self._seen.items()}

    def load_state_dict(self, state: dict[str, Tensor], device: Any) -> None:
        self._seen = {name: [values.to(device)] for name, values in state.items()}

    def take(self, accelerator: Any, sem_of: Sequence[str] = ()) -> dict[str, float]:
        """The means over all processes, which must have added the same metrics; starts anew.

        Args:
            sem_of: metrics whose standard error is given too, as NAME_sem.
        """
        names = sorted(self._seen)
        if not names:
            return {}
        joined = [torch.cat(self._seen[name]) for name in names]
        self._seen = {}
        sums = torch.stack(
            [torch.stack([x.new_tensor(len(x)), x.sum(), x.square().sum()]) for x in joined]
        )
        totals = accelerator.reduce(sums, reduction="sum").tolist()
        found = {}
        for name, (count, total, squares) in zip(names, totals, strict=True):
            if count:
                found[name] = total / count
                if name in sem_of:
                    found[f"{name}_sem"] = standard_error(count, total, squares)
        return found


def standard_error(count: float, total: float, squares: float) -> float:
    """Of a mean, s/√n with s² = Σ(x - x̄)²/(n - 1), from n, Σx and Σx²; 0 for one element."""
    if count < 2:
        return 0.0
    return math.sqrt(max(squares - total**2 / count, 0.0) / (count - 1) / count)


class OfflineEvaluation:
    """Loss and metrics on the responses in the data."""

    def __init__(self, factory: BatchFactory, loss: Loss, processes: Processes):
        self.factory, self.loss, self.processes = factory, loss, processes

    @torch.no_grad()
    def __call__(self, policy: Any, reference: Any, accelerator: Any) -> dict[str, float]:
        means = Means()
        for batch in self.batches():
            loss, metrics = output_of(self.loss, batch, policy, reference)
            means.add(that_count({"loss": loss.expand(batch.size), **metrics}, batch))
        return means.take(accelerator, sem_of=[ACCURACY])

    def batches(self) -> Iterator[Batch]:
        """Yields this process's batches."""
        for chunk in self.factory.in_order():
            batch = self.factory.share_of(chunk)
            if self.loss.reads_all:
                batch.gather(self.processes)
            yield batch


def that_count(metrics: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """The metrics of a batch; without their elements for one whose samples do not count."""
    return metrics if batch.places else {name: x.flatten()[:0] for name, x in metrics.items()}


def joined_statistics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Statistics of all processes from those of each: an annotator's counts add up, those of
    rollouts are joined as those of :class:`fastrl.rollout.RolloutOutput`."""
    return {
        name: sum(part[name] for part in parts)
        if name.startswith("annotator/")
        else joined_statistic(name, [part[name] for part in parts])
        for name in parts[0]
        if all(name in part for part in parts)
    }


@dataclass
class OnlineEvaluation:
    """The mean reward of responses to held-out prompts; or, with an annotator that only compares,
    how often they are preferred to those of the first evaluation. All evaluations sample with the
    same random numbers."""

    factory: BatchFactory
    processes: Processes
    # Of the first evaluation and the last, of all processes.
    judged: list[Samples] = field(default_factory=list)

    def __call__(self, policy: Any, reference: Any, accelerator: Any) -> dict[str, float]:
        with self.processes.shared_work():
            own = self._judge()
            # Read here, or they would be counted among those of the next batch to learn from.
            counts = self.factory.annotator.statistics()
        parts = self.processes.objects((own, counts))
        judged = sorted(row for rows, _ in parts for row in rows)
        _, prompts, completions, rewards = map(list, zip(*judged, strict=True))
        self.judged[1:] = [Samples(prompts, completions, rewards)]
        count, total, squares = len(rewards), sum(rewards), sum(x**2 for x in rewards)
        sem = standard_error(count, total, squares)
        counts = joined_statistics([each for _, each in parts])
        return {self.name: total / count, f"{self.name}_sem": sem, **counts}

    @property
    def name(self) -> str:
        return "reward" if self._scores else "win_rate"

    @property
    def _scores(self) -> bool:
        """Whether the annotator scores responses, or compares two by scores."""
        return self.factory.task.generations == 1 or hasattr(self.factory.annotator, "last_scores")

    def _judge(self) -> list[tuple[int, str, str, float]]:
        """Index, prompt, response and reward of this process's examples."""
        found: list[tuple[int, str, str, float]] = []
        sampler, annotator = self.factory.sampler, self.factory.annotator
        assert sampler is not None
        for chunk in self.factory.in_order():
            ids = [chunk[i] for i in self.factory.own(chunk)]
            if not ids:
                continue
            examples = [self.factory.data[i] for i in ids]
            # Keyed by index, an example's random numbers are the same however many processes run.
            sampled, _ = sampler(examples, 1, self.factory.seed, ids)
            asked, answers = prompts_of(examples), answers_of(sampled)
            columns = columns_of(examples)
            if self._scores:
                rewards = ask_scores(annotator, asked, answers, columns, finished_of(sampled))
            elif not self.judged:
                rewards = [0.5] * len(answers)
            else:
                texts = [self.judged[0].completions[i] for i in ids]
                first = list(map(as_answer, asked, texts))
                verdicts = ask_preferences(annotator, asked, answers, first, columns)
                rewards = [0.5 if verdict is None else verdict for verdict in verdicts]
            prompts = [example.prompt for example in examples]
            responses = [example.responses[0].text for example in sampled]
            found += zip(ids, prompts, responses, rewards, strict=True)
        return found
