"""Generalised advantage estimation, as a scan over affine maps instead of a loop over steps.

Seen from the end, what a counted step t passes to the counted step before it is one number,
X_t = γλ·A_t + γ·V_t, and A_t = r_t - V_t + X_next. So X is an affine recurrence of its own,
X_t = a_t·X_{t+1} + b_t, in which a step that does not count is the identity (a = 1, b = 0) and an
episode's end forgets (a = 0): one scan gives advantages and values of "the next counted step".
The gradient runs the same maps the other way, from the first step to the last.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import scratch
from .checks import check_float, check_mask, check_same_shape
from .dispatch import choose
from .moments import masked_whiten

# Elements of the rows that are worked on together: as many as what they need stays in cache.
_TOGETHER = 1 << 16
_BLOCK = 16
_PLANES = 5  # of float64


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """x_t = a_t·x_{t-1} + b_t along the first dimension of [T, N], x_{-1} = 0. Overwrites a and b.

    Blocks of 16 steps advance together, step by step, as if x were 0 where they begin; then a block
    is one step of a shorter scan, which tells what each of them begins with.
    """
    steps, rows = a.shape
    blocks = -(-steps // _BLOCK)
    if blocks * _BLOCK > steps:
        padding = (0, 0, 0, blocks * _BLOCK - steps)
        a, b = F.pad(a, padding, value=1.0), F.pad(b, padding)
    a, b = a.view(blocks, _BLOCK, rows), b.view(blocks, _BLOCK, rows)
    maps = list(zip(a.unbind(1), b.unbind(1), strict=True))
    for (a_before, b_before), (a_here, b_here) in pairwise(maps):
        b_here.addcmul_(a_here, b_before)
        a_here.mul_(a_before)
    if blocks > 1:
        passed_on = _scan(*(x.clone() for x in maps[-1]))
        b[1:].addcmul_(a[1:], passed_on[:-1].unsqueeze(1))
    return b.view(blocks * _BLOCK, rows)[:steps]


def _smooth_scan(a: Tensor, b: Tensor) -> Tensor:
    """The same along the last dimension, for slopes whose product p stays above 0: then
    x_t = p_t·Σ_{s≤t} b_s / p_s, in which the latest terms are the largest, so that none is lost."""
    product = a.cumprod_(-1)
    return b.div_(product).cumsum_(-1).mul_(product)


class _Steps:
    """Which steps of some rows [rows, T] count, and which of those end an episode.

    ``planes``: [5, rows, T] of memory for what is worked out, in float64: a long carry costs no
    digits then.
    """

    def __init__(
        self,
        mask: Tensor | None,
        terminated: Tensor | None,
        truncated: Tensor | None,
        planes: Tensor,
    ) -> None:
        self._planes = iter(planes)
        self.bits = None
        if mask is not None:  # all bits of those that count
            integers = torch.int32 if planes.dtype == torch.float32 else torch.int64
            self.bits = self.plane().view(integers).copy_(mask.view(torch.int8).neg())
        self.ends, self.bootstrapped = terminated, truncated
        if truncated is not None and terminated is not None:
            self.ends, self.bootstrapped = truncated | terminated, truncated & ~terminated
        elif truncated is not None:
            self.ends = truncated
        if mask is not None and self.ends is not None:
            self.ends = self.ends & mask
        if mask is not None and self.bootstrapped is not None:
            self.bootstrapped = self.bootstrapped & mask

    def counted(self, x: Tensor) -> Tensor:
        """Overwrites x with 0 where it does not count. By bits: on a CPU `where` takes ten times
        as long."""
        if self.bits is not None:
            x.view(self.bits.dtype).bitwise_and_(self.bits)
        return x

    def plane(self) -> Tensor:
        """One that nobody uses."""
        return next(self._planes)

    def copied(self, x: Tensor) -> Tensor:
        return self.plane().copy_(x)

    def scan(self, passed: Tensor, decay: float) -> Tensor:
        """x_t = a_t·x_{t-1} + passed_t, with a_t = γλ, 0 where an episode ends, 1 where a step does
        not count. Overwrites ``passed``."""
        slopes = self.plane()
        if self.bits is None:
            slopes.fill_(decay)
        else:
            decimal, integer = "dq" if passed.dtype == torch.float64 else "fi"
            yes, no = (struct.unpack(integer, struct.pack(decimal, x))[0] for x in (decay, 1.0))
            bits = slopes.view(self.bits.dtype)
            torch.bitwise_and(self.bits, yes ^ no, out=bits).bitwise_xor_(no)
        if self.ends is not None:
            slopes.masked_fill_(self.ends, 0.0)
        if self.ends is None and decay ** passed.shape[-1] > torch.finfo(passed.dtype).tiny ** 0.8:
            return _smooth_scan(slopes, passed)
        return _scan(slopes.t().contiguous(), passed.t().contiguous()).t()


def _advantages(
    steps: _Steps,
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
    steps: _Steps, grad_advantages: Tensor, grad_returns: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """By rewards, values and bootstrap values: λ_t = ∂A_t + ∂R_t + γλ·λ_prev, from the start on."""
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


class _Job(NamedTuple):
    """``work`` on rows [n, T], and the dtypes of its results; None where one is not wanted."""

    work: Callable[..., tuple[Tensor | None, ...]]
    flags: tuple[Tensor | None, ...]
    inputs: tuple[Tensor | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    coefficients: tuple[float, float]
    from_end: bool  # time runs the other way for it

    def at(self, rows: slice) -> _Job:
        flags, inputs = (
            tuple(None if x is None else x[rows] for x in xs) for xs in (self.flags, self.inputs)
        )
        return self._replace(flags=flags, inputs=inputs)

    def run(self, planes: Tensor) -> list[Tensor | None]:
        def turned(x: Tensor | None) -> Tensor | None:
            return x.flip(-1) if self.from_end and x is not None else x

        mask, terminated, truncated = map(turned, self.flags)
        steps = _Steps(mask, terminated, truncated, planes)
        results = self.work(steps, *map(turned, self.inputs), *self.coefficients)
        return [
            None if x is None or dtype is None else turned(x.to(dtype, copy=True))
            for x, dtype in zip(results, self.dtypes, strict=False)
        ]


def _few_rows_at_a_time(job: _Job) -> list[Tensor | None]:
    like = job.inputs[0]
    assert like is not None
    rows, length = like.shape
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        wide = torch.float32 if like.device.type == "mps" else torch.float64  # which mps has not
        return job.run(like.new_empty(_PLANES, rows, length, dtype=wide))
    few = max(1, min(rows, _TOGETHER // length))
    nbytes = _PLANES * few * length * torch.float64.itemsize
    memory = scratch.borrow(like, nbytes)
    planes = memory[:nbytes].view(torch.float64).view(_PLANES, few, length)
    if few >= rows:
        results = job.run(planes[:, :rows])
    else:
        parts = [
            job.at(slice(start, start + few)).run(planes[:, : rows - start])
            for start in range(0, rows, few)
        ]
        results = [
            None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)
        ]
    scratch.give_back(memory)
    return results


class _GAE(torch.autograd.Function):
    """Rows [N, T]."""

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
        inputs, flags = (rewards, values, bootstrap), (mask, terminated, truncated)
        ctx.save_for_backward(*flags)
        ctx.coefficients = gamma, lam
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        results = (torch.float32, torch.float32)
        job = _Job(_advantages, flags, inputs, results, (gamma, lam), from_end=True)
        return tuple(_few_rows_at_a_time(job))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtypes = tuple(
            dtype if needed else None
            for needed, dtype in zip(ctx.needs_input_grad, ctx.dtypes, strict=False)
        )
        job = _Job(_gradients, ctx.saved_tensors, grads, dtypes, ctx.coefficients, from_end=False)
        return *_few_rows_at_a_time(job), *(None,) * 5


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
            counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
            counted = counted.reshape(advantages.shape)
            advantages = masked_whiten(advantages, counted, backend="torch")
    return advantages.view(rewards.shape), returns.view(rewards.shape)


def _check_flags(name: str, flags: Tensor, rewards: Tensor) -> None:
    if name == "mask":
        check_mask(flags, "rewards", rewards)
        return
    if flags.dtype != torch.bool:
        raise TypeError(f"{name} must be boolean, got {flags.dtype}: pass {name}.bool()")
    check_same_shape(name, flags, "rewards", rewards)
