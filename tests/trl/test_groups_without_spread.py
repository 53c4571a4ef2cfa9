"""Groups of equal rewards teach nothing: their advantages are 0, not what rounding leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import GRPOTrainer, PPOConfig, RLOOTrainer
from fastrl.ppo.advantages import make_advantages
from fastrl.trl.responses import Judged

GROUPS = 40


def rewards_of(size: int) -> tuple[Tensor, Tensor]:
    """Of every second group all are equal; and which groups these are."""
    generator = torch.Generator().manual_seed(size)
    rewards = 10 ** (6 * torch.rand(GROUPS, 1, generator=generator) - 3)
    rewards = rewards * torch.rand(GROUPS, size, generator=generator)
    rewards[::2] = rewards[::2, :1]
    return rewards, torch.arange(GROUPS) % 2 == 0


TRL: dict[str, tuple[Any, dict[str, Any]]] = {
    "group": (GRPOTrainer, {"scale_rewards": "group"}),
    "batch": (GRPOTrainer, {"scale_rewards": "batch"}),
    "none": (GRPOTrainer, {"scale_rewards": "none"}),
    "of each function": (GRPOTrainer, {"multi_objective_aggregation": "normalize_then_sum"}),
    "leave one out": (RLOOTrainer, {"normalize_advantages": False}),
    "leave one out, normalised": (RLOOTrainer, {"normalize_advantages": True}),
}


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("name", TRL)
def test_by_trls_names(name: str, size: int) -> None:
    trainer, settings = TRL[name]
    rewards, equal = rewards_of(size)
    both = torch.stack([rewards.flatten(), rewards.flatten() / 3], 1)
    weights = torch.tensor([0.3, 0.7])
    args = {"multi_objective_aggregation": "sum", "scale_rewards": "group", **settings}
    own = SimpleNamespace(
        args=SimpleNamespace(reward_clip_range=None, **args),
        scale_rewards=args["scale_rewards"],
        reward_weights=weights,
    )
    judged = Judged(both, (both * weights).sum(1))
    found, spreadless = trainer.advantages_of(own, judged, None, size, "train")
    found, spreadless = found.view(-1, size), spreadless.view(GROUPS, -1)
    assert (found[equal] == 0).all()
    assert (found[~equal] != 0).any(-1).all()
    if name in ("group", "none", "leave one out"):
        assert spreadless.all(-1).tolist() == equal.tolist()


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_of_the_classic_trainer(advantage: str, size: int) -> None:
    rewards, equal = rewards_of(size)
    samples = rewards.numel()
    config = PPOConfig(
        batch_size=samples, mini_batch_size=samples, advantage=advantage, group_size=size
    )
    mask = torch.arange(5) < torch.randint(1, 6, (samples, 1))
    last = mask.sum(-1, keepdim=True) - 1
    placed = torch.zeros(samples, 5).scatter(1, last, rewards.view(-1, 1))
    _, found, _ = make_advantages(config)(torch.zeros(samples, 5), placed, mask)
    found = found.view(GROUPS, size, 5)
    assert (found[equal] == 0).all()
    assert (found[~equal] != 0).flatten(1).any(-1).all()
