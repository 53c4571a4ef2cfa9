"""The PPO loss: one launch over the tokens, and a scale backward.

The pass sees neither the denominator nor the upstream gradient, so it stores the gradient of the
*sum*; both are applied in the backward launch. Every program writes its sums, and whichever ends
last adds up those of all, always in the same order: no bit depends on which one it is.

One program for all tokens would need no such meeting, but at 70 to 250 instructions per token a
multiprocessor takes as long for 4,096 of them as a second launch does, and mini-batches are often
longer.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import Backend
from ..policy_losses import PPO_CLIP
from ..sequence_ratios import over_sequences, token_weights
from ..types import LOG_RATIO_LIMIT, LossStats
from .kl import kl_slope, kl_value
from .last_program import arrival_counters, arrives_last
from .launch import launcher
from .tiles import TILE, device_of, exact_exp, load_counted, load_mask, programs_for, row_tile

STATS = 16  # one more than LossStats.NAMES: a power of two
WIDE = 8 * TILE  # elements of a mask that are counted at a time
_STATS = tl.constexpr(STATS)
MOST_PROGRAMS = 512  # about as many as an H100 runs at a time; others walk several tiles
_MOST_PROGRAMS = tl.constexpr(MOST_PROGRAMS)
_LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
_LOSS = tl.constexpr(LossStats.NAMES.index("loss"))
_ROWS = _LOSS  # the loss is no sum: its place is for the number of rows that count
_POLICY_LOSS = tl.constexpr(LossStats.NAMES.index("policy_loss"))
_VALUE_LOSS = tl.constexpr(LossStats.NAMES.index("value_loss"))
_KL_LOSS = tl.constexpr(LossStats.NAMES.index("kl_loss"))
_CLIPFRAC = tl.constexpr(LossStats.NAMES.index("clipfrac"))
_CLIPFRAC_LOW = tl.constexpr(LossStats.NAMES.index("clipfrac_low"))
_CLIPFRAC_HIGH = tl.constexpr(LossStats.NAMES.index("clipfrac_high"))
_VALUE_CLIPFRAC = tl.constexpr(LossStats.NAMES.index("value_clipfrac"))
_APPROX_KL = tl.constexpr(LossStats.NAMES.index("approx_kl"))
_POLICY_KL = tl.constexpr(LossStats.NAMES.index("policy_kl"))
_MEAN_RATIO = tl.constexpr(LossStats.NAMES.index("mean_ratio"))
_CLAMPED_RATIOS = tl.constexpr(LossStats.NAMES.index("clamped_ratios"))
_VALUE_MEAN = tl.constexpr(LossStats.NAMES.index("value_mean"))
_VALUE_ERROR = tl.constexpr(LossStats.NAMES.index("value_error"))
_TOKENS = tl.constexpr(LossStats.NAMES.index("tokens"))


@triton.jit
def _with_sum(sums, which: tl.constexpr, x):
    """``sums`` [STATS] with Σ x added to its entry ``which``."""
    return sums + tl.where(tl.arange(0, _STATS) == which, tl.sum(x.to(tl.float32)), 0.0)


@triton.jit
def _row_counts(mask_ptr, row, in_batch, T, WIDE: tl.constexpr):
    """Counted tokens of whole rows [ROWS, 1], of which a tile holds a part."""
    counts = tl.zeros(row.shape, tl.int32)
    for start in range(0, T, WIDE):
        step = start + tl.arange(0, WIDE)[None, :]
        counted = load_mask(mask_ptr, row * T + step, in_batch & (step < T))
        counts += tl.sum(counted.to(tl.int32), axis=1, keep_dims=True)
    return counts.to(tl.float32)


@triton.jit
def _store_loss(
    partials_ptr,  # [programs, STATS]; the first becomes 1 / denominator
    programs,
    denominator_ptr,  # [], or None
    denominator,  # or None; the aggregation counts it where both are None
    loss_ptr,  # []
    stats_ptr,  # [STATS - 1]
    value_coef,
    kl_coef,
    BY_ROWS: tl.constexpr,
):
    """Adds up the sums of all programs and writes what is made of them."""
    which = tl.arange(0, _STATS)
    program = tl.arange(0, _MOST_PROGRAMS)[:, None]  # at once: a loop would wait in each round
    at = partials_ptr + program * _STATS + which[None, :]
    sums = tl.load(at, mask=program < programs, other=0.0, cache_modifier=".cg")
    totals = tl.sum(sums, axis=0)
    tokens = tl.sum(tl.where(which == _TOKENS, totals, 0.0), axis=0)

    if denominator_ptr is not None:
        total = tl.load(denominator_ptr).to(tl.float32)
    elif denominator is not None:
        total = tl.cast(denominator, tl.float32)
    elif BY_ROWS:
        total = tl.maximum(tl.sum(tl.where(which == _ROWS, totals, 0.0), axis=0), 1.0)
    else:
        total = tl.maximum(tokens, 1.0)

    is_loss = (which == _POLICY_LOSS) | (which == _VALUE_LOSS) | (which == _KL_LOSS)
    is_count = (which == _TOKENS) | (which == _CLAMPED_RATIOS)
    divisor = tl.where(is_loss, total, tl.where(is_count, 1.0, tl.maximum(tokens, 1.0)))
    # A denominator of 0 comes from ranks that all count nothing: their loss is 0.
    empty = divisor == 0.0
    stats = tl.where(empty, 0.0, tl.div_rn(totals, tl.where(empty, 1.0, divisor)))
    share = tl.where(which == _POLICY_LOSS, 1.0, 0.0)
    share = tl.where(which == _VALUE_LOSS, tl.cast(value_coef, tl.float32), share)
    share = tl.where(which == _KL_LOSS, tl.cast(kl_coef, tl.float32), share)
    loss = tl.sum(tl.where(is_loss, share * stats, 0.0), axis=0)
    tl.store(loss_ptr, loss)
    tl.store(stats_ptr + which, tl.where(which == _LOSS, loss, stats), mask=which < _STATS - 1)
    inverse = tl.div_rn(tl.where(which == _LOSS, 1.0, 0.0), tl.where(total == 0.0, 1.0, total))
    tl.debug_barrier()  # other threads may still read the first sum, which this replaces
    tl.store(partials_ptr, tl.where(total == 0.0, 0.0, tl.sum(inverse, axis=0)))


@triton.jit
def _gradients(out_ptr, programs, n, DLOGPROBS: tl.constexpr):
    """Pointers to the gradients by log-probs and by values, which lie behind the programs' sums
    [programs, STATS], each from a multiple of 64 bytes on: one piece of memory takes the host a
    microsecond less than two."""
    first = out_ptr + programs * _STATS
    return first, first + (tl.cdiv(n, 16) * 16 if DLOGPROBS else 0)


@triton.jit(do_not_specialize=["N"])
def _ppo_loss_fwd_kernel(
    logprobs_ptr,  # [N, T], as are all tensors up to the gradients
    old_logprobs_ptr,
    advantages_ptr,
    mask_ptr,  # bool
    weights_ptr,  # or None
    values_ptr,  # or None, and so the next two
    old_values_ptr,
    returns_ptr,
    ref_logprobs_ptr,  # or None
    token_weights_ptr,  # or None
    of_sequences_ptr,  # or None: log-ratios of sequences, in place of the tokens'; "vespo": log φ
    out_ptr,  # fp32, see _gradients: sums of programs, and the gradient of the sum of all
    arrived_ptr,  # [1] int32: programs that have written theirs; 0 before and after
    denominator_ptr,  # see _store_loss, as to the next two
    loss_ptr,  # or None: gradients only
    stats_ptr,
    N,  # 1 where rows do not matter: T are all tokens
    T,
    low,  # the ratio's bounds
    high,
    dual_clip,  # or None
    delta_or_tau,  # δ, the most that a ratio weighs outside of the clip, or None; "sapo": τ, A > 0
    tau_below,  # "sapo": τ where A ≤ 0; else None
    value_cliprange,
    value_coef,
    kl_coef,
    denominator,
    DLOGPROBS: tl.constexpr,  # which gradients are wanted
    DVALUES: tl.constexpr,
    KL_KIND: tl.constexpr,
    POLICY_LOSS: tl.constexpr,  # of POLICY_LOSSES
    KL_APART: tl.constexpr,  # the gradient by log-probs is without the KL term's
    BY_ROWS: tl.constexpr,  # count rows
    ROW_MEANS: tl.constexpr,  # a token weighs 1 / counted tokens of its row, not 1
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,  # of a row's mask at a time, or 0 where a tile holds whole rows
):
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    sums_of = 0 if loss_ptr is None else programs
    dlogprobs_ptr, dvalues_ptr = _gradients(out_ptr, sums_of, tl.cast(N, tl.int64) * T, DLOGPROBS)
    sums = tl.zeros([_STATS], tl.float32)
    blocks = tl.cdiv(T, STEPS)
    for tile in range(program, tl.cdiv(N, ROWS) * blocks, programs):
        row = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        start = (tile % blocks).to(tl.int64) * STEPS
        step = start + tl.arange(0, STEPS)[None, :]
        at = row * T + step
        inside = (row < N) & (step < T)
        counted = load_mask(mask_ptr, at, inside)
        weight = tl.where(counted, 1.0, 0.0)
        if BY_ROWS:
            if WIDE == 0:
                # Counts are fp32: for integers sm_90 would take a stack.
                counts = tl.sum(weight, axis=1, keep_dims=True)
            else:
                counts = _row_counts(mask_ptr, row, row < N, T, WIDE)
            if ROW_MEANS:
                one = tl.full(counts.shape, 1.0, tl.float32)
                weight *= tl.div_rn(one, tl.maximum(counts, 1.0))
            sums = _with_sum(sums, _ROWS, (counts > 0) & (start == 0))
        if token_weights_ptr is not None:
            weight *= load_counted(token_weights_ptr, at, counted, inside)

        logprobs = load_counted(logprobs_ptr, at, counted, inside)
        log_ratio = logprobs - load_counted(old_logprobs_ptr, at, counted, inside)
        advantages = load_counted(advantages_ptr, at, counted, inside)
        level = log_ratio
        if of_sequences_ptr is not None and POLICY_LOSS != "vespo":
            level = load_counted(of_sequences_ptr, at, counted, inside)
        # A log-prob of NaN is to show: a plain minimum or maximum would pick the other number.
        ratio = exact_exp(tl.clamp(level, -_LIMIT, _LIMIT, tl.PropagateNan.ALL))
        if POLICY_LOSS == "cispo":
            is_clipped = (ratio < low) | (ratio > high)
            bounded = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
            slope = -advantages * bounded
            loss = slope * logprobs
        elif POLICY_LOSS == "sapo":
            above = tl.cast(delta_or_tau, tl.float32)
            soft = tl.where(advantages > 0, above, tl.cast(tau_below, tl.float32))
            far = exact_exp(-soft * tl.abs(ratio - 1.0))  # at most 1
            share = tl.div_rn(tl.where(ratio > 1.0, 1.0, far), 1.0 + far)
            loss = -advantages * tl.div_rn(4.0 * share, soft)
            bell = tl.div_rn(4.0 * far, (1.0 + far) * (1.0 + far))
            slope = -advantages * bell * ratio
            is_clipped = ratio != ratio
        elif POLICY_LOSS == "vespo":
            slope = -advantages * exact_exp(load_counted(of_sequences_ptr, at, counted, inside))
            loss = slope * logprobs
            is_clipped = ratio != ratio
        else:
            tl.static_assert(POLICY_LOSS == "clip", "a policy loss without a kernel")
            unclipped = -advantages * ratio
            near = tl.minimum(tl.maximum(ratio, low), high)
            if delta_or_tau is not None:
                most = tl.cast(delta_or_tau, tl.float32)
                unclipped = tl.where(ratio > most, -advantages * most, unclipped)
            clipped = -advantages * near
            is_clipped = clipped > unclipped
            is_cut = is_clipped
            loss = tl.where(is_clipped, clipped, unclipped)
            if delta_or_tau is not None:
                # Between δ and the clip range's end the larger branch is that of the ratio itself.
                is_cut = tl.where(is_clipped, near != ratio, ratio > most)
                is_clipped = is_clipped & (near != ratio)
            slope = tl.where(is_cut, 0.0, loss)
            if dual_clip is not None:
                bound = -advantages * tl.cast(dual_clip, tl.float32)
                beyond = (advantages < 0) & (loss > bound)
                loss = tl.where(beyond, bound, loss)
                slope = tl.where(beyond, 0.0, slope)
        if weights_ptr is not None:
            weights = load_counted(weights_ptr, at, counted, inside)
            loss *= weights
            slope *= weights
        sums = _with_sum(sums, _POLICY_LOSS, loss * weight)
        sums = _with_sum(sums, _CLIPFRAC, is_clipped)
        sums = _with_sum(sums, _CLIPFRAC_LOW, is_clipped & (ratio < 1.0))
        sums = _with_sum(sums, _CLIPFRAC_HIGH, is_clipped & (ratio > 1.0))
        sums = _with_sum(sums, _APPROX_KL, 0.5 * log_ratio * log_ratio)
        sums = _with_sum(sums, _POLICY_KL, -log_ratio)
        sums = _with_sum(sums, _MEAN_RATIO, tl.where(counted, ratio, 0.0))
        sums = _with_sum(sums, _CLAMPED_RATIOS, tl.abs(level) > _LIMIT)
        sums = _with_sum(sums, _TOKENS, counted)

        if ref_logprobs_ptr is not None:
            d = logprobs - load_counted(ref_logprobs_ptr, at, counted, inside)
            if not KL_APART:
                slope += tl.cast(kl_coef, tl.float32) * kl_slope(d, KL_KIND)
            sums = _with_sum(sums, _KL_LOSS, kl_value(d, KL_KIND) * weight)
        if DLOGPROBS:
            tl.store(dlogprobs_ptr + at, tl.where(counted, slope * weight, 0.0), mask=inside)

        if values_ptr is not None:
            values = load_counted(values_ptr, at, counted, inside)
            old_values = load_counted(old_values_ptr, at, counted, inside)
            returns = load_counted(returns_ptr, at, counted, inside)
            reach = tl.cast(value_cliprange, tl.float32)
            near = tl.minimum(tl.maximum(values, old_values - reach), old_values + reach)
            error = (values - returns) * (values - returns)
            near_error = (near - returns) * (near - returns)
            value_clipped = near_error > error
            value_loss = 0.5 * tl.where(value_clipped, near_error, error)
            sums = _with_sum(sums, _VALUE_LOSS, value_loss * weight)
            sums = _with_sum(sums, _VALUE_CLIPFRAC, value_clipped)
            sums = _with_sum(sums, _VALUE_MEAN, values)
            sums = _with_sum(sums, _VALUE_ERROR, error)
            if DVALUES:
                value_slope = tl.where(value_clipped, 0.0, values - returns) * weight
                value_slope *= tl.cast(value_coef, tl.float32)
                tl.store(dvalues_ptr + at, value_slope, mask=inside)

    if loss_ptr is not None:
        tl.store(out_ptr + program * _STATS + tl.arange(0, _STATS), sums)
        if arrives_last(arrived_ptr, programs):
            _store_loss(
                out_ptr, programs, denominator_ptr, denominator, loss_ptr, stats_ptr, value_coef,
                kl_coef, BY_ROWS,
            )  # fmt: skip


_launch_fwd = launcher(_ppo_loss_fwd_kernel)
_FLAT = 1, TILE, 0
_AS_PPO = "clip", None, None, False
_ROW_MEANS = "seq-mean-token-mean"
_BY_ROWS = ("seq-mean-token-sum", _ROW_MEANS)


def _tiles(x, by_rows):
    """The number of programs, N and T, and ROWS, STEPS and WIDE of the kernel."""
    n = x.numel()
    if not n:
        return 1, (0, 1), _FLAT
    if not by_rows:
        return min(programs_for(n, TILE), MOST_PROGRAMS), (1, n), _FLAT
    length = x.shape[-1]
    batch = n // length
    rows, steps = row_tile(length)
    programs = programs_for(batch, rows) * programs_for(length, steps)
    return (
        min(programs, MOST_PROGRAMS),
        (batch, length),
        (rows, steps, 0 if length <= TILE else WIDE),
    )


def _padded(n):
    """Elements from one gradient's start to the next, see ``_gradients``."""
    return (n + 15) // 16 * 16


