"""linear_kl and linear_kl_loss: what they compute, refuse and keep, on both backends."""

import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastrl_kernels import (
    TeacherHead,
    TeacherTokens,
    full_kl,
    gemm,
    linear_kl,
    linear_kl_loss,
    linear_logprobs,
    reference,
)
from fastrl_kernels.divergence import Divergences, OneSide
from fastrl_kernels.types import LogitTransform, RowGradients, RowStatistics, Temperature
from fastrl_kernels.workspace import Workspace, clear
from tests.kernels import test_linear_logprobs
from tests.kernels.judge import DTYPES, judge, names
from tests.kernels.launches import allocations, floats_arrive_as_double, interpreted, watched
from tests.kernels.test_linear_logprobs import (
    LEAVES,
    Inputs,
    assert_logits_never_exist,
    assert_same_bits,
)
from tests.together import together

BF16, FP32 = torch.bfloat16, torch.float32
BETAS = (0.0, 0.3, 1.0)
KINDS = ("head", "bucket", "renormalised")
SMALL = (3, 4, 60)
ROWS = 3000  # bytes: half of the rows of SMALL, of both heads in fp32


def batch(
    *shape: int, kind: str = "head", teacher_width: int = 5, device: Any = "cpu",
    teacher_dtype: torch.dtype = FP32, bias: bool = False, **options: Any,
) -> Inputs:  # fmt: skip
    """A student's inputs as of ``linear_logprobs``, and a teacher's as tensors named after it."""
    inputs = test_linear_logprobs.batch(*shape, device=device, bias=bias, **options)
    other = {**options, "width": teacher_width, "dtype": teacher_dtype, "seed": 1}
    other = test_linear_logprobs.batch(*shape, device=device, bias=bias, **other)
    head = {f"teacher_{name}": other[name] for name in LEAVES if name in other}
    return inputs | (head if kind == "head" else tokens_of(head, shape[-1], kind))


def tokens_of(head: Inputs, vocabulary: int, kind: str, count: int = 7) -> Inputs:
    """The teacher's log-probs of some tokens, the last of which is none in the first row."""
    logits = F.linear(*(x.float() for x in head.values()))
    generator = torch.Generator().manual_seed(2)
    ids = torch.rand(logits.shape, generator=generator).argsort(-1)[..., :count]
    ids = ids.to(logits.device)
    logprobs = logits.log_softmax(-1).gather(-1, ids)
    logprobs.view(-1, count)[0, -1:] = -math.inf
    return {"teacher_ids": ids, "teacher_logprobs": logprobs, "rest": kind}


def with_holes(inputs: Inputs) -> Inputs:
    return test_linear_logprobs.with_holes(inputs)


def counted_of(inputs: Inputs) -> Tensor:
    return inputs["mask"] & (inputs["labels"] != -100)


def called(op: Any, inputs: Inputs, **options: Any) -> Any:
    """The op, or its formula, with the teacher put together."""
    given = {**inputs, **options}
    of_teacher = [k for k in given if k.startswith("teacher_") or k == "rest"]
    fields = {k.removeprefix("teacher_"): given.pop(k) for k in of_teacher}
    kind = TeacherTokens if "ids" in fields else TeacherHead
    return op(teacher=kind(**fields), **given)


def run(inputs: Inputs, wrt: tuple[str, ...] = LEAVES, **options: Any) -> list[Tensor]:
    """Divergences, log-probs, entropies, and gradients by ``wrt``."""
    leaves = {k: inputs[k].detach().requires_grad_() for k in wrt if k in inputs}
    found = called(linear_kl, {**inputs, **leaves}, entropy=True, **options)
    total = (found.divergences - 0.3 * found.logprobs + 0.2 * found.entropies).sum()
    gradients = torch.autograd.grad(total, [*leaves.values()])
    return [*(x.detach() for x in found[:3]), *gradients]


def run_loss(
    inputs: Inputs, wrt: tuple[str, ...] = LEAVES, upstream: float = 1.0, **options: Any
) -> tuple[Tensor, dict[str, Tensor], Any]:
    """The loss, gradients by name, and results per token."""
    leaves = {k: inputs[k].detach().requires_grad_() for k in wrt if k in inputs}
    loss, found = called(linear_kl_loss, {**inputs, **leaves}, **options)
    assert loss.dim() == 0
    assert loss.dtype == found.divergences.dtype == FP32
    assert not any(x.requires_grad for x in found if x is not None)
    grads = torch.autograd.grad(loss, [*leaves.values()], torch.full_like(loss, upstream))
    return loss.detach(), dict(zip(leaves, grads, strict=True)), found


