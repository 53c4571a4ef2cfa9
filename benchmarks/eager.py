"""The ops' formulas in eager PyTorch, as trainers write them: a peer, and the yardstick of error.

As in the classic trainers, logits in half precision are widened to fp32 before the softmax. A
formula's named outputs are those of the op; what it computes besides is left out.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gate import Results
from fastrl_kernels import reference

GAMMA, LAM = 1.0, 0.95


def token_logprobs(
    logits: Tensor, labels: Tensor, mask: Tensor | None = None, entropy: bool = False
) -> Results:
    """log_softmax and gather; the entropy is logsumexp(z) - Σ softmax(z)·z."""
    logits = logits.float()
    logprobs = F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    outputs = {"logprobs": logprobs}
    if entropy:
        expected = (F.softmax(logits, dim=-1) * logits).sum(-1)
        outputs["entropies"] = torch.logsumexp(logits, dim=-1) - expected
    if mask is not None:
        outputs = {name: torch.where(mask, x, 0.0) for name, x in outputs.items()}
    return outputs


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    entropy: bool = False,
    inside: Tensor | None = None,
) -> Results:
    """All logits at once, those outside of sets [N, V] at the lowest number, then as above."""
    logits = F.linear(hidden, weight)
    if inside is not None:
        logits = logits.masked_fill(~inside, torch.finfo(logits.dtype).min)
    return token_logprobs(logits, labels, mask, entropy)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float,
    entropy: bool = False,
) -> Results:
    """All logits at once, the clipped objective, and the entropy as a statistic.

    As in the classic trainer, autograd follows the entropy although nobody asks for its gradient.
    """
    found = token_logprobs(F.linear(hidden, weight), labels, None, entropy)
    logprobs = found["logprobs"]
    outputs = {"loss": clipped_loss(logprobs, old_logprobs, advantages, mask, denominator)}
    if entropy:
        outputs["entropy"] = (found["entropies"].detach() * mask).sum() / denominator
    return outputs


def linear_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    denominator: float,
    mask: Tensor | None = None,
    beta: float = 1.0,
) -> Results:
    """All logits of both at once, two log-softmaxes and F.kl_div; between the ends the mixture's
    log-probs by logsumexp, as TRL's GKDTrainer."""
    logp = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    logq = F.log_softmax(F.linear(teacher_hidden, teacher_weight).float(), dim=-1)

    def kl(log_of: Tensor, log_to: Tensor) -> Tensor:
        return F.kl_div(log_to, log_of, log_target=True, reduction="none").sum(-1)

    if beta in (0, 1):
        values = kl(logp, logq) if beta else kl(logq, logp)
    else:
        both = torch.stack([logp + math.log1p(-beta), logq + math.log(beta)])
        logm = torch.logsumexp(both, dim=0)
        values = beta * kl(logq, logm) + (1 - beta) * kl(logp, logm)
    return {
        "loss": (values if mask is None else torch.where(mask, values, 0.0)).sum() / denominator
    }


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, denominator: float
) -> Tensor:
    """Σ mask·max(-A·ρ, -A·clip(ρ, 0.8, 1.2)) / denominator."""
    ratio = (logprobs - old_logprobs).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return (losses * mask).sum() / denominator


def ppo_loss(
    logprobs: Tensor,
    values: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_values: Tensor,
    returns: Tensor,
    denominator: float,
) -> Results:
    """The clipped objective and a tenth of the clipped value loss."""
    policy = clipped_loss(logprobs, old_logprobs, advantages, mask, denominator)
    near = torch.clamp(values, old_values - 0.2, old_values + 0.2)
    error = torch.maximum((values - returns).square(), (near - returns).square())
    return {"loss": policy + 0.1 * 0.5 * (error * mask).sum() / denominator}


