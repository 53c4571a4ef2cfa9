"""A reward model as a second adapter on the policy's base."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
)
from fastrl.models.adapters import REWARD_ADAPTER
from tests import seq2seq_models, tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

FAMILIES = {
    "gpt2": {"target_modules": ["c_attn"], "fan_in_fan_out": True},
    "llama": {"target_modules": ["q_proj", "v_proj"]},
}
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}  # of fp32, by two routes


def classifier(base, labels=1):
    torch.manual_seed(7)
    return AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)


def lora(family="gpt2", task="CAUSAL_LM", **changes):
    settings = {"r": 2, "task_type": task, "init_lora_weights": False, **FAMILIES[family]}
    return LoraConfig(**{**settings, **changes})


@pytest.fixture
def base(tmp_path):
    tiny_models.language_model("gpt2").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def saved(base, family="gpt2", labels=1, **changes):
    folder = base.parent / "reward"
    get_peft_model(classifier(base, labels), lora(family, "SEQ_CLS", **changes)).save_pretrained(
        folder
    )
    return folder


def as_if_trained(adapter):
    """PEFT would train what its configuration says so of."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "inference_mode": False}))
    return adapter


def policy_with(base, adapter, family="gpt2", **kwargs):
    torch.manual_seed(1)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=lora(family, **kwargs), reward_adapter=adapter
    ).eval()


def state_of(policy):
    """What must be as it was: the active adapter, what is trained, modes, weights."""
    return {
        "active": policy.pretrained_model.active_adapter,
        "trained": [name for name, p in policy.named_parameters() if p.requires_grad],
        "modes": [m.training for m in policy.modules()],
        "weights": {name: p.detach().clone() for name, p in policy.named_parameters()},
    }


def assert_same(a, b):
    weights = [each.pop("weights") for each in (a, b)]
    assert a == b
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


@torch.no_grad()
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_tokens_scores_are_those_of_a_model_of_its_own(family, labels, tmp_path):
    base = tmp_path / "base"
    tiny_models.language_model(family).save_pretrained(base)
    adapter = saved(base, family, labels)
    policy = policy_with(base, adapter, family)
    queries = tiny_models.prompts(3, 7, 5)
    ids = torch.nn.utils.rnn.pad_sequence(queries, batch_first=True, padding_value=tiny.PAD)
    mask = (ids != tiny.PAD).long()
    before = state_of(policy)
    logits = policy(ids, attention_mask=mask)[0]
    scores = policy.compute_reward_score(ids, mask)
    assert_same(before, state_of(policy))
    assert scores.shape == (3, 7, labels)
    torch.testing.assert_close(policy(ids, attention_mask=mask)[0], logits)

    alone = PeftModel.from_pretrained(classifier(base, labels), adapter).eval()
    expected = alone(input_ids=ids, attention_mask=mask).logits
    last = mask.sum(1) - 1
    torch.testing.assert_close(scores[torch.arange(3), last], expected, **TOLERANCE)
    with alone.disable_adapter():
        without = alone(input_ids=ids, attention_mask=mask).logits
    assert (expected - without).abs().min() > 1e-4, "or the adapter would not show"


def test_the_policy_is_put_back_after_an_error_too(base):
    policy = policy_with(base, as_if_trained(saved(base))).train()
    before = state_of(policy)
    assert REWARD_ADAPTER not in str(before["trained"])
    assert "score" not in str(before["trained"])
    with pytest.raises(IndexError):
        policy.compute_reward_score(torch.tensor([[tiny.VOCABULARY]]))
    assert_same(before, state_of(policy))


def test_dropout_is_off_while_scoring(base):
    policy = policy_with(base, saved(base, lora_dropout=0.5)).train()
    ids = torch.stack(tiny_models.prompts(8, 8))
    first = policy.compute_reward_score(ids)
    torch.testing.assert_close(policy.compute_reward_score(ids), first)
    assert not first.requires_grad
    assert all(module.training for module in policy.pretrained_model.modules())


def test_checkpoints_are_the_policys_alone(base, tmp_path):
    policy = policy_with(base, saved(base))
    policy.save_pretrained(tmp_path / "tuned")
    folder = tmp_path / "tuned"
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert names - {"README.md"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "value_head.safetensors",
    }
    weights = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    assert not any("score" in name or REWARD_ADAPTER in name for name in weights)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "tuned").eval()
    ids = torch.stack(tiny_models.prompts(5))
    with torch.no_grad():
        torch.testing.assert_close(again(ids)[0], policy(ids)[0])
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(
        tmp_path / "tuned", reward_adapter=as_if_trained(base.parent / "reward")
    )
    ours, theirs = loaded.compute_reward_score(ids), policy.compute_reward_score(ids)
    torch.testing.assert_close(ours, theirs)
    trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert trained == {"v_head.summary.weight", "v_head.summary.bias"}, "is_trainable is False"


