"""From columns to batches of pairs, and pairs that cannot be learned from."""

import math
from typing import Any

import pytest
import torch
from datasets import Dataset

from fastrl import RewardDataCollatorWithPadding
from fastrl.data.collators import ID_COLUMNS
from fastrl.data.prepare import prepare_pairs
from tests.data.conftest import chat_tokenizer
from tests.golden import tiny
from tests.trainers.conftest import Make, pairs, weights


def tokens(chosen: list[int], rejected: list[int]) -> dict[str, list[int]]:
    columns = {}
    for side, ids in (("chosen", chosen), ("rejected", rejected)):
        columns |= {f"input_ids_{side}": ids, f"attention_mask_{side}": [int(t != 2) for t in ids]}
    return columns


def test_texts_become_token_columns_and_margins_stay() -> None:
    data = Dataset.from_list(
        [{"prompt": "w5 ", "chosen": "w6", "rejected": "w7 w8", "margin": 0.5, "other": "x"}]
    )
    prepared = prepare_pairs(data, tiny.tokenizer(), None)
    assert set(prepared.column_names) == {*ID_COLUMNS, "margin"}
    assert prepared[0]["chosen_ids"] == [5, 6]
    assert prepared[0]["rejected_ids"] == [5, 7, 8]
    assert prepared[0]["margin"] == 0.5


@pytest.mark.parametrize("prompt", ["w5", [{"role": "user", "content": "w5"}], None])
def test_chats_go_through_the_template(prompt: Any) -> None:
    turns = [] if prompt is not None else [{"role": "user", "content": "w5"}]
    row = {
        "prompt": prompt,
        "chosen": [*turns, {"role": "assistant", "content": "w6"}],
        "rejected": [*turns, {"role": "assistant", "content": "w7"}],
    }
    row = {k: v for k, v in row.items() if v is not None}
    prepared = prepare_pairs([row], chat_tokenizer(), None)
    assert prepared[0]["chosen_ids"] == [10, 5, 11, 6]
    assert prepared[0]["rejected_ids"] == [10, 5, 11, 7]


def test_whole_conversations_bring_their_prompt_along() -> None:
    turn = {"role": "user", "content": "w5"}
    sides = {"chosen": "w6", "rejected": "w7"}
    row = {k: [turn, {"role": "assistant", "content": v}] for k, v in sides.items()}
    prepared = prepare_pairs([{"prompt": "w5", **row}], chat_tokenizer(), None)
    assert prepared[0]["chosen_ids"] == [10, 5, 11, 6]
    assert prepared[0]["rejected_ids"] == [10, 5, 11, 7]


def test_a_chat_with_text_answers_is_asked_for_its_answer() -> None:
    row = {"prompt": [{"role": "user", "content": "w5"}], "chosen": "w6", "rejected": "w7"}
    prepared = prepare_pairs([row], chat_tokenizer(), None)
    assert prepared[0]["chosen_ids"] == [10, 5, 11, 6]


def test_special_tokens_are_not_added_twice() -> None:
    tokenizer = tiny.tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tiny.BOS)]
    )
    row = {"chosen": "w6 w7", "rejected": "<bos> w6"}
    prepared = prepare_pairs([row], tokenizer, None)
    assert prepared[0]["chosen_ids"] == [0, 6, 7]
    assert prepared[0]["rejected_ids"] == [0, 6]


def test_missing_columns_are_named_beside_those_that_are_there(make_reward: Make) -> None:
    data = Dataset.from_list([{"question": "w5", "answer": "w6"}])
    with pytest.raises(ValueError, match="columns question, answer: it needs chosen and rejected"):
        make_reward(data=data)
    with pytest.raises(ValueError, match=r"lack input_ids_rejected.*they have input_ids_chosen"):
        RewardDataCollatorWithPadding(tiny.tokenizer())(
            [{"input_ids_chosen": [5], "attention_mask_chosen": [1]}]
        )


def test_pairs_that_teach_nothing_are_dropped_and_counted() -> None:
    good = {"prompt": "w5 ", "chosen": "w6", "rejected": "w7"}
    data = [
        good, {**good, "chosen": ""}, {**good, "rejected": None}, {**good, "rejected": "w6"},
        {**good, "chosen": "w6 " * 20},
    ]  # fmt: skip
    said = (
        "4 of 5 pairs dropped: 2 have an empty side, 1 have equal sides, "
        "1 have a side of more than max_length=10 tokens"
    )
    with pytest.warns(UserWarning, match=said):
        prepared = prepare_pairs(data, tiny.tokenizer(), 10)
    assert prepared["chosen_ids"][:] == [[5, 6]]
    with pytest.raises(ValueError, match="no pair is left of 1: 1 have equal sides"):
        prepare_pairs(data[3:4], tiny.tokenizer(), 10)


