"""Policies without values: wrapped, saved, compared with references, and reused rollouts."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastrl import PPOConfig, PPOTrainer, create_reference_model
from fastrl.models import CausalLMPolicy
from fastrl.models.scoring import ScoringRequest
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import make_policy
from tests.ppo.test_policy_gradients import SAMPLING, gradients, groups, make_trainer
from tests.ppo.test_reuse import policy_scores  # noqa: F401, a fixture


def test_a_plain_model_is_wrapped_and_saved_as_one(tmp_path):
    trainer = make_trainer(kl_in="loss")
    assert isinstance(trainer.model, CausalLMPolicy)
    assert isinstance(trainer.ref_model, CausalLMPolicy)
    trainer.step(*groups())
    trainer.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    trained = trainer.model.pretrained_model.state_dict()
    assert all(torch.equal(trained[k].cpu(), v) for k, v in loaded.state_dict().items())


@pytest.mark.parametrize("plain", [True, False])
def test_gae_refuses_a_model_without_values(plain):
    model = tiny_models.language_model("gpt2")
    message = "wrap it with AutoModelForCausalLMWithValueHead"
    if not plain:
        model, message = CausalLMPolicy(model), "CausalLMPolicy, which has no values, and advantage"
    with pytest.raises(TypeError, match=message):
        PPOTrainer(PPOConfig(batch_size=4), model, tokenizer=tiny.tokenizer())


def test_a_value_head_is_left_as_it_is():
    trainer = make_trainer(make_policy(), kl_in="loss")
    moved, result = gradients(trainer, *groups())
    for name in ("v_head.summary.weight", "v_head.summary.bias"):
        assert moved[name].abs().max() == 0
    assert not any(p.requires_grad for p in trainer.model.v_head.parameters())
    assert moved["pretrained_model.transformer.wte.weight"].abs().max() > 0
    assert "ppo/loss/value" not in result


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
@pytest.mark.parametrize("mode", ["copy", "trunk", "offload", "adapter", "start", "none"])
@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.filterwarnings("ignore:the LM head shares its weight")
def test_every_reference_serves_a_policy_without_values(mode, kl_in):
    """The gradients are those with a copy, where the same is trained."""
    settings = {"kl_in": kl_in, "init_kl_coef": 0.3, "reference": mode, "ppo_epochs": 1}
    adapter = mode in ("adapter", "start")
    model = tiny_models.language_model("gpt2")
    ref_model = None
    if adapter:
        from peft import get_peft_model

        model = get_peft_model(model, tiny_models.lora())
        settings["reference"] = "adapter"
        settings["reference_adapter"] = "start" if mode == "start" else "off"
    elif mode == "none":
        settings["init_kl_coef"] = 0.0
    elif mode == "trunk":
        settings["num_shared_layers"] = 1
    else:
        ref_model = tiny_models.language_model("gpt2", 0.05)
    trainer = make_trainer(model, ref_model, **settings)
    moved, result = gradients(trainer, *groups())
    assert trainer.reference.mode == settings["reference"]
    assert max(g.abs().max() for g in moved.values()) > 1e-4
    assert math.isnan(result["objective/kl"]) == (mode == "none")
    if mode in ("copy", "offload"):
        policy = CausalLMPolicy(tiny_models.language_model("gpt2"))
        other = make_trainer(policy, tiny_models.language_model("gpt2", 0.05), **{
            **settings, "reference": "copy"})  # fmt: skip
        expected, _ = gradients(other, *groups())
        for name, gradient in expected.items():
            torch.testing.assert_close(moved[name], gradient, rtol=1e-4, atol=1e-6)


def test_create_reference_model_copies_a_policy_without_values():
    policy = CausalLMPolicy(tiny_models.language_model("gpt2"))
    copy = create_reference_model(policy)
    assert isinstance(copy, CausalLMPolicy)
    assert not any(p.requires_grad for p in copy.parameters())
    request = ScoringRequest(torch.arange(3), torch.arange(3, 6))
    ids = torch.arange(3, 8)[None]
    scores = [m(ids, scoring=request).logprobs for m in (policy, copy)]
    torch.testing.assert_close(*scores)


def test_a_reference_with_a_value_head_follows_a_policy_without(unchanged):
    trainer = make_trainer(ref_model=make_policy(), sync_ref_every=1)
    trainer.step(*groups())
    policy = trainer.model.pretrained_model.state_dict()
    follower = trainer.ref_model.pretrained_model.state_dict()
    assert all(torch.equal(policy[k], v) for k, v in follower.items())


@pytest.mark.parametrize("how", ["memory", "rollout"])
def test_old_logprobs_come_from_the_rollout(how, policy_scores):  # noqa: F811
    trainer = make_trainer(kl_in="loss", old_logprobs="rollout" if how == "rollout" else "auto")
    prompts = tiny_models.prompts(5, 3)
    queries = [q for q in prompts for _ in range(2)]
    rollout = trainer.rollouts.sample(prompts, SAMPLING, samples=2)
    assert rollout.values is None
    given = {"rollout": rollout} if how == "rollout" else {}
    result = trainer.step(queries, rollout.sequences, [torch.tensor(1.0)] * 4, **given)
    assert policy_scores == ([] if how == "rollout" else [-4])
    assert result["rollout/reused"] == 1.0


def test_values_are_not_made_up_for_a_policy_that_has_them(policy_scores):  # noqa: F811
    from fastrl.rollout import RolloutEngine, SamplingParams

    policy = make_policy()
    trainer = make_trainer(policy, advantage="gae", group_size=1)
    queries = tiny_models.prompts(5, 3, 7, 2)
    engine = RolloutEngine(policy.pretrained_model, trainer.tokenizer)
    rollout = engine.generate(queries, SamplingParams(max_new_tokens=4))
    assert rollout.values is None
    trainer.step(queries, rollout.sequences, [torch.tensor(1.0)] * 4, rollout=rollout)
    assert policy_scores == [4]
