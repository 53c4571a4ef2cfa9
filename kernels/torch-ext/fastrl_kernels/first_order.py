"""First derivatives only: where an op's gradient is to be differentiated, an error, never 0."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward pass, a ``Function``'s or an operator's: it raises where its results are
    to have derivatives (``create_graph=True``).

    ``torch.autograd.function.once_differentiable`` raises later, and not always. It does not see
    that a gradient depends on an op's inputs where the upstream gradient is a constant, as below a
    sum; and autograd does not run what leads to none of the tensors that it is asked about.

    In compiled code it is ``torch.compile`` that refuses second derivatives; before torch 2.13 it
    treats gradients as constants where the upstream gradient is a constant, whatever the function.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "the ops of fastrl_kernels have first derivatives only, and create_graph=True asks "
                "for more: leave it out, or use fastrl_kernels.reference, whose functions have all "
                "derivatives"
            )
        return backward(ctx, *grads)

    return once
