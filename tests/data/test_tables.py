"""Prompts from files: formats, columns, cutting, and held-out prompts."""

import json
import re

import pytest
from datasets import Dataset, DatasetDict

from fastrl.data import tables as prompt_data
from fastrl.data.chat import as_text
from fastrl.data.preferences import prepare_completions_of_ids, prepare_pairs_of_ids
from fastrl.data.tables import (
    drop_prompts,
    held_out_count,
    load_table,
    numbered,
    sample_rows,
    take_prompts,
)
from tests.golden import tiny

ROWS = [{"text": f"the film number {i} is good", "label": i % 2} for i in range(6)]


# datasets before 5 leaves a CSV file open.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_local_files_load(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    table = Dataset.from_list(ROWS)
    {
        ".jsonl": table.to_json,
        ".json": table.to_json,
        ".parquet": table.to_parquet,
        ".csv": table.to_csv,
    }[suffix](path)
    assert load_table(str(path)).to_list() == ROWS


def test_folder_of_files_is_read_in_order(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, row in (("b.jsonl", ROWS[1]), ("a.jsonl", ROWS[0])):
        (folder / name).write_text(json.dumps(row) + "\n")
    assert load_table(str(folder)).to_list() == ROWS[:2]


def test_saved_data_set_loads_with_its_splits(tmp_path):
    table = Dataset.from_list(ROWS)
    DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "saved")
    assert len(load_table(str(tmp_path / "saved"), "test")) == 1
    with pytest.raises(ValueError, match="no split 'dev': choose one of train, test"):
        load_table(str(tmp_path / "saved"), "dev")


def test_paths_that_hold_no_data_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no data set at .*gone\.jsonl"):
        load_table(str(tmp_path / "gone.jsonl"))
    with pytest.raises(FileNotFoundError, match="there is no data set at"):
        load_table(str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="holds no"):
        load_table(str(tmp_path))
    (tmp_path / "data.xml").write_text("<x/>")
    with pytest.raises(ValueError, match=r"cannot read data\.xml"):
        load_table(str(tmp_path / "data.xml"))
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="mixes file formats"):
        load_table(str(tmp_path))


GOOD = '{"text": "a film"}\n'


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", "", "a.jsonl is empty"),
    ("a.csv", "", "a.csv is empty"),
    ("a.txt", "", "a.txt is empty"),
    ("a.parquet", "", "a.parquet is empty"),
    ("a.jsonl", "\n\n", "a.jsonl holds no rows"),
    ("a.json", "[]", "a.json holds no rows"),
    ("a.csv", "text\n", "a.csv holds no rows"),
    ("a.jsonl", GOOD + '{"text": \n' + GOOD, "a.jsonl, line 2 is not valid JSON"),
    ("a.json", '[{"text": "x"},\n{"text" 3}]', "a.json, line 2 is not valid JSON"),
    ("a.jsonl", "1\n2\n", "a.jsonl, line 1 is not an object with named columns but 1"),
    ("a.csv", 'text,label\n"a,1\nb,2,3\n', "a.csv cannot be read as CSV"),
    ("a.csv", "text,label\na,1\nb,2,3\n", "Expected 2 fields in line 3, saw 3"),
    ("a.parquet", "no parquet", "a.parquet cannot be read as Parquet"),
    ("a.jsonl", GOOD + '{"text": "caf\xe9"}\n', "a.jsonl, line 2 is not UTF-8 (byte 0xe9)"),
    ("a.csv", "text\nfine\ncaf\xe9\n", "a.csv, line 3 is not UTF-8 (byte 0xe9)"),
    ("a.txt", "caf\xe9\n", "a.txt, line 1 is not UTF-8 (byte 0xe9)"),
    ("a.txt", "fine\ncut short\xc3", "a.txt, line 2 is not UTF-8 (byte 0xc3)"),
])  # fmt: skip
def test_files_that_cannot_be_read_are_named_with_their_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_table(str(tmp_path / name))


