"""Batches of PPOTrainer.dataloader, by what the data set's examples are."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.ppo.conftest import BATCH, make_batch, make_trainer

Row = namedtuple("Row", ["query", "response"])


class Rows(torch.utils.data.Dataset):
    """A plain data set by index."""

    def __init__(self, rows: Sequence[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def batches(rows: Any, **settings: Any) -> list[Any]:
    return list(make_trainer(dataset=rows, **settings).dataloader)


def test_tuples_of_ragged_tensors_go_through_a_step() -> None:
    batch = make_batch()
    rows = list(zip(batch["queries"], batch["responses"], strict=True))
    trainer = make_trainer(dataset=Rows(rows))
    (loaded,) = trainer.dataloader
    queries, responses = loaded
    for name, got in (("queries", queries), ("responses", responses)):
        assert sorted(x.tolist() for x in got) == sorted(x.tolist() for x in batch[name])
    trainer.step(list(queries), list(responses), batch["scores"])
    assert trainer.current_step == 1


def test_tensors_of_one_shape_are_stacked_as_torch_does() -> None:
    queries = torch.arange(3, 3 + 4 * BATCH).view(BATCH, 4)
    ((both, numbers),) = batches(TensorDataset(queries, torch.arange(BATCH)))
    assert both.shape == (BATCH, 4)
    assert both.tolist() == queries[numbers.cpu()].tolist()
    (alone,) = batches(Rows(list(queries)))
    assert sorted(alone.tolist()) == queries.tolist()


def test_tensors_of_several_shapes_are_a_list() -> None:
    queries = make_batch()["queries"]
    (alone,) = batches(Rows(queries))
    assert isinstance(alone, list)
    assert sorted(x.tolist() for x in alone) == sorted(x.tolist() for x in queries)


def test_tuples_keep_their_names_and_texts_stay_texts() -> None:
    rows = [Row(torch.tensor([5, 6 + i]), f"w{i}") for i in range(BATCH)]
    (batch,) = batches(Rows(rows))
    assert type(batch).__name__ == "Row"
    assert sorted(batch.response) == [f"w{i}" for i in range(BATCH)]
    assert batch.query.shape == (BATCH, 2)


@pytest.mark.parametrize("plain", [False, True])
def test_dicts_become_a_dict_of_lists(plain: bool) -> None:
    rows = [{"query": f"w{i}", "input_ids": [5] * (i + 1)} for i in range(BATCH)]
    (batch,) = batches(Rows(rows) if plain else Dataset.from_list(rows))
    assert sorted(batch["query"]) == [f"w{i}" for i in range(BATCH)]
    assert all(isinstance(ids, Tensor) and ids.dim() == 1 for ids in batch["input_ids"])


def test_what_is_left_over_is_no_batch() -> None:
    rows = TensorDataset(torch.arange(3, 3 + 2 * BATCH + 1))
    assert [len(ids) for (ids,) in batches(rows)] == [BATCH, BATCH]


def test_fewer_samples_than_a_batch_are_an_empty_loader_and_a_warning() -> None:
    said = r"3 samples, fewer than batch_size=4: the dataloader has no batch; lower batch_size"
    rows = TensorDataset(torch.arange(3, 6))
    with pytest.warns(UserWarning, match=said) as warned:
        trainer = make_trainer(dataset=rows)
    assert warned[0].filename == make_trainer.__code__.co_filename, "where the trainer is made"
    assert len(trainer.dataloader) == 0
    assert list(trainer.dataloader) == []


def test_the_loop_asks_for_prompts_where_there_are_no_columns() -> None:
    trainer = make_trainer(dataset=TensorDataset(torch.arange(3, 3 + BATCH)))
    with pytest.raises(ValueError, match=r"TensorDataset has no columns .*or a list of rows"):
        trainer.train(lambda **_: [], steps=1)
