"""Bad input: an error of one exact type that names what is wrong; nothing has changed by then."""

import math
import threading

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

import fastrl
from fastrl import PPOConfig, PPOTrainer, RolloutEngine, TrainCallback, cli
from fastrl.alignment import make_loss
from fastrl.rewards.weighted import Rewards
from fastrl.run.checkpoints import BadCheckpoint, Checkpoints
from fastrl.run.folder import RunFolder
from fastrl.run.lock import FolderInUse
from tests import tiny_models
from tests.bits import bits, differing
from tests.golden import tiny
from tests.patience import LONG
from tests.together import together

NAN = math.nan
PROMPTS = ["w3 w4", "w5 w6", "w7 w8", "w9"]
IDS = [torch.tensor([3, 4]), torch.tensor([5])]


def zero(completions, **_):
    return [0.0] * len(completions)


_over = threading.Event()  # the tests of this file


def hangs(completions, **_):
    _over.wait(LONG)


@pytest.fixture(autouse=True, scope="module")
def _hangs_end():
    yield
    _over.set()


def fails(completions, **_):
    raise LookupError("the judge is gone")


@pytest.fixture(scope="module")
def trainer():
    config = PPOConfig(batch_size=2, ppo_epochs=1, on_nonfinite="raise")
    return PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())


def of(dataset, **columns):
    return {"prompts": None, "dataset": dataset, **columns}


LABELLED = Dataset.from_dict({"text": PROMPTS, "label": [0] * len(PROMPTS)})
# Arguments of train(), with the type of the error and a part of its message.
TRAIN = [
    ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
    ({"prompts": None}, ValueError, "nothing to train on: pass prompts or dataset"),
    ({"prompts": "w3 w4"}, ValueError, "prompts must be a list of texts, got the text 'w3 w4'"),
    ({"prompts": 5}, ValueError, "prompts must be a list of texts, got 5"),
    ({"prompts": []}, ValueError, "prompts is empty: pass at least one"),
    ({"eval_prompts": []}, ValueError, "eval_prompts is empty: pass at least one"),
    ({"eval_prompts": ["w3", "w4", ""]}, ValueError, r"eval_prompts\[2\] is empty"),
    (of(Dataset.from_dict({"prompt": []})), ValueError, "the dataset has no rows"),
    (of({"w3"}), ValueError, "a set has no columns and rows"),
    (of([{"prompt": "w3"}]), ValueError, "1 prompts are fewer than batch_size=2"),
    (of(["w3"]), TypeError, "row 0 is a str: rows are dicts by column"),
    (of(LABELLED), ValueError, r"columns are text, label: .*prompt_column"),
    (of(LABELLED, prompt_column="question"), ValueError,
     r"no column 'question'.*columns are text, label: .*prompt_column"),
    ({"eval_every": NAN}, TypeError, "eval_every must be a whole number, got nan"),
    ({"eval_every": 1.5}, TypeError, "eval_every must be a whole number, got 1.5"),
    ({"save_every": NAN}, TypeError, "save_every must be a whole number, got nan"),
    ({"keep_last": 1.5}, TypeError, "keep_last must be a whole number, got 1.5"),
    ({"overwrite": "no"}, TypeError, "overwrite must be True or False, got 'no'"),
    ({"missing_eos_penalty": "1"}, TypeError,
     "missing_eos_penalty must be a number or None, got '1'"),
    ({"callbacks": None}, TypeError, "callbacks must be a list of TrainCallback objects, got None"),
    ({"callbacks": [TrainCallback]}, TypeError,
     r"callbacks\[0\] is the class TrainCallback.*: make one"),
    ({"callbacks": [TrainerCallback()]}, TypeError,
     r"callbacks\[0\] .*lacks on_samples, on_step, on_eval"),
    ({"prompts": ["w3"]}, ValueError, r"1 prompts are fewer than batch_size=2"),
    ({"prompts": ["w3", ""]}, ValueError, r"prompts\[1\] is empty"),
    ({"prompts": ["w3 " * 60, "w3"]}, ValueError, r"prompts\[0\] has 60 tokens"),
    ({"dataset": [1]}, ValueError, "pass prompts or dataset, not both"),
    ({"long_prompts": "cut"}, ValueError, "unknown long_prompts 'cut'"),
    ({"generation_kwargs": {"temperature": 2.0}}, ValueError, "temperature"),
    ({"generation_kwargs": {"max_new_tokens": 0}}, ValueError, "max_new_tokens"),
    ({"reward_fn": 3}, TypeError, "reward_fn"),
    ({"reward_fn": []}, ValueError, "reward_fn"),
    ({"reward_fn": lambda **_: [0.0]}, ValueError, "1 rewards for 2 completions"),
    ({"reward_fn": lambda **_: "good"}, ValueError, "it must return a list"),
    ({"reward_fn": lambda **_: [0.0, NAN]}, ValueError,
     r"returned nan for completion 1 \(prompt 'w"),
    ({"reward_fn": lambda **_: [-math.inf, 1.0]}, ValueError, "returned -inf for completion 0"),
    ({"reward_fn": lambda **_: [1.0, None]}, ValueError,
     r"no reward function judges completion 1 \(prompt 'w"),
    ({"reward_fn": lambda **_: ["good", 1.0]}, ValueError, "returned 'good' for completion 0"),
    ({"reward_fn": hangs, "reward_timeout": 0.05}, TimeoutError, "hangs.* reward_timeout"),
    ({"reward_fn": fails}, LookupError, "the judge is gone"),
    ({"reward_weights": [1.0, 2.0]}, ValueError, "reward_weights"),
    ({"reward_timeout": 0}, ValueError, "reward_timeout"),
    ({"reward_retries": -1}, ValueError, "reward_retries"),
    ({"reward_batch_size": 0}, ValueError, "reward_batch_size"),
    ({"resume": True}, ValueError, "resume needs a folder: pass output"),
    ({"overwrite": True}, ValueError, "overwrite needs a folder: pass output"),
    ({"output": "new", "resume": True, "overwrite": True}, ValueError, "exclude each other"),
    ({"save_every": -1, "output": "new"}, ValueError, "save_every must be 0 or more"),
    ({"keep_last": -1, "output": "new"}, ValueError, "keep_last must be 0 or more"),
    ({"output": "strangers"}, ValueError, "not a run's .precious"),
    ({"output": "afile"}, ValueError, "afile is a file, name a folder"),
    ({"output": ""}, ValueError, "output is empty: name a folder"),
    ({"output": "locked"}, FolderInUse, r"being written by another run \(process"),
    ({"output": "new", "resume": "nowhere"}, FileNotFoundError, "there is no folder nowhere"),
    ({"output": "damaged", "resume": True}, BadCheckpoint, "no checkpoint in .* is whole"),
    ({"output": "run"}, ValueError, "holds a run already"),
]  # fmt: skip