def test_tokenised_pairs_are_judged_by_what_counts_in_them() -> None:
    rows = [tokens([5, 6, 2, 2], [5, 6]), tokens([2, 2], [5]), tokens([5], [6, 2])]
    with pytest.warns(UserWarning, match="1 have an empty side, 1 have equal sides"):
        prepared = prepare_pairs(rows, tiny.tokenizer(), 1)  # their length is the caller's affair
    assert prepared["input_ids_rejected"][:] == [[6, 2]]
    torn = {**tokens([5, 6], [7]), "attention_mask_chosen": [1]}
    with pytest.raises(ValueError, match="input_ids_chosen has 2 tokens, attention_mask_chosen 1"):
        prepare_pairs([torn], tiny.tokenizer(), None)


@pytest.mark.parametrize("margin", [math.nan, math.inf, None])
@pytest.mark.parametrize("column", [False, True])
def test_margins_that_are_no_numbers_are_refused(margin: float | None, column: bool) -> None:
    def of(i: int) -> Any:
        number = margin if i == 2 else 0.1
        return [number] if column else number

    with pytest.raises(ValueError, match=r"margin\[2\] is .*: margins must be finite"):
        prepare_pairs(pairs(3, margin=of), tiny.tokenizer(), None)


def test_two_margins_for_a_pair_are_refused() -> None:
    data = pairs(3, margin=lambda i: [0.1, 0.2])
    with pytest.raises(ValueError, match=r"margin\[0\] is \[0.1, 0.2\]: .*or lists of one"):
        prepare_pairs(data, tiny.tokenizer(), None)


def test_a_column_of_margins_stays_a_column() -> None:
    rows = [{**tokens([5, 6, 7], [8]), "margin": [1]}, {**tokens([5], [6, 7]), "margin": [0.25]}]
    batch = RewardDataCollatorWithPadding(tiny.tokenizer())(rows)
    torch.testing.assert_close(batch["margin"], torch.tensor([[1.0], [0.25]]))


def test_token_columns_under_other_names_are_said_at_once_and_refused_in_training(
    make_reward: Make,
) -> None:
    rows = [{k: [5, 6 + i] for k in ("input_ids_chosen", "input_ids_b")} for i in range(4)]
    lacks = "attention_mask_chosen, input_ids_rejected, attention_mask_rejected"
    with pytest.warns(UserWarning, match=f"lacks {lacks}: training on it fails"):
        trainer = make_reward(data=Dataset.from_list(rows))
    before = weights(trainer.model)
    with pytest.raises(ValueError, match=f"lack {lacks}"):
        trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(("data", "error", "said"), [
    (Dataset.from_list([]), ValueError, "empty"),
    ([], ValueError, "empty"),
    (iter([{}]), TypeError, "without streaming"),
    ({"train": pairs(2), "test": pairs(2)}, TypeError, "choose one of train, test"),
])  # fmt: skip
def test_what_is_no_data_set_is_refused(data: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        prepare_pairs(data, tiny.tokenizer(), None)


def test_other_data_sets_by_index_do() -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {k: torch.tensor(v) for k, v in tokens([5, 6 + i], [7]).items()}

    assert prepare_pairs(Rows(), tiny.tokenizer(), None)["input_ids_chosen"][:] == [[5, 6], [5, 7]]


def test_both_sides_are_padded_to_one_width() -> None:
    rows = [{**tokens([5, 6, 7], [8]), "margin": 1}, {**tokens([5], [6, 7]), "margin": 0.25}]
    batch = RewardDataCollatorWithPadding(tiny.tokenizer())(rows)
    assert batch["input_ids_chosen"].tolist() == [[5, 6, 7], [5, 2, 2]]
    assert batch["input_ids_rejected"].tolist() == [[8, 2, 2], [6, 7, 2]]
    assert batch["attention_mask_rejected"].tolist() == [[1, 0, 0], [1, 1, 0]]
    torch.testing.assert_close(batch["margin"], torch.tensor([1.0, 0.25]))


def test_needless_padding_is_cut_off_on_the_right_alone() -> None:
    rows = [tokens([5, 6, 2, 2, 2, 2], [5, 7, 8, 2, 2, 2])]
    cut = RewardDataCollatorWithPadding(tiny.tokenizer())(rows)
    assert cut["input_ids_chosen"].tolist() == [[5, 6, 2]]
    whole = RewardDataCollatorWithPadding(tiny.tokenizer(), padding="max_length", max_length=7)(
        rows
    )
    assert whole["input_ids_chosen"].shape == (1, 7)
    to_four = RewardDataCollatorWithPadding(tiny.tokenizer(), pad_to_multiple_of=4)(rows)
    assert to_four["input_ids_chosen"].shape == (1, 4)
    left = RewardDataCollatorWithPadding(tiny.tokenizer("left"))([tokens([2, 2, 5], [2, 6, 7])])
    assert left["input_ids_chosen"].tolist() == [[2, 2, 5]]
