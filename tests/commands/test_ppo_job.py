"""``fastrl ppo`` from end to end, on tiny models and local files."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastrl import cli
from fastrl.models import AutoModelForCausalLMWithValueHead
from fastrl.rewards.classifier import ClassifierReward


def arguments(world, output, reward=None, /, **flags) -> list[str]:
    settings = {
        "model": world / "lm", "dataset": world / "reviews.jsonl",
        "reward": reward or world / "clf", "output": output, "prompt-words": 5, "max-new-tokens": 6,
        "steps": 2, "batch-size": 8, "mini-batch-size": 4, "ppo-epochs": 1, "eval-prompts": 10,
        "learning-rate": "1e-3", **flags,
    }  # fmt: skip
    return ["ppo", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


@pytest.mark.usefixtures("figures")
def test_classifier_reward_leaves_a_model_and_a_report(world, tmp_path, capsys):
    assert cli.main(arguments(world, tmp_path / "run")) == 0
    run, said = tmp_path / "run", capsys.readouterr()
    assert "10 held-out prompts: mean reward" in said.out
    assert "reviews.jsonl has no column 'prompt': prompts are its column 'text' (--prom" in said.err
    assert (run / "report.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"objective/kl", "reward/mean", "time/rollout"} <= set().union(*rows)
    summary = json.loads((run / "summary.json").read_text())
    assert {"reward_before", "reward_after", "reward_gain_in_sems", "kl_after"} <= set(summary)
    assert summary["job"]["prompt_words"] == 5
    assert summary["eval_examples"] == 10

    assert AutoTokenizer.from_pretrained(run / "model").eos_token == "<eos>"
    tuned = AutoModelForCausalLM.from_pretrained(run / "model")
    start = AutoModelForCausalLM.from_pretrained(world / "lm")
    assert not torch.equal(tuned.transformer.wte.weight, start.transformer.wte.weight)
    with_head = AutoModelForCausalLMWithValueHead.from_pretrained(run / "model")
    torch.testing.assert_close(
        with_head.pretrained_model.transformer.wte.weight, tuned.transformer.wte.weight
    )


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_grpo_leaves_a_plain_model_and_a_report(world, tmp_path, capsys, advantage):
    run = tmp_path / "run"
    flags = {"advantage": advantage, "group-size": 4}
    words = arguments(world, run, f"{world / 'rewards.py'}:remainder", **flags)
    assert cli.main(["grpo", *words[1:]]) == 0
    assert "10 held-out prompts: mean reward" in capsys.readouterr().out
    assert (run / "report.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {"groups/no_spread", "ppo/loss/kl"} <= set().union(*rows)
    assert "ppo/loss/value" not in set().union(*rows)
    settings = json.loads((run / "summary.json").read_text())["settings"]
    assert (settings["advantage"], settings["init_kl_coef"]) == (advantage, 0.04)
    tuned = AutoModelForCausalLM.from_pretrained(run / "model")
    start = AutoModelForCausalLM.from_pretrained(world / "lm")
    assert not torch.equal(tuned.transformer.wte.weight, start.transformer.wte.weight)


def test_a_folder_that_is_written_again_gets_the_card_of_the_new_model(world, tmp_path):
    for command, settings in (("ppo", {}), ("grpo", {"group-size": 4})):
        flags = {"steps": 1, "eval-prompts": 0, **settings}
        _, *rest = arguments(world, tmp_path / "run", **flags)
        assert cli.main([command, *rest, "--overwrite"]) == 0
    card = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "(GRPO)" in card
    assert "(PPO)" not in card


def test_a_fixed_length_is_that_of_completions():
    from fastrl.tools.commands.ppo import GRPOFlags, PPOJob

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


QUITS = """\
import sys
calls = []
{keyword} quits(completions, **columns):
    calls.append(1)
    if len(calls) == 3:
        sys.exit(0)
    return [1.0] * len(completions)
