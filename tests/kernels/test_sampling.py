"""sample_tokens: what is kept, how often it is drawn, and what a draw depends on."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastrl_kernels import dispatch, reference, sample_keys, sample_tokens
from tests.kernels.judge import DTYPES, assert_close_to_exact, misaligned, names
from tests.kernels.launches import floats_arrive_as_double, interpreted, watched

BF16, FP32 = torch.bfloat16, torch.float32
INF = math.inf
# Of a statistic that a correct draw exceeds once in a million times.
RARE = 4.9


def batch(*shape, dtype=FP32, device="cpu", scale=3.0, shift=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator) * scale + shift
    return logits.to(dtype).to(device)


def keys_for(n, device="cpu", seed=0):
    return sample_keys(seed, torch.arange(n, device=device), 0)


def sample(logits, seed=0, **options):
    return sample_tokens(logits, keys_for(len(logits), logits.device, seed), **options)


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """transformers' scores in float64: -inf where it removes a token."""
    scores = TemperatureLogitsWarper(float(temperature))(None, logits.double().cpu())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores


def kept_by_transformers(logits, **options):
    """Its kept set, with all logits that equal the lowest kept one."""
    kept = warped(logits, **options) > -INF
    x = logits.double().cpu()
    return x >= torch.where(kept, x, INF).amin(-1, keepdim=True)


def kept_by(result, logits):
    """The kept set that the cutoffs tell."""
    return (logits.float() >= result.cutoffs.unsqueeze(-1)).cpu() & (logits > -INF).cpu()


def z_scores(counts, probabilities):
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


def draws(row, n, backend, seed=0, **options):
    """How often each token was drawn from one row of logits, with n keys."""
    result = sample(row.expand(n, -1), seed, backend=backend, **options)
    return torch.bincount(result.tokens.cpu(), minlength=len(row)), result


# --- what is kept --------------------------------------------------------------------------------

