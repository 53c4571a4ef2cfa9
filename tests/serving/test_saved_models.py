"""Every trainer's saved model loads in transformers or PEFT as it is, with the trainer's logits."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from fastrl.alignment import AlignmentConfig
from fastrl.alignment import Trainer as AlignmentTrainer
from tests import seq2seq_models, tiny_models
from tests.alignment.conftest import make_factory
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

IDS = torch.tensor([[5, 6, 7, 8]])
PAIRS = [{"prompt": "w3 ", "chosen": "w4", "rejected": "w5"}] * 2
GROUPS = {"advantage": "grpo", "group_size": 2}


def lora(kind="CAUSAL_LM"):
    return tiny_models.lora(task_type=kind)


def ppo(model, **settings):
    config = PPOConfig(batch_size=2, ppo_epochs=1, **settings)
    return PPOTrainer(config, model, None, tiny.tokenizer())


def policy(base, adapter=None):
    return AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=adapter)


def with_peft(kind, base, arguments, adapter):
    """A trainer on transformers' Trainer."""
    arguments |= {"report_to": "none", "use_cpu": True}
    if kind == "sft":
        own = {"train_dataset": [{"text": "w3 w4"}] * 2, "processing_class": tiny.tokenizer()}
        model = AutoModelForCausalLM.from_pretrained(base)
        return SFTTrainer(model, SFTConfig(**arguments), peft_config=adapter, **own)
    if kind == "reward":
        own = {"train_dataset": PAIRS, "processing_class": tiny.tokenizer()}
        return RewardTrainer(base, RewardConfig(**arguments), peft_config=adapter, **own)
    factory = make_factory("reinforcement-learning")
    return AlignmentTrainer(policy(base), AlignmentConfig(**arguments), factory, "ppo")


def encoder_decoder(base):
    seq2seq_models.language_model().save_pretrained(base.parent / "t5")
    return AutoModelForSeq2SeqLMWithValueHead.from_pretrained(base.parent / "t5")


# The trainer on a saved base, and the class of transformers or PEFT that loads what it saves.
KINDS = {
    "ppo": (lambda base: ppo(policy(base)), AutoModelForCausalLM),
    "ppo-lora": (lambda base: ppo(policy(base, lora())), AutoPeftModelForCausalLM),
    "grpo": (lambda base: ppo(policy(base), **GROUPS), AutoModelForCausalLM),
    "encoder-decoder": (lambda base: ppo(encoder_decoder(base)), AutoModelForSeq2SeqLM),
    "sft": (None, AutoModelForCausalLM),
    "sft-lora": (None, AutoPeftModelForCausalLM),
    "reward": (None, AutoModelForSequenceClassification),
    "reward-lora": (None, AutoPeftModelForSequenceClassification),
    "align-ppo": (None, AutoModelForCausalLM),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_loads_as_it_is(kind, tmp_path):
    tiny_models.language_model().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    make, loader = KINDS[kind]
    task, _, adapter = kind.partition("-")
    if make is None:
        adapter = (
            lora("SEQ_CLS" if task == "reward" else "CAUSAL_LM") if adapter == "lora" else None
        )
        arguments = {"output_dir": str(tmp_path / "run")}
        trainer = with_peft(task, str(tmp_path / "base"), arguments, adapter)
    else:
        trainer = make(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * tiny.rule(name, tuple(parameter.shape)))
    folder = tmp_path / "model"
    getattr(trainer, "save_pretrained", getattr(trainer, "save_model", None))(str(folder))
    for file in folder.glob("*model*.safetensors"):
        assert not any("v_head." in name for name in load_file(file)), file
    has_values = kind.startswith(("ppo", "encoder", "align", "grpo"))
    assert (folder / "value_head.safetensors").exists() is has_values

    options = {"num_labels": 1} if kind == "reward-lora" else {}
    plain = loader.from_pretrained(folder, **options).eval()
    ours = getattr(trainer.model, "pretrained_model", trainer.model).eval()
    inputs = {"input_ids": IDS}
    if kind == "encoder-decoder":
        inputs["decoder_input_ids"] = IDS
    with torch.no_grad():
        expected = ours(**inputs).logits
        torch.testing.assert_close(plain(**inputs).logits, expected, rtol=0, atol=1e-4)
