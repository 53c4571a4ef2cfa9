"""The hash of splitmix64, on int64 bit patterns: what keys and variates are made with."""

from __future__ import annotations

from torch import Tensor

# The increment and the two multipliers of splitmix64, as signed integers.
GAMMA, _FIRST, _SECOND = (
    x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def shifted(x: Tensor, bits: int) -> Tensor:
    """The logical right shift; that of int64 copies the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mixed(x: Tensor) -> Tensor:
    """splitmix64's output function of int64 bit patterns: each bit in moves half of those out."""
    x = shifted(x, 30).bitwise_xor_(x).mul_(_FIRST)
    x = shifted(x, 27).bitwise_xor_(x).mul_(_SECOND)
    return shifted(x, 31).bitwise_xor_(x)
