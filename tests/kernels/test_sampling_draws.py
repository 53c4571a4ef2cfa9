"""sample_tokens: how often a token is drawn, and what a draw depends on."""

import math
from itertools import combinations

import pytest
import torch

from fastrl_kernels import dispatch, race, reference, sample_tokens
from fastrl_kernels.splitmix import GAMMA, mixed
from tests.kernels.draws import (
    INF,
    RARE,
    SETTINGS,
    assert_same_bits,
    batch,
    keys_for,
    sample,
    z_score,
)
from tests.kernels.judge import misaligned, names

BF16, FP32 = torch.bfloat16, torch.float32
VALUES = {"temperature": 1.4, "top_k": 60, "top_p": 0.9, "min_p": 0.01}


def draws(row, n, backend, seed=0, **options):
    """How often each token was drawn from one row of logits, with n keys."""
    result = sample(row.expand(n, -1), seed, backend=backend, **options)
    return torch.bincount(result.tokens.cpu(), minlength=len(row)), result


# Temperature, top-k, top-p and min-p, each with and without each other.
COMBINATIONS = {
    ", ".join(chosen) or "plain": {name: VALUES[name] for name in chosen}
    for n in range(5)
    for chosen in combinations(VALUES, n)
}
INTERPRETED = dispatch.interpreting()
FEW = 140 if INTERPRETED else 20000  # draws of the kernel


