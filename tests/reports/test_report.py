"""The figure, the samples table and the comparison of two evaluations."""

import io
import json
import math
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console

from fastrl.run.folder import RunFolder
from fastrl.tools.reports.curves import series
from fastrl.tools.reports.report import (
    Comparison,
    evaluated_prompts,
    pair_samples,
    samples_table,
    write_report,
)


def metrics_of(steps: int) -> list[dict]:
    rows = [{"step": 0, "eval/reward_mean": 0.0, "eval/reward_sem": 0.1, "eval/kl": 0.0}]
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step,
                "reward/mean": step / 10,
                "objective/kl": step / 5,
                "ppo/policy/entropy": 2.0 - step / 40,
                "ppo/loss/value": 1 / step,
                "ppo/policy/clipfrac": 0.1,
                "ppo/val/clipfrac": 0.05,
                "time/rollout": 0.2,
                "time/reward": 0.1,
                "time/ppo/forward_pass": 0.1,
                "time/ppo/optimize_step": 0.3,
            }
        )
    rows.append({"step": steps, "eval/reward_mean": 2.0, "eval/reward_sem": 0.1, "eval/kl": 4.0})
    return rows


def write_jsonl(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluation(mean: float, sem: float, rewards: list[float], completions: list[str], kl=0.0):
    prompts = [f"prompt {i}" for i in range(len(rewards))]
    return SimpleNamespace(
        mean=mean, sem=sem, kl=kl, rewards=rewards, prompts=prompts, completions=completions
    )


def test_report_draws_every_panel(tmp_path):
    write_jsonl(tmp_path / "metrics.jsonl", metrics_of(20))
    png = write_report(RunFolder(tmp_path, {"kl_ceiling": 5.0}))
    with Image.open(png) as file:
        image = file.convert("RGB")
    assert image.width > 500
    assert image.height > 500
    # A colour of each kind of line: training, held-out, entropy and the update's time.
    colours = {colour for _, colour in image.getcolors(maxcolors=1 << 24)}
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115), (230, 159, 0)} <= colours


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "reward/mean": float("nan")}]])
def test_report_without_metrics_is_still_a_picture(tmp_path, rows):
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    png = write_report(RunFolder(tmp_path, {"kl_ceiling": 5.0}))
    with Image.open(png) as image:
        assert image.width > 500


def test_series_passes_over_missing_and_non_finite_values():
    rows = [{"step": 1, "x": 1}, {"step": 2}, {"step": 3, "x": math.inf}, {"step": 4, "x": 2.5}]
    line = series(rows, "x")
    assert line.steps == [1.0, 4.0]
    assert line.values == [1.0, 2.5]
    assert not series(rows, "y")


def test_metrics_that_are_not_json_are_named_by_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\nnot json\n')
    with pytest.raises(ValueError, match="line 3 is not JSON"):
        RunFolder(tmp_path).rows()
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 is not a JSON object"):
        RunFolder(tmp_path).rows()


def test_gain_counts_in_pooled_standard_errors():
    comparison = Comparison.of(
        evaluation(1.0, 0.3, [1.0], ["a"]), evaluation(3.0, 0.4, [3.0], ["b"], kl=2.5)
    )
    assert comparison.gain == pytest.approx(2.0)
    assert comparison.gain_sem == pytest.approx(0.5)  # √(0.3² + 0.4²)
    assert comparison.gain_in_sems == pytest.approx(4.0)
    assert comparison.to_dict()["kl_after"] == 2.5
    assert "4.0 standard errors" in str(comparison)


@pytest.mark.parametrize(("after", "expected"), [(1.0, math.inf), (0.0, 0.0), (-1.0, -math.inf)])
def test_gain_without_spread_is_infinite_or_nothing(after, expected):
    comparison = Comparison.of(
        evaluation(0.0, 0.0, [0.0], ["a"]), evaluation(after, 0.0, [after], ["b"])
    )
    assert comparison.gain_in_sems == expected
    assert ("reward_gain_in_sems" in comparison.to_dict()) == math.isfinite(expected)
    assert "inf" not in str(comparison)


def test_samples_table_shows_the_same_prompts_spread_over_the_set():
    completions = [f" old {i}" for i in range(10)]
    before = evaluation(0.0, 0.1, [0.0] * 10, completions)
    after = evaluation(1.0, 0.1, [1.0] * 10, ["[bold] \x1b[31mnew"] * 10)
    rows = pair_samples(before, after)
    table = samples_table(rows, count=2)
    assert table.row_count == 2
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table)
    text = console.export_text()
    assert "prompt 0" in text
    assert "prompt 5" in text
    # Completions are text: neither rich's markup nor the terminal's.
    assert r"[bold] \x1b[31mnew" in text
    assert samples_table(rows, count=50).row_count == 10


@pytest.mark.parametrize(("before", "after", "text"), [
    ([1.0, 2.0], [2.0, 2.0], "2 held-out prompts"),
    ([1.0], [2.0], "1 held-out prompt"),
    ([math.nan, 1.0], [2.0, 2.0], "2 held-out prompts, 1 → 2 with a reward"),
])  # fmt: skip
def test_prompts_without_a_reward_are_not_counted_in_the_means(before, after, text):
    sides = (evaluation(0.0, 0.0, x, []) for x in (before, after))
    assert evaluated_prompts(*sides) == text
