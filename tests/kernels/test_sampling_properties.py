"""Sampling, and the keys of draws, on whatever hypothesis draws."""

from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import SampledTokens, reference, sample_keys, sample_tokens
from tests.kernels.draws import assert_same_bits, formula, kept_by
from tests.kernels.test_properties import LAYOUTS, Draw, check, distribution, examples, laid_out
from tests.kernels.test_rng import key_of

LARGE = 5003
VOCABULARIES = (1, 2, 17, 257, 507, 17, 257, 507)
# What a parameter may be, and that which turns it off, as it is half of the times: most often one
# of them decides.
NUMBERS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "temperature": ((0.3, 1.7, 0.0), 1.0),
    "top_k": ((1, 3, 12, 10**6), 0),
    "top_p": ((0.05, 0.5, 0.93), 1.0),
    "min_p": ((0.003, 0.05, 0.6), 0.0),
}
PER_ROW = list(product((False, True), repeat=4))
ROUNDED = ("logprobs", "logprobs_t1", "truncated_logprobs", "entropies")
EXAMPLES = {"torch": 12, "triton": 1, "native": 12}  # of each combination of numbers and tensors
# Sums of weights in fp32 tell shares of a row apart that differ by more than this.
CLOSE = 4e-6


def parameter(draw: Draw, name: str, rows: int, per_row: bool) -> Any:
    """A number; or one per row, some of them off."""
    numbers, off = NUMBERS[name]
    choices = (*numbers, *[off] * len(numbers))
    if not per_row:
        return draw.one_of(choices, name)
    values = torch.tensor([draw.one_of(choices, f"{name}[{i}]") for i in range(rows)])
    if name == "top_k":
        values = values.to(draw.one_of((torch.int64, torch.int32), "dtype of top_k"))
    return draw.placed(values)


def logits_of(draw: Draw, rows: int, vocabulary: int) -> Tensor:
    """Most often such that a cut is somewhere in the middle."""
    if draw.one_of((True, True, False), "ordinary"):
        return draw.placed(draw.normal((rows, vocabulary), 2.0))
    return draw.placed(distribution(draw, (rows, vocabulary))[0])


def keys_of(draw: Draw, rows: int) -> Tensor:
    seed = draw.random.getrandbits(64)
    keys = draw.placed(sample_keys(seed, torch.arange(rows), draw.random.randrange(1000)))
    return keys.view(torch.uint64) if draw.sometimes("unsigned keys") else keys


def cutoff_of(logits: Tensor, options: dict[str, Any], rounding: float) -> Tensor:
    """The float64 specification's, at a ``top_p`` and a ``min_p`` that keep slightly more."""
    given = {k: torch.as_tensor(x).cpu() for k, x in options.items()}
    top_p, min_p = given["top_p"].double(), given["min_p"].double()
    given["top_p"] = torch.where(top_p < 1, top_p * (1 + rounding), top_p)
    given["min_p"] = min_p * (1 - rounding)
    _, _, cutoffs, _ = reference.sample_support(logits.double().cpu(), **given)
    return cutoffs


def check_support(result: SampledTokens, logits: Tensor, options: dict[str, Any]) -> None:
    """What is kept, and that it is drawn from."""
    kept, tokens, cutoffs = kept_by(result, logits), result.tokens.cpu(), result.cutoffs.cpu()
    assert (cutoffs >= cutoff_of(logits, options, CLOSE)).all()
    assert (cutoffs <= cutoff_of(logits, options, -CLOSE)).all()
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()
    assert kept.gather(-1, tokens.unsqueeze(-1)).all()
    greedy = (torch.as_tensor(options["temperature"]).cpu() == 0).expand(len(tokens))
    assert torch.equal(tokens[greedy], logits.cpu().float().argmax(-1)[greedy])


def check_figures(result: SampledTokens, logits: Tensor, temperature: float | Tensor) -> None:
    """What it says of the draw; at temperature 0, that at 1."""
    if isinstance(temperature, Tensor):
        temperature = torch.where(temperature == 0, 1.0, temperature)
    elif temperature == 0:
        temperature = 1.0
    kept = kept_by(result, logits)

    def op(**_: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(result, name) for name in ROUNDED)

    def peer(logits: Tensor, temperature: float | Tensor) -> tuple[Tensor, ...]:
        return formula(logits, result.tokens, kept, temperature)

    inputs = {"logits": logits, "temperature": temperature}
    check(op, peer, inputs, [])


def again(
    draw: Draw, logits: Tensor, keys: Tensor, options: dict[str, Any], rows: slice, backend: str
) -> SampledTokens:
    """The draws of some rows, which lie elsewhere."""
    moved = laid_out(logits[rows].contiguous(), draw.one_of(LAYOUTS, "another layout"))
    moved_keys = keys.view(torch.int64)[rows].contiguous()
    moved_keys = laid_out(moved_keys, draw.one_of(LAYOUTS, "another layout of keys"))
    options = {k: x[rows] if isinstance(x, Tensor) else x for k, x in options.items()}
    return sample_tokens(moved, moved_keys, **options, backend=backend)


