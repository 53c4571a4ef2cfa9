"""The end of a run: writes model, summary and figure, prints results and samples."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastrl.run.callbacks import Evaluation, TrainResult, rounded
from fastrl.run.folder import RunFolder
from fastrl.run.launcher import is_main_process
from fastrl.run.model_card import complete_card
from fastrl.run.terminal import plain, run_console
from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.doctor import ILLNESS, examine

if TYPE_CHECKING:
    from rich.table import Table

    from fastrl.tools.reports.html_report import Defaults


@dataclass(frozen=True)
class Comparison:
    """Mean reward on the same prompts before and after training, with standard errors."""

    before: float
    before_sem: float
    after: float
    after_sem: float
    kl: float  # after training, to the reference, in nats per sequence; NaN without a reference

    @classmethod
    def of(cls, before: Evaluation, after: Evaluation) -> Comparison:
        return cls(before.mean, before.sem, after.mean, after.sem, after.kl)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def gain_sem(self) -> float:
        """The gain's standard error √(s.e.² + s.e.²), as if the means were independent: an upper
        bound unless rewards before and after are negatively correlated."""
        return math.hypot(self.before_sem, self.after_sem)

    @property
    def gain_in_sems(self) -> float:
        if self.gain_sem > 0:
            return self.gain / self.gain_sem
        return math.copysign(math.inf, self.gain) if self.gain else 0.0

    def to_dict(self) -> dict[str, float]:
        return {
            "reward_before": self.before,
            "reward_before_sem": self.before_sem,
            "reward_after": self.after,
            "reward_after_sem": self.after_sem,
            "reward_gain": self.gain,
            **(
                {"reward_gain_in_sems": self.gain_in_sems} if self.gain_sem or not self.gain else {}
            ),
            **({} if math.isnan(self.kl) else {"kl_after": self.kl}),
        }

    def __str__(self) -> str:
        kl = "" if math.isnan(self.kl) else f", at {rounded(self.kl, 2)} nats of KL per sequence"
        errors = f" = {rounded(self.gain_in_sems, 1)} standard errors"
        return (
            f"mean reward {self.before:.3f} ± {self.before_sem:.3f} → "
            f"{self.after:.3f} ± {self.after_sem:.3f} (s.e.), a gain of {rounded(self.gain, 3)}"
            f"{errors if self.gain_sem or not self.gain else ', with no spread'}{kl}"
        )


def finish_training(
    folder: RunFolder,
    save: Callable[[Path], object],
    result: TrainResult,
    results: Mapping[str, Any],
    *,
    show: int = 8,
) -> Comparison | None:
    """Does :func:`finish_run` for ``PPOTrainer.train``, with samples and the gain in reward.

    Returns:
        the change in mean reward over the evaluation prompts; None for fewer than two evaluations.
    """
    if len(result.evaluations) < 2:
        finish_run(folder, save, results)
        return None
    before, after = result.evaluations[0], result.evaluations[-1]
    comparison = Comparison.of(before, after)
    finish_run(
        folder,
        save,
        {**comparison.to_dict(), **results},
        lines=[f"{evaluated_prompts(before, after)}: {comparison}"],
        samples=pair_samples(before, after),
        show=show,
    )
    return comparison


def evaluated_prompts(before: Evaluation, after: Evaluation) -> str:
    """A text with the number of prompts, and of those with a reward where some have none."""
    count = len(before.prompts)
    counts = [sum(not math.isnan(x) for x in each.rewards) for each in (before, after)]
    text = f"{count} held-out prompt{'s' if count > 1 else ''}"
    return text if counts == [count] * 2 else f"{text}, {counts[0]} → {counts[1]} with a reward"


def finish_run(
    folder: RunFolder,
    save: Callable[[Path], object],
    results: Mapping[str, Any],
    *,
    lines: Sequence[str] = (),
    samples: Sequence[dict[str, Any]] = (),
    show: int = 8,
) -> dict[str, Any]:
    """Writes model, samples, summary and report of a run, and prints its results.

    Args:
        save: writes the model to a folder.
        results: the entries of ``summary.json`` beside those of ``run.json``.
        lines: further lines to print.
        samples: rows as :func:`pair_samples` makes them.
        show: how many samples to print.

    Returns:
        the contents of ``summary.json``; {} in other processes than the main one, which only call
        ``save``: weights that are spread over processes are saved by all of them.
    """
    if not is_main_process():
        save(folder.model)
        return {}

    def save_with_results(model: Path) -> None:
        save(model)
        dataset = folder.config.get("job", {}).get("dataset")
        complete_card(model, dataset, results)

    folder.write_model(save_with_results)
    written = "model, metrics.jsonl, report.png, summary.json"
    if samples:
        folder.write_samples(samples)
        written += ", samples.jsonl"
    summary = folder.write_summary(results)
    write_report(folder)
    console = run_console()
    if samples and show:
        console.print(samples_table(samples, show))
    for line in lines:
        console.print(plain(line))
    console.print(plain(f"saved: {folder.path}/{written}"))
    ill = [x.name for x in examine(RunCurves.of(folder)).findings if x.severity == ILLNESS]
    if ill:
        quoted = shlex.quote(str(folder.path))
        console.print(f"looks ill: {', '.join(ill)}; fastrl doctor {quoted} says more")
    return summary


def write_report(folder: RunFolder) -> Path:
    """Draws a run's curves from its metrics.

    Returns:
        the path of ``report.png``.
    """
    from fastrl.tools.reports.figures import draw

    title = str(folder.config.get("title", folder.path.name))
    folder.write_report(draw([RunCurves.of(folder)], title=title))
    return folder.report


def write_overlay(folders: Sequence[RunFolder], target: RunFolder) -> Path:
    """Draws the curves of several runs into one figure.

    Returns:
        the path of ``report.png`` in ``target``, which is made if it is not there.
    """
    from fastrl.tools.reports.figures import draw
    from fastrl.tools.reports.html_report import ReportedRun

    runs = [run.curves for run in ReportedRun.all_of(folders)]
    target.write_report(draw(runs, title=f"{len(runs)} runs"))
    return target.report


def write_page(
    folders: Sequence[RunFolder], target: RunFolder, defaults: Defaults = lambda folder: {}
) -> Path:
    """Writes the page of one run or of several, see :mod:`fastrl.tools.reports.html_report`.

    Args:
        defaults: returns the defaults of a run's settings, by their names.

    Returns:
        the path of ``report.html`` in ``target``, which is made if it is not there.
    """
    from fastrl.tools.reports.html_report import page

    target.write_page(page(folders, results(folders), defaults))
    return target.page


def pair_samples(before: Any, after: Any) -> list[dict[str, Any]]:
    """The rows of ``samples.jsonl``: completions of the same prompts before and after training.

    Args:
        before, after: prompts, completions and rewards, as an :class:`Evaluation` has them.
    """
    rows = zip(
        before.prompts,
        *(x for each in (before, after) for x in (each.completions, each.rewards)),
        strict=False,
    )
    return [
        {
            "prompt": prompt,
            "before": old,
            "reward_before": None if math.isnan(old_reward) else old_reward,
            "after": new,
            "reward_after": None if math.isnan(new_reward) else new_reward,
        }
        for prompt, old, old_reward, new, new_reward in rows
    ]


def samples_table(rows: Sequence[Mapping[str, Any]], count: int = 8) -> Table:
    """A table of at most ``count`` rows of ``samples.jsonl``, evenly spaced."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Held-out prompts, before and after", box=box.SIMPLE_HEAD, show_lines=True)
    names = ("reward_before", "reward_after")
    rewarded = any(row[name] is not None for row in rows for name in names)
    table.add_column("prompt", style="bold", ratio=2)
    for name in ("before", "after"):
        table.add_column(name, ratio=4)
        if rewarded:
            table.add_column("reward", justify="right", no_wrap=True)
    count = min(count, len(rows))
    for row in (rows[i * len(rows) // count] for i in range(count)):
        texts = [plain(row[name].strip()) for name in ("before", "after")]
        if not rewarded:
            table.add_row(plain(row["prompt"]), *texts)
            continue
        old, new = (math.nan if row[name] is None else row[name] for name in names)
        style = "green" if new > old else "red" if new < old else ""
        rewards = f"{old:.2f}", Text(f"{new:.2f}", style=style)
        table.add_row(plain(row["prompt"]), texts[0], rewards[0], texts[1], rewards[1])
    return table


def results(folders: Sequence[RunFolder]) -> dict[str, list[str]]:
    """The numbers in the summaries of runs, as texts by name; "" where a run has none."""
    summaries = [folder.summary() for folder in folders]
    names = dict.fromkeys(
        name for each in summaries for name, value in each.items() if _is_number(value)
    )
    return {
        name.replace("_", " "): [
            f"{each[name]:.4g}" if _is_number(each.get(name)) else "" for each in summaries
        ]
        for name in names
    }


def results_table(folders: Sequence[RunFolder]) -> Table:
    """The numbers in the summaries of runs, side by side."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for folder in folders:
        table.add_column(plain(folder.name), justify="right", overflow="fold")
    for name, values in results(folders).items():
        table.add_row(plain(name), *values)
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
