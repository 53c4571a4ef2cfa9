"""Adapters and runs' folders through the commands, each going on where another ended."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastrl import cli
from fastrl.rewards.classifier import ClassifierReward
from fastrl.rewards.functions import load_reward
from fastrl.tools.demo.text import preference_pairs
from tests import tiny_models

pytestmark = [
    pytest.mark.filterwarnings(tiny_models.PEFT_WARNING),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]
FITTING = {
    "eval-examples": 0, "max-steps": 2, "per-device-train-batch-size": 8, "learning-rate": "1e-2",
    "logging-steps": 1, "use-cpu": "true", "seed": 3,
}  # fmt: skip
LEARNING = {
    "dataset": "reviews.jsonl", "prompt-words": 5, "max-new-tokens": 6, "steps": 2,
    "batch-size": 8, "mini-batch-size": 4, "ppo-epochs": 1, "eval-prompts": 0,
    "learning-rate": "1e-2", "init-kl-coef": "0.1",
}  # fmt: skip
COMMANDS = {
    "sft": {"dataset": "reviews.jsonl", **FITTING},
    "reward": {"dataset": "pairs.jsonl", **FITTING},
    "align": {"dataset": "prompted.jsonl", "max-length": 40, **FITTING},
    "ppo": {"reward": "clf", **LEARNING},
    "grpo": {"reward": "clf", "group-size": 4, **LEARNING},
}
_PATHS = ("model", "dataset", "reward", "annotator")


def run(command, world, output, **flags):
    settings = {**COMMANDS[command], "output": output, **flags}
    for name in _PATHS:
        if name in settings:  # of the world, unless absolute
            settings[name] = world / settings[name]
    return cli.main([command, *(w for k, v in settings.items() for w in (f"--{k}", str(v)))])


@pytest.fixture(scope="module")
def world(world):
    """With pairs that have a prompt."""
    rows = [
        {"prompt": " ".join(a.split()[:2]) + " ", "chosen": a, "rejected": b}
        for a, b in preference_pairs(60, seed=0)
    ]
    (world / "prompted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return world


@pytest.fixture(scope="module")
def sft(world):
    """A run that has trained an adapter."""
    assert run("sft", world, world / "sft", model="lm", **{"lora-r": 2}) == 0
    return world / "sft"


@pytest.fixture(scope="module")
def reward(world):
    """A run that has trained a reward model's adapter."""
    assert run("reward", world, world / "reward", model="lm", **{"lora-r": 4}) == 0
    return world / "reward"


def weights(folder):
    return load_file(folder / "model" / "adapter_model.safetensors")


