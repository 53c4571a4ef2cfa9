"""Tensors without memory: code runs on them with all of its shapes, and computes nothing.

A phantom is a plain CPU tensor over pages that nobody has touched: the system gives no memory for
them, reads give zeros, and views, types and gradients are those of any tensor. :class:`Phantoms`
takes each operation on phantoms, makes a result of the right shape and leaves the work out. Token
ids and masks are computed as ever, so that the code takes the same branches as with real weights.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from fastrl.trainers.plan.memory import MemoryLog

aten = torch.ops.aten

# A new tensor of so many elements or more is a phantom. The first number is small, so that even a
# tiny model's logits are phantoms: kernels put sums over logits into longer workspaces, which may
# be phantoms where the logits are real, and the logarithm of such a sum, 0, would be infinite.
_SMALLEST = 512  # floating-point numbers
_SMALLEST_OF_INTEGERS = 1 << 24
_LARGE_PRODUCT = 1 << 20
# With this flag Linux gives addresses for more than all memory; older Pythons do not name it.
_UNRESERVED = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# The numbers of references to the tensor and to the storage of a gradient that autograd's engine
# alone holds, with the references that a call of Python adds.
_OWN_TENSOR, _OWN_STORAGE = 4, 2


class _Pages(mmap.mmap):
    """Memory that is never touched, and that calls a function when it is freed."""

    on_free: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.on_free is not None:
            self.on_free()


@dataclass(frozen=True)
class _Shape:
    """The shape, strides and dtype of a result, which shares the memory of the tensor number
    ``source`` among the arguments, if set, from ``offset`` on. Its storage has ``nbytes``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    source: int | None = None

    @classmethod
    def of(cls, x: Tensor, source: int | None = None) -> _Shape:
        nbytes = int(x.untyped_storage().nbytes())
        offset = int(x.storage_offset())
        return cls(tuple(x.shape), x.stride(), offset, x.dtype, nbytes, source)


_SHAPES: dict[Any, Any] = {}  # of results, by operation and arguments' shapes; for all rehearsals


