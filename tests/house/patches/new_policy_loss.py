"""Shows that "leaky", a new policy loss, is learned by in PPO and GRPO, and known by its name.

Runs in a tree with new_policy_loss.patch. Its argument is a folder for a trainer's output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.ppo.conftest import make_batch, make_trainer
from tests.trl.test_online import make, small_tokens

weights = {}
for kind in ("clip", "leaky"):
    trainer = make_trainer(policy_loss=kind, ppo_epochs=2, cliprange=0.01)
    trainer.step(**make_batch())
    weights[kind] = torch.cat([x.detach().flatten() for x in trainer.model.parameters()])
assert (weights["clip"] - weights["leaky"]).abs().max() > 1e-6
grpo = make(Path(sys.argv[1]), rewards=small_tokens, loss_type="leaky", num_iterations=2)
grpo.train()
assert grpo.state.global_step
with pytest.raises(ValueError, match=r"choose one of .*leaky"):
    make_trainer(policy_loss="leakier")
