"""One row has the same token ids whichever way it comes in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import disable_progress_bars
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from fastrl.alignment import BatchFactory, DatasLoader
from fastrl.data.chat import is_blank
from fastrl.data.collators import IGNORED
from fastrl.data.encode import end_token
from fastrl.data.prepare import prepare_pairs, prepare_texts
from fastrl.data.prompt_ids import token_ids
from fastrl.data.prompts import Prompts
from fastrl.data.reads_eos import KEY
from fastrl.rewards.functions import ClassifierReward
from tests.data.conftest import KINDS, TEMPLATES, trained, with_template

# What they cut is counted in a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.* tokens and are cut")

disable_progress_bars()
SETTINGS = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # rows are small as they are, and data sets slow
)
WORDS = ["The", "film", "was", "won", "derful", "it", "is", "a", "7", "mess;", "é", "日本", "[/"]
spaces = st.sampled_from(["", " ", "  ", "\n"])
texts = st.lists(st.tuples(spaces, st.sampled_from(WORDS)), min_size=1, max_size=6).map(
    lambda parts: "".join(x for pair in parts for x in pair)
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@st.composite
def text_rows(draw: Any) -> tuple[Any, Any]:
    return draw(texts), draw(texts)


@st.composite
def chat_rows(draw: Any) -> tuple[Any, Any]:
    turns = [user(draw(texts))]
    if draw(st.booleans()):
        turns += [assistant(draw(texts)), user(draw(texts))]
    return turns, [assistant(draw(texts))]


def more(answer: Any) -> Any:
    """Another answer, whose tokens differ."""
    if isinstance(answer, str):
        return answer + " again"
    return [assistant(answer[0]["content"] + " again")]


class Reader(torch.nn.Module):
    """A classifier that remembers what it read."""

    def __init__(self, reads_eos: bool | None):
        super().__init__()
        given = {} if reads_eos is None else {KEY: reads_eos}
        self.config = SimpleNamespace(num_labels=1, pad_token_id=0, label2id={"x": 0}, **given)
        self.device = torch.device("cpu")
        self.read: list[list[int]] = []

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        rows = zip(input_ids, attention_mask, strict=True)
        self.read += [ids[mask.bool()].tolist() for ids, mask in rows]
        return SimpleNamespace(logits=torch.zeros(len(input_ids), 1))


def scored(tokenizer: Any, prompt: Any, answer: Any, reads_eos: bool | None, **given: Any) -> Any:
    reader = Reader(reads_eos)
    ClassifierReward(reader, tokenizer)([prompt], [answer], **given)
    return reader.read[0]


def learned(tokenizer: Any, row: dict[str, Any], limit: int | None) -> tuple[Any, Any]:
    (made,) = prepare_texts([row], tokenizer, limit)
    border = next(i for i, label in enumerate(made["labels"]) if label != IGNORED)
    assert made["labels"] == [IGNORED] * border + made["input_ids"][border:]
    return made["input_ids"][:border], made["input_ids"]


def every_door(tokenizer: Any, prompt: Any, answer: Any, limit: int) -> tuple[Any, Any]:
    """Asserts that all of them make the same ids; returns those of the prompt and of the whole."""
    row = {"prompt": prompt, "completion": answer}
    pair = {"prompt": prompt, "chosen": answer, "rejected": more(answer)}
    (example,) = DatasLoader([row], tokenizer)
    assume(example.prompt_ids and example.responses[0].ids)
    ids = [*example.prompt_ids, *example.responses[0].ids]

    (batch,) = BatchFactory("sft", DatasLoader([row], tokenizer), batch_size=1)
    assert batch["generation1_token_ids"][0].tolist() == ids
    assert batch["prompt_token_ids"][0].tolist() == [*example.prompt_ids]
    (batch,) = BatchFactory("reward-modelling", DatasLoader([pair], tokenizer), batch_size=1)
    kept = batch["generation1_attention_mask"][0].bool()
    assert batch["generation1_token_ids"][0][kept].tolist() == ids

    before, whole = learned(tokenizer, row, None)
    assert (before, whole) == ([*example.prompt_ids], ids)
    (trained_on,) = prepare_pairs([pair], tokenizer, None, add_eos=True)
    assert trained_on["chosen_ids"] == ids
    assert scored(tokenizer, prompt, answer, True) == ids
    (trained_on,) = prepare_pairs([pair], tokenizer, None, add_eos=False)
    assert trained_on["chosen_ids"] == scored(tokenizer, prompt, answer, False)
    (asked,) = Prompts.from_list([prompt], tokenizer).samples.prompt_ids
    assert asked.tolist() == [*example.prompt_ids]
    assert token_ids(prompt, tokenizer).tolist() == [*example.prompt_ids]

    (cut,) = DatasLoader([row], tokenizer, max_length=limit)
    if cut.responses[0].ids:
        assert learned(tokenizer, row, limit)[1] == [*cut.prompt_ids, *cut.responses[0].ids]
    return [*example.prompt_ids], ids


@pytest.mark.parametrize("kind", KINDS)
@given(row=text_rows(), limit=st.integers(4, 12))
@SETTINGS
def test_a_row_of_texts(kind: str, row: Any, limit: int) -> None:
    tokenizer = trained(kind)
    before, ids = every_door(tokenizer, *row, limit)
    assert ids[-1] == end_token(tokenizer)
    assert scored(tokenizer, *row, True, finished=[False]) == ids[:-1]
    if kind in ("bpe", "bpe with BOS", "llama"):  # the others do not know every letter
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text == "".join(row)
        assert tokenizer.decode(before, skip_special_tokens=True) == row[0]


@pytest.mark.parametrize("kind", KINDS)
@given(row=chat_rows(), template=st.sampled_from(list(TEMPLATES)), limit=st.integers(6, 40))
@SETTINGS
def test_a_row_of_chats(kind: str, row: Any, template: str, limit: int) -> None:
    tokenizer = with_template(kind, template)
    prompt, answer = row
    assume(not is_blank(answer))
    before, _ = every_door(tokenizer, prompt, answer, limit)
    # What a template writes behind an answer that a length has cut was not said.
    open_ended = scored(tokenizer, prompt, answer, True, finished=[False])
    assert open_ended[: len(before)] == before
    assert end_token(tokenizer) not in open_ended[len(before) :]
