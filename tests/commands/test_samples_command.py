"""``fastrl samples``: which samples are shown and exported, and what is refused."""

import csv
import json
import math

import numpy as np
import pytest
from pyarrow import parquet

from fastrl import cli
from fastrl.run.ledger import Ledger, Lists

REWARDS = {1: [0.5, 2.0], 2: [math.nan, -1.0], 3: [0.25, 0.5]}
LENGTHS = {1: [3, 1], 2: [0, 5], 3: [2, 4]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps with two samples each."""
    folder = tmp_path_factory.mktemp("run")
    ledger = Ledger(folder / "ledger", every=2)
    for step, rewards in REWARDS.items():
        lengths = LENGTHS[step]
        ledger.add(
            step,
            {
                "prompt": [f"question {step}.{i}, with a comma" for i in range(2)],
                "completion": [f" answer {step}.{i}" for i in range(2)],
                "completion_ids": Lists(np.arange(sum(lengths)), lengths),
                "logprobs": Lists(np.full(sum(lengths), -0.5), lengths),
                "reward": np.array(rewards),
                "reward/brief": np.array(rewards),
            },
        )
    ledger.flush()
    return str(folder)


def samples(capsys, *arguments):
    status = cli.main(["samples", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def answers(text):
    """The samples in a table, in its order."""
    return [word for word in text.split() if word[0].isdigit() and "." in word and "," not in word]


@pytest.mark.parametrize(("arguments", "expected"), [
    ([], "3.0 3.1 2.0 2.1 1.0 1.1"),
    (["--reverse"], "1.0 1.1 2.0 2.1 3.0 3.1"),
    (["--sort", "reward"], "1.1 3.1 1.0 3.0 2.1 2.0"),
    (["--sort", "reward", "--reverse"], "2.1 3.0 3.1 1.0 1.1 2.0"),
    (["--sort", "length", "--top", "2"], "2.1 3.1"),
    (["--step", "2"], "2.0 2.1"),
    (["--sample", "1"], "3.1 2.1 1.1"),
])  # fmt: skip
def test_samples_are_chosen_and_sorted(capsys, run, arguments, expected):
    status, out, _ = samples(capsys, run, "--columns", "completion", *arguments)
    assert (status, answers(out)) == (0, expected.split())


def test_a_table_has_what_one_reads_first_and_says_if_there_is_more(capsys, run):
    _, out, _ = samples(capsys, run, "--top", "4")
    head = next(line for line in out.splitlines() if "prompt" in line)
    assert head.split() == [
        "step",
        "sample",
        "reward",
        "length",
        "finish_reason",
        "prompt",
        "completion",
    ]
    assert "4 of 6 samples; --top shows more" in out
    assert "answer 3.1" in out
    _, out, _ = samples(capsys, run)
    assert "--top" not in out


def test_a_single_sample_is_shown_with_all_that_is_known(capsys, run):
    _, out, _ = samples(capsys, run, "--step", "3", "--sample", "1")
    lines = [line.split(None, 1) for line in out.splitlines() if line.strip()]
    shown = {name: value.strip() for name, value in lines}
    assert shown["completion"] == "answer 3.1"
    assert shown["completion_ids"] == "2 3 4 5"
    assert shown["logprobs"] == "-0.5 -0.5 -0.5 -0.5"
    assert shown["reward/brief"] == "0.5"
    assert shown["values"] == "–"


def test_exported_files_hold_the_samples_as_they_were_drawn(capsys, run, tmp_path):
    expected = [(step, i) for step in (1, 2, 3) for i in (0, 1)]
    for kind in ("jsonl", "csv", "parquet"):
        status, out, _ = samples(capsys, run, "--export", str(tmp_path / f"samples.{kind}"))
        assert (status, out) == (0, f"6 samples: {tmp_path / f'samples.{kind}'}\n")
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [(row["step"], row["sample"]) for row in rows] == expected
    assert rows[2]["reward"] is None
    assert rows[3]["completion_ids"] == [0, 1, 2, 3, 4]
    with (tmp_path / "samples.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(int(row["step"]), int(row["sample"])) for row in table] == expected
    assert table[0]["prompt"] == "question 1.0, with a comma"
    assert json.loads(table[3]["completion_ids"]) == [0, 1, 2, 3, 4]
    assert (table[2]["reward"], table[2]["values"]) == ("", "")
    found = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["completion"] for row in found] == [row["completion"] for row in rows]


def test_an_export_is_in_the_order_of_steps_unless_it_is_reversed(capsys, run, tmp_path):
    def steps(*flags: str) -> list[int]:
        path = tmp_path / "samples.jsonl"
        samples(capsys, run, "--export", str(path), *flags)
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    assert steps("--reverse") == sorted(steps(), reverse=True) != steps()


def test_an_exported_file_has_the_columns_and_the_order_that_are_asked_for(capsys, run, tmp_path):
    path = tmp_path / "best.jsonl"
    arguments = ["--columns", "length,step", "--sort", "reward", "--top", "2"]
    samples(capsys, run, "--export", str(path), *arguments)
    assert path.read_text() == '{"length": 1, "step": 1}\n{"length": 4, "step": 3}\n'


@pytest.mark.parametrize(("arguments", "message"), [
    (["--step", "4"], "does not have step 4: it has the steps 1 to 3"),
    (["--step", "3", "--sample", "2"], "--sample 2: step 3 has no such sample"),
    (["--columns", "step,rewards"], "has no column 'rewards': its columns are step, sample"),
    (["--sort", "kl"], "argument --sort: invalid choice: 'kl'"),
    (["--top", "0"], "--top must be at least 1, got 0"),
    (["--export", "x.xlsx"], "must end in one of .jsonl, .csv, .parquet"),
    (["--export", "no/folder/x.csv"], "there is no folder no/folder: make it"),
])  # fmt: skip
def test_what_is_not_there_is_named(capsys, run, arguments, message):
    status, out, err = samples(capsys, run, *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_a_folder_without_a_ledger_is_named(capsys, tmp_path):
    status, _, err = samples(capsys, str(tmp_path))
    assert status == 2
    assert f"{tmp_path} has no ledger" in err
    (tmp_path / "ledger").mkdir()
    status, _, err = samples(capsys, str(tmp_path))
    assert status == 2
    assert "it is empty" in err


def test_a_damaged_file_is_named(capsys, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    ledger.add(1, {"prompt": ["a"], "reward": np.ones(1)})
    ledger.flush()
    path = tmp_path / "ledger" / "steps-000001-000001.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    status, _, err = samples(capsys, str(tmp_path))
    assert status == 2
    assert f"{path} is damaged" in err


def test_a_sample_does_not_control_the_terminal(capsys, tmp_path, monkeypatch):
    r"""Control characters are shown as in Python; an exported file has them as they are."""
    monkeypatch.setenv("COLUMNS", "120")
    text = "\x1b]0;title\x07\x1b[31mred \x9b1m\x00\r\x7f [b]ä\tand\nmore"
    shown = r"\x1b]0;title\x07\x1b[31mred \x9b1m\x00\r\x7f [b]ä"
    ledger = Ledger(tmp_path / "ledger")
    ledger.add(1, {"prompt": [text], "completion": [text], "reward": np.ones(1)})
    ledger.flush()
    for arguments in (["--columns", "prompt,completion"], ["--step", "1", "--sample", "0"]):
        _, out, _ = samples(capsys, str(tmp_path), *arguments)
        assert out.count(shown) == 2
        assert not {c for c in out if not c.isprintable()} - {"\n"}
    path = tmp_path / "samples.jsonl"
    samples(capsys, str(tmp_path), "--export", str(path))
    assert json.loads(path.read_text())["completion"] == text
