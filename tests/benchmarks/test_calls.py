"""The experiment on tools that have to be called, two steps of it."""

import json
from pathlib import Path

from benchmarks import __main__ as command
from benchmarks import report


def test_the_experiment_runs_and_is_written(tmp_path: Path) -> None:
    docs, results = tmp_path / "docs", tmp_path / "results"
    (docs / "plots").mkdir(parents=True)
    page = docs / "response_format.md"
    page.write_text(f"above\n{report.BEGIN}\n{report.END}\nbelow\n")
    told = ["--folder", str(tmp_path / "runs"), "--steps", "2", "--seeds", "3"]
    assert command.main(["calls", *told, "--results", str(results), "--docs", str(docs)]) == 0

    (path,) = results.glob("*/*-calls.json")
    runs = {run["arm"]: run["rows"] for run in json.loads(path.read_text())["runs"]}
    assert [row["step"] for row in runs["auto"]] == [1, 2]
    assert runs["required"][0]["valid"] == 1 > runs["auto"][0]["valid"]
    text, drawn = page.read_text(), (docs / "plots" / "calls.svg").read_text()
    assert '| `"required"` | first step | 1.00 (' in text
    assert (text[:6], text[-6:]) == ("above\n", "below\n")
    assert drawn.count('fill="none"') == 4, "a curve of each run, in both panels"
