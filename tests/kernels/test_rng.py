"""sample_keys: the definition, and how far apart neighbours are."""

import math

import numpy
import pytest
import torch

from fastrl_kernels import sample_keys, sample_tokens
from fastrl_kernels.rng import sample_states, token_keys
from tests.kernels.draws import RARE, z_score
from tests.kernels.launches import interpreted, watched


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


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_keys_are_those_of_the_definition(backend, device, seed):
    assert key_of(0) == 0xE220A8397B1DCDAF  # splitmix64's first output from seed 0, as published
    ids = [0, 1, -5, 2**40, 2**63 - 1]
    for indices in ([0] * 5, [7] * 5, [0, 1, 2, -3, 4]):
        given = torch.tensor(indices, device=device) if len(set(indices)) > 1 else indices[0]
        keys = sample_keys(seed, torch.tensor(ids, device=device), given, backend=backend)
        assert keys.dtype == torch.int64
        expected = [key_of(seed, i, j) for i, j in zip(ids, indices, strict=True)]
        assert [key % 2**64 for key in keys.tolist()] == expected
        states = sample_states(seed, torch.tensor(ids, device=device))
        assert torch.equal(token_keys(states, given, backend), keys)


@interpreted
def test_keys_are_one_launch(device):
    """More of them than a program holds, of tensors as decode steps have them."""
    ids, seed = torch.arange(300, device=device), torch.tensor(-7, device=device)
    with watched() as calls:
        keys = sample_keys(seed, ids, ids, backend="triton")
        of_states = token_keys(ids, ids, "triton")
    assert calls == ["_sample_keys_kernel"] * 2
    assert torch.equal(keys, sample_keys(seed, ids, ids, backend="torch"))
    assert torch.equal(of_states, token_keys(ids, ids, "torch"))


def test_numbers_that_would_share_keys_with_others_are_refused(device):
    ids = torch.arange(3, device=device)
    for outside in (-1, 2**64):
        with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\), got"):
            sample_keys(outside, ids, 0)
        with pytest.raises(ValueError, match="token_index must be in"):
            sample_keys(0, ids, outside)


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
        assert abs(z_score(torch.bincount(x, minlength=64), torch.full((64,), 1 / 64))) < RARE
        here, there = x[:-1], x[1:]
        correlation = numpy.corrcoef(here.numpy(), there.numpy())[0, 1]
        assert abs(correlation) * math.sqrt(n) < RARE
        grid = torch.bincount(here // 8 * 8 + there // 8, minlength=64)
        assert abs(z_score(grid, torch.full((64,), 1 / 64))) < RARE


def test_the_test_of_independence_sees_a_weak_hash():
    """Multiplication alone is what it would find wanting."""
    weak = torch.arange(60001) * 0x5851F42D4C957F2D
    here, there = (weak[:-1] >> 61) + 4, (weak[1:] >> 61) + 4
    grid = torch.bincount(here * 8 + there, minlength=64)
    assert z_score(grid, torch.full((64,), 1 / 64)) > RARE


def test_what_keys_are_not_made_of():
    ids = torch.arange(3)
    for arguments in ((0.5, ids, 0), (0, ids.float(), 0), (0, ids, 0.5), (0, [1, 2], 0)):
        with pytest.raises(TypeError, match="must be integers"):
            sample_keys(*arguments)
