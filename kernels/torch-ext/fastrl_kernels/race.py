"""The race of exponentials that draws a token: what both backends of ``sample_tokens`` share.

Of weights w, the index of the smallest E_i / w_i is i with probability w_i / Σw, where the E_i are
independent exponential variates. A race over all of a vocabulary would take a variate for each
token. Here one over parts, by their sums of weights, comes first, and then one within the part that
won: V/P + P variates for V tokens in parts of P.

Scores are w/E, of which the largest wins, and not log w - log E: their rounding is relative to the
score, and so cannot make equal what differs by more than that. They neither overflow nor vanish:
2⁻⁴⁸ < E < 17, so the part that wins has at least 2⁻⁵³ of the largest part's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .splitmix import GAMMA, mixed, shifted

# The version of the rule by which keys draw tokens. 1, of older packages: PyTorch inverted the
# distribution function, Triton's raced over parts of another size.
DRAWS = 2
# Parts are counted from here, tokens from 0: no part shares a variate with a token.
FIRST_PART = 1 << 32
MOST = 1.0 - 2.0**-24  # uniforms in fp32 must not round to 1


def part_size(vocabulary: int) -> int:
    """Tokens in a part of the race: the power of two next to √V, at most 1024. A constant of the
    draw: another one draws other tokens."""
    return 1 << min(10, (vocabulary - 1).bit_length() // 2)


def exponentials(states: Tensor, counters: Tensor) -> Tensor:
    """Exponential variates [r, n] fp32 for counters [n] or [r, n] of each row's state [r, 1]:

        -log(1 - u), u = (k + ½)·2⁻⁴⁷ of the 47 high bits k of mix(state + counter·γ).

    Small variates win, and come from small u, which are fp32 numbers of full precision. Both
    backends compute the same u.
    """
    bits = shifted(mixed(states + counters * GAMMA), 17)
    u = bits.double().add_(0.5).mul_(2.0**-47).float().clamp_(max=MOST)
    return u.neg_().log1p_().neg_()


def winners(sums: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Columns [r, 1] drawn with probabilities proportional to weights [r, parts, P], whose sums
    [r, parts] are given. The first of equal scores wins."""
    size, states = weights.shape[-1], _states(keys)
    part = _winning_part(sums, states)
    inside = weights.take_along_dim(part.unsqueeze(-1), 1).squeeze(1)
    return _winner_within(inside, part * size, states)


def winners_among(weights: Tensor, ids: Tensor, keys: Tensor, vocabulary: int) -> Tensor:
    """The same of weights [r, K] of some tokens ``ids`` [r, K], all others having none: the ids
    [r, 1] that :func:`winners` would draw, but for the rounding of the parts' sums."""
    size, states = part_size(vocabulary), _states(keys)
    parts = ids // size
    sums = weights.new_zeros(len(ids), -(-vocabulary // size)).scatter_add_(1, parts, weights)
    part = _winning_part(sums, states)
    inside = weights.new_zeros(len(ids), size)
    inside.scatter_add_(1, ids % size, weights.where(parts == part, 0.0))
    return _winner_within(inside, part * size, states)


def _states(keys: Tensor) -> Tensor:
    return mixed(keys + GAMMA).unsqueeze(-1)  # hashed again, in case keys are not


def _winning_part(sums: Tensor, states: Tensor) -> Tensor:
    counters = torch.arange(FIRST_PART, FIRST_PART + sums.shape[1], device=sums.device)
    return (sums / exponentials(states, counters)).argmax(-1, keepdim=True)


def _winner_within(inside: Tensor, first: Tensor, states: Tensor) -> Tensor:
    """The winning column of those from ``first`` [r, 1] on, by their weights [r, P]."""
    counters = first + torch.arange(inside.shape[1], device=inside.device)
    return first + (inside / exponentials(states, counters)).argmax(-1, keepdim=True)
