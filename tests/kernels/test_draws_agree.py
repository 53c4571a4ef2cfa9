"""sample_tokens: one key draws one token, on both backends and in any order.

Some rows; with DRAWS=all, of two real vocabularies more than 20,000, which takes the interpreter an
hour.
"""

import os

import pytest
import torch
from torch import Tensor

from fastrl_kernels import dispatch, race, reference, sample_tokens
from fastrl_kernels.splitmix import GAMMA, mixed
from tests.kernels.draws import assert_same_bits, batch, keys_for

ALL = os.environ.get("DRAWS") == "all"
OPTIONS = {
    "plain": {}, "temperature": {"temperature": 0.7}, "min-p": {"temperature": 1.3, "min_p": 0.02},
    "top-k": {"top_k": 50}, "top-p": {"temperature": 0.8, "top_p": 0.9},
    "all": {"temperature": 1.3, "top_k": 400, "top_p": 0.95, "min_p": 0.001},
}  # fmt: skip
SCALES = {"flat": 0.5, "peaked": 4.0}
SEARCHING = ("top-k", "top-p", "all")  # ten times slower in the interpreter


def both(logits: Tensor, keys: Tensor, options: dict[str, float]) -> tuple[Tensor, Tensor]:
    """The tokens that each backend draws."""
    drawn = (sample_tokens(logits, keys, backend=b, **options) for b in ("torch", "triton"))
    first, second = (x.tokens.cpu() for x in drawn)
    return first, second


def one_part(patch: pytest.MonkeyPatch) -> None:
    """Rows as one tile: the interpreter takes its time per tile."""
    from fastrl_kernels._triton import vocab_tiles

    if dispatch.interpreting():
        patch.setattr(vocab_tiles, "_TILE", 1 << 18)


@pytest.mark.skipif(not ALL, reason="takes an hour: DRAWS=all")
@pytest.mark.parametrize("vocabulary", [50257, 151936])
def test_both_backends_draw_the_same_tokens(device, monkeypatch, vocabulary):
    one_part(monkeypatch)
    rows = differing = 0
    for name, options in OPTIONS.items():
        for shape, scale in SCALES.items():
            for seed in range(10 if name in SEARCHING else 90):
                logits = batch(18, vocabulary, device=device, scale=scale, seed=seed)
                first, second = both(logits, keys_for(18, device, seed), options)
                rows += len(first)
                differing += (first != second).sum().item()
            print(f"V={vocabulary} {name} {shape}: {differing} of {rows} differ so far", flush=True)
    assert rows > 10000
    assert differing <= rows / 10000


@pytest.mark.parametrize("name", ["plain", "min-p", "all"])
def test_both_backends_draw_the_same_tokens_of_a_few_rows(device, monkeypatch, name):
    one_part(monkeypatch)
    rows = 2 if name in SEARCHING else 8
    logits = torch.cat([batch(rows // 2, 50257, scale=x) for x in SCALES.values()]).to(device)
    first, second = both(logits, keys_for(rows, device), OPTIONS[name])
    assert torch.equal(first, second)


def test_both_backends_draw_the_same_tokens_with_parameters_per_row(device):
    """Greedy rows, rows that nothing cuts and others, of more than one part."""
    logits, keys = batch(24, 5003, device=device), keys_for(24, device)
    logits[:, 4999] = logits.amax(-1) - 0.1 * torch.arange(24, device=device) + 1.2
    options = {
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.5]).repeat(6).to(device),
        "min_p": torch.tensor([0.0, 0.0, 0.05]).repeat(8).to(device),
    }
    first, second = both(logits, keys, options)
    assert torch.equal(first, second)
    assert torch.equal(first[::4], logits[::4].argmax(-1).cpu())


def test_a_draw_does_not_depend_on_the_tile_that_a_program_holds(device, monkeypatch):
    from fastrl_kernels._triton import vocab_tiles

    logits, keys = batch(6, 5003, device=device), keys_for(6, device)
    tokens = []
    for tile in (1024, 4096, 8192):
        monkeypatch.setattr(vocab_tiles, "_TILE", tile)
        tokens.append(sample_tokens(logits, keys, temperature=0.7, backend="triton").tokens)
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 503, 50257])
def test_a_draw_is_the_specifications(backend, device, vocabulary):
    rows = 4 if backend == "triton" else 100_000 // max(500, vocabulary)
    if backend == "triton" and vocabulary > 503:
        pytest.skip("the other backend is compared with both")
    logits, keys = batch(rows, vocabulary, device=device), keys_for(rows, device)
    for options in ({}, {"temperature": 1.5, "top_k": 40}):
        drawn = sample_tokens(logits, keys, backend=backend, **options).tokens
        _, probabilities, *_ = reference.sample_support(logits.double().cpu(), **options)
        assert torch.equal(drawn.cpu(), reference.race(probabilities, keys.cpu()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_draw_depends_neither_on_its_row_nor_on_the_others(options):
    """Nor on how many there are: PyTorch's path takes some rows at a time."""
    logits, keys = batch(60, 50257), keys_for(60)
    together = sample_tokens(logits, keys, backend="torch", **options)
    order = torch.randperm(60)
    moved = sample_tokens(logits[order], keys[order], backend="torch", **options)
    assert_same_bits(moved, [x[order] for x in together])
    for i in (0, 37):
        alone = sample_tokens(logits[i : i + 1], keys[i : i + 1], backend="torch", **options)
        assert alone.tokens == together.tokens[i]


def test_parts_of_the_race():
    sizes = {1: 1, 2: 1, 3: 2, 503: 16, 32000: 128, 50257: 256, 151936: 512, 1 << 24: 1024}
    assert {v: race.part_size(v) for v in sizes} == sizes


def test_both_backends_race_with_the_same_variates(device):
    """But for the rounding of logarithms."""
    pytest.importorskip("triton")
    from tests.kernels.noise import exponentials

    keys = torch.cat([torch.arange(-8, 8), keys_for(48)]).to(device)
    for first in (0, race.FIRST_PART):
        columns = torch.arange(4096, device=device) + first
        expected = race.exponentials(mixed(keys + GAMMA).unsqueeze(-1), columns)
        actual = exponentials(keys, 4096, first)
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
