"""The linear ops, values and gradients, on whatever hypothesis draws, against float64."""

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastrl_kernels import KLTerm, LossStats, linear_logprobs, linear_ppo_loss, reference
from fastrl_kernels.types import AGGREGATES, KL_KINDS
from tests.kernels.judge import judge, results
from tests.kernels.test_properties import Draw, Op, examples, laid_out

VOCABULARIES = (1, 2, 7, 60, 300, 1500)
LIMITS = ("workspace_bytes", "backend")  # of the op, not of the formula


def head(draw: Draw, leading: tuple[int, ...]) -> dict[str, Any]:
    """Hidden states, a weight and whatever else a head may have: logits from uniform to peaked."""
    width, vocabulary = draw.one_of((1, 4, 17), "width"), draw.one_of(VOCABULARIES, "vocabulary")
    scale = draw.one_of((1.0, 0.0, 10.0), "scale")
    tensors = {
        "hidden": draw.normal((*leading, width)),
        "weight": draw.normal((vocabulary, width), scale / width**0.5),
        "bias": draw.perhaps(draw.normal((vocabulary,), 2.0), "bias"),
    }
    inputs: dict[str, Any] = {}
    for name, x in tensors.items():
        if x is not None:  # of one dtype, where `placed` would draw one for each
            inputs[name] = laid_out(x.to(draw.device, draw.dtype), draw.one_of(LAYOUTS, name))
    labels = (draw.uniform(leading) * vocabulary).long()
    labels[draw.uniform(leading) < draw.one_of((0.0, 0.2), "share of -100")] = -100
    inputs["labels"] = draw.placed(labels)
    inputs["temperature"] = draw.temperature(leading)
    inputs["softcap"] = draw.one_of((None, None, 3.0, 30.0), "softcap")
    inputs["logit_scale"] = draw.one_of((1.0, 0.0625, 4.0), "logit_scale")
    inputs["workspace_bytes"] = draw.one_of((None, 1, 2000, 12_000), "workspace_bytes")
    return inputs


LAYOUTS = ("contiguous", "slice", "every other", "transposed", "misaligned")


def check(op: Op, formula: Op, inputs: dict[str, Any], per_token: list[str]) -> None:
    """Judges values and gradients, and that what the named inputs hold where a token does not count
    changes no bit."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    others = {n: x for n, x in inputs.items() if x is not None and not isinstance(x, Tensor)}
    op = partial(op, **others)
    formula = partial(formula, **{n: x for n, x in others.items() if n not in LIMITS})
    wrt = [name for name in ("hidden", "weight", "bias") if name in inputs]
    found = judge(op, formula, tensors, wrt=wrt, own_dtypes=True)
    shift = int(inputs.get("shift", 0))
    counted = inputs["labels"][..., shift:] != -100 if shift else inputs["labels"] != -100
    if inputs["mask"] is not None:
        counted &= inputs["mask"]
    read = torch.nn.functional.pad(counted, (0, shift)) if shift else counted
    poisoned = dict(tensors)
    for name in ("hidden", *per_token):
        if isinstance(inputs[name], Tensor):
            # In the same layout: another may take another product, which rounds otherwise.
            poisoned[name] = copy.deepcopy(inputs[name])
            poisoned[name][~(read if name == "hidden" else counted)] = math.nan
    again = results(op, poisoned, wrt)
    for name, x in found.items():
        torch.testing.assert_close(again[name], x, rtol=0, atol=0, equal_nan=True, msg=name)
    assert not found["dhidden"][~read].any()


@examples(10)
def test_linear_logprobs(backend, device, random):
    draw = Draw(random, device)
    leading = draw.shape()[:-1]
    inputs = head(draw, leading)
    inputs["mask"] = draw.perhaps(draw.mask(leading), "masked")
    inputs["entropy"] = draw.sometimes("entropy")
    op = partial(linear_logprobs, backend=backend)
    check(op, reference.linear_logprobs, inputs, ["temperature"])


@examples(8)
def test_linear_logprobs_of_labels_to_come(backend, device, random):
    draw = Draw(random, device)
    leading = draw.one_of(((4,), (9,), (2, 4), (3, 7), (2, 1, 5), (0, 4)), "leading")
    inputs = head(draw, leading)
    inputs["shift"] = draw.one_of((True, 1, 2, 3), "shift")
    scored = (*leading[:-1], leading[-1] - int(inputs["shift"]))
    inputs["mask"] = draw.perhaps(draw.mask(scored), "masked")
    inputs["temperature"] = draw.temperature(scored)
    inputs["entropy"] = draw.sometimes("entropy")
    op = partial(linear_logprobs, backend=backend)
    check(op, reference.linear_logprobs, inputs, ["temperature"])


@examples(9)
def test_linear_ppo_loss(backend, device, random):
    draw = Draw(random, device)
    draw.dtype = torch.float32  # in bf16 a ratio near a bound may be clipped on one side alone
    leading = draw.shape()[:-1] or (3,)
    inputs = head(draw, leading)
    mask = inputs["mask"] = draw.mask(leading)
    # Near the policy's own, or ratios would all be clamped.
    given = {k: inputs[k] for k in ("bias", "temperature", "softcap", "logit_scale") if k in inputs}
    labels = inputs["labels"].long()
    old = linear_logprobs(inputs["hidden"], inputs["weight"], labels, **given, backend="torch")
    per_token = ["temperature", "old_logprobs", "advantages"]
    inputs["old_logprobs"] = old.float() + draw.normal(leading, 0.3).to(device)
    inputs["advantages"] = draw.placed(draw.normal(leading))
    for name in ("weights", "token_weights"):
        if draw.sometimes(name):
            inputs[name] = draw.placed(draw.uniform(leading))
            per_token.append(name)
    if draw.sometimes("KL loss"):
        inputs["ref_logprobs"] = old.float() + draw.normal(leading, 0.3).to(device)
        inputs["kind"] = draw.one_of(KL_KINDS, "kind")
        per_token.append("ref_logprobs")
    inputs["cliprange"] = draw.one_of((0.2, (0.1, 0.3)), "cliprange")
    inputs["dual_clip"] = draw.one_of((None, 1.5), "dual_clip")
    inputs["aggregate"] = draw.one_of(AGGREGATES, "aggregate")
    inputs["denominator"] = draw.one_of((None, 7.0, torch.tensor(11.0, device=device)), "over")
    assert mask.shape == leading

    check(partial(ppo_loss, backend), ppo_formula, inputs, per_token)


def ppo_loss(backend: str, **options: Any) -> tuple[Tensor, ...]:
    """The op's loss, statistics and log-probs; a KL term is given as ``ref_logprobs`` and
    ``kind``."""
    loss, stats = linear_ppo_loss(**with_kl(options, KLTerm), backend=backend)
    return loss, *stats.tensor[: len(LossStats.NAMES)].unbind(), stats.logprobs


def ppo_formula(**options: Any) -> tuple[Tensor, ...]:
    loss, stats = reference.linear_ppo_loss(**with_kl(options, lambda *term: term))
    return loss, *(stats[name] for name in (*LossStats.NAMES, "logprobs"))


def with_kl(options: dict[str, Any], term: Op) -> dict[str, Any]:
    options = dict(options)
    if "ref_logprobs" in options:
        options["kl"] = term(options.pop("ref_logprobs"), 0.15, options.pop("kind"))
    return options
