"""Whose tokens the loss is divided by where the gradient is accumulated."""

import math
from typing import Any

import pytest
import torch

from fastrl import PPOTrainer
from fastrl_kernels.types import AGGREGATES
from tests import tiny_models
from tests.ppo.conftest import descending
from tests.ppo.updates import apart, cosine, rollout_of, watch_gradients

BATCH = 8
WEIGHTS = [1.0, 0.5, 2.0, 0.0, 1.0, 3.0, 1.0, 0.7]
# fp32 sums in another order; measured: 3e-7 to 1e-6.
SAME = 1e-5

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")


def make_trainer(micro: int, **settings: Any) -> PPOTrainer:
    """One optimizer step of 8 samples, in micro-batches of ``micro``."""
    sizes = {"mini_batch_size": micro, "gradient_accumulation_steps": BATCH // micro}
    settings = {"batch_size": BATCH, "ppo_epochs": 1, "init_kl_coef": 0.3, **sizes, **settings}
    return descending(1e-3, **settings)


def batch(groups: bool) -> dict[str, Any]:
    """Responses of 1 to 12 tokens."""
    g = torch.Generator().manual_seed(0)
    lengths = [1, 12, 3, 7, 2, 9, 1, 5]
    queries = tiny_models.prompts(3, 6, 2, 4, 5, 3, 7, 2)
    if groups:
        queries = [queries[i // 4] for i in range(BATCH)]
    scores = list(torch.randn(BATCH, generator=g))
    return {"queries": queries, "responses": tiny_models.prompts(*lengths, seed=1),
            "scores": scores}  # fmt: skip


def gradient(trainer: PPOTrainer, given: dict[str, Any], **options: Any) -> tuple[Any, dict]:
    seen = watch_gradients(trainer)
    stats = trainer.step(**given, **options)
    (found,) = seen
    return found, stats


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("advantage", ["gae", "dr_grpo"])
def test_by_the_step_one_times_eight_is_eight_times_one(advantage, aggregate, weights):
    """The value term (GAE) and the KL term included."""
    settings = {"advantage": advantage, "loss_aggregate": aggregate, "kl_in": "loss"}
    settings |= {"loss_denominator": "step"} if advantage == "gae" else {"group_size": 4}
    given = batch(groups=advantage != "gae")
    whole, expected = gradient(make_trainer(8, **settings), given, weights=weights)
    for micro in (1, 2):
        split, stats = gradient(make_trainer(micro, **settings), given, weights=weights)
        assert apart(split, whole) < SAME
        for name in ("ppo/loss/total", "ppo/loss/policy", "ppo/loss/kl"):
            assert stats[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)


def test_by_the_mini_batch_each_is_divided_by_its_own_tokens_as_in_trl():
    """The mean of the gradients that each sample has alone; the default of GAE."""
    given = batch(groups=False)
    whole, _ = gradient(make_trainer(8), given)
    split, _ = gradient(make_trainer(1), given)
    named, _ = gradient(make_trainer(1, loss_denominator="minibatch"), given)
    assert apart(split, named) < SAME
    assert cosine(split, whole) < 0.9
    alone = []
    for i in range(BATCH):
        weights = [float(i == j) for j in range(BATCH)]
        trainer = make_trainer(8, loss_denominator="step")
        alone.append(gradient(trainer, given, weights=weights)[0])
    mean = {name: sum(g[name] for g in alone) / BATCH for name in split}
    assert apart(split, mean) < SAME


def test_of_groups_the_default_is_the_step():
    settings = {"advantage": "grpo", "group_size": 4, "kl_in": "loss"}
    given = batch(groups=True)
    found = {
        kind: gradient(make_trainer(1, loss_denominator=kind, **settings), given)[0]
        for kind in ("auto", "step", "minibatch")
    }
    assert apart(found["auto"], found["step"]) < SAME
    assert apart(found["minibatch"], found["step"]) > 0.1


@pytest.mark.parametrize("kind", ["step", "minibatch"])
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_a_skipped_mini_batch_leaves_numerator_and_denominator(kind, aggregate):
    """What is left is the gradient of the others alone."""
    settings = {"old_logprobs": "rollout", "loss_denominator": kind, "loss_aggregate": aggregate}
    settings["loss_norm_length"] = 12
    given = batch(groups=False)
    shift = [0.0] * BATCH
    shift[3] = -5.0  # a ratio of e^5
    trainer = make_trainer(2, **settings)
    rollout = rollout_of(trainer, given, shift)
    order = torch.tensor(trainer.update.epochs.shuffle.permutation(BATCH)).view(-1, 2)
    trainer.update.epochs.shuffle.seed(0)
    skipped = next(pair.tolist() for pair in order if 3 in pair)
    with pytest.warns(UserWarning, match=r"1 mini-batch\(es\) skipped.*ratio_threshold=10"):
        found, stats = gradient(trainer, given, rollout=rollout)
    assert (stats["ppo/skipped_minibatches"], stats["ppo/optimizer_steps"]) == (1, 1)

    weights = [0.0 if i in skipped else 1.0 for i in range(BATCH)]
    free = make_trainer(2, ratio_threshold=math.inf, **settings)
    expected, _ = gradient(free, given, rollout=rollout, weights=weights)
    # There a mini-batch of weight 0 is one of the four that a mean is taken over.
    factor = 4 / 3 if kind == "minibatch" else 1
    assert apart(found, {name: g * factor for name, g in expected.items()}) < SAME


def test_two_trainers_do_not_share_their_accumulation():
    """accelerate keeps the number of steps for a whole process: that of the trainer made last."""
    settings = {"ppo_epochs": 2, "loss_denominator": "step"}
    given = batch(groups=False)
    alone = make_trainer(2, **settings)
    expected = watch_gradients(alone)
    alone.step(**given)
    first = make_trainer(2, **settings)
    make_trainer(8)
    seen = watch_gradients(first)
    stats = first.step(**given)
    assert stats["ppo/optimizer_steps"] == len(seen) == len(expected) == 2
    assert all(apart(a, b) < SAME for a, b in zip(seen, expected, strict=True))
