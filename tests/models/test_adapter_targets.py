"""Adapters whose configuration names no layers, on models that PEFT does not know."""

from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig

from fastrl import RolloutEngine
from fastrl.data.choose_padding import why_not_packed
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.models.load import with_adapter
from tests import tiny_models
from tests.golden import tiny


def targets(model) -> set[str]:
    named = (name for name, _ in model.named_parameters() if "lora_A" in name)
    return {name.split(".lora_A")[0].rpartition(".")[2] for name in named}


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", "q_proj v_proj"),  # PEFT's own
        ("phi3", "down_proj gate_up_proj o_proj qkv_proj"),
        ("granite", "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        (
            "qwen3_5",
            "down_proj gate_proj in_proj_a in_proj_b in_proj_qkv in_proj_z k_proj o_proj out_proj "
            "q_proj up_proj v_proj",
        ),
        # Mamba's out_proj is read by kernels, which know no adapters.
        ("falcon_h1", "down_proj gate_proj in_proj k_proj o_proj q_proj up_proj v_proj"),
    ],
)
def test_they_are_put_on_the_linear_layers(family, expected):
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    model = with_adapter(tiny_models.language_model(family), config)
    assert targets(model) == set(expected.split())
    assert config.target_modules is None
    policy = AutoModelForCausalLMWithValueHead(model).eval()
    assert why_not_packed(policy, torch.device("cpu"), torch.float32) is None
    RolloutEngine(policy, tiny.tokenizer(), max_slots=2)


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_routers_and_gates_of_one_number_have_none():
    model = tiny_models.language_model("qwen3_5_moe")
    found = targets(with_adapter(model, LoraConfig(r=2, task_type="CAUSAL_LM")))
    assert "gate_proj" in found
    assert not found & {"gate", "shared_expert_gate", "lm_head"}


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_layers_that_are_named_stay():
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["out_proj"])
    assert targets(with_adapter(tiny_models.language_model("qwen3_5"), config)) == {"out_proj"}


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
@pytest.mark.parametrize(("named", "message"), [
    ({"target_modules": ["q_proj", "w_proj"]}, "target_modules has w_proj, which LlamaFor"),
    ({"modules_to_save": ["lm_haed"]}, "has lm_haed, .* without: did you mean 'lm_head'"),
    ({"layers_to_transform": [1, 7]}, "layers_to_transform has 7, which"),
    ({"layers_to_transform": 1}, None),
    ({"target_modules": ["0.self_attn.q_proj"], "modules_to_save": ["embed_tokens"]}, None),
    ({"target_modules": r".*\.1\.mlp\.up_proj"}, None),
    ({"target_modules": "all-linear", "modules_to_save": ["score"]}, None),
])  # fmt: skip
def test_names_that_the_model_does_not_have_are_told_of(named, message):
    config = LoraConfig(r=2, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **named})
    told = nullcontext() if message is None else pytest.warns(UserWarning, match=message)
    with told:  # other warnings are errors
        with_adapter(tiny_models.language_model("llama"), config)
