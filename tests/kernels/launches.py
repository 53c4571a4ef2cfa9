"""What an op does to the device besides arithmetic: launches, synchronisation, recompilation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Allocation and views start no kernel; "fill_" is the fixture that poisons new memory.
_FREE = {"empty", "empty_strided", "empty_like", "new_empty", "view", "detach", "slice", "select"}
_FREE |= {"unsqueeze", "expand", "_unsafe_view", "reshape", "alias", "t", "unbind", "set_", "fill_"}
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

    watch = _Watch()
    interpret, run = GridExecutor.__call__, JITFunction.run

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.calls.append(self.fn.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            return interpret(self, *args, **kwargs)

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.calls.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    GridExecutor.__call__, JITFunction.run = interpreted, compiled
    mode = "error" if torch.cuda.is_available() else "default"
    previous = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
    try:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(mode)
        with watch:
            yield watch.calls
    finally:
        GridExecutor.__call__, JITFunction.run = interpret, run
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode(previous)


def constants(module: ModuleType) -> set[str]:
    """The arguments of a module's kernels that each new value of compiles anew."""
    import triton.language as tl

    found = set()
    for name, kernel in vars(module).items():
        if name.endswith("_kernel"):
            parameters = inspect.signature(kernel.fn).parameters
            found |= {p.name for p in parameters.values() if p.annotation is tl.constexpr}
    return found
