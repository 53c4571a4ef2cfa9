"""A batch in the layout of TRL, which a subclass may change, holds the samples it was made of."""

import torch

from fastrl.samples import Samples
from fastrl.trainers.groups.methods import as_tensors, samples_of


def test_tokens_of_tools_and_samples_left_out_are_not_learned() -> None:
    learned = [[True, False, True], [False, False], [True]]
    logprobs = [torch.arange(len(x), dtype=torch.float32) - 3 for x in learned]
    samples = Samples(
        prompt_ids=[torch.tensor(x) for x in ([1, 2], [3], [4])],
        sequences=[torch.tensor(x) for x in ([5, 6, 7], [8, 9], [10])],
        learned=[torch.tensor(x) for x in learned],
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        old_logprobs=logprobs,
        generated=3.0,
        further={"name": ["a", "b", "c"], "size": torch.tensor([1, 2, 3])},
        of_batch={"scale": torch.tensor(2.0)},
    )
    batch = as_tensors(samples, 0, "cpu")
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert batch["tool_mask"].tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 0]]
    again = samples_of(batch)
    assert [x.tolist() for x in again.learned] == [[True, False, True], [], [True]]
    assert [x.tolist() for x in again.sequences] == [[5, 6, 7], [], [10]]
    assert [x.tolist() for x in again.prompt_ids] == [[1, 2], [3], [4]]
    assert [x.tolist() for x in again.old_logprobs] == [[-3.0, -2.0, -1.0], [], [-3.0]]
    assert again.generated == 3.0
    assert again.further.keys() == {"name", "size"}
    assert again.of_batch.keys() == {"scale"}


def test_what_is_learned_is_counted_where_nobody_says_how_much_was_generated() -> None:
    batch = {
        "prompt_ids": torch.ones(1, 1, dtype=torch.long),
        "prompt_mask": torch.ones(1, 1),
        "completion_ids": torch.ones(1, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 0]]),
        "tool_mask": torch.tensor([[0, 1, 0]]),
        "advantages": torch.ones(1),
    }
    assert samples_of(batch).generated == 1.0
