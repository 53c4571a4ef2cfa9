"""sample_tokens: what is kept, the figures of the draw, and its manners."""

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fastrl_kernels import dispatch, reference, sample_tokens
from tests.kernels.draws import (
    CUTS,
    INF,
    SETTINGS,
    assert_same_bits,
    batch,
    formula,
    kept_by,
    keys_for,
    sample,
)
from tests.kernels.judge import DTYPES, assert_close_to_exact, misaligned, names
from tests.kernels.launches import floats_arrive_as_double, interpreted, watched
from tests.kernels.roundings import Rounded
from tests.together import together

BF16, FP32 = torch.bfloat16, torch.float32


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
    same = (result.truncated_logprobs == result.logprobs).cpu()
    probabilities = (logits.double().cpu() / options.get("temperature", 1.0)).softmax(-1)
    cut = probabilities.masked_fill(kept, 0).sum(-1)
    assert same[nothing_cut].all()
    assert not same[cut > 1e-6].any()  # of less fp32 may show nothing


def long_row(backend):
    """Of several parts with a ragged end; the interpreter takes minutes over a real vocabulary."""
    return 12301 if backend == "triton" and dispatch.interpreting() else 50257


LONG = {name: CUTS[name] for name in ("top-k", "temperature, top-p", "all")}


@pytest.mark.parametrize("options", LONG.values(), ids=LONG)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_keeps_what_transformers_keeps_of_a_long_row(backend, device, dtype, options):
    logits = batch(2, long_row(backend), dtype=dtype, device=device)
    result = sample(logits, backend=backend, **options)
    assert torch.equal(kept_by(result, logits), kept_by_transformers(logits, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_the_lowest_kept_logit_may_have_any_bits(backend, device, dtype):
    """Of either sign, zeros of both signs, subnormal, and all digits of the search."""
    values = torch.tensor([-3e4, -7.7, -1.0, -1e-7, -0.0, 0.0, 1e-7, 0.3, 0.31, 5.1, 6e4])
    row = values.to(dtype)[torch.randperm(11)]
    for k in range(1, 11):
        # So hot that the kept tokens have about equal weight.
        result = sample(row[None].to(device), temperature=2e4, top_k=k, backend=backend)
        lowest = row.double().sort(descending=True).values[k - 1]
        kept = row.double() >= lowest
        assert result.cutoffs.item() == (-INF if kept.all() else lowest)
        expected = torch.where(kept, row.double() / 2e4, -INF).log_softmax(-1)[result.tokens.cpu()]
        actual = result.truncated_logprobs.cpu().double()
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.9999])
def test_ties_at_a_cutoff_are_kept(backend, device, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (2, 300), generator=generator).to(BF16).to(device)
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


def judge_statistics(logits, backend, **options):
    """Every figure against float64, with the error that plain PyTorch makes in fp32."""
    result = sample(logits, backend=backend, **options)
    kept, temperature = kept_by(result, logits), options.get("temperature", 1.0)

    def figures(dtype):
        return formula(logits.to(dtype), result.tokens, kept, temperature)

    actual = (result.logprobs, result.logprobs_t1, result.truncated_logprobs, result.entropies)
    what = ("logprobs", "logprobs_t1", "truncated_logprobs", "entropies")
    runs = Rounded(lambda: figures(FP32))
    for i, found in enumerate(zip(actual, figures(torch.float64), what, strict=True)):
        assert_close_to_exact(found[0], runs[i], *found[1:])
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
def test_figures_match_the_formula(backend, device, dtype, options):
    judge_statistics(batch(8, 507, dtype=dtype, device=device), backend, **options)


def test_figures_of_a_long_row_match_the_formula(backend, device):
    logits = batch(2, long_row(backend), dtype=BF16, device=device)
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
        {}, {"temperature": 1.5, "top_k": 7}, {"temperature": 0.5, "top_k": 2}, {"top_p": 0.6},
        {"top_k": 100, "top_p": 0.9, "min_p": 0.05, "temperature": 2.0},
        {"min_p": 0.2},
    ]  # fmt: skip
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