def test_a_file_that_cannot_be_read_leaves_no_bar_and_no_other_message(tmp_path, capfd):
    (tmp_path / "a.jsonl").write_text(GOOD + '{"text": "b\n')
    with pytest.raises(ValueError, match="line 2 is not valid JSON"):
        load_table(str(tmp_path / "a.jsonl"))
    assert capfd.readouterr().err == ""


def test_of_a_folder_the_broken_file_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD)
    (tmp_path / "b.jsonl").write_text(GOOD + "{")
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2 is not valid JSON"):
        load_table(str(tmp_path))


def test_a_letter_may_lie_across_two_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_data, "_CHUNK", 3)
    (tmp_path / "a.txt").write_text("ab\u00e9\u00e9\n", encoding="utf-8")
    assert load_table(str(tmp_path / "a.txt"))["text"][:] == ["ab\u00e9\u00e9"]
    (tmp_path / "b.txt").write_bytes(b"a\nb\n\xc3\n")
    with pytest.raises(ValueError, match=r"b\.txt, line 3 is not UTF-8 \(byte 0xc3\)"):
        load_table(str(tmp_path / "b.txt"))


def test_a_data_set_without_a_name_is_refused():
    with pytest.raises(ValueError, match="the data set's name is empty"):
        load_table("")


@pytest.mark.parametrize(
    ("asked", "available", "count"),
    [(None, 3, 0), (None, 10, 1), (None, 200, 20), (None, 10_000, 256), (7, 8, 7), (500, 200, 500)],
)
def test_a_tenth_is_held_out_unless_a_number_is_asked_for(asked, available, count):
    assert held_out_count(asked, available) == count


def test_prompts_are_first_words_and_other_columns_stay():
    prompts = take_prompts(Dataset.from_list(ROWS), words=3)
    assert prompts["prompt"][:] == ["the film number"] * 6
    assert prompts["label"][:] == [0, 1, 0, 1, 0, 1]
    assert prompts["text"][0] == ROWS[0]["text"]


def test_prompts_are_first_tokens():
    class Letters:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": list(text)}

        def decode(self, ids):
            return "".join(ids)

    table = Dataset.from_dict({"query": ["abcdef", "ab"]})
    assert take_prompts(table, max_tokens=3, tokenizer=Letters())["prompt"][:] == ["abc", "ab"]


def test_missing_column_lists_the_columns():
    with pytest.raises(ValueError, match="no column 'prompt': its columns are text, label"):
        take_prompts(Dataset.from_list(ROWS), "prompt")
    with pytest.raises(ValueError, match="choose a prompt column among a, b"):
        take_prompts(Dataset.from_dict({"a": ["x"], "b": ["y"]}))


def test_prompts_must_be_text():
    with pytest.raises(
        TypeError, match="column 'label' must hold text or chat messages, but row 0 holds int"
    ):
        take_prompts(Dataset.from_list(ROWS), "label")
    table = Dataset.from_dict({"prompt": ["", " ", "x"], "n": [0, 1, 2]})
    with pytest.warns(UserWarning, match="2 of 3 prompts dropped: .* such as in row 0"):
        assert take_prompts(table)["n"][:] == [2]
    with pytest.raises(ValueError, match="every prompt is empty"):
        take_prompts(Dataset.from_dict({"prompt": ["", " "]}))


def test_messages_of_blocks_and_without_content_have_texts():
    image = {"type": "image", "text": None}
    chats = [
        [{"role": "user", "content": [image, {"type": "text", "text": text}]}]
        for text in ("a ", " ")
    ]
    with pytest.warns(UserWarning, match="1 of 2 prompts dropped"):
        assert len(take_prompts(Dataset.from_dict({"prompt": chats}))) == 1
    assert as_text(chats[0]) == "a "
    call = {"role": "assistant", "content": None, "tool_calls": []}
    assert (as_text([call]), as_text([*chats[0], call])) == ("", "user: a \n\nassistant: ")


def test_rows_are_named_by_their_numbers_in_the_file():
    rows = [{"prompt": "w5", "chosen": "w6", "rejected": "w7"}, {"prompt": None}]
    shuffled = numbered(Dataset.from_list(rows)).select([1, 0])
    for prepare in (prepare_pairs_of_ids, prepare_completions_of_ids):
        with pytest.raises(ValueError, match="of row 1"):
            prepare(shuffled, tiny.tokenizer(), None, None)


