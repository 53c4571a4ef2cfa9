"""Model cards say what is so, and their code runs."""

import json
import re
import runpy

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    T5ForConditionalGeneration,
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
from fastrl.run.model_card import SFT, Training, complete_card, policy_gradient, write_model_card
from tests import seq2seq_models, tiny_models
from tests.golden import tiny
from tests.trl.test_online import make as make_online

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


def data_of(folder):
    """The card's metadata, as the Hub reads them."""
    return ModelCard.load(folder / "README.md").data


def loaded(folder):
    """The models that the card's code makes: by transformers and PEFT, and with a value head."""
    found = []
    for code in re.findall(r"```python\n(.*?)```", card_of(folder), re.DOTALL):
        script = folder.parent / "snippet.py"
        script.write_text(code)
        found.append(runpy.run_path(str(script))["model"].eval())
    return found


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
    here = {"query_dataset": str(tmp_path / "prompts.jsonl")}
    trainer = ppo_trainer(model, **here, **({} if method == "PPO" else GROUPS))
    trainer.save_pretrained(tmp_path / "tuned")
    card = card_of(tmp_path / "tuned")
    data = data_of(tmp_path / "tuned")
    assert data.library_name == ("peft" if adapter else "transformers")
    assert data.pipeline_tag == "text-generation"
    assert data.base_model is data.license is None
    assert f"- **Base model:** `{base}`" in card
    assert "gpt2" not in card
    assert f"({method})" in card
    assert method.lower() in data.tags
    assert "| `batch_size` | 2 |" in card
    assert ("| `advantage` | grpo |" in card) is (method == "GRPO")
    assert "tracker" not in card
    assert str(tmp_path) not in card
    assert ("LoRA adapter of rank 2" in card) is adapter
    assert ("value_head.safetensors" in card) is (method == "PPO")
    assert ("Value head:** none" in card) is (method == "GRPO")
    plain, *with_values = loaded(tmp_path / "tuned")
    assert len(with_values) == (method == "PPO")
    with torch.no_grad():
        logits, _, values = model.eval()(TOKENS)
        torch.testing.assert_close(plain(TOKENS).logits, logits, rtol=1e-5, atol=1e-5)
        for each in with_values:
            torch.testing.assert_close(each(TOKENS)[2], values, rtol=1e-5, atol=1e-5)


def test_the_card_of_an_encoder_decoder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = seq2seq_models.policy("t5_tied")
    assert isinstance(model, AutoModelForSeq2SeqLMWithValueHead)
    ppo_trainer(model).save_pretrained(tmp_path / "tuned")
    assert "An encoder–decoder, trained with fastrl" in card_of(tmp_path / "tuned")
    plain, with_values = loaded(tmp_path / "tuned")
    assert isinstance(plain, T5ForConditionalGeneration)
    assert isinstance(with_values, AutoModelForSeq2SeqLMWithValueHead)


def test_a_frozen_value_head_is_not_called_trained(tmp_path):
    trainer = ppo_trainer(tiny_models.policy(), **GROUPS)
    trainer.create_model_card(tmp_path)
    assert "`value_head.safetensors`; not trained" in card_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"), [({}, "not recorded"), ({"model_name": "org/base"}, "`org/base`")]
)
def test_a_model_that_names_no_base_has_that_of_the_configuration(tmp_path, name, shown):
    ppo_trainer(tiny_models.policy(), **name).create_model_card(tmp_path / "x", "org/tuned")
    card = card_of(tmp_path / "x")
    assert f"- **Base model:** {shown}" in card
    assert data_of(tmp_path / "x").base_model == (name.get("model_name"))
    assert "# org/tuned" in card


def test_an_adapter_that_is_not_saved_is_not_named(base, tmp_path):
    model = CausalLMPolicy.from_pretrained(base, peft_config=lora())
    add_adapter(model.pretrained_model, REFERENCE_ADAPTER, tiny_models.lora(r=3))
    write_model_card(tmp_path / "tuned", "tuned", model)
    assert "of rank 2;" in card_of(tmp_path / "tuned")