def full_kl(logits: Tensor, ref_logits: Tensor) -> Results:
    """Two log-softmaxes and F.kl_div, as the classic trainer's kl_penalty="full"."""
    logp = F.log_softmax(logits.float(), dim=-1)
    logq = F.log_softmax(ref_logits.float(), dim=-1)
    return {"kl": F.kl_div(logq, logp, log_target=True, reduction="none").sum(-1)}


def kl_rewards(
    logprobs: Tensor, ref_logprobs: Tensor, scores: Tensor, mask: Tensor, coef: float
) -> Results:
    """A sequence at a time, as the classic trainer."""
    rewards, kls = [], []
    for row in range(len(scores)):
        kl = (logprobs[row] - ref_logprobs[row]) * mask[row]
        reward = -coef * kl
        reward[mask[row].nonzero()[-1]] += scores[row]
        rewards.append(reward)
        kls.append(kl)
    stacked = torch.stack(kls)
    return {"rewards": torch.stack(rewards), "kls": stacked, "sequence_kl": stacked.sum(-1)}


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
) -> Results:
    """The classic per-step loop, from the last step to the first, over whole columns.

    Masks here end rows: there it gives what `fastrl_kernels.gae` gives. Holes it does not bridge.
    """
    if mask is not None:
        rewards, values = rewards * mask, values * mask
    steps = rewards.shape[-1]
    carry, columns = torch.zeros_like(rewards[:, 0]), []
    for t in reversed(range(steps)):
        following = values[:, t + 1] if t < steps - 1 else 0.0
        delta = rewards[:, t] + gamma * following - values[:, t]
        carry = delta + gamma * lam * carry
        columns.append(carry)
    advantages = torch.stack(columns[::-1], dim=1)
    returns = advantages + values
    if whiten:
        counted = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
        advantages = masked_whiten(advantages, counted)["whitened"]
    return {"advantages": advantages, "returns": returns}


def masked_whiten(values: Tensor, mask: Tensor) -> Results:
    """Mean, variance with Bessel's correction, and (x - μ)·rsqrt(var + 1e-8)."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return {"whitened": (values - mean) * torch.rsqrt(variance + reference.WHITEN_EPS) * mask}


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    mask: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Results:
    """All scores, the dead ones too, softmax in fp32, and its weights back in the values' dtype, as
    transformers has it; only that heads which share keys do so without copies of them.

    The mask [B, M] holds lengths and window: a model makes it once for all of its layers.
    """
    rows, heads, width = query.shape
    query = query.reshape(rows, keys.shape[2], -1, width)
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    scores = query @ keys.mT * width**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask[:, None, None], -torch.inf)
    weights = scores.softmax(-1).to(values.dtype)
    return {"out": (weights @ values).reshape(rows, heads, values.shape[-1])}


def sample_tokens(logits: Tensor, keys: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Results:
    """Softmax and torch.multinomial, then the log-probability and the entropy of the whole
    distribution; cuts by sorting, as transformers does.

    The keys play no part: the random numbers come from torch's one generator.
    """
    logits = logits.float()
    logp = F.log_softmax(logits, dim=-1)
    p = kept = logp.exp()
    if top_k:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        kept = kept.masked_fill(logits < lowest, 0.0)
    if top_p < 1:
        ascending, order = kept.sort(dim=-1)
        below = ascending.cumsum(-1) <= (1 - top_p) * kept.sum(-1, keepdim=True)
        below[:, -1] = False
        kept = kept.masked_fill(below.scatter(-1, order, below), 0.0)
    tokens = torch.multinomial(kept, 1)
    return {
        "tokens": tokens.squeeze(-1),
        "logprobs": logp.gather(-1, tokens).squeeze(-1),
        "entropies": -(p * logp).sum(-1),
    }


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor) -> Results:
    """As transformers' Llama computes it, after the addition to the stream."""
    total = residual + x
    normed = total.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
    return {"normed": weight * normed.to(total.dtype), "total": total}


def swiglu(gate: Tensor, up: Tensor) -> Results:
    return {"out": F.silu(gate) * up}
