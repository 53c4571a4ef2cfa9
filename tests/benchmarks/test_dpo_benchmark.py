"""The DPO benchmark's data, its worker, and what the report says of it."""

import argparse
from pathlib import Path

import pytest

import fastrl
from benchmarks.before import record, report, training
from benchmarks.before.dpo import DPO
from benchmarks.before.training_worker import (
    EOS,
    PAD,
    DPOSide,
    Loader,
    pairs,
    word_tokenizer,
    words,
)

SMALL = vars(DPO.quick) | {"layers": 1}


def a_result() -> dict:
    return {
        "benchmark": "dpo",
        "date": "2025-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"fastrl": {"torch": "2"}, "peer": {"torch": "2"}},
        "peer": training.PEER,
        "shape": vars(DPO.quick),
        "pairs": 20,
        "references": [
            {
                "reference": reference,
                "difference": 2e-7,
                "sides": {
                    "fastrl": {"seconds": ours, "peak": 2**20, "beyond_gradients": 2**10},
                    "peer": {"seconds": theirs, "peak": 2**22, "beyond_gradients": 2**11},
                },
            }
            for reference, ours, theirs in (
                ("copy", [5.0, 4.0, 8.0], [10.0, 10.0, 8.0]),
                ("cached", [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]),
            )
        ],
    }


def test_pairs_are_ragged_and_fit_the_model() -> None:
    shape = vars(DPO.shape())
    found = pairs(shape)
    assert found == pairs(shape)
    assert len(found) == 10 * shape["batch"]
    for part in zip(*found, strict=True):
        assert len({len(ids) for ids in part}) > 20
        assert min(map(min, part)) > EOS
        assert max(map(max, part)) < shape["vocabulary"]
    longest = max(len(prompt) + len(ids) + 1 for prompt, *both in found for ids in both)
    assert shape["longest"] - 16 < longest <= shape["longest"]


def test_texts_say_the_same_tokens_and_responses_end() -> None:
    """One library is given texts, to which it appends EOS, the other tokens."""
    tokenizer = word_tokenizer(SMALL["vocabulary"])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    loader = Loader(pairs(SMALL), tokenizer)
    assert len(loader) == SMALL["pairs"]
    for i, (prompt, *both) in enumerate(pairs(SMALL)):
        example = loader[i]
        assert example.prompt == words(prompt)
        assert list(example.prompt_ids) == tokenizer(example.prompt)["input_ids"] == prompt
        for response, ids in zip(example.responses, both, strict=True):
            text = example.prompt + response.text + tokenizer.eos_token
            assert tokenizer(text)["input_ids"] == [*prompt, *response.ids] == [*prompt, *ids, EOS]


# TRL 1.16 takes transformers 4 too, which knows no other name.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")
def test_a_worker_trains_and_says_what_it_took(tmp_path: Path) -> None:
    side = DPOSide(fastrl, SMALL, str(tmp_path), reference="copy")
    losses = side.check()["losses"]
    assert len(losses) == 10
    before = [p.detach().clone() for p in side.trainer.model.parameters()]
    memory = side.memory()
    assert 0 < memory["beyond_gradients"] <= memory["peak"]
    assert all(p.grad is None for p in side.trainer.model.parameters())
    trained = zip(before, side.trainer.model.parameters(), strict=True)
    assert all(bool((old == new).all()) for old, new in trained)
    assert side.epoch()["seconds"] > 0
    again = side.check()["losses"]
    assert sum(again) < sum(losses) - 1  # the same pairs, which it knows by now

    cached = DPOSide(fastrl, SMALL, str(tmp_path), reference="cached")
    assert not list(training.disagreements(cached.check()["losses"], losses))
    assert cached.memory()["peak"] <= memory["peak"]


def test_the_report_has_a_table_with_goals_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"{report.BEGIN}\n{report.END}\n")
    results = tmp_path / "benchmarks" / "results"
    record.save(a_result(), results / record.place(a_result()))
    assert report.run(argparse.Namespace(results=results, root=tmp_path)) == 0
    rows = (
        "| pairs per second of training; reference copy | 4 (2.5–5) | 2 (2–2.5) "
        "| 2.00 (1.00–2.50) | ≥ 1.3× the pairs/s: reached |",
        "| peak memory above weights; reference copy | 1 MiB | 4 MiB | 0.25 "
        "| ≤ 0.5× the memory: reached |",
        "| pairs per second of training; reference cached | 5 (5–5) | 2.5 (2.5–2.5) "
        "| 2.00 (2.00–2.00) |  |",
        DPO.legend,
    )
    for name in ("README.md", "benchmarks/README.md"):
        written = (tmp_path / name).read_text()
        assert all(row in written for row in rows)
        assert "`python -m benchmarks dpo --peer trl==1.16.0`" in written
    missing = (tmp_path / "README.md").read_text().split("Not measured yet on cpu-2core: ")[1]
    assert "dpo" not in missing
    plot = (tmp_path / "benchmarks/plots/cpu-2core/dpo.svg").read_text()
    assert "pairs per second" in plot
