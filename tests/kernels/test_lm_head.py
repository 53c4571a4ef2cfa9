"""What the linear ops share: extras, labels, what they refuse, rows by themselves, chunks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import Extras, KLTerm, gemm, linear_logprobs, linear_ppo_loss, reference
from fastrl_kernels.lm_head import column_chunks, row_chunks
from fastrl_kernels.types import LogitTransform, RowGradients, RowStatistics, Temperature
from fastrl_kernels.workspace import Workspace
from tests.kernels.judge import assert_close_to_exact, names
from tests.kernels.launches import allocations, floats_arrive_as_double, interpreted, watched
from tests.kernels.roundings import Rounded
from tests.kernels.test_linear_logprobs import LEAVES, assert_same_bits, batch, run, with_holes
from tests.together import together

BF16, FP32 = torch.bfloat16, torch.float32
EXTRAS = Extras._fields


@pytest.mark.parametrize(
    ("rows", "vocabulary", "workspace"), [(5, 507, None), (5, 507, 5_000), (1, 20_000, None)]
)
def test_extras_match_the_formula(backend, device, rows, vocabulary, workspace):
    """In one window of the kernel, and in several."""
    inputs = with_holes(batch(4, rows, vocabulary, device=device, bias=True))
    inputs["temperature"] = torch.full((4, rows), 1.7, device=device)
    inputs["labels"][0, 0] = (
        inputs["hidden"][0, 0] @ inputs["weight"].t() + inputs["bias"]
    ).argmax()
    inputs["mask"][0, 0] = True
    options = {"extras": EXTRAS, "softcap": 20.0, "logit_scale": 0.8}
    logprobs, extras = linear_logprobs(
        **inputs, **options, workspace_bytes=workspace, backend=backend
    )
    double = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    runs = Rounded(lambda: reference.linear_logprobs(**inputs, **options)[1])
    _, exact = reference.linear_logprobs(**double, **options)
    assert isinstance(extras, Extras)
    counted = inputs["mask"] & (inputs["labels"] != -100)
    for i, (name, x, right) in enumerate(zip(EXTRAS, extras, exact, strict=True)):
        assert x.shape == logprobs.shape
        assert not x[~counted].any()
        assert_close_to_exact(x, runs[i], right, name)
    assert extras.is_top1.dtype == torch.bool
    assert extras.is_top1[0, 0]


def assert_rounded_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Heads without extras are computed in pieces, where a library is as fast for these."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6 * float(y.abs().max()))


def test_extras_come_last_and_alone_where_asked_for(backend, device):
    inputs = batch(5, 60, device=device)
    plain = linear_logprobs(**inputs, entropy=True, backend=backend)
    for name in EXTRAS:
        *results, extras = linear_logprobs(**inputs, entropy=True, extras=(name,), backend=backend)
        assert_rounded_alike(results, plain)
        assert [x is not None for x in extras] == [name == other for other in EXTRAS]


def test_extras_have_no_gradient(backend, device):
    inputs = batch(5, 60, device=device)
    leaf = inputs["hidden"].requires_grad_()
    logprobs, extras = linear_logprobs(**inputs, extras=EXTRAS, backend=backend)
    assert logprobs.requires_grad
    assert not any(x.requires_grad for x in extras)
    with_extras = torch.autograd.grad(logprobs.sum(), leaf)
    alone = torch.autograd.grad(linear_logprobs(**inputs, backend=backend).sum(), leaf)
    assert_rounded_alike(with_extras, alone)


@pytest.mark.parametrize(("vocabulary", "workspace"), [(40, None), (20_000, None), (40, 100)])
def test_of_tied_logits_the_first_is_top(backend, device, vocabulary, workspace):
    """Within a window of the kernel, in windows far apart, and in chunks of columns."""
    inputs = batch(4, vocabulary, device=device, bias=True)
    inputs["weight"].zero_()
    first, second = vocabulary // 3, vocabulary - 2
    inputs["bias"][[first, second]] = 50.0
    inputs["labels"] = torch.tensor([first, second, 0, first + 1], device=device)
    for softcap in (None, 100.0):
        options = {"extras": EXTRAS, "softcap": softcap, "workspace_bytes": workspace}
        _, extras = linear_logprobs(**inputs, **options, backend=backend)
        assert extras.is_top1.tolist() == [True, False, False, False]


def loss_of(inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Any]:
    labels = inputs["labels"]
    zeros = torch.zeros(labels.shape, device=labels.device)
    given = {
        "old_logprobs": zeros - 5.0,
        "advantages": zeros + 1.0,
        "mask": torch.ones_like(labels, dtype=torch.bool),
        **inputs,
    }
    return linear_ppo_loss(**given, **options)


def logprobs_of(inputs: dict[str, Any], **options: Any) -> Any:
    return linear_logprobs(**inputs, **options)


OPS = pytest.mark.parametrize("op", [logprobs_of, loss_of], ids=["logprobs", "loss"])


@OPS
def test_a_label_out_of_range_is_an_error_on_the_cpu_path(op):
    inputs = batch(2, 3, 100)
    for label in (100, -1):
        inputs["labels"][1, 2] = label
        with pytest.raises(ValueError, match=rf"labels\[1, 2\] is {label}, outside \[0, 100\)"):
            op(inputs, backend="torch")
    masked = {**inputs, "mask": torch.ones(2, 3, dtype=torch.bool)}
    masked["mask"][1, 2] = False
    op(masked, backend="torch")


@OPS
def test_check_labels_raises_on_either_backend(backend, device, op):
    inputs = batch(3, 100, device=device)
    inputs["labels"][1] = 100
    with pytest.raises(ValueError, match=r"labels\[1\] is 100"):
        op(inputs, check_labels=True, backend=backend)


@pytest.mark.parametrize("label", [100, -1, -(2**40), 2**32 + 5])
@pytest.mark.parametrize("workspace", [None, 300])
def test_a_label_out_of_range_is_nan_on_the_device(device, label, workspace):
    inputs = batch(3, 100, device=device)
    inputs["labels"][1] = label
    options = {"workspace_bytes": workspace, "backend": "triton"}
    logprobs, entropies, by_hidden, by_weight = run(inputs, **options)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert entropies.isfinite().all()
    assert by_hidden.isnan().all(-1).tolist() == [False, True, False]
    assert by_hidden[[0, 2]].isfinite().all()
    assert by_weight.isnan().any()
    leaf = inputs["hidden"].requires_grad_()
    loss, stats = loss_of(inputs, **options)
    (by_hidden,) = torch.autograd.grad(loss, leaf)
    assert loss.isnan()
    assert stats.logprobs.isnan().tolist() == [False, True, False]
    assert by_hidden.isnan().all(-1).tolist() == [False, True, False]
    assert by_hidden[[0, 2]].isfinite().all()


def statistics_and_gradients(
    products: Tensor, labels: Tensor, temperatures: Tensor, softcap: float | None
) -> list[Tensor]:
    """Every statistic of rows of products, and the gradients of the products, by the kernels."""
    from fastrl_kernels._triton.lm_head import TritonHead

    n, vocabulary = products.shape
    how = LogitTransform(softcap, 1.3), Temperature(1.0, temperatures)
    x = Workspace(products, n, vocabulary, products.dtype).chunk(n).copy_(products)
    found = RowStatistics.empty(products, n, True, EXTRAS)
    TritonHead.statistics(x, labels, *how, found)
    upstream = (torch.full((n,), g, device=products.device) for g in (0.7, -0.3))
    TritonHead.gradients_(x, 0, labels, *how, found, RowGradients(*upstream))
    return [*found, x]


@pytest.mark.parametrize(
    ("vocabulary", "dtype", "softcap"), [(507, BF16, 9.0), (507, FP32, None), (9001, BF16, None)]
)
def test_a_row_alone_gives_the_bits_it_gives_among_others(device, vocabulary, dtype, softcap):
    n = 64 if vocabulary < 1000 else 4
    generator = torch.Generator().manual_seed(0)
    products = 4.0 * torch.randn(n, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (n,), generator=generator).to(device)
    temperatures = (0.5 + torch.rand(n, generator=generator)).to(device)
    arguments = (products.to(device, dtype), labels, temperatures)
    together = statistics_and_gradients(*arguments, softcap)
    for i in (0, 1, n // 2 + 1, n - 1):
        one = [x[i : i + 1].clone() for x in arguments]
        alone = statistics_and_gradients(*one, softcap)
        assert_same_bits(alone, [x[i : i + 1] for x in together])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.3])
def test_a_certain_policy_gets_exactly_no_gradient(backend, device, temperature):
    inputs = batch(6, 9, device=device, bias=True)
    inputs["bias"][:] = -1000.0
    inputs["bias"][3], inputs["labels"][:] = 0.0, 3
    inputs["hidden"].requires_grad_()
    logprobs = linear_logprobs(**inputs, temperature=temperature, backend=backend)
    upstream = torch.randn(6, device=device)
    assert not torch.autograd.grad(logprobs, inputs["hidden"], upstream)[0].any()


@interpreted
def test_floats_that_arrive_as_double_change_no_bit(device):
    inputs = batch(3, 507, dtype=BF16, device=device)
    options = {"temperature": 0.7, "softcap": 7.3, "logit_scale": 1.1, "backend": "triton"}
    plain = run(inputs, **options)
    with floats_arrive_as_double():
        assert_same_bits(run(inputs, **options), plain)


@OPS
def test_one_chunk_is_multiplied_three_times(backend, device, op):
    """For logits, and for the gradients of hidden states and weight: nothing is computed again."""
    inputs = batch(5, 300, device=device)
    leaves = [inputs[name].requires_grad_() for name in ("hidden", "weight")]
    with gemm.using({"float32": gemm.MM}), allocations() as calls:
        found = op(inputs, backend=backend)
        (found[0] if op is loss_of else found.sum()).backward(inputs=leaves)
    products = [what for _, what in calls if what.startswith(("mm.", "addmm"))]
    assert len(products) == 3, products


def test_nothing_waits_for_the_device(device):
    inputs = with_holes(batch(4, 5, 300, device=device, bias=True))
    leaves = [inputs[name].requires_grad_() for name in LEAVES]
    with watched() as calls:
        results = linear_logprobs(
            **inputs, entropy=True, extras=EXTRAS, workspace_bytes=5_000, backend="triton"
        )
        torch.autograd.grad(results[0].sum(), leaves)
    assert calls.count("_lm_head_fwd_kernel") == calls.count("_lm_head_bwd_kernel") == 5


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=names([BF16, FP32]))
def test_every_element_is_scaled_once(device, monkeypatch, n, dtype):
    from fastrl_kernels._triton import lm_head

    monkeypatch.setattr(lm_head, "_SCALE_PROGRAMS", 2)
    x, factor = torch.randn(n).to(device, dtype), torch.tensor(-0.3, device=device)
    expected = (x.float() * factor).to(dtype)
    lm_head.TritonHead.scale_(x, factor)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 100, 4096])
@pytest.mark.parametrize("columns", [1, 503, 151936])
@pytest.mark.parametrize("budget", [1, 10**6, 10**9])
def test_chunks_of_rows_fit_the_budget_and_are_alike(n, columns, budget):
    chunks = row_chunks(n, columns, 4, budget)
    assert [i for rows in chunks for i in range(n)[rows]] == list(range(n))
    lengths = [rows.stop - rows.start for rows in chunks]
    assert all(r == 1 or r * columns * 4 <= budget for r in lengths)
    assert all(a == lengths[0] and (a % 16 == 0 or a < 16) for a in lengths[:-1])


@pytest.mark.parametrize("n", [1, 40, 10**6])
@pytest.mark.parametrize("vocabulary", [1, 1024, 8193, 151936])
@pytest.mark.parametrize("budget", [1, 10**6, 10**9])
def test_chunks_of_columns_cover_the_vocabulary(n, vocabulary, budget):
    chunks = column_chunks(n, vocabulary, 4, budget)
    assert [i for columns in chunks for i in range(vocabulary)[columns]] == list(range(vocabulary))
    widths = [columns.stop - columns.start for columns in chunks]
    assert set(widths[:-1]) <= {1024, 2048, 4096, 8192}
    assert max(widths) <= 1024 or n * max(widths) * 4 <= budget


INTEGERS, FLOATS = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)


@OPS
@together(("change", "error", "message"), [
    ({"hidden": torch.zeros(2, 3, 4, dtype=torch.int64)}, TypeError, "hidden must be float32"),
    ({"hidden": torch.zeros(2, 3, 4, dtype=torch.float64)}, TypeError, "hidden must be"),
    ({"hidden": torch.zeros(2, 3, 5)}, ValueError, r"hidden has shape \(2, 3, 5\), weight"),
    ({"hidden": torch.zeros(())}, ValueError, "hidden has shape"),
    ({"hidden": torch.zeros(2, 3, 4, device="meta")}, ValueError, "weight is on cpu, hidden"),
    ({"weight": torch.zeros(9, 4, dtype=BF16)}, TypeError, "hidden is torch.float32, weight"),
    ({"weight": torch.zeros(9, 4, dtype=torch.int8)}, TypeError, "weight must be float32"),
    ({"weight": torch.zeros(4)}, ValueError, r"weight has shape \(4,\): it must be \[V, H\]"),
    ({"weight": torch.zeros(0, 4)}, ValueError, "V > 0"),
    ({"weight": torch.zeros(9, 4, device="meta")}, ValueError, "weight is on meta"),
    ({"bias": torch.zeros(8)}, ValueError, r"bias has shape \(8,\): it must be \(9,\)"),
    ({"bias": torch.zeros(9, dtype=torch.int64)}, TypeError, "bias must be float32"),
    ({"bias": torch.zeros(9, device="meta")}, ValueError, "bias is on meta"),
    ({"labels": FLOATS}, TypeError, "labels must be integers"),
    ({"labels": INTEGERS == 0}, TypeError, "labels must be integers"),
    ({"labels": INTEGERS[:1]}, ValueError, "labels has shape"),
    ({"labels": INTEGERS.to("meta")}, ValueError, "labels is on meta"),
    ({"mask": FLOATS}, TypeError, "mask must be boolean"),
    ({"mask": INTEGERS[:1] == 0}, ValueError, "mask has shape"),
    ({"mask": (INTEGERS == 0).to("meta")}, ValueError, "mask is on meta"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    ({"temperature": -1.0}, ValueError, "temperature must be positive"),
    ({"temperature": float("nan")}, ValueError, "temperature must be positive and finite"),
    ({"temperature": torch.ones(2, 1)}, ValueError, "temperature has shape"),
    ({"temperature": torch.ones(2, 3, device="meta")}, ValueError, "temperature is on meta"),
    ({"temperature": torch.ones(2, 3, requires_grad=True)}, ValueError, "temperature requires"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ({"softcap": -30.0}, ValueError, "softcap must be positive"),
    ({"logit_scale": 0.0}, ValueError, "logit_scale must be positive"),
    ({"logit_scale": float("inf")}, ValueError, "logit_scale must be positive and finite"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be at least 1, got 0"),
    ({"backend": "cuda"}, ValueError, "unknown backend"),
])  # fmt: skip
@together("autocast", [False, True])
def test_what_is_refused_and_why(op, change, error, message, autocast):
    inputs = {"hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(9, 4), "labels": INTEGERS}
    low = autocast and "weight" in change and change["weight"].dtype == BF16
    casting = torch.autocast("cpu", dtype=BF16, enabled=autocast and not low)
    with casting, pytest.raises(error, match=message):
        op({**inputs, **change})


def test_unknown_extras_are_refused(backend, device):
    inputs = batch(2, 9, device=device)
    with pytest.raises(ValueError, match=r"unknown extras .*: choose from log_sum_sq_probs"):
        linear_logprobs(**inputs, extras=("is_top1", "is_top5"), backend=backend)
    with pytest.raises(TypeError, match=r"extras must be a tuple of names.*\('is_top1',\)"):
        linear_logprobs(**inputs, extras="is_top1", backend=backend)


@together(("change", "error", "message"), [
    ({"old_logprobs": INTEGERS}, TypeError, "old_logprobs must be float32"),
    ({"old_logprobs": FLOATS[:1]}, ValueError, "old_logprobs has shape"),
    ({"old_logprobs": FLOATS.to("meta")}, ValueError, "old_logprobs is on meta"),
    ({"old_logprobs": FLOATS.clone().requires_grad_()}, ValueError, "old_logprobs requires"),
    ({"advantages": FLOATS[:1]}, ValueError, "advantages has shape"),
    ({"advantages": FLOATS.to("meta")}, ValueError, "advantages is on meta"),
    ({"advantages": FLOATS.clone().requires_grad_()}, ValueError, "advantages requires"),
    ({"weights": INTEGERS}, TypeError, "weights must be float32"),
    ({"weights": FLOATS.to("meta")}, ValueError, "weights is on meta"),
    ({"kl": KLTerm(FLOATS[:1], 0.1)}, ValueError, "ref_logprobs has shape"),
    ({"kl": KLTerm(FLOATS.to("meta"), 0.1)}, ValueError, "ref_logprobs is on meta"),
    ({"kl": KLTerm(FLOATS, 0.1, "k2")}, ValueError, "unknown kind 'k2'"),
    ({"kl": KLTerm(FLOATS, torch.tensor(0.1))}, TypeError, "must be Python numbers"),
    ({"cliprange": -0.1}, ValueError, "cliprange must be at least 0, got -0.1"),
    ({"dual_clip": 1.0}, ValueError, "dual_clip must be above 1"),
    ({"aggregate": "mean"}, ValueError, "unknown aggregate 'mean'"),
    ({"denominator": 0.0}, ValueError, "denominator must be above 0"),
    ({"denominator": torch.ones(2)}, ValueError, "denominator has shape"),
    ({"denominator": torch.ones((), device="meta")}, ValueError, "denominator is on meta"),
])  # fmt: skip
def test_what_the_loss_refuses_and_why(change, error, message):
    inputs = {"hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(9, 4), "labels": INTEGERS}
    with pytest.raises(error, match=message):
        loss_of({**inputs, **change})


def test_the_loss_needs_a_time_dimension():
    with pytest.raises(ValueError, match="labels has no time dimension"):
        loss_of({k: x[0] if k != "weight" else x for k, x in batch(1, 9).items()})