def check_draws(draw: Draw, logits: Tensor, options: dict[str, Any], backend: str) -> None:
    rows = len(logits)
    keys, before = keys_of(draw, rows), logits.clone()
    result = sample_tokens(logits, keys, **options, backend=backend)
    assert torch.equal(logits, before)
    check_support(result, logits, options)
    check_figures(result, logits, options["temperature"])

    # The same again, however it lies in memory; and a row by itself.
    if backend != "triton":  # its sums' order may depend on the batch, its draws must not
        assert_same_bits(again(draw, logits, keys, options, slice(None), backend), result)
        result = result._replace(**dict.fromkeys(ROUNDED, result.cutoffs))
    at = draw.one_of(range(rows), "row")
    alone = again(draw, logits, keys, options, slice(at, at + 1), backend)
    if backend != "triton":
        alone = alone._replace(**dict.fromkeys(ROUNDED, alone.cutoffs))
    assert_same_bits(alone, [x[at : at + 1] for x in result])


@pytest.mark.parametrize("per_row", PER_ROW, ids=lambda x: "".join("nt"[i] for i in x))
@examples(1)
def test_sample_tokens(backend, device, per_row, random):
    """Numbers and tensors in every combination, other draws in each."""
    seed = random.getrandbits(32)
    for example in range(EXAMPLES[backend]):
        draw = Draw(Random(f"{seed} {per_row} {example}"), device)
        rows = draw.one_of((1, 2, 2), "rows")
        logits = logits_of(draw, rows, draw.one_of(VOCABULARIES, "vocabulary"))
        options = {
            name: parameter(draw, name, rows, by_row)
            for name, by_row in zip(NUMBERS, per_row, strict=True)
        }
        check_draws(draw, logits, options, backend)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
@examples(1)
def test_sample_tokens_of_a_large_vocabulary(backend, device, name, random):
    """Two parts of the kernel's, and the buckets of PyTorch's path; one cut that is a number."""
    draw = Draw(Random(f"{random.getrandbits(32)} {name}"), device)
    options = {other: off for other, (_, off) in NUMBERS.items()}
    options["temperature"] = draw.one_of((0.7, 1.0, 1.7), "temperature")
    options[name] = draw.one_of(NUMBERS[name][0][:2], name)
    check_draws(draw, draw.placed(draw.normal((1, LARGE), 2.0)), options, backend)


def bits(draw: Draw) -> int:
    """An integer of up to 64 bits, or one of those where its sign or its length changes."""
    few = draw.random.getrandbits(draw.random.choice((1, 8, 31, 40, 63, 64)))
    return draw.random.choice((few, few, 2**31, 2**32, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1))


def integers(draw: Draw, shape: tuple[int, ...], label: str) -> tuple[Tensor, list[int]]:
    """A tensor and what it holds: of either sign, or up to 2⁶⁴ - 1."""
    dtype = draw.one_of((torch.int64, torch.int64, torch.uint64, torch.int32), label)
    values = [bits(draw) for _ in range(max(1, torch.Size(shape).numel()))]
    if dtype != torch.uint64:
        half = 2 ** (dtype.itemsize * 8 - 1)
        values = [(x + half) % (2 * half) - half for x in values]
    if dtype == torch.uint64:  # which few of torch's functions know
        signed = torch.tensor([x - 2**64 if x >> 63 else x for x in values])
        return draw.placed(signed.view(shape)).view(dtype), values
    return draw.placed(torch.tensor(values, dtype=dtype).view(shape)), values


@examples(150)
def test_sample_keys(backend, device, random):
    draw = Draw(random, device)
    n = draw.one_of((1, 2, 5, 33), "samples")
    ids, given_ids = integers(draw, (n,), "dtype of ids")
    others: list[Any] = []
    expected: list[list[int]] = []
    for name in ("seed", "index"):
        kind = draw.one_of(("number", "number", "0-d", "per sample"), name)
        if kind == "number":
            number = bits(draw)
            others.append(number)
            expected.append([number] * n)
            continue
        x, values = integers(draw, (n,) if kind == "per sample" else (), f"dtype of {name}")
        others.append(x)
        expected.append(values if kind == "per sample" else values * n)
    keys = sample_keys(others[0], ids, others[1], backend=backend)
    assert keys.dtype == torch.int64
    assert keys.shape == (n,)
    assert keys.device == ids.device
    found = [x % 2**64 for x in keys.tolist()]
    assert found == [key_of(*x) for x in zip(expected[0], given_ids, expected[1], strict=True)]
