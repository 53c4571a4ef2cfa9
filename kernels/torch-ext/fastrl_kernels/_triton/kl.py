"""KL estimators per token, and the classic rewards in one launch."""

import torch
import triton
import triton.language as tl

from ..dispatch import Backend
from .launch import launcher
from .tiles import (
    TILE,
    device_of,
    exact_exp,
    load_counted,
    load_mask,
    packed,
    programs_for,
    row_tile,
)


@triton.jit
def _k3(d):
    """exp(-d) - 1 + d: by its series where the three terms would cancel."""
    x = -d
    series = 1.0 / 3628800.0
    series = series * x + 1.0 / 362880.0
    series = series * x + 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    return tl.where(tl.abs(d) < 0.5, series * x * x, (exact_exp(x) - 1.0) + d)


@triton.jit
def kl_value(d, KIND: tl.constexpr):
    if KIND == "kl":
        value = d
    elif KIND == "abs":
        value = tl.abs(d)
    elif KIND == "mse":
        value = 0.5 * d * d
    else:
        value = _k3(d)
    return value


@triton.jit
def kl_slope(d, KIND: tl.constexpr):
    if KIND == "kl":
        slope = tl.full(d.shape, 1.0, tl.float32)
    elif KIND == "abs":
        slope = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
    elif KIND == "k3":  # 1 - exp(-d)
        slope = tl.where(tl.abs(d) < 0.5, d - _k3(d), 1.0 - exact_exp(-d))
    else:  # "mse", and "k3+" which has its gradient
        slope = d
    return slope


