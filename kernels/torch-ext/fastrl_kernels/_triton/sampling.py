"""Sampling tokens: every row in parts, one of which is drawn, and then a token within it.

A row is cut into parts of PART columns, and a program holds one part as a tile, in the order of its
columns wherever the row lies in memory. One pass over all parts finds their softmax statistics. A
part is then drawn by its weight, and a token among its columns, by Gumbel's trick both times:
the noise costs more than the softmax, and all parts but the drawn one go without.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import Parameters, SampledTokens
from .cutoff import cut
from .logprob import FLOOR, LN2, LOG2E, LOWEST
from .parts import PART_ARGUMENTS, Parts, load_part, part_weights, sampling_temperature
from .rows import per_row
from .tiles import device_of


@triton.jit(do_not_specialize=PART_ARGUMENTS)
def _sample_statistics_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N], or None: the number
    temperature,
    max_ptr,  # [N, parts] fp32. max x
    sum_ptr,  # [N, parts] fp32. Σ 2^a with a = (x - max)·log2(e)/T
    mean_ptr,  # [N, parts] fp32. Σ 2^a·a
    sum_t1_ptr,  # [N, parts] fp32. Σ exp(x - max), or None: T is 1
    V,
    row_stride,
    parts,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
):
    at = tl.program_id(0)
    row = at // parts
    x = load_part(logits_ptr, row, row_stride, at - row * parts, V, PART, TILE, VEC)
    t, _ = sampling_temperature(temperature_ptr, temperature, row)
    m = tl.max(tl.where(x > LOWEST, x, LOWEST), 0)  # NaN is left to the sums
    a = (x - m) * (LOG2E / t)
    e = tl.exp2(a)
    tl.store(max_ptr + at, m)
    tl.store(sum_ptr + at, tl.sum(e, 0))
    tl.store(mean_ptr + at, tl.sum(e * tl.maximum(a, FLOOR), 0))
    if sum_t1_ptr is not None:
        tl.store(sum_t1_ptr + at, tl.sum(tl.exp2((x - m) * LOG2E), 0))


@triton.jit
def _log2_exponential(key, counter, STREAM: tl.constexpr):
    """log2 of an exponential variate for each counter of a key's stream."""
    bits, _, _, _ = tl.philox(key, counter, tl.full(counter.shape, STREAM, tl.int32), 0, 0)
    v = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # -log(1 - v), with small variates, which win, to full precision.
    series = v * (1 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * 0.2))))
    return tl.log2(tl.where(v < 0.03125, series, -tl.log(1.0 - v)))


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
    tokens_ptr,  # [N] int64
    logprobs_ptr,  # [N] fp32
    logprobs_t1_ptr,  # [N] fp32
    truncated_ptr,  # [N] fp32
    cutoffs_ptr,  # [N] fp32
    entropies_ptr,  # [N] fp32
    V,
    row_stride,
    parts,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    key = tl.load(keys_ptr + row)
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

    score = tl.log2(weights) - _log2_exponential(key, index, 1)
    part = tl.argmax(tl.where(sound, tl.where(greedy, part_max, score), 0.0), 0)
    x = load_part(logits_ptr, row, row_stride, part, V, PART, TILE, VEC)
    column = part * PART + tl.arange(0, TILE)
    score = (x - row_max) * scale - _log2_exponential(key, column, 0)
    score = tl.where(x >= cutoff, score, float("-inf"))
    slot = tl.argmax(tl.where(sound, tl.where(greedy, x, score), 0.0), 0)
    token = (part * PART + slot).to(tl.int64)

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


def sample(logits: Tensor, keys: Tensor, p: Parameters) -> SampledTokens:
    """``sample_tokens`` of checked arguments."""
    n = len(logits)
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    results = [torch.empty(n, device=logits.device) for _ in SampledTokens._fields[1:]]
    if n == 0:
        return SampledTokens(tokens, *results)
    at_one = not isinstance(p.temperature, Tensor) and p.temperature in (0.0, 1.0)
    with device_of(logits):
        parts = Parts(logits, p.temperature)
        *statistics, mean, sum_t1 = parts.new(4)
        _sample_statistics_kernel[parts.grid](
            *parts.logits,
            *statistics,
            mean,
            None if at_one else sum_t1,
            *parts.sizes,
            **parts.shapes,
        )
        kept = cut(parts, statistics, p)
        _sample_draw_kernel[(n,)](
            *parts.logits,
            per_row(keys),
            *statistics,
            mean,
            None if at_one else sum_t1,
            *kept,
            tokens,
            *results,
            *parts.sizes,
            **parts.shapes,
            **parts.all,
        )
    return SampledTokens(tokens, *results)
