"""The files of a ledger: what is read is what was added, or an error that names the file."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from fastrl.run import ledger as module
from fastrl.run.ledger import Ledger, Lists, fields, read_facts, read_ledger

SAMPLES = 3


def columns(step, **others):
    """Of a step of three samples, whose numbers tell them apart."""
    rng = np.random.RandomState(step)
    lengths = rng.randint(0, 5, SAMPLES)
    return {
        "prompt_row": rng.randint(0, 99, SAMPLES),
        "prompt": [f"prompt {step}.{i}" for i in range(SAMPLES)],
        "prompt_ids": Lists(rng.randint(0, 50000, 2 * SAMPLES), [2] * SAMPLES),
        "completion": [f" text {step}.{i} é" for i in range(SAMPLES)],
        "completion_ids": Lists(rng.randint(0, 50000, lengths.sum()), lengths),
        "finish_reason": ["eos", "length", "nan"],
        "seed": np.full(SAMPLES, (1 << 62) - step),
        "logprobs": Lists(rng.randn(lengths.sum()).astype(np.float32), lengths),
        "values": None,
        "reward": np.array([0.5, -1.0, np.nan], dtype=np.float32),
        **others,
    }


def filled(folder, steps, every=4, **others) -> Ledger:
    ledger = Ledger(folder, every)
    for step in steps:
        ledger.add(step, columns(step, **others))
    return ledger


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))


def rows(folder, *args):
    """As text: NaN is equal to itself there."""
    return [repr(row) for row in read_ledger(folder, *args).to_pylist()]


def steps(folder, *args):
    return read_ledger(folder, ["step"], *args)["step"].to_pylist()[::SAMPLES]


def test_rows_are_read_as_they_were_added(tmp_path):
    filled(tmp_path, range(1, 11)).flush()
    assert names(tmp_path) == [
        "steps-000001-000004.parquet",
        "steps-000005-000008.parquet",
        "steps-000009-000010.parquet",
    ]
    found = read_ledger(tmp_path)
    assert found.column_names == list(fields())
    assert list(zip(found["step"].to_pylist(), found["sample"].to_pylist(), strict=True)) == [
        (step, sample) for step in range(1, 11) for sample in range(SAMPLES)
    ]
    for step in (1, 4, 5, 10):
        table, expected = read_ledger(tmp_path, None, step, step), columns(step)
        for name, column in expected.items():
            if column is None:
                assert table[name].null_count == SAMPLES
            elif isinstance(column, Lists):
                parts = np.split(column.values, np.cumsum(column.lengths)[:-1])
                assert table[name].to_pylist() == [part.tolist() for part in parts]
            else:
                np.testing.assert_array_equal(table[name].to_pylist(), column)


def test_columns_and_steps_are_chosen(tmp_path):
    filled(tmp_path, range(1, 11)).flush()
    assert read_ledger(tmp_path, ["reward", "sample"], 4, 5).column_names == ["reward", "sample"]
    assert steps(tmp_path, 4, 5) == [4, 5]
    assert steps(tmp_path, 9) == [9, 10]
    assert steps(tmp_path, 12) == []
    for name in ("nothing", "reward/none"):
        with pytest.raises(ValueError, match=f"has no column '{name}': its columns are step, "):
            read_ledger(tmp_path, [name])


def test_without_a_ledger_there_are_no_rows(tmp_path):
    found = read_ledger(tmp_path / "ledger", ["step", "reward/brief", "logprobs"])
    assert (found.num_rows, found.column_names) == (0, ["step", "reward/brief", "logprobs"])
    assert read_ledger(tmp_path / "ledger").column_names == list(fields())
    with pytest.raises(ValueError, match="has no column 'lenght'"):
        read_ledger(tmp_path / "ledger", ["lenght"])


def test_reward_functions_may_differ_between_files(tmp_path):
    ledger = filled(tmp_path, [1, 2], every=1)
    ledger.add(3, columns(3, **{"reward/brief": np.ones(SAMPLES)}))
    found = read_ledger(tmp_path, ["step", "reward/brief"]).to_pylist()
    assert [row["reward/brief"] for row in found] == [None] * 6 + [1.0] * 3
    assert read_ledger(tmp_path).column_names == [*fields(), "reward/brief"]
    assert read_ledger(tmp_path, ["reward/brief"], 1, 1).to_pydict() == {"reward/brief": [None] * 3}


def test_only_the_files_of_the_steps_are_opened_and_a_damaged_one_is_named(tmp_path):
    filled(tmp_path, range(1, 9))
    first = tmp_path / "steps-000001-000004.parquet"
    first.write_bytes(first.read_bytes()[:-100])
    assert steps(tmp_path, 5) == [5, 6, 7, 8]
    with pytest.raises(ValueError, match=r"steps-000001-000004\.parquet is damaged .*: put a copy"):
        read_ledger(tmp_path, ["step"])


def test_a_flipped_bit_is_an_error_or_changes_no_row(tmp_path):
    filled(tmp_path, range(1, 5))
    expected, path = rows(tmp_path), next(tmp_path.glob("*.parquet"))
    sound, rng, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(60):
        content = bytearray(sound)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            found = rows(tmp_path)
        except ValueError as error:
            found, refused = str(error), refused + 1
        assert found == expected or str(path) in found
    assert refused > 30


def test_a_newer_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FORMAT", 7)
    filled(tmp_path, range(1, 5))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"written by a newer fastrl \(format 7, this one reads 1"):
        read_ledger(tmp_path)


def test_a_step_is_added_once(tmp_path):
    ledger = filled(tmp_path, [1, 2])
    for other in (ledger, filled(tmp_path / "other", [3])):
        with pytest.raises(ValueError, match=r"has step [23] already, and is to get step 2"):
            other.add(2, columns(2))
    ledger.flush()
    with pytest.raises(ValueError, match="has step 2 already, and is to get step 1"):
        Ledger(tmp_path).add(1, columns(1))


def test_rows_that_could_not_be_written_are_kept(tmp_path, monkeypatch):
    ledger = filled(tmp_path, [1, 2])

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.flush()
    monkeypatch.undo()
    ledger.add(3, columns(3))
    ledger.flush()
    assert steps(tmp_path) == [1, 2, 3]


def test_a_file_has_its_name_when_it_is_whole(tmp_path, monkeypatch):
    """A process that is killed as it writes leaves no file that is read."""

    def killed(self, target):
        raise KeyboardInterrupt

    filled(tmp_path, range(1, 5))
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, range(5, 9))
    monkeypatch.undo()
    assert steps(tmp_path) == [1, 2, 3, 4]
    Ledger(tmp_path).supersede(4)
    assert [path.name for path in tmp_path.iterdir()] == ["steps-000001-000004.parquet"]
    filled(tmp_path, range(5, 9))
    assert steps(tmp_path) == list(range(1, 9))


def test_the_disk_has_all_files_after_a_flush_that_waits(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino) or fsync(handle)
    )
    ledger = filled(tmp_path, range(1, 11))
    ledger.flush()
    assert synced == []
    ledger.flush(sync=True)  # files that were written before, too
    written = {path.stat().st_ino for path in (tmp_path, *tmp_path.glob("*.parquet"))}
    assert len(written) == 4
    assert written <= set(synced)


@pytest.mark.parametrize(("after", "kept", "moved"), [
    (0, [], ["1-4", "5-8", "9-10"]),
    (4, ["1-4"], ["5-8", "9-10"]),
    (6, ["1-4", "5-6"], ["5-8", "9-10"]),
    (10, ["1-4", "5-8", "9-10"], []),
])  # fmt: skip
def test_superseded_steps_are_moved_and_nothing_is_lost(tmp_path, after, kept, moved):
    ledger = filled(tmp_path, range(1, 11))
    ledger.flush()
    before = rows(tmp_path)

    def named(which, folder=""):
        return [f"{folder}steps-{int(a):06d}-{int(b):06d}.parquet" for a, b in
                (each.split("-") for each in which)]  # fmt: skip

    ledger.supersede(after)
    assert names(tmp_path) == named(kept) + named(moved, "superseded-1/")
    assert rows(tmp_path) == before[: after * SAMPLES]
    if moved:
        assert (
            rows(tmp_path / "superseded-1") == before[(int(moved[0].split("-")[0]) - 1) * SAMPLES :]
        )
    for step in range(after + 1, 11):  # the run goes on
        ledger.add(step, columns(step))
    ledger.flush()
    assert rows(tmp_path) == before
    ledger.supersede(9)
    assert (tmp_path / f"superseded-{2 if moved else 1}").is_dir()


@pytest.mark.parametrize("at", [0, 1])
def test_superseding_may_be_interrupted(tmp_path, monkeypatch, at):
    filled(tmp_path, range(1, 11)).flush()
    before, rename, calls = rows(tmp_path), Path.rename, []

    def killed(self, target):
        if len(calls) == at:
            raise KeyboardInterrupt
        calls.append(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        Ledger(tmp_path).supersede(6)
    monkeypatch.undo()
    assert rows(tmp_path)[: 6 * SAMPLES] == before[: 6 * SAMPLES]
    assert len(steps(tmp_path)) == len(set(steps(tmp_path)))
    Ledger(tmp_path).supersede(6)
    assert rows(tmp_path) == before[: 6 * SAMPLES]
    moved = [r for n in (1, 2) for r in rows(tmp_path / f"superseded-{n}")]
    assert set(before) <= {*rows(tmp_path), *moved}


def test_files_say_what_they_were_made_with(tmp_path):
    ledger = filled(tmp_path, [1, 2])
    ledger.facts["generation_kwargs"] = {"max_new_tokens": 4, "stop": {1, 2}.__class__}
    ledger.flush()
    (facts,) = read_facts(tmp_path, 2, 2)
    assert facts["generation_kwargs"]["max_new_tokens"] == 4
    assert {"torch", "triton", "transformers", "fastrl-lm"} <= set(facts["versions"])
    assert {"cpu", "threads", "gpus"} <= set(facts["machine"])
    assert read_facts(tmp_path, 3, 9) == read_facts(tmp_path / "none", 1, 9) == []
    ledger.supersede(1)
    assert read_facts(tmp_path, 1, 1) == [facts]
    ledger.add(2, columns(2))
    ledger.flush()
    assert read_facts(tmp_path, 1, 2) == [facts, facts]


def test_every_is_one_or_more(tmp_path):
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Ledger(tmp_path, every=0)
