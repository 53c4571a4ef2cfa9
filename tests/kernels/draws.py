"""Rows to sample from, and how to judge a number of draws."""

import math

import torch

from fastrl_kernels import reference, sample_keys, sample_tokens

# A statistic as far out as this is seen once in a million correct draws.
RARE = 4.9
INF = math.inf

CUTS = {
    "top-k": {"top_k": 5}, "top-k of all but one": {"top_k": 6}, "top-k beyond": {"top_k": 60000},
    "top-p": {"top_p": 0.8}, "tiny top-p": {"top_p": 1e-6},
    "temperature, top-p": {"temperature": 1.7, "top_p": 0.6},
    "min-p": {"temperature": 0.6, "min_p": 0.1},
    "min-p of one": {"min_p": 1.0},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
}  # fmt: skip
SETTINGS = {"plain": {}, "hot": {"temperature": 1.3}, "all": CUTS["all"]}


def batch(*shape, dtype=torch.float32, device="cpu", scale=3.0, shift=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator) * scale + shift
    return logits.to(dtype).to(device)


def keys_for(n, device="cpu", seed=0):
    return sample_keys(seed, torch.arange(n, device=device), 0)


def sample(logits, seed=0, **options):
    return sample_tokens(logits, keys_for(len(logits), logits.device, seed), **options)


def kept_by(result, logits):
    """The kept set that the cutoffs tell."""
    return (logits.float() >= result.cutoffs.unsqueeze(-1)).cpu() & (logits > -INF).cpu()


def formula(logits, tokens, kept, temperature=1.0):
    """A draw's log-probs, those at T = 1, the truncated ones log p - log Σ p over what is kept, and
    the entropies."""
    t = torch.as_tensor(temperature, device=logits.device).to(logits)
    t = torch.where(t == 0, 1.0, t).expand(len(logits)).unsqueeze(-1)
    logp, at_one = torch.log_softmax(logits / t, -1), torch.log_softmax(logits, -1)
    log_kept = torch.where(kept.to(logits.device), logp.exp(), 0.0).sum(-1).log()
    drawn, drawn_at_one = (x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for x in (logp, at_one))
    entropies = reference.sample_support(logits, temperature)[-1]
    return drawn, drawn_at_one, drawn - log_kept, entropies


def z_score(counts, probabilities):
    """How far counts of draws lie from what is expected, as one standard normal: χ² cube-rooted
    (Wilson and Hilferty, 1931), tokens expected less than 5 times put together."""
    expected = probabilities.double() * counts.sum()
    order = expected.argsort()
    counts, expected = counts.double()[order], expected[order]
    rare = (expected.cumsum(0) < 5).sum().item() + 1 if expected[0] < 5 else 0
    if rare:
        counts = torch.cat([counts[:rare].sum().view(1), counts[rare:]])
        expected = torch.cat([expected[:rare].sum().view(1), expected[rare:]])
    degrees = len(counts) - 1
    assert degrees > 0
    statistic = ((counts - expected).square() / expected).sum().item()
    spread = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def assert_same_bits(actual, expected):
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert torch.equal(a, b), name