class Phantoms(TorchDispatchMode):
    """Context in which large tensors are phantoms, in this thread.

    Args:
        log: the log that gets each tensor's memory, that of real tensors too.

    Attributes:
        run_for_real: operations on phantoms that have no rule for shapes, and were run on zeros.
    """

    def __init__(self, log: MemoryLog):
        super().__init__()
        self.log = log
        self.run_for_real: set[str] = set()
        self._live: dict[int, int] = {}  # phantoms' keys in the log, by their addresses
        self._real: dict[int, int] = {}  # other tensors' keys in the log, by their addresses
        self._count = 0

    def is_phantom(self, x: Tensor) -> bool:
        if x.layout == torch.strided:
            return x.untyped_storage().data_ptr() in self._live
        return x.is_sparse and self.is_phantom(x._values())

    def is_kind(self, tensors: Iterable[Any], kind: str, since: str | None = None) -> None:
        """Notes what tensors are for, see :meth:`MemoryLog.is_kind`."""
        for key in self._keys(tensors):
            self.log.is_kind(key, kind, since)

    def elsewhere(self, tensors: Iterable[Any]) -> None:
        """Notes that tensors are not on the device that is planned for."""
        for key in self._keys(tensors):
            self.log.elsewhere(key)

    def _keys(self, tensors: Iterable[Any]) -> Iterator[int | None]:
        for x in tensors:
            if isinstance(x, Tensor) and x.layout == torch.strided:
                address = x.untyped_storage().data_ptr()
                yield self._live.get(address, self._real.get(address))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors(args, kwargs))
        if any(map(self.is_phantom, tensors)):
            return self._on_phantoms(func, args, kwargs, tensors)
        if func in _FACTORIES:
            made = self._made(func, args, kwargs)
            if made is not None:
                return made
            if func in _WITHOUT_CONTENT:
                return self._noted(func(*args, **kwargs).zero_(), tensors)
        elif func in _OUTER_PRODUCTS and func(*_to_meta(args), **kwargs).numel() >= _LARGE_PRODUCT:
            return self._shaped(func, args, kwargs, tensors)
        return self._noted(func(*args, **kwargs), tensors)

    def _made(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """A new phantom; None where the tensor is small, or not on the CPU."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return None
        on_meta = {"device": "meta", **({"pin_memory": None} if "pin_memory" in kwargs else {})}
        shape = func(*args, **{**kwargs, **on_meta})
        floats = shape.is_floating_point()
        if shape.numel() < (_SMALLEST if floats else _SMALLEST_OF_INTEGERS):
            return None
        return self._like(_Shape.of(shape))

    def _on_phantoms(
        self, func: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        if func in _TRUE:
            return torch.ones((), dtype=torch.bool)
        if func is aten.all.dim or func is aten.all.dims:
            return torch.ones_like(func(*_to_meta(args), **kwargs), device="cpu")
        if func is torch.ops.mkldnn._reorder_linear_weight.default:
            # The weight in oneDNN's layout, which has no strides.
            whole = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return self._like(_Shape.of(whole))
        if _only_a_view(func):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._written(func, args, kwargs)
        if _returns_a_number(func):
            return func(*args, **kwargs)  # read from zeros
        summed = self._summed_in_place(func, args)
        if summed is not None:
            return summed
        return self._shaped(func, args, kwargs, tensors)

    def _shaped(self, func: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Phantoms in place of ``func``'s results; real results where it has no rule for shapes."""
        if func in _INDEXED:
            args = _with_numbered_places(args)
        key = func, tuple(map(_key, args)), tuple((k, _key(x)) for k, x in kwargs.items())
        if key not in _SHAPES:
            try:
                _SHAPES[key] = _shapes(func, args, kwargs)
            except (NotImplementedError, RuntimeError):
                self.run_for_real.add(str(func))
                return self._noted(func(*args, **kwargs), tensors)
        sources = list(_tensors(args, kwargs))

        def real(shape: Any) -> Any:
            if not isinstance(shape, _Shape):
                return shape
            if shape.source is None:
                return self._like(shape)
            source = sources[shape.source]
            return source.as_strided(
                shape.size, shape.stride, source.storage_offset() + shape.offset
            )

        shapes = _SHAPES[key]
        return tuple(map(real, shapes)) if isinstance(shapes, tuple) else real(shapes)

    def _written(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What an operation that writes to its arguments returns; if it overwrites a tensor of
        floats that is no phantom, or a part of one, the whole tensor becomes zeros."""
        schema, by_alias = func._schema, dict[str, Any]()
        for i, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if info is None or not info.is_write:
                continue
            target = args[i] if i < len(args) else kwargs.get(argument.name)
            by_alias.update(dict.fromkeys(info.before_set, target))
            if (argument.is_out or func in _OVERWRITING) and self._holds_numbers(target):
                target.zero_()
        results = []
        for result in schema.returns:
            names = result.alias_info.before_set if result.alias_info else ()
            results.append(next((by_alias[name] for name in names if name in by_alias), None))
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _holds_numbers(self, x: Any) -> TypeGuard[Tensor]:
        return isinstance(x, Tensor) and x.is_floating_point() and not self.is_phantom(x)

    def _summed_in_place(self, func: Any, args: tuple) -> Tensor | None:
        """The sum of two gradients where autograd's engine would add them in place, else None."""
        if func is not aten.add.Tensor or torch.is_grad_enabled():
            return None
        if torch._C._current_autograd_node() is None or not isinstance(args[1], Tensor):
            return None
        first, second = args[:2]
        if first.is_sparse:  # an embedding's gradient, which goes into that of the head
            first, second = second, first
        if first.is_sparse or first.shape != second.shape or first.dtype != second.dtype:
            return None
        owned = (
            first._use_count() <= _OWN_TENSOR
            and torch._C._storage_Use_Count(first.untyped_storage()._cdata) <= _OWN_STORAGE
        )
        return first.as_strided(first.shape, first.stride()) if owned else None

    def _like(self, shape: _Shape) -> Tensor:
        """A phantom of this shape, strides and dtype."""
        if not shape.nbytes:
            return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype)
        flat = self._allocate(shape.nbytes)
        out = torch.empty(0, dtype=shape.dtype)
        return out.set_(flat.untyped_storage(), shape.offset, shape.size, shape.stride)

    def _allocate(self, nbytes: int) -> Tensor:
        pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _UNRESERVED)
        self._count += 1
        key = self._count
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        self._live[address] = key
        self.log.allocated(key, nbytes)
        live, log = self._live, self.log

        def freed() -> None:
            live.pop(address, None)
            log.freed(key)

        pages.on_free = freed
        return memory

    def _noted(self, out: Any, tensors: Iterable[Tensor]) -> Any:
        """Notes the memory of real results."""
        for x in tree_iter(out):
            if not isinstance(x, Tensor) or x.layout != torch.strided or x.device.type != "cpu":
                continue
            storage = x.untyped_storage()
            address = storage.data_ptr()
            if not address or address in self._real or address in self._live:
                continue
            if any(
                y.layout == torch.strided and y.untyped_storage().data_ptr() == address
                for y in tensors
            ):
                continue  # the tensor was made before
            self._count += 1
            key = self._count
            self._real[address] = key
            self.log.allocated(key, storage.nbytes())
            weakref.finalize(storage, self._forget, address, key).atexit = False
        return out

    def _forget(self, address: int, key: int) -> None:
        self._real.pop(address, None)
        self.log.freed(key)


