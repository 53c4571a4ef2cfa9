"""Evaluation on held-out examples: by the loss, or by an annotator of new responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from fastrl.run.callbacks import ShownSamples
from fastrl.run.metric_means import MetricMeans, standard_error
from fastrl.run.processes import Processes
from fastrl.samples import joined_statistics

ACCURACY = "rewards/accuracies"


class OfflineEvaluation:
    """Loss and metrics on the responses in the data."""

    def __init__(self, factory: BatchFactory, loss: Loss, processes: Processes):
        self.factory, self.loss, self.processes = factory, loss, processes

    @torch.no_grad()
    def __call__(self, policy: Any, reference: Any) -> dict[str, float]:
        means = MetricMeans()
        for batch in self.batches():
            loss, metrics = output_of(self.loss, batch, policy, reference)
            means.pool_values(that_count({"loss": loss.expand(batch.size), **metrics}, batch))
        return taken(means, self.processes, [ACCURACY])

    def batches(self) -> Iterator[Batch]:
        """Yields this process's batches."""
        for chunk in self.factory.in_order():
            batch = self.factory.share_of(chunk)
            if self.loss.reads_all:
                batch.gather(self.processes)
            yield batch


def taken(means: MetricMeans, processes: Processes, sem_of: Sequence[str] = ()) -> dict[str, float]:
    """Takes the means from ``means``, and the standard errors of the metrics ``sem_of``; returns by
    name those that have a number."""
    measured = means.take(processes, sem_of)
    return {name: value for name, value in sorted(measured.items()) if value is not None}


def that_count(metrics: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Returns the metrics of a batch; empty tensors where the process has no samples in it."""
    return metrics if batch.places else {name: x.flatten()[:0] for name, x in metrics.items()}


@dataclass
class OnlineEvaluation:
    """The mean reward of responses to held-out prompts; or, with an annotator that only compares,
    how often they are preferred to those of the first evaluation. All evaluations sample with the
    same random numbers."""

    factory: BatchFactory
    processes: Processes
    # Samples of the first evaluation and of the last, of all processes.
    judged: list[ShownSamples] = field(default_factory=list)

    def __call__(self, policy: Any, reference: Any) -> dict[str, float]:
        with self.processes.shared_work():
            judged_here = self._judge()
            # Reading resets the counts, which the next training batch's would otherwise include.
            counts = self.factory.annotator.statistics()
        parts = self.processes.objects((judged_here, counts))
        judged = sorted(row for rows, _ in parts for row in rows)
        _, *columns = map(list, zip(*judged, strict=True))
        self.judged[1:] = [ShownSamples(*columns)]
        rewards = self.judged[-1].rewards
        count, total, squares = len(rewards), sum(rewards), sum(x**2 for x in rewards)
        sem = standard_error(count, total, squares)
        counts = joined_statistics([each for _, each in parts])
        return {self.name: total / count, f"{self.name}_sem": sem, **counts}

    @property
    def name(self) -> str:
        """The name of the metric that the evaluation computes."""
        return "reward" if self._scores else "win_rate"

    @property
    def _scores(self) -> bool:
        """Whether the annotator has scores, of each response or of the two that it compares."""
        return self.factory.task.generations == 1 or hasattr(self.factory.annotator, "last_scores")

    def _judge(self) -> list[tuple[int, str, str, float, bool]]:
        """Judges new responses to this process's examples; returns each one's index, prompt,
        response, reward, and whether the response has ended."""
        judged: list[tuple[int, str, str, float, bool]] = []
        sampler, annotator = self.factory.sampler, self.factory.annotator
        assert sampler is not None
        for chunk in self.factory.in_order():
            ids = [chunk[i] for i in self.factory.own(chunk)]
            if not ids:
                continue
            examples = [self.factory.data[i] for i in ids]
            # A RolloutEngine keys draws by index: they are the same however many processes run.
            sampled, _ = sampler(examples, 1, self.factory.seed, ids)
            prompts, answers = prompts_of(examples), answers_of(sampled)
            columns, finished = columns_of(examples), finished_of(sampled)
            if self._scores:
                rewards = ask_scores(annotator, prompts, answers, columns, finished)
            elif not self.judged:
                rewards = [0.5] * len(answers)
            else:
                before = self.judged[0]
                first = list(map(as_answer, prompts, [before.completions[i] for i in ids]))
                # Earlier versions' checkpoints lack ``finished``: all responses count as ended.
                ended = [before.finished is None or before.finished[i] for i in ids]
                verdicts = ask_preferences(
                    annotator, prompts, answers, first, columns, (finished, ended)
                )
                rewards = [0.5 if verdict is None else verdict for verdict in verdicts]
            texts = [example.prompt for example in examples]
            responses = [example.responses[0].text for example in sampled]
            judged += zip(ids, texts, responses, rewards, finished, strict=True)
        return judged
