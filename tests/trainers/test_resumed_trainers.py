"""Trainers on transformers' loop, behind each door: what they resume, and how they evaluate."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from fastrl.run.metric_means import MetricMeans
from fastrl.run.processes import OneProcess
from tests import tiny_models
from tests.resuming import assert_resumes, assert_same_run, resumed, seed, with_dropout
from tests.trainers.conftest import Make, pairs, reward, reward_model, sft, texts
from tests.trl import test_dpo, test_kto, test_online

pytestmark = pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)


def prompts(count: int, seed: int = 0) -> Dataset:
    return test_online.prompts(count * (seed + 1)).select(range(count * seed, count * (seed + 1)))


def completions(count: int, seed: int = 0) -> Dataset:
    return test_kto.completions([i % 3 != 1 for i in range(count)], seed)


# By door: its trainer, the model that it learns, and data, so many rows by a seed.
DOORS: dict[str, tuple[Make, Make, Make]] = {
    "SFT": (sft, tiny_models.language_model, texts),
    "reward": (reward, partial(reward_model, "gpt2"), pairs),
    "DPO": (test_dpo.trainer, partial(tiny_models.language_model, "llama"), pairs),
    "KTO": (test_kto.trainer, partial(tiny_models.language_model, "llama"), completions),
    "GRPO": (partial(test_online.make, kind="grpo"), tiny_models.language_model, prompts),
    "RLOO": (partial(test_online.make, kind="rloo"), tiny_models.language_model, prompts),
}


def through(
    door: str, folder: Path, count: int = 8, held_out: int = 0, dtype: Any = None, **settings: Any
) -> Any:
    """A trainer of so many rows, which draws random numbers in each step."""
    make, model, data = DOORS[door]
    if held_out:
        settings["eval_dataset"] = data(held_out, seed=1)
    rows = {"data" if door in ("SFT", "reward") else "train_dataset": data(count)}
    return make(folder, model=with_dropout(model().to(dtype)), **rows, **settings)


# Logs lie between the checkpoints, and every second of these between two logs.
SAVING = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
# An epoch of 14 texts has seven mini-batches: with two or three in a step, its last step has fewer,
# and an evaluation follows.
SFT = {
    "count": 14, "held_out": 4, "max_steps": 6, "per_device_train_batch_size": 2, "max_length": 20,
    "eval_strategy": "epoch",
}  # fmt: skip
REWARD = {
    "count": 10, "held_out": 4, "max_steps": 6, "per_device_train_batch_size": 3,
    "num_print_samples": 0, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip
PAIRS = {"count": 6, "max_steps": 4, "per_device_train_batch_size": 2}
ONLINE = {
    "held_out": 2, "beta": 0.1, "max_steps": 6, "num_iterations": 2, "steps_per_generation": 2,
    "sync_ref_model": True, "ref_model_sync_steps": 2,
}  # fmt: skip
OF_A_CLASSIFIER = tiny_models.lora(task_type="SEQ_CLS")
# By case: its door, settings, and the numbers of checkpoints, from 0.
RESUMED: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "accumulation": ("SFT", {**SFT, "gradient_accumulation_steps": 2}, (0, 3)),
    "a short last step": ("SFT", {**SFT, "gradient_accumulation_steps": 3}, (1, 2)),
    "packing": ("SFT", {**SFT, "packing": True}, (2, 3)),
    "an adapter": ("SFT", {**SFT, "peft_config": tiny_models.lora()}, (2,)),
    "weights in bf16": ("SFT", {**SFT, "dtype": torch.bfloat16}, (0, 3)),
    "by length": ("SFT", {**SFT, "train_sampling_strategy": "group_by_length"}, (1,)),
    "reward": ("reward", REWARD, (2, 3)),
    "an adapter of a reward model": (
        "reward", {**REWARD, "gradient_accumulation_steps": 2, "peft_config": OF_A_CLASSIFIER},
        (2, 3),
    ),
    "dpo": (
        "DPO", {**PAIRS, "held_out": 2, "sync_ref_model": True, "ref_model_sync_steps": 1}, (0, 2),
    ),
    "kto": ("KTO", PAIRS, (0, 2)),
    "grpo": ("GRPO", ONLINE, (0, 2)),
    "rloo": ("RLOO", ONLINE, (0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_from_any_checkpoint(name: str, tmp_path: Path) -> None:
    """It ends, bit for bit, as if it had not been interrupted."""
    door, settings, steps = RESUMED[name]
    assert_resumes(lambda folder: through(door, folder, **SAVING, **settings), tmp_path, steps)


@pytest.mark.parametrize("name", ["accumulation", "reward", "dpo", "grpo", "rloo"])
def test_an_evaluation_that_failed_is_done_when_the_run_goes_on(name: str, tmp_path: Path) -> None:
    door, settings, _ = RESUMED[name]
    settings = {**SAVING, **settings, "eval_strategy": "steps", "eval_steps": 2}
    seed(0)
    whole = through(door, tmp_path / "whole", **settings)
    whole.train()
    seed(0)
    fails = through(door, tmp_path / "run", **settings)
    fails.add_callback(EvaluationFails(2))
    with (
        pytest.warns(UserWarning, match=r"after RuntimeError the state is saved in .*-2;"),
        pytest.raises(RuntimeError, match="no room"),
    ):
        fails.train()
    again = resumed(lambda folder: through(door, folder, **settings), tmp_path / "run", True)
    assert_same_run(again, whole)


class EvaluationFails(TrainerCallback):
    """Fails in the midst of a step's evaluation."""

    def __init__(self, step: int):
        self.step = step

    def on_prediction_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == self.step:
            raise RuntimeError("no room")


