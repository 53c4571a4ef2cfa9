"""Derivatives of gradients: an error in every op with a gradient of its own, never a constant."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fastrl_kernels as ops
from fastrl_kernels import gemm
from tests.kernels.test_compile import (
    CASES,
    INTERPRETED,
    LEAVES,
    Inputs,
    fresh_compiler,
    inputs,
    op_of,
)

__all__ = ["fresh_compiler"]  # a fixture

# Plain PyTorch, which has all derivatives.
PLAIN = {*ops.preference.__all__, "merge_moments"}
# Results that are not differentiable.
CONSTANT = {
    "advance_slots", "decode_attention", "linear_sample", "masked_moments", "rms_norm",
    "rotate_and_store", "sample_keys", "sample_tokens", "sample_with_support", "swiglu",
}  # fmt: skip
FUSED = [case for case in CASES if op_of(case) not in PLAIN | CONSTANT]
RUNS = [(case, "torch") for case in FUSED]
RUNS += [(case, "triton") for case in FUSED if case == op_of(case)]


def twice(function: Callable[[Inputs], Any], x: Inputs) -> None:
    """Second derivatives of a sum, whose upstream gradients are constants."""
    leaves = [leaf for leaf in x[:LEAVES] if leaf.requires_grad]
    results = [y for y in tree_leaves(function(x)) if isinstance(y, Tensor) and y.requires_grad]
    assert results
    total = sum(y.sum() for y in results)
    gradients = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    penalty = sum(g.square().sum() for g in gradients if g is not None)
    (total + penalty).backward()


@pytest.mark.parametrize(("case", "backend"), RUNS)
def test_a_derivative_of_a_gradient_is_an_error(case, backend):
    """Also where autograd is asked about some tensors only."""
    x = inputs(5)
    results = tree_leaves(CASES[case](x, backend))
    (result, *_) = (y for y in results if isinstance(y, Tensor) and y.requires_grad)
    leaves = [leaf for leaf in x[:LEAVES] if leaf.requires_grad]
    with pytest.raises(RuntimeError, match="first derivatives only, and create_graph=True"):
        torch.autograd.grad(result.sum(), leaves, create_graph=True, allow_unused=True)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch takes gradients of constants for constants"
)
@pytest.mark.parametrize("case", [case for case in FUSED if case == op_of(case)])
def test_compiled_code_has_no_second_derivatives(case):
    function = torch.compile(lambda x: CASES[case](x, "torch"), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        twice(function, inputs(5))


@pytest.mark.parametrize("case", INTERPRETED)
def test_operators_have_no_second_derivatives(case):
    """Where a graph of operators is run as it is."""
    if op_of(case) in CONSTANT:
        return
    function = torch.compile(lambda x: CASES[case](x, "torch"), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        twice(function, inputs(5))


def test_a_layers_gradient_has_no_derivative():
    x, weight = torch.randn(3, 8), torch.randn(5, 8, requires_grad=True)
    out = gemm.Linear.apply(x, weight, None, gemm.Mm)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(out.sum(), weight, create_graph=True)


@pytest.mark.parametrize("case", [case for case in CASES if op_of(case) in ops.preference.__all__])
def test_ops_in_plain_pytorch_have_second_derivatives(case):
    twice(lambda x: CASES[case](x, "torch"), inputs(5))
