"""Every op in plain PyTorch: the specification, and in float64 the oracle of the tests.

Nothing here is fast or frugal. Each function follows its public op's equation term by term, keeps
the dtype that it is given (call it in float64 to judge the others), and gets its gradients from
autograd. Masked positions are replaced before any arithmetic, never multiplied away.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_LABEL = -100
LOG_RATIO_LIMIT = 20.0
WHITEN_EPS = 1e-8
CERTAIN = -(2.0**-24)  # the largest value of a log-prob in ORPO's odds


def _clamp(x: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """x between bounds that have no gradient; at a bound x has its whole gradient.

    The gradient of ``torch.clamp`` at a bound is 1 before torch 2.14, and 0, or 1/2 for bounds that
    are tensors, since then.
    """
    return torch.where(x < low, low, torch.where(x > high, high, x))


def _zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask, x, torch.zeros_like(x))


def _scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype).unsqueeze(-1)
    return logits / temperature


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(z/T)[y] per token, and H = -Σ p log p where asked for."""
    counted = labels != IGNORE_LABEL
    if mask is not None:
        counted = counted & mask
    logp = F.log_softmax(_scaled(logits, temperature), dim=-1)
    picked = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    logprobs = _zero_where_masked(picked, counted)
    if not entropy:
        return logprobs
    possible = torch.isfinite(logp)
    safe = torch.where(possible, logp, torch.zeros_like(logp))
    entropies = -(torch.where(possible, safe.exp(), torch.zeros_like(safe)) * safe).sum(-1)
    return logprobs, _zero_where_masked(entropies, counted)


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


def _shifted(hidden: Tensor, labels: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    return (hidden[..., :-shift, :], labels[..., shift:]) if shift else (hidden, labels)


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
    shift: int = 0,
    support: Tensor | None = None,
) -> Any:
    """``token_logprobs`` of a head's logits, -inf outside of ``support`` [..., V] bool; ``extras``
    [log Σ p², mean z, label is the first of the largest z], a tuple with None where not asked for,
    after the rest. With a shift, position t has label t + shift."""
    hidden, labels = _shifted(hidden, labels, shift)
    counted = labels != IGNORE_LABEL if mask is None else (labels != IGNORE_LABEL) & mask
    hidden = _zero_where_masked(hidden, counted.unsqueeze(-1))
    logits = _head_logits(hidden, weight, bias, temperature, softcap, logit_scale)
    if support is not None:
        logits = logits.masked_fill(~support & counted.unsqueeze(-1), -math.inf)
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


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """Σ_v p_v (log p_v - log q_v); a token impossible under p adds nothing."""
    possible = torch.isfinite(logp)
    safe_p = torch.where(possible, logp, torch.zeros_like(logp))
    safe_q = torch.where(possible, logq, torch.zeros_like(logq))
    terms = torch.where(possible, safe_p.exp(), torch.zeros_like(safe_p)) * (safe_p - safe_q)
    return terms.sum(-1)


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """KL(p || q) per token, of the softmax of both logits/T."""
    logp = F.log_softmax(_scaled(logits, temperature), dim=-1)
    logq = F.log_softmax(_scaled(ref_logits, temperature), dim=-1)
    return _zero_where_masked(_kl(logp, logq), mask)


def divergence(logp: Tensor, logq: Tensor, beta: float) -> Tensor:
    """KL(q || p) at β = 0, KL(p || q) at 1; β·KL(q || m) + (1 - β)·KL(p || m) between, with
    m = (1 - β)·p + β·q."""
    if beta == 0:
        return _kl(logq, logp)
    if beta == 1:
        return _kl(logp, logq)
    impossible = (logp == -math.inf) & (logq == -math.inf)  # where logaddexp has no gradient
    x, y = (torch.where(impossible, torch.zeros_like(z), z) for z in (logp, logq))
    logm = torch.logaddexp(x + math.log1p(-beta), y + math.log(beta))
    logm = torch.where(impossible, torch.full_like(logm, -math.inf), logm)
    return beta * _kl(logq, logm) + (1 - beta) * _kl(logp, logm)


