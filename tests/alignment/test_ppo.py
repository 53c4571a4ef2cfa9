"""PPO as a loss of the framework: its formula in float64 through the trainer, parts, weights."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl.alignment import PPO
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.rollout import RolloutOutput, SamplingParams
from tests import tiny_models
from tests.alignment.conftest import GRADIENT_STEP, Make, examples, make_factory, response, worth
from tests.alignment.test_losses import token_logprobs
from tests.trainers.conftest import weights

KL, LAM, VF = 0.2, 0.9, 0.3


class Recites:
    """An engine whose responses are always the same."""

    def __init__(self, count: int = 4):
        rng = random.Random(7)
        self.model = tiny_models.language_model()
        self.responses = [response(rng, 2, 6) for _ in range(count)]

    def generate(self, prompts: Any, params: Any, ids: Any = None) -> RolloutOutput:
        sequences = [torch.tensor(r.ids) for r in self.responses[: len(prompts)]]
        return RolloutOutput(sequences, ["length"] * len(sequences))


def exact_loss(policy: Any, reference: Any, engine: Recites, given: list[float]) -> Tensor:
    """Token by token, as the textbooks have it; at the first step the ratio is 1."""
    rows = examples("prompts")
    logprobs, values, advantages, returns, sample = [], [], [], [], []
    for i, (row, answer) in enumerate(zip(rows, engine.responses, strict=True)):
        new = token_logprobs(policy.pretrained_model, row.prompt_ids, answer.ids)
        old = new.detach()
        ref = token_logprobs(reference, row.prompt_ids, answer.ids).detach()
        ids = torch.tensor([[*row.prompt_ids, *answer.ids]])
        hidden = policy.pretrained_model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        predicted = policy.v_head.summary(hidden[0, len(row.prompt_ids) - 1 : -1]).squeeze(-1)
        v = predicted.detach()
        rewards = -KL * (old - ref)
        rewards[-1] += worth(answer.text)
        advantage, following = torch.zeros_like(v), 0.0
        for t in reversed(range(len(v))):
            after = v[t + 1] if t + 1 < len(v) else 0.0
            following = (rewards[t] + after - v[t]) + LAM * following
            advantage[t] = following
        logprobs.append(new), values.append(predicted), advantages.append(advantage)
        returns.append(advantage + v)
        sample += [given[i]] * len(v)
    logp, v, a, r = (torch.cat(x) for x in (logprobs, values, advantages, returns))
    whitened = (a - a.mean()) * torch.rsqrt(a.var(unbiased=True) + 1e-8)
    ratio = (logp - logp.detach()).exp()
    terms = -whitened * ratio + VF * 0.5 * (v - r) ** 2
    w = torch.tensor(sample, dtype=terms.dtype)
    return (w * terms).sum() / w.sum()


@pytest.mark.parametrize("given", [[1.0] * 4, [2.0, 0.0, 1.0, 0.5]])
def test_the_loss_and_its_gradients_are_those_of_the_formula(
    make_trainer: Make, given: list[float]
) -> None:
    engine, policy = Recites(), tiny_models.policy()
    other = tiny_models.language_model(perturbation=0.3)
    exact, plain = copy.deepcopy(policy).double(), copy.deepcopy(policy)
    value = exact_loss(exact, copy.deepcopy(other).double(), engine, given)
    value.backward()
    exact_loss(plain, other, engine, given).backward()
    before = weights(policy)

    def weigh(batch: Any, policy: Any) -> None:
        batch.weigh(1, given)

    trainer = make_trainer(
        PPO(epochs=1, kl_coef=KL, lam=LAM, vf_coef=VF),
        policy,
        factory=make_factory("reinforcement-learning", engine=engine),
        ref_model=AutoModelForCausalLMWithValueHead(copy.deepcopy(other)),
        reweighter=weigh,
        **GRADIENT_STEP,
    )
    assert trainer.train().training_loss == pytest.approx(value.item(), rel=1e-5)
    after, rough = weights(policy), dict(plain.named_parameters())
    gradients = {n: p.grad for n, p in exact.named_parameters()}
    own = max(
        ((rough[n].grad.double() - g).abs().max() / g.abs().max()).item()
        for n, g in gradients.items()
    )
    for name, gradient in gradients.items():
        moved = (before[name] - after[name]).double()
        rounding = 2**-23 * after[name].abs().max().item()
        error = (moved - gradient).abs().max().item()
        assert error <= 4 * own * gradient.abs().max().item() + rounding, name


def test_a_weight_of_0_takes_a_samples_gradient_away_exactly(make_trainer: Make) -> None:
    policy = tiny_models.policy()
    before = weights(policy)

    def weigh(batch: Any, policy: Any) -> None:
        batch.weigh(1, [0.0] * batch.size)

    factory = make_factory("reinforcement-learning", engine=Recites())
    make_trainer(PPO(epochs=1), policy, factory=factory, reweighter=weigh, **GRADIENT_STEP).train()
    assert all(torch.equal(x, before[name]) for name, x in weights(policy).items())


def test_a_batch_is_learned_in_mini_batches_epoch_after_epoch(make_trainer: Make) -> None:
    factory = make_factory("reinforcement-learning", engine=Recites(), examples=8)
    trainer = make_trainer(PPO(epochs=3, mini_batches=2), tiny_models.policy(), factory=factory)
    seen: list[list[int]] = []
    learn = trainer.training_step

    def noted(model: Any, inputs: Any, *args: Any) -> Any:
        seen.append([sample.columns["number"] for sample in inputs.examples])
        return learn(model, inputs, *args)

    trainer.training_step = noted  # type: ignore[method-assign]
    trainer.train()
    assert trainer.state.global_step == len(seen) == 2 * 3 * 2
    assert all(len(part) == 2 for part in seen)
    for i in range(0, len(seen), 2):
        assert sorted(seen[i] + seen[i + 1]) == list(range(4))


def test_accumulated_mini_batches_are_one_step(make_trainer: Make) -> None:
    """Of equal numbers of tokens: each is divided by its own."""
    engine = Recites()
    rng = random.Random(11)
    engine.responses = [response(rng, 4, 4) for _ in range(4)]
    policies = []
    for mini_batches in (1, 2):
        policies.append(tiny_models.policy())
        settings = {"gradient_accumulation_steps": mini_batches, **GRADIENT_STEP}
        factory = make_factory("reinforcement-learning", engine=engine)
        loss = PPO(epochs=1, mini_batches=mini_batches)
        trainer = make_trainer(loss, policies[-1], factory=factory, **settings)
        trainer.train()
        assert trainer.state.global_step == 1
    for name, whole in weights(policies[0]).items():
        torch.testing.assert_close(weights(policies[1])[name], whole, rtol=1e-5, atol=1e-6)


def poisoned(policy: Any, marked: int) -> Any:
    """Hidden states of samples that have a token are NaN where gradients are computed."""

    def poison(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        where = (ids == marked).any(-1)[:, None, None]
        if torch.is_grad_enabled():
            out.last_hidden_state = torch.where(where, torch.nan, 1.0) * out.last_hidden_state

    policy.pretrained_model.base_model.register_forward_hook(poison, with_kwargs=True)
    return policy


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_loss_that_is_not_finite_reaches_no_weight(make_trainer: Make, accumulated: int) -> None:
    """The others of its step are learned; where there are none the step is not taken."""
    engine = Recites()
    (marked, *_) = set(engine.responses[1].ids) - {
        i for k in (0, 2, 3) for i in engine.responses[k].ids
    }
    policy = poisoned(tiny_models.policy(), marked)
    before = weights(policy)
    factory = make_factory("reinforcement-learning", engine=engine)
    loss = PPO(epochs=1, mini_batches=4)
    settings = {"gradient_accumulation_steps": accumulated, **GRADIENT_STEP, "logging_steps": 1}
    trainer = make_trainer(loss, policy, factory=factory, **settings)
    with pytest.warns(UserWarning, match="non-finite loss in 1 mini-batch"):
        trainer.train()
    assert trainer.state.global_step == 4 // accumulated
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert sum(log["ppo/nonfinite_minibatches"] for log in logs) == 1
    after = weights(policy)
    assert all(x.isfinite().all() for x in after.values())
    assert any(not torch.equal(x, before[name]) for name, x in after.items())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_mini_batch_whose_ratio_is_too_large_is_left_out(
    make_trainer: Make, scaled: bool
) -> None:
    policy = tiny_models.policy()
    before = weights(policy)
    factory = make_factory("reinforcement-learning", engine=Recites())
    loss = PPO(epochs=2, ratio_threshold=0.9)  # at first it is 1
    trainer = make_trainer(loss, policy, factory=factory, learning_rate=0.05, logging_steps=1)
    if scaled:  # as in fp16, which wants a GPU
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with pytest.warns(UserWarning, match=r"mean probability ratio exceeds ratio_threshold=0.9"):
        trainer.train()
    assert trainer.state.global_step == 2
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["ppo/skipped_minibatches"] for log in logs] == [1, 1]
    assert all(log["ppo/early_stopped"] == log["ppo/nonfinite_steps"] == 0 for log in logs)
    assert all(torch.equal(x, before[name]) for name, x in weights(policy).items())


def test_early_stopping_goes_on_to_the_next_batch(make_trainer: Make) -> None:
    """The step that has moved too far is not taken, nor are the rest of its batch."""
    settings = {"learning_rate": 0.05, "optim": "sgd", "logging_steps": 1}
    factory = make_factory("reinforcement-learning", engine=Recites(), examples=8)
    loss = PPO(epochs=4, early_stopping=True, target_kl=1e-9, kl_coef=0.0)
    trainer = make_trainer(loss, tiny_models.policy(), factory=factory, **settings)
    trainer.train()
    assert trainer.state.max_steps == 8
    assert trainer.state.global_step < 8
    logs = [log for log in trainer.state.log_history if "loss" in log]
    stopped = [log for log in logs if log["ppo/policy/policykl"] > 1.5e-9]
    assert stopped
    assert all(log["grad_norm"] == 0 for log in stopped)
    assert [log for log in logs if log["ppo/early_stopped"] == 1] == stopped


def test_the_ratio_moves_from_1_within_a_batch(make_trainer: Make) -> None:
    factory = make_factory("reinforcement-learning", engine=Recites())
    settings = {"learning_rate": 0.05, "optim": "sgd", "logging_steps": 1}
    trainer = make_trainer(PPO(epochs=3), tiny_models.policy(), factory=factory, **settings)
    trainer.train()
    moved = [log["ppo/policy/approxkl"] for log in trainer.state.log_history if "loss" in log]
    assert moved[0] == pytest.approx(0, abs=1e-10)
    assert moved[1] > 1e-6
    assert moved[2] > moved[1]


def test_without_a_kl_coefficient_there_is_no_reference(make_trainer: Make) -> None:
    factory = make_factory("reinforcement-learning", engine=Recites())
    trainer = make_trainer(PPO(epochs=1, kl_coef=0.0), tiny_models.policy(), factory=factory)
    assert trainer.learner.reference.mode == "none"
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(("given", "says"), [
    ({"epochs": 0}, "epochs must be at least 1, got 0"),
    ({"mini_batches": 0}, "mini_batches must be at least 1, got 0"),
    ({"cliprange": -1.0}, "cliprange of the loss ppo must be a number of 0 or more"),
])  # fmt: skip
def test_coefficients_out_of_range_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        PPO(**given)


def test_mini_batches_must_divide_the_batch(make_trainer: Make) -> None:
    with pytest.raises(ValueError, match="must be a multiple of mini_batches"):
        make_trainer(PPO(mini_batches=3), tiny_models.policy())


def test_the_loss_is_of_the_policy_that_is_sampled() -> None:
    loss = PPO(temperature=0.7)
    loss.check_sampling(SamplingParams(temperature=0.7))
    with pytest.raises(ValueError, match=r"at temperature=1.0, the loss ppo learns .* / 0.7"):
        loss.check_sampling(SamplingParams())
    with pytest.warns(UserWarning, match=r"top_k=5, top_p=0.9: responses are not drawn"):
        loss.check_sampling(SamplingParams(temperature=0.7, top_k=5, top_p=0.9))


def test_a_trainer_asks_the_loss_about_the_sampling(make_trainer: Make) -> None:
    factory = make_factory(
        "reinforcement-learning", params=SamplingParams(max_new_tokens=4, temperature=0.5)
    )
    with pytest.raises(ValueError, match=r"responses are sampled at temperature=0.5"):
        make_trainer(PPO(), factory=factory)


def test_old_and_new_log_probs_are_at_the_temperature(make_trainer: Make) -> None:
    loss = PPO(temperature=0.5, kl_coef=0.0)
    params = SamplingParams(max_new_tokens=5, temperature=0.5, seed=0)
    trainer = make_trainer(loss, factory=make_factory("reinforcement-learning", params=params))
    (part, *_) = trainer.batches(1)
    model = trainer.model.pretrained_model
    lengths = part.tokens.mask.sum(-1).tolist()
    got = [logprobs.sum() for logprobs in part.experience.logprobs.split(lengths)]
    for i, sample in enumerate(part.examples):
        (answer,) = sample.responses
        ids = torch.tensor([[*sample.prompt_ids, *answer.ids]])
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].double() / 0.5
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])
        assert got[i].item() == pytest.approx(float(chosen.detach().sum()), abs=1e-4)
    _, vector = loss(part, *trainer.learner.views(trainer.model))
    assert abs(vector["ppo/policy/policykl"].item()) < 1e-5
