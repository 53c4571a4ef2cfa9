"""Where memory runs out, a mini-batch is computed in parts, to the same step."""

import warnings
import weakref
from typing import Any

import pytest
import torch

from fastrl import PPOTrainer
from fastrl.run.metrics import scalars
from tests.ppo.conftest import descending, make_batch, parameters
from tests.ppo.updates import apart, watch_gradients

BATCH = 8
# fp32 sums in another order; measured: 1e-7 to 4e-7.
SAME = 2e-6

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")
SAID = r"out of memory in the update: it goes on with 2 sample\(s\) at a time.*mini_batch_size"


def make_trainer(**settings: Any) -> PPOTrainer:
    return descending(1e-3, **{"batch_size": BATCH, "ppo_epochs": 1, **settings})


def out_of_memory(*_: Any) -> None:
    """As on a GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def no_room_for(more_than: int, trainer: PPOTrainer, training: bool = True) -> None:
    """Forward passes of more samples run out of memory, with gradients or without."""

    def check(_module: Any, _args: Any, kwargs: Any) -> None:
        samples = sum(max(1, len(x.responses)) for x in kwargs["attention"].layout.groups)
        if torch.is_grad_enabled() == training and samples > more_than:
            out_of_memory()

    trainer.model.register_forward_pre_hook(check, with_kwargs=True)


WHOLE = {"mini_batch_size": 8}
ACCUMULATED = {"mini_batch_size": 4, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize("settings", [
    WHOLE,
    {**ACCUMULATED, "kl_in": "loss", "loss_aggregate": "seq-mean-token-mean"},
    {**ACCUMULATED, "advantage": "dr_grpo", "group_size": 2, "max_grad_norm": 0.01},
], ids=["whole", "accumulated", "without values"])  # fmt: skip
def test_the_step_is_that_of_enough_memory(settings):
    """Gradients and all statistics; what fits is kept for later steps."""
    batch = make_batch(BATCH)
    if "group_size" in settings:
        batch["queries"] = [batch["queries"][i // 2] for i in range(BATCH)]
    batch["weights"] = [1.0, 2.0, 0.0, 1.0, 0.5, 1.0, 1.0, 3.0]
    plain, trainer = make_trainer(**settings), make_trainer(**settings)
    no_room_for(3, trainer)
    expected, seen = watch_gradients(plain), watch_gradients(trainer)
    wanted = plain.step(**batch)
    with pytest.warns(UserWarning, match=SAID) as said:
        stats = trainer.step(**batch)
    assert len(said) == 1
    assert apart(seen[0], expected[0]) < SAME
    for name, value in scalars(wanted).items():
        if not name.startswith(("time/", "perf/")):
            assert stats[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name in ("ppo/policy/ratio", "ppo/policy/advantages"):
        assert stats[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6)

    plain.step(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(**batch)
    assert apart(seen[1], expected[1]) < 10 * SAME  # of weights that differ by rounding


def test_a_backward_pass_that_fails_leaves_nothing_in_the_gradient():
    """The second of two, on a CPU: the first one's gradient is neither lost nor doubled."""
    plain, trainer = make_trainer(**ACCUMULATED), make_trainer(**ACCUMULATED)
    expected, seen = watch_gradients(plain), watch_gradients(trainer)
    calls = iter(range(100))
    weight = trainer.model.pretrained_model.transformer.h[0].mlp.c_fc.weight

    def fail(_weight: Any) -> None:
        if next(calls) == 1:
            torch.empty(10**15)

    weight.register_post_accumulate_grad_hook(fail)
    plain.step(**make_batch(BATCH))
    with pytest.warns(UserWarning, match=SAID):
        trainer.step(**make_batch(BATCH))
    assert apart(seen[0], expected[0]) < SAME


def test_memory_is_free_before_the_pass_is_run_again():
    trainer = make_trainer()
    held: list[weakref.ref[torch.Tensor]] = []

    def fill(_module: Any, _args: Any, out: Any) -> None:
        if not torch.is_grad_enabled():
            return
        assert not any(tensor() is not None for tensor in held)
        if len(held) < 2:
            held.append(weakref.ref(out.last_hidden_state))
            out_of_memory()

    trainer.model.pretrained_model.transformer.register_forward_hook(fill)
    with pytest.warns(UserWarning, match=SAID):
        trainer.step(**make_batch(BATCH))
    assert len(held) == 2  # 8 samples, 4 samples


def test_a_sample_that_does_not_fit_is_an_error_with_a_remedy():
    trainer = make_trainer()
    before = parameters(trainer)
    handle = trainer.model.v_head.summary.weight.register_hook(out_of_memory)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"one sample at a time: lower mini_batch_size"
    ):
        trainer.step(**make_batch(BATCH))
    handle.remove()
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in parameters(trainer).items())
    assert trainer.step(**make_batch(BATCH))["ppo/optimizer_steps"] == 1


def test_another_error_is_not_tried_again():
    trainer = make_trainer()
    calls = []

    def fail(_grad: Any) -> None:
        calls.append(1)
        raise RuntimeError("a shape is wrong")

    trainer.model.v_head.summary.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        trainer.step(**make_batch(BATCH))
    assert len(calls) == 1


def test_scoring_goes_on_in_smaller_slices():
    plain, trainer = make_trainer(), make_trainer()
    no_room_for(3, trainer, training=False)
    wanted = plain.step(**make_batch(BATCH))
    with pytest.warns(UserWarning, match=r"out of memory in scoring: it goes on with 2 sample"):
        stats = trainer.step(**make_batch(BATCH))
    assert stats["objective/kl_dist"] == pytest.approx(wanted["objective/kl_dist"], rel=1e-5)
    assert stats["ppo/loss/value"] == pytest.approx(wanted["ppo/loss/value"], rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(**make_batch(BATCH))
