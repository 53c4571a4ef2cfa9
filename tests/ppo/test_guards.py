"""Limits of a step's KL and ratios end a run after a whole step."""

import json
import math
from typing import Any

import pytest
import torch

from fastrl import JsonlCallback, PPOConfig, PPOTrainer, TrainingDiverged
from fastrl.trainers.ppo.guards import check_divergence
from tests import tiny_models
from tests.golden import tiny
from tests.ppo.conftest import perturbed

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")

PROMPTS = ["w3 w4", "w5 w6 w7"]


def train(path: Any, output: Any = None, **settings: Any) -> Any:
    config = PPOConfig(**{"batch_size": 2, "ppo_epochs": 2, "learning_rate": 0.1, **settings})
    trainer = PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())
    return trainer.train(
        lambda completions, **_: [float(len(c)) for c in completions],
        steps=8,
        prompts=PROMPTS,
        generation_kwargs={"max_new_tokens": 4, "top_k": 0},
        progress=False,
        callbacks=[JsonlCallback(path)],
        output=output,
    )


@pytest.mark.parametrize(("limit", "value", "key", "remedy"), [
    ("max_kl", 1.0, "objective/kl", "raise init_kl_coef"),
    ("max_ratio", 1.05, "ppo/policy/ratio_max", "lower learning_rate"),
])  # fmt: skip
def test_a_run_ends_after_the_step_that_exceeds_a_limit(limit, value, key, remedy, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(TrainingDiverged, match=rf"{key}.* exceeds {limit}={value:g}: {remedy}"):
        train(path, kl_penalty="abs", **{limit: value})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert 1 <= len(rows) < 8
    assert [row[key] > value for row in rows] == [False] * (len(rows) - 1) + [True]
    assert rows[-1]["ppo/optimizer_steps"] == 2


@pytest.mark.filterwarnings("ignore:after TrainingDiverged the state is saved")
def test_the_state_after_that_step_is_saved(tmp_path):
    with pytest.raises(TrainingDiverged, match="exceeds max_ratio") as raised:
        train(tmp_path / "metrics.jsonl", max_ratio=1.05, output=tmp_path / "run")
    step = int(str(raised.value).split(":")[0].removeprefix("step "))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"checkpoint-{step}"]


def test_a_run_below_its_limits_goes_on(tmp_path):
    result = train(tmp_path / "metrics.jsonl", max_kl=1e6, max_ratio=1e6)
    assert len(result.history) == 8


def test_what_is_not_known_exceeds_nothing():
    config = PPOConfig(max_kl=1.0, max_ratio=1.0)
    check_divergence(config, 3, {"objective/kl": math.nan, "ppo/policy/ratio_max": math.nan})
    with pytest.raises(TrainingDiverged, match="step 3: objective/kl"):
        check_divergence(config, 3, {"objective/kl": math.inf, "ppo/policy/ratio_max": 1.0})


def test_the_largest_ratio_is_that_of_a_mini_batch_and_counts_those_skipped():
    """The mean over its tokens, also where it exceeds ratio_threshold."""
    from tests.ppo.updates import rollout_of

    config = PPOConfig(
        batch_size=4, mini_batch_size=2, ppo_epochs=1, old_logprobs="rollout", learning_rate=0.0
    )
    policy = tiny_models.policy()
    trainer = PPOTrainer(config, policy, perturbed(tiny_models.policy()), tiny.tokenizer())
    given = {
        "queries": tiny_models.prompts(3, 5, 2, 4),
        "responses": tiny_models.prompts(4, 6, 2, 5, seed=1),
        "scores": [torch.tensor(float(i)) for i in range(4)],
    }
    shift = [0.0, -math.log(30.0), 0.0, math.log(2.0)]  # ratios of 1, 30, 1 and a half
    order = trainer.update.epochs.shuffle.permutation(4).reshape(2, 2).tolist()
    trainer.update.epochs.shuffle.seed(0)
    ratios = {0: 1.0, 1: 30.0, 2: 1.0, 3: 0.5}
    lengths = [4, 6, 2, 5]
    means = [
        sum(ratios[i] * lengths[i] for i in pair) / sum(lengths[i] for i in pair) for pair in order
    ]
    with pytest.warns(UserWarning, match="ratio_threshold"):
        stats = trainer.step(**given, rollout=rollout_of(trainer, given, shift))
    assert stats["ppo/policy/ratio_max"] == pytest.approx(max(means), rel=1e-4)
    assert max(means) > 10