def test_texts_beside_chats_are_named_by_their_rows(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "b"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="a text in row 1 and chat messages in row 0"):
        take_prompts(load_table(str(tmp_path / "rows.jsonl"), "train"))


def test_a_table_of_nothing_but_prompts_is_enough():
    table = Dataset.from_dict({"prompt": ["one two three", " ", "four five six"]})
    with pytest.warns(UserWarning, match="1 of 3 prompts dropped"):
        found = take_prompts(table, words=2)
    assert found.to_dict() == {"prompt": ["one two", "four five"]}


def test_held_out_prompts_are_distinct_and_never_trained_on():
    table = Dataset.from_dict({"prompt": [f"p{i % 5}" for i in range(20)]})
    held_out = sample_rows(table, 2, seed=0)
    assert held_out.to_list() == sample_rows(table, 2, seed=0).to_list()
    assert len(set(held_out["prompt"])) == 2
    train = drop_prompts(table, held_out["prompt"])
    assert len(train) == 12
    assert not set(train["prompt"]) & set(held_out["prompt"])
    with pytest.raises(ValueError, match="leave none to train on"):
        drop_prompts(table, sample_rows(table, 50, seed=0)["prompt"])


@pytest.mark.parametrize("name", ["a[1].jsonl", "b*.jsonl", "c?.jsonl", "[d]/e.jsonl", "f[!x].csv"])
def test_a_files_name_is_taken_literally(name, tmp_path):
    """The names are patterns, too, that match other files."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    text = "prompt\nown\n" if path.suffix == ".csv" else '{"prompt": "own"}\n'
    path.write_text(text)
    for other in ("a1.jsonl", "b2.jsonl", "c3.jsonl", "d/e.jsonl", "fy.csv"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text(text.replace("own", "another"))
    assert list(load_table(str(path))["prompt"]) == ["own"]


@pytest.mark.parametrize("as_lines", [True, False])
def test_texts_of_dates_in_json_stay_texts(as_lines, tmp_path):
    rows = [
        {"n": i, "solution": day, "of": {"at": day}}
        for i, day in enumerate(("2024-01-01", "2023-05-06"))
    ]
    said = "\n".join(map(json.dumps, rows)) if as_lines else json.dumps(rows)
    file = tmp_path / ("rows.jsonl" if as_lines else "rows.json")
    file.write_text(said)
    assert list(load_table(str(file))) == rows


@pytest.mark.parametrize("beside", [9007199254740993, 1.5])
def test_integers_that_would_lose_digits_are_refused(beside, tmp_path):
    file = tmp_path / "rows.jsonl"
    large = 12345678901234567890123 if isinstance(beside, int) else 9007199254740993
    rows = [{"n": "1", "answer": beside}, {"n": "2", "answer": large}]
    file.write_text("\n".join(map(json.dumps, rows)))
    said = r"rows.jsonl, row \d: the integer \d+ in column 'answer'"
    said += "|rows.jsonl cannot be read as JSONL: Value is too big"  # of datasets before 4.8.5
    with pytest.raises(ValueError, match=said):
        load_table(str(file))
    kept = [{"n": str(large), "answer": x} for x in (2**62 + 1, 1)]
    file.write_text("\n".join(map(json.dumps, kept)))
    assert load_table(str(file)).to_list() == kept


def test_columns_that_only_later_rows_have_are_kept():
    assert prompt_data.as_dataset([{"a": 1}, {"a": 2, "b": 3}]).to_list() == [
        {"a": 1, "b": None},
        {"a": 2, "b": 3},
    ]


@pytest.mark.parametrize(("content", "text"), [({"text": "a"}, "a"), (["a", "b"], "ab"), (7, "7")])
def test_a_content_that_is_no_text_is_read_without_an_error(content, text):
    """By whatever reads it first; what a content may be is checked behind it."""
    assert as_text([{"role": "user", "content": content}]) == text
