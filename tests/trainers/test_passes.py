"""Batches in passes of at most ``micro_batch_tokens``: what they learn, and what each may hold."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fastrl import DataCollatorForCompletionOnlyLM
from fastrl.trainers.passes import fill
from tests import tiny_models
from tests.golden import tiny
from tests.trainers.conftest import (
    GRADIENT_STEP,
    Make,
    pairs,
    reward,
    reward_model,
    sft,
    texts,
    weights,
)

GPT2, LLAMA = (partial(tiny_models.language_model, name) for name in ("gpt2", "llama"))
CLASSIFIER = partial(reward_model, "llama")
BATCH = {"per_device_train_batch_size": 8, "num_train_epochs": 1, "max_steps": -1}


def learned(trainer: Any) -> dict[str, torch.Tensor]:
    """The gradient of a run's only step, which changes every weight by it."""
    before = weights(trainer.model)
    trainer.train()
    return {name: before[name] - x for name, x in weights(trainer.model).items()}


def assert_same_gradients(found: Any, expected: Any) -> None:
    """To what float32 sums in another order differ by, and the weights of 1 that they change."""
    largest = max(float(x.abs().max()) for x in expected.values())
    assert largest > 1e-3
    for name, x in expected.items():
        assert (found[name] - x).abs().max() <= 1e-5 * largest, name


@dataclass
class Positions:
    """Of every forward of the first layer, and of those of the last one that learn."""

    all: list[int] = field(default_factory=list)
    learning: list[int] = field(default_factory=list)

    def assert_bounded(self, most: int, passes: int = 3) -> None:
        assert len(self.learning) >= passes
        assert max(self.all + self.learning) <= most


def positions_of(model: Any) -> Positions:
    seen = Positions()

    def note_learning(_module: Any, given: Any) -> None:
        if model.training and torch.is_grad_enabled():
            seen.learning.append(given[0].shape[:2].numel())

    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    layers[0].register_forward_pre_hook(
        lambda _module, given: seen.all.append(given[0].shape[:2].numel())
    )
    layers[-1].register_forward_pre_hook(note_learning)
    return seen


WITH_MARGINS = pairs(8, margin=lambda i: i / 4)
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
# By case: a trainer, its model and data, the most tokens of a pass, settings, and those of the run
# in passes alone.
CASES: dict[str, tuple[Any, Any, Any, int, dict[str, Any], dict[str, Any]]] = {
    "texts": (sft, GPT2, texts(8), 32, {}, {}),
    "padded texts": (sft, GPT2, texts(8), 32, {"padding_free": False}, {}),
    "a clipped gradient": (sft, GPT2, texts(8), 32, {"max_grad_norm": 0.01}, {}),
    "packed rows": (sft, LLAMA, texts(16), 30, {"packing": True, "max_length": 15}, {}),
    "accumulated batches": (sft, LLAMA, texts(8), 28, {}, HALVES),
    "pairs": (reward, CLASSIFIER, WITH_MARGINS, 40, {"center_rewards_coefficient": 0.1}, {}),
    "padded pairs": (
        reward, CLASSIFIER, WITH_MARGINS, 40,
        {"center_rewards_coefficient": 0.1, "padding_free": False}, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_batch_in_passes_learns_what_it_learns_at_once(name: str, tmp_path: Path) -> None:
    make, model_of, data, most, settings, of_passes = CASES[name]
    found = []
    for limit, others in ((None, {}), (most, of_passes)):
        model = model_of()
        seen = positions_of(model)
        given = {**GRADIENT_STEP, **BATCH, **settings, **others}
        trainer = make(tmp_path, model, data, micro_batch_tokens=limit, **given)
        found.append(learned(trainer))
        found[-1]["loss"] = torch.tensor(trainer.state.log_history[-1]["train_loss"])
    seen.assert_bounded(most)
    assert name != "packed rows" or len(seen.learning) <= 8
    assert_same_gradients(found[1], found[0])


def test_parts_are_filled_in_order() -> None:
    assert fill([3, 4, 2, 5, 1], 7, "text") == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match=r"micro_batch_tokens=4, but text 3 of the batch has 5 "):
        fill([3, 4, 2, 5, 1], 4, "text")


def test_a_text_that_no_pass_holds_is_refused_before_training(
    make_sft: Make, make_reward: Make
) -> None:
    longest = max(len(row["text"].split()) for row in texts(8)) + 1  # and EOS
    make_sft(data=texts(8), micro_batch_tokens=longest)
    message = rf"micro_batch_tokens={longest - 1}, but text \d of the training data has {longest} "
    with pytest.raises(ValueError, match=message + r"tokens: raise it to that, or lower max_leng"):
        make_sft(data=texts(8), micro_batch_tokens=longest - 1)
    with pytest.warns(UserWarning, match="are cut"):
        make_sft(data=texts(8), micro_batch_tokens=longest - 1, max_length=longest - 1)
    with pytest.raises(ValueError, match=r"=23, but pair 4 of the training data has 24 tokens"):
        make_reward(data=pairs(8), micro_batch_tokens=23)
    for make, data, most in ((make_sft, texts(8), 31), (make_reward, pairs(8), 63)):
        with pytest.raises(ValueError, match=f"micro_batch_tokens={most}, .* has {most + 1} "):
            make(data=data, micro_batch_tokens=most, pad_to_multiple_of=32, padding_free=False)
    # Padded, each text of a pair is as wide as the longer one.
    with pytest.raises(ValueError, match=r"=24, but pair \d of the training data has \d+ tokens"):
        make_reward(data=pairs(8), micro_batch_tokens=24, padding_free=False)
    with pytest.raises(ValueError, match=r"micro_batch_tokens must be positive or None, got 0"):
        make_sft(micro_batch_tokens=0)


def test_batches_that_cannot_be_split_are_refused(make_sft: Make, make_reward: Make) -> None:
    tokenizer = tiny.tokenizer()
    joins = DataCollatorForCompletionOnlyLM("w7", tokenizer=tokenizer, padding_free=True)
    with pytest.raises(ValueError, match=r"micro_batch_tokens splits batches .* leave its padding"):
        make_sft(data_collator=joins, micro_batch_tokens=99)

    def odd(features: Any) -> dict[str, Any]:
        ids = torch.tensor([[5, 6, 7, 8]] * 4)
        return {"input_ids": ids, "labels": ids, "extra": torch.ones(3)}

    trainer = make_sft(data=texts(4), data_collator=odd, micro_batch_tokens=99)
    with pytest.raises(ValueError, match=r"a row for each example, and the data collator makes i"):
        trainer.train()
    trainer = make_reward(data=pairs(4), data_collator=odd, micro_batch_tokens=99)
    with pytest.raises(ValueError, match=r"a row for each pair, and the data collator makes input"):
        trainer.train()


def test_a_step_of_its_own_is_the_mean_over_its_tokens(make_sft: Make) -> None:
    """Without the number of tokens that ``train`` passes."""
    found = []
    for most in (None, 32):
        model = tiny_models.language_model("gpt2")
        trainer = make_sft(model, texts(8), micro_batch_tokens=most)
        trainer.current_gradient_accumulation_steps = 1  # set by train()
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
        loss = trainer.training_step(model, batch)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({**grads, "loss": loss})
    assert_same_gradients(found[1], found[0])
