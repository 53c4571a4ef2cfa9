"""Advantages by an associative scan per row; whitening in one more launch.

The recurrence is that of ``..gae``: x_t = a_t·x_next + b_t is what a step passes on, and a step's
advantage needs what it *receives*. So the scan carries two maps, (a, b) through the step itself
and (p, q) up to it, and one scan gives both.

Slopes are carried as their binary logarithms, which add. Products of a rounded γλ would not do: a
tree squares it again and again, and each squaring doubles the relative error that it has.
"""

import math

import torch
import triton
import triton.language as tl

from ..dispatch import Backend
from .launch import launcher
from .moments import (
    inverse_deviation,
    launch_whiten,
    launch_whiten_sums,
    merge_sums,
    merge_two,
    moments_of,
    store_moments,
    whitened_adjoint,
)
from .tiles import TILE, device_of, load_counted, load_mask, packed, programs_for, row_tile

# Slopes of 0, as logarithms: exp2 of it, and of its sum with anything that occurs, is 0.
_FORGET = tl.constexpr(-1e9)


@triton.jit
def _then(log_a1, b1, log_p1, q1, log_a2, b2, log_p2, q2):
    """The maps of segment 1 followed by segment 2."""
    b = b1 * tl.exp2(log_a2) + b2
    return log_a1 + log_a2, b, log_a1 + log_p2, b1 * tl.exp2(log_p2) + q2


@triton.jit
def _receive(log_a, b, carried, REVERSE: tl.constexpr):
    """What every step of a tile receives, and passes on, when ``carried`` enters it."""
    zero = tl.zeros(b.shape, tl.float32)
    log_a, b, log_p, q = tl.associative_scan(
        (log_a, b, zero, zero), axis=1, combine_fn=_then, reverse=REVERSE
    )
    return tl.exp2(log_p) * carried + q, tl.exp2(log_a) * carried + b


@triton.jit
def _load_cuts(terminated_ptr, truncated_ptr, at, counted, inside):
    """Two masks: counted steps that end their episode, and those that do with a bootstrap value."""
    ends = counted & False
    bootstrapped = ends
    if truncated_ptr is not None:
        bootstrapped = counted & load_mask(truncated_ptr, at, inside)
        ends = bootstrapped
    if terminated_ptr is not None:
        terminated = counted & load_mask(terminated_ptr, at, inside)
        bootstrapped = bootstrapped & (terminated == 0)
        ends = ends | terminated
    return ends, bootstrapped