@pytest.mark.parametrize("adapter", ["off", "start"])
def test_ppo_with_adapters_alone(base, adapter):
    """Policy, reference and reward share one base: a step trains the policy's adapter only."""
    policy = policy_with(base, saved(base))
    trainer = PPOTrainer(
        PPOConfig(batch_size=4, mini_batch_size=2, learning_rate=1e-2, reference_adapter=adapter),
        policy,
        tokenizer=tiny.tokenizer(),
    )
    queries = tiny_models.prompts(3, 5, 4, 6)
    for _ in range(2):
        responses = trainer.generate(
            queries, return_prompt=False, do_sample=True, top_k=0, max_new_tokens=4
        )
        pairs = zip(queries, responses, strict=True)
        texts = [torch.cat([q.to(r.device), r])[None] for q, r in pairs]
        scores = [trainer.model.compute_reward_score(text)[0, -1, 0] for text in texts]
        before = state_of(policy)
        rewards = [trainer.model.compute_reward_score(text) for text in texts]
        stats = trainer.step(queries, responses, scores)
        assert stats["rollout/reused"] == 1, "scoring does not make the rollout's figures stale"
        after = [trainer.model.compute_reward_score(text) for text in texts]
        for a, b in zip(rewards, after, strict=True):
            torch.testing.assert_close(a, b)
        weights = state_of(policy)["weights"]
        moved = {n for n, x in weights.items() if not torch.equal(x, before["weights"][n])}
        assert moved == set(before["trained"])
        assert all(".default." in name or name.startswith("v_head.") for name in moved)
    assert trainer.reference.mode == "adapter"


def test_a_runs_folder_stands_for_the_reward_adapter_in_it(base, tmp_path):
    (tmp_path / "run").mkdir()
    saved(base).rename(tmp_path / "run" / "model")
    policy = policy_with(base, tmp_path / "run")
    assert policy.compute_reward_score(torch.tensor([[3, 4]])).shape == (1, 2, 1)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        policy_with(base, tmp_path)


def test_what_cannot_be_a_reward_adapter_is_refused(base, tmp_path):
    adapter = saved(base)
    bare = tiny_models.language_model()
    with pytest.raises(ValueError, match="needs a policy that is a PEFT model: pass peft_config"):
        AutoModelForCausalLMWithValueHead.from_pretrained(bare, reward_adapter=adapter)
    with pytest.raises(ValueError, match="no reward adapter: pass reward_adapter"):
        tiny_models.policy().compute_reward_score(torch.tensor([[3]]))
    with pytest.raises(ValueError, match="reward_adapter is for causal models"):
        AutoModelForSeq2SeqLMWithValueHead.from_pretrained(
            seq2seq_models.language_model(),
            peft_config=seq2seq_models.lora(),
            reward_adapter=adapter,
        )
    headless = tmp_path / "headless"
    get_peft_model(tiny_models.language_model(), lora()).save_pretrained(headless)
    with pytest.raises(ValueError, match="headless has no score head: train it with task_type"):
        policy_with(base, headless)
    prompts = tmp_path / "prompts"
    get_peft_model(
        classifier(base), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    ).save_pretrained(prompts)
    with pytest.raises(ValueError, match=r"prompts is prompt learning \(.*: use LoRA"):
        policy_with(base, prompts)


def test_an_adapter_of_another_base_is_refused(base):
    adapter = saved(base)
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    first = next(name for name in weights if "lora_A" in name)
    save_file({k: v for k, v in weights.items() if k != first}, file)
    with pytest.raises(ValueError, match=r"reward lacks .*lora_A.*: it was trained on"):
        policy_with(base, adapter)
    save_file({**weights, first.replace("h.0", "h.9"): weights[first].clone()}, file)
    with pytest.raises(ValueError, match=r"reward holds .*h\.9.*: it was trained on another base"):
        policy_with(base, adapter)
    save_file({k: v[:, :8] if "score" in k else v for k, v in weights.items()}, file)
    with pytest.raises(ValueError, match="a score head of width 8, the model has 16"):
        policy_with(base, adapter)


def test_no_pickle_is_read(base):
    adapter = saved(base)
    weights = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        policy_with(base, adapter)


def test_the_adapters_own_config_is_left_as_it_is(base):
    adapter = saved(base)
    before = json.loads((adapter / "adapter_config.json").read_text())
    assert before["modules_to_save"] == ["classifier", "score"]
    policy_with(base, adapter)
    assert json.loads((adapter / "adapter_config.json").read_text()) == before