"""


@pytest.mark.filterwarnings("ignore:after ExitCalled the state is saved in")
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_reward_function_does_not_end_the_program(world, tmp_path, capsys, keyword):
    (tmp_path / "quits.py").write_text(QUITS.format(keyword=keyword))
    run, reward = tmp_path / "run", f"{tmp_path / 'quits.py'}:quits"
    flags = {"save-every": 0, "eval-prompts": 0, "steps": 5, "reward-retries": 2}
    assert cli.main(arguments(world, run, reward, **flags)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {reward} raised ExitCalled: it called sys.exit(0)" in said
    assert "quits.py, line 6)" in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_several_rewards_have_weights_and_names(world, tmp_path):
    reward, run = world / "rewards.py", tmp_path / "run"
    words = arguments(world, run, f"{reward}:length", steps=1)
    where = words.index("--reward") + 2
    words[where:where] = [
        f"{reward}:labelled", str(world / "clf"), "--reward-weights", "1", "0", "0",
    ]  # fmt: skip
    assert cli.main([*words, "--reward-batch-size", "3", "--reward-timeout", "30"]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = {name: value for row in rows for name, value in row.items()}
    assert numbers["reward/labelled/mean"] == 2.0
    assert numbers["reward/mean"] == numbers["reward/length/mean"]
    assert {"reward/length/mean", "reward/clf/std", "eval/reward/clf/mean"} <= set(numbers)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["job"]["reward_weights"] == [1.0, 0.0, 0.0]


def test_a_reward_may_be_a_text_or_a_list_in_a_configuration(tmp_path):
    from fastrl.tools.commands.flags import parse
    from fastrl.tools.commands.ppo import PPOFlags, PPOJob

    text = "model: m\ndataset: d\n"
    for said, read in (("f.py:a", ["f.py:a"]), ("[f.py:a, runs/b]", ["f.py:a", "runs/b"])):
        (tmp_path / "c.yaml").write_text(f"{text}reward: {said}\nreward_weights: null\n")
        job, _ = parse("ppo", [PPOJob, PPOFlags], [str(tmp_path / "c.yaml")])
        assert job.reward == read
    assert PPOJob(model="m", dataset="d", reward="f.py:a").reward == ["f.py:a"]


CHAT_REWARD = """
def gentle(prompts, completions, completion_ids, label):
    assert all(p[-1]["role"] == "user" for p in prompts)
    assert all(c[0]["role"] == "assistant" for c in completions)
    return [float(len(ids) + n) for ids, n in zip(completion_ids, label)]
