"""What a run leaves to look at: its figure, a table of samples, and the gain in reward."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

    from fastrl.ppo import PPOTrainer
    from fastrl.run.callbacks import Evaluation, TrainResult


@dataclass(frozen=True)
class Comparison:
    """Mean reward on the same prompts before and after training, and how sure the gain is."""

    before: float
    before_sem: float
    after: float
    after_sem: float
    kl: float  # NaN without a reference

    @classmethod
    def of(cls, before: Evaluation, after: Evaluation) -> Comparison:
        return cls(before.mean, before.sem, after.mean, after.sem, after.kl)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def gain_sem(self) -> float:
        """√(s.e.² + s.e.²): the two means taken as independent, which pairing could only shrink."""
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
            "reward_gain_in_sems": self.gain_in_sems,
            **({} if math.isnan(self.kl) else {"kl_after": self.kl}),
        }

    def __str__(self) -> str:
        kl = "" if math.isnan(self.kl) else f", at {self.kl:.2f} nats of KL per sequence"
        return (
            f"mean reward {self.before:.3f} ± {self.before_sem:.3f} → "
            f"{self.after:.3f} ± {self.after_sem:.3f} (s.e.), a gain of {self.gain:.3f} = "
            f"{self.gain_in_sems:.1f} standard errors{kl}"
        )


def read_metrics(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file, one JSON object per line.

    Raises:
        ValueError: a line that is not a JSON object, named by its number.
    """
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        rows.append(row)
    return rows


def write_report(
    metrics_path: str | PathLike[str],
    png_path: str | PathLike[str],
    *,
    title: str = "PPO",
    kl_ceiling: float | None = None,
    draw: Callable[..., Figure] | None = None,
) -> Path:
    """Draw a run's curves from its metrics.jsonl into a PNG; metrics that are missing are left out.

    Args:
        kl_ceiling: drawn into the KL panel, in nats per sequence.
        draw: the figure, by default :func:`fastrl.run.figures.draw_run`; it gets the run's rows,
            and those of stages before it, which lie in folders beside the metrics.
    """
    from fastrl.run.figures import draw_run

    rows = read_metrics(metrics_path)
    if draw is None:
        figure = draw_run(rows, title=title, kl_ceiling=kl_ceiling)
    else:
        stages = {
            path.parent.name: read_metrics(path)
            for path in sorted(Path(metrics_path).parent.glob("*/metrics.jsonl"))
        }
        figure = draw(rows, stages, title=title, kl_ceiling=kl_ceiling)
    png_path = Path(png_path)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png_path)
    return png_path


def run_console() -> Console:
    """A console as wide as its terminal, or wide enough for the table where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def samples_table(before: Evaluation, after: Evaluation, count: int = 8) -> Table:
    """A table of completions of the same prompts before and after training, with their rewards.

    The prompts are spread evenly over the evaluation set; none is picked by its reward.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Held-out prompts, before and after", box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("prompt", style="bold", ratio=2)
    table.add_column("before", ratio=4)
    table.add_column("reward", justify="right")
    table.add_column("after", ratio=4)
    table.add_column("reward", justify="right")
    total = min(len(before.prompts), len(after.prompts))
    count = min(count, total)
    for index in (i * total // count for i in range(count)):
        old, new = before.rewards[index], after.rewards[index]
        table.add_row(
            Text(before.prompts[index]),
            Text(before.completions[index].strip()),
            f"{old:.2f}",
            Text(after.completions[index].strip()),
            Text(f"{new:.2f}", style="green" if new > old else "red" if new < old else ""),
        )
    return table


def finish_run(
    trainer: PPOTrainer,
    result: TrainResult,
    output: str | PathLike[str],
    *,
    title: str,
    summary: dict[str, Any],
    samples: int = 8,
    kl_ceiling: float | None = None,
    draw: Callable[..., Figure] | None = None,
) -> Comparison | None:
    """Save the model, draw the report, print samples and the gain, and write summary.json.

    Expects the run's metrics in ``output/metrics.jsonl``; writes ``output/model``,
    ``output/report.png`` and ``output/summary.json``, which holds ``summary`` and the gain.

    Returns:
        The change in mean reward over the evaluation prompts; None in a run without evaluation.
    """
    output = Path(output)
    trainer.save_pretrained(output / "model")
    comparison = None
    if len(result.evaluations) > 1:
        comparison = Comparison.of(result.evaluations[0], result.evaluations[-1])
    if not trainer.accelerator.is_main_process:
        return comparison
    trainer.create_model_card(output / "model")  # in place of an earlier run's
    write_report(
        output / "metrics.jsonl",
        output / "report.png",
        title=title,
        kl_ceiling=kl_ceiling,
        draw=draw,
    )
    gain = comparison.to_dict() if comparison else {}
    reference = {"mode": trainer.reference.mode, "why": trainer.reference.why}
    text = json.dumps({**gain, "reference": reference, **summary}, indent=2, default=str)
    (output / "summary.json").write_text(text + "\n", encoding="utf-8")
    console = run_console()
    if comparison:
        if samples:
            console.print(samples_table(result.evaluations[0], result.evaluations[-1], samples))
        console.print(f"{len(result.evaluations[0].prompts)} held-out prompts: {comparison}")
    console.print(f"saved: {output}/model, metrics.jsonl, report.png, summary.json")
    return comparison
