"""What the trainer of the framework refuses, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from fastrl.alignment import BatchFactory, make_loss
from fastrl.data.columns import PAIRS
from tests.alignment.conftest import (
    Examples,
    Make,
    examples,
    make_factory,
)
from tests.golden import tiny


@pytest.mark.parametrize(
    ("loss", "given", "says"),
    [
        ("sft", {"task": "offline-pairwise"}, "sft does not fit the task offline-pairwise"),
        ("dpo", {"task": "sft"}, "it is for offline-pairwise, online-pairwise; for sft choose sft"),
        ("kto", {"batch_size": 1}, "batch_size must be at least 2, got 1"),
        ("simpo", {"reference": "copy"}, "the loss simpo has no reference"),
        (
            "dpo",
            {"task": "online-pairwise", "reference": "cached"},
            "unlike those of online-pairwise: choose 'copy', 'adapter'",
        ),
        ("dpo", {"reference": "adapter"}, "needs a PEFT model"),
        ("dpo", {"reference": "trunk"}, "needs num_shared_layers"),
        ("dpo", {"reference": "whatever"}, "unknown reference 'whatever'"),
        ("dpo", {"rollout_slots": 0}, "rollout_slots must be at least 1"),
        ("dqo", {}, "unknown loss 'dqo': choose one of dpo"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_trainer: Make, loss: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make_trainer(loss, **given)


def test_coefficients_that_a_loss_does_not_have_are_named() -> None:
    with pytest.raises(ValueError, match="simpo has no coefficient 'betta'"):
        make_loss("simpo", betta=1)


def test_an_evaluation_of_another_task_is_refused(make_trainer: Make) -> None:
    with pytest.raises(ValueError, match="eval_factory is for sft, factory for offline-pairwise"):
        make_trainer("dpo", eval_factory=make_factory("sft"))


def test_a_tokenizer_without_a_pad_token_is_refused(make_trainer: Make) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    factory = BatchFactory("offline-pairwise", Examples(examples(PAIRS), tokenizer))
    with pytest.raises(ValueError, match="has no pad token: set"):
        make_trainer("dpo", factory=factory)


def test_evaluation_needs_a_factory(make_trainer: Make) -> None:
    with pytest.raises(ValueError, match="evaluation needs the eval_factory"):
        make_trainer("dpo").evaluate()


def test_a_classifier_with_two_labels_is_no_reward_model(make_trainer: Make) -> None:
    from tests.trainers.conftest import reward_model

    with pytest.raises(ValueError, match="has 2 labels, a reward model has one"):
        make_trainer("bradley-terry", reward_model("gpt2", num_labels=2))