def ppo(**settings):
    return PPOTrainer(PPOConfig(**settings), tiny_models.policy(), None, tiny.tokenizer())


OTHERS = {
    "a tracker that is not known": (lambda: ppo(log_with="wandbb"), ValueError,
     "unknown tracker log_with='wandbb'"),
    "what accelerate does not take": (lambda: ppo(accelerator_kwargs={"fp7": 1}), ValueError,
     "accelerator_kwargs.*no 'fp7'"),
    "a loss that is not known": (lambda: make_loss("dpa"), ValueError, "dpa"),
    "a loss's coefficient": (lambda: make_loss("dpo", beta=-1.0), ValueError, "beta"),
    "a loss's name of one": (lambda: make_loss("dpo", gamma=1.0), ValueError, "gamma"),
    "no reward function": (lambda: Rewards([]), ValueError, "reward_fn"),
    "a rollout of no slots": (lambda: RolloutEngine(tiny_models.policy(), tiny.tokenizer(), 0),
     ValueError, "max_slots must be at least 1"),
    "shared layers that are not there": (
        lambda: fastrl.create_reference_model(tiny_models.policy(), num_shared_layers=9),
        ValueError,
        "num_shared_layers must lie between",
    ),
    "the folder of no run": (lambda: RunFolder.open("nowhere"), FileNotFoundError,
     "nowhere holds no run"),
}  # fmt: skip


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "precious").write_text("weights")
    for name in ("run", "damaged"):
        folder = RunFolder(name)
        folder.begin()
        with Checkpoints(folder.checkpoints).new(1) as part:
            (part / "state.json").write_text("{}")
    (tmp_path / "damaged" / "checkpoints" / "checkpoint-1" / "state.json").write_text("[]")
    locked = RunFolder("locked")
    with locked.claim():
        yield tmp_path


