"""What rounding does to a formula: every operation on its way is rounded up or down at random.

One run of a formula has one set of rounding errors, which happen to be small with one library or on
one CPU and not on another. Here each operation is computed in float64 and then rounded to its own
dtype, to one of the two numbers next to it, each as likely as the other:

    fl(x ∘ y) = ⌊x ∘ y⌋ or ⌈x ∘ y⌉,   and x ∘ y itself where it has no digits to lose

The larger of both errors is at least that of rounding to the nearest, so that several runs tell how
far one rounding per operation moves the results, on any machine: sizes of terms, cancellation and
steps without rounding are all in them. Sums of n numbers are a tree of log₂ n additions, in a
random order, for in one order some sum may happen to need no rounding. Products of matrices are
added up in fp32, one term after the other, as libraries do: K partial sums, a random walk from 0 to
the sum s of terms t, are rounded with a mean square of u²/3 each, in all with

    u²/3 · K (s²/3 + Σt²/6),   u = 2⁻²⁴

Sources: Vignes, 2004, "Discrete stochastic arithmetic for validating results of numerical
software", for rounding up or down at random; Parker, 1997, "Monte Carlo arithmetic"; Higham and
Mary, 2019, "A new approach to probabilistic rounding error analysis", for K roundings that add up
as √K.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

RUNS = 16
aten = torch.ops.aten
_EXPONENT = 0x7FF0000000000000  # of a float64, beside its sign and its mantissa
_U = 2.0**-24

# Operators of PyTorch that are several operations.
_COMPOSED: dict[Any, Callable[..., Any]] = {
    op: decomposition_table[op]
    for op in (
        aten._log_softmax.default, aten._log_softmax_backward_data.default,
        aten._softmax.default, aten._softmax_backward_data.default,
        aten.logsumexp.default, aten.softplus.default, aten.softplus_backward.default,
        aten.silu.default, aten.silu_backward.default, aten.sigmoid_backward.default,
        aten.tanh_backward.default,
    )
}  # fmt: skip
_COMPOSED |= {
    aten.sigmoid.default: lambda x: 1 / (1 + torch.exp(-x)),
    aten.special_entr.default: lambda x: -torch.where(x > 0, x * torch.log(x), 0.0),
    aten.mean.default: lambda x, **options: x.sum(**options) / x.numel(),
    aten.mean.dim: lambda x, dim, keepdim=False, **options: (
        x.sum(dim, keepdim, **options) / max(torch.Size([x.shape[d] for d in dim]).numel(), 1)
    ),
}
_SUMS = (aten.sum.default, aten.sum.dim_IntList)
_PRODUCTS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    aten.mm.default: torch.mm, aten.addmm.default: torch.mm, aten.bmm.default: torch.bmm,
    aten.mv.default: torch.mv, aten.dot.default: torch.dot,
}  # fmt: skip
# These only move and choose numbers, as views do: to know it saves time.
_EXACT = {
    *(aten.clone.default, aten.where.self, aten.gather.default, aten.index.Tensor),
    *(aten.cat.default, aten.stack.default, aten.neg.default, aten.abs.default, aten.amax.default),
    *(aten.clamp.default, aten.maximum.default, aten.minimum.default, aten.sign.default),
    *(aten.gt.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.le.Scalar, aten.ne.Scalar),
    *(aten.zeros_like.default, aten.ones_like.default, aten.isfinite.default, aten.fill_.Scalar),
}


class RandomRounding(TorchDispatchMode):
    """Context in which every operation of PyTorch is rounded at random, those of gradients too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and importing the compiler takes a second

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COMPOSED:
            with self:
                return _COMPOSED[func](*args, **kwargs)
        if func in _EXACT or func.is_view or not any(map(_is_rounded, args)):
            return func(*args, **kwargs)  # those that draw random numbers must not do so twice
        before = [_wide(x) for x in args]
        found = func(*args, **kwargs)  # has the dtypes, and results that are no numbers
        floats = [
            isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
            for x in (found if isinstance(found, (tuple, list)) else [found])
        ]
        if not any(floats):
            return found
        given = {k: torch.float64 if k == "dtype" and x else _wide(x) for k, x in kwargs.items()}
        if func in _PRODUCTS:
            exact = self._product(func, *before, **given)
        elif func in _SUMS and before[0].is_floating_point():
            exact = self._sum(found.dtype, *before)
        else:
            exact = func(*before, **given)
        if isinstance(found, Tensor):
            if exact.dtype != torch.float64:  # of no numbers that were rounded
                return found
            rounded = self.rounded(exact, found.dtype)
            return found.copy_(rounded) if func._schema.is_mutable else rounded
        assert not func._schema.is_mutable, func
        pairs = zip(found, exact, floats, strict=True)
        return type(found)(self.rounded(y, x.dtype) if is_float else x for x, y, is_float in pairs)

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A float64 tensor in ``dtype``, each number one of the two next to it, or itself."""
        # Almost half a spacing leaves what has its own, and moves all others past the middle.
        return spacing(x, dtype).mul_(self._halves(x)).add_(x).to(dtype)

    def _halves(self, x: Tensor) -> Tensor:
        """±0.499 in the shape of x, from anywhere in a table: drawn each time, they take longer."""
        table = _signs(max(1 << 20, 1 << x.numel().bit_length()))
        start = self._random.randrange(len(table) - x.numel() + 1)
        return table[start : start + x.numel()].view(x.shape).to(x.device)

    def _sum(
        self, dtype: torch.dtype, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> Tensor:
        """In pairs of a random order, then pairs of pairs, and so on; half precision in fp32."""
        dims = sorted(d % x.dim() for d in dim) if dim else list(range(x.dim()))
        others = [d for d in range(x.dim()) if d not in dims]
        sizes = [x.shape[d] for d in others], [x.shape[d] for d in dims]
        total = x.permute(others + dims).reshape(*sizes[0], math.prod(sizes[1]))
        total = total[..., torch.randperm(total.shape[-1], generator=self._generator)]
        within = torch.promote_types(dtype, torch.float32)
        while (n := total.shape[-1]) > 1:
            half = n // 2
            pairs = total[..., :half] + total[..., half : 2 * half]
            pairs = self.rounded(pairs, within).double()
            total = torch.cat([pairs, total[..., 2 * half :]], -1) if n % 2 else pairs
        total = total.sum(-1)  # of one number, or of none
        for d in dims if keepdim else ():
            total = total.unsqueeze(d)
        return total

    def _product(self, func: Any, *operands: Tensor, **options: Any) -> Tensor:
        exact = func(*operands, **options)
        spread = of_partial_sums(exact, *operands[-2:], _PRODUCTS[func])
        up_or_down = 2 * 3**-0.5 * self._halves(exact)
        return torch.where(exact.isfinite(), exact + spread * up_or_down, exact)


@functools.cache
def _signs(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (length,), generator=generator).double().sub_(0.5).mul_(0.998)


def _is_rounded(x: Any) -> bool:
    """Whether it is, or has, a tensor of numbers that rounding is about."""
    if isinstance(x, (list, tuple)):
        return any(map(_is_rounded, x))
    return isinstance(x, Tensor) and x.is_floating_point()


def _wide(x: Any) -> Any:
    """With float64 copies in place of floating-point tensors."""
    if isinstance(x, (list, tuple)):
        return [_wide(each) for each in x]
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.to(torch.float64, copy=True)


def of_partial_sums(
    exact: Tensor, a: Tensor, b: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.mm
) -> Tensor:
    """u·√(K (s²/3 + Σt²/6)) of each number s of a product in float64, whose K partial sums are off
    by up to u."""
    squares = product(a.square(), b.square())
    return _U * (a.shape[-1] * (exact.square() / 3 + squares / 6)).sqrt()


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours in ``dtype`` around each number of a float64 tensor."""
    info = torch.finfo(dtype)
    power = (x.contiguous().view(torch.int64) & _EXPONENT).view(torch.float64)  # 2^⌊log₂ |x|⌋
    return power.clamp_(info.tiny, info.max).mul_(info.eps)


class Rounded:
    """Runs of a formula under ``RandomRounding``, each made when it is first asked for.

    Iterating gives each run's result, and ``rounded[key]`` what each has by that name or number.
    """

    def __init__(self, formula: Callable[[], Any]) -> None:
        self._formula = formula
        self._runs: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for seed in range(RUNS):
            if seed == len(self._runs):
                with RandomRounding(seed):
                    self._runs.append(self._formula())
            yield self._runs[seed]

    def __getitem__(self, key: Any) -> Iterator[Tensor]:
        return (run[key] for run in self)
