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
    group = heads // keys.shape[2]
    position = torch.arange(keys.shape[1], device=query.device)
    live = position < lengths.unsqueeze(-1)
    if window is not None:
        live = live & (position >= lengths.unsqueeze(-1) - window)
    # What is dead may hold anything: it is replaced before any arithmetic, per query head.
    keys, values = (
        torch.where(live[..., None, None], x[:batch], 0.0).repeat_interleave(group, dim=2)
        for x in (keys, values)
    )
    scores = torch.einsum("bhd,bmhd->bhm", query, keys)
    scores = scores * (1 / math.sqrt(width) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~live.unsqueeze(1), -math.inf).softmax(-1)
    weights = torch.where(live.any(-1)[:, None, None], weights, 0.0)
    return torch.einsum("bhm,bmhd->bhd", weights, values)
