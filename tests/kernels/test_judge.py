"""The judge finds one rounding too many, and lets pass what has none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl_kernels import reference
from tests.kernels import judge as judges
from tests.kernels.draws import formula as sampled
from tests.kernels.judge import assert_all_close_to_exact, assert_close_to_exact, results
from tests.kernels.roundings import RandomRounding, Rounded, spacing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
aten = torch.ops.aten
Inputs = dict[str, Tensor]


def to_bits(x: Tensor, bits: int) -> Tensor:
    """Rounded to a mantissa of so many bits, the first one included."""
    scaled = x.double() / spacing(x.double(), FP32) * 2.0 ** (bits - 24)
    return (scaled.round() * spacing(x.double(), FP32) * 2.0 ** (24 - bits)).to(x.dtype)


def bf16(x: Tensor) -> Tensor:
    return x.to(BF16).to(x.dtype)


def fp16(x: Tensor) -> Tensor:
    return x.to(FP16).to(x.dtype)


tf32 = functools.partial(to_bits, bits=11)
sixteen = functools.partial(to_bits, bits=16)


class Once(TorchDispatchMode):
    """Context in which the results of an operator are rounded once more than they should be."""

    def __init__(self, operator: str, rounds: Callable[[Tensor], Tensor], nth: int | None = None):
        super().__init__()
        self.operator, self.rounds, self.nth, self.seen = operator, rounds, nth, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self.operator or not found.is_floating_point():
            return found
        self.seen += 1
        return self.rounds(found) if self.nth in (None, self.seen - 1) else found


def normal(*shape: int, scale: float = 1.0, mean: float = 0.0, seed: int = 0) -> Tensor:
    return mean + scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MASK = normal(6, 37, seed=9) > -0.5
LABELS = (normal(9, seed=8).abs() * 100).long() % 207


def logits(dtype: torch.dtype = BF16) -> Inputs:
    return {"logits": normal(9, 207, scale=3.0).to(dtype)}


def pair(dtype: torch.dtype = BF16) -> Inputs:
    return {**logits(dtype), "ref_logits": normal(9, 207, scale=3.0, seed=1).to(dtype)}


def values(dtype: torch.dtype = BF16) -> Inputs:
    return {"values": normal(6, 37, mean=0.3).to(dtype)}


def policies(dtype: torch.dtype = FP32) -> Inputs:
    old = -3 * normal(6, 37).abs()
    found = {"logprobs": old + 0.3 * normal(6, 37, seed=1), "old_logprobs": old}
    return {k: x.to(dtype) for k, x in (found | {"advantages": normal(6, 37, seed=2)}).items()}


def log_probs(*names: str, size: float = 20.0) -> Callable[..., Inputs]:
    def inputs(dtype: torch.dtype = FP32) -> Inputs:
        drawn = {k: normal(40, scale=3, mean=-size, seed=i) for i, k in enumerate(names)}
        return {k: -x.abs().clamp(min=0.01).to(dtype) for k, x in drawn.items()}

    return inputs


def head(dtype: torch.dtype = FP32) -> Inputs:
    return {"hidden": normal(9, 16).to(dtype), "weight": normal(207, 16, seed=1).to(dtype)}


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **options: Any) -> Tensor:
    return reference.ppo_loss(logprobs, old_logprobs, advantages, MASK, **options)[0]


def ppo_of(kind: str = "clip", level: str = "token", **options: Any) -> Callable[..., Tensor]:
    objective = (kind, level, None, (1.0, 1.05), (2.0, 3.0), (3.0, 2.0))
    return functools.partial(ppo, objective=objective, **options)


def linear_ppo(hidden: Tensor, weight: Tensor) -> Tensor:
    advantages = normal(9, seed=2).to(hidden)
    old = torch.full_like(advantages, -6.0)
    counted = torch.ones(9, dtype=torch.bool)
    return reference.linear_ppo_loss(hidden, weight, LABELS, old, advantages, counted)[0]


def in_two_means(logits: Tensor) -> tuple[Tensor, ...]:
    kept = logits > 0
    return sampled(logits, LABELS % 9, kept | (logits == logits.amax(-1, keepdim=True)), 0.7)


f, of = functools.partial, reference
PAIRS = log_probs("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
MEANS = log_probs("mean_chosen", "mean_rejected", size=5.0)
TWO = {"labels": LABELS, "entropy": True}
# What is computed, of which inputs in which dtype, with gradients by which, and the one operator of
# PyTorch (forward, or of the gradient) whose result is rounded once more, to what.
FAULTS: dict[str, tuple[Any, Callable[..., Inputs], torch.dtype, tuple[str, ...], Once]] = {
    "token_logprobs: log-probs": (f(of.token_logprobs, **TWO), logits, BF16, ("logits",), ("_log_softmax", bf16)),
    "token_logprobs: a temperature's quotient": (f(of.token_logprobs, **TWO, temperature=1.7), logits, BF16, ("logits",), ("div", bf16, 0)),
    "token_logprobs: probabilities": (f(of.token_logprobs, **TWO), logits, BF16, ("logits",), ("exp", fp16)),
    "token_logprobs: a gradient before its last factor": (f(of.token_logprobs, **TWO, temperature=1.7), logits, BF16, ("logits",), ("_log_softmax_backward_data", bf16)),
    "token_logprobs: an fp16 gradient, likewise": (f(of.token_logprobs, **TWO, temperature=1.7), logits, FP16, ("logits",), ("_log_softmax_backward_data", fp16)),
    "token_logprobs: entropies in tf32": (f(of.token_logprobs, **TWO), logits, FP32, ("logits",), ("sum", tf32, 0)),
    "full_kl: differences": (of.full_kl, pair, BF16, ("logits",), ("sub", fp16)),
    "full_kl: the reference's log-probs": (of.full_kl, pair, BF16, ("logits",), ("_log_softmax", bf16, 1)),
    "full_kl: terms in tf32": (of.full_kl, pair, FP32, ("logits",), ("mul", tf32, 0)),
    "sampling: kept shares": (in_two_means, logits, BF16, (), ("exp", bf16, 0)),
    "sampling: entropies' terms": (in_two_means, logits, FP16, (), ("_softmax", fp16)),
    "kl_penalty: a difference": (f(of.kl_penalty, kind="mse"), log_probs("logprobs", "ref_logprobs", size=1.0), BF16, ("logprobs",), ("sub", bf16)),
    "kl_penalty: an exponential": (f(of.kl_penalty, kind="k3"), log_probs("logprobs", "ref_logprobs", size=1.0), FP16, ("logprobs",), ("expm1", fp16)),
    "kl_rewards: rounded before the coefficient": (lambda logprobs, ref_logprobs: of.kl_rewards(logprobs, ref_logprobs, torch.ones(40, dtype=logprobs.dtype).sum(), torch.ones(40, dtype=torch.bool), coef=0.1)[0], log_probs("logprobs", "ref_logprobs"), FP32, ("logprobs",), ("sub", tf32)),
    "gae: advantages carried in bf16": (lambda values: of.gae(values * 2, values, gamma=0.99, lam=0.95), values, BF16, ("values",), ("stack", bf16)),
    "gae: the factor of one step": (lambda values: of.gae(values * 2, values, gamma=0.99, lam=0.95), values, FP32, ("values",), ("mul", tf32, 7)),
    "gae: whitened by a rounded deviation": (lambda values: of.gae(values * 2, values, MASK, gamma=0.99, lam=0.95, whiten=True), values, FP32, ("values",), ("rsqrt", sixteen)),
    "masked_mean: a sum": (f(of.masked_mean, mask=MASK), values, BF16, ("values",), ("sum", bf16, 0)),
    "masked_var: deviations": (f(of.masked_var, mask=MASK), values, FP32, ("values",), ("sub", tf32)),
    "masked_whiten: the mean": (f(of.masked_whiten, mask=MASK), values, BF16, ("values",), ("div", bf16, 0)),
    "ppo_loss: log-ratios": (ppo, policies, FP32, ("logprobs",), ("sub", fp16, 0)),
    "ppo_loss: ratios": (ppo, policies, BF16, ("logprobs",), ("exp", bf16)),
    "ppo_loss: weights": (f(ppo, aggregate="seq-mean-token-mean"), policies, FP32, ("logprobs",), ("_to_copy", tf32)),
    "ppo_loss: products, those of the gradient too": (f(ppo, aggregate="seq-mean-token-mean"), policies, BF16, ("logprobs",), ("mul", bf16)),
    "sapo: a sigmoid": (ppo_of("sapo"), policies, FP32, ("logprobs",), ("sigmoid", fp16)),
    "cispo: ratios": (ppo_of("cispo"), policies, FP32, ("logprobs",), ("exp", tf32)),
    "vespo: weights of sequences": (ppo_of("vespo"), policies, FP32, ("logprobs",), ("exp", sixteen)),
    "sequence ratios: means": (ppo_of("clip", "sequence"), policies, FP32, ("logprobs",), ("div", fp16, 0)),
    "dpo_loss: a margin": (of.dpo_loss, PAIRS, FP32, ("policy_chosen",), ("sub", fp16, 2)),
    "dpo_loss: a margin's gradient": (of.dpo_loss, PAIRS, FP32, ("policy_chosen",), ("softplus_backward", fp16)),
    "ipo_loss: a square": (of.ipo_loss, PAIRS, FP32, ("policy_chosen",), ("pow", tf32, 0)),
    "simpo_loss: means": (of.simpo_loss, MEANS, FP32, ("mean_chosen",), ("sub", fp16, 0)),
    "orpo_loss: odds": (of.orpo_loss, MEANS, FP32, ("mean_chosen",), ("expm1", sixteen)),
    "slic_loss: a margin": (of.slic_loss, log_probs("policy_chosen", "policy_rejected"), FP32, ("policy_chosen",), ("rsub", tf32)),
    "kto_loss: a sigmoid": (lambda policy, reference: of.kto_loss(policy, reference, policy > -20, 0.5), log_probs("policy", "reference"), FP32, ("policy",), ("sigmoid", fp16)),
    "reward_loss: a difference": (of.reward_loss, log_probs("chosen", "rejected", size=0.0), BF16, ("chosen",), ("sub", bf16)),
    "linear_logprobs: logits in tf32": (f(of.linear_logprobs, labels=LABELS, entropy=True), head, FP32, ("hidden", "weight"), ("mm", tf32, 0)),
    "linear_logprobs: their gradient": (f(of.linear_logprobs, labels=LABELS, entropy=True), head, FP32, ("hidden", "weight"), ("_log_softmax_backward_data", bf16)),
    "linear_logprobs: capped logits": (f(of.linear_logprobs, labels=LABELS, softcap=9.0), head, FP32, ("hidden", "weight"), ("tanh", fp16)),
    "linear_nll_loss: weights' gradient": (lambda hidden, weight: of.linear_nll_loss(hidden, weight, LABELS)[0], head, FP32, ("hidden", "weight"), ("mm", tf32, 1)),
    "linear_ppo_loss: log-probs": (linear_ppo, head, FP32, ("hidden", "weight"), ("gather", bf16, 0)),
    "rms_norm: a mean of squares": (lambda values: of.rms_norm(values, normal(37, seed=3).to(values)), values, BF16, (), ("mean", bf16)),
    "swiglu: a gate": (lambda values: of.swiglu(5 * values, values.flip(0)), values, BF16, (), ("sigmoid", bf16)),
    "decode_attention: scores": (lambda values: of.decode_attention(values.view(2, 3, 37), *[normal(2, 19, 3, 37, seed=i).to(values) for i in (1, 2)], torch.tensor([19, 7])), values, FP16, (), ("_softmax", bf16)),
}  # fmt: skip


def in_fp32(formula: Any) -> Any:
    """An op as exact as the formula: fp32 from its inputs on, and a rounding at the end."""
    return lambda **given: formula(**{k: x.float() for k, x in given.items()})


@pytest.mark.parametrize("name", FAULTS)
def test_one_rounding_too_many_is_found(name):
    formula, made, dtype, wrt, (operator, rounds, *nth) = FAULTS[name]
    inputs = made(dtype)
    judges.judge(in_fp32(formula), formula, inputs, wrt=wrt)
    fault = Once(operator, rounds, *nth)
    with fault:
        actual = results(in_fp32(formula), inputs, wrt)
    assert fault.seen, f"no {operator} in {name}"
    with pytest.raises(AssertionError, match=r"error .* exceeds"):
        assert_all_close_to_exact(actual, formula, inputs, wrt=wrt)


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_allowed_is_a_few_roundings(name):
    formula, made, dtype, wrt, _ = FAULTS[name]
    inputs = made(dtype)
    exact = results(formula, inputs, wrt, torch.float64)
    runs = Rounded(lambda: results(formula, inputs, wrt, FP32))
    for of_run in runs:
        for key, x in exact.items():
            assert 0 < (of_run[key] - x).norm() < 2.0**-18 * x.norm(), key


def test_there_are_thirty_faults_and_more():
    assert len(FAULTS) >= 30
