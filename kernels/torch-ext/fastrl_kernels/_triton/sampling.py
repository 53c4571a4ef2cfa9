"""Sampling tokens: the statistics of a row's groups, and a race that draws one of its tokens.

A row is cut into groups of SIZE columns, which ``race.part_size`` sets, and one pass finds the
softmax statistics of each. Their weights race, and then the tokens of the group that won (``race``
says how, and why so).

Top-k, top-p and min-p keep the logits from some lowest one up. The groups' statistics give a bound
of that: k groups have maxima of at least the k-th highest, and so k logits. A program per row
gathers the logits that reach its row's bound, from the groups whose maximum does; the one that
draws looks among them for the lowest that is kept, by the bits of a code that orders as logits do.
Where more logits reach the bound than there is room for, it looks among the groups themselves:
nothing but the time depends on how many there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..race import FIRST_PART, MOST
from ..types import SampledTokens, SamplingParameters
from .launch import launcher
from .logprob import FLOOR, LN2, LOG2E, LOWEST
from .rng import GAMMA_BITS, mixed
from .rows import align_down, per_row
from .tiles import device_of, power_of_2
from .vocab_tiles import (
    PART_ARGUMENTS,
    VocabTiles,
    group_weights,
    load_groups,
    load_part,
    row_argument,
    row_parameter,
    sampling_temperature,
)

# Low bits of the fp32 code that are the same for all values of a narrower type.
_SAME_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
_ROOM = 2048  # for logits of a row that reach its bound
# A row's bound is looked for by the high half of its bits, from those of -inf on.
_HALF = tl.constexpr(16)
_LEAST_HALF = tl.constexpr(0x7F)
# The share of a row's weight by which sums of it in fp32 may differ.
_ROUNDING = tl.constexpr(1e-5)
_FIRST_PART, _MOST = tl.constexpr(FIRST_PART), tl.constexpr(MOST)


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_statistics_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    max_ptr,  # [N, groups] fp32. max x; -inf where none is possible
    sum_ptr,  # [N, groups] fp32. Σ 2^a with a = (x - max)·log2(e)/T
    mean_ptr,  # [N, groups] fp32. Σ 2^a·a
    sum_t1_ptr,  # [N, groups] fp32. Σ exp(x - max), or None: T is 1
    V,
    row_stride,
    parts,
    SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
):
    at = tl.program_id(0)
    row = at // parts
    first = (at - row * parts) * TILE
    x = load_groups(logits_ptr, row, row_stride, first, V, SIZE, SPAN, TILE, VEC)
    t, _ = sampling_temperature(temperature_ptr, temperature, row)
    highest = tl.max(tl.max(x, 0), 1)
    d = x - tl.maximum(highest, LOWEST)[None, :, None]  # NaN is left to the sums
    a = d * (LOG2E / t)
    e = tl.exp2(a)
    groups = at * (TILE // SIZE) + tl.arange(0, TILE // SIZE)
    tl.store(max_ptr + groups, highest)
    tl.store(sum_ptr + groups, tl.sum(tl.sum(e, 0), 1))
    tl.store(mean_ptr + groups, tl.sum(tl.sum(e * tl.maximum(a, FLOOR), 0), 1))
    if sum_t1_ptr is not None:
        tl.store(sum_t1_ptr + groups, tl.sum(tl.sum(tl.exp2(d * LOG2E), 0), 1))


@triton.jit
def ordered_code(x, SAME_BITS: tl.constexpr):
    """An unsigned integer that orders as x does; equal zeros have one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) | -2147483648)
    return ordered.to(tl.uint32, bitcast=True) >> SAME_BITS


