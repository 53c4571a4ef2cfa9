"""After an exception in the middle of ``step()`` the trainer goes on as if it had not been called,
but for optimizer steps that were taken."""

import copy
import sys
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from fastrl import PPOConfig, PPOTrainer
from fastrl.learn.score_scaling import RunningMoments
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import make_batch, make_policy, make_trainer, parameters, perturbed

ACCUMULATED = {"batch_size": 8, "mini_batch_size": 2, "gradient_accumulation_steps": 4}

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


class Failure(BaseException):
    """As a Ctrl-C is one."""


def trainer_of(policy: Any = None, reference: Any = None, **settings: Any) -> PPOTrainer:
    settings = {**ACCUMULATED, "use_score_scaling": True, "ppo_epochs": 2, **settings}
    return make_trainer(policy or make_policy(), reference or perturbed(make_policy()), **settings)


def fail(*_: Any, **__: Any) -> None:
    raise Failure


def fail_at(trainer: PPOTrainer, where: str, call: int) -> Any:
    """Raises in the ``call``-th forward or backward pass with gradients; returns how to stop it."""
    seen = iter(range(1000))

    def fail(*_: Any) -> None:
        if (where == "backward" or torch.is_grad_enabled()) and next(seen) == call - 1:
            raise Failure

    transformer = trainer.model.pretrained_model.transformer
    if where == "forward":
        return transformer.ln_f.register_forward_hook(fail)
    return transformer.h[0].mlp.c_fc.weight.register_post_accumulate_grad_hook(fail)


