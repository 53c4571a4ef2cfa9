"""How likely tokens were that something else drew from a softmax cut by top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

# A temperature below it is 0, as it is to sample_tokens.
_COLDEST = 1e-30


def truncated_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """What ``fastrl_kernels.sample_tokens`` reports of a token that it draws: log π(token), with π
    = softmax(z/T) cut by top-k, then top-p, then min-p and renormalised; and the lowest logit kept.

    A token at the very edge counts as kept, with all above it: whoever drew it rounds otherwise.

    Args:
        logits: [N, V], any floating dtype; arithmetic is fp32.
        tokens: [N] int64.
        temperature: 0 is greedy: at T = 1, and nothing is cut.

    Returns:
        log-probs [N] in nats, and cutoffs [N], as they stand in ``logits``, -inf where nothing was
        cut; fp32.
    """
    x = logits.float()
    if temperature < _COLDEST:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    scaled = (x - x.amax(-1, keepdim=True)) / temperature
    weights = scaled.exp()
    possible = x > -torch.inf
    kept = possible
    if 0 < top_k < x.shape[-1]:
        kept = kept & (x >= x.topk(top_k).values[:, -1:])
    if top_p < 1:
        highest, order = x.sort(descending=True)
        mass = torch.where(kept, weights, 0.0).gather(-1, order).double().cumsum(-1)
        above = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
        last = (above < top_p * mass[:, -1:]).sum(-1, keepdim=True).clamp(min=1) - 1
        kept = kept & (x >= highest.gather(-1, last))
    if min_p > 0:
        kept = kept & (weights >= min_p)
    drawn = tokens.unsqueeze(-1)
    kept = kept | (possible & (x >= x.gather(-1, drawn)) & possible.gather(-1, drawn))
    cut = (possible & ~kept).any(-1)
    lowest = torch.where(kept, x, torch.inf).amin(-1)
    log_sum = torch.where(kept, weights, 0.0).sum(-1).log()
    return (
        scaled.gather(-1, drawn).squeeze(-1) - log_sum,
        torch.where(cut, lowest, -torch.inf),
    )
