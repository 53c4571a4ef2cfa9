"""The head's product and the draw from it: what is asked of a tile of logits before it is dropped.

A program multiplies a block of rows with a tile of the vocabulary, and of each row stores what
remains of the tile: softmax statistics, and the token that wins the race within it with its logit.
Tiles are groups of the race or lie within one, so that a second kernel, a program per row, finds
the group that wins from the tiles' weights, and its token among the winners of its tiles. Every
logit takes a variate, where the draw from logits takes those of one group: some hundred
instructions, while the weights of the head are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from ..dispatch import interpreting
from ..race import part_size
from ..types import COLDEST, LogitTransform, SampledTokens
from .logprob import FLOOR, LN2, LOG2E, LOWEST
from .rows import per_row
from .sampling import exponential, race_of_groups, race_state
from .tiles import accurate_tanh, device_of, dot, packed, programs_for
from .vocab_tiles import possible_temperature, row_argument, sampling_temperature

COLUMNS = 128  # columns of the vocabulary in a tile, which is no longer than a group
LEAST_ROWS, MOST_ROWS = 16, 32  # rows of a tile
_DEPTH = 64  # of hidden states and weights at a time
_ROW_THREADS = 256  # of the program that draws
# Threads of a program, by compiler. AMD's epilogue takes more registers: with half the threads one
# program less runs at a time with Triton 3.6 than shared memory has room for, and so with
# instructions of 32 by 32.
_THREADS = {"cuda": 128, "hip": 256}
# Stages are tiles of both factors on their way while one is multiplied. AMD's registers hold the
# one that is on its way, and its shared memory is smaller.
_OPTIONS = {"cuda": {"num_stages": 4}, "hip": {"num_stages": 2, "matrix_instr_nonkdim": 16}}
# A tile's record: maximum, Σ 2^a, Σ 2^a·a, Σ at T = 1, the winner's logit, its slot; a sector of 32
# bytes, so that tiles that write side by side share none.
_RECORD = tl.constexpr(8)
_ARGUMENTS = ["N", "V", "blocks", "tiles"]


@triton.jit
def _logits_of(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    inner,
    outer,
    rows,
    columns,
    N,
    V,
    H: tl.constexpr,
    DEPTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Logits [rows, columns] in fp32: the product, rounded to the head's dtype, and its transform.
    Rows and columns past the end are the last one's."""
    # Rows past the end read the last one: masks would keep loads from being vectors.
    row = tl.minimum(rows, N - 1).to(tl.int64)
    column = tl.minimum(columns, V - 1).to(tl.int64)
    k = tl.arange(0, DEPTH)
    hidden = hidden_ptr + (row[:, None] * H + k[None, :])
    weight = weight_ptr + (column[:, None] * H + k[None, :])
    x = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for first in range(0, H // DEPTH * DEPTH, DEPTH):
        h, w = tl.load(hidden + first), tl.load(weight + first)
        x = dot(h, tl.trans(w), x, INTERPRETED)
    if H % DEPTH != 0:
        first = H // DEPTH * DEPTH
        inside = (first + k < H)[None, :]
        h = tl.load(hidden + first, mask=inside, other=0.0)
        w = tl.load(weight + first, mask=inside, other=0.0)
        x = dot(h, tl.trans(w), x, INTERPRETED)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column).to(tl.float32)[None, :]
    x = x.to(weight_ptr.dtype.element_ty).to(tl.float32)
    if inner is not None:
        x = accurate_tanh(x * tl.cast(inner, tl.float32))
    if outer is not None:
        x *= tl.cast(outer, tl.float32)
    return x