@triton.jit
def coded(code):
    """The x of an ``ordered_code`` of all bits."""
    bits = code.to(tl.int32, bitcast=True)
    return (bits ^ ((~bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def load_listed(logits_ptr, row, row_stride, groups, V, SIZE: tl.constexpr, VEC: tl.constexpr):
    """The columns of some groups of a row as fp32 [groups, SIZE]; -inf in slots without one, and
    in groups below 0."""
    start = logits_ptr + row.to(tl.int64) * row_stride
    slots = tl.arange(0, SIZE)[None, :]
    first = groups[:, None] * SIZE
    if SIZE < VEC:
        inside = (first >= 0) & (first + slots < V)
        x = tl.load(start + (first + slots), mask=inside, other=float("-inf")).to(tl.float32)
    else:
        aligned, shift = align_down(start, VEC)
        end = (shift + V + VEC - 1) // VEC * VEC
        whole = (first >= 0) & (first + slots < end)
        x = tl.load(aligned + (first + slots), mask=whole, other=float("-inf")).to(tl.float32)
        if shift > 0:
            # A group's last columns lie in the vector behind it, as in ``load_part``.
            at = first + SIZE + slots
            last = (first >= 0) & (at < end) & (slots < VEC)
            behind = tl.load(aligned + at, mask=last, other=float("-inf")).to(tl.float32)
            x = tl.where(slots < shift, behind, x)
            tile = tl.arange(0, x.numel)
            turned = tile // SIZE * SIZE + (tile + shift) % SIZE
            x = tl.reshape(tl.gather(tl.reshape(x, [x.numel]), turned, 0), x.shape)
    return tl.where((first >= 0) & (first + slots < V), x, float("-inf"))


@triton.jit
def listed_groups(listed, rank, i, LISTED: tl.constexpr):
    """The i-th LISTED groups of those ``listed``, whose ranks among them are given; -1 past the
    last."""
    index = tl.arange(0, listed.shape[0])
    wanted = i * LISTED + tl.arange(0, LISTED)
    found = listed[:, None] & (rank[:, None] == wanted[None, :])
    return tl.sum(tl.where(found, index[:, None] + 1, 0), 0) - 1


@triton.jit
def ranks(listed):
    """The rank of each group among those ``listed``, and how many there are."""
    rank = tl.cumsum(listed.to(tl.int32), 0) - 1
    return rank, tl.max(rank, 0) + 1


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_candidates_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    max_ptr,  # [N, groups] fp32
    sum_ptr,  # [N, groups] fp32
    top_k_ptr,  # [N], or None: the number
    top_k,
    top_p_ptr,  # [N], or None: the number
    top_p,
    min_p_ptr,  # [N], or None: the number
    min_p,
    bounds_ptr,  # [N] int32. A code that all logits reach which top-k and top-p need
    counts_ptr,  # [N] int32. How many logits reach it; above ROOM, not all of them are counted
    candidates_ptr,  # [N, ROOM] fp32. These logits
    V,
    row_stride,
    parts,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    LISTED: tl.constexpr,
    ROOM: tl.constexpr,
    VEC: tl.constexpr,
):
    row = tl.program_id(0)
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / t
    top_k = row_parameter(top_k_ptr, top_k, row)
    top_p = row_parameter(top_p_ptr, top_p, row)
    by_k = (top_k > 0) & (top_k < V)
    group_max, row_max, weights, a = group_weights(
        max_ptr, sum_ptr, row, parts * GROUPS, scale, ALL
    )
    total = tl.sum(weights, 0)
    sound = (total > 0) & (total < float("inf"))
    if greedy | (sound == 0) | ((by_k | (top_p < 1)) == 0):
        return

    # The highest bound such that k groups have a maximum above it; or that the logits above it
    # have top_p of the weight for certain: of each group that has one, its highest, and all
    # but the most that SIZE logits below the bound can have.
    highest = tl.exp2(a)
    code = ordered_code(group_max, _HALF)
    low, high = tl.full([], _LEAST_HALF, tl.uint32), ordered_code(row_max, _HALF)
    limit = tl.where(by_k, top_k, (top_p + _ROUNDING) * total)
    while low < high:
        middle = low + (high - low + 1) // 2
        below = tl.exp2((coded(middle << _HALF) - row_max) * scale)
        least = tl.where(by_k, 1.0, tl.maximum(highest, weights - SIZE * below))
        reached = tl.sum(tl.where(code >= middle, least, 0.0), 0) >= limit
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    bound = low << _HALF
    if (by_k & (top_p < 1)) == 0:
        # Where no sum over all logits is needed, min-p raises the bound; the logarithm is not
        # exact.
        min_p = row_parameter(min_p_ptr, min_p, row)
        if min_p > 0:
            least_logit = row_max + (tl.log2(min_p) - 0.01) / scale
            bound = tl.maximum(bound, ordered_code(least_logit, 0))

    listed = ordered_code(group_max, 0) >= bound
    rank, number = ranks(listed)
    candidates_ptr += row.to(tl.int64) * ROOM
    n, i = 0, 0
    while (i * LISTED < number) & (n <= ROOM):
        groups = listed_groups(listed, rank, i, LISTED)
        x = load_listed(logits_ptr, row, row_stride, groups, V, SIZE, VEC)
        x = tl.reshape(x, [LISTED * SIZE])
        found = (ordered_code(x, 0) >= bound) & (x > float("-inf"))
        at = n + tl.cumsum(found.to(tl.int32), 0) - 1
        tl.store(candidates_ptr + at, x, mask=found & (at < ROOM))
        n += tl.sum(found.to(tl.int32), 0)
        i += 1
    tl.store(bounds_ptr + row, bound.to(tl.int32, bitcast=True))
    tl.store(counts_ptr + row, n)


@triton.jit
def _three_sums(x, least, step, row_max, scale, count, SAME_BITS: tl.constexpr):
    """The numbers (``count``) or weights of the logits whose codes are at least ``least`` + 1, 2 or
    3 steps."""
    code = ordered_code(x, SAME_BITS)
    weight = tl.exp2((x - row_max) * scale)
    weight = tl.where(count & (x > float("-inf")), 1.0, weight)
    one = tl.sum(tl.where(code >= least + step, weight, 0.0), 0)
    two = tl.sum(tl.where(code >= least + 2 * step, weight, 0.0), 0)
    three = tl.sum(tl.where(code >= least + 3 * step, weight, 0.0), 0)
    return one, two, three


@triton.jit
def _sums(
    candidates,  # [ROOM] fp32, all -inf where there was no room
    further,  # how many logits are groups to be loaded, in fractions of LISTED
    listed,
    rank,
    logits_ptr,
    row,
    row_stride,
    V,
    least,
    step,
    row_max,
    scale,
    count,
    SAME_BITS: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    VEC: tl.constexpr,
):
    """``_three_sums`` of a row's candidates, or of its listed groups in their place."""
    one, two, three = _three_sums(candidates, least, step, row_max, scale, count, SAME_BITS)
    for i in range(further):
        groups = listed_groups(listed, rank, i, LISTED)
        x = load_listed(logits_ptr, row, row_stride, groups, V, SIZE, VEC)
        x = tl.reshape(x, [LISTED * SIZE])
        a, b, c = _three_sums(x, least, step, row_max, scale, count, SAME_BITS)
        one, two, three = one + a, two + b, three + c
    return one, two, three


@triton.jit
def _highest_with(
    limit,
    low,
    high,
    candidates,
    further,
    listed,
    rank,
    logits_ptr,
    row,
    row_stride,
    V,
    row_max,
    scale,
    count,
    SAME_BITS: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    VEC: tl.constexpr,
):
    """The highest code in [low, high] such that the logits from it up number (``count``) or weigh
    at least ``limit``; low where there is none. Each pass settles two bits."""
    while low < high:
        step = (high - low) // 4 + 1
        one, two, three = _sums(
            candidates, further, listed, rank, logits_ptr, row, row_stride, V, low, step,
            row_max, scale, count, SAME_BITS, SIZE, LISTED, VEC,
        )  # fmt: skip
        steps = (one >= limit).to(tl.uint32) + (two >= limit).to(tl.uint32)
        steps += (three >= limit).to(tl.uint32)
        low += steps * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _lowest_kept_code(
    logits_ptr,
    top_k,
    top_p,
    bounds_ptr,
    counts_ptr,
    candidates_ptr,
    group_max,
    row_max,
    row_sum,
    scale,
    row,
    row_stride,
    V,
    SAME_BITS: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    ROOM: tl.constexpr,
    VEC: tl.constexpr,
):
    """The lowest code that top-k and then top-p keep, of a row that one of them cuts."""
    bound = tl.load(bounds_ptr + row).to(tl.uint32, bitcast=True)
    number = tl.load(counts_ptr + row)
    slots = tl.arange(0, ROOM)
    room = number <= ROOM
    there = slots < tl.where(room, number, 0)
    candidates_ptr += row.to(tl.int64) * ROOM
    x = tl.load(candidates_ptr + slots, mask=there, other=float("-inf"))
    listed = ordered_code(group_max, 0) >= bound
    rank, groups = ranks(listed)
    further = tl.where(room, 0, tl.cdiv(groups, LISTED))
    low, high = bound >> SAME_BITS, ordered_code(row_max, SAME_BITS)
    limit, mass = top_k, row_sum
    by_k = (top_k > 0) & (top_k < V)
    # One body for both searches: it is the larger part of the kernel.
    for search in range(2):
        count = search == 0
        if tl.where(count, by_k, top_p < 1):
            low = _highest_with(
                limit, low, high, x, further, listed, rank, logits_ptr, row, row_stride, V,
                row_max, scale, count, SAME_BITS, SIZE, LISTED, VEC,
            )  # fmt: skip
            if count:
                mass, _b, _c = _sums(
                    x, further, listed, rank, logits_ptr, row, row_stride, V, low, low * 0,
                    row_max, scale, False, SAME_BITS, SIZE, LISTED, VEC,
                )  # fmt: skip
        limit = top_p * mass
    return low


@triton.jit
def race_state(key):
    return mixed(key.to(tl.uint64, bitcast=True) + GAMMA_BITS)


@triton.jit
def exponential(state, counter):
    """``race.exponentials``: the same uniforms, and their logarithms to rounding."""
    bits = mixed(state + counter.to(tl.uint64) * GAMMA_BITS) >> 17
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


@triton.jit
def race_of_groups(state, weights, group_max, row_max, greedy, sound):
    """The group that wins, and a row's weight."""
    index = tl.arange(0, weights.shape[0])
    score = weights / exponential(state, index.to(tl.int64) + _FIRST_PART)
    score = tl.where(greedy, tl.where(group_max == row_max, 1.0, 0.0), score)
    return tl.argmax(tl.where(sound, score, 0.0), 0)


@triton.jit
def _race_of_kept(
    logits_ptr,
    state,
    lowest,
    least,
    group_max,
    row_max,
    scale,
    row,
    row_stride,
    V,
    SAME_BITS: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    VEC: tl.constexpr,
):
    """The race of a row's kept logits, those from the code ``lowest`` and the weight ``least`` up:
    the group that wins, their weight, the lowest of them, and whether others are left out."""
    highest = tl.exp2((group_max - row_max) * scale)
    listed = (ordered_code(group_max, SAME_BITS) >= lowest) & (highest >= least)
    others = tl.max(((group_max > float("-inf")) & (listed == 0)).to(tl.int32), 0)
    rank, number = ranks(listed & (group_max > float("-inf")))
    listed = listed & (group_max > float("-inf"))
    winner, best, weight, cutoff = 0, 0.0, 0.0, float("inf")
    for i in range(tl.cdiv(number, LISTED)):
        groups = listed_groups(listed, rank, i, LISTED)
        x = load_listed(logits_ptr, row, row_stride, groups, V, SIZE, VEC)
        e = tl.exp2((x - row_max) * scale)
        # Columns past the row's end and logits of -inf are never kept.
        kept = (ordered_code(x, SAME_BITS) >= lowest) & (e >= least) & (x > float("-inf"))
        sums = tl.sum(tl.where(kept, e, 0.0), 1)
        score = sums / exponential(state, groups.to(tl.int64) + _FIRST_PART)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, groups, SIZE * V), 0)
        winner, best = tl.where(top > best, first, winner), tl.maximum(best, top)
        weight += tl.sum(sums, 0)
        cutoff = tl.minimum(cutoff, tl.min(tl.min(tl.where(kept, x, float("inf")), 1), 0))
        left = (x > float("-inf")) & (kept == 0)
        others = tl.maximum(others, tl.max(tl.max(left.to(tl.int32), 1), 0))
    return winner, weight, cutoff, others != 0


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_draw_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    keys_ptr,  # [N] int64
    max_ptr,  # [N, groups] fp32
    sum_ptr,  # [N, groups] fp32
    mean_ptr,  # [N, groups] fp32
    sum_t1_ptr,  # [N, groups] fp32, or None: T is 1
    top_k_ptr,  # [N], or None: the number
    top_k,
    top_p_ptr,  # [N], or None: the number
    top_p,
    min_p_ptr,  # [N], or None: the number
    min_p,
    bounds_ptr,  # [N] int32, or None: neither top-k nor top-p cuts
    counts_ptr,  # [N] int32, likewise
    candidates_ptr,  # [N, ROOM] fp32, likewise
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
    ALL: tl.constexpr,
    LISTED: tl.constexpr,  # 0: nothing is cut
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
    SAME_BITS: tl.constexpr,
):
    row = tl.program_id(0)
    state = race_state(tl.load(keys_ptr + row))
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / t
    groups = parts * GROUPS
    index = tl.arange(0, ALL)
    at = row * groups + index
    group_max, row_max, weights, a = group_weights(max_ptr, sum_ptr, row, groups, scale, ALL)
    row_sum = tl.sum(weights, 0)
    sound = (row_sum > 0) & (row_sum < float("inf"))
    log_sum = tl.log(row_sum)
    mean = tl.load(mean_ptr + at, mask=index < groups, other=0.0)
    mean = tl.sum(tl.fma(tl.exp2(a), mean, weights * tl.maximum(a, FLOOR)), 0) / row_sum * LN2
    log_sum_t1 = log_sum
    if sum_t1_ptr is not None:
        sum_t1 = tl.load(sum_t1_ptr + at, mask=index < groups, other=0.0)
        log_sum_t1 = tl.log(tl.sum(sum_t1 * tl.exp2((group_max - row_max) * LOG2E), 0))

    cutoff = tl.full([], float("-inf"), tl.float32)
    log_kept = log_sum
    if LISTED:
        top_k = row_parameter(top_k_ptr, top_k, row)
        top_p = row_parameter(top_p_ptr, top_p, row)
        least = row_parameter(min_p_ptr, min_p, row)
        searched = tl.full([], False, tl.int1)
        if bounds_ptr is not None:
            searched = ((top_k > 0) & (top_k < V)) | (top_p < 1)
        if (searched | (least > 0)) & sound & (greedy == 0):
            lowest = tl.full([], 0, tl.uint32)
            if bounds_ptr is not None:
                if searched:
                    lowest = _lowest_kept_code(
                        logits_ptr, top_k, top_p, bounds_ptr, counts_ptr, candidates_ptr,
                        group_max, row_max, row_sum, scale, row, row_stride, V,
                        SAME_BITS, SIZE, LISTED, ROOM, VEC,
                    )  # fmt: skip
            # With a min-p of 1: logits next to the highest have an exponential of 1, too.
            lowest = tl.where(least >= 1.0, ordered_code(row_max, SAME_BITS), lowest)
            winner, kept, lowest_kept, cut = _race_of_kept(
                logits_ptr, state, lowest, least, group_max, row_max, scale, row, row_stride, V,
                SAME_BITS, SIZE, LISTED, VEC,
            )  # fmt: skip
            log_kept = tl.where(cut, tl.log(kept), log_sum)
            cutoff = tl.where(cut, lowest_kept, cutoff)
        else:
            winner = race_of_groups(state, weights, group_max, row_max, greedy, sound)
    else:
        winner = race_of_groups(state, weights, group_max, row_max, greedy, sound)

    first = winner * SIZE
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


