"""Groups of equal rewards teach nothing: their advantages are 0, not what rounding leaves."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl import GRPOTrainer, PPOConfig, PPOTrainer, RLOOTrainer
from fastrl.samples import Samples
from fastrl.trainers.ppo.method import advantages_of
from tests import tiny_models
from tests.golden import tiny
from tests.trl.test_online import make

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
        args=SimpleNamespace(reward_clip_range=None, advantage=None, **args),
        scale_rewards=args["scale_rewards"],
        reward_weights=weights,
    )
    by_function = dict(zip("ab", both.unbind(1), strict=True))
    judged = Samples(rewards=(both * weights).sum(1), rewards_by_function=by_function)
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
    _, found, _ = advantages_of(config)(torch.zeros(samples, 5), placed, mask)
    found = found.view(GROUPS, size, 5)
    assert (found[equal] == 0).all()
    assert (found[~equal] != 0).flatten(1).any(-1).all()


def _equal(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.1] * len(completion_ids)


def _moved(model: Any, train: Any) -> float:
    before = [p.detach().clone() for p in model.parameters()]
    train()
    pairs = zip(model.parameters(), before, strict=True)
    return max(float((p.detach() - old).abs().max()) for p, old in pairs)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_a_step_beside_a_reference_moves_no_weight(kind: str, tmp_path: Path) -> None:
    """The policy is its reference: their KL is 0, not the rounding of two forwards."""
    trainer = make(tmp_path, kind, _equal, beta=0.05, max_steps=1, learning_rate=1e-2)
    assert _moved(trainer.model, trainer.train) == 0


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_a_classic_step_beside_a_reference_moves_no_weight(advantage: str, kl_in: str) -> None:
    config = PPOConfig(
        batch_size=8,
        mini_batch_size=8,
        group_size=1 if advantage == "reinforce++" else 4,
        advantage=advantage,
        kl_in=kl_in,
        init_kl_coef=0.05,
        learning_rate=1e-2,
        ppo_epochs=1,
    )
    trainer = PPOTrainer(config, tiny_models.language_model(), None, tiny.tokenizer())
    sampling = {"max_new_tokens": 6, "top_k": 0}
    prompts = [f"w{i} w4" for i in range(3, 11)]

    def train() -> None:
        trainer.train(_equal, steps=1, prompts=prompts, generation_kwargs=sampling, progress=False)

    assert _moved(trainer.model, train) == 0
