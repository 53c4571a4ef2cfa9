"""The experiment on top-p and top-k samples, with a model of 203 words."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import answers, report, support
from benchmarks.support_figures import JUDGED

TINY = {
    "VOCABULARY": 203, "WIDTH": 16, "LAYERS": 1, "HEADS": 2, "PROMPTS": 8, "HELD_OUT": 3,
    "SFT_BATCH": 4, "BATCH": 4, "GROUP": 2, "MEASURED": 2,
}  # fmt: skip


def test_a_cut_keeps_what_its_definition_says() -> None:
    p = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25], [0.9, 0.05, 0.03, 0.02]])
    for cut, expected in (
        ({"top_p": 0.6}, ["0110", "1111", "1000"]),  # of equal ones, all
        ({"top_p": 0.8}, ["0111", "1111", "1000"]),
        ({"top_k": 1}, ["0100", "1111", "1000"]),
        ({"top_k": 3}, ["0111", "1111", "1110"]),
        ({}, ["1111"] * 3),
    ):
        found = ["".join(map(str, row)) for row in support.kept(p, cut).int().tolist()]
        assert found == expected, cut


def test_the_experiment_runs_and_is_written(tmp_path: Path, monkeypatch) -> None:
    for name, value in TINY.items():
        monkeypatch.setattr(support, name, value)
    docs, results = tmp_path / "docs", tmp_path / "results"
    (docs / "plots").mkdir(parents=True)
    page = docs / "policy_support.md"
    page.write_text(f"above\n{report.BEGIN}\n{report.END}\nbelow\n")
    told = ["--folder", str(tmp_path / "runs"), "--sft-steps", "2", "--steps", "2", "--every", "1"]
    told += ["--seeds", "0", "1", "--results", str(results), "--docs", str(docs)]
    assert command.main(["support", *told]) == 0
    (path,) = results.glob("*/*-support.json")
    result = json.loads(path.read_text())
    for row in result["ratios"]:
        over_all, over_sets, plain = row["ratios"]
        assert over_all["mean"] == pytest.approx(row["kept"], abs=1e-5)
        for ratio in (over_sets, plain):
            assert ratio["farthest"] < 1e-4
    curves = {(x["cut"], x["support"], x["seed"]): x["rows"] for x in result["curves"]}
    assert len(curves) == 2 * 2 * 2
    for rows in curves.values():
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert rows[0]["kl"] == 0 < rows[-1]["kl"]
    text, drawn = page.read_text(), (docs / "plots" / "support.svg").read_text()
    for row in result["ratios"]:
        assert f"| {row['name']} | {row['tokens']} | {row['kept']:.3f} |" in text
    assert (text[:6], text[-6:]) == ("above\n", "below\n")
    assert drawn.count('fill="none"') == len(JUDGED) * len(curves), "a curve of each seed"

    def recorded(task: support.Task, _python: Path, each: int) -> tuple[str, list]:
        here = [support.drawn_here(task, cut) for cut in support.CUTS.values()]
        of_cuts = [zip(x.sequences, x.logprobs["sampled"], x.sets, strict=True) for x in here]
        said = [
            [
                {
                    "tokens": ids.tolist(),
                    "logprobs": logprobs.tolist(),
                    "sets": [row.nonzero()[:, 0].tolist() for row in sets],
                }
                for ids, logprobs, sets in of_cut
            ]
            for of_cut in of_cuts
        ]
        return "9.8.7", said

    monkeypatch.setattr(answers, "recorded", recorded)
    again = ["--seeds", "0", "--model", str(tmp_path / "runs" / "model")]
    assert command.main(["answers", *told, *again, "--peer-python", "unused"]) == 0
    (path_of_answers,) = results.glob("*/*-answers.json")
    for theirs, ours in zip(
        json.loads(path_of_answers.read_text())["ratios"], result["ratios"], strict=False
    ):
        assert theirs == {**ours, "ratios": ours["ratios"][:2]}, "as its own samples"
    assert "answers of vLLM 9.8.7" in page.read_text()

    assert command.main(["support", *told, *again]) == 0
    (second,) = {*results.glob("*/*-support*.json")} - {path}
    first = [x for x in result["curves"] if x["seed"] == 0]
    assert json.loads(second.read_text())["curves"] == first, "the model of the earlier run"
