"""``fastrl ppo`` and ``fastrl grpo`` with a teacher: trained, resumed, planned and replayed."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fastrl import cli
from fastrl.data.tables import load_table
from fastrl.models.load import load_tokenizer
from fastrl.run.ledger import read_ledger

pytestmark = [
    pytest.mark.filterwarnings("ignore:the KL estimate is negative"),
    pytest.mark.filterwarnings("ignore:the LM head shares its weight with the embeddings"),
]


@pytest.fixture(scope="module")
def taught(world):
    """The world, with a teacher of another width and prompts that have hints."""
    tokenizer = load_tokenizer(world / "lm")
    torch.manual_seed(1)
    shape = {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 48}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(**shape, **ends, vocab_size=len(tokenizer))
    GPT2LMHeadModel(config).save_pretrained(world / "teacher")
    tokenizer.save_pretrained(world / "teacher")
    rows = load_table(str(world / "reviews.jsonl"))["text"]
    texts = [" ".join(text.split()[:4]) for text in rows]
    hinted = [{"prompt": x, "privileged_context": texts[i - 1]} for i, x in enumerate(texts)]
    (world / "hinted.jsonl").write_text("".join(json.dumps(x) + "\n" for x in hinted))
    return world


def arguments(world, command, output, **flags):
    settings = {
        "model": world / "lm", "dataset": world / "hinted.jsonl",
        "reward": f"{world / 'rewards.py'}:remainder", "output": output, "max-new-tokens": 6,
        "steps": 3, "batch-size": 8, "mini-batch-size": 4, "eval-prompts": 0, "save-every": 2,
        "learning-rate": "1e-2", "teacher-model": world / "teacher", "teacher-kl-coef": 0.5,
        **({"group-size": 4} if command == "grpo" else {}), **flags,
    }  # fmt: skip
    return [command, *(word for k, value in settings.items() for word in (f"--{k}", str(value)))]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("command", "flags"), [
    ("ppo", {}),
    ("grpo", {"teacher-beta": 0.5}),
    ("ppo", {"teacher-kl-in": "reward"}),
])  # fmt: skip
def test_a_run_with_a_teacher_is_trained_and_replayed(command, flags, taught, tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(arguments(taught, command, run, **flags)) == 0
    in_reward = flags.get("teacher-kl-in") == "reward"
    name = "objective/teacher_kl" if in_reward else "ppo/policy/divergence"
    assert all(row[name] > 0 for row in metrics(run) if "ppo/loss/total" in row)
    tokenizer = load_tokenizer(taught / "lm")
    row = read_ledger(run / "ledger").to_pylist()[0]
    hints = {x["prompt"]: x["privileged_context"] for x in load_table(str(taught / "hinted.jsonl"))}
    read = f"{row['prompt']}\n\n{hints[row['prompt']]}"
    assert row["teacher_prompt_ids"] == tokenizer(read)["input_ids"]
    assert len(row["teacher_logprobs"]) == len(row["advantages"])
    for step in (2, 3):  # from the beginning, and from a checkpoint
        capsys.readouterr()
        assert cli.main(["replay", str(run), "--step", str(step)]) == 0


def test_a_run_with_a_teacher_goes_on_as_if_it_had_not_been_cut(taught, tmp_path):
    flags = {"teacher-model-kind": "ema"}
    words = arguments(taught, "ppo", tmp_path / "whole", **flags)
    without = words.index("--teacher-model")
    del words[without : without + 2]
    assert cli.main(words) == 0
    cut = [str(tmp_path / "cut") if x == str(tmp_path / "whole") else x for x in words]
    cut[cut.index("--steps") + 1] = "2"
    assert cli.main(cut) == 0
    cut[cut.index("--steps") + 1] = "3"
    assert cli.main([*cut, "--resume"]) == 0
    last = [metrics(tmp_path / run)[-1] for run in ("whole", "cut")]
    of_time = ("time/", "perf/")
    one, other = ({k: v for k, v in x.items() if not k.startswith(of_time)} for x in last)
    assert one == other


def test_a_plan_counts_the_teacher(taught, capsys):
    plans = []
    for words in ([], ["--teacher-kl-coef", "0.5", "--teacher-model", str(taught / "teacher")]):
        lengths = ["--prompt-tokens", "8", "--response-tokens", "8", "--as-json"]
        sizes = ["--batch-size", "8", "--group-size", "4"]
        method = ["--method", "grpo", "--model", str(taught / "lm")]
        assert cli.main(["plan", *method, *lengths, *sizes, *words]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    one, other = (plan["phases"]["update"]["by_kind"].get("reference", 0) for plan in plans)
    size = (taught / "teacher" / "model.safetensors").stat().st_size
    assert other - one == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize(("flags", "said"), [
    ({"teacher-kl-coef": 0}, "teacher_kl_coef is 0, so that nothing is learned of it"),
    ({"teacher-column": "of"}, "a dict of teachers"),
    ({"teacher-kl-in": "there"}, "teacher_kl_in"),
])  # fmt: skip
def test_what_cannot_be_is_an_error_before_anything_is_trained(
    flags, said, taught, tmp_path, capsys
):
    assert cli.main(arguments(taught, "ppo", tmp_path / "run", **flags)) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
