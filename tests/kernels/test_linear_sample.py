"""linear_sample: the tokens of sample_tokens, from hidden states and a head whose logits are never
written.

Factors are multiples of 1/8 whose products fp32 sums up exactly, so that logits are rounded alike
in any order of summation.
"""

import math
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fastrl_kernels import dispatch, linear_sample, linear_sample_pays, race
from fastrl_kernels.sampling import sample_tokens
from fastrl_kernels.types import SampledTokens
from tests.kernels.draws import INF, assert_same_bits, keys_for
from tests.kernels.judge import assert_close_to_exact, assert_same_to_rounding, names
from tests.kernels.launches import interpreted, watched
from tests.kernels.roundings import Rounded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=names([BF16, FP16]))
WIDTH = 72  # past the depth that is multiplied at a time
MANY = 256 if dispatch.interpreting() else 8192  # rows


@pytest.fixture
def one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows as one block: the interpreter takes its time per program."""
    from fastrl_kernels._triton import linear_sample as kernels

    if dispatch.interpreting():
        monkeypatch.setattr(kernels, "MOST_ROWS", 4096)


def factors(
    rows: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (rows, WIDTH), (vocabulary, WIDTH)
    found = (torch.randint(-5, 6, shape, generator=generator) / 8 for shape in shapes)
    hidden, weight = (x.to(device, dtype) for x in found)
    return hidden, weight


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = hidden.double() @ weight.double().T
    return (x if bias is None else x + bias.double()).to(weight.dtype)


def assert_close(found: SampledTokens, expected: SampledTokens, differing: int = 0) -> None:
    """The same tokens, but for a few, and figures to rounding."""
    same = found.tokens == expected.tokens
    assert (~same).sum() <= differing
    for name, x, y in zip(found._fields[1:], found[1:], expected[1:], strict=True):
        x, y = (x[same], y[same]) if name != "entropies" else (x, y)
        torch.testing.assert_close(x, y, rtol=2e-6, atol=4e-6, equal_nan=True, msg=name)


@HALVES
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0, "per row"])
@pytest.mark.usefixtures("one_block")
def test_tokens_are_those_drawn_from_the_logits_that_the_head_would_round(
    device, dtype, temperature
):
    """300 tokens are 18 groups and three quarters of one."""
    hidden, weight = factors(MANY, 300, dtype, device)
    if temperature == "per row":
        temperature = torch.linspace(0, 2, MANY, device=device)
    keys, logits = keys_for(MANY, device), logits_of(hidden, weight)
    expected = sample_tokens(logits, keys, temperature=temperature, backend="torch")
    found = linear_sample(hidden, weight, keys, temperature=temperature, backend="triton")
    # Two tokens may tie to rounding; the highest of equals is told exactly.
    assert_close(found, expected, differing=0 if isinstance(temperature, float) else 1)
    assert (found.cutoffs == -INF).all()
    assert torch.equal(found.truncated_logprobs, found.logprobs)
    assert len(found.tokens.unique()) > 50


@pytest.mark.usefixtures("one_block")
def test_a_group_may_have_several_tiles(device, monkeypatch):
    """As those of real vocabularies have."""
    from fastrl_kernels._triton import linear_sample as kernels

    monkeypatch.setattr(kernels, "COLUMNS", 16)
    assert race.part_size(700) == 32
    hidden, weight = factors(MANY, 700, BF16, device)
    keys, temperature = keys_for(MANY, device), torch.linspace(0, 2, MANY, device=device)
    expected = sample_tokens(logits_of(hidden, weight), keys, temperature=temperature)
    found = linear_sample(hidden, weight, keys, temperature=temperature, backend="triton")
    assert_close(found, expected, differing=1)


@pytest.mark.usefixtures("one_block")
def test_log_probs_and_entropies_are_as_exact_as_pytorchs(device):
    hidden, weight = factors(256, 300, BF16, device)
    keys, logits = keys_for(256, device), logits_of(hidden, weight)
    peer = sample_tokens(logits, keys, temperature=0.7, backend="torch")
    found = linear_sample(hidden, weight, keys, temperature=0.7, backend="triton")
    assert torch.equal(found.tokens, peer.tokens)
    at = peer.tokens[:, None]
    for name, t in (("logprobs", 0.7), ("logprobs_t1", 1.0)):

        def formula(x, t=t):
            return (x / t).log_softmax(-1).gather(1, at)[:, 0]

        runs = Rounded(lambda: formula(logits.float()))
        assert_close_to_exact(getattr(found, name), runs, formula(logits.double()), name)

    def entropies(x):
        return torch.special.entr((x / 0.7).softmax(-1)).sum(-1)

    runs = Rounded(lambda: entropies(logits.float()))
    assert_close_to_exact(found.entropies, runs, entropies(logits.double()), "entropies")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bias_soft_cap_and_scale_are_those_of_the_head(device, backend):
    hidden, weight = factors(32, 300, BF16, device)
    bias = (torch.randint(-20, 21, (300,)) / 8).to(device, BF16)
    keys, x = keys_for(32, device), logits_of(hidden, weight, bias).float()
    for options, logits in (
        ({}, logits_of(hidden, weight, bias)),
        ({"logit_scale": 0.25}, 0.25 * x),
        ({"softcap": 3.0, "logit_scale": 0.5}, 3.0 * (x * (0.5 / 3.0)).tanh()),
    ):
        found = linear_sample(hidden, weight, keys, bias=bias, backend=backend, **options)
        assert_close(found, sample_tokens(logits, keys, backend="torch"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_greedy_rows_take_the_first_of_equal_logits(device, backend):
    """Which lie in several tiles, and several in each."""
    hidden, weight = factors(8, 300, BF16, device)
    weight[5::7] = weight[5]
    hidden[:] = weight[5].sign() * 2
    found = linear_sample(hidden, weight, keys_for(8, device), temperature=0, backend=backend)
    first = logits_of(hidden, weight).double().argmax(-1)
    assert torch.equal(found.tokens, first)
    mixed = torch.tensor([0.0, 1.0] * 4, device=device)
    found = linear_sample(hidden, weight, keys_for(8, device), temperature=mixed, backend=backend)
    assert torch.equal(found.tokens[::2], first[::2])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_that_are_no_distribution_have_no_token(device, backend):
    hidden, weight = factors(6, 300, FP16, device)
    hidden[1], hidden[3] = math.nan, INF
    hidden[4] = weight[7] * 60000  # beyond fp16
    bias = torch.zeros(300, dtype=FP16, device=device)
    bias[:100] = -INF
    keys = keys_for(6, device)
    found = linear_sample(hidden, weight, keys, bias=bias, backend=backend)
    assert (found.tokens < 0).tolist() == [False, True, False, True, True, False]
    assert (found.tokens[[0, 2, 5]] >= 100).all()
    for field in found[1:]:
        assert torch.equal(field.isnan(), found.tokens < 0)
    none = linear_sample(hidden, weight, keys, bias=torch.full_like(bias, -INF), backend=backend)
    assert (none.tokens == -1).all()


@pytest.mark.parametrize("t", [-1.0, math.nan, INF])
def test_impossible_temperatures_in_a_tensor_have_no_token(device, t):
    hidden, weight = factors(2, 300, BF16, device)
    temperature = torch.tensor([1.0, t], device=device)
    found = linear_sample(
        hidden, weight, keys_for(2, device), temperature=temperature, backend="triton"
    )
    assert (found.tokens < 0).tolist() == [False, True]


def test_a_row_does_not_depend_on_others(device):
    """To the bit, where as many rows have tiles of one size."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(16, WIDTH, generator=generator).to(device, BF16)
    weight = torch.randn(300, WIDTH, generator=generator).to(device, BF16)
    keys = keys_for(16, device)
    whole = linear_sample(hidden, weight, keys, backend="triton")
    for row in (0, 9, 15):
        rows = slice(row, row + 1)
        alone = linear_sample(hidden[rows], weight, keys[rows], backend="triton")
        assert_same_bits(alone, SampledTokens(*(x[rows] for x in whole)))
    # More rows than a block has: each is still that of its own hidden states.
    hidden, weight = factors(40, 300, BF16, device)
    found = linear_sample(hidden, weight, keys_for(40, device), backend="triton")
    assert_close(found, sample_tokens(logits_of(hidden, weight), keys_for(40, device)))


