"""linear_logprobs: values, gradients and memory, on both backends."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastrl_kernels import gemm, linear_logprobs, reference
from fastrl_kernels.lm_head import column_chunks, row_chunks
from tests.kernels.judge import DTYPES, assert_close_to_exact, judge, names
from tests.kernels.launches import allocations
from tests.kernels.roundings import Rounded

BF16, FP32 = torch.bfloat16, torch.float32
PER_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
LEAVES = ("hidden", "weight", "bias")
Inputs = dict[str, Any]


def batch(
    *shape: int, width=8, dtype=FP32, device="cpu", scale=3.0, shift=0.0, bias=False, seed=0
) -> Inputs:
    """Inputs for logits [*shape] of about the given standard deviation and mean."""
    *leading, vocabulary = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * (scale / (width - 1) ** 0.5)
    hidden[..., -1], weight[:, -1] = 1.0, shift
    inputs = {
        "hidden": hidden.to(device, dtype),
        "weight": weight.to(device, dtype),
        "labels": torch.randint(0, vocabulary, tuple(leading), generator=generator).to(device),
    }
    if bias:
        inputs["bias"] = torch.randn(vocabulary, generator=generator).to(device, dtype)
    return inputs


def with_holes(inputs: Inputs) -> Inputs:
    """A mask, and labels of -100 besides."""
    generator = torch.Generator().manual_seed(7)
    labels = inputs["labels"].clone()
    mask = torch.rand(labels.shape, generator=generator).to(labels.device) < 0.7
    labels[torch.rand(labels.shape, generator=generator).to(labels.device) < 0.15] = -100
    return {**inputs, "labels": labels, "mask": mask}


def temperatures(inputs: Inputs) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    labels = inputs["labels"]
    return (0.5 + 2.0 * torch.rand(labels.shape, generator=generator)).to(labels.device)


def judged(inputs: Inputs, backend: str, **options: Any) -> dict[str, Tensor]:
    """Judges log-probs, entropies and the gradients of every input that has one."""
    options.setdefault("entropy", True)
    limits = {"workspace_bytes": options.pop("workspace_bytes", None), "backend": backend}
    op = functools.partial(linear_logprobs, **options, **limits)
    formula = functools.partial(reference.linear_logprobs, **options)
    wrt = [name for name in LEAVES if name in inputs]
    return judge(op, formula, inputs, wrt=wrt, own_dtypes=True)


def run(inputs: Inputs, wrt: tuple[str, ...] = LEAVES, **options: Any) -> list[Tensor]:
    """Log-probs, entropies, and gradients by ``wrt`` for fixed upstream gradients."""
    leaves = {k: inputs[k].detach().requires_grad_() for k in wrt if k in inputs}
    logprobs, entropies = linear_logprobs(**{**inputs, **leaves}, entropy=True, **options)
    total = (logprobs - 0.3 * entropies).sum()
    return [logprobs.detach(), entropies.detach(), *torch.autograd.grad(total, [*leaves.values()])]


def assert_same_bits(actual, expected) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


VARIANTS = {
    "plain": {}, "softcap": {"softcap": 5.0}, "scale": {"logit_scale": 0.25},
    "temperature": {"temperature": 0.7},
    "everything": {"softcap": 8.0, "logit_scale": 1.5},  # and a bias, temperatures, holes
}  # fmt: skip
MANY, WORKSPACE = (11, 2500), 15_000


@PER_DTYPE
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(backend, device, dtype, variant):
    full = variant == "everything"
    inputs = batch(9, 507, dtype=dtype, device=device, bias=full)
    if full:
        inputs = with_holes(inputs)
        inputs["temperature"] = temperatures(inputs)
    judged(inputs, backend, **VARIANTS[variant])


@PER_DTYPE
def test_many_chunks(backend, device, dtype):
    """Of rows forward, and of rows within chunks of columns backward."""
    inputs = with_holes(batch(*MANY, dtype=dtype, device=device, bias=True))
    inputs["temperature"] = temperatures(inputs)
    judged(inputs, backend, softcap=8.0, logit_scale=1.5, workspace_bytes=WORKSPACE)


def test_what_many_chunks_are():
    n, vocabulary = MANY
    for itemsize, forward, backward in ((4, 11, 4), (2, 4, 2)):
        budget = WORKSPACE
        again = row_chunks(n, vocabulary, itemsize, budget)[-1].start
        columns = column_chunks(again, vocabulary, itemsize, budget)
        assert len(row_chunks(n, vocabulary, itemsize, budget)) == forward
        assert len(columns) == 3
        assert len(row_chunks(again, columns[0].stop, itemsize, budget)) == backward


@pytest.mark.parametrize("workspace", [1, None])
def test_a_tiny_workspace_holds_a_row(backend, device, workspace):
    judged(batch(3, 40, device=device), backend, workspace_bytes=workspace)


@pytest.mark.parametrize("which", [0, 1])
def test_gradient_of_either_result_alone(backend, device, which):
    inputs = batch(6, 300, device=device, bias=True)

    def of_one(function, **given):
        return function(**given, entropy=True, softcap=6.0)[which]

    op = functools.partial(of_one, functools.partial(linear_logprobs, backend=backend))
    formula = functools.partial(of_one, reference.linear_logprobs)
    judge(op, formula, inputs, wrt=LEAVES, own_dtypes=True)


def test_logprobs_alone(backend, device):
    judged(batch(6, 300, device=device), backend, entropy=False)


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 503, 507, 50257, 129920, 151936, 152064])
def test_a_peaked_softmax_over_any_vocabulary(backend, device, vocabulary):
    """Far below 0: a tail filled with zeros would add exp(0 - max) for every padded column."""
    inputs = batch(2, vocabulary, width=4, dtype=BF16, device=device, shift=-40.0)
    inputs["weight"][inputs["labels"][0], -1] = -5.0
    inputs["weight"][0, -1] = -8.0
    judged(inputs, backend, workspace_bytes=2 * 60_000 if vocabulary > 10_000 else None)


@pytest.mark.parametrize(("scale", "shift"), [(1, 300), (10, 0), (10, 300), (10, -300), (0, 0)])
def test_far_from_zero_and_widely_spread(backend, device, scale, shift):
    judged(batch(6, 1000, device=device, scale=scale, shift=shift), backend)


def test_impossible_tokens_add_nothing_and_get_no_gradient(backend, device):
    inputs = batch(5, 9001, device=device, bias=True)
    inputs["bias"][:8500] = -torch.inf  # whole windows
    inputs["bias"][8600::2] = -torch.inf
    inputs["labels"] = torch.tensor([8500, 8501, 9000 - 1, 8601, 8700], device=device)
    possible = inputs["bias"] != -torch.inf
    assert possible[inputs["labels"]].tolist() == [True, True, True, True, False]
    counted = {**inputs, "mask": torch.tensor([True] * 4 + [False], device=device)}
    results = judged(counted, backend, workspace_bytes=80_000)
    for name in ("dweight", "dbias"):
        assert results[name].isfinite().all()
        assert not results[name][~possible].any()
    assert results["output 1"].isfinite().all()
    logprobs, entropies, *_ = run(inputs, backend=backend)
    assert logprobs[4] == -torch.inf
    assert entropies.isfinite().all()


@pytest.mark.parametrize("leading", [(), (1,), (3, 1), (2, 3), (2, 1, 3)], ids=str)
def test_any_leading_shape(backend, device, leading):
    inputs = with_holes(batch(*leading, 50, device=device))
    results = judged(inputs, backend, temperature=1.3)
    assert results["output 0"].shape == leading


LAYOUTS = {
    "every other step": lambda x: torch.stack([x, x], 1)[:, 0],
    "transposed": lambda x: x.t().contiguous().t(),
    "slice": lambda x: torch.nn.functional.pad(x, (3, 2), value=torch.nan)[:, 3:-2],
    "expanded": lambda x: x[:, :1].expand_as(x),
    "overlapping": lambda x: x.as_strided(x.shape, (1, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["hidden", "weight"])
def test_any_strides(backend, device, which, layout):
    inputs = batch(5, 1200, dtype=BF16, device=device)
    inputs[which] = LAYOUTS[layout](inputs[which])
    judged(inputs, backend, workspace_bytes=10_000)


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_gradients_reach_only_those_who_ask(backend, device, wanted):
    """A frozen head costs no memory of its size, forward or backward."""
    inputs = batch(5, 1100, width=64, device=device, bias=True)
    options = {"workspace_bytes": 10_000, "backend": backend}
    everything = dict(zip(LEAVES, run(inputs, **options)[2:], strict=True))
    with allocations(*inputs.values()) as found:
        results = run(inputs, wanted, **options)
    assert_same_bits(results[2:], [everything[name] for name in wanted])
    of_head = [what for size, what in found if size >= inputs["weight"].nbytes]
    assert bool(of_head) == ("weight" in wanted), of_head


def assert_logits_never_exist(
    run, make, device, dtype=FP32, free=lambda: None, n=12, workspace=8_500, **options
):
    """Nothing of N·V elements, not even of a byte each: a chunk, and its two fp32 copies, which
    the CPU needs; or a buffer of the size of a gradient, in fp32."""
    vocabulary, width = 2048, 2
    inputs = make(n, vocabulary, width=width, dtype=dtype, device=device, bias=True)
    limit = max(2 * workspace, 4 * vocabulary * width)
    assert limit < n * vocabulary
    run(inputs, workspace_bytes=workspace, **options)  # libraries are chosen at the first call
    free()  # what made the batch
    with allocations(*inputs.values()) as found:
        run(inputs, workspace_bytes=workspace, **options)
    size, what = max(found)
    assert size <= limit, what


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_logits_never_exist(backend, device, dtype):
    assert_logits_never_exist(run, batch, device, dtype, backend=backend)


def test_nothing_is_kept_where_no_gradient_is_wanted(backend, device):
    inputs = batch(3, 100, device=device)
    assert linear_logprobs(**inputs, backend=backend).grad_fn is None
    inputs["weight"].requires_grad_()
    with torch.no_grad():
        assert linear_logprobs(**inputs, backend=backend).grad_fn is None


@pytest.mark.parametrize("workspace", [None, WORKSPACE])
def test_runs_give_the_same_bits(backend, device, workspace):
    inputs = batch(*MANY, dtype=BF16, device=device, bias=True)
    first, second = (run(inputs, workspace_bytes=workspace, backend=backend) for _ in range(2))
    assert_same_bits(first, second)


@pytest.mark.parametrize("workspace", [None, WORKSPACE])
def test_a_retained_graph_gives_its_gradients_again(backend, device, workspace):
    inputs = batch(5, 2500, device=device, bias=True)
    leaves = [inputs[name].requires_grad_() for name in LEAVES]
    logprobs, entropies = linear_logprobs(
        **inputs, entropy=True, workspace_bytes=workspace, backend=backend
    )
    upstream = [torch.ones_like(logprobs), torch.full_like(entropies, -0.3)]
    first, *others = (
        torch.autograd.grad([logprobs, entropies], leaves, upstream, retain_graph=True)
        for _ in range(3)
    )
    assert_same_bits(*others)

    def formula(dtype):
        given = {k: x.detach().to(dtype) if k in LEAVES else x for k, x in inputs.items()}
        leaves = [given[name].requires_grad_() for name in LEAVES]
        results = reference.linear_logprobs(**given, entropy=True)
        return torch.autograd.grad(results, leaves, [x.to(dtype) for x in upstream])

    runs = Rounded(lambda: formula(FP32))
    for i, (x, right, name) in enumerate(
        zip(others[0], formula(torch.float64), LEAVES, strict=True)
    ):
        for each in (first[i], x):
            assert_close_to_exact(each, runs[i], right, name)


@pytest.mark.parametrize(
    ("poison", "workspace"), [(torch.nan, None), (torch.nan, 8_000), (torch.inf, 8_000)]
)
def test_what_stands_at_masked_places_never_shows(backend, device, poison, workspace):
    inputs = with_holes(batch(3, 4, 507, device=device, bias=True))
    inputs["temperature"] = temperatures(inputs)
    counted = inputs["mask"] & (inputs["labels"] != -100)
    dirty = {
        **inputs,
        "hidden": torch.where(counted[..., None], inputs["hidden"], poison),
        "labels": torch.where(inputs["mask"], inputs["labels"], 10**9),
        "temperature": torch.where(counted, inputs["temperature"], poison),
    }
    options = {"workspace_bytes": workspace, "backend": backend, "softcap": 9.0}
    expected, actual = run(inputs, **options), run(dirty, **options)
    assert_same_bits(actual, expected)
    for x in actual[:3]:
        assert not x[~counted].any()
        assert x[counted].any()
    assert all(x.isfinite().all() for x in actual)


def test_upstream_gradients_at_masked_places_are_not_read(backend, device):
    inputs = with_holes(batch(4, 8, 50, device=device))
    leaves = [inputs[name].requires_grad_() for name in ("hidden", "weight")]
    counted = inputs["mask"] & (inputs["labels"] != -100)
    results = linear_logprobs(**inputs, entropy=True, backend=backend)
    upstream = torch.where(counted, 1.0, torch.nan)
    for gradient in torch.autograd.grad(results, leaves, [upstream, upstream]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0)], ids=str)
def test_no_tokens(backend, device, shape):
    results = run(batch(*shape, 60, device=device, bias=True), backend=backend)
    assert results[0].shape == results[1].shape == shape
    assert [x.shape for x in results[2:]] == [(*shape, 8), (60, 8), (60,)]
    assert not any(x.any() for x in results)


@pytest.mark.parametrize("workspace", [None, 8_000])
def test_autocast_multiplies_in_its_dtype(backend, device, workspace):
    """As nn.Linear under autocast; gradients come back in fp32, the weight's not rounded before."""
    inputs = batch(5, 1500, device=device, bias=True)
    with gemm.using({"bfloat16": gemm.MM}):  # products in bf16 round their pieces
        with torch.autocast(device, dtype=BF16):
            results = run(inputs, workspace_bytes=workspace, backend=backend)
        low = {k: x.to(BF16) if k in LEAVES else x for k, x in inputs.items()}
        expected = run(low, workspace_bytes=workspace, backend=backend)
    assert [x.dtype for x in results] == [FP32] * 5
    assert not torch.equal(results[3], results[3].to(BF16).float())
    for x, e in zip(results, expected, strict=True):
        x = x.to(e.dtype)  # sums of another order may round the other way, few of them
        torch.testing.assert_close(x, e, rtol=max(torch.finfo(e.dtype).eps, 1e-5), atol=1e-6)
        assert e.dtype == FP32 or (x != e).float().mean() < 0.01


