"""Rows prepared by code are not read again by other code."""

import functools
import importlib
import sys

import pytest
from datasets import Dataset

from fastrl.data import cache_key
from fastrl.data.prepare import prepare_pairs, prepare_texts
from tests.golden import tiny

WRITE = """
from helpers_of_cache_key import front

def write(row):
    return front + row["said"]
"""
MORE = """
class Writer:
    def __call__(self, row):
        return write(row)

    def method(self, row):
        return write(row)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes and imports a user's two files, the second of which the first imports."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("written_of_cache_key", "helpers_of_cache_key")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported(written=WRITE + MORE, helpers="front = 'w4 '\n"):
        for name, text in zip(names, (written, helpers), strict=True):
            (tmp_path / f"{name}.py").write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(names[0])

    yield imported
    for name in names:
        sys.modules.pop(name, None)


KINDS = {
    "function": lambda module: module.write,
    "partial": lambda module: functools.partial(module.write),
    "object": lambda module: module.Writer(),
    "method": lambda module: module.Writer().method,
    "closure": lambda module: lambda row: module.write(row),
    "within a list": lambda module: [module.write],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "edit",
    [{"written": WRITE.replace("front +", "'w8 ' +") + MORE}, {"helpers": "front = 'w5 '\n"}],
)
def test_an_edit_of_the_users_files_is_another_key(files, kind, edit):
    key = cache_key.user_code(KINDS[kind](files()))
    assert cache_key.user_code(KINDS[kind](files())) == key
    assert cache_key.user_code(KINDS[kind](files(**edit))) != key


def test_code_of_libraries_is_no_part_of_the_key():
    nothing = cache_key.user_code(None)
    assert cache_key.user_code(tiny.tokenizer(), pytest.fixture, "text", 3) == nothing


def rows_of(dataset, write):
    prepared = prepare_texts(dataset, tiny.tokenizer(), max_length=None, formatting_func=write)
    return prepared["input_ids"][:]


def test_an_edited_formatting_func_and_another_fastrl_prepare_anew(files, tmp_path, monkeypatch):
    Dataset.from_list([{"said": "w6"}, {"said": "w7"}]).to_json(tmp_path / "rows.jsonl")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def table():
        return Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))

    before = rows_of(table(), files().write)
    assert rows_of(table(), files(helpers="front = 'w5 w5 '\n").write) != before

    kept = rows_of(table(), files().write)
    assert kept == before
    monkeypatch.setattr("fastrl.data.encode.Encoder.alone", lambda self, said, *_: ([5, 6], []))
    assert rows_of(table(), files().write) == before  # from the cache
    monkeypatch.setattr(cache_key, "own_code", lambda: "another version")
    assert rows_of(table(), files().write) == [[5, 6], [5, 6]]


def test_pairs_are_keyed_as_texts_are(tmp_path, monkeypatch):
    rows = [{"prompt": "w4", "chosen": "w5", "rejected": "w6"}]
    Dataset.from_list(rows).to_json(tmp_path / "rows.jsonl")

    def key():
        table = Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache"))
        return prepare_pairs(table, tiny.tokenizer(), max_length=None)._fingerprint

    before = key()
    assert key() == before
    monkeypatch.setattr(cache_key, "own_code", lambda: "another version")
    assert key() != before
