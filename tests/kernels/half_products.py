"""Products in half precision on a CPU, by the memory between the rows of what they multiply.

CPUs with AMX multiply what lies beside a slice of columns, too: these tests see such a slice on
every CPU, before it is multiplied.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "linear"}
_PRODUCTS |= {"mkldnn_linear", "_linear_pointwise"}
# Of these only queries and keys: values are summed over tokens, never across a row.
_ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu"}


class HalfOperands(TorchDispatchMode):
    """Notes the matrices in half precision that products of a CPU are called with.

    Attributes:
        found: how many there were.
        with_gaps: the product, shape and strides of those with memory of others between their rows,
            or between their columns where they are transposed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = 0
        self.with_gaps: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        kwargs = kwargs or {}
        given = args[:2] if name in _ATTENTION else (*args, *kwargs.values())
        if name in _PRODUCTS | _ATTENTION:
            for x in tree_leaves(given):
                if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
                    self._look(name, x)
        return func(*args, **kwargs)

    def _look(self, name: str, x: Tensor) -> None:
        if x.dim() < 2 or not x.numel() or x.is_mkldnn:  # a packed copy has no strides of a matrix
            return
        self.found += 1
        (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
        if (down, across) not in ((columns, 1), (1, rows)):
            self.with_gaps.append((name, tuple(x.shape), x.stride()))


def among_nan(x: Tensor, *, rows: bool = True) -> Tensor:
    """The same numbers [..., M, N] within a larger tensor that is NaN elsewhere: beside every row,
    and behind the last one of each matrix.

    Args:
        rows: False puts nothing behind.
    """
    whole = x.new_full((*x.shape[:-2], x.shape[-2] + 3 * rows, x.shape[-1] + 64), torch.nan)
    part = whole[..., : x.shape[-2], 32:-32]
    part.copy_(x)
    return part