def moved(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("command", ["sft", "align", "ppo", "grpo"])
def test_a_saved_adapter_is_trained_on(command, world, sft, tmp_path):
    """By the run's folder; every matrix of it moves, and the base stays."""
    base = load_file(world / "lm" / "model.safetensors")
    assert run(command, world, tmp_path / "next", model=sft) == 0
    before, after = weights(sft), weights(tmp_path / "next")
    assert moved(before, after) == set(before)
    assert not moved(base, load_file(world / "lm" / "model.safetensors"))
    config = json.loads((tmp_path / "next" / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(world / "lm")
    # What was saved is the whole of it: it can be trained on again.
    assert run("sft", world, tmp_path / "last", model=tmp_path / "next") == 0
    assert moved(after, weights(tmp_path / "last")) == set(after)


def test_a_reward_models_adapter_is_trained_on(world, reward, tmp_path):
    assert run("reward", world, tmp_path / "next", model=reward) == 0
    before = weights(reward)
    assert any("score" in name for name in before)
    assert moved(before, weights(tmp_path / "next")) == set(before)


def test_a_reward_models_adapter_scores(world, reward, tmp_path):
    """Under ``ppo --reward`` and ``align --annotator``, as it did when it was trained."""
    texts = ["a good film .", "a bad one , and long"]
    loaded = load_reward(str(reward))
    base = AutoModelForSequenceClassification.from_pretrained(world / "lm", num_labels=1)
    base.config.pad_token_id = loaded.tokenizer.pad_token_id
    plain = PeftModel.from_pretrained(base, reward / "model")
    expected = ClassifierReward(plain, loaded.tokenizer).score(texts)
    assert loaded.score(texts) == pytest.approx(expected, rel=0, abs=1e-6)  # of fp32
    assert expected[0] != expected[1]
    assert run("ppo", world, tmp_path / "ppo", model="lm", reward=reward) == 0
    online = {"task": "online-pairwise", "annotator": reward, "max-new-tokens": 6}
    assert run("align", world, tmp_path / "align", model="lm", **online) == 0


@pytest.mark.parametrize(
    ("command", "flags"), [("ppo", {}), ("align", {"task": "online-pairwise", "max-new-tokens": 6})]
)
@pytest.mark.parametrize("what", ["sft", "lm"])
def test_a_model_without_a_classification_head_gives_no_rewards(
    command, flags, what, world, sft, tmp_path, capsys
):
    flags = {**flags, "reward" if command == "ppo" else "annotator": what}
    assert run(command, world, tmp_path / "run", model="lm", **flags) == 2
    assert "is not a trained sequence classifier" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


def test_a_runs_folder_stands_for_its_model(world, reward, tmp_path):
    assert run("sft", world, tmp_path / "sft", model="lm") == 0
    folders = {"model": tmp_path / "sft", "reward": reward}
    assert run("ppo", world, tmp_path / "ppo", **folders, steps=1) == 0
    assert run("sft", world, tmp_path / "again", model=tmp_path / "ppo") == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_model_is_an_error_in_a_line(command, world, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run(command, world, tmp_path / "run", model=tmp_path / "empty") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "empty holds no model: there is no config.json" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["sft", "align", "ppo", "grpo"])
def test_a_new_adapter_on_an_adapter_is_refused_with_the_remedy(
    command, world, sft, tmp_path, capsys
):
    assert run(command, world, tmp_path / "run", model=sft, **{"lora-r": 2}) == 2
    assert "leave out lora_r to continue training it, or merge it" in capsys.readouterr().err


def test_the_kl_is_to_the_adapter_that_the_run_began_with(world, sft, tmp_path, capsys):
    """Its estimate at the first step is 0 then, and not where the base is asked for."""
    kls = {}
    for adapter in ("auto", "off"):
        output = tmp_path / adapter
        flags = {"reference-adapter": adapter, "steps": 1}
        assert run("ppo", world, output, model=sft, **flags) == 0
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        kls[adapter] = next(row["objective/kl"] for row in rows if "objective/kl" in row)
    assert kls["auto"] == pytest.approx(0, abs=1e-4)  # of log-probs in fp32
    assert abs(kls["off"]) > 1e-3
    said = capsys.readouterr()
    said = said.out + said.err
    assert "reference: adapter, the policy has an adapter: a copy of it as training begins" in said
    assert "the base model with it off, from which the policy differs already" in said


@pytest.mark.parametrize("command", ["sft", "reward", "align"])
def test_an_adapters_dropout_acts_in_training(command, world, tmp_path, monkeypatch):
    """Each of its modules leaves out some of what it is given, and does so in training alone."""
    seen = {"training": 0, "evaluation": 0}
    forward = torch.nn.Dropout.forward

    def counted(self, x):
        out = forward(self, x)
        if self.p == 0.375:
            seen["training" if not torch.equal(out, x) else "evaluation"] += 1
            assert self.training != torch.equal(out, x)
        return out

    monkeypatch.setattr(torch.nn.Dropout, "forward", counted)
    flags = {"lora-r": 2, "lora-dropout": 0.375, "eval-examples": 12}
    if command == "align":
        flags["disable-dropout"] = "false"
    assert run(command, world, tmp_path / "run", model="lm", **flags) == 0
    assert seen["training"] >= 2  # steps
    assert seen["evaluation"] >= 2  # evaluations, before and after


@pytest.mark.parametrize("command", ["ppo", "grpo"])
def test_dropout_is_refused_where_it_would_make_the_ratio_lie(command, world, tmp_path, capsys):
    flags = {"lora-r": 2, "lora-dropout": 0.1}
    assert run(command, world, tmp_path / "run", model="lm", **flags) == 2
    assert "lora_dropout must be 0, got 0.1: with dropout the probability ratio" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(("command", "flags", "message"), [
    ("sft", {"lora-dropout": 0.1}, "is for a new adapter: set lora_r, too"),
    ("sft", {"lora-dropout": 1.5, "lora-r": 2}, "lora_dropout must lie in [0, 1), got 1.5"),
    ("align", {"lora-dropout": 0.1, "lora-r": 2}, "pass --disable-dropout false"),
    ("align",
     {"lora-dropout": 0.1, "lora-r": 2, "task": "reinforcement-learning", "annotator": "x"},
     "lora_dropout must be 0 with the loss ppo"),
])  # fmt: skip
def test_dropout_that_would_not_act_is_refused(command, flags, message, world, tmp_path, capsys):
    assert run(command, world, tmp_path / "run", model="lm", **flags) == 2
    assert message in capsys.readouterr().err
