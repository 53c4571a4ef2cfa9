"""Penalties for responses that are about as long as they may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastrl.config import PPOConfig


class OverlongPenalty(NamedTuple):
    """factor·clip((|y| - (longest - buffer)) / buffer, 0, 1): none for responses that leave the
    buffer free, and all of it at the longest (Yu et al., "DAPO", 2025, equation 13)."""

    longest: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Sequence[int]) -> Tensor:
        """To be taken off the scores, [B] fp32."""
        over = torch.tensor(lengths, dtype=torch.float32) - (self.longest - self.buffer)
        return self.factor * (over / self.buffer).clamp(0, 1)


def make_overlong(
    config: PPOConfig, generation_kwargs: Mapping[str, Any]
) -> OverlongPenalty | None:
    """By ``PPOConfig.overlong_buffer``; None without.

    Raises:
        ValueError: there is no max_new_tokens, or it is shorter than the buffer.
    """
    buffer, longest = config.overlong_buffer, generation_kwargs.get("max_new_tokens")
    if buffer is None:
        return None
    if longest is None or buffer > longest:
        raise ValueError(
            f"overlong_buffer={buffer} is the last part of max_new_tokens, which is {longest}: "
            "pass a larger one in generation_kwargs, or lower the buffer"
        )
    return OverlongPenalty(longest, buffer, config.overlong_penalty)
