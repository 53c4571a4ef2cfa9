"""Commands that a launcher starts on several processes do what one process does."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from fastrl import cli
from fastrl.run.ledger import read_ledger
from tests.processes.commands import run_commands
from tests.processes.launch import COUNTS, accelerate_launch, assert_close, fork, launch, torchrun

LAUNCHERS = {"torchrun": torchrun, "accelerate launch": accelerate_launch}
ALL = COUNTS != (2,)
# Of the ledger.
EXACT = ["step", "sample", "prompt_row", "prompt_ids", "completion_ids", "finish_reason", "seed"]
EXACT += ["sample_id", "number", "weights_version"]
CLOSE = ["logprobs", "values", "advantages", "reward", "score"]

# Three steps on 16 samples, or 8 examples, of all processes.
FROM_REWARDS = {
    "dataset": "reviews.jsonl", "prompt-words": 5, "max-new-tokens": 9, "steps": 3,
    "eval-prompts": 11, "ppo-epochs": 1, "learning-rate": "1e-3", "save-every": 2,
}  # fmt: skip
FITTED = {
    "max-steps": 3, "eval-examples": 11, "optim": "sgd", "learning-rate": 0.1, "logging-steps": 1,
    "save-strategy": "no",
}  # fmt: skip
COMMANDS = {
    "sft": {"model": "lm", "dataset": "reviews.jsonl", **FITTED},
    "reward": {"model": "clf1", "dataset": "pairs.jsonl", **FITTED},
    "align": {"model": "lm", "dataset": "prompted.jsonl", "loss": "dpo", **FITTED},
    "align online": {
        "model": "lm", "dataset": "prompted.jsonl", "loss": "dpo", "task": "online-pairwise",
        "annotator": "rewards.py:remainder", "max-new-tokens": 9, "ledger": "true", **FITTED,
    },
    "grpo": {"model": "lm", "reward": "rewards.py:by_label", "group-size": 4, **FROM_REWARDS},
    "ppo": {"model": "lm", "reward": "clf", **FROM_REWARDS},
}  # fmt: skip


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def words(command, world, output, processes):
    """A command's words, the same for all processes together."""
    settings = {**COMMANDS[command], "output": output}
    for name in ("model", "dataset", "reward", "annotator"):
        if name in settings:
            settings[name] = world / settings[name]
    sizes = {"per-device-train-batch-size": 8, "per-device-eval-batch-size": 8}
    if "reward" in settings:
        sizes = {"batch-size": 16, "mini-batch-size": 16}
    settings |= {name: size // processes for name, size in sizes.items()}
    return [command.split()[0], *(str(word) for k, v in settings.items() for word in (f"--{k}", v))]


def list_commands(names, world, folder, processes):
    """Writes commands to a file, with outputs in its folder."""
    file = folder / "commands.json"
    file.write_text(json.dumps([words(name, world, folder / name, processes) for name in names]))
    return file


@pytest.fixture(scope="module")
def given(world):
    """The world without dropout, whose draws are each process's; with a reward model of one label,
    and pairs that have prompts."""
    shutil.copytree(world / "clf", world / "clf1")
    model = AutoModelForSequenceClassification.from_pretrained(
        world / "clf", num_labels=1, ignore_mismatched_sizes=True
    )
    model.save_pretrained(world / "clf1")
    for name in ("lm", "clf1"):
        config = AutoConfig.from_pretrained(world / name)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        config.save_pretrained(world / name)
    pairs = rows(world / "pairs.jsonl")
    prompted = [json.dumps({"prompt": "the film", **pair}) + "\n" for pair in pairs]
    (world / "prompted.jsonl").write_text("".join(prompted))
    return world


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory):
    """A folder with what each command leaves that one process runs."""
    folder = tmp_path_factory.mktemp("alone")
    ended = fork(run_commands, list_commands(COMMANDS, given, folder, 1), processes=1)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


@pytest.fixture(scope="module", params=list(LAUNCHERS) if ALL else ["accelerate launch"])
def together(request, given, count, tmp_path_factory):
    """The same of several processes."""
    folder = tmp_path_factory.mktemp("together")
    file = list_commands(COMMANDS, given, folder, count)
    starter = LAUNCHERS[request.param](count)
    ended = launch("-m", "tests.processes.commands", file, starter=starter)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder


def weights(folder):
    """The saved weights, without GPT-2's biases of keys, whose gradient is rounding."""
    found = load_file(folder / "model" / "model.safetensors")
    for name in [name for name in found if name.endswith("attn.c_attn.bias")]:
        queries, _, values = found[name].chunk(3)
        found[name] = torch.cat([queries, values])
    return found


def numbers(row):
    """A row of metrics without speeds, and without what counts padding."""
    left_out = "time|per_second|seconds|perf/|total_flos"
    return {k: v for k, v in row.items() if not re.search(left_out, k)}


def assert_same_run(one, other):
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert_close(*([numbers(row) for row in rows(each / name)] for each in (one, other)), name)
    before, after = (weights(each) for each in (one, other))
    assert_close(before, after)
    if (one / "ledger").is_dir():
        exact = [read_ledger(each / "ledger", EXACT) for each in (one, other)]
        assert exact[0].num_rows == 48
        assert exact[0].equals(exact[1])
        assert_close(*(read_ledger(each / "ledger", CLOSE).to_pydict() for each in (one, other)))
    summaries = [json.loads((each / "summary.json").read_text()) for each in (one, other)]
    assert_close(*(numbers({**s, "settings": 0, "job": 0}) for s in summaries), "summary.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_on_several_processes_what_it_does_on_one(alone, together, command):
    assert_same_run(alone / command, together / command)


@pytest.mark.parametrize(("command", "step", "source", "same"), [
    ("grpo", 3, "checkpoint-2: 0 updates", "identical"),
    ("grpo", 2, "the run's beginning: 1 update", "identical but for rounding"),
    ("align online", 3, "the run's beginning: 2 updates", "identical but for rounding"),
])  # fmt: skip
def test_a_run_of_several_processes_is_replayed_by_one(
    together, capsys, command, step, source, same
):
    """From its checkpoint to the bit."""
    assert cli.main(["replay", str(together / command), "--step", str(step)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"step {step}, from {source}"
    assert shown[-1] == f"16 of 16 samples are {same}"


@pytest.mark.parametrize("launcher", LAUNCHERS if ALL else ["torchrun"])
def test_a_launcher_starts_fastrl_ppo(alone, given, tmp_path, launcher, count):
    ppo = words("ppo", given, tmp_path / "ppo", count)
    ended = launch("-m", "fastrl", *ppo, starter=LAUNCHERS[launcher](count))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_same_run(alone / "ppo", tmp_path / "ppo")
    said = ended.stdout + ended.stderr
    once = ("PPO reference: copy", "step 3: held-out reward", "held-out prompts: mean reward")
    assert [said.count(text) for text in once] == [1, 1, 1]
    assert "Loading weights" not in said  # bars of libraries stay out of files


def test_an_error_names_the_process(given, tmp_path, count):
    file = list_commands(["ppo"], given, tmp_path, count)
    (given / "reviews.jsonl").rename(tmp_path / "moved")
    try:
        ended = fork(run_commands, file, processes=count)
    finally:
        (tmp_path / "moved").rename(given / "reviews.jsonl")
    assert ended.returncode != 0
    lines = [line for line in ended.stderr.splitlines() if "error: " in line]
    assert lines
    for line in lines:
        assert re.match(rf"fastrl \(process \d of {count}\): error: .*reviews.jsonl", line)