def top_divergence(logp: Tensor, ids: Tensor, logq: Tensor, beta: float, rest: str) -> Tensor:
    """``divergence`` over outcomes: K tokens [..., K], those of log-prob -inf left out, and
    "bucket", all others as one more, where the student has any, of which the teacher has at least
    2⁻²⁴; or "renormalised", both distributions over the K tokens."""
    there = logq != -math.inf
    ids = torch.where(there, ids, torch.zeros_like(ids))
    at = torch.where(there, logp.gather(-1, ids), -math.inf)
    if rest == "renormalised":
        at, logq = (x - x.logsumexp(-1, keepdim=True) for x in (at, logq))
        return divergence(at, logq, beta)
    taken = torch.zeros_like(logp).scatter_add_(-1, ids, there.to(logp.dtype)) > 0
    others = torch.where(taken, torch.full_like(logp, -math.inf), logp)
    none = (others == -math.inf).all(-1)
    left = (1 - logq.double().exp().sum(-1)).clamp(min=2.0**-24).log().to(logq.dtype)
    left = torch.where(none, -math.inf, left)
    safe = torch.where(none[..., None], torch.zeros_like(others), others)
    log_rest = torch.where(none, -math.inf, safe.logsumexp(-1))
    at, logq = torch.cat([at, log_rest[..., None]], -1), torch.cat([logq, left[..., None]], -1)
    return divergence(at, logq, beta)


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Any,
    *,
    beta: float = 1.0,
    vocabulary: int | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    shift: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The student's divergence from a teacher (a head's fields, or ids, log-probs and "bucket" or
    "renormalised"), its log-probs and entropies, and the log-probs of a teacher with a head."""
    hidden, labels = _shifted(hidden, labels, shift)
    counted = labels != IGNORE_LABEL if mask is None else (labels != IGNORE_LABEL) & mask
    real = slice(0, vocabulary)

    def zeroed(x: Tensor) -> Tensor:
        return _zero_where_masked(x, counted[..., None])

    z = _head_logits(
        zeroed(hidden), weight[real], None if bias is None else bias[real], temperature, softcap,
        logit_scale,
    )  # fmt: skip
    logprobs, entropies = token_logprobs(z, labels, mask=mask, entropy=True)
    logp = F.log_softmax(z, dim=-1)
    values, of_teacher = torch.zeros_like(logprobs), None
    if len(teacher) == 3:
        ids, logq, rest = teacher
        rows = logp[counted], ids[counted], logq[counted]
        values[counted] = top_divergence(*rows, beta, rest)
    else:
        states, heads, teacher_bias, cap, scale = teacher
        y = _head_logits(
            zeroed(states), heads[real], None if teacher_bias is None else teacher_bias[real],
            temperature, cap, scale,
        ).to(z.dtype)  # fmt: skip
        logq = F.log_softmax(y, dim=-1)
        values[counted] = divergence(logp[counted], logq[counted], beta)
        of_teacher, _ = token_logprobs(y.detach(), labels, mask=mask, entropy=True)
    return values, logprobs, entropies if entropy else None, of_teacher


def linear_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: Any,
    *,
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Σ w·divergence over the number of tokens that count, or a denominator; and what
    ``linear_kl`` returns."""
    results = linear_kl(hidden, weight, labels, teacher, **options)
    mask, shift = options.get("mask"), options.get("shift", 0)
    _, labels = _shifted(hidden, labels, shift)
    counted = labels != IGNORE_LABEL if mask is None else (labels != IGNORE_LABEL) & mask
    total = results[0] if weights is None else results[0] * weights
    over = counted.sum() if denominator is None else torch.as_tensor(denominator)
    safe = torch.where(over == 0, torch.ones_like(over), over)
    loss = torch.where(over == 0, 0.0, total.sum() / safe)
    return loss, tuple(None if x is None else x.detach() for x in results)