Candidates = tuple[Tensor | None, Tensor | None, Tensor | None]  # bounds, counts, the logits


_launch_statistics = launcher(_sample_statistics_kernel)
_launch_candidates = launcher(_sample_candidates_kernel)
_launch_draw = launcher(_sample_draw_kernel)


def _candidates(
    tiles: VocabTiles, maxima: Tensor, sums: Tensor, cuts: tuple[Any, ...], room: int
) -> Candidates:
    """Per row, the logits among which is the lowest that top-k and top-p keep."""
    device = maxima.device
    bounds = torch.empty(tiles.n, dtype=torch.int32, device=device)
    counts = torch.empty_like(bounds)
    candidates = torch.empty((tiles.n, room), dtype=torch.float32, device=device)
    _launch_candidates(
        tiles.n,
        *tiles.logits, maxima, sums, *cuts, bounds, counts, candidates, *tiles.sizes,
        **tiles.shapes.cut, ROOM=room,
    )  # fmt: skip
    return bounds, counts, candidates


def sample(logits: Tensor, keys: Tensor, p: SamplingParameters) -> SampledTokens:
    """``sample_tokens`` of checked arguments."""
    n = logits.shape[0]
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    first = torch.empty(n, dtype=torch.float32, device=logits.device)
    results = [first, *[torch.empty_like(first) for _ in SampledTokens._fields[2:]]]
    if n == 0:
        return SampledTokens(tokens, *results)
    at_one = not isinstance(p.temperature, Tensor) and p.temperature in (0.0, 1.0)
    with device_of(logits):
        tiles = VocabTiles(logits, p.temperature)
        shapes = tiles.shapes
        maxima = tiles.new()
        sums, means = torch.empty_like(maxima), torch.empty_like(maxima)
        sum_t1 = None if at_one else torch.empty_like(maxima)
        _launch_statistics(
            tiles.programs,
            *tiles.logits, maxima, sums, means, sum_t1, *tiles.sizes, **shapes.part,
        )  # fmt: skip
        by_k, by_p, by_min = p.truncates(tiles.vocabulary)
        cuts = (*row_argument(p.top_k), *row_argument(p.top_p), *row_argument(p.min_p))
        room = min(_ROOM, power_of_2(tiles.vocabulary))
        found: Candidates = (None, None, None)
        if by_k or by_p:
            found = _candidates(tiles, maxima, sums, cuts, room)
        _launch_draw(
            n,
            *tiles.logits, per_row(keys), maxima, sums, means, sum_t1, *cuts, *found, tokens,
            *results, *tiles.sizes, ROOM=room, SAME_BITS=_SAME_BITS[logits.dtype],
            **(shapes.draw_cut if by_k or by_p or by_min else shapes.draw),
        )  # fmt: skip
    return SampledTokens(tokens, *results)