CUTS = {
    "top-k": {"top_k": 5},
    "top-k of all but one": {"top_k": 6},
    "top-k beyond": {"top_k": 60000},
    "top-p": {"top_p": 0.8},
    "tiny top-p": {"top_p": 1e-6},
    "temperature, top-p": {"temperature": 1.7, "top_p": 0.6},
    "min-p": {"temperature": 0.6, "min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
}


@pytest.mark.parametrize("options", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("vocabulary", [1, 2, 7, 503])
def test_keeps_what_transformers_keeps(backend, device, vocabulary, options):
    logits = batch(3, vocabulary, device=device, seed=vocabulary)
    result = sample(logits, backend=backend, **options)
    kept = kept_by_transformers(logits, **options)
    assert torch.equal(kept_by(result, logits), kept)
    assert kept.gather(-1, result.tokens.cpu().unsqueeze(-1)).all()
    nothing_cut = kept.all(-1)
    assert (result.cutoffs.cpu() == -INF).tolist() == nothing_cut.tolist()
    assert torch.equal(result.truncated_logprobs == result.logprobs, nothing_cut.to(device))


LONG = {name: CUTS[name] for name in ("top-k", "temperature, top-p", "all")}


@pytest.mark.parametrize("options", LONG.values(), ids=LONG)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_keeps_what_transformers_keeps_of_a_long_row(backend, device, dtype, options):
    logits = batch(2, 50257, dtype=dtype, device=device)
    result = sample(logits, backend=backend, **options)
    assert torch.equal(kept_by(result, logits), kept_by_transformers(logits, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_the_lowest_kept_logit_may_have_any_bits(backend, device, dtype):
    """Of either sign, zeros of both signs, subnormal, and all digits of the search."""
    values = torch.tensor([-3e4, -7.7, -1.0, -1e-7, -0.0, 0.0, 1e-7, 0.3, 0.31, 5.1, 6e4])
    logits = values.to(dtype).to(device)[torch.randperm(11)].expand(len(values), -1)
    for k in range(1, 11):
        result = sample(logits[:1], top_k=k, backend=backend)
        expected = logits[0].float().sort(descending=True).values[k - 1]
        if (logits[0].float() < expected).any():
            assert result.cutoffs.item() == expected.item()


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.9999])
def test_ties_at_a_cutoff_are_kept(backend, device, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (4, 300), generator=generator).float().to(device)
    for options in ({"top_p": top_p}, {"top_k": 20}, {"top_k": 90, "top_p": top_p}):
        result = sample(logits, backend=backend, **options)
        kept = kept_by(result, logits)
        assert torch.equal(kept, kept_by_transformers(logits, **options))
        expected, *_ = reference.sample_support(logits.double().cpu(), **options)
        assert torch.equal(kept, expected)


@pytest.mark.parametrize("options", CUTS.values(), ids=CUTS)
def test_the_specification_keeps_what_transformers_keeps(options):
    for vocabulary in (1, 2, 7, 503):
        logits = batch(6, vocabulary, seed=vocabulary).double()
        logits[0] = logits[0].round()
        logits[1, 0] = 60.0
        kept, probabilities, cutoffs, _ = reference.sample_support(logits, **options)
        assert torch.equal(kept, kept_by_transformers(logits, **options))
        assert torch.equal(logits >= cutoffs.unsqueeze(-1), kept)
        without_ties = slice(1, None)
        expected = warped(logits, **options).softmax(-1)[without_ties]
        torch.testing.assert_close(probabilities[without_ties], expected)


def test_a_peaked_row_keeps_its_peak_alone(backend, device):
    logits = batch(3, 503, device=device)
    logits[:, 77] = 100.0
    for options in ({"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 1}, {"top_k": 9, "top_p": 0.01}):
        result = sample(logits, backend=backend, **options)
        assert result.tokens.tolist() == [77] * 3
        assert result.cutoffs.tolist() == [100.0] * 3
        assert result.truncated_logprobs.tolist() == [0.0] * 3


# --- how often -----------------------------------------------------------------------------------

FEW = 600 if dispatch.interpreting() else 20000


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 2.0}, {"top_k": 4}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05}],
    ids=["plain", "hot", "top-k", "all"],
)
def test_tokens_are_drawn_as_often_as_they_are_probable(backend, device, options):
    row = batch(9, device=device, scale=1.0, seed=3)
    n = 200000 if backend == "torch" else FEW if len(options) < 2 else FEW // 3
    counts, result = draws(row, n, backend, **options)
    _, probabilities, *_ = reference.sample_support(row.double().cpu()[None], **options)
    assert counts[probabilities[0] == 0].sum() == 0
    assert (
        abs(z_scores(counts[probabilities[0] > 0], probabilities[0][probabilities[0] > 0])) < RARE
    )
    # The test has power: it sees when a fifth is taken of one token and given to another.
    wrong = probabilities[0].clone()
    first, second = wrong.argsort(descending=True)[:2]
    wrong[first], wrong[second] = wrong[first] * 0.6, wrong[second] + wrong[first] * 0.4
    assert z_scores(counts[wrong > 0], wrong[wrong > 0]) > RARE
    exact = probabilities[0].log()[result.tokens.cpu()]
    torch.testing.assert_close(result.truncated_logprobs.cpu().double(), exact)


def test_rare_tokens_and_all_places_of_a_long_row_are_drawn(backend, device):
    """Each of 13 parts of a row, and all places within parts, as often as others."""
    vocabulary, n = 50257, 400 if backend == "triton" and dispatch.interpreting() else 20000
    if backend == "triton" and dispatch.interpreting():
        vocabulary = 12300
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
        torch.arange(vocabulary) % 4088 // 512,
    ):
        probabilities = torch.zeros(fold.max() + 1, dtype=torch.float64)
        probabilities.scatter_add_(0, fold, weights / weights.sum())
        counts = torch.bincount(fold[drawn], minlength=len(probabilities))
        assert abs(z_scores(counts, probabilities)) < RARE


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
    logits = batch(40, 700, device=device)
    logits[:, 5:] = -INF
    logits[20:, :695] = -INF
    logits[20:, 695:] = batch(20, 5, device=device)
    for options in ({}, {"top_k": 300}, {"top_p": 0.99}):
        result = sample(logits[::4] if options else logits, backend=backend, **options)
        half = len(result.tokens) // 2
        assert (result.tokens[:half] < 5).all()
        assert (result.tokens[half:] >= 695).all()
        assert all(x.isfinite().all() for x in (result.logprobs, result.entropies))
        if "top_p" not in options:
            assert (result.cutoffs == -INF).all()


