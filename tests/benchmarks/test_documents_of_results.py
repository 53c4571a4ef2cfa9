"""The report: of every committed file, of new ones, and what it says is missing."""

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import curves, distilled_figures, plots, report, results, terminal
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


ROOFS = {
    "product": "2×3 · 3×5", "dtype": "fp32", "count": 1, "flop/s": {"mm": 146e9, "oneDNN": 222e9},
}  # fmt: skip
PRODUCTS = {"fp32": {"mm": 0.2e12, "oneDNN": 0.4e12}, "bf16": 1e12}
CHECKS = [
    {"op": "gae", "check": "exact", "wrong": None},
    {"op": "whiten", "check": "twice", "wrong": "it differs"},
]
ON_A_GPU = {"cpu": "C", "cores": 2, "memory_gib": 8, "accelerator": "NVIDIA H100"}
OTHER_CPU = {"cpu": "Other CPU", "cores": 2, "memory_gib": 8, "load": 0.0}
# Results, with changes of their entries, and what a page says: the README (0), or all figures (1).
SAID: dict[str, tuple[list[dict], dict, int, list[str]]] = {
    "a case with its goal and all remarks": ([{}], {}, 1, [
        "| `gae` small | fastrl | 1 s (1–1) | 1 MiB | 25% | ≥ 1.5× eager: reached |",
        "|  | eager | 2 s (2–2): **2.00× (2.00–2.00)** | 8 MiB | 12% |  |",
        "- gae: some work.", "- eager: the loop.", "- Absent, torchrl: not installed.",
        "No GPU has been measured yet.",
        "Not measured yet on cpu-2core: ppo, grpo, sft, dpo, scripts, rollout, cuts, "
        "ref_model, run, plan."]),
    "every provider's speed": (
        [{"roofline": {"copy": 43e9, "gemm": PRODUCTS}}], {"roofs": [ROOFS]}, 1, [
        "matrix products [TFLOP/s] 0.4 in fp32, 1 in bf16",
        "- gae small, GFLOP/s of 2×3 · 3×5 in fp32: mm 146, oneDNN 222."]),
    "headlines": ([{"benchmark": "ppo", "name": "GPT-2"}], {}, 0, [
        "| A PPO iteration: GPT-2, small | 1 s | eager | 2 s | 2.00 (2.00–2.00) | 0.12 |",
        f"above\n{report.BEGIN}\n", f"{report.END}\nbelow\n", "No GPU has been measured yet."]),
    "several processors": (
        [{"benchmark": "ppo"}, {"benchmark": "sft", "machine": OTHER_CPU}], {}, 0, [
        "On (1) Some CPU, threads: ", ", (2) Other CPU, threads: ",
        "A PPO iteration: gae, small (1) |", "Supervised fine-tuning: gae, small (2) |"]),
    "a goal that is missed": ([{"seconds": 1.9}], {}, 1, ["≥ 1.5× eager: **missed**"]),
    "a red case": ([{"benchmark": "ppo", "name": "GPT-2"}], {"red": "it is off", "sides": {}}, 1, [
        "- No figures for GPT-2 small: it is off"]),
    "what was left, and what checks found": ([{
        "gates": CHECKS, "sanitizer": [{"tool": "memcheck", "errors": 0, "first": []}],
        "bytes": [{"op": "gae", "label": "small", "read": 1, "written": 1, "kernels": 2}],
        "left": {"whiten: small": "a check of the op is red"}, "machine": ON_A_GPU,
        }], {"work": {"bytes": 1, "flops": 0, "what": ""}}, 1, [
        "1 of 2 checks of the kernels are green", "Red: `whiten`, twice: it differs",
        "compute-sanitizer, memcheck: 0 errors",
        "`gae` small: 2 B in 2 kernels, 2.000 of the least bytes",
        "- Left, whiten: small: a check of the op is red.",
        "No machine without a GPU has been measured yet."]),
    "the newest of a day of each op": ([
        {"time": "11:00:00", "commit": "fffffff"}, {"commit": "0000000"},
        {"name": "whiten", "commit": "1111111"},
        ], {}, 1, ["commit fffffff", "commit 1111111"]),
}  # fmt: skip
UNSAID = ("old", "commit 0000000", "| `GPT-2`")


