"""token_logprobs: values, gradients and manners, on both backends."""

import functools
import inspect

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastrl_kernels import dispatch, reference, rows, token_logprobs
from tests.kernels.judge import DTYPES, assert_same_to_rounding, judge, misaligned, names
from tests.together import together

BF16, FP32 = torch.bfloat16, torch.float32
PER_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))


def batch(*shape, dtype=FP32, device="cpu", scale=3.0, shift=0.0, seed=0):
    """Random logits of ``shape`` and labels that may be any token."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=generator) * scale + shift).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    return logits.to(device), labels.to(device)


def judged(logits, labels, *, backend, temperature=1.0, mask=None, entropy=True):
    """Judges both results and the gradient with random upstream gradients; returns them."""
    inputs = {"logits": logits, "labels": labels}
    options = {"entropy": entropy}
    for name, value in (("temperature", temperature), ("mask", mask)):
        (inputs if isinstance(value, torch.Tensor) else options)[name] = value
    op = functools.partial(token_logprobs, **options, backend=backend)
    formula = functools.partial(reference.token_logprobs, **options)
    return judge(op, formula, inputs, wrt=["logits"])


def results(logits, labels, **options):
    """(logprobs, entropies, dlogits) for fixed upstream gradients."""
    leaf = logits.detach().requires_grad_()
    logprobs, entropies = token_logprobs(leaf, labels, entropy=True, **options)
    loss = (logprobs - 0.3 * entropies).sum()
    return logprobs.detach(), entropies.detach(), *torch.autograd.grad(loss, leaf)


def assert_same_bits(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@PER_DTYPE
@pytest.mark.parametrize("entropy", [False, True])
def test_ragged_rows_match_the_formula(backend, device, dtype, entropy):
    n = 17 if backend == "triton" and dispatch.interpreting() else 252
    logits, labels = batch(n, 507, dtype=dtype, device=device)
    mask = torch.rand(n, device=device) < 0.8
    judged(logits, labels, mask=mask, entropy=entropy, backend=backend)


@pytest.mark.parametrize("vocabulary", [50257, 129920, 151936, 152064])
def test_a_peaked_softmax_over_a_padded_tail(backend, device, vocabulary):
    """A tail filled with zeros would add exp(0 - max) for every padded column."""
    logits, labels = batch(2, vocabulary, dtype=BF16, device=device, shift=-40.0)
    logits[0, labels[0]] = -5.0
    logits[1, 0] = -5.0
    judged(logits, labels, backend=backend)


@pytest.mark.parametrize(("scale", "shift"), [(1, 300), (10, 0), (10, 300), (10, -300), (0, 0)])
def test_far_from_zero_and_widely_spread(backend, device, scale, shift):
    """m and log s folded into one number, or a maximum that starts at 0, loses this."""
    logits, labels = batch(6, 1000, device=device, scale=scale, shift=shift)
    judged(logits, labels, backend=backend)


def test_labels_at_both_ends_and_at_every_alignment(backend, device):
    logits, _ = batch(9, 1031, dtype=BF16, device=device)
    for label in (0, 1030):
        labels = torch.full((9,), label, device=device)
        judged(logits, labels, backend=backend)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 9])
def test_rows_shorter_than_a_vector(backend, device, vocabulary):
    logits, labels = batch(5, vocabulary, dtype=BF16, device=device)
    judged(logits, labels, backend=backend)


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_one_temperature(backend, device, temperature):
    logits, labels = batch(5, 300, device=device, shift=50.0)
    judged(logits, labels, temperature=temperature, backend=backend)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
def test_a_temperature_per_token(backend, device, dtype):
    logits, labels = batch(2, 3, 300, device=device)
    temperature = torch.tensor([[0.25, 1.0, 2.0], [4.0, 0.5, 1.0]], dtype=dtype, device=device)
    judged(logits, labels, temperature=temperature, backend=backend)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_either_result_alone(backend, device, which):
    logits, labels = batch(4, 300, device=device)
    inputs = {"logits": logits, "labels": labels}

    def op(**inputs):
        return token_logprobs(**inputs, entropy=True, backend=backend)[which]

    def formula(**inputs):
        return reference.token_logprobs(**inputs, entropy=True)[which]

    judge(op, formula, inputs, wrt=["logits"])


def test_a_confident_bf16_policy_keeps_its_small_gradient(backend, device):
    """p = 0.999 rounded to bf16 is 1, and 1 - p nothing."""
    logits = torch.zeros(16, 64, dtype=BF16, device=device)
    logits[:, 5] = 11.0
    labels = torch.full((16,), 5, device=device)
    results = judged(logits, labels, entropy=False, backend=backend)
    assert results["dlogits"][:, 5].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.3])
def test_a_certain_policy_gets_exactly_no_gradient(backend, device, temperature):
    """p = 1: both halves of g·(1 - p)/T are rounded alike."""
    logits = torch.full((64, 9), -1000.0, device=device)
    logits[:, 3] = 0.0
    leaf, upstream = logits.requires_grad_(), torch.randn(64, device=device)
    labels = torch.full((64,), 3, device=device)
    logprobs = token_logprobs(leaf, labels, temperature=temperature, backend=backend)
    assert not torch.autograd.grad(logprobs, leaf, upstream)[0].any()


def test_impossible_tokens_add_nothing_and_get_no_gradient(backend, device):
    """The first window is all -inf; so is a label."""
    logits, labels = batch(3, 20001, dtype=BF16, device=device)
    logits[0, :19000] = -torch.inf
    logits[1, 700:] = -torch.inf
    logits[2, ::2] = -torch.inf
    labels[:] = torch.tensor([19500, 3, 4])
    impossible = logits == -torch.inf
    logprobs, entropies, dlogits = results(logits, labels, backend=backend)
    assert logprobs[2] == -torch.inf
    assert logprobs[:2].isfinite().all()
    assert entropies.isfinite().all()
    assert dlogits.isfinite().all()
    impossible[2, 4] = False  # the label's own gradient is that of the formula
    assert (dlogits[impossible] == 0).all()
    judged(logits[:2], labels[:2], backend=backend)


def test_nan_logits_give_nan(backend, device):
    logits, labels = batch(3, 100, device=device)
    logits[1, 50] = torch.nan
    logprobs, entropies, dlogits = results(logits, labels, backend=backend)
    for x in (logprobs, entropies, dlogits.sum(-1)):
        assert x.isnan().tolist() == [False, True, False]


def test_masked_tokens_are_exactly_zero_whatever_they_hold(backend, device):
    logits, labels = batch(4, 3, 507, dtype=BF16, device=device)
    mask = torch.rand(4, 3, device=device) < 0.5
    mask[0, 0], mask[1, 1] = True, False
    labels[2, 2] = -100
    counted = mask & (labels != -100)
    logits[~counted] = torch.nan
    labels[1, 1] = 10**6  # never looked at
    leaf = logits.requires_grad_()
    logprobs, entropies = token_logprobs(leaf, labels, mask=mask, entropy=True, backend=backend)
    upstream = torch.where(counted, 1.0, torch.nan)
    (dlogits,) = torch.autograd.grad((logprobs, entropies), leaf, (upstream, upstream))
    for x in (logprobs, entropies, dlogits):
        assert (x[~counted] == 0).all()
        assert x[counted].isfinite().all()
        assert x[counted].any()


def test_a_label_out_of_range_is_an_error_on_the_cpu_path():
    logits, labels = batch(2, 3, 100)
    labels[1, 2] = 100
    with pytest.raises(ValueError, match=r"labels\[1, 2\] is 100, outside \[0, 100\)"):
        token_logprobs(logits, labels, backend="torch")
    labels[1, 2] = -1
    with pytest.raises(ValueError, match="is -1, outside"):
        token_logprobs(logits, labels, backend="torch")


@pytest.mark.parametrize("label", [100, -1, -(2**40), 2**32 + 5])
def test_a_label_out_of_range_is_nan_on_the_device(device, label):
    logits, labels = batch(3, 100, device=device)
    labels[1] = label
    logprobs, entropies, dlogits = results(logits, labels, backend="triton")
    assert logprobs.isnan().tolist() == [False, True, False]
    assert entropies.isfinite().all()
    assert dlogits.isnan().all(-1).tolist() == [False, True, False]
    assert dlogits[[0, 2]].isfinite().all()


def test_check_labels_raises_on_either_backend(backend, device):
    logits, labels = batch(3, 100, device=device)
    labels[1] = 100
    with pytest.raises(ValueError, match=r"labels\[1\] is 100"):
        token_logprobs(logits, labels, check_labels=True, backend=backend)


def test_labels_of_any_integer_dtype_and_any_alignment(backend, device):
    logits, labels = batch(5, 100, dtype=BF16, device=device)
    expected = results(logits, labels, backend=backend)
    odd = torch.cat([labels[:1].int(), labels.int()])[1:]
    strided = torch.stack([labels, labels], -1)[:, 0]
    for same in (odd, strided, labels.to(torch.uint8)):
        assert_same_bits(results(logits, same, backend=backend), expected)


def test_every_layout_gives_the_same_bits(backend, device):
    logits, labels = batch(2, 3, 507, dtype=BF16, device=device)
    expected = results(logits, labels, backend=backend)
    room = torch.full((2, 4, 520), torch.nan, dtype=BF16, device=device)
    room[:, 1:, 5:512] = logits
    layouts = {
        "slice of time and vocabulary": room[:, 1:, 5:512],
        "transposed batch": logits.transpose(0, 1).contiguous().transpose(0, 1),
        "vocabulary not last in memory": logits.transpose(0, 2).contiguous().transpose(0, 2),
        **{f"{shift} past a boundary": misaligned(logits, shift) for shift in (1, 4, 7)},
    }
    for layout, same in layouts.items():
        found = results(same, labels, backend=backend)
        if backend == "torch" and device == "cuda":
            assert_same_to_rounding(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=layout)


def test_all_but_the_last_token_without_a_copy(backend, device):
    logits, labels = batch(3, 4, 507, device=device)
    view = logits[:, :-1]
    assert rows.as_rows(view).data_ptr() == logits.data_ptr()
    judged(view, labels[:, 1:], backend=backend)


def test_gradients_are_aligned_as_the_logits_are(device):
    """So that both move by 16 bytes; without padding where the logits have none."""
    logits, _ = batch(3, 4, 507, dtype=BF16, device=device)
    for x in (logits, logits[:, :-1], misaligned(logits, 3), logits[1:, 2], logits[..., :100]):
        walked = rows.as_rows(x)
        like = rows.empty_rows_like(walked, FP32, 8)
        starts = [
            [row.data_ptr() // row.element_size() % 8 for row in t.flatten(0, 1)]
            for t in (walked, like)
        ]
        assert starts[0] == starts[1]
        assert like.untyped_storage().nbytes() // 4 < x.numel() + 8 * (x.numel() // x.shape[-1] + 1)
    assert rows.empty_rows_like(rows.as_rows(logits), BF16, 8).is_contiguous()


def test_four_leading_dimensions_and_none(backend, device):
    logits, labels = batch(2, 1, 3, 2, 40, device=device)
    judged(logits, labels, backend=backend)
    judged(logits[:, :, 1:], labels[:, :, 1:], backend=backend)
    judged(logits[:, :, 1:, 1:], labels[:, :, 1:, 1:], backend=backend)
    judged(logits[0, 0, 0, 0], labels[0, 0, 0, 0], backend=backend)


def test_a_row_broadcast_over_tokens(backend, device):
    logits, labels = batch(4, 300, device=device)
    judged(logits[:1].expand(4, 300), labels, backend=backend)


def test_offsets_beyond_32_bits(backend, device):
    """Three rows, 2**30 elements apart: pages that nobody touches cost nothing."""
    size = 2**31 + 1024
    memory = torch.tensor([], dtype=BF16, device=device)
    memory.set_(torch.UntypedStorage(2 * size, device=device), 0, (size,))
    far = memory.as_strided((3, 507), (2**30 + 8, 1))
    logits, labels = batch(3, 507, dtype=BF16, device=device)
    far.copy_(logits)
    expected = results(logits, labels, backend=backend)
    assert_same_bits(results(far, labels, backend=backend), expected)


@pytest.mark.parametrize(("n", "dtype"), [(64, BF16), (9, FP32)], ids=names([BF16, FP32]))
def test_a_row_alone_gives_the_bits_it_gives_among_others(device, n, dtype):
    """507 is odd: rows of the batch start anywhere in a vector, a row alone at its start."""
    logits, labels = batch(n, 507, dtype=dtype, device=device)
    together = results(logits, labels, backend="triton", temperature=0.9)
    for i in (0, 1, 2, n - 1):
        alone = results(
            logits[i : i + 1].clone(), labels[i : i + 1], backend="triton", temperature=0.9
        )
        assert_same_bits(alone, [x[i : i + 1] for x in together])


def test_a_long_row_alone_gives_the_same_bits(device):
    logits, labels = batch(4, 50257, dtype=BF16, device=device)
    together = results(logits, labels, backend="triton")
    alone = results(logits[3:].clone(), labels[3:], backend="triton")
    assert_same_bits(alone, [x[3:] for x in together])


def test_logits_are_left_alone_and_the_graph_can_be_used_twice(backend, device):
    logits, labels = batch(3, 300, dtype=BF16, device=device)
    before = logits.clone()
    leaf = logits.requires_grad_()
    logprobs, _ = token_logprobs(leaf, labels, entropy=True, backend=backend)
    logprobs.sum().backward(retain_graph=True)
    first = leaf.grad.clone()
    (logprobs.sum() + (leaf.float() ** 2).sum()).backward(retain_graph=True)
    again = leaf.grad - first
    leaf.grad = None
    logprobs.sum().backward()
    assert torch.equal(leaf.grad, first)
    assert torch.equal(leaf.detach(), before)
    torch.testing.assert_close(again, first + 2 * before, rtol=2e-2, atol=2e-2)


def test_a_gradient_flows_to_what_made_the_logits(backend, device):
    hidden, labels = batch(2, 3, 16, device=device)
    weight = torch.randn(16, 50, device=device)

    def of_hidden(function, hidden, weight, **options):
        return function((hidden @ weight)[:, :-1], labels[:, 1:], **options)

    op = functools.partial(of_hidden, token_logprobs, backend=backend)
    formula = functools.partial(of_hidden, reference.token_logprobs)
    judge(op, formula, {"hidden": hidden, "weight": weight}, wrt=["hidden", "weight"])


def test_nothing_is_kept_where_no_gradient_is_wanted(backend, device):
    logits, labels = batch(3, 100, device=device)
    assert token_logprobs(logits, labels, backend=backend).grad_fn is None
    leaf = logits.requires_grad_()
    with torch.no_grad():
        assert token_logprobs(leaf, labels, backend=backend).grad_fn is None
    found = token_logprobs(leaf, labels, backend=backend)  # what is kept goes with it
    kept = found.grad_fn.saved_tensors
    assert sum(x.numel() for x in kept if x is not None and x is not leaf) <= 10 * len(labels)


def test_only_shapes_are_compiled_in():
    """What changes from call to call is an argument: a constexpr would recompile each time."""
    from fastrl_kernels._triton import full_kl, logprob

    for kernel in (
        logprob._token_logprobs_fwd_kernel,
        logprob._token_logprobs_bwd_kernel,
        full_kl._full_kl_fwd_kernel,
        full_kl._full_kl_bwd_kernel,
    ):
        parameters = inspect.signature(kernel.fn).parameters.values()
        compiled = {p.name for p in parameters if "constexpr" in str(p.annotation)}
        assert compiled <= {"BLOCK", "VEC", "PART"}


@together(("change", "error", "message"), [
    ({"logits": torch.zeros(3, 9, dtype=torch.int64)}, TypeError, "logits must be float32"),
    ({"logits": torch.zeros(3, 9, dtype=torch.float64)}, TypeError, "logits must be float32"),
    ({"logits": torch.zeros(3, 0)}, ValueError, "V > 0"),
    ({"logits": torch.zeros(())}, ValueError, "V > 0"),
    ({"labels": torch.zeros(3)}, TypeError, "labels must be integers"),
    ({"labels": torch.zeros(3, dtype=torch.bool)}, TypeError, "labels must be integers"),
    ({"labels": torch.zeros(4, dtype=torch.int64)}, ValueError, "labels has shape"),
    ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, ValueError, "labels is on"),
    ({"mask": torch.ones(3)}, TypeError, "mask must be boolean"),
    ({"mask": torch.ones(2, dtype=torch.bool)}, ValueError, "mask has shape"),
    ({"mask": torch.ones(3, dtype=torch.bool, device="meta")}, ValueError, "mask is on"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    ({"temperature": -1.0}, ValueError, "temperature must be positive"),
    ({"temperature": float("inf")}, ValueError, "temperature must be positive and finite"),
    ({"temperature": float("nan")}, ValueError, "temperature must be positive and finite"),
    ({"temperature": torch.ones(3, 1)}, ValueError, "temperature has shape"),
    ({"temperature": torch.ones(3, device="meta")}, ValueError, "temperature is on"),
    ({"temperature": torch.ones(3, requires_grad=True)}, ValueError, "temperature requires"),
    ({"backend": "cuda"}, ValueError, "unknown backend"),
])  # fmt: skip
def test_what_is_refused_and_why(change, error, message):
    arguments = {"logits": torch.zeros(3, 9), "labels": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        token_logprobs(**{**arguments, **change})


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    vocabulary=st.integers(1, 12),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    shift=st.sampled_from([-1000.0, 0.0, 1000.0]),
    temperature=st.floats(0.1, 10.0),
    seed=st.integers(0, 1000),
)
def test_probabilities_sum_to_one(backend, device, vocabulary, scale, shift, temperature, seed):
    row, _ = batch(1, vocabulary, device=device, scale=scale, shift=shift, seed=seed)
    logprobs, entropies = token_logprobs(
        row.expand(vocabulary, vocabulary),
        torch.arange(vocabulary, device=device),
        temperature=temperature,
        entropy=True,
        backend=backend,
    )
    assert logprobs.exp().sum().item() == pytest.approx(1, abs=2e-6)
    assert -1e-6 <= entropies[0].item() <= numpy.log(vocabulary) + 1e-6
    cross = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum()
    assert entropies[0].item() == pytest.approx(cross.item(), abs=1e-5)