def sample_support(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a token is drawn from: the kept set [N, V], probabilities [N, V], cutoffs and entropies.

    A token is kept if fewer than k have a higher logit, if those of a higher logit have less than
    top_p of what top-k kept, and if p ≥ min_p · max p; at temperature 0, all are. Entropies are of
    the whole softmax, at temperature 1 where that is 0. Rows are computed one by one.
    """
    n, vocabulary = logits.shape
    columns = [torch.as_tensor(x).expand(n).tolist() for x in (temperature, top_k, top_p, min_p)]
    results = []
    for x, t, k, p, least in zip(logits, *columns, strict=True):
        greedy = t == 0
        probabilities = torch.softmax(x if greedy else x / t, -1)
        kept = x > -torch.inf
        if not greedy:
            descending = x.sort(descending=True).values
            if 0 < k < vocabulary:
                kept &= x >= descending[k - 1]
            if p < 1:
                mass = torch.where(kept, probabilities, 0)
                above = torch.stack([mass[x > v].sum() for v in descending.unique()])
                lowest = descending.unique()[above < p * mass.sum()].min()
                kept &= x >= lowest
            kept &= probabilities >= least * probabilities.max()
        drawn_from = torch.where(kept, probabilities, 0)
        if greedy:
            drawn_from = F.one_hot(x.argmax(), vocabulary).to(x)
        cut = (~kept & (x > -torch.inf)).any()
        cutoff = torch.where(cut, torch.where(kept, x, torch.inf).min(), -torch.inf)
        entropy = torch.special.entr(probabilities).sum()
        results.append((kept, drawn_from / drawn_from.sum(), cutoff, entropy))
    kept, probabilities, cutoffs, entropies = (torch.stack(x) for x in zip(*results, strict=True))
    return kept, probabilities, cutoffs, entropies


def race(probabilities: Tensor, keys: Tensor) -> Tensor:
    """The token [N] that each key draws with probabilities [N, V]: by a race of exponentials over
    parts of P = 2^⌊b/2⌋ tokens, at most 1024, with b the bits of V - 1; then by one within a part.

    The part with the smallest E/Σp wins, then the token with the smallest E/p; the first of equals.
    E = -log(1 - u) with u = (k + ½)·2⁻⁴⁷, where k are the 47 high bits of mix(mix(key + γ) + c·γ),
    splitmix64's γ and mix, modulo 2⁶⁴; c is a token's index, and of part i is 2³² + i.
    """

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def winner(weights: list[float], key: int, first: int) -> int:
        state = mix((key + 0x9E3779B97F4A7C15) % 2**64)
        scores = []
        for c, weight in enumerate(weights, first):
            k = mix((state + c * 0x9E3779B97F4A7C15) % 2**64) >> 17
            scores.append(weight / -math.log1p(-(k + 0.5) * 2.0**-47))
        return scores.index(max(scores))

    vocabulary = probabilities.shape[1]
    size = min(1024, 2 ** ((vocabulary - 1).bit_length() // 2))
    tokens = []
    for p, key in zip(probabilities, keys.tolist(), strict=True):
        parts = p.split(size)
        part = winner([x.sum().item() for x in parts], key, 2**32)
        tokens.append(part * size + winner(parts[part].tolist(), key, part * size))
    return torch.tensor(tokens)


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, kind: str = "kl", *, mask: Tensor | None = None
) -> Tensor:
    """Estimators of KL(π || ref) from one sample, d = log π - log ref (Schulman, 2020)."""
    d = _zero_where_masked(logprobs, mask) - _zero_where_masked(ref_logprobs, mask)
    if kind == "kl":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "mse":
        return 0.5 * d.square()
    k3 = torch.expm1(-d) + d
    if kind == "k3":
        return k3
    if kind == "k3+":  # the value of k3 with the gradient of k2
        k2 = 0.5 * d.square()
        return k3.detach() + k2 - k2.detach()
    raise ValueError(f"unknown kind {kind!r}")


def kl_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    mask: Tensor,
    *,
    coef: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor, Tensor]:
    """-coef·kl per token, the score added at each row's last counted token; and Σ_t kl per row."""
    kls = kl_penalty(logprobs, ref_logprobs, kind, mask=mask)
    steps = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(-1, keepdim=True)
    at_last = mask & (steps == last)
    rewards = -coef * kls + torch.where(at_last, scores.unsqueeze(-1), 0.0).to(kls.dtype)
    return rewards, kls, kls.sum(-1)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    whiten: bool = False,
) -> tuple[Tensor, Tensor]:
    """δ_t = r_t + γ·V(next) - V_t and A_t = δ_t + γλ·A(next), a plain loop from the last step.

    "next" is the next counted step; V(next) is 0 past the last one and where ``terminated``, and
    ``bootstrap_value`` where ``truncated``; both cut the carry. Returns are A + V.
    """
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    no = torch.zeros_like(mask)
    terminated = no if terminated is None else terminated
    truncated = no if truncated is None else truncated & ~terminated
    zero = torch.zeros_like(rewards[..., 0])
    next_value, next_advantage = zero, zero
    reversed_advantages = []
    for t in reversed(range(rewards.shape[-1])):
        counted = mask[..., t]
        ends = terminated[..., t] | truncated[..., t]
        follows = torch.where(terminated[..., t], zero, next_value)
        if bootstrap_value is not None:
            follows = torch.where(truncated[..., t], bootstrap_value[..., t], follows)
        r = torch.where(counted, rewards[..., t], zero)
        v = torch.where(counted, values[..., t], zero)
        delta = r + gamma * follows - v
        advantage = delta + gamma * lam * torch.where(ends, zero, next_advantage)
        reversed_advantages.append(torch.where(counted, advantage, zero))
        next_value = torch.where(counted, v, next_value)
        next_advantage = torch.where(counted, advantage, next_advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=-1)
    returns = advantages + _zero_where_masked(values, mask)
    if whiten:
        advantages = masked_whiten(advantages, mask)
    return advantages, returns


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Σ mask·x / Σ mask; 0 where nothing counts."""
    return _zero_where_masked(values, mask).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over counted elements, Bessel-corrected; 0 where fewer than two count."""
    centred = _zero_where_masked(values - masked_mean(values, mask), mask)
    n = mask.sum()
    return centred.square().sum() / (n - 1 if unbiased else n).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(x - μ)·rsqrt(var + 1e-8), plus μ again unless ``shift_mean``; 0 where masked or n < 2.

    With fewer than two counted elements the deviation is 0, so what is left is 0 or μ.
    """
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (_zero_where_masked(values, mask) - mean) * torch.rsqrt(var + WHITEN_EPS)
    whitened = torch.where(mask.sum() > 1, whitened, torch.zeros_like(whitened))
    if not shift_mean:
        whitened = whitened + mean
    return _zero_where_masked(whitened, mask)


def aggregation_weights(
    mask: Tensor, aggregate: str = "token-mean", denominator: float | Tensor | None = None
) -> Tensor:
    """w with loss = Σ w·per-token loss: zero where masked, rows along the last dimension.

    token-mean: 1/Σ mask. seq-mean-token-sum: 1/(rows that count). seq-mean-token-mean:
    1/(rows that count · the row's tokens). seq-mean-token-sum-norm: 1/(rows · row length).
    ``denominator`` replaces Σ mask, the number of rows that count (twice), or rows · row length.
    """
    ones = mask.to(torch.float64 if mask.device.type == "cpu" else torch.float32)
    per_row = ones.sum(-1, keepdim=True)
    rows = (per_row > 0).sum().clamp(min=1)
    if aggregate == "token-mean":
        total = ones.sum().clamp(min=1)
    elif aggregate == "seq-mean-token-sum":
        total = rows
    elif aggregate == "seq-mean-token-mean":
        ones, total = ones / per_row.clamp(min=1), rows
    elif aggregate == "seq-mean-token-sum-norm":
        total = torch.tensor(max(mask.numel(), 1), device=mask.device)
    else:
        raise ValueError(f"unknown aggregate {aggregate!r}")
    return ones / (total if denominator is None else denominator)


def _sequence_means(x: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """The mean over counted tokens, at each token, of x's rows or of sequences one after the
    other."""
    if lengths is not None:
        sizes = lengths.tolist()
        parts = zip(x.flatten().split(sizes), mask.flatten().split(sizes), strict=True)
        return torch.cat([_sequence_means(a, b, None) for a, b in parts]).view(x.shape)
    mean = torch.where(mask, x, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0.0)


def _sequence_sums(x: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """The sum over counted tokens, at each token, of x's rows or of sequences one after the
    other."""
    means = _sequence_means(x, mask, lengths)
    ones = torch.ones_like(x)
    if lengths is None:
        counts = torch.where(mask, ones, 0.0).sum(-1, keepdim=True).expand(x.shape)
    else:
        parts = mask.flatten().split(lengths.tolist())
        counts = torch.cat([p.sum().to(x.dtype).expand(len(p)) for p in parts]).view(x.shape)
    return means * counts


def _vespo_weights(
    log_ratio: Tensor, a: Tensor, mask: Tensor, lengths: Tensor | None, powers: tuple, decays: tuple
) -> Tensor:
    """φ(w) = w^k·e^(λ(1 - w)), w = Π_t ρ_t of the sequence, clamped as in TRL 1.16."""
    counts = mask.sum(-1, keepdim=True).expand(mask.shape)
    if lengths is not None:
        parts = mask.flatten().split(lengths.tolist())
        counts = torch.cat([x.sum().expand(len(x)) for x in parts]).view(mask.shape)
    means = _sequence_means(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), mask, lengths)
    log_w = (means * counts).clamp(math.log(1e-8), LOG_RATIO_LIMIT)
    (k_above, k_below), (above, below) = powers, decays
    k = torch.where(a >= 0, k_above, k_below).to(a.dtype)
    decay = torch.where(a >= 0, above, below).to(a.dtype)
    return (decay + k * log_w - decay * log_w.exp()).exp()


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    cliprange: float | tuple[float, float] = 0.2,
    value: tuple | None = None,
    kl: tuple | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    aggregate: str = "token-mean",
    denominator: float | Tensor | None = None,
    objective: tuple = ("clip", "token", None, (1.0, 1.05), (2.0, 3.0), (3.0, 2.0)),
    lengths: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate (Schulman et al., 2017), clipped value loss, KL term; and statistics."""
    low, high = cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)
    w = aggregation_weights(mask, aggregate, denominator).to(logprobs.dtype)
    zero = torch.zeros_like(logprobs)
    if token_weights is not None:
        w = w * torch.where(mask, token_weights, zero)
    log_ratio = torch.where(mask, logprobs - old_logprobs, zero)
    kind, ratio_level, delta, (above, below), powers, decays = objective
    level = log_ratio
    if ratio_level != "token":
        mean = _sequence_means(log_ratio, mask, lengths)
        level = mean
        if ratio_level == "sequence-token":
            level = mean.detach() + log_ratio - log_ratio.detach()
        if ratio_level == "product":
            level = _sequence_sums(log_ratio, mask, lengths)
    # The value is clamped; the gradient of the surrogate is that of a ratio of the clamped size.
    limited = level + (level.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) - level).detach()
    ratio = limited.exp()
    a = torch.where(mask, advantages, zero)
    is_clipped = torch.zeros_like(mask)
    if kind == "cispo":  # MiniMax-M1, 2025
        weight = ratio.detach().clamp(1 - low, 1 + high)
        surrogate = -weight * a * torch.where(mask, logprobs, zero)
        is_clipped = mask & (weight != ratio)
    elif kind == "sapo":  # Gao et al., 2025
        soft = torch.where(a > 0, above, below).to(a.dtype)
        surrogate = -a * torch.sigmoid(soft * (ratio - 1)) * 4 / soft
    elif kind == "vespo":  # 2026
        weight = _vespo_weights(log_ratio.detach(), a, mask, lengths, powers, decays)
        surrogate = -weight * a * torch.where(mask, logprobs, zero)
    elif kind != "clip":
        raise NotImplementedError(f"no formula of the policy loss {kind!r}")
    else:
        bounded = ratio if delta is None else _clamp(ratio, -math.inf, delta)
        near = _clamp(ratio, 1 - low, 1 + high)
        unclipped, clipped = -a * bounded, -a * near
        surrogate = torch.maximum(unclipped, clipped)
        is_clipped = mask & (clipped > unclipped) & (near != ratio)
        if dual_clip is not None:
            surrogate = torch.where(a < 0, torch.minimum(surrogate, -a * dual_clip), surrogate)
    if weights is not None:
        surrogate = surrogate * torch.where(mask, weights, zero)
    policy_loss = (w * surrogate).sum()
    loss = policy_loss
    stats = {
        "policy_loss": policy_loss,
        "clipfrac": masked_mean(is_clipped.to(w.dtype), mask),
        "clipfrac_low": masked_mean((is_clipped & (ratio < 1)).to(w.dtype), mask),
        "clipfrac_high": masked_mean((is_clipped & (ratio > 1)).to(w.dtype), mask),
        "approx_kl": 0.5 * masked_mean(log_ratio.square(), mask),
        "policy_kl": masked_mean(-log_ratio, mask),
        "mean_ratio": masked_mean(ratio, mask),
        "clamped_ratios": (mask & (level.abs() > LOG_RATIO_LIMIT)).sum().to(w.dtype),
        "tokens": mask.sum().to(w.dtype),
    }
    for name in ("value_loss", "value_clipfrac", "value_mean", "value_error", "kl_loss"):
        stats[name] = w.new_zeros(())
    if value is not None:
        values, old_values, returns, value_range, coef = value
        values, old_values, returns = (
            torch.where(mask, x, zero) for x in (values, old_values, returns)
        )
        near = _clamp(values, old_values - value_range, old_values + value_range)
        plain_error, near_error = (values - returns).square(), (near - returns).square()
        value_loss = 0.5 * (w * torch.maximum(plain_error, near_error)).sum()
        loss = loss + coef * value_loss
        stats["value_loss"] = value_loss
        stats["value_clipfrac"] = masked_mean((near_error > plain_error).to(w.dtype), mask)
        stats["value_mean"] = masked_mean(values, mask)
        stats["value_error"] = masked_mean(plain_error, mask)
    if kl is not None:
        ref_logprobs, coef, kind = kl
        kl_loss = (w * kl_penalty(logprobs, ref_logprobs, kind, mask=mask)).sum()
        loss = loss + coef * kl_loss
        stats["kl_loss"] = kl_loss
    stats["loss"] = loss
    return loss, {name: stat.detach() for name, stat in stats.items()}


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
    entropy_coef: float = 0.0,
    top_entropy: float = 1.0,
    shift: int = 0,
    support: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``ppo_loss`` of ``linear_logprobs``, which gets the other options. The statistics have the
    mean entropy (NaN if not asked for), and "logprobs" and "entropies" per token, too."""
    hidden, labels = _shifted(hidden, labels, shift)
    counted = mask & (labels != IGNORE_LABEL)
    logprobs, entropies = linear_logprobs(
        hidden, weight, labels, bias=bias, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, mask=mask, entropy=True, support=support,
    )  # fmt: skip
    if top_entropy < 1:
        threshold = torch.quantile(entropies.detach()[counted], 1 - top_entropy)
        chosen = (entropies.detach() >= threshold).to(logprobs.dtype)
        given = options.get("weights")
        options = {**options, "weights": chosen if given is None else chosen * given}
    loss, stats = ppo_loss(logprobs, old_logprobs, advantages, counted, **options)
    if entropy_coef:
        w = aggregation_weights(
            counted, options.get("aggregate", "token-mean"), options.get("denominator")
        ).to(logprobs.dtype)
        if options.get("token_weights") is not None:
            w = w * options["token_weights"]
        loss = loss - entropy_coef * torch.where(counted, w * entropies, 0.0).sum()
        stats["loss"] = loss.detach()
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
    shift: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """-Σ w·log π / denominator, and log π by ``linear_logprobs``, which gets the other options."""
    hidden, labels = _shifted(hidden, labels, shift)
    logprobs = linear_logprobs(hidden, weight, labels, mask=mask, **options)
    counted = labels != IGNORE_LABEL if mask is None else mask & (labels != IGNORE_LABEL)
    total = counted.sum() if denominator is None else torch.as_tensor(denominator)
    weighted = logprobs if weights is None else logprobs * weights.to(logprobs)
    loss = -weighted.sum() / total if total != 0 else 0.0 * weighted.sum()
    return loss, logprobs.detach()


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Tensor:
    """-log σ(βh) with h = log π_w/ref_w - log π_l/ref_l, its mixtures with -log σ(-βh); a hinge."""
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    right, swapped = F.softplus(-beta * h, threshold=50), F.softplus(beta * h, threshold=50)
    if kind == "sigmoid":
        return (1 - label_smoothing) * right + label_smoothing * swapped
    if kind == "robust":
        unbiased = (1 - label_smoothing) * right - label_smoothing * swapped
        return unbiased / (1 - 2 * label_smoothing)
    if kind == "hinge":
        return torch.relu(1 - beta * h)
    raise ValueError(f"unknown kind {kind!r}")


def ipo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """(h - 1/(2β))²."""
    h = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
    return (h - 0.5 / beta) ** 2


def simpo_loss(
    mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 10.0, gamma: float = 3.0
) -> Tensor:
    """-log σ(β(p̄_w - p̄_l - γ/β))."""
    return F.softplus(-beta * (mean_chosen - mean_rejected - gamma / beta), threshold=50)


def orpo_loss(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """-β·log σ(log odds_w - log odds_l), odds = p/(1 - p), p at most 1 - 2⁻²⁴ and differentiated
    there."""

    def log_odds(logprobs: Tensor) -> Tensor:
        at_most = logprobs + (logprobs.clamp(max=CERTAIN) - logprobs).detach()
        return at_most - (-torch.expm1(at_most)).log()

    return beta * F.softplus(log_odds(mean_rejected) - log_odds(mean_chosen), threshold=50)


def pair_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    tau: float = 0.05,
) -> Tensor:
    """Losses on w = β(log π_w - log ref_w), l = β(log π_l - log ref_l) and x = w - l."""
    if kind in ("sigmoid", "hinge", "robust", "ipo"):
        sides = (policy_chosen, policy_rejected, ref_chosen, ref_rejected)
        if kind == "ipo":
            return ipo_loss(*sides, beta=beta)
        return dpo_loss(*sides, beta=beta, label_smoothing=label_smoothing, kind=kind)

    def surprise(z: Tensor) -> Tensor:  # -log σ(z)
        return F.softplus(-z, threshold=50)

    w, l = beta * (policy_chosen - ref_chosen), beta * (policy_rejected - ref_rejected)  # noqa: E741
    x = w - l
    if kind == "exo_pair":
        log_labels = math.log1p(-label_smoothing), math.log(label_smoothing)
        first = torch.sigmoid(x) * (-surprise(x) - log_labels[0])
        return first + torch.sigmoid(-x) * (-surprise(-x) - log_labels[1])
    if kind == "nca_pair":
        return surprise(w) + 0.5 * surprise(-w) + 0.5 * surprise(-l)
    if kind == "bco_pair":
        return surprise(w) + surprise(-l)
    if kind == "sppo_hard":
        return ((w - 0.5) / beta).square() + ((l + 0.5) / beta).square()
    if kind == "apo_zero":
        return torch.sigmoid(-w) + torch.sigmoid(l)
    if kind == "apo_down":
        return torch.sigmoid(w) + torch.sigmoid(-x)
    if kind == "discopop":
        mixed = torch.sigmoid(-x / tau) * surprise(x)
        return mixed + torch.exp(-x - surprise(x / tau))
    if kind == "aot":
        ours, theirs = policy_chosen - policy_rejected, ref_chosen - ref_rejected
        x = beta * (ours.sort().values - theirs.sort().values)
    elif kind == "aot_unpaired":
        x = w.sort().values - l.sort().values
    else:
        raise ValueError(kind)
    return (1 - label_smoothing) * surprise(x) + label_smoothing * surprise(-x)


def f_divergence_scores(
    log_ratios: Tensor, *, divergence: str = "reverse_kl", alpha: float = 0.5
) -> Tensor:
    """f'(t) of the divergence at t = exp(log_ratios)."""
    t = torch.exp(log_ratios)
    if divergence == "forward_kl":
        return 1 - 1 / t
    if divergence == "js_divergence":
        return torch.log(2 * t / (1 + t))
    if divergence == "alpha_divergence" and alpha != 1:
        return (t ** (alpha - 1) - 1) / (alpha - 1)
    return torch.log(t)


