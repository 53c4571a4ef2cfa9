"""sample_with_support: the set that a draw came from, and figures over it alone."""

import pytest
import torch

from fastrl_kernels import TokenSets, reference, sample_tokens, sample_with_support
from fastrl_kernels.token_sets import packed
from tests.kernels.draws import CUTS, INF, batch, keys_for
from tests.kernels.judge import DTYPES, assert_close_to_exact
from tests.kernels.roundings import Rounded
from tests.kernels.test_properties import Draw, examples

OPTIONS = {"nothing": {}, "hot": {"temperature": 1.3}, "greedy": {"temperature": 0.0}, **CUTS}


def among(logits, kept, tokens, temperature):
    """log q, log q at T = 1 and the entropies, of softmax over what is kept."""
    t = temperature or 1.0
    kept = kept.to(logits.device)
    tempered, at_one = (
        (logits / divisor).masked_fill(~kept, -INF).log_softmax(-1) for divisor in (t, 1.0)
    )
    at = tokens.unsqueeze(-1)
    entropies = torch.special.entr(tempered.exp()).sum(-1)
    return tempered.gather(-1, at).squeeze(-1), at_one.gather(-1, at).squeeze(-1), entropies


def check(logits, options, backend, allowed=None):
    keys = keys_for(len(logits), logits.device)
    words = None if allowed is None else packed(allowed)
    drawn, words = sample_with_support(logits, keys, **options, allowed=words, backend=backend)
    vocabulary = logits.shape[1]
    if allowed is not None:
        logits = torch.where(allowed, logits, -INF)
    kept = TokenSets.of_words(words, vocabulary).mask()

    expected = sample_tokens(logits, keys, **options, backend=backend)
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.equal(drawn.cutoffs, expected.cutoffs)
    lowest = expected.cutoffs.cpu().unsqueeze(-1)
    assert torch.equal(kept, (logits.cpu() > -INF) & (logits.float().cpu() >= lowest))
    assert kept.gather(-1, drawn.tokens.cpu().unsqueeze(-1)).all()

    def figures(dtype):
        return among(logits.to(dtype), kept, drawn.tokens, options.get("temperature", 1.0))

    runs = Rounded(lambda: figures(torch.float32))
    names = ("logprobs", "logprobs_t1", "entropies")
    for i, (name, exact) in enumerate(zip(names, figures(torch.float64), strict=True)):
        assert_close_to_exact(getattr(drawn, name), runs[i], exact, name)
    assert torch.equal(drawn.truncated_logprobs, drawn.logprobs)
    return drawn, kept


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@examples(5)
def test_figures_are_of_the_set_that_was_drawn_from(backend, device, options, random):
    draw = Draw(random, device)
    vocabulary = draw.one_of((1, 2, 31, 32, 33, 503), "vocabulary")
    logits = batch(
        5,
        vocabulary,
        dtype=draw.one_of(DTYPES, "dtype"),
        device=device,
        scale=draw.one_of((1.0, 3.0, 10.0), "scale"),
        shift=draw.one_of((0.0, 40.0), "shift"),
        seed=random.getrandbits(30),
    )
    if vocabulary > 2 and draw.sometimes("barred"):
        logits[:, :: draw.one_of((2, 3), "every")] = -INF
    check(logits, options, backend)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@examples(5)
