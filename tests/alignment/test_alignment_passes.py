"""Batches of preference learning in passes of at most ``micro_batch_tokens``."""

from typing import Any

import pytest
import torch

from fastrl.alignment import LOSSES
from fastrl.alignment.tasks import find_task
from fastrl.data.columns import ANSWERS, PAIRS, PROMPTS
from fastrl.rollout import SamplingParams
from tests import tiny_models
from tests.alignment.conftest import GRADIENT_STEP, Make, examples, make_factory, model_of
from tests.trainers.test_passes import assert_same_gradients, learned, positions_of

IN_PASSES = [name for name, loss in LOSSES.items() if loss().backward is None]


def step(make_trainer: Make, loss: str, model: Any, most: int | None, **settings: Any) -> Any:
    """The gradient of a batch of eight examples, and the positions of its forwards."""
    task = next(task for task in LOSSES[loss]().tasks if not task.startswith("online"))
    rows = examples(find_task(task).data, 8)
    seen = positions_of(model)
    trainer = make_trainer(
        loss,
        model,
        rows,
        task=task,
        micro_batch_tokens=most,
        **{**GRADIENT_STEP, "batch_size": 8, **settings},
    )
    return learned(trainer), seen


@pytest.mark.parametrize("loss", IN_PASSES)
def test_a_batch_in_passes_learns_what_it_learns_at_once(make_trainer: Make, loss: str) -> None:
    most = 28
    model = model_of(LOSSES[loss]())
    expected, whole = step(make_trainer, loss, model, None)
    assert min(whole.learning) > 2 * most
    found, seen = step(make_trainer, loss, model_of(LOSSES[loss]()), most)
    seen.assert_bounded(most)
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("settings", [
    {"padding_free": False},
    {"reference": "copy"},
    {"reference": "trunk", "num_shared_layers": 1},
    {"gradient_accumulation_steps": 2, "batch_size": 4},
    {"activation_checkpointing": True},
])  # fmt: skip
def test_other_settings_leave_it_so(make_trainer: Make, settings: dict[str, Any]) -> None:
    model = tiny_models.language_model("llama")
    expected, _ = step(make_trainer, "dpo", model, None, **settings)
    model = tiny_models.language_model("llama")
    found, seen = step(make_trainer, "dpo", model, 40, **settings)
    seen.assert_bounded(40)
    assert_same_gradients(found, expected)


def test_a_pass_draws_the_same_dropout_again(make_trainer: Make) -> None:
    """The scores that the loss read are those that the gradient is of: with a learning rate of 0
    they are the same in both forwards, though dropout draws anew in each step."""
    model = tiny_models.language_model("gpt2", resid_pdrop=0.3)
    scores: list[torch.Tensor] = []
    trainer = make_trainer(
        "sft", model, examples(ANSWERS, 8), task="sft", batch_size=8, disable_dropout=False,
        micro_batch_tokens=28, learning_rate=0.0,
    )  # fmt: skip
    drops = model.transformer.h[0].mlp.dropout
    drops.register_forward_hook(lambda _m, _given, out: scores.append(out.detach().clone()))
    trainer.train()
    first, again = scores[: len(scores) // 2], scores[len(scores) // 2 :]
    assert len(first) >= 3
    assert all(map(torch.equal, first, again))
    assert all(bool((x == 0).any()) for x in first)


def test_an_evaluation_keeps_the_bound(make_trainer: Make) -> None:
    model = tiny_models.language_model()
    rows = examples(PAIRS, 8)
    held_out = make_factory("offline-pairwise", rows, batch_size=8)
    trainer = make_trainer("dpo", model, rows, eval_factory=held_out, micro_batch_tokens=28)
    whole = make_trainer("dpo", tiny_models.language_model(), rows, eval_factory=held_out)
    expected = whole.evaluate()["eval_loss"]
    seen = positions_of(model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    seen.assert_bounded(28, passes=0)


def test_what_no_pass_holds_is_refused(make_trainer: Make) -> None:
    rows = examples(PAIRS, 8)
    sizes = [len(x.prompt_ids) + max(len(r.ids) for r in x.responses) for x in rows]
    most = max(sizes)
    make_trainer("dpo", rows=rows, micro_batch_tokens=most)
    message = rf"micro_batch_tokens={most - 1}, but example \d of the training data has {most} tok"
    with pytest.raises(ValueError, match=message):
        make_trainer("dpo", rows=rows, micro_batch_tokens=most - 1)
    held_out = make_factory("offline-pairwise", rows)
    with pytest.raises(ValueError, match=r"but example 6 of the evaluation data has"):
        make_trainer("dpo", rows=rows[:1], eval_factory=held_out, micro_batch_tokens=sizes[0])
    pair = max(len(x.prompt_ids) + sum(len(r.ids) for r in x.responses) for x in rows)
    with pytest.raises(ValueError, match=rf"example \d of the training data has {pair} tok"):
        make_trainer("bradley-terry", rows=rows, micro_batch_tokens=pair - 1)
    with pytest.raises(ValueError, match=r"micro_batch_tokens is not for the loss ppo, .* raise"):
        make_trainer("ppo", tiny_models.policy("gpt2"), micro_batch_tokens=99)


def test_responses_that_may_become_too_long_are_refused(make_trainer: Make) -> None:
    rows = examples(PROMPTS, 4)
    longest = max(len(x.prompt_ids) for x in rows)
    online = {"task": "online-pairwise", "params": SamplingParams(max_new_tokens=30)}
    make_trainer("dpo", rows=rows, micro_batch_tokens=longest + 30, **online)
    with pytest.raises(ValueError, match=rf"of the training data has {longest + 30} tokens"):
        make_trainer("dpo", rows=rows, micro_batch_tokens=longest + 29, **online)


def test_padding_that_no_pass_holds_is_told_of_its_batch(make_trainer: Make) -> None:
    """Without padding each of them fits."""
    rows = examples(PAIRS, 8)
    sizes = [len(x.prompt_ids) + sum(len(r.ids) for r in x.responses) for x in rows]
    settings = {"micro_batch_tokens": max(sizes), "batch_size": 8, "padding_free": False}
    trainer = make_trainer("bradley-terry", rows=rows, **settings)
    with pytest.raises(ValueError, match=r"but sample 0 of the batch has \d+ tokens: raise it"):
        trainer.train()
