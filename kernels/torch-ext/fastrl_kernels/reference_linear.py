"""What the ops on hidden states mean; see ``reference``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import (
    IGNORE_LABEL,
    _scaled,
    _zero_where_masked,
    masked_mean,
    ppo_loss,
    token_logprobs,
)


def _head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
) -> Tensor:
    """z = c·tanh(s·(W h + b)/c)/T, or s·(W h + b)/T without a cap.

    The product keeps the dtype that it is given; what follows is at least fp32.
    """
    logits = F.linear(hidden, weight, bias)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return _scaled(logits, temperature)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    extras: tuple[str, ...] = (),
) -> Any:
    """``token_logprobs`` of a head's logits; ``extras`` [log Σ p², mean z, label is the first of
    the largest z], a tuple with None where not asked for, after the rest."""
    counted = labels != IGNORE_LABEL if mask is None else (labels != IGNORE_LABEL) & mask
    hidden = _zero_where_masked(hidden, counted.unsqueeze(-1))
    logits = _head_logits(hidden, weight, bias, temperature, softcap, logit_scale)
    results = token_logprobs(logits, labels, mask=mask, entropy=entropy)
    if not extras:
        return results
    z = logits.detach()
    found = {
        "log_sum_sq_probs": (2 * F.log_softmax(z, dim=-1)).logsumexp(-1),
        "mean_logit": z.mean(-1),
        "is_top1": z.argmax(-1) == labels,
    }
    chosen = tuple(
        _zero_where_masked(x, counted) if k in extras else None for k, x in found.items()
    )
    return (*results, chosen) if entropy else (results, chosen)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``ppo_loss`` of ``linear_logprobs``, which gets the other options; its statistics, the mean
    entropy (NaN if not asked for), and per token "logprobs" and "entropies" among them."""
    counted = mask & (labels != IGNORE_LABEL)
    logprobs, entropies = linear_logprobs(
        hidden, weight, labels, bias=bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, mask=mask, entropy=True,
    )  # fmt: skip
    loss, stats = ppo_loss(logprobs, old_logprobs, advantages, counted, **options)
    mean = masked_mean(entropies, counted)
    per_token = {"logprobs": logprobs, "entropies": entropies}
    stats |= {k: x.detach() for k, x in per_token.items() if entropy or k == "logprobs"}
    stats["entropy"] = mean.detach() if entropy else torch.full_like(loss, torch.nan)
    return loss, stats


def linear_nll_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """-Σ w·log π / denominator of ``linear_logprobs``, which gets the other options; and those."""
    logprobs = linear_logprobs(hidden, weight, labels, mask=mask, **options)
    counted = labels != IGNORE_LABEL if mask is None else mask & (labels != IGNORE_LABEL)
    total = counted.sum() if denominator is None else torch.as_tensor(denominator)
    weighted = logprobs if weights is None else logprobs * weights.to(logprobs)
    loss = -weighted.sum() / total if total != 0 else 0.0 * weighted.sum()
    return loss, logprobs.detach()