def state(trainer: PPOTrainer) -> tuple[Any, ...]:
    return (
        vars(trainer.running).copy(),
        trainer.kl_ctl.value,
        trainer.current_step,
        trainer.model.training,
        [
            s.tolist() if hasattr(s, "tolist") else s
            for s in trainer.update.epochs.shuffle.get_state()
        ],
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_next_step_is_that_of_a_fresh_trainer(where, checkpointing):
    """An exception in the second of four micro-batches, before any optimizer step."""
    batch = make_batch(8)
    fresh = trainer_of(gradient_checkpointing=checkpointing)
    expected = fresh.step(**batch)
    trainer = trainer_of(gradient_checkpointing=checkpointing)
    trainer.model.train()
    start, before = parameters(trainer), state(trainer)
    handle = fail_at(trainer, where, 2)
    with pytest.raises(Failure):
        trainer.step(**batch)
    handle.remove()
    assert state(trainer) == before
    assert trainer.model.training
    assert all(p.grad is None for p in trainer.model.parameters())
    assert all(torch.equal(p, start[name]) for name, p in parameters(trainer).items())

    stats = trainer.step(**batch)
    assert stats["ppo/optimizer_steps"] == expected["ppo/optimizer_steps"] == 2
    assert stats["ppo/mean_scores"] == expected["ppo/mean_scores"]
    for name, weight in parameters(fresh).items():
        torch.testing.assert_close(parameters(trainer)[name], weight, rtol=1e-6, atol=1e-6)
    assert any(not torch.equal(p, start[name]) for name, p in parameters(trainer).items())


def test_optimizer_steps_that_were_taken_stay():
    """An exception in the second epoch's second micro-batch: the next step is that of a trainer
    with those weights and Adam's state."""
    batch = make_batch(8)
    trainer = trainer_of()
    before = state(trainer)
    start = parameters(trainer)
    handle = fail_at(trainer, "forward", 6)
    with pytest.raises(Failure):
        trainer.step(**batch)
    handle.remove()
    assert state(trainer) == before
    moved = parameters(trainer)
    assert any(not torch.equal(p, start[name]) for name, p in moved.items())

    # Two epochs of one step each: the first has been taken.
    once = trainer_of(ppo_epochs=1)
    once.step(**batch)
    for name, weight in parameters(once).items():
        torch.testing.assert_close(moved[name], weight, rtol=1e-6, atol=1e-6)
    fresh = trainer_of(copy.deepcopy(trainer.model))
    fresh.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    other = make_batch(8, seed=1)
    fresh.step(**other)
    trainer.step(**other)
    for name, weight in parameters(fresh).items():
        torch.testing.assert_close(parameters(trainer)[name], weight, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings")
@pytest.mark.parametrize("reference", ["trunk", "offload", "adapter"])
@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_references_are_put_back(reference):
    """Layers that were left out, adapters that were off, weights that were brought."""
    settings: dict[str, Any] = {"reference": reference}
    batch = make_batch(8)

    def make() -> PPOTrainer:
        policy = make_policy()
        if reference == "adapter":
            lora = tiny_models.lora()
            torch.manual_seed(0)
            policy = type(policy).from_pretrained(policy.pretrained_model, peft_config=lora)
        if reference == "trunk":
            settings["num_shared_layers"] = 1
        config = PPOConfig(**ACCUMULATED, **settings)
        return PPOTrainer(config, policy, tokenizer=tiny.tokenizer())

    fresh, trainer = make(), make()
    fresh.step(**batch)
    model: Any = trainer.model.pretrained_model
    stack = (model.get_base_model() if reference == "adapter" else model).transformer.h
    for updating in (False, True):
        seen = iter(range(100))

        def fail(*_: Any, seen: Any = seen, updating: bool = updating) -> None:
            if torch.is_grad_enabled() == updating and next(seen) == 1:
                raise Failure

        handle = stack[1].register_forward_hook(fail)
        with pytest.raises(Failure):
            trainer.step(**batch)
        handle.remove()
    trainer.step(**batch)
    for name, weight in parameters(fresh).items():
        torch.testing.assert_close(parameters(trainer)[name], weight, rtol=1e-6, atol=1e-6)


def test_an_exception_after_the_update_leaves_the_rest_of_the_state(monkeypatch):
    """In the statistics, say: the moments move at the end, with the KL coefficient."""
    trainer = trainer_of()
    before = state(trainer)

    monkeypatch.setattr(trainer, "record_step_stats", fail)
    with pytest.raises(Failure):
        trainer.step(**make_batch(8))
    assert state(trainer)[:3] == before[:3]
    monkeypatch.undo()
    assert trainer.step(**make_batch(8))["ppo/optimizer_steps"] == 2
    assert trainer.running.count == pytest.approx(8)


def test_rollouts_are_forgotten_where_an_optimizer_step_fails(monkeypatch):
    """Weights may have moved by then, and fused optimizers do not say so."""
    trainer = trainer_of(ppo_epochs=1)
    queries = tiny_models.prompts(*[4] * 8)
    responses = trainer.generate(
        queries, return_prompt=False, max_new_tokens=3, do_sample=True, top_k=0
    )

    monkeypatch.setattr(sys.modules["torch.optim.adam"], "adam", fail)
    scores = [torch.tensor(float(i)) for i in range(8)]
    with pytest.raises(Failure):
        trainer.step(queries, responses, scores)
    monkeypatch.undo()
    assert trainer.rollouts.memory.find(queries, responses).old_logprobs is None
    assert trainer.step(queries, responses, scores)["ppo/optimizer_steps"] == 1


@pytest.mark.parametrize("where", ["forward", "optimizer"])
def test_a_scaler_goes_on_too(where, monkeypatch):
    """Gradients that were unscaled and clipped, but not learned from, are so once more."""
    trainer, fresh = (trainer_of(max_grad_norm=0.1) for _ in range(2))
    for each in (trainer, fresh):
        scaler = each.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        inner = each.optimizer.optimizer
        each.update.gradient.engine.optimizer = AcceleratedOptimizer(inner, scaler=scaler)

        def unscale(scaler: Any = scaler, inner: Any = inner) -> None:  # as for fp16, on a GPU
            scaler.unscale_(inner)

        monkeypatch.setattr(each.accelerator, "unscale_gradients", unscale)
    before = state(trainer)
    if where == "forward":
        handle = fail_at(trainer, "forward", 1)
    else:
        handle = trainer.optimizer.optimizer.register_step_pre_hook(fail)
    with pytest.raises(Failure):
        trainer.step(**make_batch(8))
    handle.remove()
    assert state(trainer) == before
    assert trainer.step(**make_batch(8))["ppo/optimizer_steps"] == 2
    fresh.step(**make_batch(8))
    assert trainer.accelerator.scaler.get_scale() == 2.0**10
    for name, weight in parameters(fresh).items():
        torch.testing.assert_close(parameters(trainer)[name], weight, rtol=1e-6, atol=1e-6)


def test_moments_are_read_and_not_moved_by_the_transform():
    trainer = trainer_of()
    scores, moments = trainer.transform_scores(torch.tensor([1.0, 3.0, torch.nan]))
    assert trainer.running == RunningMoments()
    assert (moments.mean, moments.count) == (pytest.approx(2.0), pytest.approx(2.0))
    assert scores.isnan().tolist() == [False, False, True]
