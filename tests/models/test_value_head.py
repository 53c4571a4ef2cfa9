"""The value head, what it refuses, and checkpoints with it."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, GPT2Model, LlavaConfig

from fastrl.models import AutoModelForCausalLMWithValueHead, ValueHead
from fastrl.models.scoring import ScoringRequest
from tests import tiny_models
from tests.golden import tiny
from tests.weights import assert_same_weights

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)


@pytest.fixture(scope="module")
def policy():
    return tiny_models.policy("gpt2")


@pytest.fixture(scope="module")
def ids():
    return torch.stack(tiny_models.prompts(6, 6))


@torch.no_grad()
def outputs(model, ids):
    logits, _, values = model.eval()(input_ids=ids)
    return logits, values


def adapted(**changes):
    """A policy with LoRA whose adapter and value head are random."""
    torch.manual_seed(1)
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        tiny_models.language_model(), peft_config=tiny_models.lora(**changes)
    ).eval()


@torch.no_grad()
def test_values_are_a_linear_map_of_the_last_hidden_state(policy, ids):
    logits, loss, values = policy(input_ids=ids)
    out = policy.pretrained_model(input_ids=ids, output_hidden_states=True)
    weight, bias = policy.v_head.summary.weight, policy.v_head.summary.bias
    expected = (out.hidden_states[-1].double() @ weight.double().T + bias.double()).squeeze(-1)
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, out.logits)
    assert (logits.dtype, values.shape, loss) == (torch.float32, ids.shape, None)


@torch.no_grad()
def test_labels_give_the_models_loss(policy, ids):
    loss = policy(input_ids=ids, labels=ids)[1]
    torch.testing.assert_close(loss, policy.pretrained_model(input_ids=ids, labels=ids).loss)


@torch.no_grad()
def test_past_key_values_come_fourth_and_continue_the_sequence(policy, ids):
    *_, past = policy(input_ids=ids[:, :4], return_past_key_values=True)
    logits, _, values = policy(input_ids=ids[:, 4:], past_key_values=past)
    whole_logits, _, whole_values = policy(input_ids=ids)
    torch.testing.assert_close(logits, whole_logits[:, 4:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, whole_values[:, 4:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_of_a_half_precision_model_are_fp32(ids):
    model = AutoModelForCausalLMWithValueHead(tiny_models.language_model().to(torch.bfloat16))
    logits, _, values = model(input_ids=ids)
    assert logits.dtype == values.dtype == model.v_head.summary.weight.dtype == torch.float32


@torch.no_grad()
def test_the_value_head_computes_in_fp32_under_autocast(policy):
    hidden = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    expected = policy.v_head(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = policy.v_head(hidden)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_scoring_under_autocast_returns_fp32(policy, ids):
    request = ScoringRequest(torch.tensor([2, 3]), torch.tensor([5, 6]), entropy=True)
    exact = policy(input_ids=ids, scoring=request)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = policy(input_ids=ids, scoring=request)
    for got, wanted in zip(rounded[:3], exact[:3], strict=True):
        assert got.dtype == torch.float32
        # bf16 keeps 8 bits of logits of up to 10.
        torch.testing.assert_close(got, wanted, atol=0.2, rtol=0.05)


def test_dropout_acts_on_the_hidden_state_in_training_alone(policy):
    hidden = torch.ones(1, 400, 16)
    head = ValueHead(policy.config, summary_dropout_prob=0.5)
    assert policy.v_head.dropout.p == 0.1  # GPT-2's summary_first_dropout is another setting
    assert head.dropout.p == 0.5
    assert head.eval()(hidden).unique().numel() == 1
    torch.manual_seed(0)
    assert head.train()(hidden).unique().numel() > 1


def test_the_configs_dropout_goes_first():
    config = tiny_models.config("llama", summary_dropout_prob=0.25)
    assert ValueHead(config).dropout.p == 0.25
    assert isinstance(ValueHead(config, 0.0).dropout, nn.Dropout)
    config.summary_dropout_prob = 0.0
    assert isinstance(ValueHead(config).dropout, nn.Identity)


def test_width_follows_the_last_hidden_state():
    assert ValueHead(tiny_models.config("opt_projected")).summary.in_features == 8
    nested = LlavaConfig(text_config=tiny_models.config("llama"))
    assert ValueHead(nested).summary.in_features == 16


def test_a_config_without_a_width_is_refused():
    class NoWidth:
        def get_text_config(self):
            return self

    with pytest.raises(ValueError, match="NoWidth states no hidden_size"):
        ValueHead(NoWidth())


def test_normal_initialisation():
    base = tiny_models.language_model("llama", hidden_size=512, num_hidden_layers=1)
    torch.manual_seed(0)
    head = AutoModelForCausalLMWithValueHead.from_pretrained(
        base, v_head_init_strategy="normal", v_head_initializer_range=0.5
    ).v_head
    # The deviation of a standard deviation of 512 samples is 0.5/sqrt(1024) = 0.016.
    assert abs(float(head.summary.weight.detach().std()) - 0.5) < 0.07
    assert float(head.summary.bias.detach()) == 0.0


def test_an_unknown_initialisation_is_refused():
    with pytest.raises(ValueError, match=r"v_head_init_strategy 'zeros'.*'normal'"):
        AutoModelForCausalLMWithValueHead(
            tiny_models.language_model(), v_head_init_strategy="zeros"
        )


def test_models_that_ppo_cannot_train_are_refused():
    with pytest.raises(ValueError, match="GPT2Model has no language-model head"):
        AutoModelForCausalLMWithValueHead(GPT2Model(tiny_models.config("gpt2")))
    with pytest.raises(TypeError, match="Hugging Face model, got Linear"):
        AutoModelForCausalLMWithValueHead.from_pretrained(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a path, a Hub id or a model, got BertConfig"):
        AutoModelForCausalLMWithValueHead.from_pretrained(BertConfig())


def test_prompt_learning_is_refused():
    from peft import PromptTuningConfig

    with pytest.raises(ValueError, match=r"PROMPT_TUNING is prompt learning.*use LoRA"):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            tiny_models.language_model(),
            peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        )


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt_projected"])
def test_save_and_load_give_the_same_outputs(family, ids, tmp_path):
    model = tiny_models.policy(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_weights(loaded, model)
    torch.testing.assert_close(outputs(loaded, ids), outputs(model, ids))


def test_the_language_model_alone_loads_in_transformers(policy, ids, tmp_path):
    policy.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True).eval()
    assert_same_weights(plain, policy.pretrained_model)
    torch.testing.assert_close(plain(ids).logits, outputs(policy, ids)[0])


def test_saved_names_are_those_of_trl(policy, tmp_path):
    policy.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "transformer.wte.weight" in names
    assert not any(name.startswith(("pretrained_model.", "v_head.")) for name in names)
    head = set(load_file(tmp_path / "value_head.safetensors"))
    assert head == {"v_head.summary.weight", "v_head.summary.bias"}


def test_a_checkpoint_in_trls_layout_loads(policy, ids, tmp_path):
    # TRL 0.11 hands transformers 4 the language model's state with v_head.* added to it.
    state = policy.pretrained_model.state_dict()
    state.pop("lm_head.weight")  # tied
    state |= {f"v_head.{name}": p for name, p in policy.v_head.state_dict().items()}
    save_file(
        {name: p.clone().contiguous() for name, p in state.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = policy.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(settings, default=str))
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    assert_same_weights(loaded, policy)
    torch.testing.assert_close(outputs(loaded, ids), outputs(policy, ids))


def test_a_sharded_checkpoint_keeps_its_value_head(ids, tmp_path):
    model = tiny_models.policy("llama")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_weights(loaded, model)
    torch.testing.assert_close(outputs(loaded, ids), outputs(model, ids))


def test_a_gathered_state_is_saved_in_place_of_the_models_own(policy, tmp_path):
    state = {name: torch.full_like(p, 2.0) for name, p in policy.state_dict().items()}
    policy.save_pretrained(tmp_path, state_dict=state)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert all(torch.all(p == 2.0) for p in loaded.parameters())


def test_a_plain_language_model_gets_a_new_value_head(ids, tmp_path):
    base = tiny_models.language_model()
    base.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_weights(loaded.pretrained_model, base)
    torch.testing.assert_close(outputs(loaded, ids)[0], base(ids).logits)
    assert loaded.v_head.summary.weight.abs().sum() > 0


@pytest.mark.parametrize("keyword", ["dtype", "torch_dtype"])
def test_weights_load_in_fp32_unless_asked_otherwise(keyword, tmp_path):
    tiny_models.language_model().to(torch.bfloat16).save_pretrained(tmp_path)
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    assert load(tmp_path).pretrained_model.dtype == torch.float32
    half = load(tmp_path, **{keyword: torch.bfloat16})
    assert half.pretrained_model.dtype == torch.bfloat16
    assert half.v_head.summary.weight.dtype == torch.float32


def test_no_pickle_is_read(tmp_path):
    model = tiny_models.language_model()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"pytorch_model.bin: no pickle is read.*save_pretrained"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="use_safetensors=False is not followed: .* no pickle is"):
        found = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, use_safetensors=False)
    assert_same_weights(found.pretrained_model, model)


def test_a_pickled_value_head_is_not_read(tmp_path):
    tiny_models.language_model().save_pretrained(tmp_path)
    torch.save({"summary.weight": torch.full((1, 16), 9.0)}, tmp_path / "v_head.bin")
    torch.save({"v_head.summary.weight": torch.ones(1, 16)}, tmp_path / "pytorch_model.bin")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert torch.all(loaded.v_head.summary.weight.abs() < 1.0)


@pytest.fixture(scope="module")
def saved_adapter(tmp_path_factory):
    """(folder of the adapter, the model saved there); its base lies beside it."""
    folder = tmp_path_factory.mktemp("peft")
    tiny_models.language_model().save_pretrained(folder / "base")
    torch.manual_seed(1)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        folder / "base", peft_config=tiny_models.lora()
    ).eval()
    model.save_pretrained(folder / "adapter")
    return folder / "adapter", model


def test_an_adapter_is_trained_with_the_value_head_and_nothing_else():
    model = adapted()
    assert model.is_peft_model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"v_head.summary.weight", "v_head.summary.bias"} < trained
    assert all("lora_" in name or name.startswith("v_head.") for name in trained)


def test_saving_an_adapter_writes_it_and_the_value_head_only(saved_adapter):
    folder, model = saved_adapter
    assert {p.name for p in folder.glob("*.safetensors")} == {
        "adapter_model.safetensors",
        "value_head.safetensors",
    }
    head = load_file(folder / "value_head.safetensors")
    assert set(head) == {"v_head.summary.weight", "v_head.summary.bias"}
    torch.testing.assert_close(head["v_head.summary.weight"], model.v_head.summary.weight.detach())
    assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize("trainable", [False, True])
def test_a_reloaded_adapter_gives_the_same_outputs(saved_adapter, trainable, ids):
    folder, model = saved_adapter
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(folder, is_trainable=trainable)
    assert_same_weights(loaded, model)
    torch.testing.assert_close(outputs(loaded, ids), outputs(model, ids))
    of_adapter = [p for name, p in loaded.named_parameters() if "lora_" in name]
    assert of_adapter
    assert all(p.requires_grad == trainable for p in of_adapter)


@torch.no_grad()
def test_an_adapter_is_read_from_safetensors_alone(saved_adapter, tmp_path):
    folder, _ = saved_adapter
    shutil.copytree(folder, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(weights, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"holds no adapter_model\.safetensors"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")


def test_with_the_adapter_off_a_peft_model_is_its_base(ids):
    model = adapted()
    base = tiny_models.language_model()(ids).logits
    with model.disable_adapter():
        off = outputs(model, ids)[0]
    torch.testing.assert_close(off, base)
    assert (outputs(model, ids)[0] - base).abs().max() > 0.01


@torch.no_grad()
def test_a_peft_model_is_scored_by_rows(ids):
    model = adapted()
    rows = torch.tensor([2, 3, 9])
    labels = ids.roll(-1, 1).flatten()[rows]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fall-back to whole sequences would say so
        got = model(input_ids=ids, scoring=ScoringRequest(rows, labels))
    logits, values = outputs(model, ids)
    expected = logits.flatten(0, 1)[rows].log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.values, values.flatten()[rows], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_generate_is_that_of_the_language_model(policy, ids):
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": tiny.PAD}
    torch.testing.assert_close(
        policy.generate(input_ids=ids, **settings),
        policy.pretrained_model.generate(input_ids=ids, **settings),
    )


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_usual_names_of_heads_find_every_familys(family):
    model = tiny_models.policy(family)
    names = type(model).lm_head_namings
    found = [
        getattr(model.pretrained_model, n) for n in names if hasattr(model.pretrained_model, n)
    ]
    assert found == [model.get_output_embeddings()]


def test_bits_may_be_asked_for_by_their_old_names(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    tiny_models.language_model().save_pretrained(tmp_path)
    asked = []

    def load(loader, path, *args, **options):
        asked.append(options["quantization_config"])
        raise OSError("seen")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", classmethod(load))
    for bits in ("load_in_8bit", "load_in_4bit"):
        with pytest.raises(OSError, match="seen"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, **{bits: True})
    assert [(x.load_in_8bit, x.load_in_4bit) for x in asked] == [(True, False), (False, True)]


def test_activation_checkpointing_begins_and_ends(policy):
    base = policy.pretrained_model
    policy.gradient_checkpointing_enable()
    assert base.is_gradient_checkpointing
    policy.gradient_checkpointing_disable()
    assert not base.is_gradient_checkpointing


def test_fsdp_is_told_of_the_layers_that_a_text_model_has():
    """Its architecture also names those of a vision tower, without which accelerate refuses it."""
    policy = tiny_models.policy("qwen3_5")
    there = {type(module).__name__ for module in policy.modules()}
    named = set(policy.pretrained_model._no_split_modules)
    assert named - there
    assert set(policy._no_split_modules) == named & there != set()
