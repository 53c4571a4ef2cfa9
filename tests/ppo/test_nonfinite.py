"""Losses and gradients that are not finite never reach a weight, and are named as what they are."""

import math
import warnings
from typing import Any

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer
from fastrl.run.metrics import scalars
from tests.golden import tiny
from tests.ppo.conftest import make_batch, make_policy, make_trainer, parameters, perturbed
from tests.ppo.updates import apart, watch_gradients

BAD = tiny.VOCABULARY - 1  # marks a sample
BATCH = 8
ACCUMULATED = {"batch_size": BATCH, "mini_batch_size": 2, "gradient_accumulation_steps": 4}

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def batch(*marked: int) -> dict[str, Any]:
    """Samples; those marked have a token that no other has."""
    found = make_batch(BATCH)
    for ids in (*found["queries"], *found["responses"]):
        ids[ids == BAD] = BAD - 1
    for i in marked:
        found["queries"][i][0] = BAD
    return found


def trainer_of(nan: bool = True, in_gradient: bool = False, **settings: Any) -> PPOTrainer:
    """Hidden states of marked samples are NaN where gradients are computed, if ``nan``; or only
    their gradients are."""
    policy = make_policy()

    def poison(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        marked = (ids == BAD).any(-1)
        if nan and torch.is_grad_enabled() and marked.any():
            factor = torch.where(marked[:, None, None], torch.nan, 1.0)
            if in_gradient:
                out.last_hidden_state.register_hook(lambda g: factor * g)
            else:
                out.last_hidden_state = factor * out.last_hidden_state

    policy.pretrained_model.transformer.register_forward_hook(poison, with_kwargs=True)
    return make_trainer(policy, perturbed(make_policy()), **{**ACCUMULATED, **settings})


def all_finite(trainer: PPOTrainer) -> bool:
    return all(bool(p.isfinite().all()) for p in parameters(trainer).values())


def same_weights(trainer: PPOTrainer, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, before[name]) for name, p in parameters(trainer).items())


@pytest.mark.parametrize("limit", [None, 0.1])
def test_a_nan_mini_batch_leaves_the_gradient_of_the_others(limit):
    settings = {"ppo_epochs": 1, "loss_denominator": "step", "max_grad_norm": limit}
    trainer = trainer_of(**settings)
    order = trainer.update.epochs.shuffle.permutation(BATCH).reshape(-1, 2)
    trainer.update.epochs.shuffle.seed(0)
    left_out = next(pair.tolist() for pair in order if 3 in pair)
    seen = watch_gradients(trainer)
    with pytest.warns(UserWarning, match=r"non-finite loss in 1 mini-batch\(es\)") as said:
        stats = trainer.step(**batch(3))
    assert "ratio_threshold" not in str(said[0].message)
    assert len(said) == 1
    assert all_finite(trainer)
    assert stats["ppo/nonfinite_minibatches"] == 1
    assert stats["ppo/optimizer_steps"] == 1
    assert stats["ppo/skipped_minibatches"] == stats["ppo/nonfinite_steps"] == 0
    assert all(math.isfinite(x) for x in scalars(stats).values())
    assert all(stats[f"ppo/policy/{name}"].all() for name in ("ratio", "advantages"))

    others = trainer_of(nan=False, **settings)
    expected = watch_gradients(others)
    others.step(**batch(3), weights=[float(i not in left_out) for i in range(BATCH)])
    # The same mini-batches, whose sums are divided in another order.
    assert apart(seen[0], expected[0]) < 1e-5


@pytest.mark.parametrize("limit", [None, 0.1])
def test_a_nan_does_not_stay_in_weights_that_the_optimizer_does_not_have(limit):
    """The value head's here: nor does their gradient add up from step to step."""
    policy = trainer_of().model
    optimizer = torch.optim.SGD(policy.pretrained_model.parameters(), lr=1e-3)
    config = PPOConfig(**ACCUMULATED, ppo_epochs=1, max_grad_norm=limit)
    trainer = PPOTrainer(config, policy, perturbed(make_policy()), tiny.tokenizer(),
                         optimizer=optimizer)  # fmt: skip
    with pytest.warns(UserWarning, match="non-finite loss in 1 mini-batch"):
        stats = trainer.step(**batch(3))
    assert stats["ppo/optimizer_steps"] == 1
    assert trainer.step(**batch())["ppo/optimizer_steps"] == 1
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_without_accumulation_a_nan_mini_batch_takes_no_step():
    trainer = trainer_of(ppo_epochs=2, gradient_accumulation_steps=1)
    with pytest.warns(UserWarning, match=r"non-finite loss in 2 mini-batch\(es\)"):
        stats = trainer.step(**batch(3))
    assert stats["ppo/optimizer_steps"] == 6
    assert stats["ppo/nonfinite_minibatches"] == 2
    assert all_finite(trainer)


