"""Per-token KL estimators between a policy and its reference, and the rewards made of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .argument_types import explains_types
from .checks import check_choice, check_float, check_like, check_mask
from .dispatch import Backend, Passes, choose
from .first_order import first_order
from .operators import applied
from .types import KL_KINDS

Saved = tuple[Tensor | None, ...]


def kl_value(difference: Tensor, kind: str) -> Tensor:
    """The estimator for d = log π - log ref."""
    if kind == "kl":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference


def kl_slope(difference: Tensor, kind: str) -> Tensor:
    """The estimator's derivative by d; "k3+" has that of "mse"."""
    if kind == "kl":
        return torch.ones_like(difference)
    if kind == "abs":
        return difference.sign()
    if kind in ("mse", "k3+"):
        return difference
    return -torch.expm1(-difference)


def masked_difference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    difference = logprobs.float() - ref_logprobs.float()
    return difference if mask is None else torch.where(mask, difference, 0.0)


def _penalty_forward(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None, kind: str
) -> tuple[Tensor, Saved]:
    kl = kl_value(masked_difference(logprobs, ref_logprobs, mask), kind)
    return kl, (logprobs, ref_logprobs, mask)


def _penalty_backward(
    grad: Tensor, saved: Saved, kind: str, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients by both log-probs."""
    logprobs, ref_logprobs, mask = saved
    assert logprobs is not None
    assert ref_logprobs is not None
    grad = grad * kl_slope(masked_difference(logprobs, ref_logprobs, mask), kind)
    grad = grad if mask is None else torch.where(mask, grad, 0.0)
    return (
        grad.to(logprobs.dtype) if wanted[0] else None,
        (-grad).to(ref_logprobs.dtype) if wanted[1] else None,
    )


class _KLPenalty(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        mask: Tensor | None,
        kind: str,
        backend: Backend,
    ) -> Tensor:
        kl, saved = backend.forward(logprobs, ref_logprobs, mask, kind)
        ctx.save_for_backward(*saved)
        ctx.kind, ctx.backward_of = kind, backend.backward
        return kl

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[:2]
        return *ctx.backward_of(*grads, ctx.saved_tensors, ctx.kind, wanted), *(None,) * 3


def _penalty_in_triton() -> Backend:
    from ._triton.kl import PENALTY

    return PENALTY


_PENALTY = Passes(Backend(_penalty_forward, _penalty_backward), _penalty_in_triton)


def _rewards_forward(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    mask: Tensor,
    coef: float | Tensor,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    kls = kl_value(masked_difference(logprobs, ref_logprobs, mask), kind)
    at_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    rewards = torch.where(at_last, scores.float().unsqueeze(-1), 0.0) - coef * kls
    return rewards, kls, kls.sum(-1), (logprobs, ref_logprobs, mask, at_last)


def _rewards_backward(
    grad_rewards: Tensor,
    grad_kls: Tensor,
    grad_sums: Tensor,
    saved: tuple[Tensor, ...],
    coef: float | Tensor,
    kind: str,
    score_dtype: torch.dtype,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """The gradients by both log-probs and the scores."""
    logprobs, ref_logprobs, mask, at_last = saved
    grad = grad_kls + grad_sums.unsqueeze(-1) - coef * grad_rewards
    grad = grad * kl_slope(masked_difference(logprobs, ref_logprobs, mask), kind)
    grad = torch.where(mask, grad, 0.0)
    at_scores = torch.where(at_last, grad_rewards, 0.0).sum(-1) if wanted[2] else None
    return (
        grad.to(logprobs.dtype) if wanted[0] else None,
        (-grad).to(ref_logprobs.dtype) if wanted[1] else None,
        None if at_scores is None else at_scores.to(score_dtype),
    )


class _KLRewards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        scores: Tensor,
        mask: Tensor,
        coef: float | Tensor,
        kind: str,
        backend: Backend,
    ) -> tuple[Tensor, Tensor, Tensor]:
        *results, saved = backend.forward(logprobs, ref_logprobs, scores, mask, coef, kind)
        ctx.save_for_backward(*saved, coef if isinstance(coef, Tensor) else None)
        ctx.coef = None if isinstance(coef, Tensor) else coef
        ctx.kind, ctx.score_dtype, ctx.backward_of = kind, scores.dtype, backend.backward
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, coef = ctx.saved_tensors
        coef = ctx.coef if coef is None else coef
        gradients = ctx.backward_of(
            *grads, saved, coef, ctx.kind, ctx.score_dtype, ctx.needs_input_grad[:3]
        )
        return *gradients, *(None,) * 4


def _rewards_in_triton() -> Backend:
    from ._triton.kl import REWARDS

    return REWARDS


_REWARDS = Passes(Backend(_rewards_forward, _rewards_backward), _rewards_in_triton)


@explains_types
def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: str = "kl",
    *,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """An estimate of KL(π || ref) per token, from d = log π - log ref at the sampled token.

    "kl" (k1): d. "abs": |d|. "mse" (k2): d²/2. "k3": exp(-d) - 1 + d. "k3+": the value of k3 with
    the gradient of k2, which is that of the true KL in expectation.

    Args:
        logprobs: [...] log π of the sampled tokens, in nats; fp32, bf16 or fp16.
        ref_logprobs: [...] log ref of the same tokens. Either is copied once if not contiguous.
        kind: "kl", "abs", "mse", "k3" or "k3+".
        mask: [...] bool, True = counts; elsewhere the result and the gradients are 0.
        backend: "auto", "triton" or "torch".

    Returns:
        [...] fp32, differentiable with respect to both log-probs.

    Raises:
        TypeError: log-probs not floating point, or a mask that is not boolean.
        ValueError: an unknown kind, or shapes or devices that differ.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    _check_pair(logprobs, ref_logprobs, kind)
    if mask is not None:
        check_mask(mask, "logprobs", logprobs)
    passes = _PENALTY.of(choose(backend, logprobs, ref_logprobs, mask))
    return applied(_KLPenalty, logprobs, ref_logprobs, mask, kind, passes)


@explains_types
def kl_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    mask: Tensor,
    *,
    coef: float | Tensor,
    kind: str = "kl",
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The classic per-token reward: r_t = -coef·kl_t, plus the score at the last counted token.

    Args:
        logprobs: [..., T] log π of the response tokens, in nats; fp32, bf16 or fp16.
        ref_logprobs: [..., T] log ref. Either is copied once if not contiguous.
        scores: [...] one score per row, floating point or integer (converted to fp32).
        mask: [..., T] bool, True = counts. A row that counts nowhere gets no score.
        coef: KL coefficient, a float or a 0-d tensor on the same device (read there, no
            synchronisation; a constant to autograd).
        kind: an estimator of :func:`kl_penalty`.
        backend: "auto", "triton" or "torch".

    Returns:
        rewards [..., T], kls [..., T] and their sums per row, sequence_kl [...], all fp32;
        differentiable with respect to both log-probs and the scores.

    Raises:
        TypeError: log-probs not floating point, or a mask that is not boolean.
        ValueError: an unknown kind, or shapes or devices that differ.

    Source: Ziegler et al., "Fine-tuning language models from human preferences", 2019.
    """
    _check_pair(logprobs, ref_logprobs, kind)
    check_mask(mask, "logprobs", logprobs)
    if mask.dim() == 0:
        raise ValueError("logprobs has no time dimension: pass [..., T]")
    if scores.shape != mask.shape[:-1]:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}: pass one per row, {tuple(mask.shape[:-1])}"
        )
    by_tensor = None
    if isinstance(coef, Tensor):
        if coef.dim() != 0:
            raise ValueError(f"coef has shape {tuple(coef.shape)}: pass a float or a 0-d tensor")
        coef = by_tensor = coef.detach()
    elif not -math.inf < coef < math.inf:
        raise ValueError(f"coef must be finite, got {coef}")
    if not scores.is_floating_point():
        scores = scores.to(torch.float32)
    check_float("scores", scores)
    passes = _REWARDS.of(choose(backend, logprobs, ref_logprobs, scores, mask, by_tensor))
    return applied(_KLRewards, logprobs, ref_logprobs, scores, mask, coef, kind, passes)


def _check_pair(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> None:
    check_choice("kind", kind, KL_KINDS)
    check_float("logprobs", logprobs)
    check_like("ref_logprobs", ref_logprobs, "logprobs", logprobs)