def weights_of(inputs: Inputs) -> Tensor:
    """With zeros among them."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.rand(inputs["labels"].shape, generator=generator)
    return (drawn - 0.2).clamp(min=0).to(inputs["labels"].device)


VARIANTS: dict[str, dict[str, Any]] = {
    "forward": {"beta": 0.0},
    "reverse": {"beta": 1.0, "teacher_softcap": 9.0, "teacher_logit_scale": 0.5},
    "mixed": {"beta": 0.3, "softcap": 8.0, "logit_scale": 1.5},  # and what else there is
}


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(backend, device, dtype, variant):
    """Of a student in the dtype and a teacher in fp32; ``test_linear_kl_properties`` has more."""
    full = variant == "mixed"
    inputs = batch(6, 507, dtype=dtype, device=device, bias=full)
    if full:
        inputs = with_holes(inputs)
        inputs["temperature"] = test_linear_logprobs.temperatures(inputs)

    def flat(op: Any, **given: Any) -> tuple[Tensor, ...]:
        return tuple(called(op, given, **VARIANTS[variant], entropy=True))

    ops = functools.partial(linear_kl, backend=backend), reference.linear_kl
    wrt = [name for name in LEAVES if name in inputs]
    judge(*(functools.partial(flat, op) for op in ops), inputs, wrt=wrt, own_dtypes=True)


# What it means.


def exact_log_probs(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Of student and teacher, in float64."""
    sides = [[x.double() for k, x in inputs.items() if k in LEAVES]]
    sides.append([inputs[f"teacher_{k}"].double() for k in LEAVES if f"teacher_{k}" in inputs])
    log_p, log_q = (F.linear(*tensors).log_softmax(-1) for tensors in sides)
    return log_p, log_q


def kl(log_of: Tensor, log_to: Tensor) -> Tensor:
    return F.kl_div(log_to, log_of, log_target=True, reduction="none").sum(-1)


def test_the_ends_are_both_kls_and_between_them_is_the_mean_to_the_mixture(backend, device):
    inputs = batch(3, 4, 60, device=device, bias=True)
    log_p, log_q = exact_log_probs(inputs)
    m = (0.7 * log_p.exp() + 0.3 * log_q.exp()).log()
    exact = {
        0.0: kl(log_q, log_p),
        0.3: 0.3 * kl(log_q, m) + 0.7 * kl(log_p, m),
        1.0: kl(log_p, log_q),
    }
    for beta, wanted in exact.items():
        found = called(linear_kl, inputs, beta=beta, backend=backend).divergences
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_the_ends_are_other_functions_than_the_limits(backend, device):
    inputs = batch(3, 4, 60, device=device, scale=1.0)
    at = {b: called(linear_kl, inputs, beta=b, backend=backend)[0] for b in (0, 1e-3, 0.999, 1)}
    for near, end in ((1e-3, 0), (0.999, 1)):
        assert (at[near] < 0.01 * at[end]).all()
        torch.testing.assert_close(at[near] / 1e-3, at[end], rtol=0.2, atol=0)


def test_reverse_kl_is_that_of_whole_logits(backend, device):
    inputs = batch(3, 4, 60, device=device, bias=True)
    x = F.linear(*(inputs[k] for k in LEAVES if k != "labels"))
    y = F.linear(*(inputs[f"teacher_{k}"] for k in LEAVES))
    found = called(linear_kl, inputs, backend=backend, temperature=0.7).divergences
    torch.testing.assert_close(found, full_kl(x, y, temperature=0.7), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.5, 1.0])
def test_values_gradients_and_entropies_are_trls(device, beta):
    """Whose entropy has no gradient."""
    trl = pytest.importorskip("trl.kernels.chunked_divergence")
    inputs = batch(9, 300, teacher_width=12, device=device, bias=True)
    found = []
    for of_trl in (True, False):
        leaves = {k: inputs[k].detach().requires_grad_() for k in LEAVES}
        given = {**inputs, **leaves}
        if of_trl:
            heads = (given[f"{side}{k}"] for side in ("", "teacher_") for k in LEAVES)
            settings = beta, 0.7, 1.3, 20.0, 0.8, 9.0
            values, entropies = trl.ChunkedDivergenceFunction.apply(*heads, *settings)
        else:
            values, _, entropies, _ = called(
                linear_kl, given, beta=beta, temperature=0.7, logit_scale=1.3, softcap=20.0,
                teacher_logit_scale=0.8, teacher_softcap=9.0, entropy=True, backend="auto",
            )  # fmt: skip
        weights = torch.linspace(-1, 2, len(values), device=device)
        found.append([values, entropies, *torch.autograd.grad(values @ weights, leaves.values())])
    for theirs, ours in zip(*found, strict=True):
        size = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize("beta", BETAS)
def test_an_equal_teacher_is_at_zero_and_gives_no_gradient(backend, device, dtype, beta):
    inputs = batch(5, 507, dtype=dtype, device=device, bias=True)
    inputs |= {f"teacher_{name}": inputs[name].clone() for name in LEAVES}
    options = {"beta": beta, "temperature": 0.7, "softcap": 9.0, "teacher_softcap": 9.0}
    _, grads, found = run_loss(inputs, backend=backend, **options)
    assert not found.divergences.any()
    assert not any(x.any() for x in grads.values())
    torch.testing.assert_close(found.teacher_logprobs, found.logprobs, rtol=0, atol=0)


def test_tokens_of_an_equal_teacher_are_at_zero(backend, device):
    for kind in ("bucket", "renormalised"):
        inputs = batch(5, 60, device=device)
        student = {k: x for k, x in inputs.items() if k in ("hidden", "weight")}
        inputs = {"labels": inputs["labels"], **student, **tokens_of(student, 60, kind)}
        _, grads, found = run_loss(inputs, beta=0.5, backend=backend)
        torch.testing.assert_close(
            found.divergences, torch.zeros(5, device=device), rtol=0, atol=1e-6
        )
        assert all(x.abs().max() < 1e-5 for x in grads.values())