def test_a_bias_in_fp32_beside_a_bf16_head(backend, device):
    inputs = batch(5, 60, dtype=BF16, device=device, bias=True)
    inputs["bias"] = inputs["bias"].float()
    gradient = run(inputs, backend=backend)[-1]
    assert gradient.dtype == FP32


def test_a_gradient_flows_to_what_made_the_hidden_states(backend, device):
    inputs = batch(5, 60, device=device)

    def of_model(function, **given):
        return function(**{**given, "hidden": torch.tanh(given["hidden"])[..., 1:]})

    inputs["weight"] = inputs["weight"][:, 1:]
    op = functools.partial(of_model, functools.partial(linear_logprobs, backend=backend))
    formula = functools.partial(of_model, reference.linear_logprobs)
    judge(op, formula, inputs, wrt=["hidden", "weight"], own_dtypes=True)


def test_logits_in_the_graph_are_those_of_the_head(backend, device):
    """In bf16, log-probs are those of the model's own rounded logits, to fp32's precision."""
    inputs = batch(7, 500, dtype=BF16, device=device)
    logits = torch.nn.functional.linear(inputs["hidden"], inputs["weight"])
    runs = Rounded(lambda: reference.token_logprobs(logits.float(), inputs["labels"]))
    exact = reference.token_logprobs(logits.double(), inputs["labels"])
    assert_close_to_exact(linear_logprobs(**inputs, backend=backend), runs, exact, "logprobs")
