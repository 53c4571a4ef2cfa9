"""What optimizer steps were given, and rollouts that are made up."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastrl import PPOTrainer
from fastrl.rollout import RolloutOutput

Gradients = dict[str, Tensor]


def watch_gradients(trainer: PPOTrainer) -> list[Gradients]:
    """Filled with the gradients of every optimizer step from now on."""
    seen: list[Gradients] = []

    def note(*_: Any) -> None:
        named = trainer.model.named_parameters()
        seen.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    trainer.optimizer.optimizer.register_step_pre_hook(note)
    return seen


def apart(a: Gradients, b: Gradients) -> float:
    """‖a - b‖ / ‖b‖ over all weights, in float64."""
    assert a.keys() == b.keys()
    difference = sum((a[name].double() - b[name].double()).square().sum() for name in b)
    return float((difference / sum(g.double().square().sum() for g in b.values())) ** 0.5)


def cosine(a: Gradients, b: Gradients) -> float:
    x, y = (torch.cat([g.double().flatten() for g in each.values()]) for each in (a, b))
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0))


def rollout_of(trainer: PPOTrainer, batch: dict[str, Any], shift: Sequence[float]) -> RolloutOutput:
    """Responses with the log-probs and values that the policy has, log-probs shifted by so much
    per sample: what makes a sample's ratio e^-shift."""
    queries, responses = batch["queries"], batch["responses"]
    inputs = trainer.prepare_model_inputs(queries, responses)
    arguments = (trainer.model, queries, responses, inputs)
    logprobs, _, values, mask = trainer.batched_forward_pass(*arguments)
    rows = zip(logprobs, values, mask, shift, strict=True)
    figures = [((lp[m] + by).cpu(), v[m].cpu()) for lp, v, m, by in rows]
    return RolloutOutput(
        list(responses),
        ["length"] * len(responses),
        logprobs=[lp for lp, _ in figures],
        logprobs_t1=[lp for lp, _ in figures],
        values=[v for _, v in figures],
    )
