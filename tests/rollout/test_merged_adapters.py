"""Rollouts with LoRA adapters that are merged into bf16 copies of the weights."""

import copy
import hashlib
import warnings

import pytest
import torch

from fastrl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, RolloutEngine
from fastrl import SamplingParams as Params
from fastrl.rollout.merged_adapters import MergedAdapters
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}
AUDIT = 5e-3  # mean |Δ| of log-probs in bf16


def adapted(family="llama", dtype=torch.bfloat16, size=0.1, **changes):
    """A policy with an adapter that changes its outputs."""
    from peft import get_peft_model

    settings = {"target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2", **changes}
    model = tiny_models.language_model(family).to(dtype)
    model = get_peft_model(model, tiny_models.lora(**settings), autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    for name, x in model.named_parameters():
        if "lora_" in name:
            x.data.copy_(size * torch.randn(x.shape, generator=generator))
    return AutoModelForCausalLMWithValueHead(model).eval()


def base_weights(model):
    """A digest of all weights but the adapter's and the value head's."""
    digest = hashlib.sha256()
    for name, x in sorted(model.named_parameters()):
        if "lora_" not in name and "v_head" not in name:
            digest.update(x.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rollout(model, merge, prompts=None, **options):
    engine = RolloutEngine(model, tiny.tokenizer(), 4, merge_adapters=merge, **options)
    params = Params(max_new_tokens=6, temperature=0, suppress_tokens=[tiny.EOS])
    return engine, engine.generate(prompts or tiny_models.prompts(5, 3, 7), params)


@pytest.mark.parametrize("family", TARGETS)
def test_merged_weights_are_the_sum_in_fp32_rounded_once(family):
    model = adapted(family)
    merged = MergedAdapters(enabled=True)
    layers = [x for x in model.modules() if hasattr(x, "lora_A")]
    with merged.in_place(model):
        assert all("forward" in vars(layer) for layer in layers)
        for layer, weight in zip(layers, merged.stored(), strict=True):
            base = layer.get_base_layer().weight.double()
            base = base.t() if family == "gpt2" else base
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            exact = base + layer.scaling["default"] * (b.double() @ a.double())
            # Half a step of bf16's 8 bits, and the sums in fp32.
            assert ((weight.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    assert not any("forward" in vars(layer) for layer in layers)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", TARGETS)
def test_log_probs_are_as_exact_as_without_merging(family, autocast):
    model = adapted(family, torch.float32 if autocast else torch.bfloat16)
    options = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)} if autocast else {}
    prompts = tiny_models.prompts(*range(2, 18))
    errors = []
    for merge in (False, True):
        engine, out = rollout(model, merge, prompts, **options)
        assert bool(engine.model_runner.merged_adapters.stored()) == merge
        exact = torch.cat([*scored(model, prompts, out.sequences)])
        errors.append((torch.cat(out.logprobs) - exact).abs().mean())
    assert 0 < errors[0] < 0.05
    assert errors[1] <= 1.5 * errors[0]


def scored(model, prompts, responses):
    """Greedy log-probs of responses in float64, without the token that no rollout may draw."""
    exact = copy.deepcopy(model.pretrained_model).double()
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = exact(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logits[:, tiny.EOS] = -torch.inf
        yield logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


def test_adapters_run_as_they_are_in_fp32_and_where_they_are_off():
    model = adapted(dtype=torch.float32)
    engine, out = rollout(model, True)
    assert not engine.model_runner.merged_adapters.stored()
    assert torch.equal(torch.cat(out.logprobs), torch.cat(rollout(model, False)[1].logprobs))
    model = adapted()
    merged = MergedAdapters(enabled=True)
    with model.disable_adapter(), merged.in_place(model):
        assert not merged.stored()


def test_copies_keep_their_addresses_and_follow_the_adapter():
    model = adapted()
    merged = MergedAdapters(enabled=True)
    with merged.in_place(model):
        before = [x.clone() for x in merged.stored()]
        places = [x.data_ptr() for x in merged.stored()]
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_" in name:
                x.mul_(2)
    with merged.in_place(model):
        assert [x.data_ptr() for x in merged.stored()] == places
        assert not any(map(torch.equal, merged.stored(), before))
    merged.free()
    assert not merged.stored()


def test_base_weights_are_untouched_after_a_thousand_iterations():
    model = adapted()
    before, merged = base_weights(model), MergedAdapters(enabled=True)
    ids = torch.tensor([[5, 6, 7]])
    learned = [x for name, x in model.named_parameters() if "lora_" in name]
    for _ in range(1000):
        with torch.no_grad():
            for x in learned:
                x.add_(1e-3)
        with merged.in_place(model):
            pass
    with torch.no_grad(), merged.in_place(model):
        model(input_ids=ids)
    assert base_weights(model) == before


def trainer_of(model, **settings):
    settings = {
        "batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "learning_rate": 1e-3,
        "rollout_merge_adapter": True, **settings,
    }  # fmt: skip
    return PPOTrainer(PPOConfig(**settings), model, None, tiny.tokenizer())


def train(trainer, steps):
    return trainer.train(
        lambda prompts, completions, completion_ids, **_: [float(len(x)) for x in completion_ids],
        prompts=tiny_models.prompts(5, 3, 7, 2),
        steps=steps,
        progress=False,
        generation_kwargs={"max_new_tokens": 6},
    ).history


def test_a_trained_adapter_stays_within_the_audits_limit():
    model = adapted(size=0.02)
    before = base_weights(model)
    trainer = trainer_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        history = train(trainer, 4)
    assert all(0 < step["rollout/audit_mean"] <= AUDIT for step in history)
    assert trainer.rollouts.backend.merges
    assert base_weights(model) == before


def test_a_run_goes_on_without_where_log_probs_differ():
    trainer = trainer_of(adapted(size=3.0))
    with pytest.warns(UserWarning, match="log-probs of merged weights differ by"):
        first, _ = train(trainer, 2)
    assert first["rollout/reused"] == 0
    assert not trainer.rollouts.backend.merges
    assert trainer.rollouts.state_dict()["merges"] is False


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (lambda: adapted(dtype=torch.float32), {}, "compute in float32"),
        (lambda: tiny_models.policy("llama").to(torch.bfloat16), {}, "nothing to merge"),
        (adapted, {"rollout_backend": "generate"}, "nothing to merge"),
        (adapted, {"old_logprobs": "rollout"}, "set old_logprobs='auto'"),
        (adapted, {"kl_penalty": "full"}, "another kl_penalty"),
    ],
)
def test_merging_that_cannot_be_is_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(make(), **settings)