# --- what a draw depends on ----------------------------------------------------------------------

SETTINGS = {"plain": {}, "hot": {"temperature": 1.3}, "all": CUTS["all"]}


def assert_same_bits(actual, expected):
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_a_row_alone_gives_the_bits_it_gives_among_others(backend, device, dtype, options):
    """507 is odd: rows of the batch start anywhere in a vector, a row alone at its start."""
    n = 64 if options == {} else 12
    logits, keys = batch(n, 507, dtype=dtype, device=device), keys_for(n, device)
    together = sample_tokens(logits, keys, backend=backend, **options)
    if backend == "torch":  # its sums' order may depend on the batch, its draws must not
        alone = sample_tokens(logits[3:4].clone(), keys[3:4], backend=backend, **options)
        assert alone.tokens == together.tokens[3]
        return
    for i in (0, 1, 2, n - 1):
        row, key = logits[i : i + 1].clone(), keys[i : i + 1]
        alone = sample_tokens(row, key, backend=backend, **options)
        assert_same_bits(alone, [x[i : i + 1] for x in together])
    turned = torch.arange(n - 1, -1, -1, device=device)[:9]
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


# --- log-probabilities and entropies -------------------------------------------------------------


def judge_statistics(logits, backend, **options):
    """Every figure against float64, with the error that plain PyTorch makes in fp32."""
    result = sample(logits, backend=backend, **options)
    tokens = result.tokens.unsqueeze(-1)

    def figures(dtype):
        x = logits.to(dtype)
        kept, _, _, entropies = reference.sample_support(x, **options)
        t = torch.as_tensor(options.get("temperature", 1.0), device=x.device).to(dtype)
        t = torch.where(t == 0, 1.0, t).expand(len(x)).unsqueeze(-1)
        cut = torch.where(kept_by(result, logits).to(kept.device), x, -INF)
        logps = [torch.log_softmax(y, -1).gather(-1, tokens) for y in (x / t, x, cut / t)]
        return [*(y.squeeze(-1) for y in logps), entropies]

    actual = (result.logprobs, result.logprobs_t1, result.truncated_logprobs, result.entropies)
    what = ("logprobs", "logprobs_t1", "truncated_logprobs", "entropies")
    for found in zip(actual, figures(FP32), figures(torch.float64), what, strict=True):
        assert_close_to_exact(*found)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_figures_match_the_formula(backend, device, dtype, options):
    judge_statistics(batch(8, 507, dtype=dtype, device=device), backend, **options)


def test_figures_of_a_long_row_match_the_formula(backend, device):
    logits = batch(2, 50257, dtype=BF16, device=device)
    judge_statistics(logits, backend, temperature=0.7)


@pytest.mark.parametrize(("scale", "shift"), [(1, 300), (10, 300), (10, -300), (0, 0), (1, 1e4)])
def test_far_from_zero_and_widely_spread(backend, device, scale, shift):
    logits = batch(6, 1000, device=device, scale=scale, shift=shift)
    judge_statistics(logits, backend, temperature=0.9)


def test_extreme_logits(backend, device):
    logits = batch(4, 503, device=device)
    logits[0] *= 1e4
    logits[1] = -1e4
    logits[2] = 1e4
    logits[3, 100] = 1e4
    for options in ({}, {"temperature": 1e-3}, {"top_p": 0.9}, {"temperature": 1e-20}):
        result = sample(logits, backend=backend, **options)
        assert all(x.isfinite().all() for x in (result.logprobs, result.entropies))
        assert result.tokens[[0, 3]].tolist() == logits[[0, 3]].argmax(-1).tolist()
        assert result.entropies[1].item() == pytest.approx(math.log(503))


# --- greedy, and parameters per row --------------------------------------------------------------


