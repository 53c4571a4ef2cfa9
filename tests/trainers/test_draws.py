"""What a run draws hangs on its seed and place alone, not on what rewards do to generators."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastrl import PPOConfig, PPOTrainer
from fastrl.alignment import PPO, AlignmentConfig, Trainer
from tests import tiny_models
from tests.alignment.conftest import SETTINGS, LikesHigh, make_factory
from tests.golden import tiny
from tests.resuming import with_dropout
from tests.trl.test_online import make as make_online

TEXTS = [f"w{3 + i} w4 w{5 + i}" for i in range(8)]
STEPS = 3


class Reward:
    """Keeps what was sampled, and does something to the generators."""

    def __init__(self, meddle: str):
        self.meddle, self.seen = meddle, []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.seen.append(completion_ids)
        if self.meddle == "seeds":
            random.seed(0), np.random.seed(0), torch.manual_seed(0)
        elif self.meddle == "draws":
            torch.rand(len(self.seen))
        return [sum(token % 7 for token in ids) / 7 for ids in completion_ids]


def ppo(reward: Reward, folder: Path) -> Any:
    config = PPOConfig(batch_size=4, mini_batch_size=2, learning_rate=1e-2)
    trainer = PPOTrainer(config, tiny_models.policy(), None, tiny.tokenizer())
    sampling = {"max_new_tokens": 6, "top_k": 0}
    trainer.train(reward, steps=STEPS, prompts=TEXTS, generation_kwargs=sampling, progress=False)
    return trainer.model


def grpo(reward: Reward, folder: Path) -> Any:
    trainer = make_online(
        folder,
        "grpo",
        reward,
        model=with_dropout(tiny_models.language_model()),
        max_steps=STEPS,
        num_iterations=1,
    )
    trainer.train()
    return trainer.model


def aligned(reward: Reward, folder: Path) -> Any:
    """PPO as a loss: it has responses to draw, and an order of their mini-batches."""

    class Judge(LikesHigh):
        def score(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
            return reward(tiny.tokenizer()(responses)["input_ids"])

    factory = make_factory("reinforcement-learning", annotator=Judge(), epochs=STEPS)
    args = AlignmentConfig(output_dir=str(folder), **SETTINGS)
    loss = PPO(epochs=2, mini_batches=2)
    trainer = Trainer(tiny_models.policy(), args, factory, loss)
    trainer.train()
    return trainer.model


@pytest.mark.parametrize("run", [ppo, grpo, aligned])
def test_rewards_that_seed_or_draw_change_no_draws(run: Any, tmp_path: Path) -> None:
    found = {}
    for meddle in ("nothing", "seeds", "draws"):
        torch.manual_seed(7 if meddle == "draws" else 0)  # nor does what a program drew before
        random.seed(1)
        reward = Reward(meddle)
        found[meddle] = run(reward, tmp_path / meddle), reward.seen
    (model, seen), *others = found.values()
    assert len({str(samples) for samples in seen}) == STEPS, "each step draws anew"
    for other, samples in others:
        assert samples == seen
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