"""
TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def chats(world, tmp_path_factory):
    """The models of ``world`` with a chat template, and prompts that are chats."""
    folder = tmp_path_factory.mktemp("chats")
    for name in ("lm", "clf"):
        shutil.copytree(world / name, folder / name)
        tokenizer = AutoTokenizer.from_pretrained(world / name)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / name)
    (folder / "rewards.py").write_text(CHAT_REWARD)
    rows = [json.loads(line) for line in (world / "reviews.jsonl").read_text().splitlines()]
    (folder / "chats.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "prompt": [{"role": "user", "content": " ".join(row["text"].split()[:5])}],
                    "label": row["label"],
                }
            )
            + "\n"
            for row in rows
        )
    )
    return folder


def chat_arguments(chats, output, reward, **flags):
    words = arguments(chats, output, reward, dataset=chats / "chats.jsonl", **flags)
    at = words.index("--prompt-words")
    return words[:at] + words[at + 2 :]


@pytest.mark.parametrize("command", ["ppo", "grpo"])
def test_prompts_may_be_chats(chats, tmp_path, command):
    flags = {"group-size": 4} if command == "grpo" else {}
    words = chat_arguments(
        chats, tmp_path / "run", f"{chats / 'rewards.py'}:gentle", steps=1, **flags
    )
    assert cli.main([command, *words[1:]]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_examples"] == 10
    assert summary["long_prompts_dropped"] == 0


def test_a_classifier_scores_the_conversation_by_its_own_template(chats, tmp_path, monkeypatch):
    seen = []
    score = ClassifierReward.score
    monkeypatch.setattr(
        ClassifierReward,
        "score",
        lambda self, texts, **kwargs: seen.extend(texts) or score(self, texts, **kwargs),
    )
    assert cli.main(chat_arguments(chats, tmp_path / "run", chats / "clf", steps=1)) == 0
    assert seen
    assert all(text.endswith("<eos>") for text in seen)


def test_a_classifier_without_a_template_refuses_chats(world, chats, tmp_path, capsys):
    assert cli.main(chat_arguments(chats, tmp_path / "run", world / "clf")) == 2
    assert "has no chat template, and the prompts are chats" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    ({"max-prompt-tokens": 4}, "max_prompt_tokens cuts texts, and column 'prompt' holds chat"),
    ({"prompt-words": 4}, "prompt_words cuts texts"),
])  # fmt: skip
def test_chats_are_not_cut(chats, tmp_path, capsys, flags, message):
    reward = f"{chats / 'rewards.py'}:gentle"
    words = chat_arguments(chats, tmp_path / "run", reward)
    words += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def with_a_long_row(world, tmp_path):
    rows = (world / "reviews.jsonl").read_text().splitlines()
    long = json.dumps({"text": " ".join(json.loads(rows[0])["text"].split() * 30), "label": 1})
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join([json.dumps({"text": " ", "label": 0}), *rows, long]) + "\n")
    return path


_EMPTY = pytest.mark.filterwarnings("ignore:1 of 62 prompts dropped")


@_EMPTY
def test_an_over_long_prompt_is_named_by_its_row_in_the_file(
    world, with_a_long_row, tmp_path, capsys
):
    flags = {"dataset": with_a_long_row, "prompt-words": 45, "eval-prompts": 5}
    reward = f"{world / 'rewards.py'}:length"
    assert cli.main(arguments(world, tmp_path / "run", reward, **flags)) == 2
    assert "row 61 of column 'prompt' has 45 tokens" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@_EMPTY
def test_over_long_prompts_are_dropped_and_counted(world, with_a_long_row, tmp_path):
    flags = {"dataset": with_a_long_row, "prompt-words": 45, "eval-prompts": 5, "steps": 1}
    words = arguments(world, tmp_path / "run", f"{world / 'rewards.py'}:by_label", **flags)
    with pytest.warns(UserWarning, match="leaves out 1 of"):
        assert cli.main([*words, "--long-prompts", "drop"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["long_prompts_dropped"] == 1


def test_the_demo_is_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["demo"]) == 2
    assert "fastrl demo runs as one process, and was started as 2" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "message"), [
    ({"prompt-column": "words"}, "no column 'words': its columns are text, label"),
    ({"dataset": "gone.jsonl"}, "there is no data set at gone.jsonl"),
    ({"reward": "gone:f"}, "there is no module 'gone'"),
    ({"eval-prompts": 1000}, "leave none to train on"),
    ({"reward-label": "happy"}, "no label 'happy'"),
    ({"reward-weights": "nan"}, "reward_weights[0] must be a finite number, got nan"),
    ({"reward-timeout": 0}, "reward_timeout must be a positive number of seconds"),
    ({"reward-retries": -1}, "reward_retries must be 0 or more, got -1"),
    ({"reward-batch-size": 0}, "reward_batch_size must be positive, got 0"),
    ({"mini-batch-size": 3}, "must be a multiple of mini_batch_size"),
    ({"model": "no/such/directory"}, "no/such/directory"),
])  # fmt: skip
def test_mistakes_are_one_line_and_exit_with_two(world, tmp_path, capsys, flags, message):
    assert cli.main(arguments(world, tmp_path / "run", **flags)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert not (tmp_path / "run").exists()