def test_greedy_takes_the_first_of_the_highest(backend, device):
    logits = batch(6, 9000, dtype=BF16, device=device)
    logits[0, [8999, 4088, 4087, 300]] = 50.0
    logits[1, [8000, 7999]] = 50.0
    logits[2] = 0.0
    result = judge_statistics(logits, backend, temperature=0.0)
    expected = [300, 7999, 0, *logits[3:].float().argmax(-1).tolist()]
    assert result.tokens.tolist() == expected
    assert (result.cutoffs == -INF).all()
    assert torch.equal(result.logprobs, result.logprobs_t1)
    cut = sample(logits, temperature=0, top_k=3, top_p=0.5, min_p=0.1, backend=backend)
    assert_same_bits(cut, result)


def test_parameters_per_row(backend, device):
    """Greedy, plain, and every cut, each as it would be alone with numbers."""
    rows = [
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
        {},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 0.5, "top_k": 2},
        {"top_p": 0.6},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
        {"min_p": 0.2},
    ]
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    logits = batch(len(rows), 507, dtype=BF16, device=device)
    keys = keys_for(len(rows), device)
    tensors = {
        name: torch.tensor([row.get(name, default) for row in rows], device=device)
        for name, default in defaults.items()
    }
    tensors["top_k"] = tensors["top_k"].to(torch.int32)
    together = sample_tokens(logits, keys, backend=backend, **tensors)
    for i, options in enumerate(rows):
        alone = sample_tokens(logits[i : i + 1], keys[i : i + 1], backend=backend, **options)
        for name, a, b in zip(together._fields, alone, together, strict=True):
            torch.testing.assert_close(a[0], b[i], rtol=1e-6, atol=1e-6, msg=f"{i}: {name}")


def test_rows_that_are_no_distribution(backend, device):
    logits = batch(6, 507, device=device)
    logits[0] = -INF
    logits[2, 50] = torch.nan
    logits[4, 60] = INF
    logits[5] = torch.nan
    for options in ({}, {"temperature": 0.0}, {"temperature": 0.5, "top_k": 5, "top_p": 0.5}):
        result = sample(logits, backend=backend, **options)
        assert (result.tokens == -1).tolist() == [True, False, True, False, True, True]
        for x in result[1:]:
            assert x.isnan().tolist() == [True, False, True, False, True, True]


def test_an_impossible_temperature_on_the_device_is_no_draw(device):
    temperature = torch.tensor([1.0, -1.0, torch.nan, INF], device=device)
    result = sample(batch(4, 90, device=device), temperature=temperature, backend="triton")
    assert (result.tokens == -1).tolist() == [False, True, True, True]
    assert result.logprobs.isnan().tolist() == [False, True, True, True]


# --- keys ----------------------------------------------------------------------------------------


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def key_of(*parts):
    """The definition in Python's integers."""
    state = 0
    for x in parts:
        state = mix(((state ^ x % 2**64) + 0x9E3779B97F4A7C15) % 2**64)
    return state


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**70 + 3])
def test_keys_are_those_of_the_definition(device, seed):
    assert key_of(0) == 0xE220A8397B1DCDAF  # splitmix64's first output from seed 0, as published
    ids = [0, 1, -5, 2**40, 2**63 - 1]
    for indices in ([0] * 5, [7] * 5, [0, 1, 2, -3, 4]):
        given = torch.tensor(indices, device=device) if len(set(indices)) > 1 else indices[0]
        keys = sample_keys(seed, torch.tensor(ids, device=device), given)
        assert keys.dtype == torch.int64
        expected = [key_of(seed, i, j) for i, j in zip(ids, indices, strict=True)]
        assert [key % 2**64 for key in keys.tolist()] == expected


def test_keys_depend_on_all_three_and_on_nothing_else(device):
    ids = torch.arange(100, device=device)
    indices = torch.arange(50, device=device)
    keys = sample_keys(3, ids.repeat(50), indices.repeat_interleave(100))
    assert len(set(keys.tolist())) == 5000
    assert not set(keys.tolist()) & set(sample_keys(4, ids.repeat(50), 0).tolist())
    assert torch.equal(sample_keys(3, ids[40:60], 7), keys[740:760])
    assert torch.equal(sample_keys(torch.tensor(3, device=device), ids[40:60], 7), keys[740:760])


