"""What must hold before a reference's speed is shown: it is the model that training began with.

Each trainer takes a step first, and its policy is then moved much further than by a step: what the
reference has in common with what is trained would be seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.before import rollout_cases
from benchmarks.before.ops import free
from benchmarks.before.reference_cases import MODES, Case, Mode, Samples, samples
from benchmarks.before.reference_sides import Side, own_accelerate, trainer

# Of |Δ log-prob|: the largest in fp32, the mean in less, where a single logit may be off by more.
EXACT, ROUNDED = 1e-5, 5e-3
MOVED = 0.02  # standard deviation, that of initial weights


class Verdict(NamedTuple):
    """The largest |Δ log-prob| in fp32 by mode, None where there is no reference; what is wrong."""

    differences: dict[str, float | None]
    red: str | None


def judge(case: Case, device: torch.device) -> Verdict:
    """Every mode beside a separate full copy, in fp32 and in the case's own precision."""
    exact: dict[str, float | None] = {}
    for precision in dict.fromkeys(("fp32", case.precision)):
        found, red = _judge(dataclasses.replace(case, precision=precision), device)
        exact = exact or found
        if red:
            return Verdict(exact, red)
    return Verdict(exact, None)


def plain_logprobs(model: Any, data: Samples, precision: str) -> Tensor:
    """Log-probs of all response tokens, [N], by a forward of each sample alone."""
    autocast: Any = contextlib.nullcontext()
    if precision == "bf16":
        autocast = torch.autocast(model.device.type, torch.bfloat16)
    found = []
    for query, response in zip(data.queries, data.responses, strict=True):
        tokens = torch.cat([query, response]).to(model.device)
        with torch.no_grad(), autocast:
            logits = model(tokens.unsqueeze(0), use_cache=False).logits[0]
        logprobs = logits[len(query) - 1 : -1].float().log_softmax(-1)
        found.append(logprobs.gather(-1, tokens[len(query) :, None])[:, 0])
    return torch.cat(found)


def _judge(case: Case, device: torch.device) -> tuple[dict[str, float | None], str | None]:
    data = samples(case)
    expected = plain_logprobs(rollout_cases.build(case.shape, device), data, case.precision)
    largest: dict[str, float | None] = {}
    with own_accelerate():
        for name, mode in MODES.items():
            try:
                side = Side(trainer(case, mode, device), data)
            except ImportError:  # it will be said where the side is made for the case
                continue
            wrong = another_mode(side, mode, case.shape.layers)
            if not wrong:
                side.step()
                move(side)
                found = side.reference_logprobs()
                largest[name], wrong = compare(found, expected, mode, case.precision)
            if wrong:
                return largest, f"{name}: {wrong}"
            del side
            free(device)
    return largest, None


@torch.no_grad()
def move(side: Side) -> None:
    """Adds noise to all that is trained: a step of a small learning rate may not show in fp32."""
    drawn = torch.Generator().manual_seed(0)
    for parameter in side.trainer.model.parameters():
        if parameter.requires_grad:
            noise = MOVED * torch.randn(parameter.shape, generator=drawn)
            parameter.add_(noise.to(parameter.device, parameter.dtype))


def another_mode(side: Side, mode: Mode, layers: int) -> str | None:
    """What the trainer keeps in place of what was asked for; None where it does as it was told."""
    reference, trunk = side.trainer.reference, side.trainer.model.trunk
    if reference.mode != mode.reference:
        return f"the reference is kept as {reference.mode} ({reference.why})"
    shared = trunk.layers if trunk is not None else None
    if shared != mode.shared_layers(layers):
        return f"it shares {shared} layers, not {mode.shared_layers(layers)}"
    return None


def compare(
    found: Tensor, expected: Tensor, mode: Mode, precision: str
) -> tuple[float | None, str | None]:
    """The largest |Δ|, and what is wrong with it."""
    if mode.reference == "none":
        there = int(found.isfinite().sum())
        return None, f"{there} log-probs, though there is no reference" if there else None
    difference = (found - expected).abs()
    largest = difference.max().item()
    kind, value, allowed = "largest", largest, EXACT
    if precision != "fp32":
        kind, value, allowed = "mean", difference.mean().item(), ROUNDED
    if value <= allowed:  # NaN is not
        return largest, None
    return largest, (
        f"reference log-probs are off by {value:.1e} in {precision} ({kind}; {allowed:.0e} are "
        "allowed)"
    )