def slic_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, *, beta: float = 1.0, lam: float = 0.1
) -> Tensor:
    """max(0, β - log p_w + log p_l) - λ·log p_w."""
    return torch.relu(beta - policy_chosen + policy_rejected) - lam * policy_chosen


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: float | Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D(1 - σ(β(r - z))) where desirable, λ_U(1 - σ(β(z - r))) elsewhere, z = max(0, KL)."""
    r, z = policy - reference, torch.as_tensor(kl).detach().to(policy).clamp(min=0)
    gains = desirable_weight * (1 - torch.sigmoid(beta * (r - z)))
    losses = undesirable_weight * (1 - torch.sigmoid(beta * (z - r)))
    return torch.where(desirable, gains, losses)


def reward_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, *, center_coef: float = 0.0
) -> Tensor:
    """-log σ(r_c - r_r - margin) + c·(r_c + r_r)²."""
    above = chosen - rejected
    if margin is not None:
        above = above - margin
    return F.softplus(-above, threshold=50) + center_coef * (chosen + rejected) ** 2


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights_dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(cap(scale·q·kᵀ))·v over each row's own live tokens, 0 where there is none. Sinks take
    a part of the softmax, which is rounded to a dtype before the product, if one is given."""
    batch, heads, width = query.shape
    kv_heads = keys.shape[2]
    # [B, 1, 1, M]
    position = torch.arange(keys.shape[1], device=query.device)
    lengths = lengths.view(-1, 1, 1, 1)
    live = position < lengths
    if window is not None:
        live = live & (position >= lengths - window)
    if chunk is not None:
        live = live & (position // chunk == (lengths - 1) // chunk)
    # Dead tokens may be NaN: they are replaced before any arithmetic.
    keys, values = (torch.where(live.mT, x[:batch].transpose(1, 2), 0.0) for x in (keys, values))
    query = query.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = query @ keys.mT * (1 / math.sqrt(width) if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~live, -math.inf)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    weights = torch.where(live, weights, 0.0)  # NaN where nothing is live
    if weights_dtype is not None:
        weights = weights.to(weights_dtype).to(values.dtype)
    return (weights @ values).reshape(batch, heads, values.shape[-1])


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """w·s/√(mean s² + ε), or with 1 + w, of s = residual + x; with a residual also s."""
    total = x if residual is None else residual + x
    normed = total / (total.square().mean(-1, keepdim=True) + eps).sqrt()
    out = (1.0 + weight if unit_offset else weight) * normed
    return out if residual is None else (out, total)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """g·σ(g)·u"""
    return gate * torch.sigmoid(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first R numbers of heads [B, h, D], turned by angles whose cosines and sines are [B, R]:
    pairs (x_i, x_{i + R/2})."""
    half = cos.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        low, high = x[..., i], x[..., i + half]
        out[..., i] = low * cos[:, None, i] - high * sin[:, None, i]
        out[..., i + half] = high * cos[:, None, i + half] + low * sin[:, None, i + half]
    return out