@pytest.mark.parametrize("neighbours", ["samples", "tokens", "seeds"])
def test_neighbouring_keys_give_independent_uniforms(device, neighbours):
    """Uniform alone, and in pairs of neighbours: correlation, and counts on an 8x8 grid."""
    n, steps = 60000, torch.arange(60001, device=device)
    same = torch.zeros_like(steps)
    seed, ids, index = {
        "samples": (1, steps, 5),
        "tokens": (1, same, steps),
        "seeds": (steps, same, 5),
    }[neighbours]
    keys = sample_keys(seed, ids, index)
    # Every column as probable: the tokens tell the uniforms that were drawn.
    tokens = sample_tokens(torch.zeros(n + 1, 64, device=device), keys, backend="torch").tokens
    for x in (tokens.cpu(), (keys.cpu() >> 58) + 32, keys.cpu() & 63):
        assert abs(z_scores(torch.bincount(x, minlength=64), torch.full((64,), 1 / 64))) < RARE
        here, there = x[:-1], x[1:]
        correlation = numpy.corrcoef(here.numpy(), there.numpy())[0, 1]
        assert abs(correlation) * math.sqrt(n) < RARE
        grid = torch.bincount(here // 8 * 8 + there // 8, minlength=64)
        assert abs(z_scores(grid, torch.full((64,), 1 / 64))) < RARE


def test_the_test_of_independence_sees_a_weak_hash():
    """Multiplication alone is what it would find wanting."""
    weak = torch.arange(60001) * 0x5851F42D4C957F2D
    here, there = (weak[:-1] >> 61) + 4, (weak[1:] >> 61) + 4
    grid = torch.bincount(here * 8 + there, minlength=64)
    assert z_scores(grid, torch.full((64,), 1 / 64)) > RARE


def test_neighbouring_keys_give_independent_noise(device):
    """The kernel's own random numbers, over keys and over columns."""
    n = FEW
    logits = torch.zeros(n, 64, device=device)
    tokens = sample_tokens(logits, torch.arange(n, device=device), backend="triton").tokens.cpu()
    eighths = tokens // 8
    assert abs(z_scores(torch.bincount(eighths, minlength=8), torch.full((8,), 1 / 8))) < RARE
    pairs = torch.bincount(eighths[:-1] * 8 + eighths[1:], minlength=64)
    assert abs(z_scores(pairs, torch.full((64,), 1 / 64))) < RARE


# --- manners -------------------------------------------------------------------------------------


def test_nothing_waits_for_the_device(device):
    """Numbers or tensors; the launches are the same whatever the logits are."""
    logits = batch(3, 507, dtype=BF16, device=device)
    keys = keys_for(3, device)
    tensors = {
        "temperature": torch.tensor([0.0, 1.0, 0.5], device=device),
        "top_k": torch.tensor([0, 5, 3], device=device),
        "top_p": torch.tensor([1.0, 0.5, 0.9], device=device),
        "min_p": torch.tensor([0.0, 0.0, 0.1], device=device),
    }
    for options, launches in (({}, 2), ({"min_p": 0.1}, 3), ({"top_p": 0.9}, 7), (tensors, 12)):
        with watched() as calls:
            sample_tokens(logits, keys, backend="triton", **options)
        assert len(calls) == launches, calls


def test_the_pytorch_path_waits_for_nothing_without_top_p(device):
    logits, keys = batch(3, 507, device=device), keys_for(3, device)
    for options in ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1}):
        with watched():
            sample_tokens(logits, keys, backend="torch", **options)