def test_where_every_loss_is_nan_nothing_changes():
    trainer = trainer_of(adap_kl_ctrl=True)
    before = parameters(trainer)
    with pytest.warns(UserWarning, match="non-finite loss in 16 mini-batch"):
        stats = trainer.step(**batch(*range(BATCH)))
    assert same_weights(trainer, before)
    assert not trainer.optimizer.optimizer.state
    assert stats["ppo/optimizer_steps"] == 0
    assert math.isnan(stats["ppo/loss/total"])  # of no mini-batch is it known
    assert math.isfinite(trainer.kl_ctl.value)
    assert trainer.step(**batch())["ppo/optimizer_steps"] == 4


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("accumulated", [True, False])
def test_an_infinite_gradient_is_not_taken(limit, accumulated):
    """Of the value head, once, in the second optimizer step."""
    settings = {} if accumulated else {"gradient_accumulation_steps": 1, "mini_batch_size": BATCH}
    trainer = trainer_of(nan=False, ppo_epochs=3, max_grad_norm=limit, **settings)
    calls = iter(range(100))
    at = 5 if accumulated else 1
    trainer.model.v_head.summary.weight.register_hook(
        lambda g: g * torch.inf if next(calls) == at else g
    )
    with pytest.warns(UserWarning, match=r"non-finite gradient norm: 1 optimizer step") as said:
        stats = trainer.step(**batch())
    assert len(said) == 1
    assert all_finite(trainer)
    assert (stats["ppo/nonfinite_steps"], stats["ppo/optimizer_steps"]) == (1, 2)
    assert stats["ppo/skipped_minibatches"] == stats["ppo/nonfinite_minibatches"] == 0
    assert all(math.isfinite(x) for x in scalars(stats).values())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_error_is_raised_where_it_is_asked_for(where):
    trainer = trainer_of(nan=where == "loss", on_nonfinite="raise")
    before = parameters(trainer)
    if where == "gradient":
        handle = trainer.model.v_head.summary.weight.register_hook(lambda g: g * torch.nan)
    with pytest.raises(FloatingPointError, match=f"non-finite {where}.* step is not taken"):
        trainer.step(**batch(3))
    assert same_weights(trainer, before)
    assert (trainer.current_step, trainer.kl_ctl.value) == (0, trainer.config.init_kl_coef)
    if where == "gradient":
        handle.remove()
    trainer.step(**batch())
    assert not same_weights(trainer, before)


NAMED = r"because of sample\(s\) 3 \(prompt 'w96 "


@pytest.mark.parametrize("denominator", ["step", "minibatch"])
@pytest.mark.parametrize("in_gradient", [False, True], ids=["loss", "gradient"])
def test_a_sample_that_spoils_a_step_is_left_out_of_it_alone(in_gradient, denominator):
    settings = {"ppo_epochs": 2, "loss_denominator": denominator}
    trainer = trainer_of(on_nonfinite="zero-sample", in_gradient=in_gradient, **settings)
    seen = watch_gradients(trainer)
    with pytest.warns(UserWarning, match=NAMED) as said:
        stats = trainer.step(**batch(3))
    assert len(said) == 1
    assert stats["ppo/nonfinite_samples"] == 1
    assert stats["ppo/nonfinite_minibatches"] == stats["ppo/nonfinite_steps"] == 0
    assert stats["ppo/optimizer_steps"] == 2
    assert all(math.isfinite(x) for x in scalars(stats).values())
    others = trainer_of(nan=False, **settings)
    expected = watch_gradients(others)
    others.step(**batch(3), weights=[float(i != 3) for i in range(BATCH)])
    assert apart(seen[0], expected[0]) < 1e-5
    assert apart(seen[1], expected[1]) < 1e-4  # of weights that differ by Adam's first step
    with warnings.catch_warnings():  # named once
        warnings.simplefilter("error")
        assert trainer.step(**batch(5))["ppo/nonfinite_samples"] == 1


