"""How a kernel is judged: by what one rounding at each step of its formula does.

The plain PyTorch formula (`fastrl_kernels.reference`) is run several times on the same values in
fp32, each of its operations rounded up or down at random (`roundings`), and once in float64. A
kernel's error ‖x - exact‖ may be at most

    max_k (1.5 + 2.5/√n_k)·‖e_k‖ + 1e-7·‖exact‖,   e_k = run_k - exact,   n_k = (Σe_k²)²/Σe_k⁴,

where rounding to the nearest is half as large as rounding either way on average, and where the
error is that of a few numbers n_k these may all be unlucky. To this comes a rounding of the result;
6e-7 where kernels are compiled, for a GPU's exp2 is exact to 2^-22.5 and its quotient to 2^-22.
None of this depends on the machine: PyTorch's own error there may be small by luck.

Half-precision results of formulas in fp32, as gradients are, have to be rounded once, at the end:
that rounding is known, so what is judged is how far the exact number lies from those which are
rounded to the result.

Ops with matrix products are judged by the formula in the inputs' own dtypes (``own_dtypes``).
A model's head rounds its logits to bf16, and log-probs have to be those of the model, not of a
product that is exact: the formula in fp32 has no such rounding and would ask for one. In fp32 both
are the same, and what the op does to logits is held to fp32 there.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fastrl_kernels import dispatch
from tests.kernels.roundings import Rounded, spacing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOOR = 1e-7 if dispatch.interpreting() else 6e-7
NOTHING = 1e-15  # a difference of numbers near 1 that float64 does not resolve

Op = Callable[..., Tensor | tuple[Tensor, ...]]
# tests/headroom.py is told of each comparison, its error and what is allowed, of which it has runs
# go on until the error is less than a part.
watch: Callable[[str, float, float], None] | None = None
enough = 1.0


def names(dtypes: Sequence[torch.dtype]) -> list[str]:
    """Short test ids: ["float32", "bfloat16", ...]."""
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def assert_close_to_exact(actual: Tensor, runs: Iterable[Tensor], exact: Tensor, what: str) -> None:
    """The error is allowed that ``runs`` of the formula make, rounded at random; see above.

    Infinities must be where the exact number is, or has none near it in the result's dtype. Of
    ``Rounded`` runs no more are made than are needed.
    """
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    dtype = actual.dtype
    actual, exact = (x.detach().double().flatten() for x in (actual, exact))
    infinite = exact.to(dtype).isinf()
    wanted = exact.to(dtype)[infinite].double()
    torch.testing.assert_close(actual[infinite], wanted, msg=f"{what}: infinities differ")
    actual, exact = (x[~infinite] for x in (actual, exact))
    assert not exact.isnan().any(), f"{what}: the formula itself gives no number"
    difference = (actual - exact).abs()
    error, of_runs = difference.norm(), 0.0
    allowed = at_least = FLOOR * exact.norm() + NOTHING
    for run in runs if error > enough * at_least else ():
        if dtype.is_floating_point and torch.finfo(dtype).eps > torch.finfo(run.dtype).eps:
            rounding = spacing(torch.minimum(actual.abs(), exact.abs()), dtype) / 2
            error = (difference - rounding).clamp(min=0).norm()
        of_run = run.detach().double().flatten()[~infinite] - exact
        assert of_run.isfinite().all(), f"{what}: the formula itself gives no number"
        of_runs = max(of_runs, (1.5 + 2.5 / spread(of_run) ** 0.5) * of_run.norm())
        allowed = of_runs + at_least
        if error <= enough * allowed:
            break
    if watch is not None:
        watch(what, float(error), float(allowed))
    assert error <= allowed, (  # a NaN fails here
        f"{what}: error {error:.3e} exceeds {allowed:.3e}, {of_runs:.3e} by rounding at each step"
        f", largest difference {difference.max():.3e} of {exact.abs().max():.3e}"
    )


def spread(x: Tensor) -> float:
    """(Σx²)²/Σx⁴: n for n numbers of one size, whatever zeros there are besides."""
    squares = (x / x.abs().max()).square() if x.any() else torch.ones(1)
    return float(squares.sum() ** 2 / squares.square().sum())


def judge(
    op: Op,
    formula: Op,
    inputs: dict[str, Tensor],
    *,
    wrt: Sequence[str] = (),
    seed: int = 0,
    own_dtypes: bool = False,
) -> dict[str, Tensor]:
    """Judge every output of ``op(**inputs)`` and its gradients with respect to ``wrt``.

    ``formula`` takes the same inputs and is run in fp32, or with ``own_dtypes`` on the inputs as
    they are, and in float64. Both return a tensor or a tuple of tensors. Each differentiable
    output gets a random upstream gradient per element, with zeros among them. Returns the op's own
    results by name, gradients as ``"d<input>"``, for further checks.
    """
    actual = results(op, inputs, wrt, None, seed)
    assert_all_close_to_exact(actual, formula, inputs, wrt=wrt, seed=seed, own_dtypes=own_dtypes)
    for name in wrt:
        assert actual[f"d{name}"].dtype == inputs[name].dtype
    return actual


def assert_all_close_to_exact(
    actual: dict[str, Tensor],
    formula: Op,
    inputs: dict[str, Tensor],
    *,
    wrt: Sequence[str] = (),
    seed: int = 0,
    own_dtypes: bool = False,
) -> None:
    """Judge ``results`` of an op, by the same arguments as ``judge``."""
    of = None if own_dtypes else torch.float32
    runs = Rounded(lambda: results(formula, inputs, wrt, of, seed))
    exact = results(formula, inputs, wrt, torch.float64, seed)
    assert actual.keys() == exact.keys()
    for name in exact:
        assert_close_to_exact(actual[name], runs[name], exact[name], name)


def results(
    op: Op,
    inputs: dict[str, Tensor],
    wrt: Sequence[str],
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Outputs and gradients of one run; floating-point inputs are converted to ``dtype`` first."""
    leaves = {}
    for name in wrt:
        # detach() keeps strides and alignment, which clone() would not.
        leaf = inputs[name].detach()
        if dtype is not None:
            leaf = leaf.to(dtype)  # gradients are not rounded to the input's dtype
        leaves[name] = leaf.requires_grad_()
    given = {**inputs, **leaves}
    if dtype is not None:
        given = {k: x.to(dtype) if x.is_floating_point() else x for k, x in given.items()}
    outputs = op(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    if wrt:
        outputs = [output for output in outputs if output.requires_grad]
        upstream = [upstream_like(output, seed + i) for i, output in enumerate(outputs)]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), upstream)
        found |= {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return found


def upstream_like(output: Tensor, seed: int = 0) -> Tensor:
    """A random upstream gradient, the same for every dtype, with zeros at about a fifth of it."""
    generator = torch.Generator().manual_seed(1000 + seed)
    g = torch.randn(output.shape, generator=generator)
    g = torch.where(torch.rand(output.shape, generator=generator) < 0.2, torch.zeros(()), g)
    return g.to(output)


def misaligned(x: Tensor, shift: int = 1) -> Tensor:
    """A contiguous copy whose first element lies ``shift`` elements past a 16-byte boundary."""
    room = x.new_zeros(x.numel() + shift + 16)
    start = (-room.data_ptr() // x.element_size()) % math.ceil(16 / x.element_size()) + shift
    copy = room[start : start + x.numel()].view(x.shape)
    return copy.copy_(x)


def assert_same_to_rounding(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Of sums in another order, each rounded to its dtype: torch's own kernels on a GPU choose an
    order by alignment and by the number of rows."""
    for ours, theirs in zip(actual, expected, strict=True):
        near = 1e-5 if ours.dtype == torch.float32 else 2 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=near, atol=1e-6)
