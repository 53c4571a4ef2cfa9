"""Model cards say what is so, and their code runs."""

import re
import runpy

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
)

from fastrl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMPolicy,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from fastrl.alignment import AlignmentConfig, BatchFactory, DatasLoader, Trainer
from fastrl.config import METHODS
from fastrl.models.adapters import REFERENCE_ADAPTER, add_adapter
from fastrl.run.model_card import SFT, policy_gradient, write_model_card
from tests import seq2seq_models, tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)

PAIRS = [{"prompt": "w3 ", "chosen": "w4", "rejected": "w5"}] * 2


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A saved language model, in the folder where cards' code runs."""
    monkeypatch.chdir(tmp_path)
    tiny_models.language_model().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    return "base"


@pytest.mark.parametrize("name", METHODS.values())
def test_every_method_of_ppos_settings_has_a_title(name):
    method = policy_gradient(name)
    assert name in method.title
    assert method.tags[-1] == "reinforcement-learning"


def lora(kind="CAUSAL_LM"):
    return LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type=kind)


def card_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def loaded(folder):
    """The model that the card's code makes."""
    (code,) = re.findall(r"```python\n(.*?)```", card_of(folder), re.DOTALL)
    script = folder.parent / "snippet.py"
    script.write_text(code)
    return runpy.run_path(str(script))["model"].eval()


def ppo_trainer(model, **settings):
    config = PPOConfig(**{"batch_size": 2, "ppo_epochs": 1, **settings})
    return PPOTrainer(config, model, None, tiny.tokenizer())


TOKENS = torch.tensor([[5, 6, 7]])
GROUPS = {"advantage": "grpo", "group_size": 2}


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("method", ["PPO", "GRPO"])
def test_the_card_of_a_policy(base, tmp_path, method, adapter):
    kind = AutoModelForCausalLMWithValueHead if method == "PPO" else CausalLMPolicy
    model = kind.from_pretrained(base, peft_config=lora() if adapter else None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(tiny.rule(name, tuple(parameter.shape)))
    trainer = ppo_trainer(model, **({} if method == "PPO" else GROUPS))
    trainer.save_pretrained(tmp_path / "tuned")
    card = card_of(tmp_path / "tuned")
    assert card.startswith(f"---\nlibrary_name: {'peft' if adapter else 'transformers'}\n")
    assert f"- **Base model:** `{base}`" in card
    assert "gpt2" not in card
    assert f"({method})" in card
    assert f"- {method.lower()}\n" in card
    assert ("LoRA adapter of rank 2" in card) is adapter
    assert ("v_head.summary" in card) is (method == "PPO")
    assert ("Value head:** none" in card) is (method == "GRPO")
    alone = "`transformers.AutoModelForCausalLM.from_pretrained` loads the language model alone"
    assert (alone in card) is (method == "PPO" and not adapter)
    found = loaded(tmp_path / "tuned")
    with torch.no_grad():
        expected = model.eval()(TOKENS)
        out = found(TOKENS)
        if method == "PPO":
            torch.testing.assert_close(out[2], expected[2], rtol=1e-5, atol=1e-5)
            out = out[0]
        else:
            out = out.logits
        torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)


def test_the_card_of_an_encoder_decoder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = seq2seq_models.policy("t5_tied")
    assert isinstance(model, AutoModelForSeq2SeqLMWithValueHead)
    ppo_trainer(model).save_pretrained(tmp_path / "tuned")
    assert "An encoder–decoder, trained with fastrl" in card_of(tmp_path / "tuned")
    assert isinstance(loaded(tmp_path / "tuned"), AutoModelForSeq2SeqLMWithValueHead)


