"""The PPO loss: one launch over the tokens, and a scale backward.

The pass sees neither the denominator nor the upstream gradient, so it stores the gradient of the
*sum*; both are applied in the backward launch. Every program writes its sums, and whichever ends
last adds up those of all, always in the programs' order: so no bit depends on which one it is.

One program for all tokens would need no such meeting, but a multiprocessor works at 70 to 250
instructions per token: 4,096 tokens would take it as long as a second launch takes all, and
mini-batches are often longer.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import Backend
from ..types import LOG_RATIO_LIMIT, LossStats
from .kl import kl_slope, kl_value
from .last_program import arrival_counters, arrives_last
from .launch import launcher
from .tiles import TILE, device_of, exact_exp, load_counted, load_mask, programs_for, row_tile

STATS = 16  # one more than LossStats.NAMES: a power of two
WIDE = 8 * TILE  # elements of a mask that are counted at a time
_STATS = tl.constexpr(STATS)
_CHUNK = tl.constexpr(256)  # programs whose sums are added up at a time
_LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
_LOSS = tl.constexpr(LossStats.NAMES.index("loss"))
_ROWS = _LOSS  # in its place, for it is no sum: how many rows count anywhere
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
    """``sums`` [STATS] whose entry ``which`` is Σ x."""
    return tl.where(tl.arange(0, _STATS) == which, tl.sum(x.to(tl.float32)), sums)


@triton.jit
def _row_counts(mask_ptr, row, in_batch, T, WIDE: tl.constexpr):
    """Counted tokens of whole rows [ROWS, 1], of which a tile holds a part."""
    counts = tl.zeros(row.shape, tl.int32)
    for start in range(0, T, WIDE):
        step = start + tl.arange(0, WIDE)[None, :]
        counted = load_mask(mask_ptr, row * T + step, in_batch & (step < T))
        counts += tl.sum(counted.to(tl.int32), axis=1, keep_dims=True)
    return counts


@triton.jit
def _store_loss(
    partials_ptr,  # [programs, STATS]; the first becomes 1 / denominator
    programs,
    denominator_ptr,  # [], or None
    denominator,  # or None; where both are, it is counted by the aggregation
    loss_ptr,  # []
    stats_ptr,  # [STATS - 1]
    value_coef,
    kl_coef,
    BY_ROWS: tl.constexpr,
):
    """Adds up the sums of all programs and writes what is made of them."""
    which = tl.arange(0, _STATS)
    sums = tl.zeros([_CHUNK, _STATS], tl.float32)
    for start in range(0, programs, _CHUNK):
        program = start + tl.arange(0, _CHUNK)[:, None]
        at = partials_ptr + program * _STATS + which[None, :]
        sums += tl.load(at, mask=program < programs, other=0.0, cache_modifier=".cg")
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


@triton.jit(do_not_specialize=["N"])
def _ppo_loss_fwd_kernel(
    logprobs_ptr,  # [N, T], and so all others up to the gradients
    old_logprobs_ptr,
    advantages_ptr,
    mask_ptr,  # bool
    weights_ptr,  # or None
    values_ptr,  # or None, and so the next two
    old_values_ptr,
    returns_ptr,
    ref_logprobs_ptr,  # or None
    token_weights_ptr,  # or None
    dlogprobs_ptr,  # fp32 gradient of the sum, or None
    dvalues_ptr,  # the same
    partials_ptr,  # [programs, STATS] fp32, or None: neither loss nor statistics
    arrived_ptr,  # [1] int32: programs that have written theirs; 0 before and after
    denominator_ptr,  # see _store_loss, as to all up to the statistics
    loss_ptr,
    stats_ptr,
    N,  # 1 where rows do not matter: T are all tokens
    T,
    low,  # the ratio's bounds
    high,
    dual_clip,  # or None
    value_cliprange,
    value_coef,
    kl_coef,
    denominator,
    KL_KIND: tl.constexpr,
    BY_ROWS: tl.constexpr,  # count rows
    ROW_MEANS: tl.constexpr,  # a token weighs 1 / counted tokens of its row, not 1
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,  # of a row's mask at a time, or 0 where a tile holds whole rows
):
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(T, STEPS)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    start = (program % blocks).to(tl.int64) * STEPS
    step = start + tl.arange(0, STEPS)[None, :]
    at = row * T + step
    inside = (row < N) & (step < T)
    counted = load_mask(mask_ptr, at, inside)
    weight = tl.where(counted, 1.0, 0.0)
    sums = tl.zeros([_STATS], tl.float32)
    if BY_ROWS:
        if WIDE == 0:
            counts = tl.sum(counted.to(tl.int32), axis=1, keep_dims=True)
        else:
            counts = _row_counts(mask_ptr, row, row < N, T, WIDE)
        if ROW_MEANS:
            weight = tl.div_rn(weight, tl.maximum(counts, 1).to(tl.float32))
        sums = _with_sum(sums, _ROWS, (counts > 0) & (start == 0))
    if token_weights_ptr is not None:
        weight *= load_counted(token_weights_ptr, at, counted, inside)

    logprobs = load_counted(logprobs_ptr, at, counted, inside)
    log_ratio = logprobs - load_counted(old_logprobs_ptr, at, counted, inside)
    advantages = load_counted(advantages_ptr, at, counted, inside)
    # A log-prob of NaN is to show, where a plain minimum or maximum would pick the other number.
    ratio = exact_exp(tl.clamp(log_ratio, -_LIMIT, _LIMIT, tl.PropagateNan.ALL))
    unclipped = -advantages * ratio
    clipped = -advantages * tl.minimum(tl.maximum(ratio, low), high)
    is_clipped = clipped > unclipped
    loss = tl.where(is_clipped, clipped, unclipped)
    slope = tl.where(is_clipped, 0.0, unclipped)
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
    sums = _with_sum(sums, _CLAMPED_RATIOS, tl.abs(log_ratio) > _LIMIT)
    sums = _with_sum(sums, _TOKENS, counted)

    if ref_logprobs_ptr is not None:
        d = logprobs - load_counted(ref_logprobs_ptr, at, counted, inside)
        slope += tl.cast(kl_coef, tl.float32) * kl_slope(d, KL_KIND)
        sums = _with_sum(sums, _KL_LOSS, kl_value(d, KL_KIND) * weight)
    if dlogprobs_ptr is not None:
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
        if dvalues_ptr is not None:
            value_slope = tl.where(value_clipped, 0.0, values - returns) * weight
            value_slope *= tl.cast(value_coef, tl.float32)
            tl.store(dvalues_ptr + at, value_slope, mask=inside)

    if partials_ptr is not None:
        tl.store(partials_ptr + program * _STATS + tl.arange(0, _STATS), sums)
        if arrives_last(arrived_ptr, programs):
            _store_loss(
                partials_ptr, programs, denominator_ptr, denominator, loss_ptr, stats_ptr,
                value_coef, kl_coef, BY_ROWS,
            )  # fmt: skip


_launch_fwd = launcher(_ppo_loss_fwd_kernel)
_FLAT = 1, TILE, 0
_ROW_MEANS = "seq-mean-token-mean"


def _tiles(x, by_rows):
    """N, T, the number of programs, and ROWS, STEPS and WIDE of the kernel."""
    n = x.numel()
    if not n:
        return 0, 1, 1, _FLAT
    if not by_rows:
        return 1, n, programs_for(n, TILE), _FLAT
    length = x.shape[-1]
    rows, steps = row_tile(length)
    programs = programs_for(n // length, rows) * programs_for(length, steps)
    return n // length, length, programs, (rows, steps, 0 if length <= TILE else WIDE)


def _launch(logprobs, values, constants, settings, by_rows, tiles, outputs):
    """``outputs`` are the kernel's from ``dlogprobs_ptr`` to ``arrived_ptr``, and then the loss and
    its statistics."""
    (
        old_logprobs, advantages, mask, weights, old_values, returns, ref_logprobs, denominator,
        token_weights,
    ) = constants  # fmt: skip
    low, high, dual_clip, aggregate, number, value_cliprange, value_coef, kl_coef, kind = settings
    N, T, programs, (ROWS, STEPS, WIDE) = tiles
    *gradients, partials, arrived, loss, stats = outputs
    _launch_fwd(
        programs, logprobs, old_logprobs, advantages, mask, weights, values, old_values, returns,
        ref_logprobs, token_weights, *gradients, partials, arrived, denominator, loss, stats, N, T,
        float(low), float(high), None if dual_clip is None else float(dual_clip),
        float(value_cliprange), float(value_coef), float(kl_coef),
        None if number is None else float(number),
        KL_KIND=kind, BY_ROWS=by_rows, ROW_MEANS=by_rows and aggregate == _ROW_MEANS,
        ROWS=ROWS, STEPS=STEPS, WIDE=WIDE,
    )  # fmt: skip


def _contiguous(constants):
    for x in constants:
        if x is not None and not x.is_contiguous():
            return type(constants)(*(x if x is None else x.contiguous() for x in constants))
    return constants


def policy_slopes(logprobs, constants, settings):
    """The gradient of the sum by log-probs; tokens weigh 1 times their importance weight."""
    logprobs = logprobs.contiguous()
    constants = _contiguous(constants._replace(token_weights=None, denominator=None))
    settings = settings._replace(denominator=None)
    slopes = torch.empty_like(logprobs, dtype=torch.float32)
    if logprobs.numel():
        tiles = _tiles(logprobs, False)
        outputs = slopes, None, None, None, None, None
        with device_of(logprobs):
            _launch(logprobs, None, constants, settings, False, tiles, outputs)
    return slopes


@triton.jit
def _ppo_loss_bwd_kernel(
    grad_ptr,  # []
    inverse_ptr,  # [1, …]
    dlogprobs_sum_ptr,  # [n] fp32, or None
    dvalues_sum_ptr,  # [n] fp32, or None
    dlogprobs_ptr,  # [n], or None
    dvalues_ptr,  # [n], or None
    n,
    BLOCK: tl.constexpr,
):
    scale = tl.load(grad_ptr).to(tl.float32) * tl.load(inverse_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if dlogprobs_ptr is not None:
        dlogprobs = tl.load(dlogprobs_sum_ptr + at, mask=inside, other=0.0) * scale
        tl.store(dlogprobs_ptr + at, dlogprobs, mask=inside)
    if dvalues_ptr is not None:
        dvalues = tl.load(dvalues_sum_ptr + at, mask=inside, other=0.0) * scale
        tl.store(dvalues_ptr + at, dvalues, mask=inside)


_launch_bwd = launcher(_ppo_loss_bwd_kernel)


def forward(logprobs, values, constants, settings, wanted):
    """The loss, LossStats' tensor, and what backward takes: a tensor that begins with
    1/denominator, and the gradients of the sum."""
    logprobs = logprobs.contiguous()
    values = None if values is None else values.contiguous()
    constants = _contiguous(constants)
    by_rows = settings.aggregate in ("seq-mean-token-sum", _ROW_MEANS)
    tiles = _tiles(logprobs, by_rows)
    partials = torch.empty(tiles[2] * STATS, dtype=torch.float32, device=logprobs.device)
    loss, stats = partials.new_empty(()), partials.new_empty(STATS - 1)
    dlogprobs = torch.empty_like(logprobs, dtype=torch.float32) if wanted[0] else None
    dvalues = torch.empty_like(values, dtype=torch.float32) if wanted[1] else None
    with device_of(logprobs):
        outputs = dlogprobs, dvalues, partials, arrival_counters(logprobs), loss, stats
        _launch(logprobs, values, constants, settings, by_rows, tiles, outputs)
    return loss, stats, (partials, dlogprobs, dvalues)


def backward(grad, saved, dtypes):
    inverse, *sums = saved
    results = [
        None if x is None else torch.empty_like(x, dtype=dtype)
        for x, dtype in zip(sums, dtypes, strict=True)
    ]
    one = sums[1] if sums[0] is None else sums[0]
    n = 0 if one is None else one.numel()
    if n:
        with device_of(inverse):
            _launch_bwd(programs_for(n, TILE), grad, inverse, *sums, *results, n, BLOCK=TILE)
    return results


PASSES = Backend(forward, backward)