def test_top_p_per_row_of_a_long_row_keeps_what_a_number_keeps():
    logits = batch(4, 5003)
    logits[1, 7] = -1e3  # of no weight in fp32, and kept nevertheless where nothing is cut
    values = [0.3, 1.0, 0.9, 0.9999]
    together = sample(logits, top_p=torch.tensor(values), backend="torch")
    for i, top_p in enumerate(values):
        assert together.cutoffs[i] == sample(logits, top_p=top_p, backend="torch").cutoffs[i]
    assert (together.cutoffs == -INF).tolist() == [False, True, False, False]


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


@pytest.mark.parametrize("per_row", [False, True])
def test_min_p_of_one_keeps_what_equals_the_highest(backend, device, per_row):
    """Logits so small that their next neighbours have the same exponential."""
    logits = torch.full((2, 90), 1e-3, device=device)
    logits[0, 2:] = torch.nextafter(logits[0, 2:], torch.tensor(0.0, device=device))
    min_p = torch.ones(2, device=device) if per_row else 1.0
    result = sample(logits, min_p=min_p, backend=backend)
    assert kept_by(result, logits).sum(-1).tolist() == [2, 90]
    assert result.tokens[0] < 2


def test_min_p_compares_as_in_exact_arithmetic():
    """Logits next to the bound, on either side of it, however coarse they are there."""
    for i in range(40):
        highest, min_p, t = 300.0 + i, 0.01 + 0.02 * i, 1.3
        exact = highest + math.log(min_p) * t
        nearest = torch.tensor(exact)
        beside = [torch.nextafter(nearest, torch.tensor(x)) for x in (-INF, INF)]
        logits = torch.stack([torch.tensor(highest), nearest, *beside])
        result = sample(logits[None], temperature=t, min_p=min_p, backend="torch")
        assert torch.equal(kept_by(result, logits)[0], logits.double() >= exact)


def test_an_impossible_temperature_on_the_device_is_no_draw(device):
    temperature = torch.tensor([1.0, -1.0, torch.nan, INF], device=device)
    result = sample(batch(4, 90, device=device), temperature=temperature, backend="triton")
    assert (result.tokens == -1).tolist() == [False, True, True, True]
    assert result.logprobs.isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_nothing_waits_for_the_device(device, dtype):
    """Numbers or tensors; the launches are the same whatever the logits and their dtype are."""
    logits = batch(3, 507, dtype=dtype, device=device)
    logits[1] = 0.0  # all of them equal
    keys = keys_for(3, device)
    tensors = {
        "temperature": torch.tensor([0.0, 1.0, 0.5], device=device),
        "top_k": torch.tensor([0, 5, 3], device=device),
        "top_p": torch.tensor([1.0, 0.5, 0.9], device=device),
        "min_p": torch.tensor([0.0, 0.0, 0.1], device=device),
    }
    statistics, candidates, draw = (
        f"_sample_{name}_kernel" for name in ("statistics", "candidates", "draw")
    )
    for options, launches in (
        ({}, [statistics, draw]),
        ({"min_p": 0.1}, [statistics, draw]),
        ({"top_k": 5}, [statistics, candidates, draw]),
        ({"top_p": 0.9}, [statistics, candidates, draw]),
        (tensors, [statistics, candidates, draw]),
    ):
        with watched() as calls:
            sample_tokens(logits, keys, backend="triton", **options)
        assert calls == launches


CROWDED = {
    "top-k beyond the groups": {"top_k": 300},
    "as many as there is room for": {"top_k": 16, "top_p": 0.5},
    "top-p": {"top_p": 0.97, "temperature": 1.5},
    "top-k, top-p": {"top_k": 290, "top_p": 0.9, "temperature": 3.0},
    "top-p, min-p": {"top_p": 0.99, "min_p": 0.003},
}


@pytest.mark.parametrize("options", CROWDED.values(), ids=CROWDED)
@pytest.mark.parametrize("shift", [0, 3])
def test_more_candidates_than_there_is_room_for(device, monkeypatch, options, shift):
    """A row's cut is the same where it is looked for among a few logits and among groups of them,
    wherever these lie."""
    from fastrl_kernels._triton import sampling

    logits = misaligned(batch(4, 4100, scale=1.5).to(BF16), shift).to(device)
    logits[1] = 0.5  # all equal: they are kept together
    logits[2] = logits[2].float().round().to(BF16)  # and so are these few values
    logits[3, 40:4000:260] = 8.0 + torch.arange(16, dtype=BF16, device=device) / 4  # in 16 groups
    results = []
    for room in (16, 2048, 8192):
        monkeypatch.setattr(sampling, "_ROOM", room)
        results.append(sample(logits, backend="triton", **options))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])
    kept = kept_by(results[0], logits)
    assert torch.equal(kept, kept_by_transformers(logits, **options))
    assert kept[1].all()
    assert results[0].cutoffs[1] == -INF


