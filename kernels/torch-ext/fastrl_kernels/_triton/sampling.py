"""Sampling tokens: the statistics of a row's parts, and a race that draws one of its tokens.

A row is cut into parts of TILE columns, and a program holds one part as a tile, in the order of its
columns, whatever the row's address. One pass over all parts finds their softmax statistics. Each is
also a number of groups of SIZE columns, which ``race.part_size`` sets: their weights race, and then
the tokens of the group that won (``race`` says how, and why so).

Top-k, top-p and min-p come between: what they keep of each part, and the lowest logit they keep.
Top-k and top-p search that logit by its bits, in a code that orders as logits do, from the
highest digit down: a pass adds up, per part and digit, the tokens (or their weights) that the next
pass needs to choose its digit. Passes are as many as the dtype has digits, whatever the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..race import FIRST_PART, MOST
from ..rng import GAMMA
from ..types import SampledTokens, SamplingParameters
from .logprob import FLOOR, LN2, LOG2E, LOWEST
from .rows import per_row
from .tiles import device_of
from .vocab_tiles import (
    PART_ARGUMENTS,
    VocabTiles,
    load_part,
    part_weights,
    row_argument,
    row_parameter,
    sampling_temperature,
)

_DIGIT_BITS = tl.constexpr(4)
_DIGITS = tl.constexpr(16)
# Low bits of the fp32 code that are the same for all values of a narrower type.
_SAME_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
Found = tuple[Tensor | None, Tensor | None, Tensor | None]  # bins, prefixes and sums above
_NOTHING: Found = (None, None, None)
_GAMMA = tl.constexpr(GAMMA % 2**64)
_FIRST_PART, _MOST = tl.constexpr(FIRST_PART), tl.constexpr(MOST)


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_statistics_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    max_ptr,  # [N, parts] fp32. max x
    sum_ptr,  # [N, parts] fp32. Σ 2^a with a = (x - max)·log2(e)/T
    mean_ptr,  # [N, parts] fp32. Σ 2^a·a
    sum_t1_ptr,  # [N, parts] fp32. Σ exp(x - max), or None: T is 1
    groups_ptr,  # [N, parts, groups] fp32. Each group's part of the sum; how many maxima, if T is 0
    V,
    row_stride,
    parts,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
):
    at = tl.program_id(0)
    row = at // parts
    x = load_part(logits_ptr, row, row_stride, (at - row * parts) * TILE, V, TILE, TILE, VEC)
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    m = tl.max(tl.where(x > LOWEST, x, LOWEST), 0)  # NaN is left to the sums
    a = (x - m) * (LOG2E / t)
    e = tl.exp2(a)
    tl.store(max_ptr + at, m)
    tl.store(sum_ptr + at, tl.sum(e, 0))
    store_groups(groups_ptr, at, tl.where(greedy, tl.where(x == m, 1.0, 0.0), e), SIZE, TILE)
    tl.store(mean_ptr + at, tl.sum(e * tl.maximum(a, FLOOR), 0))
    if sum_t1_ptr is not None:
        tl.store(sum_t1_ptr + at, tl.sum(tl.exp2((x - m) * LOG2E), 0))


@triton.jit
def store_groups(groups_ptr, at, weights, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Stores the sums of a part's groups."""
    GROUPS: tl.constexpr = TILE // SIZE
    sums = tl.sum(tl.reshape(weights, [GROUPS, SIZE]), 1)
    tl.store(groups_ptr + at * GROUPS + tl.arange(0, GROUPS), sums)


@triton.jit
def ordered_code(x, SAME_BITS: tl.constexpr):
    """An unsigned integer that orders as x does; equal zeros have one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) | -2147483648)
    return ordered.to(tl.uint32, bitcast=True) >> SAME_BITS


@triton.jit
def in_row(part_max, row_max, highest, greedy):
    """What a part's weights are times in its row: ``highest`` is that of its highest logit."""
    return tl.where(greedy, tl.where(part_max == row_max, 1.0, 0.0), highest)