_FACTORIES = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.rand.default,
    aten.randn.default,
    aten.eye.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
_WITHOUT_CONTENT = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
}
# Phantoms if large: products of token positions and frequencies, whose sines would take long.
_OUTER_PRODUCTS = {aten.mul.Tensor, aten.bmm.default}
_OVERWRITING = {aten.copy_.default, aten.index_put_.default, aten.index_copy_.default}
# Checks of numbers, which phantoms pass.
_TRUE = {aten.all.default, aten.equal.default}
_VIEWS = {
    aten._unsafe_view.default,
    aten._sparse_coo_tensor_unsafe.default,
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
}
_INDEXED = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default}


def _tensors(args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, which may be lists of them."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from (each for each in x if isinstance(each, Tensor))


def _key(x: Any) -> Any:
    """The part of an argument that the shapes of results depend on, as a key."""
    if isinstance(x, Tensor):
        return (x.shape, x.stride() if x.layout == torch.strided else x.layout, x.dtype)
    if isinstance(x, (list, tuple)):
        return tuple(map(_key, x))
    return type(x), x


def _shapes(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Shapes of an operation's results; raises NotImplementedError or RuntimeError without a
    rule."""
    numbers: dict[int, int] = {}

    def meta(x: Tensor) -> Tensor:
        if x.layout != torch.strided:
            return x.to("meta")
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    on_meta = [meta(x) for x in _tensors(args, kwargs)]
    for i, x in enumerate(on_meta):
        if x.layout == torch.strided:
            numbers[x.untyped_storage()._cdata] = i
    left = iter(on_meta)
    placed = tree_map_only(Tensor, lambda _: next(left), (args, kwargs))
    if "device" in placed[1]:
        placed[1]["device"] = torch.device("meta")
    out = func(*placed[0], **placed[1])

    def shape(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return _Shape.of(x, numbers.get(x.untyped_storage()._cdata))

    return tuple(map(shape, out)) if isinstance(out, (list, tuple)) else shape(out)


@cache
def _returns_a_number(func: Any) -> bool:
    return not any("Tensor" in str(x.type) for x in func._schema.returns)


@cache
def _only_a_view(func: Any) -> bool:
    return func.is_view or func in _VIEWS or func.namespace == "prim"


def _to_meta(x: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to("meta"), x)


def _with_numbered_places(args: tuple) -> tuple:
    """Arguments with positions in place of masks among the indices: a mask's shape alone does not
    tell how many there are."""
    places: list[Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            places += index.nonzero().unbind(1)
        else:
            places.append(index)
    return (args[0], places, *args[2:])