@triton.jit
def _kl_penalty_fwd_kernel(
    logprobs_ptr,  # [n]
    ref_ptr,  # [n]
    mask_ptr,  # [n] bool, or None: all count
    out_ptr,  # [n] fp32
    n,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    counted = load_mask(mask_ptr, at, inside)
    logprobs = load_counted(logprobs_ptr, at, counted, inside)
    ref = load_counted(ref_ptr, at, counted, inside)
    d = logprobs - ref
    tl.store(out_ptr + at, kl_value(d, KIND), mask=inside)


_launch_penalty_fwd = launcher(_kl_penalty_fwd_kernel)


@triton.jit
def _kl_penalty_bwd_kernel(
    grad_ptr,  # [n]
    logprobs_ptr,  # [n]
    ref_ptr,  # [n]
    mask_ptr,  # [n] bool, or None: all count
    dlogprobs_ptr,  # [n], or None
    dref_ptr,  # [n], or None
    n,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    counted = load_mask(mask_ptr, at, inside)
    logprobs = load_counted(logprobs_ptr, at, counted, inside)
    ref = load_counted(ref_ptr, at, counted, inside)
    grad = load_counted(grad_ptr, at, counted, inside)
    d = logprobs - ref
    grad *= kl_slope(d, KIND)
    if dlogprobs_ptr is not None:
        tl.store(dlogprobs_ptr + at, grad, mask=inside)
    if dref_ptr is not None:
        tl.store(dref_ptr + at, -grad, mask=inside)


_launch_penalty_bwd = launcher(_kl_penalty_bwd_kernel)


def penalty_forward(logprobs, ref_logprobs, mask, kind):
    """The KL per token, and what backward takes."""
    logprobs, ref_logprobs = logprobs.contiguous(), ref_logprobs.contiguous()
    mask = None if mask is None else mask.contiguous()
    out = torch.empty_like(logprobs, dtype=torch.float32)
    n = logprobs.numel()
    if n:
        with device_of(logprobs):
            _launch_penalty_fwd(
                programs_for(n, TILE), logprobs, ref_logprobs, mask, out, n, KIND=kind, BLOCK=TILE
            )
    return out, (logprobs, ref_logprobs, mask)


def penalty_backward(grad, saved, kind, wanted):
    logprobs, ref_logprobs, mask = saved
    dlogprobs = torch.empty_like(logprobs) if wanted[0] else None
    dref = torch.empty_like(ref_logprobs) if wanted[1] else None
    n = logprobs.numel()
    if n:
        with device_of(logprobs):
            _launch_penalty_bwd(
                programs_for(n, TILE), grad.contiguous(), logprobs, ref_logprobs, mask,
                dlogprobs, dref, n, KIND=kind, BLOCK=TILE,
            )  # fmt: skip
    return dlogprobs, dref


@triton.jit(do_not_specialize=["N"])
def _kl_rewards_fwd_kernel(
    logprobs_ptr,  # [N, T]
    ref_ptr,  # [N, T]
    scores_ptr,  # [N]
    mask_ptr,  # [N, T] bool
    coef_ptr,  # [], or None: the number
    coef,
    rewards_ptr,  # [N, T] fp32
    kls_ptr,  # [N, T] fp32
    sums_ptr,  # [N] fp32
    last_ptr,  # [N] int32: the last counted step, -1 where none
    N,
    T,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    in_batch = row < N
    if coef_ptr is not None:
        coefficient = tl.load(coef_ptr).to(tl.float32)
    else:
        coefficient = tl.cast(coef, tl.float32)
    scores = tl.load(scores_ptr + row, mask=in_batch, other=0.0).to(tl.float32)
    last = tl.full([ROWS, 1], -1, tl.int32)
    sums = tl.zeros([ROWS, 1], tl.float32)
    blocks = tl.cdiv(T, STEPS)
    for block in range(blocks):  # from the end, so that the last counted step comes first
        step = (blocks - 1 - block) * STEPS + tl.arange(0, STEPS)[None, :]
        at = row * T + step
        inside = in_batch & (step < T)
        counted = load_mask(mask_ptr, at, inside)
        logprobs = load_counted(logprobs_ptr, at, counted, inside)
        ref = load_counted(ref_ptr, at, counted, inside)
        kls = kl_value(logprobs - ref, KIND)
        last_here = tl.max(tl.where(counted, step, -1), axis=1, keep_dims=True)
        at_last = counted & (step == last_here) & (last < 0)
        last = tl.maximum(last, last_here)
        sums += tl.sum(kls, axis=1, keep_dims=True)
        tl.store(kls_ptr + at, kls, mask=inside)
        rewards = tl.where(at_last, scores, 0.0) - coefficient * kls
        tl.store(rewards_ptr + at, rewards, mask=inside)
    tl.store(sums_ptr + row, sums, mask=in_batch)
    tl.store(last_ptr + row, last, mask=in_batch)


_launch_rewards_fwd = launcher(_kl_rewards_fwd_kernel)


@triton.jit(do_not_specialize=["N"])
def _kl_rewards_bwd_kernel(
    grad_rewards_ptr,  # [N, T]
    grad_kls_ptr,  # [N, T]
    grad_sums_ptr,  # [N]
    logprobs_ptr,  # [N, T]
    ref_ptr,  # [N, T]
    mask_ptr,  # [N, T] bool
    last_ptr,  # [N] int32
    coef_ptr,  # [], or None: the number
    coef,
    dlogprobs_ptr,  # [N, T], or None
    dref_ptr,  # [N, T], or None
    dscores_ptr,  # [N], or None
    N,
    T,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    in_batch = row < N
    if coef_ptr is not None:
        coefficient = tl.load(coef_ptr).to(tl.float32)
    else:
        coefficient = tl.cast(coef, tl.float32)
    grad_sums = tl.load(grad_sums_ptr + row, mask=in_batch, other=0.0).to(tl.float32)
    for block in range(tl.cdiv(T, STEPS)):
        step = block * STEPS + tl.arange(0, STEPS)[None, :]
        at = row * T + step
        inside = in_batch & (step < T)
        counted = load_mask(mask_ptr, at, inside)
        logprobs = load_counted(logprobs_ptr, at, counted, inside)
        ref = load_counted(ref_ptr, at, counted, inside)
        grad_rewards = load_counted(grad_rewards_ptr, at, counted, inside)
        grad_kls = load_counted(grad_kls_ptr, at, counted, inside)
        slope = kl_slope(logprobs - ref, KIND)
        grad = grad_kls + grad_sums - coefficient * grad_rewards
        grad = tl.where(counted, grad * slope, 0.0)
        if dlogprobs_ptr is not None:
            tl.store(dlogprobs_ptr + at, grad, mask=inside)
        if dref_ptr is not None:
            tl.store(dref_ptr + at, -grad, mask=inside)
    if dscores_ptr is not None:
        last = tl.load(last_ptr + row, mask=in_batch, other=-1)
        dscores = tl.load(grad_rewards_ptr + row * T + last, mask=last >= 0, other=0.0)
        tl.store(dscores_ptr + row, dscores, mask=in_batch)


_launch_rewards_bwd = launcher(_kl_rewards_bwd_kernel)


def _split(coef):
    """A tensor or a number as the kernels take it: one of the two."""
    return (coef, 0.0) if isinstance(coef, torch.Tensor) else (None, float(coef))


def rewards_forward(logprobs, ref_logprobs, scores, mask, coef, kind):
    """Rewards, KL per token and its sums, and what backward takes."""
    logprobs, ref_logprobs = packed(logprobs), packed(ref_logprobs)
    scores, mask = scores.contiguous(), packed(mask)
    rewards = torch.empty_like(logprobs, dtype=torch.float32)
    kls = torch.empty_like(rewards)
    sums = torch.empty_like(scores, dtype=torch.float32)
    last = torch.empty_like(scores, dtype=torch.int32)
    saved = logprobs, ref_logprobs, mask, last
    length = logprobs.shape[-1]
    if not logprobs.numel():
        return rewards, kls, sums.zero_(), saved
    rows, steps = row_tile(length)
    batch = scores.numel()
    with device_of(logprobs):
        _launch_rewards_fwd(
            programs_for(batch, rows), logprobs, ref_logprobs, scores, mask, *_split(coef),
            rewards, kls, sums, last, batch, length, KIND=kind, ROWS=rows, STEPS=steps,
        )  # fmt: skip
    return rewards, kls, sums, saved


def rewards_backward(grad_rewards, grad_kls, grad_sums, saved, coef, kind, score_dtype, wanted):
    logprobs, ref_logprobs, mask, last = saved
    dlogprobs = torch.empty_like(logprobs) if wanted[0] else None
    dref = torch.empty_like(ref_logprobs) if wanted[1] else None
    dscores = torch.empty_like(last, dtype=score_dtype) if wanted[2] else None
    if logprobs.numel():
        batch, length = last.numel(), logprobs.shape[-1]
        rows, steps = row_tile(length)
        with device_of(logprobs):
            _launch_rewards_bwd(
                programs_for(batch, rows), grad_rewards.contiguous(), grad_kls.contiguous(),
                grad_sums.contiguous(), logprobs, ref_logprobs, mask, last, *_split(coef),
                dlogprobs, dref, dscores, batch, length, KIND=kind, ROWS=rows, STEPS=steps,
            )  # fmt: skip
    elif dscores is not None:
        dscores.zero_()
    return dlogprobs, dref, dscores


PENALTY = Backend(penalty_forward, penalty_backward)
REWARDS = Backend(rewards_forward, rewards_backward)