def content(folder):
    """Of all files but what Python compiles of a reward's module."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path: path.read_bytes() for path in files if path.parent.name != "__pycache__"}


@pytest.mark.filterwarnings("ignore:.*is damaged")
@together(("arguments", "kind", "said"), TRAIN)
def test_a_run_is_refused(arguments, kind, said, trainer, folders):
    before, files = bits(trainer), content(folders)
    settings = {
        "reward_fn": zero, "prompts": PROMPTS, "steps": 1,
        "generation_kwargs": {"max_new_tokens": 2}, "progress": False, **arguments,
    }  # fmt: skip
    with pytest.raises(kind, match=said) as error:
        trainer.train(settings.pop("reward_fn"), **settings)
    assert error.type is kind
    after = bits(trainer)
    if callable(arguments.get("reward_fn")):  # its completions were drawn by then
        drawn = ("/random", "/rollouts", "/prompts")
        before, after = (
            {k: v for k, v in x.items() if not k.startswith(drawn)} for x in (before, after)
        )
    assert differing(before, after) == []
    assert content(folders) == files


@together("name", OTHERS)
def test_a_call_is_refused(name):
    call, kind, said = OTHERS[name]
    with pytest.raises(kind, match=said) as error:
        call()
    assert error.type is kind


COMMANDS = [
    ("ppo", {"steps": 0}, "steps must be"),
    ("ppo", {"steps": "many"}, "argument --steps"),
    ("ppo", {"stepz": 3}, "--stepz"),
    ("ppo", {"max-new-tokens": 0}, "max_new_tokens must be at least 1"),
    ("ppo", {"top-p": 2.0}, r"top_p must lie in (0, 1]"),
    ("ppo", {"lora-dropout": 0.1}, "lora_dropout must be 0"),
    ("ppo", {"dtype": "int4"}, "unknown dtype 'int4'"),
    ("ppo", {"seed": -1}, "seed must lie between"),
    ("ppo", {"model": "nowhere"}, "nowhere"),
    ("ppo", {"dataset": "nowhere.jsonl"}, "nowhere.jsonl"),
    ("ppo", {"reward": "rewards.py:none"}, "'none'"),
    ("ppo", {"reward": "rewards.py"}, "name the reward function"),
    ("ppo", {"reward-timeout": -1}, "reward_timeout"),
    ("ppo", {"log-with": "paper"}, "log_with='paper'"),
    ("ppo", {"save-every": -1}, "save_every must be 0 or more"),
    ("ppo", {"resume": "nowhere"}, "there is no folder nowhere"),
    ("ppo", {"output": "strangers"}, "holds files that are not a run's"),
    ("ppo", {"output": "run"}, "holds a run already (checkpoint-1)"),
    ("ppo", {"output": "run", "resume": "latest", "overwrite": "true"}, "exclude each other"),
    ("ppo", {"output": "locked"}, "is being written by another run"),
    ("ppo", {"output": "damaged", "resume": "latest"}, "no checkpoint in"),
    ("grpo", {"group-size": 1}, "group_size"),
    ("grpo", {"batch-size": 6, "group-size": 4}, "group_size"),
]


@pytest.fixture
def given(world, folders):
    for name in ("lm", "reviews.jsonl", "rewards.py"):
        (folders / name).symlink_to(world / name)
    return folders


@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize(("command", "flags", "said"), COMMANDS)
def test_a_command_is_refused(command, flags, said, given, capsys):
    files = content(given)
    settings = {
        "model": "lm", "dataset": "reviews.jsonl", "reward": "rewards.py:length", "prompt-words": 5,
        "output": "new", "steps": 1, "batch-size": 8, **flags,
    }  # fmt: skip
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    assert cli.main([command, *words]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("fastrl: error: ")
    assert said in last
    assert content(given) == files
