"""Batches of responses that are learned from in several passes: the same is learned and logged."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_models
from tests.trl.test_online import GRADIENT_STEP, make

LIMIT = 12  # tokens of a pass: a response or two
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo": ("grpo", {}),
    "grpo with a KL": ("grpo", {"loss_type": "grpo", "beta": 0.3}),
    "later uses": ("grpo", {"loss_type": "bnpo", "num_iterations": 2, "max_steps": 2}),
    "whole responses": ("grpo", {"importance_sampling_level": "sequence", "beta": 0.1}),
    "entropy bonus": ("grpo", {"entropy_coef": 0.1}),
    "entropy bonus of means": ("grpo", {"loss_type": "grpo", "entropy_coef": 0.1}),
    "adaptive entropy": (
        "grpo", {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.1},
    ),
    "tokens of high entropy": ("grpo", {"top_entropy_quantile": 0.4}),
    "their bonus": ("grpo", {"top_entropy_quantile": 0.4, "entropy_coef": 0.1, "beta": 0.1}),
    "off-policy masks": (
        "grpo", {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "max_steps": 2},
    ),
    "vespo": ("grpo", {"loss_type": "vespo"}),
    "rloo": ("rloo", {"beta": 0.1}),
    "rloo, later uses": ("rloo", {"num_iterations": 2, "max_steps": 2}),
}  # fmt: skip


def learned(folder: Path, kind: str, **settings: Any) -> tuple[dict, dict, int]:
    """Weights, the first log, and how often the model ran in a step, with a gradient."""
    trainer, seen = make(folder, kind, **{**GRADIENT_STEP, **settings}), []
    run = trainer._scorer.policy

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        return run(*args, **kwargs)

    trainer._scorer.policy = counted
    trainer.train()
    logged = {
        k: math.nan if v is None else v
        for k, v in trainer.state.log_history[0].items()
        if "time" not in k
    }
    return dict(trainer.model.named_parameters()), logged, sum(seen)


@pytest.mark.parametrize("name", CASES)
def test_passes_learn_what_the_batch_does(name: str, tmp_path: Path) -> None:
    kind, settings = CASES[name]
    start = dict(tiny_models.language_model().named_parameters())
    whole, logged, once = learned(tmp_path, kind, **settings)
    parts, noted, often = learned(tmp_path, kind, micro_batch_tokens=LIMIT, **settings)
    assert often >= 2 * once
    moved = max(float((whole[k] - x).detach().abs().max()) for k, x in start.items())
    apart = max(float((parts[k] - x).detach().abs().max()) for k, x in whole.items())
    # Sums of gradients in another order, of weights whose step is about 1e-2.
    assert apart <= 1e-4 * moved
    assert noted == pytest.approx(logged, rel=1e-5, abs=1e-6, nan_ok=True)


def test_a_response_that_fits_into_no_pass_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"row 0 of train_dataset has 3 tokens; with 6 of its resp"
    ):
        make(tmp_path, micro_batch_tokens=8)
