"""Steps on responses of another engine, of one process and of several with the same batch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastrl.rollout import RolloutOutput
from fastrl.run.launcher import process_count, process_index
from tests import tiny_models
from tests.ppo.test_policy_gradients import groups, make_trainer
from tests.ppo.test_sampler_correction import CASES, of_another_engine
from tests.processes.jobs import weights_of
from tests.processes.launch import keep

# By the names of tests/ppo/test_sampler_correction.py, of which each needs its own sums.
STEPS = [*(name for name in CASES if name != "cispo, a KL term")]


def batch_of_all() -> tuple[tuple[list[Tensor], ...], RolloutOutput, list[Tensor], list[Tensor]]:
    """Four groups of four samples, the rollout that they are of, and log-probs [float64] of the
    sampler and of the policy. The sampler does not know those of some tokens of the first group."""
    batch = groups(4, 4)
    model = tiny_models.language_model("gpt2").double()
    rollout, sampled, old = of_another_engine(model, *batch[:2])
    assert rollout.logprobs is not None
    for i in (0, 2):
        rollout.logprobs[i][0] = torch.nan
        sampled[i][0] = old[i][0]  # the ratio 1
    return batch, rollout, sampled, old


def step(case: str) -> dict[str, Any]:
    """What a step of gradient descent at a rate of 1 changes, and its statistics."""
    batch, rollout, *_ = batch_of_all()
    size = len(batch[0]) // process_count()
    own = slice(size * process_index(), size * (process_index() + 1))
    assert rollout.logprobs is not None
    part = RolloutOutput(rollout.sequences[own], rollout.finish_reasons[own], rollout.logprobs[own])
    sizes = {"batch_size": size, "mini_batch_size": size, "group_size": 4}
    trainer = make_trainer(init_kl_coef=0.0, **sizes, **CASES[case])
    before = weights_of(trainer._unwrapped.pretrained_model)
    found = trainer.step(*(x[own] for x in batch), rollout=part)
    after = weights_of(trainer._unwrapped.pretrained_model)
    return {
        "moved": {name: x - after[name] for name, x in before.items()},
        "statistics": {name: x for name, x in found.items() if isinstance(x, float)},
    }


def run(folder: Path, *names: str) -> None:
    """Saves what some steps did, of each process in a folder of its own."""
    for name in names:
        keep(step(name), name, folder)