def _launch(logprobs, values, constants, settings, by_rows, tiles, outputs, wanted):
    """``outputs`` are the kernel's tensors from ``out_ptr`` to ``stats_ptr``, but for the
    denominator."""
    old_logprobs, advantages, mask, weights, old_values, returns, *others = constants
    ref_logprobs, denominator, token_weights, _, of_sequences = others
    low, high, dual_clip, aggregate, number, value_cliprange, value_coef, *others = settings
    kl_coef, kl_kind, objective = others
    policy_loss, delta_or_tau, tau_below, kl_apart = _AS_PPO
    if objective is not PPO_CLIP:
        policy_loss, _, delta_or_tau, soft, *_ = objective
        if policy_loss == "sapo":
            delta_or_tau, tau_below = soft[0], float(soft[1])
        kl_apart = objective.joins_slopes
    out, arrived, loss, stats = outputs
    programs, shape, tile = tiles
    # Constants become floats: a kernel would be compiled anew for an integer.
    _launch_fwd(
        programs, logprobs, old_logprobs, advantages, mask, weights, values, old_values, returns,
        ref_logprobs, token_weights, of_sequences, out, arrived, denominator, loss, stats,
        *shape, float(low), float(high), dual_clip and float(dual_clip),
        delta_or_tau and float(delta_or_tau), tau_below,
        float(value_cliprange), float(value_coef), float(kl_coef), number and float(number),
        *wanted, kl_kind, policy_loss, kl_apart, by_rows, aggregate == _ROW_MEANS, *tile,
    )  # fmt: skip