def test_strides_do_not_matter(device):
    hidden, weight = factors(8, 300, BF16, device)
    keys = keys_for(8, device)
    expected = linear_sample(hidden, weight, keys, backend="triton")
    turned = linear_sample(hidden.T.contiguous().T, weight.T.contiguous().T, keys, backend="triton")
    assert_same_bits(turned, expected)


@interpreted
def test_two_launches_and_no_logits(monkeypatch):
    allocated: list[int] = []
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda *a, **k: (lambda x: (allocated.append(x.nbytes), x)[1])(empty(*a, **k)),
    )
    hidden, weight = factors(4, 300, BF16)
    keys = keys_for(4)
    allocated.clear()
    with watched() as calls:
        linear_sample(hidden, weight, keys, backend="triton")
    assert calls == ["_linear_sample_tiles_kernel", "_linear_sample_draw_kernel"]
    assert sum(allocated) == 4 * 19 * 32  # records of 19 tiles


@interpreted
@pytest.mark.parametrize(("dtype", "vocabulary"), [(FP32, 300), (BF16, 128)])
def test_other_heads_are_a_product_and_a_draw(dtype, vocabulary):
    hidden, weight = factors(4, vocabulary, dtype)
    keys = keys_for(4)
    with watched() as calls:
        found = linear_sample(hidden, weight, keys, backend="triton")
    assert calls[-2:] == ["_sample_statistics_kernel", "_sample_draw_kernel"]
    expected = sample_tokens(logits_of(hidden, weight), keys, backend="triton")
    assert_same_bits(found, expected)


