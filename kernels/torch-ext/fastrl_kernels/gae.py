"""Generalised advantage estimation, as a scan over affine maps instead of a loop over steps.

Seen from the end, what a counted step t passes to the counted step before it is one number,
X_t = γλ·A_t + γ·V_t, and A_t = r_t - V_t + X_next. So X is an affine recurrence of its own,
X_t = a_t·X_{t+1} + b_t, in which a step that does not count is the identity (a = 1, b = 0) and an
episode's end forgets (a = 0): one scan gives advantages and values of "the next counted step".
The gradient runs the same maps the other way, from the first step to the last.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._cpu.scan import Job, Steps, few_rows_at_a_time
from .argument_types import explains_types
from .checks import check_float, check_like, check_mask
from .dispatch import Backend, choose
from .first_order import first_order
from .moments import masked_whiten
from .operators import applied


def _advantages(
    steps: Steps,
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, of rows that begin with the last step."""
    decay = gamma * lam
    r, v = (steps.counted(steps.copied(x)) for x in (rewards, values))
    advantages = torch.sub(r, v, out=steps.plane())
    passed = r.mul_(decay).add_(v, alpha=gamma - decay)
    if steps.bootstrapped is not None and bootstrap is not None:
        follows = gamma * torch.where(steps.bootstrapped, bootstrap.to(v.dtype), 0.0)
        advantages += follows
        passed.add_(follows, alpha=decay)
    x = steps.scan(passed, decay)
    if steps.ends is None:
        advantages[:, 1:].add_(x[:, :-1])
    else:
        advantages[:, 1:].add_(torch.where(steps.ends[:, 1:], 0.0, x[:, :-1]))
    steps.counted(advantages)
    return advantages, v.add_(advantages)


