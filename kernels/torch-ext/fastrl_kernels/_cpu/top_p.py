"""Top-p without sorting a row: weights are summed up by intervals of the logit."""

from __future__ import annotations

import torch
from torch import Tensor

# Buckets of logits by their distance from the highest; from MANY logits on, faster than sorting.
BUCKETS, BUCKETS_PER_NAT, MANY = 1024, 32, 4096


def tempered(x: Tensor, temperature: float | Tensor) -> Tensor:
    """x/T in place."""
    one = not isinstance(temperature, Tensor) and temperature == 1.0
    return x if one else x.div_(temperature)


def last_below(highest: Tensor, weights: Tensor, above: Tensor | float, limit: Tensor) -> Tensor:
    """The last of logits [..., r] in falling order that has less weight than ``limit`` above it;
    ``above`` is the weight above them all."""
    before = torch.cat([torch.zeros_like(weights[..., :1]), weights[..., :-1]], -1).cumsum(-1)
    last = ((before + above) < limit).sum(-1, keepdim=True).clamp_(min=1) - 1
    return highest.gather(-1, last)


def lowest_by_buckets(
    x: Tensor,
    e: Tensor,
    row_max: Tensor,
    temperature: float | Tensor,
    top_p: float | Tensor,
) -> Tensor:
    """The lowest logit [r, 1] that top-p keeps: weights e are summed up by intervals of the logit,
    and only those of the interval that holds the answer are sorted. -inf where top-p is off.

    Rows are taken one by one: a row's 64-bit numbers stay in the cache; those of all rows would be
    new memory at every call, which costs as much as the rest.
    """
    lowest = torch.full_like(row_max, -torch.inf)
    for i, (logits, weights) in enumerate(zip(x, e, strict=True)):
        share = float(top_p[i]) if isinstance(top_p, Tensor) else top_p
        if share >= 1:
            continue
        t = temperature[i] if isinstance(temperature, Tensor) else temperature
        bucket = tempered(row_max[i] - logits, t).mul_(BUCKETS_PER_NAT).clamp_(max=BUCKETS - 1)
        bucket = bucket.long().clamp_(min=0)  # NaN is the smallest integer
        mass = torch.zeros(BUCKETS, dtype=torch.float64).scatter_add_(0, bucket, weights.double())
        until = mass.cumsum(0)
        limit = until[-1] * share
        holds = ((until - mass) < limit).sum().clamp_(min=1) - 1
        inside = (bucket == holds).nonzero().squeeze(1)
        highest, order = logits[inside].sort(descending=True)
        above = (until - mass)[holds]
        lowest[i] = last_below(highest, weights[inside[order]].double(), above, limit)
    return lowest
