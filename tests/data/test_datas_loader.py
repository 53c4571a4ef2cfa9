"""From rows, files and data sets to examples of each kind, and rows that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tokenizers.processors import TemplateProcessing

from fastrl.data.datas_loader import DatasLoader
from fastrl.data.examples import Example, Response
from fastrl.tools.demo.models import build_tokenizer
from tests.golden import tiny

TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'system': 'w12', 'user': 'w10', 'assistant': 'w11'}[m.role] }} {{ m.content }} "
    "{% endfor %}"
    "{% if add_generation_prompt %}w11 {% endif %}"
)
PAIR = {"prompt": "w5 w6", "chosen": " w7 w8", "rejected": " w9"}


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def with_specials(single: str) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[("<bos>", tiny.BOS), ("<eos>", tiny.EOS)]
    )
    return tokenizer


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def load(rows: Any, tokenizer: Any = None, kind: str | None = None, **options: Any) -> DatasLoader:
    return DatasLoader(rows, tokenizer or tiny.tokenizer(), kind, **options)


def ids(example: Example) -> list[list[int]]:
    return [list(example.prompt_ids), *(list(r.ids) for r in example.responses)]


def test_columns_that_are_no_part_of_pairs_are_kept() -> None:
    """Such as a label, which reweighters may read."""
    rows = [{**PAIR, "label": 3, "response": "w1", "margin": 0.5}]
    assert load(rows)[0].columns == {"label": 3, "response": "w1", "margin": 0.5}
    labelled = [{"prompt": "w5", "response": "w6", "label": 1, "score": 0.5}]
    assert load(labelled)[0].columns == {"score": 0.5}


@pytest.mark.parametrize(("row", "kind", "desired", "tokens"), [
    ({"prompt": "w5"}, "prompts", None, [[5]]),
    ({"query": "w5"}, "prompts", None, [[5]]),
    ({"text": "w5"}, "prompts", None, [[5]]),
    ({"prompt": "w5", "response": "w6"}, "answers", None, [[5], [6, 1]]),
    ({"prompt": "w5", "completion": "w6"}, "answers", None, [[5], [6, 1]]),
    ({"prompt": "w5", "response": "w6", "label": True}, "feedback", True, [[5], [6, 1]]),
    ({"prompt": "w5", "completion": "w6", "desired": 0}, "feedback", False, [[5], [6, 1]]),
    (PAIR, "pairs", None, [[5, 6], [7, 8, 1], [9, 1]]),
])  # fmt: skip
def test_the_kind_is_read_off_the_columns(
    row: dict[str, Any], kind: str, desired: bool | None, tokens: list[list[int]]
) -> None:
    loader = load([row])
    assert loader.kind == kind
    assert ids(loader[0]) == tokens
    assert loader[0].desired is desired


def test_examples_hold_texts_tokens_and_other_columns() -> None:
    loader = load([{**PAIR, "margin": 0.5}, {**PAIR, "source": "x"}])
    assert loader[0] == Example(
        "w5 w6", (5, 6), (Response(" w7 w8", (7, 8, 1)), Response(" w9", (9, 1))), None,
        {"margin": 0.5},
    )  # fmt: skip
    assert loader[1].columns == {"source": "x"}
    assert [example.columns for example in loader] == [{"margin": 0.5}, {"source": "x"}]
    assert loader[-1] == loader[1:][0]
    with pytest.raises(IndexError):
        loader[2]


def test_pairs_serve_as_every_other_kind() -> None:
    loader = load([PAIR, {**PAIR, "prompt": "w3"}])
    feedback = loader.as_kind("feedback")
    assert [(ids(e), e.desired) for e in feedback] == [
        ([[5, 6], [7, 8, 1]], True),
        ([[5, 6], [9, 1]], False),
        ([[3], [7, 8, 1]], True),
        ([[3], [9, 1]], False),
    ]
    assert [ids(e) for e in loader.as_kind("answers")] == [[[5, 6], [7, 8, 1]], [[3], [7, 8, 1]]]
    assert [ids(e) for e in loader.as_kind("prompts")] == [[[5, 6]], [[3]]]
    assert feedback.as_kind("pairs")[1] == loader[1]  # nothing is lost on the way
    assert loader.as_kind("pairs") is loader


def test_feedback_serves_as_its_desired_answers_and_as_prompts() -> None:
    rows = [{"prompt": f"w{i}", "response": "w9", "label": i % 2 == 0} for i in range(4, 7)]
    loader = load(rows)
    answers = loader.as_kind("answers")
    assert [(ids(e), e.desired) for e in answers] == [([[4], [9, 1]], None), ([[6], [9, 1]], None)]
    assert [ids(e) for e in loader.as_kind("prompts")] == [[[4]], [[5]], [[6]]]
    with pytest.raises(ValueError, match="no example is left of 1 rows: none is desired"):
        load(rows[1:2], kind="answers")


def test_prompts_keep_the_answers_beside_them_as_columns() -> None:
    loader = load([{"prompt": "w5", "response": "w6", "label": 7}], kind="prompts")
    assert loader[0].columns == {"response": "w6", "label": 7}


@pytest.mark.parametrize(("row", "kind", "said"), [
    ({"prompt": "w5", "id": 1}, "pairs",
     "pairs are needed, which are read from chosen and rejected.* columns give prompts "
     "only: prompt, id"),
    ({"prompt": "w5", "response": "w6"}, "feedback", "feedback are needed.*answers only"),
    ({"prompt": "w5"}, "answers", "answers are needed, .* a prompt and a response"),
    ({"prompt": "w5"}, "replies", "unknown kind 'replies': choose one of prompts, answers"),
    ({"question": "w5"}, None, "has columns question: it needs a prompt at least"),
])  # fmt: skip
def test_kinds_that_the_columns_do_not_make_are_refused(
    row: dict[str, Any], kind: str | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        load([row], kind=kind)
    if kind:
        with pytest.raises(ValueError, match=said):
            load([row]).as_kind(kind)


def test_columns_may_have_any_name() -> None:
    row = {"q": "w5", "good": "w6", "bad": "w7", "text": "w8"}
    named = {"prompt_column": "q", "chosen_column": "good", "rejected_column": "bad"}
    assert ids(load([row], **named)[0]) == [[5], [6, 1], [7, 1]]
    row = {"q": "w5", "a": "w6", "ok": 1}
    named = {"prompt_column": "q", "response_column": "a", "label_column": "ok"}
    assert load([row], **named)[0].desired is True
    with pytest.raises(ValueError, match=r"no column 'x' \(label_column\): its columns are q, a"):
        load([row], **{**named, "label_column": "x"})


def test_sources_are_files_data_sets_and_lists(tmp_path: Path) -> None:
    rows = [PAIR, {**PAIR, "prompt": "w3"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = Dataset.from_list(rows)
    sources = [
        str(tmp_path / "pairs.jsonl"), tmp_path / "pairs.jsonl", table, table.with_format("torch"),
        DatasetDict(train=table, test=table.select([0])),
        rows,
    ]  # fmt: skip
    for source in sources:
        assert list(load(source)) == list(load(rows))
    assert len(load(sources[4], split="test")) == 1
    with pytest.raises(FileNotFoundError, match=r"no data set at .*gone\.jsonl"):
        load(str(tmp_path / "gone.jsonl"))
    with pytest.raises(TypeError, match="without streaming"):
        load(table.to_iterable_dataset())
    with pytest.raises(TypeError, match="row 1 is a str"):
        load([PAIR, "w5"])
    with pytest.raises(ValueError, match="empty"):
        load([])


def test_texts_without_prompts_share_a_dialogue() -> None:
    start = "\n\nHuman: w5\n\nAssistant: w6\n\nHuman: w7\n\nAssistant:"
    row = {"chosen": start + " w8", "rejected": start + " w9\n\nHuman: w3\n\nAssistant: w4"}
    words = ["Human:", "Assistant:", *(f"w{i}" for i in range(3, 10))]
    tokenizer = build_tokenizer([" ".join(words)])
    pair = load([row], tokenizer)[0]
    assert pair.prompt == start
    assert [r.text for r in pair.responses] == [" w8", " w9\n\nHuman: w3\n\nAssistant: w4"]
    turned = {"chosen": row["rejected"], "rejected": row["chosen"]}
    assert load([turned], tokenizer)[0].responses == pair.responses[::-1]
    assert list(pair.prompt_ids) == tokenizer(start)["input_ids"]
    assert load([row], tokenizer, "prompts")[0].prompt == start


@pytest.mark.parametrize(
    "sides",
    [("w5 w6", "w5 w7"), ("\n\nAssistant: w5", "\n\nAssistant: w6"), ("w5\n\nAssistant: w6", "w7")],
)
def test_texts_that_share_no_dialogue_need_a_prompt(sides: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="chosen and rejected of row 0 have no prompt"):
        load([{"chosen": sides[0], "rejected": sides[1]}])
    with pytest.raises(ValueError, match="response of row 0 has no prompt"):
        load([{"response": sides[0]}])


USER, GOOD, BAD = say("user", "w5"), say("assistant", "w6"), say("assistant", "w7")


@pytest.mark.parametrize("row", [
    {"prompt": "w5", "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": "w5", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
])  # fmt: skip
def test_chats_go_through_the_template(row: dict[str, Any]) -> None:
    for source in ([row], Dataset.from_list([row])):
        pair = load(source, chat_tokenizer())[0]
        assert pair.prompt == "w10 w5 w11 "
        assert [r.text for r in pair.responses] == ["w6 ", "w7 "]
        assert ids(pair) == [[10, 5, 11], [6], [7]]  # the template says how turns end


def test_conversations_share_more_than_one_turn() -> None:
    start = [say("system", "w3"), USER, GOOD, say("user", "w8")]
    row = {"chosen": [*start, GOOD], "rejected": [*start, BAD, USER, GOOD]}
    pair = load([row], chat_tokenizer())[0]
    assert ids(pair) == [[12, 3, 10, 5, 11, 6, 10, 8, 11], [6], [7, 10, 5, 11, 6]]


def test_a_single_conversation_is_answered_by_its_last_turn() -> None:
    messages = [USER, GOOD, say("user", "w8"), BAD]
    loader = load([{"messages": messages, "label": 1}], chat_tokenizer())
    assert loader.kind == "feedback"
    assert ids(loader[0]) == [[10, 5, 11, 6, 10, 8, 11], [7]]
    with pytest.raises(ValueError, match="messages of row 0: a conversation must end with an ass"):
        load([{"messages": messages[:3]}], chat_tokenizer())
    with pytest.raises(ValueError, match="do not share a prompt that an assistant"):
        load([{"chosen": [USER, GOOD], "rejected": [say("user", "w6"), BAD]}], chat_tokenizer())


def test_text_answers_to_a_chat_end_in_eos() -> None:
    loader = load([{"prompt": [USER], "response": "w6"}], chat_tokenizer())
    assert ids(loader[0]) == [[10, 5, 11], [6, 1]]


def test_blanks_that_a_template_puts_behind_eos_are_left_out() -> None:
    tokenizer = build_tokenizer(["w5 w6 w7 w10 w11 \n"])
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }} ", "{{ m.content }}<eos>\n")
    row = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD, USER, GOOD]}
    chosen, rejected = load([row], tokenizer)[0].responses
    assert chosen.text == "w6<eos>"
    assert rejected.text == "w7<eos>\nw10 w5<eos>\nw11 w6<eos>"
    for response in (chosen, rejected):
        assert list(response.ids) == tokenizer(response.text)["input_ids"]
        assert response.ids[-1] == tokenizer.eos_token_id


def test_words_that_a_template_puts_behind_eos_stay() -> None:
    template = TEMPLATE.replace("{{ m.content }} ", "{{ m.content }} <eos> w13 ")
    loader = load([{"prompt": [USER], "response": [GOOD]}], chat_tokenizer(template))
    assert loader[0].responses[0] == Response("w6 <eos> w13 ", (6, 1, 13))


def test_a_template_that_does_not_begin_with_the_prompt_is_refused() -> None:
    template = "{{ messages | length }} " + TEMPLATE
    with pytest.raises(ValueError, match="row 0 of the data set: the chat template writes '1 w10"):
        load([{"prompt": [USER], "response": [GOOD]}], chat_tokenizer(template))


def test_special_tokens_stand_in_front_of_prompts_alone() -> None:
    for single in ("<bos> $A", "<bos> $A <eos>"):
        pair = load([PAIR], with_specials(single))[0]
        assert ids(pair) == [[0, 5, 6], [7, 8, 1], [9, 1]]
        written = load([{**PAIR, "prompt": "<bos> w5"}], with_specials(single))[0]
        assert ids(written)[0] == [0, 5]


def test_eos_comes_once_or_not_at_all() -> None:
    row = {"prompt": "w5", "chosen": "w6 <eos>", "rejected": "w7"}
    assert ids(load([row])[0])[1:] == [[6, 1], [7, 1]]
    assert ids(load([row], add_eos=False)[0])[1:] == [[6, 1], [7]]


LONG = {"prompt": "w3 w4 w5 w6", "chosen": " w7 w8 w9", "rejected": " w10"}


@pytest.mark.parametrize(("options", "tokens"), [
    ({"max_prompt_length": 2}, [[5, 6], [7, 8, 9, 1], [10, 1]]),
    ({"max_prompt_length": 2, "truncation": "keep_start"}, [[3, 4], [7, 8, 9, 1], [10, 1]]),
    ({"max_prompt_length": 2, "max_length": 4}, [[5, 6], [7, 8], [10, 1]]),
    ({"max_prompt_length": 3, "max_length": 100}, [[4, 5, 6], [7, 8, 9, 1], [10, 1]]),
    ({"max_length": 8}, [[3, 4, 5, 6], [7, 8, 9, 1], [10, 1]]),
    ({"max_length": 7}, [[3, 4, 5, 6], [7, 8, 9], [10, 1]]),
    ({"max_length": 5}, [[4, 5, 6], [7, 8], [10, 1]]),
])  # fmt: skip
def test_prompts_and_then_responses_are_cut(
    options: dict[str, Any], tokens: list[list[int]]
) -> None:
    pair = load([LONG], **options)[0]
    assert ids(pair) == tokens
    said = [pair.prompt, *(r.text for r in pair.responses)]
    words = [[f"w{t}" for t in part if t != tiny.EOS] for part in tokens]
    assert [text.split() for text in said] == words  # texts are cut with their tokens


def test_a_cut_prompt_keeps_its_first_special_token() -> None:
    for row in (LONG, {**LONG, "prompt": "<bos> " + LONG["prompt"]}):
        pair = load([row], with_specials("<bos> $A"), max_prompt_length=3)[0]
        assert ids(pair)[0] == [0, 5, 6]
    pair = load([LONG], with_specials("<bos> <bos> $A"), max_prompt_length=1)[0]
    assert ids(pair)[0] == [0]


def test_cut_texts_keep_the_spaces_of_their_tokens() -> None:
    tokenizer = build_tokenizer(["a b c d e"])
    pair = load([{"prompt": "a b c", "response": " d e"}], tokenizer, max_length=3)[0]
    assert (pair.prompt, pair.responses[0].text) == (" b c", " d")
    assert tokenizer.decode([*pair.prompt_ids, *pair.responses[0].ids]) == " b c d"


def test_prompts_alone_are_cut_to_the_whole_length() -> None:
    assert ids(load([LONG], kind="prompts", max_length=3)[0]) == [[4, 5, 6]]


@pytest.mark.parametrize(("options", "said"), [
    ({"max_length": 1}, "max_length must be at least 2, got 1"),
    ({"max_prompt_length": 0}, "max_prompt_length must be at least 1, got 0"),
    ({"max_length": 4, "max_prompt_length": 4}, "max_prompt_length=4 leaves nothing of max_le"),
    ({"truncation": "middle"}, "must be one of keep_end, keep_start, got 'middle'"),
])  # fmt: skip
def test_limits_that_leave_no_room_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load([PAIR], **options)


def test_rows_that_teach_nothing_are_dropped_and_counted() -> None:
    rows = [
        PAIR, {**PAIR, "chosen": " "}, {**PAIR, "rejected": None}, {"prompt": "w5", "chosen": "w6"},
        {**PAIR, "rejected": PAIR["chosen"]},
    ]  # fmt: skip
    said = "4 of 5 rows dropped: 3 have an empty response, 1 have equal sides"
    with pytest.warns(UserWarning, match=said):
        loader = load(rows)
    assert list(loader) == list(load([PAIR]))
    with pytest.warns(UserWarning, match=said):
        assert len(loader.as_kind("feedback")) == 2
    assert len(loader.as_kind("prompts")) == 5  # they are as good as any
    with pytest.raises(ValueError, match="no example is left of 1 rows: 1 have equal sides"):
        load(rows[4:])
    with pytest.raises(ValueError, match="no example is left of 1 rows: 1 have an empty response"):
        load([{"prompt": "w5", "response": ""}])


def test_chats_and_dialogues_without_a_side_are_dropped() -> None:
    chat = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    empty = say("assistant", "")
    rows = [chat, {**chat, "chosen": None}, {**chat, "chosen": [USER, empty]}, {}]
    with pytest.warns(UserWarning, match="3 of 4 rows dropped: 3 have an empty response"):
        load(rows, chat_tokenizer())
    with pytest.warns(UserWarning, match="1 of 4 rows dropped: 1 have an empty response"):
        assert len(load(rows, chat_tokenizer(), "prompts")) == 3
    text = {
        "chosen": "\n\nHuman: w5\n\nAssistant: w6",
        "rejected": "\n\nHuman: w5\n\nAssistant: w7",
    }
    rows = [text, {**text, "rejected": ""}, {**text, "rejected": text["chosen"]}]
    with pytest.warns(UserWarning, match="1 have an empty response, 1 have equal sides"):
        load(rows)


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": ""}, "column 'prompt' of row 1 is empty"),
    ({"prompt": " \n"}, "column 'prompt' of row 1 is empty"),
    ({"prompt": None}, "column 'prompt' of row 1 is empty"),
    ({"prompt": 3}, "column 'prompt' of row 1 holds 3: it must hold text"),
    ({"response": ["w6"]}, r"column 'response' of row 1 holds \['w6'\]"),
    ({"response": [{"role": "user"}]}, "column 'response' of row 1, message 0 .* a text"),
    ({"label": "yes"}, "column 'label' of row 1 holds 'yes': labels are True or False"),
    ({"label": None}, "column 'label' of row 1 holds None"),
    ({"label": 0.5}, "column 'label' of row 1 holds 0.5"),
])  # fmt: skip
def test_what_is_wrong_is_named_by_row_and_column(row: dict[str, Any], said: str) -> None:
    good = {"prompt": "w5", "response": "w6", "label": True}
    with pytest.raises(ValueError, match=said):
        load([good, {**good, **row}])


def test_sides_of_two_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="chosen and rejected of row 0 hold a text and chat mess"):
        load([{**PAIR, "chosen": [GOOD]}])
