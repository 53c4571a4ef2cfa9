"""The report: of every committed file, of new ones, and what it says is missing."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import curves, plots, report, results, terminal
from benchmarks.cases import EAGER, OURS, Case, Goal, rooflines
from benchmarks.harness import Measurement, Run
from benchmarks.markdown import table
from benchmarks.timing import Side

CPU = torch.device("cpu")


def test_a_table_has_as_many_columns_as_its_head() -> None:
    assert table(["a", "b", "c"], [["1", "2", "3"]]) == (
        "| a | b | c |\n| --- | --: | --- |\n| 1 | 2 | 3 |"
    )
    assert table(["a"], []) == ""


@pytest.fixture
def checkout(tmp_path: Path) -> argparse.Namespace:
    for folder in ("benchmarks", "docs"):
        (tmp_path / folder).mkdir()
    for page in report.PAGES:
        (tmp_path / page).write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    results = tmp_path / "benchmarks" / "results"
    return argparse.Namespace(results=results, root=tmp_path, compare=None)


def a_result(
    benchmark: str = "ops", name: str = "gae", seconds: float = 1.0, **changes: object
) -> dict:
    """Of one case: fastrl takes a second, eager PyTorch two."""
    case = Case(benchmark, name, "small", "some work", goals=(Goal("speedup", 1.5),))
    run = Run(CPU, rounds=2)
    measurement = Measurement(run, case)
    measurement.absent("torchrl", "not installed")
    sides = {
        OURS: Side(lambda: {"call": seconds}, memory={"peak": 2**20}),
        EAGER: Side(lambda: {"call": 2.0}, "the loop", memory={"peak": 2**23}),
    }
    measurement.measure(sides, 2, Side(lambda: {"call": 0.25}))
    fixed = {"date": "2025-01-02", "time": "10:00:00", "commit": "abc1234"}
    fixed["machine"] = {"cpu": "Some CPU", "cores": 2, "memory_gib": 8, "load": 0.0}
    return run.results[benchmark] | fixed | changes


def write(checkout: argparse.Namespace, *found: dict) -> tuple[str, str]:
    """The README and the page of all figures after a report on these results."""
    for result in found:
        results.save(result, checkout.results)
    assert report.run(checkout) == 0
    return tuple((checkout.root / p).read_text() for p in report.PAGES)


def test_committed_files_of_every_form_are_read(checkout) -> None:
    # Of one day: newer figures take the place of older ones.
    (checkout.results / "cpu-2core").mkdir(parents=True)
    for path in results.RESULTS.glob("cpu-2core/2026-11-21-*.json"):
        shutil.copy(path, checkout.results / "cpu-2core")
    paths = sorted(checkout.results.glob("cpu-2core/*.json"))
    read = {path.name.split("-", 4)[-1][:-5]: report.read(path) for path in paths}
    assert None not in read.values()
    gae = read["gae"]["entries"][0]
    old = json.loads((checkout.results / "cpu-2core/2026-11-21-4d1eabe-gae.json").read_text())
    taken = old["cases"][0]["implementations"]
    assert gae["sides"]["eager"]["seconds"] == {"call": taken["eager"]["seconds"]}
    assert rooflines(gae)[0] == old["cases"][0]["limit"][0] / taken[OURS]["seconds"][0]
    for text in write(checkout):
        assert "| A PPO iteration" in text or "### A PPO iteration" in text
        assert "2.62 (2.56–2.67)" in text or "2.62× (2.56–2.67)" in text
    details = (checkout.root / "docs/benchmarks.md").read_text()
    assert "≥ 1.3× trl==1.16.0: reached" in details
    assert "trunk 1/2: update, ≥ 1.3× copy: reached" in details
    assert "roofline" in details
    for name in ("ops", "ppo", "sft", "dpo", "rollout", "ref_model"):
        assert (checkout.root / f"docs/plots/cpu-2core/{name}.svg").exists()


def test_a_case_is_shown_with_its_goal_and_all_remarks(checkout) -> None:
    _, details = write(checkout, a_result())
    row = "| `gae` small | fastrl | 1 s (1–1) | 1 MiB | 25% | ≥ 1.5× eager: reached |"
    assert row in details
    assert "|  | eager | 2 s (2–2): **2.00× (2.00–2.00)** | 8 MiB | 12% |  |" in details
    for remark in ("- gae: some work.", "- eager: the loop.", "- Absent, torchrl: not installed."):
        assert remark in details


def test_every_providers_speed_is_told_and_the_fastest_is_the_roof(checkout) -> None:
    result = a_result(
        roofline={"copy": 43e9, "gemm": {"fp32": {"mm": 0.2e12, "oneDNN": 0.4e12}, "bf16": 1e12}}
    )
    result["entries"][0]["roofs"] = [
        {"product": "2×3 · 3×5", "dtype": "fp32", "count": 1,
         "flop/s": {"mm": 146e9, "oneDNN": 222e9}},
    ]  # fmt: skip
    _, details = write(checkout, result)
    assert "matrix products [TFLOP/s] 0.4 in fp32, 1 in bf16" in details
    assert "- gae small, GFLOP/s of 2×3 · 3×5 in fp32: mm 146, oneDNN 222." in details
    assert "mm 146" in terminal.render(result["entries"][0], "cpu")


def test_headlines_stand_in_the_projects_readme_between_the_markers(checkout) -> None:
    brief, _ = write(checkout, a_result("ppo", "GPT-2"))
    assert brief.startswith(f"above\n{report.BEGIN}\n")
    assert brief.endswith(f"{report.END}\nbelow\n")
    assert "old" not in brief
    row = "| A PPO iteration: GPT-2, small | 1 s | eager | 2 s | 2.00 (2.00–2.00) | 0.12 |"
    assert row in brief
    assert write(checkout)[0] == brief, "again, the same"


def test_headlines_of_several_processors_are_told_apart(checkout) -> None:
    other = {"cpu": "Other CPU", "cores": 2, "memory_gib": 8, "load": 0.0}
    readme, _ = write(checkout, a_result("ppo"), a_result("sft", machine=other))
    assert "On (1) Some CPU, threads: " in readme
    assert ", (2) Other CPU, threads: " in readme
    assert "A PPO iteration: gae, small (1) |" in readme
    assert "Supervised fine-tuning: gae, small (2) |" in readme


def test_a_goal_that_is_missed_says_so(checkout) -> None:
    _, details = write(checkout, a_result(seconds=1.9))
    assert "≥ 1.5× eager: **missed**" in details


def test_a_red_case_has_a_line_and_no_row(checkout) -> None:
    result = a_result("ppo", "GPT-2")
    result["entries"][0] |= {"red": "it is off", "sides": {}}
    brief, details = write(checkout, result)
    assert "- No figures for GPT-2 small: it is off" in details
    assert "| `GPT-2`" not in details
    assert "| A PPO iteration" not in brief
    assert not (checkout.root / "docs/plots/cpu-2core/ppo.svg").exists()


def test_what_was_left_and_what_checks_found_are_said(checkout) -> None:
    label = {"op": "gae", "label": "small"}
    gates = [{"op": "gae", "check": "exact", "wrong": None}]
    gates.append({"op": "whiten", "check": "twice", "wrong": "it differs"})
    result = a_result(
        gates=gates,
        sanitizer=[{"tool": "memcheck", "errors": 0, "first": []}],
        bytes=[{**label, "read": 1, "written": 1, "kernels": 2}],
        left={"whiten: small": "a check of the op is red"},
        machine={"cpu": "C", "cores": 2, "memory_gib": 8, "accelerator": "NVIDIA H100"},
    )
    result["entries"][0]["work"] = {"bytes": 1, "flops": 0, "what": ""}
    _, details = write(checkout, result)
    assert "1 of 2 checks of the kernels are green" in details
    assert "Red: `whiten`, twice: it differs" in details
    assert "compute-sanitizer, memcheck: 0 errors" in details
    assert "`gae` small: 2 B in 2 kernels, 2.000 of the least bytes" in details
    assert "- Left, whiten: small: a check of the op is red." in details
    assert "No machine without a GPU has been measured yet." in details


def test_what_has_not_been_measured_is_named(checkout) -> None:
    for text in write(checkout, a_result()):
        assert "No GPU has been measured yet." in text
        assert (
            "Not measured yet on cpu-2core: ppo, grpo, sft, dpo, scripts, rollout, ref_model, run, "
            "plan." in text
        )


def test_the_newest_of_a_day_is_taken_for_each_op(checkout) -> None:
    later = a_result(time="11:00:00", commit="fffffff")
    earlier, other = a_result(commit="0000000"), a_result(name="whiten", commit="1111111")
    _, details = write(checkout, later, earlier, other)
    assert "commit fffffff" in details
    assert "commit 1111111" in details
    assert "commit 0000000" not in details


def test_plots_show_the_figures_are_the_same_every_time_and_old_ones_go(checkout) -> None:
    write(checkout, a_result(seconds=0.4))
    folder = checkout.root / "docs" / "plots" / "cpu-2core"
    first = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(first) == {"ops.svg"}
    assert ">2 s, 5×</text>" in first["ops.svg"]
    (folder / "gone.svg").write_text("old")
    _, details = write(checkout)
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    said = "Single ops, on cpu-2core: time and peak memory of fastrl and eager"
    assert f"![{said}](plots/cpu-2core/ops.svg)" in details
    assert f"<title>{said}</title>" in first["ops.svg"]


def test_bars_begin_at_0_and_lengths_that_differ_too_much_are_dots(checkout) -> None:
    def times(seconds: float) -> str:
        write(checkout, a_result(seconds=seconds))
        plot = (checkout.root / "docs" / "plots" / "cpu-2core" / "ops.svg").read_text()
        return plot[plot.index(">time") : plot.index(">peak memory")]

    bars = re.findall(r'd="M([\d.]+) \S+H([\d.]+)v10\S+ fill="(\S+)"', times(1.0))
    (start, ours, blue), (same, theirs, grey) = bars
    assert start == same
    assert float(theirs) - float(start) == pytest.approx(2 * (float(ours) - float(start)), abs=0.2)
    assert (blue, grey) == (plots.COLOURS[OURS], plots.COLOURS[EAGER])
    assert times(0.01).count("<circle") == 2
    assert times(0.01).startswith(">time (log scale)<")


def test_every_side_of_a_plot_has_its_librarys_colour() -> None:
    for path in results.RESULTS.glob("*/*.json"):
        found = report.read(path)
        for entry in found["entries"] if found and found["benchmark"] in report.TITLES else ():
            for side in entry["sides"] if entry["main"] and not entry["baseline"] else ():
                assert side.startswith(tuple(plots.COLOURS)), side


def test_the_curves_of_a_run_are_kept_and_drawn_from_the_file(checkout, tmp_path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lines: list[dict] = [{"step": 0, "eval/reward_mean": 0.0, "eval/reward_sem": 0.1, "eval/kl": 0}]
    lines += [{"step": i, "ppo/mean_scores": i / 2, "objective/kl": 0.1} for i in (1, 2)]
    lines += [{"step": 2, "eval/reward_mean": 1.0, "eval/reward_sem": 0.1, "eval/kl": 1}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text('{"settings": {"ppo_steps": 2}}')
    plots_folder = checkout.root / "docs" / "plots"
    plots_folder.mkdir()
    told = ["--results", str(checkout.results), "--plots", str(plots_folder)]
    assert command.main(["curves", str(folder), *told]) == 0
    drawn = (plots_folder / "demo.svg").read_text()
    top, bottom = curves.TOP, curves.TOP + curves.HIGH
    assert f'<circle cx="{curves.LEFT}.0" cy="{bottom}.0"' in drawn, "0 of 0 to 1 at step 0"
    assert f'<circle cx="{curves.LEFT + curves.WIDE}.0" cy="{top}.0"' in drawn
    (plots_folder / "demo.svg").unlink()
    write(checkout, a_result())
    assert (plots_folder / "demo.svg").read_text() == drawn


def test_two_results_are_compared_by_their_ratios(checkout, capsys) -> None:
    old = results.save(a_result(), checkout.results)
    new = results.save(a_result(seconds=0.5, commit="1111111"), checkout.results)
    assert command.main(["report", "--compare", str(old), str(new)]) == 0
    assert (
        "gae small, eager: 2.00 (2.00–2.00) → 4.00 (4.00–4.00), 2.000×" in capsys.readouterr().out
    )


def test_a_run_writes_over_its_own_results_alone(checkout) -> None:
    first, again = (results.save(a_result(seconds=s), checkout.results) for s in (1.0, 2.0))
    assert (again.parent, again.name) == (first.parent, f"{first.stem}-2.json")
    kept = first.read_text()
    assert results.save(a_result(seconds=3.0), checkout.results, again) == again
    assert first.read_text() == kept != again.read_text()
    assert sorted(first.parent.glob(f"{first.stem}*")) == [again, first]


def test_a_terminal_shows_every_phase_goal_and_absentee() -> None:
    entry = a_result()["entries"][0]
    text = terminal.render(entry, "cpu")
    for words in ("fastrl faster by", "2.00 (2.00–2.00)", "goal ≥ 1.5× eager: reached",
                  "absent, torchrl: not installed", "25% of the roofline"):  # fmt: skip
        assert words in text
    assert terminal.render(entry | {"red": "off"}, "cpu").endswith("RED, no figures: off")


def test_the_report_says_when_there_is_nothing_to_write(checkout, capsys) -> None:
    assert report.run(checkout) == 1
    assert "no result files" in capsys.readouterr().err
