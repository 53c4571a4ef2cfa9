"""Penalties for how responses end: without EOS, or about as long as they may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class OverlongPenalty(NamedTuple):
    """factor·clip((|y| - (longest - buffer)) / buffer, 0, 1): 0 for responses that leave the buffer
    free, and ``factor`` for the longest (Yu et al., "DAPO", 2025, equation 13)."""

    longest: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Sequence[int]) -> Tensor:
        """Returns the penalties for lengths, [B] fp32, which are subtracted from scores."""
        over = torch.tensor(lengths, dtype=torch.float32) - (self.longest - self.buffer)
        return self.factor * (over / self.buffer).clamp(0, 1)


class Penalties(NamedTuple):
    """Penalties for how responses end, which are subtracted from their scores."""

    missing_eos: float | None = None  # penalty of responses that end neither in EOS nor at a stop
    overlong: OverlongPenalty | None = None

    @classmethod
    def of(
        cls,
        missing_eos: float | None,
        buffer: int | None,
        factor: float,
        longest: int | None,
        name: str = "max_new_tokens",
    ) -> Penalties:
        """Makes the penalties that the settings name.

        Args:
            buffer, factor, longest: see :class:`OverlongPenalty`; no penalty without a buffer.
            name: the name of the setting that gives ``longest``.

        Raises:
            ValueError: ``longest`` is not known, or shorter than the buffer.
        """
        if buffer is None:
            return cls(missing_eos)
        if longest is None or buffer > longest:
            raise ValueError(
                f"overlong_buffer={buffer} is the last part of {name}, which is {longest}: set a "
                "larger one, or lower the buffer"
            )
        return cls(missing_eos, OverlongPenalty(longest, buffer, factor))

    def __call__(self, ended: Sequence[bool], lengths: Sequence[int]) -> Tensor:
        """Returns the penalties of responses, [B] fp32."""
        penalties = torch.zeros(len(lengths))
        if self.missing_eos is not None:
            penalties += self.missing_eos * ~torch.tensor(ended, dtype=torch.bool)
        if self.overlong is not None:
            penalties += self.overlong(lengths)
        return penalties
