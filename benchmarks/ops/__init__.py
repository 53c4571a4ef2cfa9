"""The measured and compiled ops: one record each, by family."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fastrl_kernels as kernels
from benchmarks.cases import Case
from benchmarks.gate import Problem
from benchmarks.ops import attention, decode, head, logits, tokens
from benchmarks.ops.record import Compiled, Expect, Sizes, Work
from benchmarks.products import Product, fastest
from benchmarks.shapes import Attention, Shape
from benchmarks.timing import copying

__all__ = ["Attention", "Compiled", "Expect", "Shape", "Sizes", "Work"]

OPS = {
    "token_logprobs": logits.TOKEN_LOGPROBS,
    "linear_logprobs": head.LINEAR_LOGPROBS,
    "linear_ppo_loss": head.LINEAR_PPO_LOSS,
    "linear_nll_loss": head.LINEAR_NLL_LOSS,
    "linear_kl": head.LINEAR_KL,
    "linear_kl_loss": head.LINEAR_KL_LOSS,
    "full_kl": logits.FULL_KL,
    "kl_penalty": tokens.KL_PENALTY,
    "kl_rewards": tokens.KL_REWARDS,
    "gae": tokens.GAE,
    "masked_mean": tokens.MASKED_MEAN,
    "masked_var": tokens.MASKED_VAR,
    "whiten": tokens.WHITEN,
    "ppo_loss": tokens.PPO_LOSS,
    "sample_tokens": logits.SAMPLE_TOKENS,
    "decode_attention": attention.DECODE_ATTENTION,
    "rms_norm": decode.RMS_NORM,
    "swiglu": decode.SWIGLU,
    "rotate_and_store": decode.ROTATE_AND_STORE,
    "sample_keys": decode.SAMPLE_KEYS,
    "linear_sample": decode.LINEAR_SAMPLE,
    "advance_slots": decode.ADVANCE_SLOTS,
}
# The package whose kernels the ahead-of-time gate wants to see, each of them.
PACKAGE = "fastrl_kernels._triton"
PAIRED = {
    "hidden_vocabulary": ("hidden", "vocabulary"),
    "rows_steps": ("rows", "steps"),
    "attention_rows_steps": ("attention", "rows", "steps"),
}


def available() -> list[str]:
    """The measured ops that `fastrl_kernels` exports."""
    found = {name: op for name, op in OPS.items() if op.problem}
    return [name for name, op in found.items() if hasattr(kernels, op.export or name)]


def cases(op: str, device_type: str, full: bool = False) -> list[Case]:
    """An op's main cases for "cpu" or "cuda"; with `full`, also those that differ from the first
    main one in one property."""
    found = dict(OPS[op].main[device_type])
    base, main = next(iter(found)), len(found)
    for axis, values in OPS[op].axes.items() if full else ():
        for value in values:
            fields = PAIRED.get(axis, (axis,))
            changes = dict(zip(fields, value if axis in PAIRED else (value,), strict=True))
            found.setdefault(dataclasses.replace(base, **changes), ())
    return [
        Case("ops", op, shape.label, work(shape).what, shape, goals, main=i < main, seconds=30.0)
        for i, (shape, goals) in enumerate(found.items())
    ]


def work(shape: Shape) -> Work:
    """The least work of a shape."""
    return _part(OPS[shape.op].work)(shape)


def problem(
    shape: Shape,
    device: torch.device | str,
    *,
    backend: str = "auto",
    pick_rows: bool = True,
    seed: int = 0,
) -> Problem:
    """A shape's problem on a device, the same at every call with a seed.

    Ops with a head get only the rows that count, as trainers call them; all rows and the mask where
    `pick_rows` is False.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device(device):
        return _part(OPS[shape.op].problem)(shape, generator, backend, pick_rows)


def _part(part: Callable | None) -> Callable:
    assert part is not None, "the op is not measured"
    return part


def least(shape: Shape, device: torch.device) -> tuple[Callable[[], object], list[dict[str, Any]]]:
    """The least work of a shape as a call, and every provider's speed at its matrix products: for
    ops with a head those products on the rows that count, each by its fastest provider; for others
    a copy of as many bytes."""
    if not shape.hidden:
        return copying(work(shape).bytes, device), []
    return fastest(least_products(shape), shape.dtype, device)


def least_products(shape: Shape) -> list[Product]:
    """The matrix products of an op with a head, on the rows that count."""
    rows = max(1, round(shape.active * shape.rows))
    flops = 2.0 * shape.active * shape.rows * shape.vocabulary * shape.hidden
    of_teacher = [Product(rows, shape.teacher, shape.vocabulary)] if shape.teacher else []
    count = round(work(shape).flops / flops - shape.teacher / shape.hidden)
    backward = [Product(rows, shape.vocabulary, shape.hidden)] if shape.backward else []
    if shape.backward and shape.head == "trained":
        backward.append(Product(shape.vocabulary, rows, shape.hidden))
    # The forward one comes again where backward computes its logits anew.
    logits = Product(rows, shape.hidden, shape.vocabulary, count - len(backward))
    return [logits, *of_teacher, *backward]


def compiled() -> Iterator[tuple[str, Compiled]]:
    """(op, call) of everything that the ahead-of-time gate compiles."""
    for name, op in OPS.items():
        if op.compiled:
            yield from ((op.export or name, call) for call in op.compiled())
