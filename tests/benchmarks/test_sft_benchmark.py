"""The SFT benchmark's data, its worker, and what the report says of it."""

import argparse
from pathlib import Path

import pytest

import fastrl
from benchmarks.before import record, report, training
from benchmarks.before.sft import SFT
from benchmarks.before.training_worker import EOS, IGNORED, SFTSide, labels_of, texts


def a_result(**changes: object) -> dict:
    return {
        "benchmark": "sft",
        "date": "2025-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"fastrl": {"torch": "2"}, "peer": {"torch": "2"}},
        "peer": training.PEER,
        "shape": vars(SFT.quick),
        "tokens": 1200,
        "difference": 2e-7,
        "sides": {
            "fastrl": {"seconds": [1.0, 2.0, 4.0], "peak": 2**20, "beyond_gradients": 2**10},
            "peer": {"seconds": [3.0, 4.0, 4.0], "peak": 2**22, "beyond_gradients": 2**11},
        },
    } | changes


def test_texts_are_ragged_end_and_do_not_learn_their_first_token() -> None:
    shape = vars(SFT.shape())
    found = texts(shape)
    assert found == texts(shape)
    assert len(found) == 10 * shape["batch"]
    lengths = {len(ids) for ids in found}
    assert shape["shortest"] <= min(lengths) < max(lengths) <= shape["longest"]
    assert len(lengths) > 20
    for ids in found:
        assert ids[-1] == EOS
        assert min(ids[:-1]) > EOS
        assert max(ids) < shape["vocabulary"]
    assert labels_of([7, 8, 9]) == [IGNORED, 8, 9]


# TRL 1.16 takes transformers 4 too, which knows no other name.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
def test_a_worker_trains_and_says_what_it_took(tmp_path: Path) -> None:
    side = SFTSide(fastrl, vars(SFT.quick) | {"layers": 1}, str(tmp_path))
    losses = side.check()["losses"]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    before = [p.detach().clone() for p in side.trainer.model.parameters()]
    memory = side.memory()
    assert 0 < memory["beyond_gradients"] < memory["peak"]
    assert all(p.grad is None for p in side.trainer.model.parameters())
    pairs = zip(before, side.trainer.model.parameters(), strict=True)
    assert all(bool((old == new).all()) for old, new in pairs)
    assert side.epoch()["seconds"] > 0
    assert side.check()["losses"][-1] < losses[-1]


def test_the_report_has_a_table_with_goals_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    results = tmp_path / "benchmarks" / "results"
    record.save(a_result(), results / record.place(a_result()))
    assert report.run(argparse.Namespace(results=results, root=tmp_path)) == 0
    row = (
        "| tokens per second of training | 600 (300–1200) | 300 (300–400) | 2.00 (1.00–3.00) "
        "| ≥ 1.3× the tokens/s: reached |"
    )
    memory = "| peak memory above weights | 1 MiB | 4 MiB | 0.25 | ≤ 0.5× the memory: reached |"
    for name in ("README.md", "benchmarks/README.md"):
        written = (tmp_path / name).read_text()
        assert row in written
        assert memory in written
    missing = (tmp_path / "README.md").read_text().split("Not measured yet on cpu-2core: ")[1]
    assert "sft" not in missing
    plot = (tmp_path / "benchmarks/plots/cpu-2core/sft.svg").read_text()
    assert "tokens per second" in plot