@triton.jit(do_not_specialize=_ARGUMENTS)
def _linear_sample_tiles_kernel(
    hidden_ptr,  # [N, H]
    weight_ptr,  # [V, H]
    bias_ptr,  # [V], or None
    inner,  # s/c, or None: no soft cap
    outer,  # c or s, or None: 1
    temperature_ptr,  # [N], or None: the number
    temperature,
    keys_ptr,  # [N] int64
    records_ptr,  # [N, tiles, 8] fp32
    N,
    V,
    blocks,
    tiles,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AT_ONE: tl.constexpr,  # whether all rows have T = 1, or 0
    RACES: tl.constexpr,  # whether there are rows of T > 0
    GREEDY: tl.constexpr,  # whether there are rows of T = 0
    INTERPRETED: tl.constexpr,
):
    # Blocks of rows that share a tile of weights come one after the other.
    tile = tl.program_id(0) // blocks
    rows = (tl.program_id(0) - tile * blocks) * ROWS + tl.arange(0, ROWS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    x = _logits_of(
        hidden_ptr, weight_ptr, bias_ptr, inner, outer, rows, columns, N, V, H, DEPTH, INTERPRETED
    )
    x = tl.where((columns < V)[None, :], x, float("-inf"))

    row = tl.minimum(rows, N - 1)
    t = tl.zeros([ROWS], tl.float32)
    if temperature_ptr is not None:
        t += tl.load(temperature_ptr + row).to(tl.float32)
    else:
        t += temperature
    t, greedy = possible_temperature(t)
    m = tl.max(x, 1)
    d = x - tl.maximum(m, LOWEST)[:, None]  # NaN is left to the sums
    scale = tl.full([ROWS], LOG2E, tl.float32) / t
    a = d * scale[:, None]
    e = tl.exp2(a)
    winner = tl.zeros([ROWS], tl.int32)
    if RACES:
        state = race_state(tl.load(keys_ptr + row))
        score = e / exponential(state[:, None], columns.to(tl.int64)[None, :])
        # Equal scores are too rare to look for the first, as the interpreter does. NaN becomes 0.
        winner = tl.argmax(tl.maximum(score, 0.0), 1, tie_break_left=INTERPRETED)
    if GREEDY:
        winner = tl.where(greedy, tl.argmax((x == m[:, None]).to(tl.int32), 1), winner)
    # A gather would hold the tile a second time, for another order of its elements among threads.
    won = tl.arange(0, COLUMNS)[None, :] == winner[:, None]
    logit = tl.sum(tl.where(won, x, 0.0), 1)

    record = records_ptr + (rows.to(tl.int64) * tiles + tile) * _RECORD
    there = rows < N
    tl.store(record, m, mask=there)
    tl.store(record + 1, tl.sum(e, 1), mask=there)
    tl.store(record + 2, tl.sum(e * tl.maximum(a, FLOOR), 1), mask=there)
    if not AT_ONE:
        tl.store(record + 3, tl.sum(tl.exp2(d * LOG2E), 1), mask=there)
    tl.store(record + 4, logit, mask=there)
    tl.store(record + 5, winner.to(tl.float32), mask=there)


@triton.jit(do_not_specialize=["tiles"])
def _linear_sample_draw_kernel(
    records_ptr,  # [N, tiles, 8] fp32
    temperature_ptr,  # [N], or None: the number
    temperature,
    keys_ptr,  # [N] int64
    tokens_ptr,  # [N] int64
    logprobs_ptr,  # [N] fp32
    logprobs_t1_ptr,  # [N] fp32
    truncated_ptr,  # [N] fp32
    cutoffs_ptr,  # [N] fp32
    entropies_ptr,  # [N] fp32
    tiles,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    AT_ONE: tl.constexpr,
):
    row = tl.program_id(0)
    state = race_state(tl.load(keys_ptr + row))
    t, greedy = sampling_temperature(temperature_ptr, temperature, row)
    scale = LOG2E / t
    records_ptr += row.to(tl.int64) * tiles * _RECORD
    tile = tl.arange(0, GROUPS)[:, None] * PER_GROUP + tl.arange(0, PER_GROUP)[None, :]
    record, there = records_ptr + tile * _RECORD, tile < tiles
    tile_max = tl.load(record, mask=there, other=float("-inf"))
    group_max = tl.max(tile_max, 1)
    row_max = tl.maximum(tl.max(group_max, 0), LOWEST)
    a = (tile_max - row_max) * scale
    e = tl.exp2(a)
    sums = e * tl.load(record + 1, mask=there, other=0.0)
    weights = tl.sum(sums, 1)
    row_sum = tl.sum(weights, 0)
    sound = (row_sum > 0) & (row_sum < float("inf"))
    log_sum = tl.log(row_sum)
    mean = tl.load(record + 2, mask=there, other=0.0)
    mean = tl.sum(tl.sum(tl.fma(e, mean, sums * tl.maximum(a, FLOOR)), 1), 0) / row_sum * LN2
    log_sum_t1 = log_sum
    if not AT_ONE:
        sum_t1 = tl.load(record + 3, mask=there, other=0.0)
        sum_t1 = tl.sum(tl.sum(sum_t1 * tl.exp2((tile_max - row_max) * LOG2E), 1), 0)
        log_sum_t1 = tl.log(sum_t1)

    first = race_of_groups(state, weights, group_max, row_max, greedy, sound) * PER_GROUP
    tile = first + tl.arange(0, PER_GROUP)
    record, there = records_ptr + tile * _RECORD, tile < tiles
    x = tl.load(record + 4, mask=there, other=float("-inf"))
    columns = tile * COLUMNS + tl.load(record + 5, mask=there, other=0.0).to(tl.int32)
    score = tl.exp2((x - row_max) * scale) / exponential(state, columns.to(tl.int64))
    score = tl.where(greedy, tl.where(x == row_max, 1.0, 0.0), score)
    won = tile - first == tl.argmax(tl.where(sound, score, 0.0), 0)
    token = tl.sum(tl.where(won, columns, 0), 0).to(tl.int64)
    d = tl.sum(tl.where(won, x, 0.0), 0) - row_max

    nan = float("nan")
    scaled = tl.div_rn(d, t)
    logprob = tl.where(sound, scaled - log_sum, nan)
    tl.store(tokens_ptr + row, tl.where(sound, token, -1))
    tl.store(logprobs_ptr + row, logprob)
    tl.store(logprobs_t1_ptr + row, tl.where(sound, d - log_sum_t1, nan))
    tl.store(truncated_ptr + row, logprob)
    tl.store(cutoffs_ptr + row, tl.where(sound, float("-inf"), nan))
    tl.store(entropies_ptr + row, tl.where(sound, log_sum - mean, nan))


def _target() -> tuple[str, int]:
    """Which compiler the kernels go through, and a warp's threads."""
    if interpreting():
        return "cuda", 32
    target = driver.active.get_current_target()
    return target.backend, target.warp_size


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    temperature: float | Tensor,
    transform: LogitTransform,
) -> SampledTokens:
    """``linear_sample`` of checked arguments, of a head in half precision whose groups have 16
    columns or more."""
    n, (vocabulary, width) = len(hidden), weight.shape
    tokens = torch.empty(n, dtype=torch.int64, device=hidden.device)
    results = [torch.empty(n, device=hidden.device) for _ in SampledTokens._fields[1:]]
    if n == 0:
        return SampledTokens(tokens, *results)
    hidden, weight = packed(hidden), packed(weight)
    size = part_size(vocabulary)
    columns = min(COLUMNS, size)
    rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(n)))
    blocks, tiles = programs_for(n, rows), programs_for(vocabulary, columns)
    groups = triton.next_power_of_2(programs_for(vocabulary, size))
    inner = None if transform.softcap is None else transform.inner
    outer = None if transform.outer == 1.0 else transform.outer
    many = isinstance(temperature, Tensor)
    at_one = not many and temperature in (0.0, 1.0)
    greedy = not many and temperature < COLDEST
    of_rows = (*row_argument(temperature), per_row(keys))
    with device_of(hidden):
        backend, warp = _target()
        records = hidden.new_empty(n, tiles, _RECORD.value, dtype=torch.float32)
        _linear_sample_tiles_kernel[(blocks * tiles,)](
            hidden, weight, bias, inner, outer, *of_rows, records, n, vocabulary, blocks, tiles,
            H=width, ROWS=rows, COLUMNS=columns, DEPTH=_DEPTH, AT_ONE=at_one,
            RACES=not greedy, GREEDY=many or greedy,
            INTERPRETED=interpreting(), num_warps=_THREADS[backend] // warp, **_OPTIONS[backend],
        )  # fmt: skip
        _linear_sample_draw_kernel[(n,)](
            records, *of_rows, tokens, *results, tiles, COLUMNS=columns, GROUPS=max(2, groups),
            PER_GROUP=size // columns, AT_ONE=at_one, num_warps=_ROW_THREADS // warp,
        )  # fmt: skip
    return SampledTokens(tokens, *results)