def test_all_tokens_are_the_whole_distribution(backend, device):
    """K = V leaves nothing to the bucket."""
    inputs = batch(5, 30, device=device, bias=True)
    _, log_q = exact_log_probs(inputs)
    ids = torch.rand(5, 30, generator=torch.Generator().manual_seed(0)).argsort(-1).to(device)
    given = {k: inputs[k] for k in (*LEAVES, "labels")}
    given |= {"teacher_ids": ids, "teacher_logprobs": log_q.gather(-1, ids).float()}
    for beta in BETAS:
        wanted = run(inputs, beta=beta, backend=backend)
        for rest in ("bucket", "renormalised"):
            found = run({**given, "rest": rest}, beta=beta, backend=backend)
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", BETAS)
def test_the_loss_is_a_weighted_sum_of_divergences(backend, device, kind, beta):
    inputs = with_holes(batch(*SMALL, kind=kind, device=device, bias=True))
    inputs["weights"] = weights_of(inputs)
    counted = counted_of(inputs)
    options = {"beta": beta, "softcap": 9.0, "workspace_bytes": ROWS, "backend": backend}
    for denominator in (None, 7.0, torch.tensor(11, device=device)):
        loss, grads, found = run_loss(inputs, **options, denominator=denominator)
        leaves = {k: inputs[k].detach().requires_grad_() for k in LEAVES}
        given = {k: x for k, x in {**inputs, **leaves}.items() if k != "weights"}
        each = called(linear_kl, given, **options)
        over = counted.sum() if denominator is None else denominator
        composed = (each.divergences * inputs["weights"]).sum() / over
        torch.testing.assert_close(loss, composed.detach(), rtol=1e-6, atol=1e-7)
        assert_same_bits(found[:2], [x.detach() for x in each[:2]])
        for name, x in zip(leaves, torch.autograd.grad(composed, leaves.values()), strict=True):
            torch.testing.assert_close(grads[name], x, rtol=1e-5, atol=1e-6)
        assert not grads["hidden"][~counted].any()
        assert not found.divergences[~counted].any()
        assert grads["hidden"].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nothing", ["rows", "masked", "denominator"])
def test_where_nothing_counts_all_is_zero(backend, device, kind, nothing):
    inputs = with_holes(batch(*SMALL, kind=kind, device=device, bias=True))
    options = {}
    if nothing == "rows":
        shared = ("weight", "bias", "teacher_weight", "teacher_bias", "rest")
        inputs = {k: x if k in shared else x[:0] for k, x in inputs.items()}
    elif nothing == "masked":
        inputs["mask"] = torch.zeros_like(inputs["mask"])
    else:
        options = {"denominator": torch.zeros((), device=device)}
    loss, grads, _ = run_loss(inputs, backend=backend, **options)
    assert loss == 0
    assert not any(x.any() for x in grads.values())
    assert [x.shape for x in grads.values()] == [inputs[name].shape for name in grads]
    if nothing != "denominator":
        assert not any(x.any() for x in run(inputs, backend=backend))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_any_result_alone(backend, device, kind):
    inputs = batch(6, 60, kind=kind, device=device, bias=True)
    # A cap as low as this leaves tokens that are left out of a sum a part of it.
    options = {"entropy": True, "softcap": 1.0, "temperature": 0.7, "beta": 0.3}
    options |= {"rest": inputs.pop("rest")} if kind != "head" else {}

    def of_one(which: int, op: Any, **given: Any) -> Tensor:
        return called(op, given, **options)[which]

    for which in range(3):  # divergences, log-probs, entropies
        ops = functools.partial(linear_kl, backend=backend), reference.linear_kl
        ops = (functools.partial(of_one, which, op) for op in ops)
        judge(*ops, inputs, wrt=LEAVES, own_dtypes=True)


def test_a_second_backward_is_refused_by_the_loss_alone(backend, device):
    inputs = batch(*SMALL, device=device)
    inputs["hidden"].requires_grad_()
    loss, _ = called(linear_kl_loss, inputs, backend=backend)
    loss.backward(retain_graph=True)
    said = r"linear_kl_loss hands its gradients out once: call it again, .* linear_kl where"
    with pytest.raises(RuntimeError, match=said):
        loss.backward()
    total = called(linear_kl, inputs, backend=backend).divergences.sum()
    first, second = (
        torch.autograd.grad(total, inputs["hidden"], retain_graph=True) for _ in range(2)
    )
    assert_same_bits(first, second)


# What is infinite, or no number.


def closed(inputs: Inputs, *names: str, token: int = 7) -> Inputs:
    """Biases that shut a token out."""
    return inputs | {
        name: inputs[name].index_fill(
            0, torch.tensor([token], device=inputs[name].device), -math.inf
        )
        for name in names
    }


