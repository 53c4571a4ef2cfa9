"""``fastrl ppo`` from end to end, on tiny models and local files."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
)

from fastrl import cli
from fastrl.jobs.ppo import with_columns
from fastrl.models import AutoModelForCausalLMWithValueHead


def arguments(world, output, reward=None, /, **flags) -> list[str]:
    settings = {
        "model": world / "lm",
        "dataset": world / "reviews.jsonl",
        "reward": reward or world / "clf",
        "output": output,
        "prompt-words": 5,
        "max-new-tokens": 6,
        "steps": 2,
        "batch-size": 8,
        "mini-batch-size": 4,
        "ppo-epochs": 1,
        "eval-prompts": 10,
        "learning-rate": "1e-3",
        **flags,
    }
    return ["ppo", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


def test_classifier_reward_leaves_a_model_and_a_report(world, tmp_path, capsys):
    assert cli.main(arguments(world, tmp_path / "run")) == 0
    run = tmp_path / "run"
    assert "10 held-out prompts: mean reward" in capsys.readouterr().out
    assert (run / "report.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"objective/kl", "reward/mean", "time/rollout"} <= set().union(*rows)
    summary = json.loads((run / "summary.json").read_text())
    assert {"reward_before", "reward_after", "reward_gain_in_sems", "kl_after"} <= set(summary)
    assert summary["job"]["prompt_words"] == 5
    assert summary["eval_prompts"] == 10

    assert AutoTokenizer.from_pretrained(run / "model").eos_token == "<eos>"
    tuned = AutoModelForCausalLM.from_pretrained(run / "model")
    start = AutoModelForCausalLM.from_pretrained(world / "lm")
    assert not torch.equal(tuned.transformer.wte.weight, start.transformer.wte.weight)
    with_head = AutoModelForCausalLMWithValueHead.from_pretrained(run / "model")
    torch.testing.assert_close(
        with_head.pretrained_model.transformer.wte.weight, tuned.transformer.wte.weight
    )


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_grpo_leaves_a_plain_model_and_a_report(world, tmp_path, capsys, advantage):
    run = tmp_path / "run"
    flags = {"advantage": advantage, "group-size": 4}
    words = arguments(world, run, f"{world / 'rewards.py'}:length", **flags)
    assert cli.main(["grpo", *words[1:]]) == 0
    assert "10 held-out prompts: mean reward" in capsys.readouterr().out
    assert (run / "report.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"groups/no_spread", "ppo/loss/kl"} <= set().union(*rows)
    assert "ppo/loss/value" not in set().union(*rows)
    settings = json.loads((run / "summary.json").read_text())["ppo"]
    assert (settings["advantage"], settings["init_kl_coef"]) == (advantage, 0.04)
    tuned = AutoModelForCausalLM.from_pretrained(run / "model")
    start = AutoModelForCausalLM.from_pretrained(world / "lm")
    assert not torch.equal(tuned.transformer.wte.weight, start.transformer.wte.weight)


def test_a_fixed_length_is_that_of_completions():
    from fastrl.jobs.ppo import GRPOFlags, PPOJob

    job = PPOJob(model="m", dataset="d", reward="r", max_new_tokens=9)
    assert GRPOFlags().config_for(job).loss_norm_length == 9
    assert GRPOFlags(loss_norm_length=5).config_for(job).loss_norm_length == 5


@pytest.mark.parametrize("eval_prompts", [0, 10])
def test_function_reward_reads_the_data_sets_columns(world, tmp_path, eval_prompts):
    reward = f"{world / 'rewards.py'}:by_label"
    flags = {"eval-prompts": eval_prompts}
    assert cli.main(arguments(world, tmp_path / "run", reward, **flags)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert ("reward_gain" in summary) == (eval_prompts > 0)


def test_evaluation_prompts_bring_their_own_columns():
    def reward(prompts, completions, completion_ids, answer):
        return [float(a == c) for a, c in zip(answer, completions, strict=True)]

    rows = Dataset.from_dict({"prompt": ["p", "q"], "answer": ["1", "2"]})
    wrapped = with_columns(reward, rows)
    ids = [[0], [0]]
    assert wrapped(prompts=["q", "p"], completions=["2", "3"], completion_ids=ids) == [1.0, 0.0]
    given = wrapped(
        prompts=["x", "y"], completions=["5", "6"], completion_ids=ids, answer=["5", ""]
    )
    assert given == [1.0, 0.0]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_saves_an_adapter(world, tmp_path):
    reward = f"{world / 'rewards.py'}:length"
    assert cli.main(arguments(world, tmp_path / "run", reward, **{"lora-r": 2})) == 0
    assert (tmp_path / "run" / "model" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prompt-column": "words"}, "no column 'words': its columns are text, label"),
        ({"dataset": "gone.jsonl"}, "there is no data set at gone.jsonl"),
        ({"reward": "gone:f"}, "there is no module 'gone'"),
        ({"eval-prompts": 1000}, "leave none to train on"),
        ({"reward-label": "happy"}, "no label 'happy'"),
        ({"mini-batch-size": 3}, "must be a multiple of mini_batch_size"),
        ({"model": "no/such/directory"}, "no/such/directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_two(world, tmp_path, capsys, flags, message):
    assert cli.main(arguments(world, tmp_path / "run", **flags)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert not (tmp_path / "run").exists()
