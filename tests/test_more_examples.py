"""Every file in ``examples`` beside the classic loops runs on tiny local models."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from fastrl import AutoModelForSeq2SeqLMWithValueHead, DPOConfig, GRPOConfig
from tests import tables, tiny_models
from tests.golden import tiny

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXTS = [f"w{i} w{i + 1} w{i + 2} w{i + 3}" for i in range(3, 19)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
]


@pytest.fixture(autouse=True)
def _tables():
    """What examples register ends with their test."""
    with tables.kept():
        yield


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def saved(model, folder):
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def language_model(tmp_path):
    return saved(tiny_models.language_model("gpt2"), tmp_path / "lm")


QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}


def test_every_example_has_a_test_and_a_command_line(monkeypatch, capsys):
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    files = (path for path in Path(__file__).parent.glob("test_*examples.py"))
    here = "".join(path.read_text() for path in files)
    for name in names:
        assert f'"{name}"' in here or f'"{name}.py"' in here, name
        # One holds two documents' loops, one makes a tokenizer and its template.
        most = {"classic_loop": 130, "grpo_calls": 85}.get(name, 80)
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= most
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit, match="0"):
            run(name)["main"]()
        assert "--output" in capsys.readouterr().out


def test_the_sentiment_loop(language_model, tmp_path):
    torch.manual_seed(0)
    config = tiny_models.config("gpt2", num_labels=2)
    classifier = saved(GPT2ForSequenceClassification(config), tmp_path / "classifier")
    stats = run("sentiment")["train"](
        language_model, classifier, TEXTS, str(tmp_path / "out"), batch_size=8, ppo_epochs=1
    )
    assert math.isfinite(stats["ppo/loss/total"])
    assert stats["rollout/reused"] == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_reward_model(tmp_path, capsys):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=tiny.VOCABULARY, intermediate_size=16, max_position_embeddings=40,
            pad_token_id=tiny.PAD, num_labels=1, **shape,
        )
    )  # fmt: skip
    rows = [
        {"instruction": t, "chosen_response": "w60 w61", "rejected_response": "w3"} for t in TEXTS
    ]
    metrics = run("reward_model")["train"](
        saved(model, tmp_path / "encoder"), Dataset.from_list(rows), str(tmp_path / "out"),
        max_length=32, num_train_epochs=8, learning_rate=1e-2, **QUIET,
    )  # fmt: skip
    assert metrics["eval_accuracy"] == 1
    assert "chosen_text" in capsys.readouterr().out
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")


def test_sft_with_packing(language_model, tmp_path):
    rows = Dataset.from_list([{"prompt": t, "completion": " w60 w61"} for t in TEXTS])
    metrics = run("sft_packing")["train"](
        language_model, rows, str(tmp_path / "out"), row=32,
        num_train_epochs=20, learning_rate=1e-2, **QUIET,
    )  # fmt: skip
    assert metrics["eval_loss"] < 0.5 * math.log(tiny.VOCABULARY)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_encoder_decoder(tmp_path):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=tiny.VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
            pad_token_id=tiny.PAD, eos_token_id=tiny.EOS, decoder_start_token_id=tiny.PAD,
        )
    )  # fmt: skip
    result = run("t5_ppo")["train"](
        saved(model, tmp_path / "t5"), TEXTS, str(tmp_path / "out"), steps=2, batch_size=8
    )
    assert len(result.history) == 2
    assert all(0 <= row["reward/mean"] <= 1 for row in result.history)
    AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_sums_of_digits(tmp_path, capsys, advantage):
    example = run("grpo_digits")
    result = example["train"](
        str(tmp_path / "out"), list(example["ANSWERS"])[:16], advantage, sft_epochs=100,
        steps=14, batch_size=128, mini_batch_size=64, learning_rate=1e-3,
    )  # fmt: skip
    assert 0.1 < result["sampled_before"] < result["sampled_after"] - 0.1
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_adapters_alone(language_model, tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1)
    rewarding = get_peft_model(base, LoraConfig(r=2, task_type="SEQ_CLS"))
    rewarding.save_pretrained(tmp_path / "reward")
    result = run("adapters_only")["train"](
        language_model, str(tmp_path / "reward"), TEXTS, str(tmp_path / "out"), 2, batch_size=8
    )
    assert all(math.isfinite(row["reward/mean"]) for row in result.history)
    assert len({row["reward/mean"] for row in result.history}) == 2
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert not any("reward" in name for name in names)


def test_a_grpo_script(tmp_path, capsys):
    """Its rise of the reward is that of a run of minutes; here the script runs."""
    example = run("grpo_sums")
    settings = {**example["DEFAULTS"], **QUIET, "per_device_train_batch_size": 16, "max_steps": 16}
    args = GRPOConfig(**{**settings, "output_dir": str(tmp_path)})
    rewards = example["train"](example["ScriptArguments"](sft_epochs=1), args)
    assert len(rewards) == 8  # each is learned from twice
    assert all(0 <= reward <= 1 for reward in rewards)
    first, last, errors = example["rise"]([0.0, 1.0, 5.0, 5.0, 5.0, 5.0, 4.0, 4.0])
    assert (first, last, errors) == (0.5, 4.0, 7.0)  # 3.5 / √(0.5 / 2)
    assert "standard errors" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_dpo_script(tmp_path, capsys):
    example = run("dpo_reviews")
    settings = {**example["DEFAULTS"], **QUIET, "max_steps": 24, "output_dir": str(tmp_path)}
    script = example["ScriptArguments"](pairs=768, held_out=128, sft_steps=10)
    settings |= {"learning_rate": 3e-3, "per_device_eval_batch_size": 128}
    found = example["train"](script, DPOConfig(**settings))
    assert found["eval_rewards/accuracies"] > 0.55  # in two hundred steps 0.74
    assert "accuracy on 128 held-out pairs" in capsys.readouterr().out
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_own_policy_loss_keeps_ratios_near_one(tmp_path):
    rows = run("own_policy_loss")["train"](str(tmp_path), steps=4)
    clip, spo = (sum(r["ppo/policy/approxkl"] for r in rows[name]) for name in ("clip", "spo"))
    assert 0 < spo < 0.7 * clip


def test_an_own_advantage_learns_otherwise_than_grpos(tmp_path):
    logs = run("own_advantage")["train"](str(tmp_path), steps=20)
    (first, last), (others_first, others_last) = (
        [log["reward"] for log in logs[name]] for name in ("ranks", "grpo")
    )
    assert first < last
    assert others_first < others_last
    assert (first, last) != (others_first, others_last)


def test_an_own_reward_reads_its_column(tmp_path):
    example = run("own_reward")
    said = ["blue red", "blue", ""]
    assert example["wanted"](said, said, None, colour=["blue", "", "red"]) == [0.5, None, 0.0]
    logs = example["train"](str(tmp_path), steps=20)
    assert logs[0]["rewards/wanted/mean"] < logs[1]["rewards/wanted/mean"]


def test_an_own_environment_is_asked_more_often(tmp_path):
    logs = run("own_environment")["train"](str(tmp_path), steps=20)
    assert logs[0]["tools/call_frequency"] + 0.3 < logs[1]["tools/call_frequency"]
    assert logs[0]["reward"] < logs[1]["reward"]


def test_an_own_loss_of_pairs_keeps_the_preferred_likely(tmp_path):
    logs = run("own_pair_loss")["train"](str(tmp_path), steps=20)
    assert logs["dpo"][-1]["rewards/chosen"] < logs["dpop"][-1]["rewards/chosen"]


def test_calls_are_valid_from_the_first_step_where_they_have_to_be(tmp_path):
    train = run("grpo_calls")["train"]
    required, free = (train(str(tmp_path), free=x, steps=3) for x in (False, True))
    assert [log["rewards/valid/mean"] for log in required] == [1.0] * 3
    assert min(log["reward"] for log in required) > 0.05
    assert [log["rewards/valid/mean"] for log in free] == [0.0] * 3


def test_a_model_learns_from_itself_with_a_hint(tmp_path):
    """In seven hundred steps it learns most sums; here it begins to."""
    found = run("distill_hints")["train"](str(tmp_path), sft_steps=2, steps=2)
    assert [row["step"] for row in found] == [0, 2]
    assert all(0 <= row[name] <= 1 for row in found for name in ("learned", "held_out"))
