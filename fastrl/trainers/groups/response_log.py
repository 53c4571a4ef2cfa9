"""The log of responses of GRPOTrainer and RLOOTrainer: metrics by TRL's names, and a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.collect.completions_table import CompletionsTable
from fastrl.run.callbacks import ShownSamples
from fastrl.run.metric_means import MetricMeans, mean_of
from fastrl.run.processes import Processes
from fastrl.samples import Samples
from fastrl.trainers.groups.judged import nanstd


class ResponseLog:
    """Metrics of the responses since the last log, and the table of the latest ones.

    Args:
        args: an :class:`fastrl.trainers.groups.online_config.OnlineConfig`.
        names: the reward functions' names.
        metrics: the metrics by mode, "train" and "eval".

    Attributes:
        table: the latest responses, whose texts the main process alone has.
    """

    def __init__(
        self,
        args: Any,
        names: Sequence[str],
        metrics: dict[str, MetricMeans],
        processes: Processes,
    ):
        self.args, self.names, self.processes = args, list(names), processes
        self.metrics = metrics
        self.table = CompletionsTable(args.generation_batch_size)
        self._shown = ShownSamples([], [], [])
        self._columns: defaultdict[str, list] = defaultdict(list)
        self._numbers: defaultdict[str, list[float]] = defaultdict(list)

    # Reward functions get note_column and note_number as log_extra and log_metric.

    def note_column(self, column: str, values: list, places: Sequence[int] | None = None) -> None:
        """Adds a column that a reward function noted.

        Args:
            places: indices of the responses that the function was called for; others get None. If
                there are more or fewer values than indices, the values are added as they are.
        """
        noted = self._columns[column]
        if places is None or len(places) != len(values):
            noted.extend(values)
            return
        noted.extend([None] * (max(places, default=-1) + 1 - len(noted)))
        for place, value in zip(places, values, strict=True):
            noted[place] = value

    def note_number(self, name: str, value: float) -> None:
        """Adds a number that a reward function noted; its mean is logged."""
        self._numbers[name].append(value)

    def take_columns(self) -> dict[str, list[Any]]:
        """The columns added by :meth:`note_column` since the last call."""
        noted = dict(self._columns)
        self._columns.clear()
        return noted

    # A trainer adds its responses by these.

    def lengths(self, samples: Samples, masks: Sequence[Tensor], mode: str) -> tuple[int, float]:
        """Adds metrics of the lengths of all processes' responses, and of their calls of tools.

        Args:
            masks: for each response of this process, which of its n tokens are learned, [n] bool.

        Returns:
            over all processes, the number of tokens of prompts and responses, and of learned ones.
        """
        rows = [
            [len(prompt), int(written.sum()), not ended, int(mask.sum())]
            for prompt, written, ended, mask in zip(
                samples.prompt_ids, samples.written, samples.ended, masks, strict=True
            )
        ]
        table = self.processes.joined(torch.tensor(rows), [len(rows)] * self.processes.count)
        prompts, lengths, cut, learned = table.t()
        metrics, cut = self.metrics[mode], cut.bool()
        for name, counts in (("", lengths), ("terminated_", lengths[~cut])):
            mean = float(counts.float().mean())
            metrics.add_number(f"completions/mean_{name}length", mean, len(counts))
            metrics.add_extreme(f"completions/min_{name}length", counts, False)
            metrics.add_extreme(f"completions/max_{name}length", counts, True)
        metrics.add_number("completions/clipped_ratio", float(cut.float().mean()), len(cut))
        if samples.tool_calls is not None:
            calls, failures = torch.tensor(samples.tool_calls, dtype=torch.float32).sum(0)
            count = torch.tensor(float(len(samples)))
            metrics.add({"tools/call_frequency": (calls, count)})
            metrics.add({"tools/failure_frequency": (failures, calls)}, of_none=0.0)
        return int(prompts.sum() + lengths.sum()), float(learned.sum())

    def rewards(self, judged: Samples, spreadless: Tensor, mode: str) -> None:
        """Adds metrics of rewards.

        Args:
            spreadless: for each group or sample, whether the rewards of the group are equal, or
                those of the whole batch where advantages are divided by the batch's deviation.
        """
        if not self.names:
            return
        metrics, values = self.metrics[mode], self._numbers
        pairs = zip(self.names, judged.rewards_by_function.values(), strict=True)
        columns = {f"rewards/{name}/": column for name, column in pairs}
        for name, column in columns.items():
            count = int((~column.isnan()).sum())
            metrics.add_number(f"{name}mean", float(column.nanmean()), count)
            metrics.add_number(f"{name}std", nanstd(column), count)
        count = int((~judged.scores.isnan()).sum())
        metrics.add_number("reward", float(judged.scores.nanmean()), count)
        metrics.add_number("reward_std", nanstd(judged.scores), count)
        share = float(spreadless.float().mean())
        metrics.add_number("frac_reward_zero_std", share, len(spreadless))
        for name in sorted({name for names in self.processes.objects([*values]) for name in names}):
            metrics.add({name: mean_of(torch.tensor(values.get(name, [])))})
        values.clear()

    def responses(self, samples: Samples, judged: Samples, advantages: Tensor) -> None:
        """Adds all processes' samples to the table, their texts in the main process alone."""
        table = self.table
        texts = samples.prompts, samples.completions, samples.noted
        parts = self.processes.objects_at_main(texts)
        names = sorted({name for _, _, extra in parts for name in extra})
        for prompts, completions, extra in parts:
            table.add(prompts, completions, {})
            for name in names:
                table["extra"][name].extend(extra.get(name, [None] * len(prompts)))
        columns = [x.tolist() for x in judged.rewards_by_function.values()]
        table.add((), (), dict(zip(self.names, columns, strict=True)), advantages.tolist())

    # Logs.

    def take(self, mode: str, tokens: int) -> dict[str, Any]:
        """The metrics since the last call, and if there are any, the run's ``tokens`` so far."""
        metrics: Any = self.metrics[mode].take(self.processes)
        if metrics:
            metrics = {"num_tokens": float(tokens), **metrics}
        return metrics

    def show(self, step: int, folder: Path) -> None:
        """Prints the table, saves it below ``folder`` and sends it to trackers, if
        ``log_completions`` is set."""
        if self.args.log_completions and self.table["prompt"]:
            self.table.log(self.args, folder, step)

    # The texts of an evaluation.

    def show_later(self, samples: Samples, judged: Samples) -> None:
        """Adds an evaluation's responses of all processes, for :meth:`take_shown`; their texts are
        in the main process alone."""
        for prompts, texts in self.processes.objects_at_main((samples.prompt_texts, samples.texts)):
            self._shown.prompts.extend(prompts)
            self._shown.completions.extend(texts)
        of_none = torch.full_like(judged.scores, torch.nan)
        self._shown.rewards.extend((judged.scores if self.names else of_none).tolist())

    def take_shown(self) -> ShownSamples:
        """The responses added since the last call; rewards are NaN without a reward function."""
        shown, self._shown = self._shown, ShownSamples([], [], [])
        return shown