def test_a_sample_that_was_left_out_is_not_run_again_in_the_step():
    trainer = trainer_of(on_nonfinite="zero-sample", ppo_epochs=3, mini_batch_size=BATCH,
                         gradient_accumulation_steps=1)  # fmt: skip
    runs = []

    def note(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        if torch.is_grad_enabled():
            runs.append(bool((ids == BAD).any()))

    trainer.model.pretrained_model.transformer.register_forward_hook(note, with_kwargs=True)
    with pytest.warns(UserWarning, match=NAMED):
        trainer.step(**batch(3))
    # Of 8 samples, which are halved three times; then without it, in each of three epochs.
    assert runs.count(True) == 1 + 4
    assert runs[-3:] == [False] * 3


def test_where_every_sample_spoils_the_step_the_model_is_broken():
    trainer = trainer_of(on_nonfinite="zero-sample")
    before = parameters(trainer)
    with (
        pytest.warns(UserWarning, match="non-finite loss in 4 mini-batch"),
        pytest.raises(FloatingPointError, match="each of 8 samples is not finite"),
    ):
        trainer.step(**batch(*range(BATCH)))
    assert same_weights(trainer, before)
    assert trainer.current_step == 0


def test_a_gradient_that_no_sample_spoils_alone_leaves_out_the_step():
    trainer = trainer_of(nan=False, on_nonfinite="zero-sample", ppo_epochs=2)
    calls = iter(range(100))
    trainer.model.v_head.summary.weight.register_hook(
        lambda g: g * torch.inf if next(calls) == 1 else g
    )
    with pytest.warns(UserWarning, match="non-finite gradient norm: 1 optimizer step"):
        stats = trainer.step(**batch())
    assert (stats["ppo/nonfinite_steps"], stats["ppo/optimizer_steps"]) == (1, 1)
    assert stats["ppo/nonfinite_samples"] == 0
    assert all_finite(trainer)


@pytest.mark.parametrize("in_gradient", [False, True], ids=["loss", "gradient"])
def test_errors_and_warnings_name_the_sample(in_gradient):
    trainer = trainer_of(on_nonfinite="raise", in_gradient=in_gradient)
    with pytest.raises(FloatingPointError, match=NAMED):
        trainer.step(**batch(3))
    trainer = trainer_of(in_gradient=in_gradient, ppo_epochs=1)
    with pytest.warns(UserWarning, match=NAMED):
        trainer.step(**batch(3))
    with pytest.warns(UserWarning, match="left out|are left") as said:  # it is named once
        trainer.step(**batch(3))
    assert "because" not in str(said[0].message)


def test_the_classic_train_minibatch_takes_no_such_step():
    trainer = trainer_of(nan=False, gradient_accumulation_steps=1)
    x = torch.zeros(2, 3, device=trainer.current_device)
    mask = torch.ones_like(x, dtype=torch.bool)
    leaf = trainer.model.v_head.summary.bias
    before = parameters(trainer)
    for value, says in ((torch.nan, "non-finite loss"), (1.0, "non-finite gradient norm")):
        values = leaf * x + value
        if value == 1.0:
            values.register_hook(lambda g: g * torch.inf)
        with pytest.warns(UserWarning, match=says):
            trainer.train_minibatch(x, x, x + 0 * values, None, values, mask, x + 1, x)
        assert same_weights(trainer, before)
    trainer.train_minibatch(x, x, x, None, leaf + x, mask, x + 1, x + 1)
    assert not same_weights(trainer, before)


class Scaler(torch.amp.GradScaler):
    """fp16's, on a CPU."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**10)


@pytest.mark.parametrize("limit", [None, 0.1])
def test_a_gradient_that_overflows_under_a_scaler_is_no_error(limit, monkeypatch):
    """It leaves such steps out by itself, and lowers its scale."""
    from accelerate.optimizer import AcceleratedOptimizer

    settings = {"ppo_epochs": 2, "max_grad_norm": limit, "loss_denominator": "step"}
    plain, trainer = (trainer_of(nan=False, **settings) for _ in range(2))
    scaler = trainer.accelerator.scaler = Scaler()
    inner = trainer.optimizer.optimizer
    trainer.update.gradient.engine.optimizer = AcceleratedOptimizer(inner, scaler=scaler)

    def unscale() -> None:  # as with mixed_precision="fp16", which wants a GPU
        scaler.unscale_(inner)

    monkeypatch.setattr(trainer.accelerator, "unscale_gradients", unscale)
    stats = trainer.step(**batch())
    assert stats["ppo/optimizer_steps"] == 2
    plain.step(**batch())
    for name, weight in parameters(plain).items():
        # Adam at a rate of 1e-3; a scale of 2^10 changes no bit but in denormals
        torch.testing.assert_close(parameters(trainer)[name], weight, rtol=1e-5, atol=1e-5)

    handle = trainer.model.v_head.summary.weight.register_hook(lambda g: g * torch.inf)
    before = parameters(trainer)
    stats = trainer.step(**batch())
    handle.remove()
    assert same_weights(trainer, before)
    assert stats["ppo/nonfinite_steps"] == stats["ppo/nonfinite_minibatches"] == 0
    assert scaler.get_scale() == 2.0**8
    assert trainer.step(**batch())["ppo/optimizer_steps"] == 2