def _contiguous(constants):
    for x in constants:
        if x is not None and not x.is_contiguous():
            return type(constants)(*(x if x is None else x.contiguous() for x in constants))
    return constants


def policy_slopes(logprobs, constants, settings):
    """The gradient of the sum by log-probs; tokens weigh 1 times their importance weight. Where
    ratios are those of sequences, it is that of each token alone, without the KL term."""
    logprobs = logprobs.contiguous()
    constants = _contiguous(constants._replace(token_weights=None, denominator=None))
    settings = settings._replace(denominator=None, aggregate="token-mean")
    slopes = torch.empty_like(logprobs, dtype=torch.float32)
    if logprobs.numel():
        outputs, wanted = (slopes, None, None, None), (True, False)
        with device_of(logprobs):
            tiles = _tiles(logprobs, False)
            _launch(logprobs, None, constants, settings, False, tiles, outputs, wanted)
    return slopes


@triton.jit(do_not_specialize=["programs"])
def _ppo_loss_bwd_kernel(
    grad_ptr,  # []
    saved_ptr,  # fp32, as the forward kernel leaves it: begins with 1 / denominator
    dlogprobs_ptr,  # [n], or None
    dvalues_ptr,  # [n], or None
    n,
    programs,  # of the forward kernel
    BLOCK: tl.constexpr,
):
    scale = tl.load(grad_ptr).to(tl.float32) * tl.load(saved_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    by_logprobs, by_values = _gradients(saved_ptr, programs, n, dlogprobs_ptr is not None)
    if dlogprobs_ptr is not None:
        dlogprobs = tl.load(by_logprobs + at, mask=inside, other=0.0) * scale
        tl.store(dlogprobs_ptr + at, dlogprobs, mask=inside)
    if dvalues_ptr is not None:
        dvalues = tl.load(by_values + at, mask=inside, other=0.0) * scale
        tl.store(dvalues_ptr + at, dvalues, mask=inside)


_launch_bwd = launcher(_ppo_loss_bwd_kernel)


def forward(logprobs, values, constants, settings, wanted):
    """The loss, LossStats' tensor, and what backward takes, a tensor each."""
    logprobs = logprobs.contiguous()
    values = None if values is None else values.contiguous()
    by_rows = settings.aggregate in _BY_ROWS
    tiles = _tiles(logprobs, by_rows)
    size = tiles[0] * STATS + sum(wanted) * _padded(logprobs.numel())
    out = torch.empty(size, dtype=torch.float32, device=logprobs.device)
    loss, stats = out.new_empty(()), out.new_empty(STATS - 1)
    with device_of(logprobs):
        outputs = out, arrival_counters(logprobs), loss, stats
        constants = _contiguous(constants)
        _launch(logprobs, values, constants, settings, by_rows, tiles, outputs, wanted)
    objective = settings.objective
    if objective is not PPO_CLIP and wanted[0] and objective.joins_slopes:
        n = logprobs.numel()
        own = out[tiles[0] * STATS :][:n].view(logprobs.shape)
        weights = token_weights(constants, settings)
        own.copy_(over_sequences(own, logprobs, weights, constants, settings))
    return loss, stats, (out,)


def backward(grad, saved, shape, dtypes, wanted):
    (saved,) = saved
    dlogprobs = saved.new_empty(shape, dtype=dtypes[0]) if wanted[0] else None
    dvalues = saved.new_empty(shape, dtype=dtypes[1]) if wanted[1] else None
    n = shape.numel()
    if n:
        programs = (saved.numel() - sum(wanted) * _padded(n)) // STATS
        with device_of(saved):
            _launch_bwd(
                programs_for(n, TILE), grad, saved, dlogprobs, dvalues, n, programs, BLOCK=TILE
            )
    return dlogprobs, dvalues


PASSES = Backend(forward, backward)
