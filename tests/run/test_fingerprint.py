"""Data sets are told apart by any of their rows; the same rows are the same data."""

import datasets
import pytest
import torch

from fastrl.data.datas_loader import DatasLoader
from fastrl.data.prompts import Prompts
from fastrl.data.sft_packing import PackedTexts
from fastrl.run.fingerprint import fingerprint
from tests.golden import tiny

ROWS = [
    {"prompt": f"w{i}", "chosen": f"w{i + 3} w4", "rejected": "w5", "answer": i, "ok": i % 3 == 0}
    for i in range(64)
]
CHANGES = {
    "a row": lambda row: {**row, "prompt": "w9 w9"},
    "another column": lambda row: {**row, "answer": -1},
    "a boolean": lambda row: {**row, "ok": not row["ok"]},
    "a pair turned round": lambda row: {**row, "chosen": row["rejected"],
     "rejected": row["chosen"]},
}  # fmt: skip


def as_prompts(rows):
    return Prompts.from_dataset(datasets.Dataset.from_list(rows), "prompt", tiny.tokenizer())


def as_texts(rows):
    words = "{prompt} {chosen} w7 {rejected} w{answer} w3{ok:d}".format
    ids = [tiny.tokenizer()(words(**row))["input_ids"] for row in rows]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


KINDS = {
    "data set": datasets.Dataset.from_list,
    "shuffled": lambda rows: datasets.Dataset.from_list(rows).shuffle(seed=1),
    "list": list,
    "stream": lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "loader": lambda rows: DatasLoader(datasets.Dataset.from_list(rows), tiny.tokenizer()),
    "prompts": as_prompts,
    "packed": lambda rows: PackedTexts(as_texts(rows), 100),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_one_row_of_many_makes_another_data_set(kind, change):
    make, rows = KINDS[kind], list(ROWS)
    assert fingerprint(make(rows)) == fingerprint(make(list(ROWS)))
    rows[37] = CHANGES[change](rows[37])
    assert fingerprint(make(rows)) != fingerprint(make(ROWS))


def test_the_same_rows_are_the_same_from_a_slice_a_file_and_another_order_of_columns(tmp_path):
    whole = datasets.Dataset.from_list(ROWS)
    some = whole.select(range(1, 38))
    some.to_json(tmp_path / "some.jsonl")
    turned = [dict(reversed(row.items())) for row in ROWS[1:38]]
    read = datasets.load_dataset(
        "json",
        data_files=str(tmp_path / "some.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    for other in (datasets.Dataset.from_list(turned), read):
        assert fingerprint(other) == fingerprint(some)
    assert fingerprint(some.add_column("ref", [0.1] * 37), ["ref"]) == fingerprint(some)


def test_rows_of_tensors_and_bytes_are_told_apart():
    rows = [{"ids": torch.arange(5), "image": b"ab"}, {"ids": torch.arange(3), "image": b"c"}]
    others = (
        [rows[0], {**rows[1], "ids": torch.arange(1, 4)}],
        [{**rows[0], "image": b"aa"}, rows[1]],
    )
    assert len({fingerprint(each) for each in (rows, *others)}) == 3
