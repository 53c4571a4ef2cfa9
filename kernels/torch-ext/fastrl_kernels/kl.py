"""Per-token KL estimators between a policy and its reference, and the rewards made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_choice, check_float, check_like, check_mask
from .dispatch import choose
from .types import KL_KINDS


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


class _KLPenalty(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None, kind: str
    ) -> Tensor:
        ctx.save_for_backward(logprobs, ref_logprobs, mask)
        ctx.kind = kind
        return kl_value(masked_difference(logprobs, ref_logprobs, mask), kind)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        logprobs, ref_logprobs, mask = ctx.saved_tensors
        grad = grads[0] * kl_slope(masked_difference(logprobs, ref_logprobs, mask), ctx.kind)
        grad = grad if mask is None else torch.where(mask, grad, 0.0)
        needs_logprobs, needs_ref = ctx.needs_input_grad[:2]
        return (
            grad.to(logprobs.dtype) if needs_logprobs else None,
            (-grad).to(ref_logprobs.dtype) if needs_ref else None,
            None,
            None,
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        kls = kl_value(masked_difference(logprobs, ref_logprobs, mask), kind)
        at_last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
        rewards = torch.where(at_last, scores.float().unsqueeze(-1), 0.0) - coef * kls
        ctx.save_for_backward(logprobs, ref_logprobs, mask, at_last)
        ctx.coef, ctx.kind, ctx.score_dtype = coef, kind, scores.dtype
        return rewards, kls, kls.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logprobs, ref_logprobs, mask, at_last = ctx.saved_tensors
        grad_rewards, grad_kls, grad_sums = grads
        needs_logprobs, needs_ref, needs_scores = ctx.needs_input_grad[:3]
        grad = grad_kls + grad_sums.unsqueeze(-1) - ctx.coef * grad_rewards
        grad = grad * kl_slope(masked_difference(logprobs, ref_logprobs, mask), ctx.kind)
        grad = torch.where(mask, grad, 0.0)
        at_scores = torch.where(at_last, grad_rewards, 0.0).sum(-1) if needs_scores else None
        return (
            grad.to(logprobs.dtype) if needs_logprobs else None,
            (-grad).to(ref_logprobs.dtype) if needs_ref else None,
            None if at_scores is None else at_scores.to(ctx.score_dtype),
            None,
            None,
            None,
        )


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
    if choose(backend, logprobs, ref_logprobs, mask) == "triton":
        from ._triton.kl import KLPenalty

        return KLPenalty.apply(logprobs, ref_logprobs, mask, kind)
    return _KLPenalty.apply(logprobs, ref_logprobs, mask, kind)


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
    if isinstance(coef, Tensor):
        if coef.dim() != 0:
            raise ValueError(f"coef has shape {tuple(coef.shape)}: pass a float or a 0-d tensor")
        coef = coef.detach()
    if not scores.is_floating_point():
        scores = scores.to(torch.float32)
    check_float("scores", scores)
    tensors = [logprobs, ref_logprobs, scores, mask, *([coef] if isinstance(coef, Tensor) else [])]
    if choose(backend, *tensors) == "triton":
        from ._triton.kl import KLRewards

        return KLRewards.apply(logprobs, ref_logprobs, scores, mask, coef, kind)
    return _KLRewards.apply(logprobs, ref_logprobs, scores, mask, coef, kind)


def _check_pair(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> None:
    check_choice("kind", kind, KL_KINDS)
    check_float("logprobs", logprobs)
    check_like("ref_logprobs", ref_logprobs, "logprobs", logprobs)