def test_a_token_that_not_both_allow(backend, device):
    """KL is infinite where its first distribution alone allows it; between the ends nothing is."""
    inputs = batch(5, 60, device=device, bias=True)
    inputs["labels"].clamp_(max=5)
    both = "bias", "teacher_bias"
    for beta, shut in itertools.product((0.0, 1e-3, 0.3, 0.999, 1.0), (both[:1], both[1:], both)):
        given = closed(inputs, *shut)
        loss, grads, found = run_loss(given, beta=beta, entropy=True, backend=backend)
        infinite = (beta, shut) in ((0, both[:1]), (1, both[1:]))
        assert found.divergences.isposinf().all() == loss.isposinf() == infinite
        if infinite:
            continue
        exact = reference.divergence(*exact_log_probs(given), beta)
        torch.testing.assert_close(found.divergences.double(), exact, rtol=1e-5, atol=1e-6)
        assert found.entropies.isfinite().all()
        assert all(x.isfinite().all() for x in grads.values())
        if "bias" in shut:
            assert not grads["weight"][7].any()


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_a_probability_of_zero_in_fp32_is_still_of_an_allowed_token(backend, device, beta):
    """0·∞ is no NaN."""
    inputs = batch(3, 60, device=device, bias=True)
    inputs["bias"][7] = -500.0
    inputs["labels"].clamp_(max=5)
    found = called(linear_kl, closed(inputs, "teacher_bias"), beta=beta, backend=backend)
    assert found.divergences.isposinf().all() == (beta == 1)
    assert not found.divergences.isnan().any()


def test_tokens_that_the_student_does_not_allow_make_their_rows_infinite(backend, device):
    for rest in ("bucket", "renormalised"):
        inputs = batch(4, 60, kind=rest, device=device, bias=True)
        inputs["labels"].clamp_(max=5)
        inputs["teacher_ids"] = torch.arange(28, device=device).view(4, 7) + 6
        found = called(linear_kl, closed(inputs, "bias"), beta=0.0, backend=backend)
        assert found.divergences.isposinf().tolist() == [True, False, False, False]
        assert found.divergences[1:].isfinite().all()
        between = called(linear_kl, closed(inputs, "bias"), beta=0.5, backend=backend)
        assert between.divergences.isfinite().all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_gives_no_number_spoils_its_own_row_alone(backend, device, kind, beta):
    inputs = batch(5, 60, kind=kind, device=device, bias=True)
    clean = run(inputs, beta=beta, backend=backend)
    inputs["teacher_hidden" if kind == "head" else "teacher_logprobs"][2, 1] = torch.nan
    divergences, logprobs, entropies, by_hidden, *_ = run(inputs, beta=beta, backend=backend)
    assert divergences.isnan().tolist() == [False, False, True, False, False]
    assert by_hidden.isnan().all(-1).tolist() == [False, False, True, False, False]
    others = [0, 1, 3, 4]
    found = [logprobs, entropies, divergences[others], by_hidden[others]]
    assert_same_bits(found, [clean[1], clean[2], clean[0][others], clean[3][others]])


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_at_masked_places_never_shows(backend, device, kind):
    inputs = with_holes(batch(*SMALL, kind=kind, device=device, bias=True))
    inputs["weights"], counted = weights_of(inputs), counted_of(inputs)
    expected = run_loss(inputs, backend=backend)
    dirty = {
        **inputs,
        "labels": torch.where(inputs["mask"], inputs["labels"], 10**9),
        "weights": torch.where(counted, inputs["weights"], torch.nan),
    }
    for name in ("hidden", "teacher_hidden", "teacher_logprobs"):
        if name in inputs:
            dirty[name] = torch.where(counted[..., None], inputs[name], torch.nan)
    if "teacher_ids" in inputs:
        dirty["teacher_ids"] = torch.where(counted[..., None], inputs["teacher_ids"], 10**9)
    found = run_loss(dirty, backend=backend)
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert x is y is None or torch.equal(x, y)


def test_labels_out_of_range(backend, device):
    for kind in KINDS:
        inputs = batch(*SMALL, kind=kind, device=device)
        inputs["labels"][0, 0] = 60
        if backend == "torch" and torch.device(device).type == "cpu":
            for op in (linear_kl, linear_kl_loss):
                with pytest.raises(ValueError, match=r"labels\[0, 0\] is 60, outside \[0, 60\)"):
                    called(op, inputs, backend=backend)
            continue
        loss, grads, found = run_loss(inputs, entropy=True, backend=backend)
        assert found.logprobs.isnan().nonzero().tolist() == [[0, 0]]
        assert found.divergences.isfinite().all()
        assert loss.isfinite()
        _, _, _, by_hidden, _ = run(inputs, backend=backend)
        for x in (grads["hidden"], by_hidden):
            assert x.isnan().all(-1).nonzero().tolist() == [[0, 0]]


