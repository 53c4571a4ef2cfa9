"""Every op inside ``torch.compile(fullgraph=True)``: no graph break, and the results of eager mode.

What is compiled runs the code of eager mode, so that results and gradients have the same bits.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fastrl_kernels as ops
from fastrl_kernels.token_sets import packed
from tests.kernels.launches import interpreted, watched
from tests.kernels.test_import import python

HIDDEN, VOCABULARY = 8, 37
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Whose whole work is one operator, or two, so that Triton's kernels run in compiled code as well.
OPERATORS = {
    "full_kl", "linear_kl", "linear_kl_loss", "linear_logprobs", "linear_nll_loss",
    "linear_ppo_loss", "linear_sample", "sample_keys", "sample_tokens", "sample_with_support",
    "token_logprobs",
}  # fmt: skip
LEAVES = 10  # of the fields below


class Inputs(NamedTuple):
    """Leaves, constants, and two numbers that differ from size to size."""

    logits: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    new: Tensor
    ref: Tensor
    values: Tensor
    scores: Tensor
    chosen: Tensor
    rejected: Tensor
    labels: Tensor
    mask: Tensor
    old: Tensor
    temperature: Tensor
    half: float
    index: int


def inputs(n: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Inputs:
    generator = torch.Generator().manual_seed(n)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    labels = torch.randint(0, VOCABULARY, (2, n), generator=generator)
    labels[0, 0] = -100
    return Inputs(
        leaf(2, n, VOCABULARY), leaf(2, n, HIDDEN), leaf(VOCABULARY, HIDDEN), leaf(VOCABULARY),
        leaf(2, n), leaf(2, n), leaf(2, n), leaf(2), leaf(n), leaf(n),
        labels.to(device),
        (torch.rand(2, n, generator=generator) < 0.7).to(device),
        torch.randn(2, n, generator=generator).to(device, dtype),
        0.5 + torch.rand(2, n, generator=generator).to(device),
        0.4 + n / 50,
        n,
    )  # fmt: skip


def _head(op: Callable[..., Any], x: Inputs, **options: Any) -> Any:
    return op(x.hidden * 2, x.weight, x.labels, workspace_bytes=1000, **options)


def loss(x: Inputs, **options: Any) -> tuple[Tensor, ...]:
    value, stats = ops.linear_ppo_loss(
        x.hidden * 2, x.weight, x.labels, x.old, x.old.square(), x.mask,
        **{"workspace_bytes": 1000, **options},
    )  # fmt: skip
    return value, stats.tensor, stats.logprobs, stats.entropies, stats.mean_ratio


def _teacher(x: Inputs) -> ops.TeacherHead:
    hidden = x.hidden.detach().repeat(1, 1, 2)
    return ops.TeacherHead(hidden, torch.cat([x.weight.detach()] * 2, -1), logit_scale=0.3)


def _teacher_tokens(x: Inputs, rest: str = "bucket") -> ops.TeacherTokens:
    ids = torch.arange(VOCABULARY, device=x.labels.device)[::9].expand(*x.labels.shape, -1)
    return ops.TeacherTokens(ids, x.logits.detach()[..., :5].float().sigmoid() - 2.8, rest)


def _kl(op: Callable[..., Any], x: Inputs, teacher: Any, **options: Any) -> Any:
    return op(x.hidden * 2, x.weight, x.labels, teacher, workspace_bytes=1000, **options)


def _sampled(x: Inputs, op: Callable[..., Any] = ops.sample_tokens, **options: Any) -> Any:
    keys = ops.sample_keys(1, torch.arange(x.labels.numel(), device=x.labels.device), 3)
    return op(x.logits.flatten(0, 1), keys, **options)


def _with_support(x: Inputs, **options: Any) -> Any:
    drawn, words = _sampled(x, ops.sample_with_support, **options)
    return *drawn, words


def _drawn(x: Inputs, **options: Any) -> Any:
    keys = ops.sample_keys(1, torch.arange(x.labels.numel(), device=x.labels.device), 3)
    return ops.linear_sample(x.hidden.flatten(0, 1), x.weight, keys, **options)


def _attended(x: Inputs, **options: Any) -> Tensor:
    """Three heads that share one, over tokens of 8 features."""
    cache = x.hidden.detach().unsqueeze(2)
    query = x.weight.detach()[:6].unflatten(0, (2, 3))
    return ops.decode_attention(query, cache, cache, x.mask.sum(-1), **options)


def _rotated(x: Inputs, **options: Any) -> tuple[Tensor, ...]:
    """Two heads of 4 features of a token in each of two slots, and what the slots hold then."""
    heads = x.hidden.detach()[:, 0].unflatten(1, (2, HIDDEN // 2))
    cache = x.hidden.detach().unflatten(2, (2, HIDDEN // 2))
    keys, values = cache * 1.0, cache * 2.0
    angles = x.weight.detach()[:2, : HIDDEN // 2]
    out = ops.rotate_and_store(
        heads, heads, heads, angles, angles, keys, values, x.mask.sum(-1) - 1, **options
    )
    return out, keys, values


def _advanced(x: Inputs, **options: Any) -> ops.SlotBuffers:
    """Two slots, of which the first runs."""
    columns = [x.mask.sum(-1) * 0 + n for n in (3, 0, 0, 9, 0)]
    columns[-1][1] = 1
    stored = x.labels * 0, torch.zeros(4, *x.labels.shape, device=x.labels.device)
    slots = ops.SlotBuffers(*columns, *stored)
    scores = x.values.detach()[:, 0].float()
    draw = ops.SampledTokens(x.labels[:, 1], *[scores] * 5)
    ops.advance_slots(slots, draw, x.labels[0, 1:2], values=scores, **options)
    return slots


def _ppo(x: Inputs, **options: Any) -> tuple[Tensor, ...]:
    loss, stats = ops.ppo_loss(x.new, x.old, x.old.square(), x.mask, **options)
    return loss, stats.tensor, stats.clipfrac


# By op and what is special; ``b`` is the backend.
CASES: dict[str, Callable[..., Any]] = {
    "advance_slots": lambda x, b: _advanced(x, backend=b),
    "decode_attention": lambda x, b: _attended(x, backend=b),
    "decode_attention numbers": lambda x, b: _attended(
        x, scale=x.half, softcap=x.half * 9, window=x.index - 2, span=x.index - 1, backend=b
    ),
    "dpo_loss": lambda x, b: ops.dpo_loss(x.chosen, x.rejected, x.old[0], x.old[1], beta=x.half),
    "full_kl": lambda x, b: ops.full_kl(x.logits * 2, x.logits.detach().exp(), backend=b),
    "full_kl masked": lambda x, b: ops.full_kl(
        x.logits * 2, x.logits.detach(), mask=x.mask, temperature=x.temperature, backend=b
    ),
    "full_kl number": lambda x, b: ops.full_kl(
        x.logits[:, :-1], x.logits.detach()[:, 1:], temperature=x.half, backend=b
    ),
    "gae": lambda x, b: ops.gae(x.new, x.values, gamma=0.9, lam=0.8, backend=b),
    "gae whitened": lambda x, b: ops.gae(
        x.new, x.values, x.mask, gamma=0.9, lam=0.8, whiten=True, backend=b
    ),
    "gae with ends": lambda x, b: ops.gae(
        x.new, x.values, x.mask, gamma=0.9, lam=0.8, bootstrap_value=x.ref, truncated=x.old > 1,
        terminated=x.old < -1, backend=b,
    ),
    "kl_penalty": lambda x, b: ops.kl_penalty(x.new, x.ref, "k3", mask=x.mask, backend=b),
    "kl_rewards": lambda x, b: ops.kl_rewards(
        x.new, x.ref, x.scores, x.mask, coef=x.half, backend=b
    ),
    "kl_rewards tensor": lambda x, b: ops.kl_rewards(
        x.new, x.ref, x.scores, x.mask, coef=x.temperature[0, 0], kind="mse", backend=b
    ),
    "linear_kl": lambda x, b: _kl(ops.linear_kl, x, _teacher(x), mask=x.mask, backend=b),
    "linear_kl with everything": lambda x, b: _kl(
        ops.linear_kl, x, _teacher(x)._replace(bias=x.bias.detach(), softcap=9.0), bias=x.bias,
        beta=0.3, temperature=x.temperature, softcap=3.0, logit_scale=0.5, entropy=True, backend=b,
    ),
    "linear_kl tokens": lambda x, b: _kl(
        ops.linear_kl, x, _teacher_tokens(x), bias=x.bias, beta=0.0, entropy=True, backend=b
    ),
    "linear_kl numbers": lambda x, b: _kl(
        ops.linear_kl, x._replace(weight=torch.cat([x.weight, x.weight[:3]])), _teacher(x),
        beta=x.half, temperature=x.half, vocabulary=VOCABULARY, backend=b,
    ),
    "linear_kl shift": lambda x, b: ops.linear_kl(
        x.hidden * 2, x.weight, x.labels, _teacher(x._replace(hidden=x.hidden[:, 1:])), shift=True,
        backend=b,
    ),
    "linear_kl_loss": lambda x, b: _kl(ops.linear_kl_loss, x, _teacher(x), mask=x.mask, backend=b),
    "linear_kl_loss with everything": lambda x, b: _kl(
        ops.linear_kl_loss, x, _teacher(x)._replace(bias=x.bias.detach(), softcap=9.0), beta=0.3,
        bias=x.bias, temperature=x.temperature, softcap=3.0, logit_scale=0.5, entropy=True,
        weights=x.old.exp(), denominator=x.temperature.sum().detach(), backend=b,
    ),
    "linear_kl_loss tokens": lambda x, b: _kl(
        ops.linear_kl_loss, x, _teacher_tokens(x, "renormalised"), mask=x.mask, denominator=7.0,
        backend=b,
    ),
    "linear_logprobs": lambda x, b: _head(ops.linear_logprobs, x, backend=b),
    "linear_logprobs entropy": lambda x, b: _head(
        ops.linear_logprobs, x, entropy=True, bias=x.bias, mask=x.mask, softcap=3.0, backend=b
    ),
    "linear_logprobs extras": lambda x, b: _head(
        ops.linear_logprobs, x, extras=("is_top1", "mean_logit"), temperature=x.temperature,
        backend=b,
    ),
    "linear_logprobs numbers": lambda x, b: _head(
        ops.linear_logprobs, x, temperature=x.half, softcap=x.half * 9, logit_scale=x.half,
        backend=b,
    ),
    "linear_logprobs shift": lambda x, b: ops.linear_logprobs(
        x.hidden * 2, x.weight, x.labels, shift=True, mask=x.mask[:, 1:], entropy=True, backend=b
    ),
    "linear_nll_loss": lambda x, b: ops.linear_nll_loss(
        x.hidden * 2, x.weight, x.labels, mask=x.mask, workspace_bytes=1000, backend=b
    ),
    "linear_nll_loss with everything": lambda x, b: ops.linear_nll_loss(
        x.hidden, x.weight, x.labels, bias=x.bias, softcap=3.0, logit_scale=0.5,
        weights=x.old.exp(), denominator=x.temperature.sum().detach(), backend=b,
    ),
    "linear_ppo_loss": lambda x, b: loss(x, backend=b),
    "linear_sample": lambda x, b: _drawn(x, backend=b),
    "linear_sample with everything": lambda x, b: _drawn(
        x, bias=x.bias, temperature=x.temperature.flatten(), softcap=3.0, logit_scale=0.5, backend=b
    ),
    "linear_sample number": lambda x, b: _drawn(x, temperature=x.half, backend=b),
    "linear_ppo_loss one chunk": lambda x, b: loss(x, workspace_bytes=None, backend=b),
    "linear_ppo_loss with everything": lambda x, b: loss(
        x, bias=x.bias, temperature=x.temperature, kl=ops.KLTerm(x.old + 1, 0.1), dual_clip=3.0,
        weights=x.old.exp(), token_weights=x.old.square(), aggregate="seq-mean-token-mean",
        entropy=True, backend=b,
        denominator=x.temperature.sum(),
    ),
    "linear_ppo_loss numbers": lambda x, b: loss(
        x, cliprange=x.half, denominator=x.half, logit_scale=x.half, backend=b
    ),
    "masked_mean": lambda x, b: ops.masked_mean(x.values, x.mask, backend=b),
    "masked_moments": lambda x, b: ops.masked_moments(x.values, x.mask, backend=b),
    "masked_var": lambda x, b: ops.masked_var(x.values, x.mask, backend=b),
    "masked_whiten": lambda x, b: ops.masked_whiten(x.values, x.mask, backend=b),
    "merge_moments": lambda x, b: ops.merge_moments(ops.Moments(x.old[0], x.old[1], x.old[0] + 1)),
    "ppo_loss": lambda x, b: _ppo(x, backend=b),
    "ppo_loss with everything": lambda x, b: _ppo(
        x, value=ops.ValueTerm(x.values, x.old, x.old + 1), kl=ops.KLTerm(x.old, 0.1),
        dual_clip=3.0, weights=x.old.exp(), token_weights=x.old.square(),
        aggregate="seq-mean-token-mean", denominator=x.temperature.sum(), backend=b,
    ),
    "ppo_loss numbers": lambda x, b: _ppo(
        x, dual_clip=1.1, denominator=700.1 + x.half, cliprange=0.1, backend=b
    ),
    "reward_loss": lambda x, b: ops.reward_loss(x.chosen, x.rejected, center_coef=0.1),
    "rms_norm": lambda x, b: ops.rms_norm(x.hidden, x.weight[0], residual=x.hidden * 2, backend=b),
    "rotate_and_store": lambda x, b: _rotated(x, backend=b),
    "sample_keys": lambda x, b: ops.sample_keys(x.index, x.labels[0], x.index, backend=b),
    "sample_keys tensors": lambda x, b: ops.sample_keys(
        x.labels[1], x.labels[0], x.labels[1], backend=b
    ),
    "sample_tokens": lambda x, b: _sampled(x, backend=b),
    "sample_tokens numbers": lambda x, b: _sampled(
        x, temperature=x.half, top_k=x.index, top_p=x.half, min_p=x.half / 20, backend=b
    ),
    "sample_tokens tensors": lambda x, b: _sampled(
        x, temperature=x.temperature.flatten(), top_k=x.labels.flatten().clamp(min=0),
        top_p=x.temperature.flatten().clamp(max=1), min_p=x.temperature.flatten() / 9, backend=b,
    ),
    "sample_with_support": lambda x, b: _with_support(x, top_k=5, backend=b),
    "sample_with_support tensors": lambda x, b: _with_support(
        x, temperature=x.temperature.flatten(), min_p=x.temperature.flatten() / 9, backend=b
    ),
    "sample_with_support allowed": lambda x, b: _with_support(
        x, allowed=packed(x.logits.flatten(0, 1) > 0), top_k=9, backend=b
    ),
    "swiglu": lambda x, b: ops.swiglu(x.hidden, x.hidden * 2, backend=b),
    "token_logprobs": lambda x, b: ops.token_logprobs(x.logits * 2, x.labels, backend=b),
    "token_logprobs entropy": lambda x, b: ops.token_logprobs(
        x.logits * 2, x.labels, mask=x.mask, temperature=x.temperature, entropy=True, backend=b
    ),
    "token_logprobs number": lambda x, b: ops.token_logprobs(
        x.logits[:, :-1], x.labels[:, 1:], temperature=x.half, entropy=True, backend=b
    ),
}  # fmt: skip


def _preference_loss(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call with what it asks for."""
    asked = [p.name for p in inspect.signature(op).parameters.values() if p.default is p.empty]

    def call(x: Inputs, _: str) -> Tensor:
        tensors = iter((-x.chosen.exp(), -x.rejected.exp(), x.old[0], x.old[1]))
        given = {"desirable": x.old[0] > 0, "kl": 0.1}
        return op(*(given[name] if name in given else next(tensors) for name in asked))

    return call