@triton.jit(do_not_specialize=["N"])
def _gae_fwd_kernel(
    rewards_ptr,  # [N, T]
    values_ptr,  # [N, T]
    bootstrap_ptr,  # [N, T], or None
    mask_ptr,  # [N, T] bool, or None: all count
    terminated_ptr,  # [N, T] bool, or None
    truncated_ptr,  # [N, T] bool, or None
    advantages_ptr,  # [N, T] fp32
    returns_ptr,  # [N, T] fp32
    partials_ptr,  # [4, programs] moments of the advantages, or None
    gamma,
    decay,  # γλ
    log_decay,  # log2 γλ, at least -1e4
    N,
    T,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    gamma = tl.cast(gamma, tl.float32)
    decay = tl.cast(decay, tl.float32)
    log_decay = tl.cast(log_decay, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    carried = tl.zeros([ROWS, 1], tl.float32)
    count, mean, low, m2 = 0.0, 0.0, 0.0, 0.0
    blocks = tl.cdiv(T, STEPS)
    for block in range(blocks):
        start = (blocks - 1 - block) * STEPS
        step = start + tl.arange(0, STEPS)[None, :]
        at = row * T + start + tl.arange(0, STEPS)[None, :]
        inside = (row < N) & (step < T)
        counted = load_mask(mask_ptr, at, inside)
        r = load_counted(rewards_ptr, at, counted, inside)
        v = load_counted(values_ptr, at, counted, inside)
        ends, bootstrapped = _load_cuts(terminated_ptr, truncated_ptr, at, counted, inside)
        step_advantage = r - v
        passed = decay * r + (gamma - decay) * v
        if bootstrap_ptr is not None:
            follows = gamma * load_counted(bootstrap_ptr, at, bootstrapped, inside)
            step_advantage += follows
            passed += decay * follows
        log_a = tl.where(counted, tl.where(ends, _FORGET, log_decay), 0.0)
        received, x = _receive(log_a, passed, carried, True)
        carried = tl.sum(tl.where(step == start, x, 0.0), axis=1, keep_dims=True)
        advantages = step_advantage + tl.where(ends, 0.0, received)
        advantages = tl.where(counted, advantages, 0.0)
        tl.store(advantages_ptr + at, advantages, mask=inside)
        tl.store(returns_ptr + at, advantages + v, mask=inside)
        if partials_ptr is not None:
            c, m, s, q = moments_of(advantages, counted)
            count, mean, low, m2 = merge_two(count, mean, low, m2, c, m, s, q)
    if partials_ptr is not None:
        store_moments(partials_ptr, tl.num_programs(0), tl.program_id(0), count, mean, low, m2)


def _coefficients(gamma: float, lam: float) -> tuple[float, float, float]:
    """γ, γλ and log2 γλ; instead of -inf a number whose exp2 is 0 and whose product with 0 is 0."""
    decay = float(gamma * lam)
    return float(gamma), decay, max(math.log2(decay), -1e4) if decay > 0 else -1e4


_launch_fwd = launcher(_gae_fwd_kernel)


def _gae_fwd(rows, gamma, lam, with_moments):
    """Advantages, returns, and partial moments of the advantages where asked for."""
    rewards = rows[0]
    batch, length = rewards.shape
    advantages = torch.empty_like(rewards, dtype=torch.float32)
    returns = torch.empty_like(advantages)
    tile_rows, steps = row_tile(length)
    programs = programs_for(batch, tile_rows)
    partials = None
    if with_moments:
        partials = torch.empty(4, programs, dtype=torch.float32, device=rewards.device)
    if programs:
        _launch_fwd(
            programs, *rows, advantages, returns, partials,
            *_coefficients(gamma, lam), batch, length, ROWS=tile_rows, STEPS=steps,
        )  # fmt: skip
    return advantages, returns, partials


@triton.jit(do_not_specialize=["N", "partials"])
def _gae_bwd_kernel(
    grad_advantages_ptr,  # [N, T]
    grad_returns_ptr,  # [N, T]
    mask_ptr,  # [N, T] bool, or None: all count
    terminated_ptr,  # [N, T] bool, or None
    truncated_ptr,  # [N, T] bool, or None
    whitened_ptr,  # [N, T] the whitened advantages, or None
    moments_ptr,  # [4] before whitening
    sums_ptr,  # [2, partials]: Σg and Σg·whitened
    drewards_ptr,  # [N, T], or None
    dvalues_ptr,  # [N, T], or None
    dbootstrap_ptr,  # [N, T], or None
    gamma,
    decay,  # γλ
    log_decay,  # log2 γλ, at least -1e4
    N,
    T,
    partials,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    gamma = tl.cast(gamma, tl.float32)
    decay = tl.cast(decay, tl.float32)
    log_decay = tl.cast(log_decay, tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    carried = tl.zeros([ROWS, 1], tl.float32)
    if whitened_ptr is not None:
        count = tl.load(moments_ptr)
        rstd = inverse_deviation(count, tl.load(moments_ptr + 3))
        grad_sum, along_sum = merge_sums(sums_ptr, partials, CHUNK)
    for block in range(tl.cdiv(T, STEPS)):
        start = block * STEPS
        step = start + tl.arange(0, STEPS)[None, :]
        at = row * T + start + tl.arange(0, STEPS)[None, :]
        inside = (row < N) & (step < T)
        counted = load_mask(mask_ptr, at, inside)
        grad = load_counted(grad_advantages_ptr, at, counted, inside)
        if whitened_ptr is not None:
            whitened = load_counted(whitened_ptr, at, counted, inside)
            grad = whitened_adjoint(grad, whitened, rstd, count, grad_sum, along_sum)
        grad_returns = load_counted(grad_returns_ptr, at, counted, inside)
        grad = tl.where(counted, grad + grad_returns, 0.0)
        ends, bootstrapped = _load_cuts(terminated_ptr, truncated_ptr, at, counted, inside)
        log_a = tl.where(counted, tl.where(ends, _FORGET, log_decay), 0.0)
        received, x = _receive(log_a, tl.where(ends, 0.0, grad), carried, False)
        carried = tl.sum(tl.where(step == start + STEPS - 1, x, 0.0), axis=1, keep_dims=True)
        adjoint = grad + decay * received
        if drewards_ptr is not None:
            tl.store(drewards_ptr + at, tl.where(counted, adjoint, 0.0), mask=inside)
        if dvalues_ptr is not None:
            dvalues = gamma * received - adjoint + grad_returns
            tl.store(dvalues_ptr + at, tl.where(counted, dvalues, 0.0), mask=inside)
        if dbootstrap_ptr is not None:
            dbootstrap = tl.where(bootstrapped, gamma * adjoint, 0.0)
            tl.store(dbootstrap_ptr + at, dbootstrap, mask=inside)


_launch_bwd = launcher(_gae_bwd_kernel)


def forward(inputs, flags, gamma, lam, whiten):
    """Advantages and returns of rows [N, T], and what backward takes; one launch, or two where the
    advantages are whitened."""
    rows = [None if x is None else packed(x) for x in (*inputs, *flags)]
    mask, terminated, truncated = rows[3:]
    moments = None
    with device_of(rows[0]):
        advantages, returns, partials = _gae_fwd(rows, gamma, lam, whiten)
        if whiten:
            moments = launch_whiten(advantages, mask, partials, advantages)
    whitened = advantages if whiten else None
    return advantages, returns, (mask, terminated, truncated, whitened, moments)


def backward(grads, saved, dtypes, gamma, lam):
    mask, terminated, truncated, whitened, moments = saved
    grad_advantages, grad_returns = (packed(grad) for grad in grads)
    batch, length = grad_advantages.shape
    gradients = [
        None if dtype is None else torch.empty_like(grad_advantages, dtype=dtype)
        for dtype in dtypes
    ]
    tile_rows, steps = row_tile(length)
    sums = None
    with device_of(grad_advantages):
        if whitened is not None:
            sums = launch_whiten_sums(grad_advantages, whitened, mask, moments, whitened=True)
        if batch:
            _launch_bwd(
                programs_for(batch, tile_rows), grad_advantages, grad_returns,
                mask, terminated, truncated, whitened, moments, sums, *gradients,
                *_coefficients(gamma, lam), batch, length,
                0 if sums is None else sums.shape[1],
                CHUNK=TILE, ROWS=tile_rows, STEPS=steps,
            )  # fmt: skip
    return gradients


PASSES = Backend(forward, backward)
