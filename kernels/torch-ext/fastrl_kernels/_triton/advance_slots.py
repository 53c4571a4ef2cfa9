"""The state of slots after a draw: a program holds some rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..types import EOS, LENGTH, NAN, RUNNING, SampledTokens, SlotBuffers
from .launch import launcher
from .tiles import device_of, power_of_2, programs_for

_ROWS = 32
_RUNNING, _EOS, _LENGTH, _NAN = map(tl.constexpr, (RUNNING, EOS, LENGTH, NAN))


@triton.jit(do_not_specialize=["n", "slots", "length", "ends"])
def _advance_slots_kernel(
    drawn_ptr,  # [N] int64
    logprobs_ptr,  # [N] fp32
    logprobs_t1_ptr,  # [N] fp32
    entropies_ptr,  # [N] fp32
    values_ptr,  # [N], or None: there are none
    ends_ptr,  # [E] int64
    token_ptr,  # [N] int64
    position_ptr,  # [N] int64
    num_generated_ptr,  # [N] int64
    limit_ptr,  # [N] int64
    reason_ptr,  # [N] int64
    tokens_ptr,  # [S, L] int64
    per_token_ptr,  # [4, S, L] fp32
    n,
    slots,
    length,
    ends,
    ENDS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < n
    drawn = tl.load(drawn_ptr + row, mask=inside, other=-1)
    before = tl.load(token_ptr + row, mask=inside, other=0)
    reason = tl.load(reason_ptr + row, mask=inside, other=_NAN)
    count = tl.load(num_generated_ptr + row, mask=inside, other=0)
    limit = tl.load(limit_ptr + row, mask=inside, other=0)
    position = tl.load(position_ptr + row, mask=inside, other=0)
    running = reason == _RUNNING
    goes_on = running & (drawn >= 0)
    token = tl.where(goes_on, drawn, before)

    fits = inside & (count >= 0) & (count < length)
    at = row.to(tl.int64) * length + count
    field = tl.cast(slots, tl.int64) * length
    tl.store(tokens_ptr + at, token, mask=fits)
    x = tl.load(logprobs_ptr + row, mask=inside, other=0.0)
    tl.store(per_token_ptr + at, x, mask=fits)
    x = tl.load(logprobs_t1_ptr + row, mask=inside, other=0.0)
    tl.store(per_token_ptr + (field + at), x, mask=fits)
    x = tl.load(entropies_ptr + row, mask=inside, other=0.0)
    tl.store(per_token_ptr + (2 * field + at), x, mask=fits)
    if values_ptr is not None:
        x = tl.load(values_ptr + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(per_token_ptr + (3 * field + at), x, mask=fits)

    index = tl.arange(0, ENDS)
    end = tl.load(ends_ptr + index, mask=index < ends, other=0)
    same = (token[:, None] == end[None, :]) & (index < ends)[None, :]
    ended = tl.max(same.to(tl.int32), 1) > 0
    count += goes_on.to(tl.int64)
    found = tl.where(ended, _EOS, tl.where(count >= limit, _LENGTH, _RUNNING))
    found = tl.where(goes_on, found, _NAN)
    tl.store(reason_ptr + row, tl.where(running, found, reason), mask=inside)
    tl.store(num_generated_ptr + row, count, mask=inside)
    tl.store(position_ptr + row, position + goes_on.to(tl.int64), mask=inside)
    tl.store(token_ptr + row, token, mask=inside)


_launch = launcher(_advance_slots_kernel)


def advance(slots: SlotBuffers, draw: SampledTokens, ends: Tensor, values: Tensor | None) -> None:
    """``advance_slots`` of checked arguments."""
    *columns, tokens, per_token = slots
    drawn = (draw.tokens, draw.logprobs, draw.logprobs_t1, draw.entropies)
    given = [x if x is None else x.contiguous() for x in (*drawn, values, ends)]
    n = len(slots.token)
    if n:
        with device_of(tokens):
            _launch(
                programs_for(n, _ROWS),
                *given, *columns, tokens, per_token, n, *tokens.shape, len(ends),
                ENDS=power_of_2(max(1, len(ends))), ROWS=_ROWS, num_warps=1,
            )  # fmt: skip