@pytest.mark.parametrize(
    ("door", "metric"),
    [
        ("DPO", "rewards/margins"), ("KTO", "rewards/chosen"), ("KTO", "kl"), ("GRPO", "reward"),
        ("RLOO", "reward"),
    ],
)  # fmt: skip
def test_each_of_several_evaluation_sets_has_metrics_of_its_own(
    door: str, metric: str, tmp_path: Path
) -> None:
    sets = {"one": DOORS[door][2](4, seed=1), "other": DOORS[door][2](4, seed=2)}
    settings = {**SAVING, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": f"eval_other_{metric}"}
    made = through(door, tmp_path, eval_dataset=sets, **settings, **best)
    made.train()
    found = made.evaluate()
    assert found[f"eval_one_{metric}"] != found[f"eval_other_{metric}"]
    assert f"eval_{metric}" not in found
    if door == "KTO":
        of_one = made.predict(sets["one"]).metrics[f"test_{metric}"]
        assert of_one == found[f"eval_one_{metric}"]
    if door in ("GRPO", "RLOO"):
        assert {"eval_one_entropy", "eval_other_rewards/small_tokens/mean"} <= found.keys()


def test_a_checkpoint_of_an_earlier_version_keeps_the_tokens_of_its_run(
    make_sft: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_steps": 4}
    with monkeypatch.context() as patched:
        # As it was written then.
        patched.setattr(
            MetricMeans,
            "state",
            lambda self: {"sums": {}, "least": {}, "most": {}, "last": {}, "tokens": _tokens(self)},
        )
        whole = make_sft(**settings)
        whole.train()
    resumed = make_sft(output_dir=str(tmp_path / "resumed"), **settings)
    with pytest.warns(UserWarning, match="is of an earlier version: the next log is without the"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.log_history[-1]["num_tokens"] == _tokens(whole._metrics["train"]) > 0
    # As of a run of two processes, which another number goes on with.
    joined = resumed.joined_state([{"metrics": {"tokens": x}} for x in (6.0, 4.0)])
    assert joined["metrics"] == {"tokens": 10.0}
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


def _tokens(metrics: MetricMeans) -> float:
    return metrics.totals(OneProcess())["num_tokens"]
