"""Many prompts at once: the ids of each alone; encoded once, and then read from the cache."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from fastrl.data import encoded_prompts
from fastrl.data.encode import encode_prompt
from fastrl.data.encoded_prompts import TokenRows, encode_prompts
from fastrl.data.prompts import Prompts
from tests.data.conftest import KINDS, trained, with_template

TEXTS = ["The film", "", " was  won", "日本 é", "it is a test\n", "[INST] x [/INST]"]
CHATS: list[Any] = [
    [{"role": "user", "content": text}] for text in ("The film", "it is", "a mess; nobody")
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(encoded_prompts, "KEPT_FROM", 3)
    return tmp_path / "fastrl-prompts"


def name_of(i: int) -> str:
    return f"prompts[{i}]"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("closed", [False, True])
def test_a_batch_has_the_ids_of_each_prompt_alone(kind: str, closed: bool, cache: Path) -> None:
    tokenizer = with_template(kind, "chatml")
    start = tokenizer.bos_token or tokenizer.cls_token or ""
    prompts = [*TEXTS, *CHATS, f"{start}The film"]
    alone = [encode_prompt(prompt, tokenizer, closed=closed) for prompt in prompts]
    for _ in range(2):  # as it is encoded, and as it is read again
        texts, rows = encode_prompts(prompts, name_of, tokenizer, closed=closed)
        assert texts == [text for text, _ in alone]
        assert [row.tolist() for row in rows] == [ids for _, ids in alone]
        assert rows.lengths == [len(ids) for _, ids in alone]
    assert len(list(cache.iterdir())) == 1


def test_what_is_kept_is_read_until_prompts_or_tokenizer_change(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    encode = encoded_prompts.Encoder.prompts
    monkeypatch.setattr(
        encoded_prompts.Encoder,
        "prompts",
        lambda self, texts, *rest, **named: (
            asked.append(len(texts)) or encode(self, texts, *rest, **named)
        ),
    )
    for kind, template, prompts, times in (
        ("bpe", "words", TEXTS[2:], 1),
        ("bpe", "words", TEXTS[2:], 1),
        ("bpe", "words", TEXTS[:1:-1], 2),
        ("bpe", "words", CHATS, 3),
        ("bpe", "open", CHATS, 4),
        ("unigram", "open", CHATS, 5),
        ("bpe", "open", TEXTS[2:4], 6),  # few are not kept
        ("bpe", "open", TEXTS[2:4], 7),
    ):
        tokenizer = with_template(kind, template)
        encode_prompts(prompts, name_of, tokenizer)
        assert len(asked) == times
    tokenizer.chat_template += "{# strftime_now #}"  # it may write another date tomorrow
    for times in (8, 9):
        encode_prompts(CHATS, name_of, tokenizer)
        assert len(asked) == times
    tokenizer = with_template("bpe", "open")
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:100])  # broken: encoded anew
    _, rows = encode_prompts(CHATS, name_of, tokenizer)
    assert len(asked) == 10
    assert [x.tolist() for x in rows] == [encode_prompt(x, tokenizer)[1] for x in CHATS]


def test_a_cache_that_cannot_be_written_to_is_none(cache: Path) -> None:
    cache.write_text("a file in the folder's place")
    assert len(encode_prompts(TEXTS, name_of, trained("bpe"))[1]) == len(TEXTS)


def test_rows_of_one_tensor_are_a_sequence_of_tensors() -> None:
    rows = TokenRows.of([[1, 2], [], [3]])
    assert [x.tolist() for x in rows] == [[1, 2], [], [3]]
    assert rows[-1].dtype == torch.int64
    assert [x.tolist() for x in rows[1:]] == [[], [3]]
    with pytest.raises(IndexError):
        rows[3]


@pytest.mark.parametrize(
    "given", [torch.tensor([1.5]), torch.zeros(1, 2, dtype=torch.long), [-3], [True], [[1], [2]], 7]
)
def test_a_prompt_that_is_neither_text_nor_ids_is_named(given: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\] is .*: a prompt is a text"):
        Prompts.from_list(["The", given], trained("bpe"))


def test_texts_and_ids_may_be_mixed() -> None:
    tokenizer = trained("bpe")
    ids = encode_prompt("film", tokenizer)[1]
    found = Prompts.from_list(["The", torch.tensor(ids), ids], tokenizer).samples
    assert found.prompt_texts == found.prompts == ["The", "film", "film"]
    assert [x.tolist() for x in found.prompt_ids] == [encode_prompt("The", tokenizer)[1], ids, ids]