@pytest.mark.parametrize("options", [
    {},
    {"temperature": 0.6, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.97, "min_p": 0.02},
], ids=["plain", "temperature, min-p", "all"])  # fmt: skip
def test_tokens_are_drawn_as_often_as_they_are_probable(backend, device, options):
    row = torch.tensor([-1.0, 3.0, 0.0, 2.0, -2.0, -INF, 1.0], dtype=BF16, device=device)
    n = 100000 if backend == "torch" else FEW // {0: 1, 2: 2, 4: 4}[len(options)]
    counts, result = draws(row, n, backend, 2, **options)
    _, drawn_from, *_ = reference.sample_support(row.double().cpu()[None], **options)
    possible = drawn_from[0] > 0
    probabilities, seen = drawn_from[0][possible], counts[possible]
    assert counts[~possible].sum() == 0
    assert abs(z_score(seen, probabilities)) < RARE
    # The test has power: it tells this from the same at twice the temperature, and few draws tell
    # it from one where all that is kept is as probable.
    wrong = probabilities.sqrt() if n >= 400 else torch.ones_like(probabilities)
    assert z_score(seen, wrong / wrong.sum()) > RARE
    exact = drawn_from[0].log()[result.tokens.cpu()]
    torch.testing.assert_close(result.truncated_logprobs.cpu().double(), exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("options", COMBINATIONS.values(), ids=COMBINATIONS)
def test_draws_of_several_parts_are_as_often_as_they_are_probable(options):
    """100,000 draws of each combination, from a row of thirteen parts, whose last is not whole."""
    row = batch(203, scale=2.0, seed=3)
    counts, _ = draws(row, 100_000, "torch", seed=7, **options)
    _, drawn_from, *_ = reference.sample_support(row.double()[None], **options)
    possible = drawn_from[0] > 0
    assert counts[~possible].sum() == 0
    assert z_score(counts[possible], drawn_from[0][possible]) < RARE


def test_rare_tokens_and_all_places_of_a_long_row_are_drawn(backend, device):
    """Each of the parts that a kernel cuts a row into, and each place within a part."""
    vocabulary, n = (12300, 120) if backend == "triton" and INTERPRETED else (50257, 10000)
    row = torch.zeros(vocabulary, device=device)
    row[vocabulary // 2 :] = math.log(2.0)
    tokens = []
    for first in range(0, n, 1000):
        rows = row.expand(min(1000, n - first), -1)
        tokens.append(sample(rows, first, backend=backend).tokens)
    drawn = torch.cat(tokens).cpu()
    weights = row.cpu().exp().double()
    for fold in (
        torch.arange(vocabulary) * 12 // vocabulary,
        torch.arange(vocabulary) % 8,
        torch.arange(vocabulary) % 4096 // 512,
    ):
        probabilities = torch.zeros(fold.max() + 1, dtype=torch.float64)
        probabilities.scatter_add_(0, fold, weights / weights.sum())
        counts = torch.bincount(fold[drawn], minlength=len(probabilities))
        assert abs(z_score(counts, probabilities)) < RARE


def test_a_token_of_small_probability_is_drawn_as_often_as_it_should(device):
    """The last of a row: what a coarse or a rounded uniform would miss or favour."""
    row = torch.full((130,), -INF, device=device)
    row[0], row[-1] = 0.0, math.log(1e-3)
    n = 200000
    counts, _ = draws(row, n, "torch")
    expected = n * 1e-3 / (1 + 1e-3)
    assert abs(counts[-1].item() - expected) < RARE * math.sqrt(expected)
    assert counts[0] + counts[-1] == n


def test_impossible_tokens_are_never_drawn(backend, device):
    logits = batch(24, 700, dtype=BF16, device=device)
    logits[:12, 5:] = -INF
    logits[12:, :695] = -INF
    for options in ({}, {"top_k": 300}, {"top_p": 0.99}):
        rows = logits[::4] if options else logits
        result = sample(rows, backend=backend, **options)
        half = len(rows) // 2
        assert (result.tokens[:half] < 5).all()
        assert (result.tokens[half:] >= 695).all()
        assert all(x.isfinite().all() for x in (result.logprobs, result.entropies))
        if "top_p" not in options:
            assert (result.cutoffs == -INF).all()


def test_variates_are_exponential_and_independent():
    """Over columns, over keys that are neighbours, and over the two races of a key."""
    states = mixed(torch.arange(16) + GAMMA).unsqueeze(-1)
    columns, parts = (
        race.exponentials(states, torch.arange(4096) + first).double()
        for first in (0, race.FIRST_PART)
    )
    uniforms = 1 - (-columns).exp()
    sorted_ = uniforms.flatten().sort().values
    n = len(sorted_)
    # Kolmogorov and Smirnov's distance; and small variates, which win, at every scale.
    distance = (sorted_ - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert distance * math.sqrt(n) < 2.7
    for scale in (1e-1, 1e-2, 1e-3):
        low, expected = (columns < scale).sum().item(), n * -math.expm1(-scale)
        assert abs(low - expected) < RARE * math.sqrt(expected)
    other = 1 - (-parts).exp()
    for here, there in (
        (uniforms[:, :-1], uniforms[:, 1:]),
        (uniforms[:-1], uniforms[1:]),
        (uniforms[:, :-4], uniforms[:, 4:]),
        (uniforms, other),
    ):
        grid = torch.bincount(((here * 8).long() * 8 + (there * 8).long()).flatten(), minlength=64)
        assert abs(z_score(grid, torch.full((64,), 1 / 64))) < RARE


def test_variates_of_the_most_extreme_bits_are_positive_and_finite(monkeypatch):
    bits = torch.tensor([[0, -1, (1 << 17) - 1, 1 << 17]])
    monkeypatch.setattr(race, "mixed", lambda _: bits)
    found = race.exponentials(torch.zeros(1, 1, dtype=torch.int64), torch.arange(4))[0]
    expected = torch.tensor([2.0**-48, 24 * math.log(2.0), 2.0**-48, 1.5 * 2.0**-47])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_a_row_alone_gives_the_bits_it_gives_among_others(backend, device, dtype, options):
    """507 is odd: rows of the batch start anywhere in a vector, a row alone at its start."""
    n = 64 if options == {} else 7
    logits, keys = batch(n, 507, dtype=dtype, device=device), keys_for(n, device)
    together = sample_tokens(logits, keys, backend=backend, **options)
    if backend == "torch":  # its sums' order may depend on the batch, its draws must not
        alone = sample_tokens(logits[3:4].clone(), keys[3:4], backend=backend, **options)
        assert alone.tokens == together.tokens[3]
        return
    for i in (1, 2, n - 1):
        row, key = logits[i : i + 1].clone(), keys[i : i + 1]
        alone = sample_tokens(row, key, backend=backend, **options)
        assert_same_bits(alone, [x[i : i + 1] for x in together])
    turned = torch.arange(n - 1, -1, -1, device=device)[:3]
    moved = sample_tokens(logits[turned], keys[turned], backend=backend, **options)
    assert_same_bits(moved, [x[turned] for x in together])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_a_long_row_gives_the_same_bits_at_every_alignment(device, dtype):
    logits, keys = batch(1, 8301, dtype=dtype, device=device), keys_for(1, device)
    options = {"temperature": 0.8, "top_p": 0.9}
    expected = sample_tokens(logits, keys, backend="triton", **options)
    for shift in (1, 6):
        moved = sample_tokens(misaligned(logits, shift), keys, backend="triton", **options)
        assert_same_bits(moved, expected)


def test_every_layout_gives_the_same_draws(backend, device):
    logits, keys = batch(4, 507, dtype=BF16, device=device), keys_for(4, device)
    expected = sample_tokens(logits, keys, backend=backend)
    room = torch.full((4, 3, 530), torch.nan, dtype=BF16, device=device)
    room[:, 1, 5:512] = logits
    doubled = torch.stack([keys, -keys], -1)
    for same, its_keys in (
        (room[:, 1, 5:512], keys),
        (logits.t().contiguous().t(), doubled[:, 0]),
        (logits, keys.view(torch.uint64)),
    ):
        assert_same_bits(sample_tokens(same, its_keys, backend=backend), expected)
    assert torch.equal(logits, batch(4, 507, dtype=BF16, device=device))


def test_another_key_gives_another_draw(backend, device):
    logits = torch.zeros(30, 503, device=device)
    first, second = (sample(logits, seed, backend=backend).tokens for seed in (0, 1))
    assert (first == second).sum() < 3
    assert len(set(first.tolist())) > 20
