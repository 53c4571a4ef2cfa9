"""full_kl: values, gradients and manners, on both backends."""

import functools

import pytest
import torch

from fastrl_kernels import dispatch, full_kl, reference
from tests.kernels.judge import DTYPES, assert_same_to_rounding, judge, misaligned, names

BF16, FP32 = torch.bfloat16, torch.float32
# Of distributions that are far apart a few rows make up the whole error, and rounding in either
# direction is luck in each: of so many, PyTorch's own is a yardstick on every instruction set.
ROWS = 48
PER_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))


def pair(*shape, dtype=FP32, device="cpu", scale=3.0, shift=0.0, ref_shift=0.0, apart=1.0):
    """Random logits, and a reference whose logits differ from them by about ``apart``."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator) * scale
    ref_logits = logits + torch.randn(*shape, generator=generator) * apart
    return [(x + s).to(dtype).to(device) for x, s in ((logits, shift), (ref_logits, ref_shift))]


def judged(logits, ref_logits, *, backend, temperature=1.0, mask=None):
    inputs = {"logits": logits, "ref_logits": ref_logits}
    options = {}
    for name, value in (("temperature", temperature), ("mask", mask)):
        (inputs if isinstance(value, torch.Tensor) else options)[name] = value
    op = functools.partial(full_kl, **options, backend=backend)
    return judge(op, functools.partial(reference.full_kl, **options), inputs, wrt=["logits"])


def results(logits, ref_logits, **options):
    leaf = logits.detach().requires_grad_()
    kl = full_kl(leaf, ref_logits, **options)
    return kl.detach(), *torch.autograd.grad(kl.sum(), leaf)


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@PER_DTYPE
def test_ragged_rows_match_the_formula(backend, device, dtype):
    n = 17 if backend == "triton" and dispatch.interpreting() else 252
    logits, ref_logits = pair(n, 507, dtype=dtype, device=device)
    judged(logits, ref_logits, mask=torch.rand(n, device=device) < 0.8, backend=backend)


@pytest.mark.parametrize("vocabulary", [50257, 151936])
def test_a_peaked_softmax_over_a_padded_tail(backend, device, vocabulary):
    logits, ref_logits = pair(2, vocabulary, dtype=BF16, device=device, shift=-40.0)
    logits[0, 7], ref_logits[0, 7] = -5.0, 10.0
    logits[1, 900] = -5.0  # past the columns that the pivots come from
    judged(logits, ref_logits, backend=backend)


@pytest.mark.parametrize(
    ("scale", "shift", "ref_shift"),
    [(1, 300, 300), (1, 300, -300), (10, 0, 0), (10, 300, 0), (10, -300, -300), (0, 0, 0)],
)
def test_far_from_zero_and_from_each_other(backend, device, scale, shift, ref_shift):
    shifts = {"shift": shift, "ref_shift": ref_shift}
    logits, ref_logits = pair(ROWS, 1000, device=device, scale=scale, **shifts)
    judged(logits, ref_logits, backend=backend)


def test_unrelated_distributions(backend, device):
    logits, ref_logits = pair(ROWS, 1000, device=device, scale=8.0, apart=20.0)
    judged(logits, ref_logits, backend=backend)


def test_equal_logits_give_exactly_zero(backend, device):
    logits, _ = pair(5, 507, dtype=BF16, device=device)
    kl, dlogits = results(logits, logits.clone(), backend=backend)
    assert not kl.any()
    assert not dlogits.any()


def test_the_policy_in_bf16_and_the_reference_in_fp32(backend, device):
    logits, ref_logits = pair(5, 507, device=device)
    judged(logits.bfloat16(), ref_logits, backend=backend)
    judged(logits, ref_logits.bfloat16(), backend=backend)


def test_temperatures(backend, device):
    logits, ref_logits = pair(3, 300, device=device, shift=50.0)
    for temperature in (0.3, torch.tensor([0.25, 1.0, 4.0], device=device)):
        judged(logits, ref_logits, temperature=temperature, backend=backend)


@pytest.mark.parametrize("vocabulary", [1, 7, 9])
def test_rows_shorter_than_a_vector(backend, device, vocabulary):
    logits, ref_logits = pair(5, vocabulary, device=device)
    judged(logits, ref_logits, backend=backend)


def test_tokens_that_neither_allows_add_nothing(backend, device):
    logits, ref_logits = pair(3, 20001, dtype=BF16, device=device)
    logits[0, :19000] = ref_logits[0, :19000] = -torch.inf  # the first window, and the pivots
    logits[1, 700:] = -torch.inf  # the policy only
    logits[2, ::2] = ref_logits[2, ::2] = -torch.inf
    kl, dlogits = results(logits, ref_logits, backend=backend)
    assert kl.isfinite().all()
    assert dlogits.isfinite().all()
    assert not dlogits[logits == -torch.inf].any()
    exact = reference.full_kl(logits.double()[1:2], ref_logits.double()[1:2])
    torch.testing.assert_close(kl[1:2].double(), exact, rtol=1e-6, atol=0)


def test_a_token_that_only_the_policy_allows_makes_it_infinite(backend, device):
    logits, ref_logits = pair(2, 300, device=device)
    ref_logits[1, 7] = -torch.inf
    kl = full_kl(logits, ref_logits, backend=backend)
    assert kl.isinf().tolist() == [False, True]


def test_nan_gives_nan(backend, device):
    logits, ref_logits = pair(3, 300, device=device)
    logits[0, 7] = ref_logits[2, 9] = torch.nan
    kl, dlogits = results(logits, ref_logits, backend=backend)
    assert kl.isnan().tolist() == [True, False, True]
    assert dlogits.sum(-1).isnan().tolist() == [True, False, True]


def test_masked_tokens_are_exactly_zero_whatever_they_hold(backend, device):
    logits, ref_logits = pair(4, 3, 507, dtype=BF16, device=device)
    mask = torch.rand(4, 3, device=device) < 0.5
    mask[0, 0], mask[1, 1] = True, False
    logits[~mask] = torch.nan
    leaf = logits.requires_grad_()
    kl = full_kl(leaf, ref_logits, mask=mask, backend=backend)
    upstream = torch.where(mask, 1.0, torch.nan)
    (dlogits,) = torch.autograd.grad(kl, leaf, upstream)
    for x in (kl, dlogits):
        assert (x[~mask] == 0).all()
        assert x[mask].isfinite().all()
        assert x[mask].any()
    nothing = results(logits, ref_logits, mask=torch.zeros_like(mask), backend=backend)
    assert not any(x.any() for x in nothing)


def test_every_layout_gives_the_same_bits(backend, device):
    logits, ref_logits = pair(2, 3, 507, dtype=BF16, device=device)
    expected = results(logits, ref_logits, backend=backend)
    room = torch.full((2, 4, 520), torch.nan, dtype=BF16, device=device)
    room[:, 1:, 5:512] = logits
    transposed = ref_logits.transpose(0, 1).contiguous().transpose(0, 1)
    for x, y in (
        (room[:, 1:, 5:512], ref_logits),
        (logits, misaligned(ref_logits, 3)),
        (misaligned(logits, 5), transposed),
        (logits, ref_logits.transpose(0, 2).contiguous().transpose(0, 2)),
    ):
        found = results(x, y, backend=backend)
        if backend == "torch" and device == "cuda":
            assert_same_to_rounding(found, expected)
        else:
            assert_same_bits(found, expected)


def test_all_but_the_last_token(backend, device):
    logits, ref_logits = pair(3, 4, 507, device=device)
    judged(logits[:, :-1], ref_logits[:, :-1], backend=backend)
    judged(logits[:, :-1], ref_logits[:, :-1].contiguous(), backend=backend)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_a_row_alone_gives_the_bits_it_gives_among_others(device, dtype):
    logits, ref_logits = pair(9, 507, dtype=dtype, device=device)
    together = results(logits, ref_logits, backend="triton", temperature=0.9)
    for i in (0, 1, 8):
        x, y = (t[i : i + 1].clone() for t in (logits, ref_logits))
        alone = results(x, y, backend="triton", temperature=0.9)
        assert_same_bits(alone, [t[i : i + 1] for t in together])


def test_inputs_are_left_alone_and_the_graph_can_be_used_twice(backend, device):
    logits, ref_logits = pair(3, 300, dtype=BF16, device=device)
    before = [logits.clone(), ref_logits.clone()]
    leaf = logits.requires_grad_()
    kl = full_kl(leaf, ref_logits, backend=backend)
    (first,) = torch.autograd.grad(kl.sum(), leaf, retain_graph=True)
    (second,) = torch.autograd.grad(kl.sum(), leaf)
    assert torch.equal(first, second)
    assert_same_bits([leaf.detach(), ref_logits], before)


def test_only_the_policy_gets_a_gradient(backend, device):
    logits, ref_logits = pair(3, 50, device=device)
    ref_logits.requires_grad_()
    with pytest.raises(ValueError, match="ref_logits requires a gradient"):
        full_kl(logits, ref_logits, backend=backend)
    with torch.no_grad():
        full_kl(logits, ref_logits, backend=backend)
    assert full_kl(logits, ref_logits.detach(), backend=backend).grad_fn is None


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"logits": torch.zeros(3, 9, dtype=torch.int64)}, TypeError, "logits must be float32"),
    ({"ref_logits": torch.zeros(3, 9).double()}, TypeError, "ref_logits must be float32"),
    ({"logits": torch.zeros(3, 0)}, ValueError, "V > 0"),
    ({"ref_logits": torch.zeros(3, 8)}, ValueError, "ref_logits has shape"),
    ({"ref_logits": torch.zeros(3, 9, device="meta")}, ValueError, "ref_logits is on meta"),
    ({"mask": torch.ones(3)}, TypeError, "mask must be boolean"),
    ({"mask": torch.ones(4, dtype=torch.bool)}, ValueError, "mask has shape"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    ({"temperature": torch.ones(3, requires_grad=True)}, ValueError, "temperature requires"),
    ({"backend": "cuda"}, ValueError, "unknown backend"),
])  # fmt: skip
def test_what_is_refused_and_why(change, error, message):
    arguments = {"logits": torch.zeros(3, 9), "ref_logits": torch.zeros(3, 9)}
    with pytest.raises(error, match=message):
        full_kl(**{**arguments, **change})