def test_a_frozen_value_head_is_not_called_trained(tmp_path):
    trainer = ppo_trainer(tiny_models.policy(), **GROUPS)
    trainer.create_model_card(tmp_path)
    assert "`v_head.summary.*`; not trained" in card_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"), [({}, "not recorded"), ({"model_name": "org/base"}, "`org/base`")]
)
def test_a_model_that_names_no_base_has_that_of_the_configuration(tmp_path, name, shown):
    ppo_trainer(tiny_models.policy(), **name).create_model_card(tmp_path / "x", "org/tuned")
    card = card_of(tmp_path / "x")
    assert f"- **Base model:** {shown}" in card
    assert ("base_model: org/base" in card) is bool(name)
    assert "# org/tuned" in card


def test_an_adapter_that_is_not_saved_is_not_named(base, tmp_path):
    model = CausalLMPolicy.from_pretrained(base, peft_config=lora())
    add_adapter(model.pretrained_model, REFERENCE_ADAPTER, tiny_models.lora(r=3))
    write_model_card(tmp_path / "tuned", "tuned", model)
    assert "of rank 2;" in card_of(tmp_path / "tuned")


def test_an_adapter_on_a_nameless_base_says_that_it_needs_it(tmp_path):
    from peft import get_peft_model

    model = get_peft_model(tiny_models.language_model(), lora())
    write_model_card(tmp_path, "x", model, SFT)
    card = card_of(tmp_path)
    assert "base: the model that the adapter was trained on" in card
    assert 'PeftModel.from_pretrained(base, "x")' in card


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_the_card_of_supervised_runs(base, tmp_path, adapter):
    arguments = {"output_dir": str(tmp_path / "sft"), "report_to": "none", "use_cpu": True}
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        SFTConfig(**arguments),
        train_dataset=[{"text": "w3 w4"}] * 2,
        processing_class=tiny.tokenizer(),
        peft_config=lora() if adapter else None,
    )
    trainer.save_model()
    trainer.create_model_card(model_name="sft")
    card = card_of(tmp_path / "sft")
    assert "supervised fine-tuning (SFT)" in card
    assert ("LoRA adapter" in card) is adapter
    assert "- **Base model:** `base`" in card
    assert "value head:** none" in card.lower()
    with torch.no_grad():
        expected = trainer.model.eval()(TOKENS).logits
        torch.testing.assert_close(loaded(tmp_path / "sft")(TOKENS).logits, expected)


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_the_card_of_a_reward_model(base, tmp_path, adapter):
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(tiny_models.config("gpt2", num_labels=1))
    model.save_pretrained(tmp_path / "start")
    model = AutoModelForSequenceClassification.from_pretrained("start")
    arguments = {"output_dir": str(tmp_path / "rm"), "report_to": "none", "use_cpu": True}
    trainer = RewardTrainer(
        model,
        RewardConfig(**arguments),
        train_dataset=PAIRS,
        processing_class=tiny.tokenizer(),
        peft_config=lora("SEQ_CLS") if adapter else None,
    )
    trainer.save_model()
    trainer.create_model_card()
    card = card_of(tmp_path / "rm")
    assert "A reward model (a sequence classifier)" in card
    assert "reward modelling on preference pairs" in card
    found = loaded(tmp_path / "rm")
    with torch.no_grad():
        expected = trainer.model.eval()(TOKENS).logits
        torch.testing.assert_close(found(TOKENS).logits, expected)


def test_the_card_of_an_aligned_model(base, tmp_path):
    loader = DatasLoader(PAIRS, tiny.tokenizer())
    factory = BatchFactory("offline-pairwise", loader, batch_size=1)
    arguments = {"output_dir": str(tmp_path / "dpo"), "report_to": "none", "use_cpu": True}
    trainer = Trainer(base, AlignmentConfig(**arguments), factory, "dpo")
    trainer.save_model()
    trainer.create_model_card()
    card = card_of(tmp_path / "dpo")
    assert "the loss dpo on the task offline-pairwise" in card
    assert "Value head:** none" in card
    assert "- **Base model:** `base`" in card
    assert loaded(tmp_path / "dpo").config.n_embd == 16
