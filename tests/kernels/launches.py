"""What an op does to the device besides arithmetic: launches, synchronisation, recompilation,
memory."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the interpreter")

# Allocation and views start no kernel; "fill_" is the fixture that poisons new memory.
_FREE = {"empty", "empty_strided", "empty_like", "new_empty", "view", "detach", "slice", "select"}
_FREE |= {
    "promote_types",
    "unsqueeze",
    "expand",
    "_unsafe_view",
    "reshape",
    "alias",
    "t",
    "unbind",
    "set_",
    "fill_",
}
_FREE |= {"promote_types", "squeeze", "transpose", "split", "split_with_sizes", "as_strided"}
_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__.split(".")[0]
        if name in _WAITING:
            raise AssertionError(f"aten::{name} waits for the device")
        if name not in _FREE:
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    """Collects the names of all kernels that are started; what waits for the device raises."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    from fastrl_kernels._triton import launch

    watch = _Watch()
    interpret, run = GridExecutor.__call__, JITFunction.run

    def on_interpreter(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(self.grid) == 1, "dimensions beyond the first end at 65535"
        watch.calls.append(self.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return interpret(self, *args, **kwargs)

    def on_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert len(kwargs["grid"]) == 1, "dimensions beyond the first end at 65535"
        watch.calls.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    GridExecutor.__call__, JITFunction.run = on_interpreter, on_device
    direct, launch.first_device = launch.first_device, 10**9  # none is direct
    mode = "error" if torch.cuda.is_available() else "default"
    previous = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
    try:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)
        with watch:
            yield watch.calls
    finally:
        GridExecutor.__call__, JITFunction.run = interpret, run
        launch.first_device = direct
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(previous)


class _Storages(TorchDispatchMode):
    def __init__(self, known: tuple[Any, ...]) -> None:
        super().__init__()
        tensors = (x for x in tree_leaves(known) if isinstance(x, torch.Tensor))
        self.known = {x.untyped_storage()._cdata for x in tensors}
        self.found: list[tuple[int, str]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                what = f"{function.__name__} -> {x.dtype} {tuple(x.shape)}"
                self.found.append((x.untyped_storage().nbytes(), what))
        return results


@contextmanager
def allocations(*known: Any) -> Iterator[list[tuple[int, str]]]:
    """Collects the bytes of every tensor's storage, forward and backward, and who made the tensor;
    without those of ``known``, tensors or what has some."""
    with _Storages(known) as storages:
        yield storages.found


@contextmanager
def offset_widths(*tensors: torch.Tensor) -> Iterator[set[int]]:
    """Collects the bits of the integers that address elements of ``tensors`` (interpreter only)."""
    from triton.runtime.interpreter import InterpreterBuilder

    bases, found = {x.data_ptr() for x in tensors}, set()
    original = InterpreterBuilder.create_addptr

    def recording(self: Any, pointer: Any, offset: Any) -> Any:
        if offset.data.size > 1 and int(pointer.data.flat[0]) in bases:
            found.add(offset.data.dtype.itemsize * 8)
        return original(self, pointer, offset)

    InterpreterBuilder.create_addptr = recording
    try:
        yield found
    finally:
        InterpreterBuilder.create_addptr = original


@contextmanager
def floats_arrive_as_double() -> Iterator[None]:
    """Python floats reach kernels as fp64, as they do from compiled code (interpreter only)."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument]), tl.float64)
            return tl.tensor(handle, tl.float64)
        return original(argument)

    interpreter._implicit_cvt = converted
    try:
        yield
    finally:
        interpreter._implicit_cvt = original


def constants(module: ModuleType) -> set[str]:
    """The arguments of a module's kernels that each new value of compiles anew."""
    found = set()
    for name, kernel in vars(module).items():
        if name.endswith("_kernel"):
            parameters = inspect.signature(kernel.fn).parameters
            found |= {p.name for p in parameters.values() if "constexpr" in str(p.annotation)}
    return found