@pytest.mark.parametrize("tensors", [False, True])
def test_the_pytorch_path_on_another_device_waits_for_nothing(tensors):
    """Fake tensors of a GPU hold no data: whatever were read, and any shape that depends on it,
    would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.device("cuda"):
        keys = torch.zeros(3, dtype=torch.int64)
        options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
        if tensors:
            options = {name: torch.as_tensor(x).expand(3) for name, x in options.items()}
        for given in ({}, {"top_p": options["top_p"]}, options):
            result = sample_tokens(torch.zeros(3, 5000), keys, backend="torch", **given)
            assert [x.shape for x in result] == [(3,)] * 6


@interpreted
def test_numbers_from_compiled_code(device):
    logits = batch(2, 90, device=device)
    expected = sample(logits, backend="triton", temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    with floats_arrive_as_double():
        same = sample(logits, backend="triton", temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    assert_same_bits(same, expected)


def test_only_shapes_are_compiled_in():
    from fastrl_kernels._triton import cutoff, sampling
    from tests.kernels.launches import constants

    shapes = {"PART", "TILE", "VEC", "PARTS"}
    assert constants(sampling) == shapes
    assert constants(cutoff) == shapes | {"COUNT", "SAME_BITS"}


def test_no_rows(backend, device):
    result = sample(batch(0, 90, device=device), top_p=0.9, backend=backend)
    assert [x.shape for x in result] == [(0,)] * 6
    assert result.tokens.dtype == torch.int64


def test_no_gradient_is_recorded(backend, device):
    logits = batch(2, 90, device=device).requires_grad_()
    assert not any(x.requires_grad for x in sample(logits, backend=backend))


INT, ONES = torch.int64, torch.ones(3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": torch.zeros(3, 9, dtype=INT)}, TypeError, "logits must be float32"),
        ({"logits": torch.zeros(3, 0)}, ValueError, "V > 0"),
        ({"logits": torch.zeros(9)}, ValueError, r"must be \[N, V\]"),
        ({"logits": torch.zeros(3, 2, 9)}, ValueError, r"must be \[N, V\]"),
        ({"keys": torch.zeros(3)}, TypeError, "keys must be int64 or uint64"),
        ({"keys": torch.zeros(3, dtype=torch.int32)}, TypeError, "keys must be int64 or uint64"),
        ({"keys": torch.zeros(4, dtype=INT)}, ValueError, "keys has shape"),
        ({"keys": torch.zeros(3, dtype=INT, device="meta")}, ValueError, "keys is on"),
        ({"temperature": -1.0}, ValueError, "temperature must be 0"),
        ({"temperature": math.nan}, ValueError, "temperature must be 0"),
        ({"temperature": INF}, ValueError, "temperature must be 0"),
        ({"temperature": "1"}, TypeError, "temperature must be a number"),
        ({"temperature": ONES.long()}, TypeError, "temperature must be floating-point"),
        ({"temperature": -ONES}, ValueError, r"temperature\[0\] must be 0"),
        ({"temperature": torch.ones(3, 1)}, ValueError, "temperature has shape"),
        ({"top_k": -1}, ValueError, "top_k must be 0"),
        ({"top_k": 2.0}, TypeError, "top_k must be an integer"),
        ({"top_k": True}, TypeError, "top_k must be an integer"),
        ({"top_k": ONES}, TypeError, "top_k must be integers"),
        ({"top_k": torch.tensor([1, 2, -3])}, ValueError, r"top_k\[2\] must be 0"),
        ({"top_p": 0.0}, ValueError, "top_p must be in"),
        ({"top_p": 1.1}, ValueError, "top_p must be in"),
        ({"top_p": math.nan}, ValueError, "top_p must be in"),
        ({"top_p": 2 * ONES}, ValueError, r"top_p\[0\] must be in"),
        ({"top_p": torch.ones(3, device="meta")}, ValueError, "top_p is on"),
        ({"min_p": 1.0}, ValueError, "min_p must be in"),
        ({"min_p": -0.1}, ValueError, "min_p must be in"),
        ({"min_p": ONES}, ValueError, r"min_p\[0\] must be in"),
        ({"backend": "cuda"}, ValueError, "unknown backend"),
    ],
)
def test_what_is_refused_and_why(change, error, message):
    arguments = {"logits": torch.zeros(3, 9), "keys": torch.zeros(3, dtype=INT), "backend": "torch"}
    with pytest.raises(error, match=message):
        sample_tokens(**{**arguments, **change})


def test_what_keys_are_not_made_of():
    ids = torch.arange(3)
    for arguments in ((0.5, ids, 0), (0, ids.float(), 0), (0, ids, 0.5), (0, [1, 2], 0)):
        with pytest.raises(TypeError, match="must be integers"):
            sample_keys(*arguments)
