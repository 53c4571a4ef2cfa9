"""What the ops with a head ask of a GPU, counted on tensors without memory.

A call runs at its real shapes on meta tensors that stand for a GPU's: which products it takes, what
is read and written beside them, the memory that it holds, and its launches. A kernel of the head's
element-wise work counts as one launch that reads its chunk, and writes it where it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import fastrl_kernels as kernels
from benchmarks.ops.record import MIB
from fastrl_kernels.dispatch import standing_for
from fastrl_kernels.divergence import PlannedDivergence
from fastrl_kernels.lm_head import PlannedHead

aten = torch.ops.aten
_PRODUCTS = {aten.mm, aten.addmm, aten.addmm_}
_FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"}
GIB = 1024 * MIB


class Product(NamedTuple):
    """Of matrices [m, k] and [k, n]; ``adds`` to what is there."""

    m: int
    k: int
    n: int
    operands: torch.dtype
    out: torch.dtype
    adds: bool


@dataclass
class HeadCounts:
    """Bytes, flops and launches of a call, forward and backward."""

    flops: float = 0.0
    beside: int = 0  # bytes that are read and written outside of products
    sums: int = 0  # bytes of fp32 results that products read and write, or write first
    launches: int = 0
    small: int = 0  # of them, those on no more than a number per row; in Triton a loss's are few
    products: list[Product] = field(default_factory=list)
    peak: int = 0  # bytes, without inputs and results
    workspace: int = 0  # bytes of the largest one for logits

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """Products at a GPU's rate, then what is beside them at its memory's."""
        return self.flops / flops_per_second + self.beside / bytes_per_second


class _Counter(TorchDispatchMode):
    def __init__(self, inputs: Iterator[Tensor] | list[Tensor], rows: int) -> None:
        super().__init__()
        self.counts, self.rows = HeadCounts(), rows
        self._inputs = {x.untyped_storage()._cdata for x in inputs}
        self._live: dict[int, int] = {}
        self.allocated: dict[int, int] = {}  # all, by a number of its own
        self._numbers: dict[int, int] = {}
        self.peaks: list[tuple[int, frozenset[int]]] = []  # live numbers at each new peak
        self._most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, function.overloadpacket
        if packet in _PRODUCTS:
            return self._multiplied(function, args, kwargs)
        result = function(*args, **kwargs)
        if not self._is_free(function):
            read = _distinct([x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)])
            written = [x for x in tree_iter(result) if isinstance(x, Tensor)]
            if function._schema.is_mutable and packet in (aten.copy_, aten.fill_, aten.zero_):
                read = read[1:]
            self.counts.beside += sum(x.nbytes for x in (*read, *_distinct(written)))
            self.counts.launches += 1
            self.counts.small += all(x.numel() <= self.rows for x in (*read, *written))
        self._note(result)
        return result

    def _is_free(self, function: Any) -> bool:
        schema = function._schema
        views = any(x.alias_info and not x.alias_info.is_write for x in schema.arguments)
        return views or function.overloadpacket.__name__ in _FREE

    def _multiplied(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        adds = function.overloadpacket is not aten.mm
        total, a, b = args[:3] if adds else (None, *args[:2])
        out = kwargs.get("out", total if function.overloadpacket is aten.addmm_ else None)
        if out is None:
            dtype = next((x for x in args if isinstance(x, torch.dtype)), a.dtype)
            out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
            self._note(out)
        assert out.shape == (a.shape[0], b.shape[1]), (out.shape, a.shape, b.shape)
        assert a.dtype == b.dtype, f"a product of {a.dtype} and {b.dtype}"
        counts = self.counts
        counts.flops += 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        counts.launches += 1
        counts.products.append(Product(*a.shape, b.shape[1], a.dtype, out.dtype, adds))
        if out.dtype == torch.float32:
            counts.sums += out.nbytes * (1 + adds)
        return out

    def launched(self, *moved: Tensor) -> None:
        """Notes a launch that reads or writes each of these once."""
        self.counts.launches += 1
        self.counts.beside += sum(x.numel() * x.element_size() for x in moved)

    def _note(self, result: Any) -> None:
        for x in tree_iter(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key in self._inputs or key in self._numbers:
                    continue
                number = len(self.allocated)
                self._numbers[key], self.allocated[number] = number, storage.nbytes()
                self._live[number] = storage.nbytes()
                if x.dtype == torch.uint8:
                    self.counts.workspace = max(self.counts.workspace, storage.nbytes())
                weakref.finalize(storage, self._freed, key, number).atexit = False
        if (now := sum(self._live.values())) > self._most:
            self._most = now
            self.peaks.append((now, frozenset(self._live)))

    def _freed(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self._live.pop(number, None)

    def finish(self, results: list[Tensor]) -> HeadCounts:
        """Memory, without that of results."""
        keys = {x.untyped_storage()._cdata for x in results}
        kept = {self._numbers[key] for key in keys if key in self._numbers}
        self.counts.peak = max(
            (sum(self.allocated[n] for n in live - kept) for _, live in self.peaks), default=0
        )
        return self.counts


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(x): x for x in tensors}.values())


def _replaced(kind: type, methods: dict[str, Callable[..., None]]) -> Any:
    return mock.patch.multiple(kind, **{k: staticmethod(v) for k, v in methods.items()})


@contextmanager
def _counting(inputs: list[Tensor], rows: int) -> Iterator[_Counter]:
    counter = _Counter(inputs, rows)

    def statistics(x: Tensor, *_: Any, **__: Any) -> None:
        counter.launched(x)

    def gradients_(x: Tensor, *_: Any, **__: Any) -> None:
        counter.launched(x, x)

    def scale_(x: Tensor, factor: Tensor) -> None:
        counter.launched(factor)  # of 1, as after a plain backward

    def compared(x: Tensor, y: Tensor, *_: Any, **__: Any) -> None:
        counter.launched(x, y)

    def of_both_(x: Tensor, y: Tensor, *_: Any, **__: Any) -> None:
        counter.launched(x, y, x)

    of_head = {"statistics": statistics, "gradients_": gradients_, "scale_": scale_}
    of_divergence = {"score": compared, "gradients_": of_both_}
    with (
        standing_for("cuda"),
        mock.patch("torch.autocast", return_value=nullcontext()),  # has no meta device
        _replaced(PlannedHead, of_head),
        _replaced(PlannedDivergence, of_divergence),
        counter,
    ):
        yield counter


def _against_teacher(op: Callable[..., Any], *given: Tensor, **options: Any) -> Any:
    *student, hidden, weight = given
    return op(*student, kernels.TeacherHead(hidden, weight), **options)


def counted(
    op: str,
    rows: int,
    hidden: int,
    vocabulary: int,
    dtype: torch.dtype = torch.bfloat16,
    head: str = "trained",
    teacher: int = 0,
    **options: Any,
) -> HeadCounts:
    """Counts of a call, forward and backward, of "linear_logprobs", "linear_ppo_loss",
    "linear_nll_loss", "linear_kl" or "linear_kl_loss" on a GPU.

    Args:
        rows, hidden, vocabulary: N, H and V.
        head: "trained" or "frozen".
        teacher: H', of the last two.
        options: of the op.
    """

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    leaves = [
        meta(rows, hidden, dtype=dtype).requires_grad_(),
        meta(vocabulary, hidden, dtype=dtype),
    ]
    leaves[1].requires_grad_(head == "trained")
    labels, numbers = meta(rows, dtype=torch.int64), [meta(rows), meta(rows)]
    mask = meta(rows, dtype=torch.bool)
    arguments: list[Tensor] = [*leaves, labels]
    if op == "linear_ppo_loss":
        arguments += [*numbers, mask]
    upstream = meta() if op.endswith("_loss") else meta(rows)
    call: Callable[..., Any] = getattr(kernels, op)
    if teacher:
        heads = [meta(n, teacher, dtype=dtype) for n in (rows, vocabulary)]
        arguments += heads
        call = partial(_against_teacher, call)
    with _counting([*arguments, upstream], rows) as counter:
        found = call(*arguments, backend="torch", **options)
        first = found if isinstance(found, Tensor) else found[0]
        wanted = [x for x in leaves if x.requires_grad]
        gradients = torch.autograd.grad(first, wanted, upstream)
        return counter.finish([*gradients])