@triton.jit
def _narrowed(bins_ptr, prefix_ptr, above_ptr, row, parts, limit, PARTS: tl.constexpr):
    """A pass's result: the digits of the lowest kept code, one more than before, and what lies
    above all codes that begin with them. It is the lowest code with less than ``limit`` above."""
    index, digits = tl.arange(0, PARTS), tl.arange(0, _DIGITS)
    at = (row * parts + index)[:, None] * _DIGITS + digits[None, :]
    bins = tl.sum(tl.load(bins_ptr + at, mask=(index < parts)[:, None], other=0.0), 0)
    higher = digits[None, :] > digits[:, None]
    above = tl.load(above_ptr + row) + tl.sum(tl.where(higher, bins[None, :], 0.0), 1)
    digit = tl.min(tl.where(above < limit, digits, _DIGITS - 1), 0)
    prefix = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True)
    prefix = (prefix << _DIGIT_BITS) | digit.to(tl.uint32)
    return prefix, tl.sum(tl.where(digits == digit, above, 0.0), 0)


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_digit_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    max_ptr,  # [N, parts] fp32
    sum_ptr,  # [N, parts] fp32
    kept_ptr,  # [N, parts] fp32, what top-k kept; None: all
    limit_ptr,  # [N], or None: the number. top_k where tokens are counted, else top_p
    limit,
    bins_ptr,  # [N, parts, 16] fp32, the pass before's; None in the first
    prefix_ptr,  # [N] int32, likewise
    above_ptr,  # [N] fp32, likewise
    new_bins_ptr,  # [N, parts, 16] fp32, this pass's
    new_prefix_ptr,  # [N] int32
    new_above_ptr,  # [N] fp32
    V,
    row_stride,
    parts,
    position,  # of the digit's lowest bit
    COUNT: tl.constexpr,
    SAME_BITS: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Adds up, of one part, the tokens (or their weights) whose code begins with the digits found
    so far, by the next digit."""
    at = tl.program_id(0)
    row = at // parts
    part = at - row * parts
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    limit = row_parameter(limit_ptr, limit, row)
    if COUNT:
        if greedy | (limit <= 0) | (limit >= V):
            return
    elif greedy | (limit >= 1):
        return
    scale = LOG2E / t
    _, row_max, weights, _ = part_weights(max_ptr, sum_ptr, row, parts, scale, PARTS)
    if not COUNT:
        if kept_ptr is not None:
            index = tl.arange(0, PARTS)
            weights = tl.load(kept_ptr + row * parts + index, mask=index < parts, other=0.0)
        limit = limit * tl.sum(weights, 0)
    prefix = tl.full([], 0, tl.uint32)
    above = 0.0
    if bins_ptr is not None:
        prefix, above = _narrowed(bins_ptr, prefix_ptr, above_ptr, row, parts, limit, PARTS)
    if part == 0:
        tl.store(new_prefix_ptr + row, prefix.to(tl.int32, bitcast=True))
        tl.store(new_above_ptr + row, above)

    digits = tl.arange(0, _DIGITS)
    bins = tl.zeros([_DIGITS], tl.float32)
    # After the first digits most parts are wholly below them.
    highest = ordered_code(tl.load(max_ptr + at), SAME_BITS)
    if ((highest >> position) >> _DIGIT_BITS) >= prefix:
        x = load_part(logits_ptr, row, row_stride, part * TILE, V, TILE, TILE, VEC)
        code = ordered_code(x, SAME_BITS) >> position
        inside = ((code >> _DIGIT_BITS) == prefix) & (x > float("-inf"))
        digit = tl.where(inside, (code & (_DIGITS - 1)).to(tl.int32), -1)
        if COUNT:
            weight = tl.full([TILE], 1.0, tl.float32)
        else:
            weight = tl.exp2((x - row_max) * scale)
        for i in tl.static_range(_DIGITS):
            mass = tl.sum(tl.where(digit == i, weight, 0.0), 0)
            bins = tl.where(digits == i, mass, bins)
    tl.store(new_bins_ptr + at * _DIGITS + digits, bins)


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_kept_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    max_ptr,  # [N, parts] fp32
    sum_ptr,  # [N, parts] fp32
    top_k_ptr,  # [N], or None: the number
    top_k,
    k_bins_ptr,  # [N, parts, 16] fp32, the last pass's of top-k; None: no top-k
    k_prefix_ptr,  # [N] int32, likewise
    k_above_ptr,  # [N] fp32, likewise
    top_p_ptr,  # [N], or None: the number
    top_p,
    p_kept_ptr,  # [N, parts] fp32, what top-p was applied to; None: all
    p_bins_ptr,  # [N, parts, 16] fp32, the last pass's of top-p; None: no top-p
    p_prefix_ptr,  # [N] int32, likewise
    p_above_ptr,  # [N] fp32, likewise
    min_p_ptr,  # [N], or None: the number
    min_p,
    kept_ptr,  # [N, parts] fp32. Σ 2^a of what is kept, with a = (x - row's max)·log2(e)/T
    lowest_ptr,  # [N, parts] fp32. The lowest kept logit
    dropped_ptr,  # [N, parts] fp32. The highest other
    groups_ptr,  # [N, parts, groups] fp32, replaced by what is kept of each group; None: not wanted
    V,
    row_stride,
    parts,
    SAME_BITS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
):
    at = tl.program_id(0)
    row = at // parts
    part = at - row * parts
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / t
    _, row_max, weights, _ = part_weights(max_ptr, sum_ptr, row, parts, scale, PARTS)
    least = row_parameter(min_p_ptr, min_p, row)
    lowest_code = tl.full([], 0, tl.uint32)
    cut = least > 0
    if k_bins_ptr is not None:
        limit = row_parameter(top_k_ptr, top_k, row)
        by_k = (limit > 0) & (limit < V)
        cut = cut | by_k
        if by_k:
            lowest_code, _a = _narrowed(
                k_bins_ptr, k_prefix_ptr, k_above_ptr, row, parts, limit, PARTS
            )
    if p_bins_ptr is not None:
        limit = row_parameter(top_p_ptr, top_p, row)
        by_p = limit < 1
        cut = cut | by_p
        if by_p:
            if p_kept_ptr is not None:
                index = tl.arange(0, PARTS)
                weights = tl.load(p_kept_ptr + row * parts + index, mask=index < parts, other=0.0)
            limit = limit * tl.sum(weights, 0)
            code, _b = _narrowed(p_bins_ptr, p_prefix_ptr, p_above_ptr, row, parts, limit, PARTS)
            lowest_code = tl.maximum(lowest_code, code)
    part_max = tl.load(max_ptr + at)
    part_sum = tl.load(sum_ptr + at)
    highest = tl.exp2((part_max - row_max) * scale)
    if greedy | (cut == 0):
        tl.store(kept_ptr + at, part_sum * highest)
        tl.store(lowest_ptr + at, float("-inf"))
        tl.store(dropped_ptr + at, float("-inf"))
        if groups_ptr is not None:
            groups = groups_ptr + at * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
            tl.store(groups, tl.load(groups) * in_row(part_max, row_max, highest, greedy))
    elif (ordered_code(part_max, SAME_BITS) < lowest_code) | (highest < least):
        tl.store(kept_ptr + at, 0.0)
        tl.store(lowest_ptr + at, float("inf"))
        tl.store(dropped_ptr + at, tl.where(part_max > LOWEST, part_max, float("-inf")))
        if groups_ptr is not None:
            store_groups(groups_ptr, at, tl.zeros([TILE], tl.float32), SIZE, TILE)
    else:
        x = load_part(logits_ptr, row, row_stride, part * TILE, V, TILE, TILE, VEC)
        e = tl.exp2((x - row_max) * scale)
        kept = (ordered_code(x, SAME_BITS) >= lowest_code) & (e >= least)
        # Columns past the row's end and logits of -inf are never kept.
        kept = kept & (x > float("-inf"))
        e = tl.where(kept, e, 0.0)
        tl.store(kept_ptr + at, tl.sum(e, 0))
        if groups_ptr is not None:
            store_groups(groups_ptr, at, e, SIZE, TILE)
        tl.store(lowest_ptr + at, tl.min(tl.where(kept, x, float("inf")), 0))
        tl.store(
            dropped_ptr + at, tl.max(tl.where((x > LOWEST) & (kept == 0), x, float("-inf")), 0)
        )


def _search(
    parts: VocabTiles,
    statistics: list[Tensor],
    kept: Tensor | None,
    limit: float | Tensor,
    count: bool,
) -> Found:
    """All passes of top-k (``count``) or top-p; the last one's results, for ``_narrowed``."""
    same_bits = _SAME_BITS[parts.logits[0].dtype]
    digits = -(-(32 - same_bits) // _DIGIT_BITS.value)
    found = _NOTHING
    for digit in reversed(range(digits)):
        (bins,) = parts.new(1, _DIGITS.value)
        prefixes = bins.new_empty(parts.n, dtype=torch.int32)
        above = bins.new_empty(parts.n)
        _sample_digit_kernel[parts.grid](
            *parts.logits, *statistics, kept, *row_argument(limit), *found, bins, prefixes, above,
            *parts.sizes, digit * _DIGIT_BITS.value,
            COUNT=count, SAME_BITS=same_bits, **parts.shapes, **parts.all,
        )  # fmt: skip
        found = (bins, prefixes, above)
    return found


def _keep(
    parts: VocabTiles,
    statistics: list[Tensor],
    p: SamplingParameters,
    by_k: Found,
    by_p: Found = _NOTHING,
    k_kept: Tensor | None = None,
    min_p: float | Tensor = 0.0,
    groups: Tensor | None = None,
) -> list[Tensor]:
    results = parts.new(3)
    _sample_kept_kernel[parts.grid](
        *parts.logits, *statistics, *row_argument(p.top_k), *by_k,
        *row_argument(p.top_p), k_kept, *by_p, *row_argument(min_p), *results, groups,
        *parts.sizes, SAME_BITS=_SAME_BITS[parts.logits[0].dtype],
        **parts.race, **parts.shapes, **parts.all,
    )  # fmt: skip
    return results


def _truncate(
    parts: VocabTiles, statistics: list[Tensor], groups: Tensor, p: SamplingParameters
) -> list[Tensor] | list[None]:
    """Per part: the weight of what is kept, its lowest logit, and the highest of the others. None,
    where nothing is cut; else ``groups`` becomes what is kept of them. ``statistics``: the parts'
    maxima and weights."""
    by_k, by_p, by_min = p.truncates(parts.vocabulary)
    if not (by_k or by_p or by_min):
        return [None, None, None]
    k_found, p_found, k_kept = _NOTHING, _NOTHING, None
    if by_k:
        k_found = _search(parts, statistics, None, p.top_k, count=True)
    if by_p:
        if by_k:
            k_kept, *_ = _keep(parts, statistics, p, k_found)
        p_found = _search(parts, statistics, k_kept, p.top_p, count=False)
    return _keep(parts, statistics, p, k_found, p_found, k_kept, p.min_p, groups)


@triton.jit
def _mixed(x):
    """``rng.mixed`` of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def race_state(key):
    return _mixed(key.to(tl.uint64, bitcast=True) + _GAMMA)


@triton.jit
def exponential(state, counter):
    """``race.exponentials``: the same uniforms, and their logarithms to rounding."""
    bits = _mixed(state + counter.to(tl.uint64) * _GAMMA) >> 17
    high = (bits >> 23).to(tl.int32).to(tl.float32)
    low = (bits & 0x7FFFFF).to(tl.int32).to(tl.float32)
    # Powers of 2: only the sum is rounded.
    u = tl.minimum(high * 5.9604644775390625e-08 + (low + 0.5) * 7.105427357601002e-15, _MOST)
    # -log(1 - u) = 2·atanh(u/(2 - u)), by its series where 1 - u and its logarithm would round off
    # what small variates, which win, differ by.
    s = u / (2.0 - u)
    z = s * s
    series = 2.0 * s * (1.0 + z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7))))
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_draw_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    keys_ptr,  # [N] int64
    max_ptr,  # [N, parts] fp32
    sum_ptr,  # [N, parts] fp32
    mean_ptr,  # [N, parts] fp32
    sum_t1_ptr,  # [N, parts] fp32, or None: T is 1
    kept_ptr,  # [N, parts] fp32, or None: nothing is cut
    lowest_ptr,  # [N, parts] fp32, likewise
    dropped_ptr,  # [N, parts] fp32, likewise
    groups_ptr,  # [N, parts, groups] fp32. Weights below the part's maximum; the row's, if cut
    tokens_ptr,  # [N] int64
    logprobs_ptr,  # [N] fp32
    logprobs_t1_ptr,  # [N] fp32
    truncated_ptr,  # [N] fp32
    cutoffs_ptr,  # [N] fp32
    entropies_ptr,  # [N] fp32
    V,
    row_stride,
    parts,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    state = race_state(tl.load(keys_ptr + row))
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / t
    index = tl.arange(0, PARTS)
    at = row * parts + index
    part_max, row_max, weights, a = part_weights(max_ptr, sum_ptr, row, parts, scale, PARTS)
    row_sum = tl.sum(weights, 0)
    sound = (row_sum > 0) & (row_sum < float("inf"))
    log_sum = tl.log(row_sum)
    mean = tl.load(mean_ptr + at, mask=index < parts, other=0.0)
    mean = tl.sum(tl.fma(tl.exp2(a), mean, weights * tl.maximum(a, FLOOR)), 0) / row_sum * LN2
    log_sum_t1 = log_sum
    if sum_t1_ptr is not None:
        sum_t1 = tl.load(sum_t1_ptr + at, mask=index < parts, other=0.0)
        log_sum_t1 = tl.log(tl.sum(sum_t1 * tl.exp2((part_max - row_max) * LOG2E), 0))
    cutoff = tl.full([], float("-inf"), tl.float32)
    log_kept = log_sum
    if kept_ptr is not None:
        weights = tl.load(kept_ptr + at, mask=index < parts, other=0.0)
        log_kept = tl.log(tl.sum(weights, 0))
        lowest = tl.min(tl.load(lowest_ptr + at, mask=index < parts, other=float("inf")), 0)
        dropped = tl.load(dropped_ptr + at, mask=index < parts, other=float("-inf"))
        cutoff = tl.where(tl.max(dropped, 0) > float("-inf"), lowest, cutoff)

    ALL: tl.constexpr = PARTS * GROUPS
    index = tl.arange(0, ALL)
    at = row * parts * GROUPS + index
    weights = tl.load(groups_ptr + at, mask=index < parts * GROUPS, other=0.0)
    if kept_ptr is None:
        highest = in_row(part_max, row_max, tl.exp2(a), greedy)[:, None]
        weights *= tl.reshape(tl.broadcast_to(highest, [PARTS, GROUPS]), [ALL])
    score = weights / exponential(state, index.to(tl.int64) + _FIRST_PART)
    score = tl.where(greedy, tl.where(weights > 0, 1.0, 0.0), score)
    first = tl.argmax(tl.where(sound, score, 0.0), 0) * SIZE
    x = load_part(logits_ptr, row, row_stride, first, V, SIZE, TILE, VEC)
    slots = tl.arange(0, TILE)
    score = tl.exp2((x - row_max) * scale) / exponential(state, first + slots)
    score = tl.where(greedy, tl.where(x == row_max, 1.0, 0.0), tl.where(x >= cutoff, score, 0.0))
    token = (first + tl.argmax(tl.where(sound, score, 0.0), 0)).to(tl.int64)

    nan = float("nan")
    start = logits_ptr + row.to(tl.int64) * row_stride
    d = tl.load(start + token, mask=token < V, other=0.0).to(tl.float32) - row_max
    scaled = tl.div_rn(d, t)
    tl.store(tokens_ptr + row, tl.where(sound, token, -1))
    tl.store(logprobs_ptr + row, tl.where(sound, scaled - log_sum, nan))
    tl.store(logprobs_t1_ptr + row, tl.where(sound, d - log_sum_t1, nan))
    tl.store(truncated_ptr + row, tl.where(sound, scaled - log_kept, nan))
    tl.store(cutoffs_ptr + row, tl.where(sound, cutoff, nan))
    tl.store(entropies_ptr + row, tl.where(sound, log_sum - mean, nan))


def sample(logits: Tensor, keys: Tensor, p: SamplingParameters) -> SampledTokens:
    """``sample_tokens`` of checked arguments."""
    n = len(logits)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    results = [torch.empty(n, device=logits.device) for _ in SampledTokens._fields[1:]]
    if n == 0:
        return SampledTokens(tokens, *results)
    at_one = not isinstance(p.temperature, Tensor) and p.temperature in (0.0, 1.0)
    with device_of(logits):
        parts = VocabTiles(logits, p.temperature)
        *statistics, mean = parts.new(3)
        (groups,) = parts.new(1, parts.groups)
        sum_t1 = None if at_one else parts.new(1)[0]
        _sample_statistics_kernel[parts.grid](
            *parts.logits, *statistics, mean, sum_t1, groups, *parts.sizes,
            **parts.race, **parts.shapes,
        )  # fmt: skip
        kept = _truncate(parts, statistics, groups, p)
        _sample_draw_kernel[(n,)](
            *parts.logits, per_row(keys), *statistics, mean, sum_t1, *kept, groups, tokens,
            *results, *parts.sizes, **parts.winner, **parts.all,
        )  # fmt: skip
    return SampledTokens(tokens, *results)
