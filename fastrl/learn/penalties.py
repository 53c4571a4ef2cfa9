"""Penalties for how responses end: without EOS, or about as long as they may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class OverlongPenalty(NamedTuple):
    """factor·clip((|y| - (longest - buffer)) / buffer, 0, 1), |y| a response's tokens: 0 where they
    leave the buffer free, ``factor`` at ``longest`` (Yu et al., "DAPO", 2025, equation 13)."""

    longest: int  # the most tokens of a response
    buffer: int  # tokens
    factor: float = 1.0

    def __call__(self, lengths: Sequence[int]) -> Tensor:
        """Returns penalties, [B] fp32, to subtract from rewards; ``lengths`` in tokens."""
        over = torch.tensor(lengths, dtype=torch.float32) - (self.longest - self.buffer)
        return self.factor * (over / self.buffer).clamp(0, 1)


class Penalties(NamedTuple):
    """Penalties for how responses end, to subtract from their rewards."""

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
            buffer, factor, longest: see :class:`OverlongPenalty`, which needs a buffer.
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
        """Returns penalties, [B] fp32, for ``lengths`` in tokens; ``ended``: by EOS or a stop."""
        penalties = torch.zeros(len(lengths))
        if self.missing_eos is not None:
            penalties += self.missing_eos * ~torch.tensor(ended, dtype=torch.bool)
        if self.overlong is not None:
            penalties += self.overlong(lengths)
        return penalties