def test_what_is_not_allowed_counts_as_left_out(backend, device, options, random):
    """Few tokens or many, rows of all sizes in one batch; other logits are never looked at."""
    draw = Draw(random, device)
    vocabulary = draw.one_of((1, 33, 503, 4999), "vocabulary")
    logits = batch(7, vocabulary, device=device, scale=3.0, seed=random.getrandbits(30))
    allowed = torch.zeros(7, vocabulary, dtype=torch.bool)
    for row in allowed:
        few = draw.one_of((1, 2, 8, 9, vocabulary // 64, vocabulary - 1, vocabulary), "tokens")
        row[random.sample(range(vocabulary), max(1, min(few, vocabulary)))] = True
    allowed = allowed.to(device)
    logits[~allowed] = draw.one_of((1e3, INF, torch.nan), "others")
    check(logits, options, backend, allowed)


def test_rows_are_drawn_as_they_are_alone():
    """To the bit, whatever else there is."""
    logits, keys = batch(9, 4999), keys_for(9)
    allowed = torch.zeros(9, 4999, dtype=torch.bool)
    for i, row in enumerate(allowed):
        row[torch.arange(0, 4999, [1, 3, 70, 700, 2500][i % 5])] = True
    words = packed(allowed)
    together = sample_with_support(logits, keys, top_p=0.9, allowed=words)
    for i in range(9):
        row = slice(i, i + 1)
        alone = sample_with_support(logits[row], keys[row], top_p=0.9, allowed=words[row])
        for a, b in zip((*together[0], together[1]), (*alone[0], alone[1]), strict=True):
            assert torch.equal(a[row], b)


def test_a_row_that_allows_nothing_has_no_token(backend, device):
    logits = batch(3, 70, device=device)
    logits[2, 5] = -INF
    words = torch.zeros(3, 3, dtype=torch.int32, device=device)
    words[0, 2] = -64  # bits of no token
    words[1, 0] = -(2**31)
    words[2, 0] = 32
    drawn, kept = sample_with_support(logits, keys_for(3, device), allowed=words, backend=backend)
    assert drawn.tokens.tolist() == [-1, 31, -1]
    assert TokenSets.of_words(kept, 70).sizes().tolist() == [0, 1, 0]
    assert drawn.logprobs[1] == 0
    assert drawn.logprobs[::2].isnan().all()


@pytest.mark.parametrize("options", [CUTS["top-p"], CUTS["all"]], ids=["top-p", "all"])
def test_a_long_row(options):
    """Its weights are summed up by buckets, and its rows taken in chunks."""
    _, kept = check(batch(45, 50257), options, "torch")
    assert kept.sum(-1).max() > 100 or "top_k" in options


def test_nothing_that_is_cut_changes_no_bit(backend, device):
    """What a draw from all logits says, and the same of the reference's set where some are cut."""
    logits = batch(6, 507, device=device)
    keys = keys_for(6, device)
    for options in ({}, {"temperature": 0.7}, {"top_k": 507, "top_p": 1.0}):
        drawn, words = sample_with_support(logits, keys, **options, backend=backend)
        expected = sample_tokens(logits, keys, **options, backend=backend)
        for name in ("tokens", "logprobs", "logprobs_t1", "cutoffs"):
            assert torch.equal(getattr(drawn, name), getattr(expected, name)), name
        torch.testing.assert_close(drawn.entropies, expected.entropies, rtol=1e-6, atol=1e-6)
        assert TokenSets.of_words(words, 507).mask().all()
    kept, *_ = reference.sample_support(logits.double().cpu(), 1.0, 40, 0.7)
    _, words = sample_with_support(logits, keys, top_k=40, top_p=0.7, backend=backend)
    assert torch.equal(TokenSets.of_words(words, 507).mask(), kept)


def test_rows_have_their_own_parameters(backend, device):
    logits = batch(4, 90, device=device)
    keys = keys_for(4, device)
    temperature = torch.tensor([1.0, 0.0, 1.3, 0.7], device=device)
    top_k = torch.tensor([0, 5, 7, 1], device=device)
    drawn, words = sample_with_support(
        logits, keys, temperature=temperature, top_k=top_k, backend=backend
    )
    assert TokenSets.of_words(words, 90).sizes().tolist() == [90, 90, 7, 1]
    assert drawn.tokens[1] == logits[1].argmax()
    for i in range(4):
        part, one = slice(i, i + 1), {"temperature": float(temperature[i]), "top_k": int(top_k[i])}
        alone, _ = sample_with_support(logits[part], keys[part], **one, backend=backend)
        torch.testing.assert_close(drawn.logprobs[part], alone.logprobs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(drawn.entropies[part], alone.entropies, rtol=1e-6, atol=1e-6)
    assert drawn.logprobs[3] == drawn.entropies[3] == 0


def test_a_row_that_is_no_distribution_has_no_token(backend, device):
    logits = batch(3, 70, device=device)
    logits[0] = -INF
    logits[2, 5] = torch.nan
    for options in ({}, {"top_p": 0.9}):
        drawn, words = sample_with_support(logits, keys_for(3, device), **options, backend=backend)
        assert (drawn.tokens == -1).tolist() == [True, False, True]
        assert drawn.logprobs.isnan().tolist() == [True, False, True]
        assert (TokenSets.of_words(words, 70).sizes() == 0).tolist() == [True, False, True]
    none, words = sample_with_support(logits[:0], keys_for(0, device), backend=backend)
    assert none.tokens.shape == (0,)
    assert words.shape == (0, 3)


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_p": 1.5}, {"temperature": -1.0}])
def test_faults_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        sample_with_support(batch(2, 9), keys_for(2), **options)
    with pytest.raises(TypeError, match="keys must be int64"):
        sample_with_support(batch(2, 9), torch.zeros(2))


def test_what_is_allowed_has_a_bit_for_each_token():
    with pytest.raises(ValueError, match=r"it must be \[2, 2\]"):
        sample_with_support(batch(2, 33), keys_for(2), allowed=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(TypeError, match="must be int32"):
        sample_with_support(batch(2, 33), keys_for(2), allowed=torch.ones(2, 33).bool())