def _gradients(
    steps: Steps, grad_advantages: Tensor, grad_returns: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients by rewards, values and bootstrap values: λ_t = ∂A_t + ∂R_t + γλ·λ_prev, from the
    start on."""
    decay = gamma * lam
    by_returns, adjoint = (steps.counted(steps.copied(x)) for x in (grad_returns, grad_advantages))
    adjoint += by_returns
    passed = steps.copied(adjoint)
    if steps.ends is not None:
        passed.masked_fill_(steps.ends, 0.0)
    x = steps.scan(passed, decay)
    adjoint[:, 1:].add_(x[:, :-1], alpha=decay)
    steps.counted(adjoint)
    by_values = by_returns.sub_(adjoint)
    by_values[:, 1:].add_(x[:, :-1], alpha=gamma)
    steps.counted(by_values)
    if steps.bootstrapped is None:
        return adjoint, by_values, None
    return adjoint, by_values, torch.where(steps.bootstrapped, gamma * adjoint, 0.0)


Tensors = tuple[Tensor | None, ...]
Dtypes = tuple[torch.dtype | None, ...]


def _torch_forward(
    inputs: Tensors, flags: Tensors, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor, Tensors]:
    assert not whiten, "which another op does"
    dtypes = (torch.float32, torch.float32)
    job = Job(_advantages, flags, inputs, dtypes, (gamma, lam), from_end=True)
    return (*few_rows_at_a_time(job), flags)  # type: ignore[return-value]


def _torch_backward(
    grads: Tensors, saved: Tensors, dtypes: Dtypes, gamma: float, lam: float
) -> list[Tensor | None]:
    return few_rows_at_a_time(Job(_gradients, saved, grads, dtypes, (gamma, lam), from_end=False))


_TORCH_PASSES = Backend(_torch_forward, _torch_backward)


class _GAE(torch.autograd.Function):
    """Advantages and returns of rows [N, T], with their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rewards: Tensor,
        values: Tensor,
        bootstrap: Tensor | None,
        mask: Tensor | None,
        terminated: Tensor | None,
        truncated: Tensor | None,
        gamma: float,
        lam: float,
        whiten: bool,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        inputs, flags = (rewards, values, bootstrap), (mask, terminated, truncated)
        advantages, returns, saved = backend.forward(inputs, flags, gamma, lam, whiten)
        ctx.save_for_backward(*saved)
        ctx.coefficients, ctx.backward_of = (gamma, lam), backend.backward
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return advantages, returns

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = tuple(
            dtype if needed else None
            for needed, dtype in zip(ctx.needs_input_grad, ctx.dtypes, strict=False)
        )
        gradients = ctx.backward_of(grads, ctx.saved_tensors, dtypes, *ctx.coefficients)
        return *gradients, *(None,) * 7


@explains_types
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    whiten: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Advantages δ_t + γλ·A_next with δ_t = r_t + γ·V_next - V_t, and returns A_t + V_t.

    "next" is the next counted step, so holes in the mask bridge; past the last one V and A are 0.

    Args:
        rewards: [..., T], fp32, bf16 or fp16. Copied once if not contiguous, like all the others.
        values: [..., T], V(s_t).
        mask: [..., T] bool, True = counts; all count where None. Elsewhere both results are 0.
        gamma: discount γ in [0, 1].
        lam: λ in [0, 1].
        bootstrap_value: [..., T], V(s_{t+1}) of episodes that were cut short; read only where
            ``truncated``.
        terminated: [..., T] bool, the episode ends after this step: V_next = A_next = 0.
        truncated: [..., T] bool, the episode was cut after this step: V_next is
            ``bootstrap_value``, A_next = 0. Where both are True, ``terminated`` wins.
        whiten: whiten the advantages over all counted elements (:func:`masked_whiten`); returns
            stay as they are.
        backend: "auto", "triton" or "torch".

    Returns:
        advantages and returns, [..., T] fp32, differentiable with respect to rewards, values and
        bootstrap_value. Without ``whiten`` a row's result does not depend on the batch.

    Raises:
        TypeError: inputs not floating point, or masks that are not boolean.
        ValueError: γ or λ outside [0, 1]; one of ``truncated`` and ``bootstrap_value`` without the
            other; shapes or devices that differ.

    Source: Schulman et al., "High-dimensional continuous control using generalized advantage
    estimation", 2015, equation 16.
    """
    for name, coefficient in (("gamma", gamma), ("lam", lam)):
        if isinstance(coefficient, Tensor):
            raise TypeError(f"{name} must be a Python number: reading a tensor would wait for it")
        if not 0.0 <= coefficient <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {coefficient}")
    if (truncated is None) != (bootstrap_value is None):
        raise ValueError(
            "truncated and bootstrap_value belong together: pass both (bootstrap_value [..., T], "
            "read where truncated is True) or neither"
        )
    check_float("rewards", rewards)
    check_like("values", values, "rewards", rewards)
    if rewards.dim() == 0:
        raise ValueError("rewards has no time dimension: pass [..., T]")
    if bootstrap_value is not None:
        check_like("bootstrap_value", bootstrap_value, "rewards", rewards)
    for name, flags in (("mask", mask), ("terminated", terminated), ("truncated", truncated)):
        if flags is not None:
            check_mask(flags, "rewards", rewards, name)
    inputs: Tensors = (rewards, values, bootstrap_value, mask, terminated, truncated)
    chosen = choose(backend, *inputs)
    rows = inputs
    if rewards.dim() != 2 or not rewards.numel() or torch.compiler.is_compiling():
        shape = (-1, rewards.shape[-1]) if rewards.numel() else (0, 1)
        rows = tuple(x if x is None else x.reshape(shape) for x in inputs)
    passes, fused = _TORCH_PASSES, False
    if chosen == "triton":
        from ._triton.gae import PASSES

        passes, fused = PASSES, whiten
    advantages, returns = applied(_GAE, *rows, gamma, lam, fused, passes)
    if whiten and not fused:
        counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
        counted = counted.reshape(advantages.shape)
        advantages = masked_whiten(advantages, counted, backend="torch")
    if advantages.shape == rewards.shape:
        return advantages, returns
    return advantages.view(rewards.shape), returns.view(rewards.shape)
