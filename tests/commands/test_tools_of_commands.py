"""Tools, environments and rollout functions by ``fastrl grpo``, and its ledger of them."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from fastrl import cli
from fastrl.run.ledger import read_ledger
from tests import chat_tokenizer, tables
from tests.trl.test_tools import model

CODE = '''
import fastrl

calls = []

@fastrl.register_policy_loss("plain")
def plain(log_ratio, advantages, cliprange):
    return -advantages * log_ratio.exp()

def entered(completions, environments, **columns):
    return [float(len(calls))] * len(environments)

def reward(completions, completion_ids, **columns):
    assert "noted" not in columns or columns["noted"] == [7] * len(completions)
    return [float(len(ids) % 5) for ids in completion_ids]

def double(number: int) -> int:
    """Doubles.

    Args:
        number: What is doubled.
    """
    return 2 * number

class Room:
    def reset(self, **columns):
        calls.append(columns["start"])
        return f" You are in room {columns['start']}."

    def get_reward(self):
        return float(len(calls) % 3)

def respond(prompts, trainer):
    said = trainer.tokenizer(text=[f"{i} it is" for i in range(len(prompts))])["input_ids"]
    return {
        "prompt_ids": [[5, 6, 7]] * len(prompts), "completion_ids": said, "logprobs": None,
        "env_mask": [[1] * (len(x) - 1) + [0] for x in said], "noted": 7,
    }
'''


def run(folder: Path, *flags: str, reward: str | None = "reward") -> Path:
    start = folder / "start"
    model().save_pretrained(start)
    chat_tokenizer.tokenizer().save_pretrained(start)
    asked = ([{"role": "user", "content": f"{i}?"}] for i in range(4))
    rows = [{"prompt": said, "start": i} for i, said in enumerate(asked)]
    Dataset.from_list(rows).to_json(folder / "rows.jsonl")
    (folder / "code.py").write_text(CODE)
    words = [
        *("grpo", "--model", start, "--dataset", folder / "rows.jsonl", "--steps", 2),
        *(("--reward", f"{folder / 'code.py'}:{reward}") if reward else ()),
        *("--output", folder / "run"),
        *("--batch-size", 4, "--mini-batch-size", 4, "--group-size", 2, "--max-new-tokens", 8),
        *("--eval-prompts", 0, "--learning-rate", "1e-3", *flags),
    ]
    with tables.kept():  # the file registers a loss
        assert cli.main(list(map(str, words))) == 0
    return folder / "run"


@pytest.mark.usefixtures("figures")
def test_what_a_rollout_func_did_is_in_the_ledger(tmp_path: Path, capsys: pytest.CaptureFixture):
    place = run(tmp_path, "--rollout-func", f"{tmp_path / 'code.py'}:respond")
    rows = read_ledger(place / "ledger").to_pylist()
    assert [row["completion"] for row in rows] == ["0 it is", "1 it is", "2 it is", "3 it is"] * 2
    for row in rows:
        assert row["prompt_ids"] == [5, 6, 7]
        assert row["written"] == [True] * (len(row["completion_ids"]) - 1) + [False]
        assert len(row["advantages"]) == len(row["completion_ids"]) - 1
        assert row["seed"] is None
    capsys.readouterr()
    with tables.kept():
        assert cli.main(["replay", str(place), "--step", "2"]) == 2
    assert "step 2 came from a rollout_func, tools or an" in capsys.readouterr().err
    assert cli.main(["samples", str(place), "--step", "1", "--sample", "2"]) == 0
    assert "2 it is" in capsys.readouterr().out


@pytest.mark.usefixtures("figures")
def test_tools_and_environments(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    place = run(tmp_path, "--tools", f"{code}:double", "--environment", f"{code}:Room")
    rows = read_ledger(place / "ledger").to_pylist()
    for row in rows:
        assert "You are in room" in row["prompt"]
        assert '"name": "double"' in row["prompt"]
        assert row["reward"] == pytest.approx(row["reward/reward"] + row["reward/Room"])
        assert all(row["written"])
    metrics = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert {"tools/call_frequency", "tools/failure_frequency"} <= set().union(*metrics)


@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("reward", ["entered", None])
def test_a_file_is_one_module_whatever_flags_name_it(tmp_path: Path, reward: str | None) -> None:
    code = tmp_path / "code.py"
    flags = "--environment", f"{code}:Room", "--policy-loss", f"{code}:plain", "--ppo-epochs", "2"
    place = run(tmp_path, *flags, reward=reward)
    rows = read_ledger(place / "ledger").to_pylist()
    assert all(row["reward/Room"] == len(rows) * row["step"] / 2 % 3 for row in rows)
    if reward is not None:
        assert all(row["reward/entered"] == len(rows) * row["step"] / 2 for row in rows)