@interpreted
def test_offsets_of_rows_of_candidates_have_64_bits(monkeypatch):
    """A million rows have 2³¹ places for them."""
    from triton.runtime.interpreter import InterpreterBuilder

    made, widths = set(), []
    empty, add = torch.empty, InterpreterBuilder.create_addptr

    def remembering(*args, **kwargs):
        x = empty(*args, **kwargs)
        if x.dim() == 2:
            made.add(x.data_ptr())
        return x

    def recording(self, pointer, offset):
        if offset.data.size == 1 and int(pointer.data.flat[0]) in made:
            widths.append(8 * offset.data.dtype.itemsize)
        return add(self, pointer, offset)

    monkeypatch.setattr(torch, "empty", remembering)
    monkeypatch.setattr(InterpreterBuilder, "create_addptr", recording)
    sample(batch(1, 90), top_k=5, backend="triton")
    assert len(made) == 1
    assert widths == [64, 64]  # where they are stored, and where they are read


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_p": 0.7}, {"top_k": 400, "top_p": 0.9}])
def test_few_logits_of_a_row_are_finite(backend, device, options):
    """Fewer than top-k asks for, in fewer groups than there are."""
    logits = torch.full((2, 5003), -INF, device=device)
    logits[0, [3, 700, 701, 4999]] = torch.tensor([1.0, 3.0, 3.0, 2.0], device=device)
    logits[1, 4000:4400] = batch(400, device=device)
    result = sample(logits, backend=backend, **options)
    expected, _, cutoffs, _ = reference.sample_support(logits.double().cpu(), **options)
    assert torch.equal(kept_by(result, logits), expected)
    assert torch.equal(result.cutoffs.cpu().double(), cutoffs)


def test_the_pytorch_path_waits_for_nothing_without_top_p(device):
    logits, keys = batch(3, 507, device=device), keys_for(3, device)
    for options in ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "min_p": 0.1}):
        with watched():
            sample_tokens(logits, keys, backend="torch", **options)


@pytest.mark.parametrize("tensors", [False, True])
def test_the_pytorch_path_on_another_device_waits_for_nothing(tensors):
    """Meta tensors hold no data: reading any, or a shape that depends on it, would raise."""
    keys = torch.zeros(3, dtype=torch.int64, device="meta")
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    if tensors:
        options = {name: torch.as_tensor(x).expand(3).to("meta") for name, x in options.items()}
    for given in ({}, {"top_p": options["top_p"]}, options):
        logits = torch.zeros(3, 5000, device="meta")
        result = sample_tokens(logits, keys, backend="torch", **given)
        assert [x.shape for x in result] == [(3,)] * 6


@interpreted
def test_numbers_from_compiled_code(device):
    logits = batch(2, 90, device=device)
    expected = sample(logits, backend="triton", temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    with floats_arrive_as_double():
        same = sample(logits, backend="triton", temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)
    assert_same_bits(same, expected)


def test_no_rows(backend, device):
    result = sample(batch(0, 90, device=device), top_p=0.9, backend=backend)
    assert [x.shape for x in result] == [(0,)] * 6
    assert result.tokens.dtype == torch.int64


def test_no_gradient_is_recorded(backend, device):
    logits = batch(2, 90, device=device).requires_grad_()
    assert not any(x.requires_grad for x in sample(logits, backend=backend))


INT, ONES = torch.int64, torch.ones(3)


@together(("change", "error", "message"), [
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
    ({"min_p": 1.1}, ValueError, "min_p must be in"),
    ({"min_p": -0.1}, ValueError, "min_p must be in"),
    ({"min_p": 2 * ONES}, ValueError, r"min_p\[0\] must be in"),
    ({"backend": "cuda"}, ValueError, "unknown backend"),
])  # fmt: skip
def test_what_is_refused_and_why(change, error, message):
    arguments = {"logits": torch.zeros(3, 9), "keys": torch.zeros(3, dtype=INT), "backend": "torch"}
    with pytest.raises(error, match=message):
        sample_tokens(**{**arguments, **change})