for _name in ops.preference.__all__:
    CASES.setdefault(_name, _preference_loss(getattr(ops, _name)))


def op_of(case: str) -> str:
    return case.split()[0]


# Triton's interpreter takes its time, and cases of an operator differ in front of it: one each.
INTERPRETED = [case for case in CASES if op_of(case) in OPERATORS and case == op_of(case)]
RUNS = [(case, "torch") for case in CASES] + [(case, "triton") for case in INTERPRETED]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def outcome(function: Callable[..., Any], x: Inputs, again: bool = False) -> list[Tensor]:
    """Results and gradients. ``again``: those of a second backward."""
    results = [y for y in tree_leaves(function(x)) if isinstance(y, Tensor)]
    leaves = [leaf for leaf in x[:LEAVES] if leaf.requires_grad]
    total = sum(
        (y * torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape)).sum()
        for y in results
        if y.requires_grad
    )
    gradients: tuple[Any, ...] = ()
    if isinstance(total, Tensor):
        for last in (False, True)[not again :]:
            gradients = torch.autograd.grad(total, leaves, retain_graph=not last, allow_unused=True)
        assert any(g is not None for g in gradients)
    return [y.detach() for y in results] + [g for g in gradients if g is not None]


def expected(case: str, backend: str, x: Inputs) -> list[Tensor]:
    # Eager mode keeps logits for its first backward, in another order of summation; compiled code
    # does as the second.
    again = op_of(case) == "linear_logprobs"
    return outcome(lambda x: CASES[case](x, backend), x, again)


