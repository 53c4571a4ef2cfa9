"""Statistics of a step, against their definitions in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from fastrl.learn.gradient import StepOutcome
from fastrl.learn.kl_penalty import AdaptiveKLController
from fastrl.learn.update import UpdateRecord
from fastrl.rollout import RolloutOutput
from tests.ppo.conftest import make_batch, make_policy, make_trainer, perturbed
from tests.ppo.updates import watch_gradients

pytestmark = pytest.mark.filterwarnings("ignore:the KL estimate is negative")
BATCH = 8


def trainer_of(**settings: Any) -> Any:
    settings = {"batch_size": BATCH, "mini_batch_size": 2, **settings}
    return make_trainer(make_policy(), perturbed(make_policy()), **settings)


def test_explained_variance_is_that_of_the_values_before_the_update(monkeypatch):
    """1 - Var(R - V) / Var(R) over all response tokens."""
    trainer = trainer_of()
    seen = {}
    compute = trainer.compute_advantages

    def note(values: Any, rewards: Any, mask: Any) -> Any:
        found = compute(values, rewards, mask)
        seen["values"], seen["returns"] = (x[mask].double().cpu().numpy() for x in found[::2])
        return found

    monkeypatch.setattr(trainer, "compute_advantages", note)
    # Off by a constant, which a mean squared error would count.
    trainer.model.v_head.summary.bias.data += 2.0
    stats = trainer.step(**make_batch(BATCH))
    values, returns = seen["values"], seen["returns"]
    expected = 1 - np.var(returns - values) / np.var(returns)
    assert stats["ppo/val/explained_variance"] == pytest.approx(expected, rel=1e-5)
    assert stats["ppo/val/var_explained"] < expected - 0.1


@pytest.mark.parametrize("limit", [None, 0.01])
def test_the_gradient_norm_is_the_mean_over_optimizer_steps_before_clipping(limit):
    unclipped = trainer_of(learning_rate=0.0, ppo_epochs=2)
    seen = watch_gradients(unclipped)
    unclipped.step(**make_batch(BATCH))
    norms = [sum(g.double().square().sum() for g in each.values()).sqrt() for each in seen]
    assert len(norms) == 8
    trainer = trainer_of(learning_rate=0.0, ppo_epochs=2, max_grad_norm=limit)
    stats = trainer.step(**make_batch(BATCH))
    assert stats["ppo/grad_norm"] == pytest.approx(float(torch.stack(norms).mean()), rel=1e-5)


def test_shares_of_finish_reasons_are_of_samples_that_count():
    trainer = trainer_of(init_kl_coef=0.0)
    batch = make_batch(BATCH)
    reasons = ["eos", "length", "stop", "nan", "length", "eos", "length", "length"]
    rollout = RolloutOutput(list(batch["responses"]), reasons)
    with pytest.warns(UserWarning, match="NaN logits in 1 sample"):
        stats = trainer.step(**batch, rollout=rollout)
    assert stats["tokens/eos_share"] == pytest.approx(3 / 7)
    assert stats["tokens/cut_share"] == pytest.approx(4 / 7)
    assert "tokens/eos_share" not in trainer.step(**batch)  # not known


def test_a_step_that_is_not_taken_has_no_gradient_norm():
    trainer = trainer_of(ratio_threshold=1e-9)
    with pytest.warns(UserWarning, match="ratio_threshold"):
        stats = trainer.step(**make_batch(BATCH))
    assert math.isnan(stats["ppo/grad_norm"])


@pytest.mark.parametrize(("kl", "change"), [(6.6, 0.1), (60.0, 0.2), (0.0, -0.2), (math.nan, 0.0)])
def test_the_coefficient_follows_the_kl_by_at_most_a_fifth_per_horizon(kl, change):
    controller = AdaptiveKLController(init_kl_coef=0.3, target=6.0, horizon=1000.0)
    controller.update(kl, n_steps=500)
    assert controller.value == pytest.approx(0.3 * (1 + change / 2))


def test_the_largest_ratio_outlasts_steps_without_any():
    record = UpdateRecord()
    for ratio in (math.nan, 5.0, math.nan, 1.0):
        record.add(StepOutcome(max_ratio=ratio))
    assert record.max_ratio == 5.0
