"""Attention of one new token per sequence in plain PyTorch, as `reference` has the other ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """softmax(cap(scale·q·kᵀ))·v over each row's own live tokens, 0 where there is none."""
    batch, heads, width = query.shape
    kv_heads = keys.shape[2]
    # [B, 1, 1, M]
    position = torch.arange(keys.shape[1], device=query.device)
    lengths = lengths.view(-1, 1, 1, 1)
    live = position < lengths
    if window is not None:
        live = live & (position >= lengths - window)
    # What is dead may hold anything: it is replaced before any arithmetic.
    keys, values = (torch.where(live.mT, x[:batch].transpose(1, 2), 0.0) for x in (keys, values))
    query = query.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = query @ keys.mT * (1 / math.sqrt(width) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~live, -math.inf).softmax(-1)
    weights = torch.where(live, weights, 0.0)  # NaN where nothing is live
    return (weights @ values).reshape(batch, heads, values.shape[-1])
