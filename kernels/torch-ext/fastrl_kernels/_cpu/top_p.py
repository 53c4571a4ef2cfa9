"""Top-p without sorting a row: weights are summed up by intervals of the logit."""

from __future__ import annotations

import torch
from torch import Tensor

# Of logits below the highest; from MANY logits on, this is faster than sorting.
BUCKETS, BUCKETS_PER_NAT, MANY = 1024, 32, 4096


def tempered(x: Tensor, temperature: float | Tensor) -> Tensor:
    """x/T in place."""
    one = not isinstance(temperature, Tensor) and temperature == 1.0
    return x if one else x.div_(temperature)


def last_below(highest: Tensor, weights: Tensor, above: Tensor | float, limit: Tensor) -> Tensor:
    """Of logits [..., r] in falling order, the last with less than ``limit`` above it; ``above`` is
    the weight above them all."""
    before = torch.cat([torch.zeros_like(weights[..., :1]), weights[..., :-1]], -1).cumsum(-1)
    last = ((before + above) < limit).sum(-1, keepdim=True).clamp_(min=1) - 1
    return highest.gather(-1, last)


def lowest_by_buckets(
    x: Tensor, e: Tensor, row_max: Tensor, temperature: float | Tensor, top_p: float
) -> Tensor:
    """The lowest logit [r, 1] that top-p keeps: weights are summed up by intervals of the logit,
    and only those of the interval that holds the answer are sorted."""
    bucket = tempered(row_max - x, temperature).mul_(BUCKETS_PER_NAT).clamp_(max=BUCKETS - 1)
    bucket = bucket.long().clamp_(min=0)  # NaN is the smallest integer
    mass = torch.zeros(len(x), BUCKETS, dtype=torch.float64).scatter_add_(-1, bucket, e.double())
    above = mass.cumsum(-1)
    limit = above[:, -1:] * top_p
    above = torch.cat([torch.zeros_like(limit), above[:, :-1]], -1)
    holds = (above < limit).sum(-1, keepdim=True).clamp_(min=1) - 1
    above = above.gather(-1, holds)
    inside = bucket == holds
    lowest = torch.empty_like(row_max)
    for i in range(len(x)):
        highest, order = x[i][inside[i]].sort(descending=True)
        weights = e[i][inside[i]][order].double()
        lowest[i] = last_below(highest, weights, above[i], limit[i])
    return lowest
