"""From columns to token ids, and which of them are learned."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import DataCollatorForCompletionOnlyLM
from fastrl.data.collators import IGNORED, TextCollator
from fastrl.data.encode import Encoder
from fastrl.data.prepare import prepare_texts
from tests.data.conftest import chat_tokenizer
from tests.golden import tiny

# What they cut is counted in a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.* tokens and are cut")

X = IGNORED
EOS = tiny.EOS


def prepared(rows: list[dict[str, Any]], max_length: int | None = None, **ways: Any) -> Any:
    tokenizer = ways.pop("tokenizer", None) or tiny.tokenizer()
    return prepare_texts(rows, tokenizer, max_length, **ways)


def only(rows: list[dict[str, Any]], max_length: int | None = None, **ways: Any) -> Any:
    (row,) = prepared(rows, max_length, **ways)
    return row["input_ids"], row["labels"]


def test_a_text_is_learned_whole_and_ends_with_eos() -> None:
    assert only([{"text": "w5 w6"}]) == ([5, 6, EOS], [5, 6, EOS])
    assert only([{"text": "w5 w6 <eos>"}])[0] == [5, 6, EOS]
    assert only([{"text": "w5 w6"}], append_eos=False)[0] == [5, 6]
    assert only([{"text": "w5 w6 w7 w8"}], 3) == ([5, 6, 7], [5, 6, 7])


def test_another_column_is_read_when_it_is_named() -> None:
    row = {"story": "w5 w6", "text": "w7 w8", "messages": [{"role": "user", "content": "w9"}]}
    assert only([row], text_field="story")[0] == [5, 6, EOS]
    with pytest.raises(ValueError, match="columns story, text, messages: it needs tale"):
        prepared([row], text_field="tale")


def test_missing_columns_are_named_beside_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="columns question, answer: it needs text"):
        prepared([{"question": "w5", "answer": "w6"}])


def test_of_a_prompt_nothing_is_learned() -> None:
    row = {"prompt": "w5 w6 ", "completion": "w7"}
    assert only([row]) == ([5, 6, 7, EOS], [X, X, 7, EOS])
    assert only([row], completion_only=False) == ([5, 6, 7, EOS], [5, 6, 7, EOS])


def test_no_token_spans_the_border_of_prompt_and_completion() -> None:
    # Together "w5 w6w7" would be a word that is none; a policy reads w6, and writes w7.
    assert only([{"prompt": "w5 w6", "completion": "w7 w8"}]) == (
        [5, 6, 7, 8, EOS],
        [X, X, 7, 8, EOS],
    )


def test_of_a_long_prompt_the_end_is_kept() -> None:
    row = {"prompt": "w5 w6 w7 w8 ", "completion": "w9"}
    assert only([row], 4) == ([7, 8, 9, EOS], [X, X, 9, EOS])
    row["completion"] = "w9 w10 w11"
    assert only([row], 4) == ([7, 8, 9, 10], [X, X, 9, 10])  # cut: no EOS


def test_completions_of_chats() -> None:
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "w5"}],
        "completion": [{"role": "assistant", "content": "w6"}],
    }
    tokenizer = chat_tokenizer()
    # The template ends the text; the answer's header is the prompt's, a text's end is EOS.
    assert only([row], tokenizer=tokenizer) == ([10, 5, 11, 6], [X, X, X, 6])
    said = {**row, "prompt": "w5"}
    assert only([said], tokenizer=tokenizer) == ([10, 5, 11, 6], [X, X, X, 6])
    row["completion"] = "w6"
    assert only([row], tokenizer=tokenizer) == ([10, 5, 11, 6, EOS], [X, X, X, 6, EOS])


def test_messages_are_learned_whole_or_the_assistants_turns() -> None:
    turns = [("user", "w5"), ("assistant", "w6"), ("user", "w7"), ("assistant", "w8")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    tokenizer = chat_tokenizer()
    ids = [10, 5, 11, 6, 10, 7, 11, 8]
    assert only([row], tokenizer=tokenizer) == (ids, ids)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}w10 {{ m.content }} {% else %}w11 "
        "{% generation %}{{ m.content }}{% endgeneration %} {% endif %}{% endfor %}"
    )
    labels = [X, X, X, 6, X, X, X, 8]
    assert only([row], tokenizer=tokenizer, assistant_only=True) == (ids, labels)
    with pytest.raises(ValueError, match="assistant_only_loss needs messages"):
        prepared([{"text": "w5"}], assistant_only=True)


MARKS = "w11 {% generation %}{{ m.content }}{% endgeneration %} "
PLAIN = "{% if m.role == 'user' %}w10{% else %}w11{% endif %} {{ m.content }} "


@pytest.mark.parametrize(("marked", "message"), [
    ("loop.index0 in (1, 2)", "message 2: the chat template marks what the user says"),
    ("loop.index0 in (0, 2)", "message 0: the chat template marks what the user says"),
    ("loop.last", "message 1: the chat template does not mark what the assistant says"),
    ("loop.index0 % 2", None),
])  # fmt: skip
@pytest.mark.parametrize("second", ["w8", "w6", "w11"])
def test_marks_are_checked_against_what_the_assistant_says(
    marked: str, message: str | None, second: str
) -> None:
    """Also where another says the same, or what a template writes of its own."""
    turns = [("user", "w5"), ("assistant", "w6"), ("user", second), ("assistant", second)]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    made = chat_tokenizer()
    made.chat_template = (
        f"{{% for m in messages %}}{{% if {marked} %}}{MARKS}{{% else %}}{PLAIN}{{% endif %}}"
        "{% endfor %}"
    )
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    if message and "does not" in message:
        refused = pytest.warns(UserWarning, match=message)
    with refused:
        _, labels = only([row], tokenizer=made, assistant_only=True)
    if message is None:
        assert labels == [X, X, X, 6, X, X, X, int(second[1:])]


def test_marks_are_checked_against_the_calls_of_the_assistant() -> None:
    calls = [{"type": "function", "function": {"name": "w6", "arguments": {}}}]
    said = [{"role": "user", "content": "w5"}, {"role": "assistant", "tool_calls": calls}]
    said += [{"role": "tool", "content": "w6"}, {"role": "assistant", "content": "w8"}]
    made = chat_tokenizer()
    turn = "{{ m.content or m.tool_calls[0].function.name }}"
    for marked, problem in (("assistant", None), ("tool", "message 2: .* what the tool says")):
        made.chat_template = (
            f"{{% for m in messages %}}{{% if m.role == '{marked}' %}}w11 {{% generation %}}{turn}"
            f"{{% endgeneration %}}{{% else %}}w10 {turn}{{% endif %}} {{% endfor %}}"
        )
        given = {"tokenizer": made, "assistant_only": True}
        if problem is None:
            _, labels = only([{"messages": said}], **given)
            assert labels == [X, X, X, 6, X, X, X, 8]
            continue
        with (
            pytest.warns(UserWarning, match="message 1: .* does not mark"),
            pytest.raises(ValueError, match=problem),
        ):
            only([{"messages": said}], **given)


def test_token_ids_are_taken_as_they_are() -> None:
    assert only([{"input_ids": [5, 6, 7]}]) == ([5, 6, 7], [5, 6, 7])
    assert only([{"input_ids": [5, 6, 7], "labels": [X, X, 7]}]) == ([5, 6, 7], [X, X, 7])


def test_formatting_by_row_and_by_batch() -> None:
    rows = [{"q": "w5", "a": "w6", "n": 1}, {"q": "w7", "a": "w8", "n": 2}]

    def by_row(row: dict[str, Any]) -> str:
        return f"{row['q']} {row['a']}"

    def by_batch(batch: dict[str, Any]) -> list[str]:
        return [f"{batch['q'][i]} {batch['a'][i]}" for i in range(len(batch["n"]))]

    def twice(batch: dict[str, Any]) -> list[str]:
        return [text for text in by_batch(batch) for _ in range(2)]

    expected = [[5, 6, EOS], [7, 8, EOS]]
    assert prepared(rows, formatting_func=by_row)["input_ids"][:] == expected
    assert prepared(rows, formatting_func=by_batch)["input_ids"][:] == expected
    assert len(prepared(rows, formatting_func=twice)) == 4


@pytest.mark.parametrize("function", [lambda rows: 1, lambda rows: [1], lambda rows: rows["no"]])
def test_formatting_that_returns_no_texts_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"must return a text for a row.*columns q"):
        prepared([{"q": "w5"}], formatting_func=function)


def test_texts_with_nothing_to_learn_are_dropped_and_counted() -> None:
    rows = [
        {"prompt": "w5 ", "completion": "w6"},
        {"prompt": "w5 ", "completion": ""},
        {"prompt": "w5 ", "completion": None},
    ]
    with pytest.warns(UserWarning, match=r"2 of 3 texts dropped.*behind max_length=4"):
        kept = prepared(rows, 4)
    assert kept["input_ids"][:] == [[5, 6, EOS]]
    with pytest.raises(ValueError, match=r"no text is left of 2; nothing is learned from them"):
        prepared(rows[1:], 4)
    # One token is predicted by nothing.
    with pytest.raises(ValueError, match="no text is left of 2"):
        prepared([{"text": "w5"}, {"text": ""}], append_eos=False)
    with pytest.raises(ValueError, match="the data set is empty"):
        prepared([])
    assert Encoder(tiny.tokenizer()).alone("") == ([], []), "no EOS alone"


def completions(*args: Any, **kwargs: Any) -> DataCollatorForCompletionOnlyLM:
    return DataCollatorForCompletionOnlyLM(*args, tokenizer=tiny.tokenizer(), **kwargs)


def test_what_is_behind_the_response_template_is_learned() -> None:
    text = "w5 w10 w11 w6 w7"
    labels = [X, X, X, 6, 7, EOS]
    assert only([{"text": text}], completions=completions("w10 w11"))[1] == labels
    assert only([{"text": text}], completions=completions([10, 11]))[1] == labels
    # The prompt quotes it.
    quoted = only([{"text": f"w10 w11 {text}"}], completions=completions("w10 w11"))[1]
    assert quoted == [X, X, *labels]


def test_every_answer_of_a_dialogue_is_learned() -> None:
    text = "w20 w5 w10 w6 w20 w7 w8 w10 w9 w9"
    both = completions("w10", "w20")
    labels = [X, X, X, 6, X, X, X, X, 9, 9, EOS]
    assert only([{"text": text}], completions=both)[1] == labels
    # An instruction at the end has no answer.
    assert only([{"text": text + " w20 w5"}], completions=both)[1] == [*labels[:-1], X, X, X]
    # The answer in front, the template at the end.
    assert only([{"text": "w10 w6 w20 w5 w10"}], completions=both)[1] == [X, 6, X, X, X, EOS]


def test_a_template_that_is_nowhere_is_said() -> None:
    with pytest.warns(UserWarning, match=r"1 of 2 texts dropped.*'w10' does not occur"):
        prepared([{"text": "w5 w10 w6"}, {"text": "w5 w6"}], completions=completions("w10"))
    with pytest.raises(ValueError, match=r"no text is left of 1.*\[10, 12\] does not occur"):
        prepared([{"text": "w5 w10 w6"}], completions=completions([10, 12]))
    # It is there, and is cut off.
    with pytest.raises(ValueError, match="behind max_length=2"):
        prepared([{"text": "w5 w10 w6"}], 2, completions=completions("w10"))


def test_templates_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="response_template is empty"):
        completions("")
    with pytest.raises(ValueError, match="instruction_template is empty"):
        completions("w5", [])
    with pytest.raises(ValueError, match="leave it False"):
        completions("w5", mlm=True)


def test_the_collator_alone_makes_batches_for_a_model() -> None:
    collate = completions("w10", ignore_index=-1)
    batch = collate([{"input_ids": [5, 10, 6, 7]}, [10, 8]])
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["input_ids"].tolist() == [[5, 10, 6, 7], [10, 8, 2, 2]]
    assert batch["labels"].tolist() == [[-1, -1, 6, 7], [-1, 8, -1, -1]]


def test_a_batch_without_padding_is_one_row_whose_positions_begin_anew() -> None:
    rows = [[5, 10, 6, 7], [10, 8]]
    batch = completions("w10", padding_free=True).torch_call(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[5, 10, 6, 7, 10, 8]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1]]
    assert batch["labels"].tolist() == [[X, X, 6, 7, X, 8]]
    # The first token of a text is predicted by nothing, not by the text in front of it.
    learned_whole = completions("w10", "w20", padding_free=True, ignore_index=-1)
    assert learned_whole([[10, 6, 20], [20, 10, 7]])["labels"].tolist() == [[-1, 6, -1, -1, -1, 7]]


def test_the_collator_says_which_templates_do_not_occur() -> None:
    both = completions("w10", "w20")
    with pytest.warns(UserWarning, match="does not occur in 1 of 2 texts") as warned:
        labels = both([[20, 5, 10, 6], [5, 10, 6, 7]])["labels"]
    # Where an answer ends without its instruction is not known.
    assert labels.tolist() == [[X, X, X, 6], [X, X, X, X]]
    assert len(warned) == 1
    assert str(warned[0].message).startswith("instruction_template 'w20' does not occur")
    assert "one begins 'w5 w10 w6 w7'" in str(warned[0].message)
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match=r"response_template \[10, 11\] .* as the tokens"):
        labels = completions([10, 11])([[5, 10, 6]])["labels"]
    assert labels.tolist() == [[X, X, X]]


def test_texts_without_their_instructions_are_dropped_and_counted() -> None:
    rows = [{"text": "w20 w5 w10 w6"}, {"text": "w5 w10 w6"}]
    said = "1 of 2 texts dropped.*response_template 'w10' or instruction_template 'w20'"
    with pytest.warns(UserWarning, match=said):
        kept = prepared(rows, completions=completions("w10", "w20"))
    assert kept["labels"][:] == [[X, X, X, 6, EOS]]


def test_a_token_that_pads_is_needed_where_lengths_differ_alone() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    collate = DataCollatorForCompletionOnlyLM("w10", tokenizer=tokenizer)
    padded = collate([[10, 6], [10, 7, 8]])
    assert padded["input_ids"].tolist() == [[10, 6, EOS], [10, 7, 8]]
    assert padded["labels"].tolist() == [[X, 6, X], [X, 7, 8]]
    tokenizer.eos_token = None
    assert collate([[10, 6], [10, 7]])["labels"].tolist() == [[X, 6], [X, 7]]
    with pytest.raises(ValueError, match=r"differ in length.*tokenizer\.pad_token"):
        collate([[10, 6], [10, 7, 8]])


def test_batches_say_which_tokens_are_learned() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [5, X, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    batch = TextCollator(tiny.tokenizer("left"))(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[X, X, 7], [X, 9, X]]
    assert batch["rows"].tolist() == [1, 3]
    assert batch["targets"].tolist() == [7, 9]
    assert batch["rows"].dtype == torch.int64


def test_preparing_twice_changes_nothing() -> None:
    once = prepared([{"prompt": "w5 ", "completion": "w6"}])
    twice = prepare_texts(once, tiny.tokenizer())
    assert isinstance(twice, Dataset)
    assert twice[0] == once[0]


@pytest.mark.parametrize(("row", "cuts"), [
    ({"text": "w5 w6 w7 w8"}, 1),
    ({"text": "w5 w6 w7"}, 0),  # with EOS
    ({"prompt": "w5 w6 ", "completion": "w7 w8"}, 1),
    ({"prompt": "w5 w6 ", "completion": "w7"}, 0),
    ({"input_ids": [5, 6, 7, 8, 9]}, 1),
])  # fmt: skip
def test_texts_that_are_cut_are_counted(row: dict[str, Any], cuts: int) -> None:
    short = {k: [5, 6] if k == "input_ids" else "w5" for k in row}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare_texts([row, short, short], tiny.tokenizer(), 4)
    said = [str(w.message) for w in caught]
    wanted = "1 of 3 texts are longer than max_length=4 tokens and are cut: raise max_length"
    assert [x[: len(wanted)] for x in said] == [wanted] * cuts


@pytest.mark.parametrize(("given", "said"), [
    ({"max_length": float("nan")}, "max_length must be a whole number or None, got nan"),
    ({"max_prompt_length": "8"}, "max_prompt_length must be a whole number or None, got '8'"),
    ({"add_eos": "False"}, "add_eos must be True or False, got 'False'"),
])  # fmt: skip
def test_arguments_of_another_type_are_refused_by_name(given, said):
    with pytest.raises(TypeError, match=said):
        Encoder(tiny.tokenizer(), **given)