@pytest.mark.parametrize("what", SAID)
def test_pages_say(what: str, checkout) -> None:
    changes, of_entry, page, said = SAID[what]
    found = [a_result(**change) for change in changes]
    for one in found:
        one["entries"][0] |= of_entry
    text = write(checkout, *found)[page]
    assert [x for x in said if x not in text] == []
    assert not any(x in text for x in UNSAID)
    assert write(checkout)[page] == text, "again, the same"
    if "red" in of_entry:
        assert not (checkout.root / "docs/plots/cpu-2core/ppo.svg").exists()


def test_a_terminal_shows_every_phase_goal_and_absentee(checkout, capsys) -> None:
    assert report.run(checkout) == 1
    assert "no result files" in capsys.readouterr().err
    entry = a_result()["entries"][0] | {"roofs": [ROOFS]}
    text = terminal.render(entry, "cpu")
    for words in ("fastrl faster by", "2.00 (2.00–2.00)", "goal ≥ 1.5× eager: reached", "mm 146",
                  "absent, torchrl: not installed", "25% of the roofline"):  # fmt: skip
        assert words in text
    assert terminal.render(entry | {"red": "off"}, "cpu").endswith("RED, no figures: off")
    old = results.save(a_result(), checkout.results)
    new = results.save(a_result(seconds=0.5, commit="1111111"), checkout.results)
    assert command.main(["report", "--compare", str(old), str(new)]) == 0
    said = "gae small, eager: 2.00 (2.00–2.00) → 4.00 (4.00–4.00), 2.000×"
    assert said in capsys.readouterr().out


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


def test_what_students_learned_is_written_from_the_file(checkout) -> None:
    def rows(*kl: float) -> list[dict]:
        return [{"seconds": i, "kl": x, "reward": 1.5, "tokens": 8} for i, x in enumerate(kl)]

    result = results.start_of_result(distilled_figures.NAME, CPU)
    result |= {"seconds": {"arm": 1.0}, "rates": {"distillation": 1e-3, "SFT": 3e-4}}
    seeds = ((rows(9, 0.5), rows(0.5, 0.1)), (rows(9, 0.4), rows(0.4, 0.2)))
    result["teacher"] = [{"start": x, "distillation": y, "SFT": x[1:] * 2} for x, y in seeds]
    result["hints"] = [[{"step": i, "learned": i / 2, "held_out": i / 4} for i in (0, 1)]]
    docs = checkout.root / "docs"
    (docs / "plots").mkdir()
    page = docs / "distillation.md"
    page.write_text(f"above\n{report.BEGIN}\n{report.END}\nbelow\n")
    write(checkout, a_result(), result)
    text = page.read_text()
    assert "| distillation, 0.001 | 0.150 (0.100 to 0.200) | 65% (50% to 80%) | 1.50 " in text
    assert "| SFT, 0.0003 | 0.450 (0.400 to 0.500) | 0% (0% to 0%) |" in text
    assert "| 0 | 0.00 | 0.50 | 0.00 | 0.25 |" in text
    assert (text[:6], text[-6:]) == ("above\n", "below\n")
    drawn = (docs / "plots" / "distilled.svg").read_text()
    assert drawn.count("<path d=") == 2 + 4 + 4 + 2, "a curve of each seed"


def test_a_run_writes_over_its_own_results_alone(checkout) -> None:
    first, again = (results.save(a_result(seconds=s), checkout.results) for s in (1.0, 2.0))
    assert (again.parent, again.name) == (first.parent, f"{first.stem}-2.json")
    kept = first.read_text()
    assert results.save(a_result(seconds=3.0), checkout.results, again) == again
    assert first.read_text() == kept != again.read_text()
    assert sorted(first.parent.glob(f"{first.stem}*")) == [again, first]