def test_rows_come_in_chunks_that_fit_a_workspace(device, monkeypatch):
    hidden, weight = factors(70, 300, FP32, device)
    keys, temperature = keys_for(70, device), torch.linspace(0, 2, 70, device=device)
    expected = linear_sample(hidden, weight, keys, temperature=temperature, backend="torch")
    monkeypatch.setattr(
        sys.modules[linear_sample.__module__], "WORKSPACE_BYTES", {"cpu": 30000, "cuda": 30000}
    )
    found = linear_sample(hidden, weight, keys, temperature=temperature, backend="torch")
    if device == "cuda":  # products of fewer rows add in another order
        assert torch.equal(found.tokens, expected.tokens)
        assert_same_to_rounding(found[1:], expected[1:])
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_no_rows_have_no_tokens(device, backend):
    hidden, weight = factors(1, 300, BF16, device)
    found = linear_sample(hidden[:0], weight, keys_for(0, device), backend=backend)
    assert [len(x) for x in found] == [0] * 6


def test_autocast_casts_as_for_a_linear_layer(device):
    hidden, weight = factors(4, 300, FP32, device)
    weight.requires_grad_()
    keys = keys_for(4, device)
    with torch.autocast(device, BF16):
        found = linear_sample(hidden, weight, keys, backend="triton")
    cast = linear_sample(hidden.to(BF16), weight.detach().to(BF16), keys, backend="triton")
    assert_same_bits(found, cast)
    assert not any(x.requires_grad for x in found)


BAD = {
    "hidden": [({"hidden": torch.zeros(2, 3, 8)}, ValueError, r"must be \[N, H\]"),
     ({"hidden": torch.zeros(2, 7)}, ValueError, r"they must be \[..., H\] and \[V, H\]"),
     ({"hidden": torch.zeros(2, 8).double()}, TypeError, "hidden must be")],
    "weight": [({"weight": torch.zeros(5, 8, dtype=BF16)}, TypeError, "convert one of them"),
     ({"weight": torch.zeros(0, 8)}, ValueError, "with V > 0")],
    "keys": [({"keys": torch.zeros(2)}, TypeError, "see sample_keys"),
     ({"keys": torch.zeros(3, dtype=torch.int64)}, ValueError, "one per token")],
    "bias": [({"bias": torch.zeros(4)}, ValueError, r"it must be \(5,\)")],
    "temperature": [({"temperature": -1.0}, ValueError, "temperature must be 0"),
     ({"temperature": torch.tensor([1.0, -1.0])}, ValueError, r"temperature\[1\] must be"),
     ({"temperature": "hot"}, TypeError, "temperature must be a number")],
    "transform": [({"softcap": 0.0}, ValueError, "softcap must be positive"),
     ({"logit_scale": INF}, ValueError, "logit_scale must be positive")],
}  # fmt: skip


@pytest.mark.parametrize("argument", BAD)
def test_bad_input_is_refused_by_name(argument):
    good = {
        "hidden": torch.zeros(2, 8),
        "weight": torch.zeros(5, 8),
        "keys": torch.zeros(2, dtype=torch.int64),
    }
    for changes, error, message in BAD[argument]:
        with pytest.raises(error, match=message):
            linear_sample(**{**good, **changes}, backend="torch")


def test_it_pays_for_few_rows_of_narrow_heads():
    gpt2, qwen = (768, 50257), (896, 151936)
    assert linear_sample_pays(32, *gpt2, BF16)
    assert linear_sample_pays(32, *qwen, FP16)
    assert not linear_sample_pays(33, *qwen, BF16)
    assert not linear_sample_pays(8, *qwen, BF16)
    assert not linear_sample_pays(32, *qwen, FP32)
    assert not linear_sample_pays(32, 3584, 152064, BF16)
    assert not linear_sample_pays(16, 8, 100, BF16)  # no tile is so narrow
    rows = [linear_sample_pays(n, *qwen, BF16) for n in range(1, 33)]
    assert all(b >= a for a, b in pairwise(rows))