# What it costs.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_logits_never_exist(backend, device, kind, dtype):
    make = functools.partial(batch, kind=kind, teacher_width=2, teacher_dtype=dtype)
    for each in (run, run_loss):
        assert_logits_never_exist(
            each, make, device, dtype, clear, n=60, workspace=20_000,
            backend=backend, beta=0.4,
        )  # fmt: skip


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
@pytest.mark.parametrize("op", [run, run_loss], ids=["linear_kl", "loss"])
def test_gradients_reach_only_those_who_ask(backend, device, op, wanted):
    """A frozen head costs no memory of its size, nor does the teacher's."""
    inputs = batch(5, 1100, width=64, teacher_width=64, device=device, bias=True)
    options = {"workspace_bytes": 20_000, "backend": backend}
    everything = gradients(op(inputs, **options))
    with allocations(*inputs.values()) as found:
        results = gradients(op(inputs, wanted, **options))
    assert_same_bits(results, [everything[LEAVES.index(name)] for name in wanted])
    of_head = [what for size, what in found if size >= inputs["weight"].nbytes]
    assert bool(of_head) == ("weight" in wanted), of_head


def gradients(found: Any) -> list[Tensor]:
    return found[3:] if isinstance(found, list) else [*found[1].values()]


@pytest.mark.parametrize("op", [run, run_loss], ids=["linear_kl", "loss"])
@pytest.mark.parametrize("padding", [(0, 0), (5, 0), (0, 8), (3, 8)], ids=str)
@pytest.mark.parametrize("workspace", [None, 10_000], ids=["one chunk", "chunks"])
def test_rows_of_padding_get_nothing(backend, device, op, padding, workspace):
    """A gradient of exactly 0, which is made with its rows: nothing else is as large."""
    vocabulary, width = 1100, 64
    inputs = batch(5, vocabulary, width=width, teacher_width=width, device=device, bias=True)
    padded = dict(inputs)
    for name, side in (("weight", ""), ("bias", ""), ("weight", "teacher_"), ("bias", "teacher_")):
        x = inputs[side + name]
        rows = x.new_full((padding[side != ""], *x.shape[1:]), torch.nan)
        padded[side + name] = torch.cat([x, rows])
    options = {"workspace_bytes": workspace, "backend": backend, "beta": 0.3}
    expected = gradients(op(inputs, **options))
    with allocations(*padded.values()) as made:
        found = gradients(op(padded, vocabulary=vocabulary, **options))
    for x, y in zip(found, expected, strict=True):
        if x.shape != inputs["hidden"].shape:
            assert not x[vocabulary:].any()
            x = x[:vocabulary]
        assert torch.equal(x, y)
    of_head = {what.split(".")[0] for size, what in made if size >= inputs["weight"].nbytes}
    assert not of_head & {"slice_backward", "add", "cat", "clone", "_to_copy", "zeros"}, of_head


def test_nothing_is_kept_where_no_gradient_is_wanted(backend, device):
    inputs = batch(3, 100, device=device)
    assert called(linear_kl, inputs, backend=backend).divergences.grad_fn is None
    inputs["weight"].requires_grad_()
    with torch.no_grad():
        assert called(linear_kl, inputs, backend=backend).divergences.grad_fn is None
        assert called(linear_kl_loss, inputs, backend=backend)[0].grad_fn is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workspace", [None, ROWS], ids=["one chunk", "chunks"])
def test_runs_give_the_same_bits(backend, device, kind, workspace):
    inputs = batch(*SMALL, kind=kind, dtype=BF16, device=device, bias=True)
    options = {"workspace_bytes": workspace, "backend": backend, "beta": 0.3}
    assert_same_bits(*(run(inputs, **options) for _ in range(2)))
    first, second = (run_loss(inputs, **options) for _ in range(2))
    assert_same_bits([first[0], *first[1].values()], [second[0], *second[1].values()])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_the_device(device, kind):
    inputs = batch(*SMALL, kind=kind, device=device, bias=True)
    for name in LEAVES:
        inputs[name].requires_grad_()
    options = {"entropy": True, "beta": 0.3, "backend": "triton", "check_labels": False}
    with watched() as calls:
        loss, _ = called(linear_kl_loss, inputs, workspace_bytes=ROWS, **options)
        loss.backward()
    chunks = 2 if kind == "head" else 1
    heads = {"head": 2, "bucket": 2, "renormalised": 1}[kind]
    assert calls.count("_lm_head_fwd_kernel") == heads * chunks
    divergences = chunks if kind == "head" else 0
    assert calls.count("_divergence_fwd_kernel") == divergences
    assert calls.count("_divergence_bwd_kernel") == divergences
    assert calls.count("_lm_head_bwd_kernel") == chunks - divergences


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_entropies_are_those_of_linear_logprobs(backend, device, kind):
    """Of both models; the same bits in the kernels, sums in another order elsewhere."""
    inputs = with_holes(batch(5, 3, 507, kind=kind, device=device, bias=True, dtype=BF16))
    options = {"softcap": 9.0, "temperature": 0.7, "backend": backend}
    found = called(linear_kl, inputs, entropy=True, **options)
    head = {k: x for k, x in inputs.items() if not k.startswith("teacher_") and k != "rest"}
    wanted = [*linear_logprobs(**head, entropy=True, **options)]
    results = [found.logprobs, found.entropies]
    if kind == "head":
        teacher = head | {k: inputs[f"teacher_{k}"] for k in LEAVES}
        wanted.append(linear_logprobs(**teacher, temperature=0.7, backend=backend))
        results.append(found.teacher_logprobs)
    else:
        assert found.teacher_logprobs is None
    for x, y in zip(results, wanted, strict=True):
        near = 0.0 if backend == "triton" else 1e-5
        torch.testing.assert_close(x, y, rtol=near, atol=near)


