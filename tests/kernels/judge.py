"""How a kernel is judged: by PyTorch's own error against float64.

A kernel's error may be at most twice that of the plain PyTorch formula (`fastrl_kernels.reference`)
on the same values in fp32, plus 1e-7 of the exact result's norm; 6e-7 where kernels are compiled,
for a GPU's exp2 is exact to 2^-22.5 and its quotient to 2^-22, and PyTorch's error over few numbers
may be 0 by luck. Gradients come back in the inputs' dtypes on both sides, so both are rounded once
at the end.

Ops with matrix products are judged by the formula in the inputs' own dtypes (``own_dtypes``).
A model's head rounds its logits to bf16, and log-probs have to be those of the model, not of a
product that is exact: the formula in fp32 has no such rounding and would ask for one. In fp32 both
peers are the same, and what the op does to logits is held to fp32 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fastrl_kernels import dispatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTOR = 2.0
FLOOR = 1e-7 if dispatch.interpreting() else 6e-7

Op = Callable[..., Tensor | tuple[Tensor, ...]]


def names(dtypes: Sequence[torch.dtype]) -> list[str]:
    """Short test ids: ["float32", "bfloat16", ...]."""
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def assert_close_to_exact(
    actual: Tensor, peer: Tensor, exact: Tensor, what: str, slack: float = 0.0
) -> None:
    """‖actual - exact‖ ≤ 2‖peer - exact‖ + FLOOR·‖exact‖ + slack, infinities at the same places."""
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    actual, peer, exact = (x.detach().double().flatten() for x in (actual, peer, exact))
    infinite = exact.isinf()
    torch.testing.assert_close(actual[infinite], exact[infinite], msg=f"{what}: infinities differ")
    actual, peer, exact = (x[~infinite] for x in (actual, peer, exact))
    error = (actual - exact).norm()
    allowed = FACTOR * (peer - exact).norm() + FLOOR * exact.norm() + slack
    assert error <= allowed, (  # a NaN fails here
        f"{what}: error {error:.3e} exceeds {allowed:.3e}; PyTorch's is {(peer - exact).norm():.3e}"
        f", largest difference {(actual - exact).abs().max():.3e} of {exact.abs().max():.3e}"
    )


def judge(
    op: Op,
    formula: Op,
    inputs: dict[str, Tensor],
    *,
    wrt: Sequence[str] = (),
    seed: int = 0,
    slack: Mapping[str, float] | None = None,
    own_dtypes: bool = False,
) -> dict[str, Tensor]:
    """Judge every output of ``op(**inputs)`` and its gradients with respect to ``wrt``.

    ``formula`` takes the same inputs and is run in fp32, or with ``own_dtypes`` on the inputs as
    they are, and in float64. Both return a tensor or a tuple of tensors. Each differentiable
    output gets a random upstream gradient per element, with zeros among them. ``slack`` is allowed
    besides, by the name of a result. Returns the op's own results by name, gradients as
    ``"d<input>"``, for further checks.
    """
    actual = results(op, inputs, wrt, None, seed)
    peer = results(formula, inputs, wrt, None if own_dtypes else torch.float32, seed)
    exact = results(formula, inputs, wrt, torch.float64, seed)
    assert actual.keys() == exact.keys()
    for name in exact:
        more = slack[name] if slack else 0.0
        assert_close_to_exact(actual[name], peer[name], exact[name], name, more)
    for name in wrt:
        assert actual[f"d{name}"].dtype == inputs[name].dtype
    return actual


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
        if dtype == torch.float64:
            leaf = leaf.double()  # the exact gradient is not rounded to the input's dtype
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
