"""The PPO loss: one pass over the tokens, one ordered reduction, and a scale backward.

The pass sees neither the denominator nor the upstream gradient, so it stores the gradient of the
*sum*; both are applied in the backward launch.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import Backend
from ..types import LOG_RATIO_LIMIT, LossStats
from .kl import kl_slope, kl_value
from .launch import launcher
from .tiles import TILE, device_of, exact_exp, load_counted, load_mask, programs_for

STATS = 16  # one more than LossStats.NAMES: a power of two
_LIMIT = tl.constexpr(LOG_RATIO_LIMIT)
_LOSS = tl.constexpr(LossStats.NAMES.index("loss"))
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
def _store_sum(partials_ptr, which: tl.constexpr, x):
    """Σ x of this program, as one column entry of [STATS, programs]."""
    if partials_ptr is not None:
        at = which * tl.num_programs(0) + tl.program_id(0)
        tl.store(partials_ptr + at, tl.sum(x.to(tl.float32), axis=0))


@triton.jit(do_not_specialize=["T"])
def _ppo_loss_fwd_kernel(
    logprobs_ptr,  # [n], and so all others but row_counts and partials
    old_logprobs_ptr,
    advantages_ptr,
    mask_ptr,  # bool
    weights_ptr,  # or None
    values_ptr,  # or None, and so the next two
    old_values_ptr,
    returns_ptr,
    ref_logprobs_ptr,  # or None
    token_weights_ptr,  # or None
    row_counts_ptr,  # [n / T] counted tokens of each row, or None: a token weighs 1
    dlogprobs_ptr,  # fp32 gradient of the sum, or None
    dvalues_ptr,  # the same
    partials_ptr,  # [STATS, programs] fp32, or None: no statistics
    n,
    T,
    low,  # the ratio's bounds
    high,
    dual_clip,  # or None
    value_cliprange,
    value_coef,
    kl_coef,
    KL_KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    low = tl.cast(low, tl.float32)
    high = tl.cast(high, tl.float32)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    counted = load_mask(mask_ptr, at, inside)
    weight = tl.where(counted, 1.0, 0.0)
    if row_counts_ptr is not None:
        row_counts = tl.load(row_counts_ptr + at // T, mask=inside, other=1)
        weight = tl.div_rn(weight, tl.maximum(row_counts, 1).to(tl.float32))
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
    _store_sum(partials_ptr, _POLICY_LOSS, loss * weight)
    _store_sum(partials_ptr, _CLIPFRAC, is_clipped)
    _store_sum(partials_ptr, _CLIPFRAC_LOW, is_clipped & (ratio < 1.0))
    _store_sum(partials_ptr, _CLIPFRAC_HIGH, is_clipped & (ratio > 1.0))
    _store_sum(partials_ptr, _APPROX_KL, 0.5 * log_ratio * log_ratio)
    _store_sum(partials_ptr, _POLICY_KL, -log_ratio)
    _store_sum(partials_ptr, _MEAN_RATIO, tl.where(counted, ratio, 0.0))
    _store_sum(partials_ptr, _CLAMPED_RATIOS, tl.abs(log_ratio) > _LIMIT)
    _store_sum(partials_ptr, _TOKENS, counted)

    if ref_logprobs_ptr is not None:
        d = logprobs - load_counted(ref_logprobs_ptr, at, counted, inside)
        slope += tl.cast(kl_coef, tl.float32) * kl_slope(d, KL_KIND)
        _store_sum(partials_ptr, _KL_LOSS, kl_value(d, KL_KIND) * weight)
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
        _store_sum(partials_ptr, _VALUE_LOSS, value_loss * weight)
        _store_sum(partials_ptr, _VALUE_CLIPFRAC, value_clipped)
        _store_sum(partials_ptr, _VALUE_MEAN, values)
        _store_sum(partials_ptr, _VALUE_ERROR, error)
        if dvalues_ptr is not None:
            value_slope = tl.where(value_clipped, 0.0, values - returns) * weight
            value_slope *= tl.cast(value_coef, tl.float32)
            tl.store(dvalues_ptr + at, value_slope, mask=inside)


@triton.jit(do_not_specialize=["partials", "rows"])
def _ppo_loss_reduce_kernel(
    partials_ptr,  # [STATS, partials]; the first, not a sum, becomes 1 / denominator
    row_counts_ptr,  # [rows] counted tokens of each row, or None
    denominator_ptr,  # [], or None
    denominator,  # or None; where both are, it is counted by the aggregation
    loss_ptr,  # []
    stats_ptr,  # [STATS - 1]
    partials,
    rows,
    value_coef,
    kl_coef,
    HAS_VALUE: tl.constexpr,
    HAS_KL: tl.constexpr,
    BY_ROWS: tl.constexpr,
    STATS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    which = tl.arange(0, STATS)
    is_value = (which == _VALUE_LOSS) | (which == _VALUE_CLIPFRAC)
    is_value = is_value | (which == _VALUE_MEAN) | (which == _VALUE_ERROR)
    written = (which < STATS - 1) & (which != _LOSS)  # which follows from the others
    if not HAS_VALUE:
        written = written & (is_value == 0)
    if not HAS_KL:
        written = written & (which != _KL_LOSS)
    sums = tl.zeros([STATS, CHUNK], tl.float32)
    for start in range(0, partials, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = written[:, None] & (at < partials)[None, :]
        sums += tl.load(
            partials_ptr + which[:, None] * partials + at[None, :], mask=inside, other=0.0
        )
    totals = tl.sum(sums, axis=1)
    tokens = tl.sum(tl.where(which == _TOKENS, totals, 0.0), axis=0)

    if denominator_ptr is not None:
        total = tl.load(denominator_ptr).to(tl.float32)
    elif denominator is not None:
        total = tl.cast(denominator, tl.float32)
    elif BY_ROWS:
        counting = tl.zeros([CHUNK], tl.float32)
        for start in range(0, rows, CHUNK):
            at = start + tl.arange(0, CHUNK)
            row_counts = tl.load(row_counts_ptr + at, mask=at < rows, other=0)
            counting += tl.where(row_counts > 0, 1.0, 0.0)
        total = tl.maximum(tl.sum(counting, axis=0), 1.0)
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
    tl.store(stats_ptr + which, tl.where(which == _LOSS, loss, stats), mask=which < STATS - 1)
    inverse = tl.div_rn(tl.where(which == _LOSS, 1.0, 0.0), tl.where(total == 0.0, 1.0, total))
    tl.store(partials_ptr, tl.where(total == 0.0, 0.0, tl.sum(inverse, axis=0)))


_launch_tokens = launcher(_ppo_loss_fwd_kernel)
_launch_reduce = launcher(_ppo_loss_reduce_kernel)


def _launch_terms(logprobs, values, constants, settings, row_counts, outputs):
    """Terms per token: ``outputs`` are the gradients of the sum by log-probs and values, and
    partial statistics, each None where not wanted."""
    n, length = logprobs.numel(), max(1, logprobs.shape[-1])
    if n:
        _launch_tokens(
            programs_for(n, TILE), logprobs, constants.old_logprobs, constants.advantages,
            constants.mask, constants.weights, values, constants.old_values, constants.returns,
            constants.ref_logprobs, constants.token_weights, row_counts, *outputs, n, length,
            float(settings.low), float(settings.high),
            None if settings.dual_clip is None else float(settings.dual_clip),
            float(settings.value_cliprange), float(settings.value_coef), float(settings.kl_coef),
            KL_KIND=settings.kl_kind, BLOCK=TILE,
        )  # fmt: skip


def _launch_fwd(logprobs, values, constants, settings, needs_logprobs, needs_values):
    """The two launches: loss [], stats, a tensor that begins with 1/denominator, and the gradients
    of the sum."""
    n, length = logprobs.numel(), max(1, logprobs.shape[-1])
    programs = programs_for(n, TILE)
    partials = logprobs.new_empty(STATS * max(1, programs), dtype=torch.float32)
    dlogprobs = torch.empty_like(logprobs, dtype=torch.float32) if needs_logprobs else None
    dvalues = torch.empty_like(values, dtype=torch.float32) if needs_values else None
    by_rows = settings.aggregate in ("seq-mean-token-sum", "seq-mean-token-mean")
    row_counts = None
    if by_rows:  # these aggregates need the lengths of whole rows
        row_counts = constants.mask.sum(-1, dtype=torch.int32).view(-1)
    per_row = row_counts if settings.aggregate == "seq-mean-token-mean" else None
    _launch_terms(logprobs, values, constants, settings, per_row, (dlogprobs, dvalues, partials))
    loss, stats = partials.new_empty(()), partials.new_empty(STATS - 1)
    denominator = settings.denominator
    _launch_reduce(
        1, partials, row_counts,
        constants.denominator, denominator and float(denominator),
        loss, stats, programs, n // length,
        float(settings.value_coef), float(settings.kl_coef),
        HAS_VALUE=values is not None, HAS_KL=constants.ref_logprobs is not None, BY_ROWS=by_rows,
        STATS=STATS, CHUNK=256, num_warps=8,
    )  # fmt: skip
    return loss, stats, partials, dlogprobs, dvalues


def _contiguous(constants):
    for x in constants:
        if x is not None and not x.is_contiguous():
            return type(constants)(*(x if x is None else x.contiguous() for x in constants))
    return constants


def policy_slopes(logprobs, constants, settings):
    """The gradient of the sum by log-probs; tokens weigh 1 times their importance weight."""
    constants = constants._replace(token_weights=None)
    constants = _contiguous(constants)
    slopes = torch.empty_like(logprobs, dtype=torch.float32)
    with device_of(logprobs):
        outputs = slopes, None, None
        _launch_terms(logprobs.contiguous(), None, constants, settings, None, outputs)
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
    """The loss, LossStats' tensor, and what backward takes."""
    logprobs = logprobs.contiguous()
    values = None if values is None else values.contiguous()
    constants = _contiguous(constants)
    with device_of(logprobs):
        loss, stats, *saved = _launch_fwd(logprobs, values, constants, settings, *wanted)
    return loss, stats, saved


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
