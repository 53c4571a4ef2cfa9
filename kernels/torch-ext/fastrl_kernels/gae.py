"""Generalised advantage estimation, as a scan over affine maps instead of a loop over steps.

Seen from the end, what a counted step t passes to the counted step before it is one number,
X_t = γλ·A_t + γ·V_t, and A_t = r_t - V_t + X_next. So X is an affine recurrence of its own,
X_t = a_t·X_{t+1} + b_t, in which a step that does not count is the identity (a = 1, b = 0) and an
episode's end forgets (a = 0): one scan gives advantages and values of "the next counted step".
The gradient runs the same maps the other way, from the first step to the last.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_float, check_mask, check_same_shape
from .dispatch import choose
from .moments import masked_whiten


def _received(a: Tensor, b: Tensor, *, from_end: bool) -> Tensor:
    """x_prev at every step of [N, T], where x_t = a_t·x_prev + b_t and x_prev is 0 at the start.

    T is cut into about √T blocks of about √T steps: all blocks advance together, step by step;
    then a pass over the blocks carries x from each to the next.
    """
    rows, steps = a.shape
    length = 1 << math.ceil(math.log2(max(steps, 1)) / 2)
    blocks = -(-steps // length)
    padding = blocks * length - steps
    if padding:
        a, b = F.pad(a, (0, padding), value=1.0), F.pad(b, (0, padding))
    # [step in block, block, row]: what a step reads and writes is contiguous.
    a, b = (x.view(rows, blocks, length).permute(2, 1, 0).contiguous() for x in (a, b))
    order = reversed if from_end else list
    maps = list(zip(order(a.unbind()), order(b.unbind()), strict=True))
    for (a_before, b_before), (a_here, b_here) in pairwise(maps):
        b_here.addcmul_(a_here, b_before)
        a_here.mul_(a_before)
    carried = torch.zeros_like(b[0])
    through = [order(x.unbind()) for x in (*maps[-1], carried)]
    for (block_a, block_b, x), (_, _, x_next) in pairwise(zip(*through, strict=True)):
        torch.addcmul(block_b, block_a, x, out=x_next)
    b.addcmul_(a, carried)
    first = carried.unsqueeze(0)
    received = torch.cat([b[1:], first] if from_end else [first, b[:-1]])
    return received.permute(2, 1, 0).reshape(rows, -1)[:, :steps]


class _GAE(torch.autograd.Function):
    """Rows [N, T]. Gradient, from the first step on: λ_t = ∂A_t + ∂R_t + γλ·λ_prev if not cut."""

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
    ) -> tuple[Tensor, Tensor]:
        decay = gamma * lam
        counted = _Counted(mask, rewards.device)
        r, v = counted.only(rewards), counted.only(values)
        own = r - v
        passed = decay * r + (gamma - decay) * v
        slopes = counted.slopes(decay, r)
        ends, bootstrapped = _cuts(mask, terminated, truncated)
        if bootstrapped is not None and bootstrap is not None:
            follows = gamma * torch.where(bootstrapped, bootstrap, 0.0)
            own, passed = own + follows, passed + decay * follows
        if ends is not None:
            slopes = torch.where(ends, 0.0, slopes)
        received = _received(slopes, passed, from_end=True)
        if ends is not None:
            received = torch.where(ends, 0.0, received)
        advantages = counted.only(own + received)
        ctx.save_for_backward(mask, slopes, ends, bootstrapped)
        ctx.gamma, ctx.decay = gamma, decay
        ctx.dtypes = rewards.dtype, values.dtype, None if bootstrap is None else bootstrap.dtype
        return advantages.float(), (advantages + v).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mask, slopes, ends, bootstrapped = ctx.saved_tensors
        needs_rewards, needs_values, needs_bootstrap = ctx.needs_input_grad[:3]
        reward_dtype, value_dtype, bootstrap_dtype = ctx.dtypes
        counted = _Counted(mask, grads[0].device)
        grad_advantages, grad_returns = (counted.only(grad) for grad in grads)
        grad = grad_advantages + grad_returns
        passed = grad if ends is None else torch.where(ends, 0.0, grad)
        received = _received(slopes, passed, from_end=False)
        adjoint = counted.only(grad + ctx.decay * received)
        grad_values = grad_bootstrap = None
        if needs_values:
            grad_values = counted.only(ctx.gamma * received - adjoint + grad_returns)
            grad_values = grad_values.to(value_dtype)
        if needs_bootstrap:
            grad_bootstrap = torch.where(bootstrapped, ctx.gamma * adjoint, 0.0).to(bootstrap_dtype)
        return (
            adjoint.to(reward_dtype) if needs_rewards else None,
            grad_values,
            grad_bootstrap,
            *(None,) * 5,
        )


class _Counted:
    """Selection by a mask on the way into float64, so that a long carry costs no digits."""

    def __init__(self, mask: Tensor | None, device: torch.device) -> None:
        narrow = device.type == "mps"  # which has no float64
        self.dtype = torch.float32 if narrow else torch.float64
        self.bits = None
        if mask is not None:
            self.bits = mask.to(torch.int32 if narrow else torch.int64).neg_()

    def only(self, x: Tensor) -> Tensor:
        """x where it counts, 0 elsewhere. By bits: on a CPU `where` takes ten times as long."""
        x = x.to(self.dtype)
        if self.bits is None:
            return x
        return x.view(self.bits.dtype).bitwise_and(self.bits).view(self.dtype)

    def slopes(self, decay: float, like: Tensor) -> Tensor:
        """γλ where it counts, 1 elsewhere."""
        if self.bits is None:
            return torch.full_like(like, decay)
        return self.bits.to(self.dtype).mul_(1.0 - decay).add_(1.0)


def _cuts(
    mask: Tensor | None, terminated: Tensor | None, truncated: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Where a counted step ends its episode, and where it does so with a bootstrap value."""
    bootstrapped = truncated
    if truncated is not None and terminated is not None:
        bootstrapped = truncated & ~terminated
    ends = terminated if truncated is None else truncated
    if truncated is not None and terminated is not None:
        ends = truncated | terminated
    if mask is not None:
        ends = None if ends is None else ends & mask
        bootstrapped = None if bootstrapped is None else bootstrapped & mask
    return ends, bootstrapped


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
        if not 0.0 <= coefficient <= 1.0:
            raise ValueError(f"{name} must be in [0, 1], got {coefficient}")
    if (truncated is None) != (bootstrap_value is None):
        raise ValueError(
            "truncated and bootstrap_value belong together: pass both (bootstrap_value [..., T], "
            "read where truncated is True) or neither"
        )
    check_float("rewards", rewards)
    check_float("values", values)
    check_same_shape("values", values, "rewards", rewards)
    if rewards.dim() == 0:
        raise ValueError("rewards has no time dimension: pass [..., T]")
    if bootstrap_value is not None:
        check_float("bootstrap_value", bootstrap_value)
        check_same_shape("bootstrap_value", bootstrap_value, "rewards", rewards)
    for name, flags in (("mask", mask), ("terminated", terminated), ("truncated", truncated)):
        if flags is not None:
            _check_flags(name, flags, rewards)
    inputs = (rewards, values, bootstrap_value, mask, terminated, truncated)
    chosen = choose(backend, *inputs)
    shape = (-1, rewards.shape[-1]) if rewards.numel() else (0, 1)
    rows = [x if x is None else x.reshape(shape) for x in inputs]
    if chosen == "triton":
        from ._triton.gae import GAE

        advantages, returns = GAE.apply(*rows, gamma, lam, whiten)
    else:
        advantages, returns = _GAE.apply(*rows, gamma, lam)
        if whiten:
            counted = torch.ones_like(advantages, dtype=torch.bool) if mask is None else rows[3]
            advantages = masked_whiten(advantages, counted, backend="torch")
    return advantages.view(rewards.shape), returns.view(rewards.shape)


def _check_flags(name: str, flags: Tensor, rewards: Tensor) -> None:
    if name == "mask":
        check_mask(flags, "rewards", rewards)
        return
    if flags.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, got {flags.dtype}: pass {name}.bool()")
    check_same_shape(name, flags, "rewards", rewards)