def divergence_and_gradients(
    x: Tensor, y: Tensor, labels: Tensor, temperatures: Tensor, beta: float
) -> list[Tensor]:
    """Of rows of products of both, by the kernels."""
    from fastrl_kernels._triton.divergence import TritonDivergence
    from fastrl_kernels._triton.lm_head import TritonHead

    chunks, sides = [], []
    for products, softcap in ((x, 9.0), (y, None)):
        how = LogitTransform(softcap, 1.3), Temperature(1.0, temperatures)
        chunk = Workspace(products, *products.shape, products.dtype).chunk(len(products))
        chunks.append(chunk.copy_(products))
        statistics = RowStatistics.empty(products, len(products), True, ())
        TritonHead.statistics(chunk, labels, *how, statistics)
        sides.append(OneSide(*how, statistics))
    found = Divergences.empty(x, len(x))
    TritonDivergence.score(*chunks, *sides, labels, beta, found, True)
    upstream = [torch.full((len(x),), g, device=x.device) for g in (0.7, -0.3, 1.1)]
    TritonDivergence.gradients_(
        *chunks, *sides, labels, beta, found, RowGradients(*upstream[:2]), upstream[2], True
    )
    assert torch.equal(chunks[1], y)  # the teacher's are left as they are
    return [*found, chunks[0]]


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("vocabulary", "dtype"), [(507, BF16), (507, FP32), (9001, BF16)])
def test_a_row_alone_gives_the_bits_it_gives_among_others(device, beta, vocabulary, dtype):
    n = 64 if vocabulary < 1000 else 4
    generator = torch.Generator().manual_seed(0)
    x, y = 4.0 * torch.randn(2, n, vocabulary, generator=generator)
    labels = torch.randint(0, vocabulary, (n,), generator=generator).to(device)
    temperatures = (0.5 + torch.rand(n, generator=generator)).to(device)
    arguments = (x.to(device, dtype), y.to(device), labels, temperatures)
    together = divergence_and_gradients(*arguments, beta)
    for i in (0, n // 2 + 1, n - 1):
        one = [z[i : i + 1].clone() for z in arguments]
        assert_same_bits(divergence_and_gradients(*one, beta), [z[i : i + 1] for z in together])


@interpreted
@pytest.mark.parametrize("beta", BETAS)
def test_floats_that_arrive_as_double_change_no_bit(device, beta):
    inputs = batch(3, 507, dtype=BF16, device=device)
    options = {"temperature": 0.7, "softcap": 7.3, "logit_scale": 1.1, "beta": beta}
    options |= {"teacher_softcap": 5.3, "teacher_logit_scale": 0.9, "backend": "triton"}
    plain = run(inputs, **options)
    with floats_arrive_as_double():
        assert_same_bits(run(inputs, **options), plain)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("rest", ["bucket", "renormalised"])
def test_a_label_of_almost_all_probability_has_its_gradient_rounded_once(
    backend, device, where, rest
):
    """In bf16 p itself would leave nothing of 1 - p."""
    inputs = batch(6, 60, kind=rest, dtype=BF16, device=device, bias=True)
    inputs["bias"][3], inputs["labels"][:] = 18.0, 3
    ids = torch.arange(7, device=device).expand(6, 7)
    inputs["teacher_ids"] = ids if where == "inside" else ids + 20

    def of_logprobs(op: Any, **given: Any) -> Tensor:
        given |= {"rest": rest, "beta": 0.5}
        found = called(op, given, **({} if op is reference.linear_kl else {"backend": backend}))
        return found[1] + 1e-3 * found[0]

    tensors = {k: x for k, x in inputs.items() if isinstance(x, Tensor)}
    ops = (functools.partial(of_logprobs, op) for op in (linear_kl, reference.linear_kl))
    found = judge(*ops, tensors, wrt=LEAVES, own_dtypes=True)
    assert found["dhidden"].any()


# What it is called with.


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_multiplies_in_its_dtype(backend, device, kind):
    """Both heads; gradients come back in fp32, the weight's not rounded before."""
    inputs = batch(5, 300, kind=kind, device=device, bias=True)
    low = {k: x.to(BF16) if k.removeprefix("teacher_") in LEAVES else x for k, x in inputs.items()}
    options = {"beta": 0.3, "backend": backend}
    with gemm.using({"bfloat16": gemm.MM}):
        with torch.autocast(device, dtype=BF16):
            results = run(inputs, **options)
            _, of_loss, _ = run_loss(inputs, **options)
        expected = run(low, **options)
    assert [x.dtype for x in results] == [FP32] * 6
    for gradient in (results[4], of_loss["weight"]):
        assert not torch.equal(gradient, gradient.to(BF16).float())
    for x, e in zip(results, expected, strict=True):
        near = max(torch.finfo(e.dtype).eps, 1e-5)
        torch.testing.assert_close(x.to(e.dtype), e, rtol=near, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [1, 2])
def test_a_shift_is_slicing(backend, device, kind, shift):
    whole = batch(2, 5, 60, device=device, bias=True)
    later = batch(2, 5 - shift, 60, kind=kind, device=device, bias=True)
    teacher = {k: x for k, x in later.items() if k.startswith("teacher_") or k == "rest"}
    student = {k: whole[k] for k in (*LEAVES, "labels")} | teacher
    sliced = student | {
        "hidden": student["hidden"][:, :-shift], "labels": student["labels"][:, shift:],
    }  # fmt: skip
    *found, by_hidden, by_weight, by_bias = run(student, shift=shift, backend=backend)
    assert not by_hidden[:, -shift:].any()
    found += [by_hidden[:, :-shift], by_weight, by_bias]
    assert_same_bits(found, run(sliced, backend=backend))


HEAD = {
    "hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(9, 4),
    "labels": torch.zeros(2, 3, dtype=torch.int64),
}  # fmt: skip
STATES, OTHER = torch.zeros(2, 3, 5), torch.zeros(9, 5)
IDS = torch.arange(4).expand(2, 3, 4)
LOGPROBS = torch.full((2, 3, 4), -2.0)


def of_head(*tensors: Any, **fields: Any) -> dict[str, Any]:
    return {"teacher": TeacherHead(*tensors, **fields)}


def of_tokens(
    ids: Tensor = IDS, logprobs: Tensor = LOGPROBS, rest: str = "bucket"
) -> dict[str, Any]:
    return {"teacher": TeacherTokens(ids, logprobs, rest)}


NO_DISTRIBUTION = r"row 5 of teacher.ids and teacher.logprobs is no distribution: ids must be disti"


def last(x: Tensor, *values: float) -> Tensor:
    """A copy with other values at the end of the last row."""
    x = x.clone()
    x[-1, -1, -len(values) :] = torch.tensor(values).to(x)
    return x


@together("op", [linear_kl, linear_kl_loss])
@together(("change", "error", "message"), [
    ({"beta": torch.tensor(0.5)}, TypeError, "beta must be a Python number: reading"),
    ({"beta": -0.1}, ValueError, r"beta must lie in \[0, 1\], got -0.1: 0 is KL\(q || p\)"),
    ({"beta": 1.5}, ValueError, r"beta must lie in \[0, 1\], got 1.5"),
    ({"beta": math.nan}, ValueError, r"beta must lie in \[0, 1\], got nan"),
    ({"beta": "0.5"}, TypeError, "beta must be a number, got str"),
    ({"teacher": OTHER}, TypeError, r"teacher is a Tensor: pass TeacherHead\(hidden, weight\) or"),
    ({"teacher": (STATES, OTHER)}, TypeError, "teacher is a tuple: pass TeacherHead"),
    (of_head(STATES.clone().requires_grad_(), OTHER), ValueError, "teacher.hidden requires a grad"),
    (of_head(STATES, OTHER.clone().requires_grad_()), ValueError, "teacher.weight requires a grad"),
    (of_head(STATES, OTHER, torch.zeros(9, requires_grad=True)), ValueError, "teacher.bias requ"),
    (of_head(STATES[:1], OTHER), ValueError,
     r"teacher.hidden has shape \(1, 3, 5\): it must be \(2, 3, 5\), a state for each result"),
    (of_head(STATES[..., :4], OTHER), ValueError,
     r"teacher.hidden has shape \(2, 3, 4\), teacher.weight \(9, 5\): they must be"),
    (of_head(STATES, OTHER[0]), ValueError, r"teacher.weight has shape \(5,\): it must be \[V, H"),
    (of_head(STATES, OTHER[:8]), ValueError,
     "teacher.weight has 8 rows, weight 9: both must have .* pass vocabulary=, the number of real"),
    (of_head(STATES.long(), OTHER), TypeError, "teacher.hidden must be float32"),
    (of_head(STATES.to(BF16), OTHER), TypeError, "teacher.hidden is torch.bfloat16, teacher.wei"),
    (of_head(STATES, OTHER.to("meta")), ValueError, "teacher.weight is on meta, teacher.hidden"),
    (of_head(STATES.to("meta"), OTHER.to("meta")), ValueError, "teacher.hidden is on meta, hidden"),
    (of_head(STATES, OTHER, torch.zeros(8)), ValueError, r"teacher.bias has shape \(8,\): it must"),
    (of_head(STATES, OTHER, torch.zeros(9).long()), TypeError, "teacher.bias must be float32"),
    (of_head(STATES, OTHER, softcap=0.0), ValueError, "teacher.softcap must be positive and finit"),
    (of_head(STATES, OTHER, logit_scale=-1.0), ValueError, "teacher.logit_scale must be positive"),
    (of_head(STATES, OTHER, logit_scale=math.inf), ValueError, "teacher.logit_scale must be posit"),
    ({"vocabulary": 0}, ValueError, "vocabulary must be at least 1, got 0"),
    ({"vocabulary": 8.0}, TypeError, "vocabulary must be an int"),
    ({"vocabulary": 10}, ValueError,
     "weight has 9 rows, less than vocabulary=10: it must have one for each token"),
    ({"vocabulary": 9, **of_head(STATES, OTHER[:8])}, ValueError,
     "teacher.weight has 8 rows, less than vocabulary=9: it must have one for each token"),
    (of_tokens(rest="none"), ValueError, "unknown teacher.rest 'none': choose one of bucket, ren"),
    (of_tokens(logprobs=LOGPROBS.long()), TypeError, "teacher.logprobs must be float32"),
    (of_tokens(logprobs=LOGPROBS.clone().requires_grad_()), ValueError, "teacher.logprobs requir"),
    (of_tokens(ids=IDS.float()), TypeError, "teacher.ids must be integers, got torch.float32"),
    (of_tokens(ids=IDS > 0), TypeError, "teacher.ids must be integers, got torch.bool"),
    (of_tokens(ids=IDS.to("meta")), ValueError, "teacher.ids is on meta, hidden on cpu"),
    (of_tokens(logprobs=LOGPROBS.to("meta")), ValueError, "teacher.logprobs is on meta"),
    (of_tokens(ids=IDS[:1]), ValueError,
     r"teacher.ids has shape \(1, 3, 4\): it must be \(2, 3, 'K'\), K tokens for each result"),
    (of_tokens(logprobs=LOGPROBS[0]), ValueError, r"teacher.logprobs has shape \(3, 4\): it must"),
    (of_tokens(IDS[..., :0], LOGPROBS[..., :0]), ValueError, r"teacher.ids has shape \(2, 3, 0\)"),
    (of_tokens(ids=IDS[..., :3]), ValueError,
     r"teacher.ids has shape \(2, 3, 3\), teacher.logprobs \(2, 3, 4\): they must be equal"),
    (of_tokens(ids=last(IDS, 9)), ValueError, NO_DISTRIBUTION + r"nct and in \[0, 9\)"),
    (of_tokens(ids=last(IDS, -1)), ValueError, NO_DISTRIBUTION),
    (of_tokens(ids=last(IDS, 1)), ValueError, NO_DISTRIBUTION),
    (of_tokens(logprobs=last(LOGPROBS, -0.1, -0.9)), ValueError, NO_DISTRIBUTION),
    (of_tokens(logprobs=last(LOGPROBS, *[-math.inf] * 4), rest="renormalised"), ValueError,
     NO_DISTRIBUTION),
    ({"mask": torch.ones(2, 4, dtype=torch.bool)}, ValueError, "mask has shape"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be at least 1, got 0"),
    ({"backend": "cuda"}, ValueError, "unknown backend"),
])  # fmt: skip
def test_what_is_refused_and_why(op, change, error, message):
    given = {**HEAD, **of_head(STATES, OTHER), "backend": "torch", **change}
    with pytest.raises(error, match=message):
        op(**given)


@together(("change", "error", "message"), [
    ({"weights": torch.ones(2, 4)}, ValueError, r"weights has shape \(2, 4\), labels"),
    ({"weights": torch.ones(2, 3).long()}, TypeError, "weights must be float32"),
    ({"weights": torch.ones(2, 3, requires_grad=True)}, ValueError, "weights requires a grad"),
    ({"weights": torch.ones(2, 3, device="meta")}, ValueError, "weights is on meta"),
    ({"denominator": -1.0}, ValueError, "denominator must be at least 0 and finite, got -1.0"),
    ({"denominator": torch.ones(2)}, ValueError, "denominator must be a number or a 0-d tensor"),
])  # fmt: skip
def test_what_the_loss_refuses_and_why(change, error, message):
    with pytest.raises(error, match=message):
        linear_kl_loss(**HEAD, **of_head(STATES, OTHER), **change)


@pytest.mark.parametrize("beta", BETAS)
def test_tokens_that_are_no_distribution_are_nan_where_reading_them_would_wait(device, beta):
    inputs = batch(4, 60, kind="bucket", device=device)
    inputs["teacher_ids"][1, 2], inputs["teacher_logprobs"][3, 0] = 60, 0.1
    divergences, logprobs, _, by_hidden, _ = run(inputs, beta=beta, backend="triton")
    assert divergences.isnan().tolist() == [False, True, False, True]
    assert by_hidden.isnan().all(-1).tolist() == [False, True, False, True]
    assert logprobs.isfinite().all()
    with pytest.raises(ValueError, match=r"row 1 of teacher.ids and teacher.logprobs is no dis"):
        called(linear_kl, inputs, check_labels=True, backend="triton")


def test_log_probs_in_bf16_may_add_up_to_more_than_one(backend, device):
    """As those of 100 equal tokens do, each rounded up."""
    inputs = batch(3, 100, kind="renormalised", device=device)
    inputs["teacher_ids"] = torch.arange(100, device=device).expand(3, 100)
    inputs["teacher_logprobs"] = torch.full((3, 100), -math.log(100), device=device).to(BF16)
    assert inputs["teacher_logprobs"].double().exp().sum(-1).min() > 1.01
    found = called(linear_kl, inputs, beta=0.0, backend=backend).divergences
    log_p = F.linear(inputs["hidden"].double(), inputs["weight"].double()).log_softmax(-1)
    wanted = kl(torch.full_like(log_p, -math.log(100)), log_p)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    inputs = batch(3, 101, kind="bucket", device=device) | {
        k: inputs[k] for k in ("teacher_ids", "teacher_logprobs")
    }  # nothing is left for the last token
    assert called(linear_kl, inputs, beta=0.0, backend=backend).divergences.isfinite().all()
