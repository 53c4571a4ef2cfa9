"""What must hold before a rollout's speed is shown: its tokens, and how likely it says they are."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.before.rollout_cases import Workload
from benchmarks.before.rollout_sides import Engine
from fastrl.rollout import RolloutOutput

AUDITED = 4  # samples
# Of |Δ log-prob|: the largest in fp32, the mean in less, where a single logit may be off by more.
EXACT, ROUNDED = 1e-5, 5e-3
_LENGTHS, _NEW_TOKENS = (1, 5, 3), 8


class Audit(NamedTuple):
    """|Δ| between the engine's log-probs at T = 1 and a plain forward's, over some samples."""

    mean: float
    largest: float
    tokens: int
    wrong: str | None


def short_work(vocabulary: int) -> Workload:
    """A few short prompts, of ragged length."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=drawn) for length in _LENGTHS]
    return Workload(prompts, [_NEW_TOKENS] * len(prompts))


def in_fp32(model: Any) -> Any:
    """The model, or a copy of it in fp32: in less, the likeliest token is a matter of rounding."""
    return model if model.dtype == torch.float32 else copy.deepcopy(model).float()


def greedy_tokens(model: Any, work: Workload) -> list[Tensor]:
    """What `model.generate` gives for each prompt alone, without padding."""
    found = []
    for prompt, limit in zip(work.prompts, work.limits, strict=True):
        alone = prompt.to(model.device).unsqueeze(0)
        made = model.generate(
            alone, attention_mask=torch.ones_like(alone), max_new_tokens=limit, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        found.append(made[0, len(prompt) :].cpu())
    return found


def differing(
    model: Any, work: Workload, found: list[Tensor], expected: list[Tensor]
) -> str | None:
    """Which sequence is not as it should be; None where all are, but for what follows a tie: which
    of two tokens is the likelier is a matter of rounding where their logits are."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if not (torch.equal(ours, theirs) or _parts_at_a_tie(model, work.prompts[i], ours, theirs)):
            return f"greedy tokens of prompt {i} are {ours.tolist()}, generate's {theirs.tolist()}"
    return None


@torch.no_grad()
def _parts_at_a_tie(model: Any, prompt: Tensor, ours: Tensor, theirs: Tensor) -> bool:
    """Whether the first tokens that differ are both the likeliest, as far as fp32 can tell."""
    if len(ours) != len(theirs):
        return False
    first = int((ours != theirs).nonzero()[0])
    read = torch.cat([prompt, theirs[:first]]).to(model.device)
    logits = model(read.unsqueeze(0)).logits[0, -1].float()
    both = logits[torch.stack([ours[first], theirs[first]]).to(model.device)]
    return bool(logits.max() - both.min() <= 2 * EXACT)


def wrong_tokens(model: Any, expected: list[Tensor], work: Workload) -> str | None:
    """How the engine's greedy tokens differ; None where they do not. The model is in fp32."""
    return differing(model, work, Engine(model, slots=2, greedy=True)(work), expected)


def wrong_lengths(sequences: list[Tensor], work: Workload) -> str | None:
    """Whether less or more was made than was asked for."""
    found = [len(sequence) for sequence in sequences]
    if found == work.limits:
        return None
    i = next(i for i, (n, limit) in enumerate(zip(found, work.limits, strict=True)) if n != limit)
    return f"sample {i} has {found[i]} tokens, {work.limits[i]} were asked for"


@torch.no_grad()
def audit(model: Any, work: Workload, output: RolloutOutput) -> Audit:
    """Of samples from first to last, each in a forward of its own, in the model's dtype."""
    last = len(work.prompts) - 1
    picked = sorted({round(i * last / (AUDITED - 1)) for i in range(AUDITED)})
    assert output.logprobs_t1 is not None
    deltas = []
    for i in picked:
        prompt, sequence = work.prompts[i], output.sequences[i]
        tokens = torch.cat([prompt, sequence]).to(model.device)
        logits = model(tokens.unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).gather(1, tokens[len(prompt) :, None])
        deltas.append((expected.squeeze(1).cpu() - output.logprobs_t1[i]).abs())
    delta = torch.cat(deltas)
    mean, largest = float(delta.mean()), float(delta.max())
    exact = model.dtype == torch.float32
    name, error, allowed = ("largest", largest, EXACT) if exact else ("mean", mean, ROUNDED)
    # NaN is wrong
    wrong = None if error <= allowed else (
        f"log-probs are off by {error:.2g} ({name} |Δ|), {allowed:g} is allowed"
    )  # fmt: skip
    return Audit(mean, largest, len(delta), wrong)
