"""Whole iterations of every trainer, and rollouts, on a device that is not there."""

import contextlib
import math

import pytest
import torch

from fastrl import PPOConfig, PPOTrainer, RolloutEngine, SamplingParams
from tests import tiny_models
from tests.alignment.conftest import make_trainer as make_alignment
from tests.device.pretended import DEVICE
from tests.golden import tiny
from tests.ppo.conftest import make_batch, parameters
from tests.trainers.conftest import make_reward, make_sft, reward_model, weights

__all__ = ["make_alignment", "make_reward", "make_sft"]

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]

PROMPTS = (5, 3, 7, 2, 6, 4, 8, 5)
MODES = {
    "copy": {},
    "offload": {"reference": "offload"},
    "trunk": {"num_shared_layers": 1},
    "trunk in host memory": {
        "num_shared_layers": 1, "trunk_cache_gib": 0.0, "trunk_cache_host_gib": 1.0,
    },
    "adapter": {},
    "none": {"init_kl_coef": 0.0},
    "full KL": {"kl_penalty": "full"},
    "GRPO": {"advantage": "grpo", "group_size": 2, "kl_in": "loss"},
    "bf16": {
        "accelerator_kwargs": {"mixed_precision": "bf16"}, "advantage": "rloo", "group_size": 2,
    },
    "padded": {"padding_free": False},
    "offloaded optimizer": {"offload_optimizer": True},
    "checkpointed": {"gradient_checkpointing": True},
    "offloaded activations": {"activation_offloading": True},
}  # fmt: skip


def model_for(mode):
    if "adapter" in mode:
        from peft import get_peft_model

        from fastrl import AutoModelForCausalLMWithValueHead

        adapted = get_peft_model(tiny_models.language_model("gpt2"), tiny_models.lora())
        return AutoModelForCausalLMWithValueHead(adapted)
    # Heads as wide as flash attention wants them.
    return tiny_models.policy("llama", hidden_size=32)


def trainer_for(mode, **settings):
    settings = {
        "batch_size": 8, "mini_batch_size": 2, "gradient_accumulation_steps": 2, "ppo_epochs": 2,
        "learning_rate": 1e-3, "rollout_slots": 4, **MODES[mode], **settings,
    }  # fmt: skip
    return PPOTrainer(PPOConfig(**settings), model_for(mode), None, tiny.tokenizer())


def longest_word(prompts, completions, completion_ids, **_):
    return [float(max(ids) % 7) for ids in completion_ids]


def trained(trainer, steps=1):
    return trainer.train(
        longest_word,
        prompts=tiny_models.prompts(*PROMPTS),
        steps=steps,
        progress=False,
        generation_kwargs={"max_new_tokens": 8},
    )


@pytest.mark.parametrize("mode", MODES)
def test_ppo_trains_with_every_reference(device, mode):
    trainer = trainer_for(mode)
    before = parameters(trainer)
    (step,) = trained(trainer).history
    assert trainer.current_device.type == "cuda"
    assert step["perf/graph_replays"] == step["perf/decode_steps"] > 0
    assert math.isfinite(step["ppo/loss/total"])
    after = parameters(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("mode", ["copy", "offload", "trunk", "adapter", "GRPO", "padded"])
def test_a_step_learns_what_it_learns_on_the_cpu(device, mode):
    found = []
    for place in ("cpu", "cuda"):
        kwargs = {"cpu": True} if place == "cpu" else {}
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = trainer_for(mode, accelerator_kwargs=kwargs, max_grad_norm=1.0)
        assert trainer.current_device.type == place
        batch = make_batch(8)
        if mode == "GRPO":
            batch["queries"] = [batch["queries"][i - i % 2] for i in range(8)]
        if place == "cuda":  # some come from the device, as generate() returns them
            batch["responses"] = [x.to(DEVICE) for x in batch["responses"]]
        stats = trainer.step(**batch)
        found.append((stats["ppo/loss/total"], parameters(trainer)))
    (loss, expected), (device_loss, learned) = found
    assert device_loss == pytest.approx(loss, abs=1e-4)
    for name, x in expected.items():
        if "k_proj" in name or "c_attn.bias" in name:  # Adam makes steps of rounding
            continue
        torch.testing.assert_close(learned[name], x, rtol=1e-3, atol=1e-4, msg=name)


def test_a_rollout_refills_its_slots_there_as_on_the_cpu(device):
    params = SamplingParams(max_new_tokens=[9, 2, 5, 7, 3, 6], seed=0)
    prompts = tiny_models.prompts(5, 1, 9, 3, 7, 2)
    found = []
    for place in ("cpu", DEVICE):
        engine = RolloutEngine(tiny_models.policy("llama").to(place), tiny.tokenizer(), max_slots=2)
        found.append(engine.generate(prompts, params))
    expected, out = found
    assert out.finish_reasons == expected.finish_reasons
    for one, other in zip(out.sequences, expected.sequences, strict=True):
        assert torch.equal(one, other)
    for name in ("logprobs", "entropies", "values"):
        for one, other in zip(getattr(out, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_rollout_is_on_its_models_device_where_another_one_is_current(device, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def current(index):
        entered.append(index)
        with monkeypatch.context() as inner:
            inner.setattr(torch.cuda, "current_device", lambda: index.index)
            yield

    monkeypatch.setattr(torch.cuda, "device", current)
    model = tiny_models.policy("llama").to(DEVICE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    record = torch.cuda.Event.record

    def recorded(*args):
        assert torch.cuda.current_device() == DEVICE.index
        return record(*args)

    monkeypatch.setattr(torch.cuda.Event, "record", recorded)
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=2)
    engine.generate(tiny_models.prompts(5, 1), SamplingParams(max_new_tokens=20, seed=0))
    assert set(entered) == {DEVICE}


def test_an_optimizer_on_the_host_gets_gradients_in_pinned_memory(device):
    """A GPU copies to other memory at a fraction of the bus's speed."""
    trainer = trainer_for("offloaded optimizer")
    found = []

    def look(optimizer, *_):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        found.extend(grad.is_pinned() for grad in grads if grad is not None)

    trainer.optimizer.optimizer.register_step_pre_hook(look)
    trained(trainer)
    assert found
    assert all(found)


SETTINGS = {"use_cpu": False, "logging_steps": 1}


def assert_trains(trainer):
    before = {name: x.cpu() for name, x in weights(trainer.model).items()}
    trainer.train()
    assert trainer.args.device.type == "cuda"
    after = weights(trainer.model)
    assert all(x.is_cuda for x in after.values())
    assert any(not torch.equal(before[name], x.cpu()) for name, x in after.items())
    (loss,) = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert math.isfinite(loss)


@pytest.fixture
def tf32():
    """As transformers asks for it, where a trainer is told ``tf32=True``."""
    torch.backends.fp32_precision = "tf32"
    yield
    torch.backends.fp32_precision = "none"


def test_what_is_compared_with_plain_forwards_may_be_in_tf32(device, tf32, make_sft):
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    RolloutEngine(tiny_models.policy("llama").to(DEVICE), tiny.tokenizer(), max_slots=2)
    assert_trains(make_sft(tiny_models.language_model("llama"), **SETTINGS))


def test_sft_trains(device, make_sft):
    assert_trains(make_sft(tiny_models.language_model("llama"), **SETTINGS))


def test_reward_models_train(device, make_reward):
    assert_trains(make_reward(reward_model("llama"), **SETTINGS))


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_are_learned(device, make_alignment, loss):
    model = tiny_models.language_model("llama")
    assert_trains(make_alignment(loss, model, max_steps=1, **SETTINGS))
