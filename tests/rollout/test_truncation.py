"""Truncated log-probs of given tokens, against what the sampler says of those that it draws."""

import pytest
import torch

import fastrl_kernels
from fastrl.rollout.rescoring import truncated_logprobs

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.8},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    {"top_k": 1000},
]


def draws(logits, settings, seed=0):
    keys = fastrl_kernels.sample_keys(seed, torch.arange(len(logits)), 0)
    return fastrl_kernels.sample_tokens(logits, keys, **{"temperature": 1.0, **settings})


def check(logits, settings):
    draw = draws(logits, settings)
    logprobs, cutoffs = truncated_logprobs(logits, draw.tokens, **settings)
    # Two fp32 sums over up to 97 weights.
    torch.testing.assert_close(logprobs, draw.truncated_logprobs, atol=2e-6, rtol=1e-6)
    assert torch.equal(cutoffs, draw.cutoffs)
    return draw


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_says_what_the_sampler_says(settings, dtype):
    generator = torch.Generator().manual_seed(1)
    check((torch.randn(300, 97, generator=generator) * 3).to(dtype), settings)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ties_are_kept(settings):
    generator = torch.Generator().manual_seed(2)
    draw = check(torch.randint(0, 4, (200, 40), generator=generator).float(), settings)
    assert draw.truncated_logprobs.isfinite().all()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_suppressed_logits_are_not_among_those_cut(settings):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 40, generator=generator) * 2
    logits[:, ::3] = -torch.inf
    check(logits, settings)


def test_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(3, 1)
    logprobs, cutoffs = truncated_logprobs(logits, torch.tensor([1, 3, 2]), top_p=0.75)
    # 0.4 and 0.3 leave less than 0.75: 0.2 is kept too
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.4, 0.3, 0.2]) / 0.9)
    torch.testing.assert_close(cutoffs.exp(), torch.full((3,), 0.2))


def test_a_drawn_token_at_the_edge_counts_as_kept():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    logprobs, cutoffs = truncated_logprobs(logits, torch.tensor([1]), top_k=1)
    assert logprobs.exp().item() == pytest.approx(0.3 / 0.8)
    assert cutoffs.exp().item() == pytest.approx(0.3)


def test_a_suppressed_token_is_impossible():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    logprobs, cutoffs = truncated_logprobs(logits, torch.tensor([2]), top_k=1)
    assert logprobs.item() == -torch.inf
    assert cutoffs.item() == 1.0