def assert_same_bits(actual: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        assert (a.shape, a.dtype) == (w.shape, w.dtype)
        torch.testing.assert_close(a, w, rtol=0, atol=0, equal_nan=True)


def test_every_op_has_a_case():
    functions = [name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))]
    assert {op_of(case) for case in CASES} == {*functions} - {"explain", "linear_sample_pays"}


@pytest.mark.parametrize(("case", "backend"), RUNS)
def test_one_graph_for_all_sizes_with_the_bits_of_eager_mode(case, backend):
    function = torch.compile(
        lambda x: CASES[case](x, backend), backend="aot_eager", fullgraph=True, dynamic=True
    )
    assert_same_bits(outcome(function, inputs(6)), expected(case, backend, inputs(6)))
    x = inputs(9)
    # A number is compiled in: another one makes another graph, and a tensor does not.
    with torch._dynamo.config.patch(error_on_recompile="number" not in case):
        assert_same_bits(outcome(function, x), expected(case, backend, x))


@pytest.mark.parametrize(("case", "dtype"), [
    ("full_kl masked", torch.float16),
    ("linear_kl with everything", torch.bfloat16),
    ("linear_kl_loss tokens", torch.float16),
    ("linear_logprobs entropy", torch.bfloat16),
    ("linear_logprobs extras", torch.float16),
    ("linear_nll_loss with everything", torch.bfloat16),
    ("linear_ppo_loss with everything", torch.float16),
    ("sample_tokens tensors", torch.bfloat16),
    ("token_logprobs entropy", torch.float16),
], ids=str)  # fmt: skip
def test_static_shapes_and_low_precision(case, dtype):
    x = inputs(5, dtype)
    function = torch.compile(lambda x: CASES[case](x, "torch"), backend="aot_eager", fullgraph=True)
    assert_same_bits(outcome(function, x), expected(case, "torch", x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch._inductor.config.patch(fallback_by_default=True, fx_graph_cache=False)
def test_a_step_that_joins_ops_is_one_graph(backend):
    """With inductor, which asserts the strides that the operators' fakes promise; torch's own
    operations between them are called, not written in C++, which takes a compiler its time. No
    cache: its key does not contain the fakes."""

    def step(x: Inputs) -> tuple[Tensor, ...]:
        logprobs, entropies = ops.token_logprobs(
            x.logits[:, :-1] * 2, x.labels[:, 1:], mask=x.mask[:, 1:], entropy=True, backend="torch"
        )
        kl = ops.full_kl(x.logits, x.logits.detach() / 2, mask=x.mask, backend="torch")
        head = _head(ops.linear_logprobs, x, bias=x.bias, backend="torch")
        return logprobs - entropies, kl * 2, head.exp(), *loss(x, backend="torch")[:1]

    x = inputs(7)
    actual = outcome(torch.compile(step, backend=backend, fullgraph=True), x)
    for a, w in zip(actual, outcome(step, x), strict=True):
        torch.testing.assert_close(a, w, rtol=1e-5, atol=1e-5)


def test_autocast_reaches_the_head():
    def step(x: Inputs) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return _head(ops.linear_logprobs, x, backend="torch")

    x = inputs(7)
    function = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled, eager = outcome(function, x), outcome(step, x, again=True)
    # Eager autocast sums the weight's gradient in fp32, compiled code casts it from bf16.
    shape = x.weight.shape
    rounded = [y.to(torch.bfloat16).float() if y.shape == shape else y for y in eager]
    assert_same_bits(compiled, rounded)
    assert not torch.equal(step(x), _head(ops.linear_logprobs, x, backend="torch"))


@pytest.mark.parametrize(("case", "wanted"), [
    ("token_logprobs", r"labels\[1, 2\] is 37, outside"),
    ("linear_logprobs", r"labels\[1, 2\] is 37, outside"),
    ("sample_tokens tensors", r"temperature\[8\] must be 0 \(greedy\) or positive"),
])  # fmt: skip
def test_values_are_checked_when_compiled_code_runs(case, wanted):
    x = inputs(6, device="cpu")  # on a device, they are NaN in the results
    function = torch.compile(lambda x: CASES[case](x, "torch"), backend="aot_eager", fullgraph=True)
    function(x)
    x.labels[1, 2], x.temperature[1, 2] = VOCABULARY, -1.0
    with pytest.raises(ValueError, match=wanted):
        function(x)


def has_backend(case: str) -> bool:
    """Losses on whole responses are PyTorch everywhere, and keys a handful of operations."""
    return "backend" in inspect.signature(getattr(ops, op_of(case))).parameters


@interpreted
@pytest.mark.parametrize("case", [case for case in CASES if has_backend(case)])
def test_the_triton_path_reads_no_tensor_on_the_host(case):
    """What a graph contains may not depend on values, forward nor backward."""
    x = inputs(6)
    with watched() as calls:
        outcome(lambda x: CASES[case](x, "triton"), x)
    assert any(call.endswith("_kernel") for call in calls)


TRACE = """
import sys
import torch, torch._dynamo, torch.utils._triton
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from triton.runtime import driver
from tests.aot.worker import TARGETS, CompileOnlyDriver
from tests.kernels.test_compile import CASES, inputs

# As on a GPU, where the kernels are nodes of the graph.
driver.set_active(CompileOnlyDriver(TARGETS["sm_90"]))
torch.utils._triton.has_triton = lambda: True

class Traced(Exception):
    pass

def stop(graph, _):  # both directions are traced by now
    raise Traced(sum("triton" in str(node.target) for node in graph.graph.nodes))

for case in sys.argv[1:]:
    torch._dynamo.reset()
    function = torch.compile(
        lambda x: CASES[case](x, "triton"), fullgraph=True, dynamic=True,
        backend=aot_autograd(fw_compiler=stop, bw_compiler=stop),
    )
    try:
        function(inputs(6, device="cpu"))
    except torch._dynamo.exc.BackendCompilerFailed as error:
        assert isinstance(error.inner_exception, Traced), error
        print(case, "|", error.inner_exception)
"""


def test_triton_kernels_are_traced_without_a_graph_break():
    """Launches of the ops that are no operators become nodes, forward and backward; no GPU."""
    of_op = {op_of(case): case for case in CASES if has_backend(case)}  # its last, fullest case
    cases = [case for op, case in of_op.items() if op not in OPERATORS]
    found = dict(line.split(" | ") for line in python(TRACE, *cases).splitlines())
    assert list(found) == cases
    assert all(int(kernels) > 0 for kernels in found.values())
