"""A failure ends a run with a clear error and its state saved; resumed, it ends as if there had
been none."""

import os
import pickle
from pathlib import Path

import pytest

from fastrl import PPOConfig, PPOTrainer
from fastrl.run.checkpoints import Checkpoints
from fastrl.run.folder import RunFolder
from fastrl.tools.reports.curves import RunCurves
from fastrl.tools.reports.doctor import examine
from tests import tiny_models
from tests.faults.test_kills import command, results
from tests.golden import tiny

REWARDS = """\
import math, time
from pathlib import Path

broken = Path(__file__).with_name("broken")
calls = 0

def length(completion_ids, **_):
    return [float(len(set(ids))) for ids in completion_ids]

def fails(how):
    global calls
    calls += 1
    return broken.exists() and broken.read_text() == how and calls == CALL

def raises(completion_ids, **_):
    if fails("raises"):
        raise LookupError("the judge is gone")
    return length(completion_ids)

def hangs(completion_ids, **_):
    if fails("hangs"):
        time.sleep(600)
    return length(completion_ids)

def miscounts(completion_ids, **_):
    return length(completion_ids)[fails("miscounts"):]

def is_nan(completion_ids, **_):
    return [math.nan] * len(completion_ids) if fails("is_nan") else length(completion_ids)
"""
SAID = {
    "raises": "raises raised LookupError: the judge is gone",
    "hangs": "did not return within reward_timeout=2 s",
    "miscounts": "returned 7 rewards for 8 completions",
    "is_nan": "nan",
}


@pytest.mark.parametrize(("how", "call"), [*((how, 6) for how in SAID), ("raises", 5)], ids=str)
def test_a_reward_that_fails_costs_nothing(how, call, data, zygote, tmp_path):
    """The sixth call is that of step 4, the fifth the evaluation's after step 3."""
    (data / "fragile.py").write_text(REWARDS.replace("CALL", str(call)))
    flags = {"reward": f"fragile.py:{how}", "reward-timeout": 2, "save-every": 0}
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert zygote.run(command("ppo", data, straight, **flags)).status == 0
    (data / "broken").write_text(how)
    failed = zygote.run(command("ppo", data, folder, **flags))
    (data / "broken").unlink()
    assert failed.status == 2, failed.output
    last = failed.output.strip().splitlines()[-1]
    assert last.startswith("fastrl: error: ")
    assert how in last
    assert SAID[how] in last
    assert "the state is saved in" in failed.output
    resumed = zygote.run([*command("ppo", data, folder, **flags), "--resume"])
    assert resumed.status == 0, resumed.output
    assert results(folder) == results(straight)


@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_a_full_disk_leaves_the_last_good_checkpoint(name, data, zygote, tmp_path):
    straight, folder = tmp_path / "straight", tmp_path / "run"
    assert zygote.run(command(name, data, straight)).status == 0
    steps = "steps" if name == "ppo" else "max-steps"
    begun = {steps: 2, "eval-every" if name == "ppo" else "eval-steps": 3}
    assert zygote.run(command(name, data, folder, **begun)).status == 0
    arguments = [*command(name, data, folder), "--resume"]
    largest = max(
        path.stat().st_size for path in folder.glob("checkpoints/checkpoint-2/*.safetensors")
    )
    full = zygote.run(arguments, file_size=largest // 2)
    assert full.status == 2, full.output
    last = full.output.strip().splitlines()[-1]
    assert "could not be saved" in last
    assert "the last good checkpoint is checkpoint-2" in last
    checkpoints = Checkpoints(folder / "checkpoints")
    assert checkpoints.newest_good() == checkpoints.path(2)
    assert not list((folder / "checkpoints").glob(".saving*"))


class Canary:
    """An object whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_never_opened(data, zygote, tmp_path):
    folder, sung = tmp_path / "run", tmp_path / "sung"
    assert zygote.run(command("ppo", data, folder, steps=3)).status == 0
    song = pickle.dumps(Canary(sung))
    for place in (folder, folder / "checkpoints" / "checkpoint-3", folder / "model"):
        for name in ("state.pkl", "optimizer.pt", "pytorch_model.bin", "policy.bin", "random.pth"):
            (place / name).write_bytes(song)
    assert zygote.run([*command("ppo", data, folder), "--resume"]).status == 0
    for command_line in (
        ["report", str(folder)],
        ["doctor", str(folder)],
        ["samples", str(folder)],
    ):
        assert zygote.run(command_line).status in (0, 1)
    assert not sung.exists()
    pickle.loads(song)
    assert sung.exists(), "the canary would have sung"


@pytest.mark.filterwarnings("ignore:.*suppress_tokens")
@pytest.mark.filterwarnings("ignore:the KL estimate is negative")
def test_a_run_without_any_eos_ends_and_is_named_by_the_doctor(tmp_path):
    config = PPOConfig(batch_size=8, mini_batch_size=4, learning_rate=1e-3)
    trainer = PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())
    result = trainer.train(
        lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        prompts=[f"w{i} w{i + 1}" for i in range(3, 14)],
        steps=8,
        generation_kwargs={"max_new_tokens": 6, "suppress_tokens": [tiny.EOS]},
        missing_eos_penalty=1.0,
        progress=False,
        output=tmp_path / "run",
    )
    for row in result.history:
        assert (row["tokens/eos_share"], row["tokens/cut_share"]) == (0.0, 1.0)
        assert row["tokens/responses_len_mean"] == 6
        assert row["ppo/mean_scores"] == pytest.approx(row["reward/mean"] - 1.0, rel=1e-5)
        assert row["ppo/optimizer_steps"] == 8
    examined = examine(RunCurves.of(RunFolder.open(tmp_path / "run")))
    assert "responses cut by length" in [finding.name for finding in examined.findings]
