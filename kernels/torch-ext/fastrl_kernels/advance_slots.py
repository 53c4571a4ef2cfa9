"""What a decode step does with the tokens that it has drawn: store them, count, see what ends."""

from __future__ import annotations

import torch
from torch import Tensor

from .argument_types import explains_types
from .checks import Passed, check_device, check_float, is_plain, layout
from .dispatch import choose
from .types import EOS, LENGTH, NAN, RUNNING, SampledTokens, SlotBuffers


def advance(
    slots: SlotBuffers, draw: SampledTokens, ends: Tensor, values: Tensor | None, backend: str
) -> None:
    """``advance_slots`` of checked arguments, where no gradient is recorded."""
    if backend == "triton":
        from ._triton.advance_slots import advance

        advance(slots, draw, ends, values)
        return
    token, position, num_generated, limit, reason, tokens, per_token = slots
    lost, running = draw.tokens < 0, reason == RUNNING
    goes_on = running > lost  # the sample goes on, and is not lost
    token.copy_(torch.where(goes_on, draw.tokens, token))
    at = num_generated.unsqueeze(1)
    tokens.scatter_(1, at, token.unsqueeze(1))
    fields = draw.logprobs, draw.logprobs_t1, draw.entropies, values
    for x, stored in zip(fields, per_token, strict=True):
        if x is not None:
            stored.scatter_(1, at, x.float().unsqueeze(1))
    num_generated += goes_on
    position += goes_on
    found = (num_generated >= limit) * LENGTH
    found.masked_fill_((token == ends.unsqueeze(1)).any(0), EOS).masked_fill_(lost, NAN)
    reason += running * found  # it is 0 for rows that run


def _check(slots: SlotBuffers, draw: SampledTokens, ends: Tensor, values: Tensor | None) -> None:
    *columns, tokens, per_token = slots
    batch = slots.token.shape
    for name, x in zip(slots._fields, columns, strict=False):
        if x.dtype != torch.int64 or x.shape != batch or x.dim() != 1 or not x.is_contiguous():
            raise ValueError(
                f"slots.{name} is {x.dtype} {tuple(x.shape)}, slots.token {tuple(batch)}: they "
                "must be int64 [B], contiguous"
            )
    fits = tokens.dim() == 2 and len(tokens) >= batch[0] and tokens.is_contiguous()
    if not fits or tokens.dtype != torch.int64:
        raise ValueError(
            f"slots.tokens are {tokens.dtype} {tuple(tokens.shape)}: they must be int64 [S, L] "
            f"with S ≥ {batch[0]}, contiguous"
        )
    fits = per_token.shape == (4, *tokens.shape) and per_token.is_contiguous()
    if not fits or per_token.dtype != torch.float32:
        raise ValueError(
            f"slots.per_token are {per_token.dtype} {tuple(per_token.shape)}: they must be float32 "
            f"{(4, *tokens.shape)}, contiguous"
        )
    if ends.dtype != torch.int64 or ends.dim() != 1:
        raise ValueError(f"ends are {ends.dtype} {tuple(ends.shape)}: they must be int64 [E]")
    tensors = {"draw.tokens": draw.tokens, "draw.logprobs": draw.logprobs}
    tensors |= {"draw.logprobs_t1": draw.logprobs_t1, "draw.entropies": draw.entropies}
    if values is not None:
        check_float("values", values)
        tensors["values"] = values
    for name, x in tensors.items():
        wanted = torch.int64 if name == "draw.tokens" else torch.float32
        if x.shape != batch or (x is not values and x.dtype != wanted):
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}: it must be {wanted} {tuple(batch)}"
            )
    tensors |= dict(zip((f"slots.{name}" for name in slots._fields), slots, strict=True))
    for name, x in {"ends": ends, **tensors}.items():
        check_device(name, x, "slots.token", slots.token)


_passed = Passed()


@explains_types
def advance_slots(
    slots: SlotBuffers,
    draw: SampledTokens,
    ends: Tensor,
    *,
    values: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Takes the tokens that were drawn for the first slots into their samples, in place. For a row
    i that runs, with n_i tokens so far and a draw y_i ≥ 0:

        token_i ← tokens[i, n_i] ← y_i,   n_i ← n_i + 1,   position_i ← position_i + 1,
        reason_i ← 1 if y_i is one of ``ends``, else 2 if n_i ≥ limit_i, else 0 (it runs on).

    A draw below 0, of a row without a distribution, ends its sample: reason 4. Rows that do not run
    stay as they are; they store what no sample has, in column n_i. Nothing waits for the device.

    Args:
        slots: the samples' state: token, position, num_generated, limit, reason [B] int64; tokens
            [S, L] int64 and per_token [4, S, L] fp32, S ≥ B and L above every limit.
        draw: the result of ``sample_tokens``, [B]. Its logprobs, logprobs_t1 and entropies go to
            per_token's first three rows.
        ends: [E] int64, tokens that end a sample; E may be 0.
        values: [B] fp32, bf16 or fp16, for per_token's fourth row; None leaves it as it is.
        backend: "auto", "triton" or "torch"; see ``explain``. Results are the same bits.

    Raises:
        TypeError: values that are no such numbers.
        ValueError: other dtypes, shapes, strides or devices.
    """
    key = None
    if is_plain(slots.token):
        given = *slots, draw.tokens, draw.logprobs, draw.logprobs_t1, draw.entropies, ends
        key = *map(layout, given), values is not None and layout(values)
    if key is None or _passed.get(key) is None:
        _check(slots, draw, ends, values)
        if key is not None:
            _passed.keep(key, True)
    with torch.no_grad():
        advance(slots, draw, ends, values, choose(backend, slots.token))