def test_an_adapter_on_a_nameless_base_says_that_it_needs_it(tmp_path):
    from peft import get_peft_model

    model = get_peft_model(tiny_models.language_model(), lora())
    write_model_card(tmp_path, "x", model, Training(SFT))
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
    card = card_of(tmp_path / "sft")
    assert "supervised fine-tuning (SFT)" in card
    assert ("LoRA adapter" in card) is adapter
    assert "- **Base model:** `base`" in card
    assert "value head:** none" in card.lower()
    with torch.no_grad():
        expected = trainer.model.eval()(TOKENS).logits
        (found,) = loaded(tmp_path / "sft")
        torch.testing.assert_close(found(TOKENS).logits, expected)
    (tmp_path / "sft" / "README.md").write_text("# Mine\n")
    trainer.save_model()
    assert card_of(tmp_path / "sft") == "# Mine\n"


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
    card = card_of(tmp_path / "rm")
    assert "A reward model (a sequence classifier)" in card
    assert "reward modelling on preference pairs" in card
    assert data_of(tmp_path / "rm").pipeline_tag == "text-classification"
    (found,) = loaded(tmp_path / "rm")
    with torch.no_grad():
        expected = trainer.model.eval()(TOKENS).logits
        torch.testing.assert_close(found(TOKENS).logits, expected)


def test_the_card_of_an_aligned_model(base, tmp_path):
    loader = DatasLoader(PAIRS, tiny.tokenizer())
    factory = BatchFactory("offline-pairwise", loader, batch_size=1)
    arguments = {"output_dir": str(tmp_path / "dpo"), "report_to": "none", "use_cpu": True}
    trainer = Trainer(base, AlignmentConfig(**arguments), factory, "dpo")
    trainer.save_model()
    card = card_of(tmp_path / "dpo")
    assert "the loss dpo on the task offline-pairwise" in card
    assert "Value head:** none" in card
    assert "- **Base model:** `base`" in card
    assert loaded(tmp_path / "dpo")[0].config.n_embd == 16


def test_a_license_is_that_of_the_base_or_the_users_and_never_made_up(base, tmp_path):
    def of(**training):
        model = AutoModelForCausalLM.from_pretrained(base)
        write_model_card(tmp_path / "tuned", "tuned", model, Training(**training))
        return data_of(tmp_path / "tuned").license

    assert of() is None
    config = json.loads((tmp_path / base / "config.json").read_text())
    (tmp_path / base / "config.json").write_text(json.dumps(config | {"license": "mit"}))
    assert of() == "mit"
    (tmp_path / base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    assert of() == "apache-2.0"
    assert of(license="llama3.2") == "llama3.2"


def test_a_run_adds_its_results_and_a_data_set_of_the_hub(tmp_path):
    model = tiny_models.policy()
    write_model_card(tmp_path, "x", model, Training(SFT))
    complete_card(tmp_path, "org/prompts", {"reward_after": 0.51234, "seconds": 3.0, "note": "a"})
    assert data_of(tmp_path).datasets == ["org/prompts"]
    assert "| `reward_after` | 0.5123 |" in card_of(tmp_path)
    assert "seconds" not in card_of(tmp_path)
    write_model_card(tmp_path, "x", model, Training(SFT))
    (tmp_path / "prompts.jsonl").touch()
    complete_card(tmp_path, str(tmp_path / "prompts.jsonl"), {})
    assert data_of(tmp_path).datasets is None


@pytest.mark.filterwarnings("ignore:settings that change nothing")
def test_the_settings_of_a_card_are_those_that_decided_what_was_trained(tmp_path):
    def settings(**given):
        trainer = make_online(tmp_path, peft_config=lora(), **given)
        trainer.write_card(str(tmp_path / "card"))
        rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", card_of(tmp_path / "card"), re.MULTILINE)
        return dict(rows)

    known = settings(num_train_epochs=2)
    shown = settings(max_steps=1, use_vllm=True, temperature=0.5, gradient_checkpointing=True)
    decided = {
        "reward_funcs": "small_tokens", "loss_type": "dapo", "beta": "0.0", "num_generations": "4",
        "learning_rate": known["learning_rate"],
        "per_device_train_batch_size": known["per_device_train_batch_size"],
        "gradient_accumulation_steps": "1", "lora_r": "2", "lora_alpha": "8",
        "lora_target_modules": "c_attn",
    }  # fmt: skip
    assert decided.items() <= known.items()
    assert decided.items() <= shown.items()
    assert known["num_train_epochs"] == "2"
    assert (shown["max_steps"], shown["temperature"]) == ("1", "0.5")
    nothing = {"use_vllm", "bf16", "debug", "num_train_epochs", "activation_checkpointing"}
    assert nothing & shown.keys() == set()


def test_no_account_or_place_is_told(base, tmp_path):
    arguments = SFTConfig(
        output_dir=str(tmp_path / "secret"), report_to="none", use_cpu=True, hub_token="hf_secret",
        hub_model_id="org/sft", learning_rate=3e-4,
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        arguments,
        train_dataset=[{"text": "w3 w4"}] * 2,
        processing_class=tiny.tokenizer(),
    )
    trainer.write_card(str(tmp_path / "card"))
    card = card_of(tmp_path / "card")
    assert "secret" not in card
    assert "| `learning_rate` | 0.0003 |" in card
