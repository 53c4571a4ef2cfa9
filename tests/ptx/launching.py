"""Launches of Triton's kernels, compiled for a GPU and run here.

Triton has to be imported with ``TRITON_INTERPRET`` off: its own functions are compiled or
interpreted, as the variable says at the import.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.aot.worker import TARGETS, CompileOnlyDriver, kernel_name
from tests.ptx.execution import Kernel
from tests.ptx.faults import Fault
from tests.ptx.memory import Span
from tests.ptx.record import Record

TARGET = "sm_90"


class Emulator:
    """Stands in for the launch of compiled kernels, on tensors of the CPU.

    Attributes:
        record: what it has run.
    """

    def __init__(self) -> None:
        self.record = Record()
        self._kernels: dict[str, Kernel] = {}

    def install(self) -> None:
        """Replaces the driver and the launch, for the rest of the process."""
        from triton.backends.nvidia.compiler import CUDABackend
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        # Half of the time goes into machine code, which nobody runs. What is compiled without is
        # not to be found by others.
        CUDABackend.make_cubin = lambda *args: b""
        folder = os.path.join(tempfile.gettempdir(), f"triton-ptx-{os.getuid()}")
        os.environ["TRITON_CACHE_DIR"] = folder
        # A line of the source for each instruction: nobody reads them.
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
        driver.set_active(CompileOnlyDriver(TARGETS[TARGET]))
        compile_or_launch = JITFunction.run

        def run(function: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            start = time.perf_counter()
            compiled = compile_or_launch(function, *args, grid=grid, warmup=True, **named)
            self.record.compiling += time.perf_counter() - start
            if not warmup:
                self._launch(function, compiled, grid, args, named)
            return compiled

        JITFunction.run = run

    def _launch(self, function: Any, compiled: Any, grid: Any, args: Any, named: Any) -> None:
        name = kernel_name(function)
        kernel = self._kernels.get(compiled.hash)
        if kernel is None:
            kernel = Kernel(compiled.asm["ptx"], compiled.metadata.shared)
            self._kernels[compiled.hash] = kernel
            self.record.specialisations += 1
        parameters = function.signature.parameters
        own = {key: value for key, value in named.items() if key in parameters}
        bound = function.signature.bind(*args, **own)
        bound.apply_defaults()
        kinds = compiled.src.signature
        given = [bound.arguments[key] for key, kind in kinds.items() if kind != "constexpr"]
        tensors = [x for x in given if isinstance(x, Tensor)]
        numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in given]
        # Behind them come pointers to scratch memory that no kernel here has.
        numbers += [0] * (len(kernel.program.parameters) - len(numbers))
        sizes = grid(bound.arguments) if callable(grid) else grid
        if any(size != 1 for size in sizes[1:]):
            raise NotImplementedError(f"{name}: a grid of more than one dimension, {sizes}")
        self.record.launches[name] += 1
        start = time.perf_counter()
        try:
            kernel.launch(sizes[0], numbers, spans(tensors))
        except Fault as fault:
            shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in tensors)
            message = f"{fault}, on {shapes}"
            self.record.faults.append(message)
            raise type(fault)(message) from None
        finally:
            self.record.running += time.perf_counter() - start


def spans(tensors: list[Tensor]) -> Iterator[Span]:
    """The memory of tensors' storages: a view may lead to all of it."""
    for x in tensors:
        storage: torch.UntypedStorage = x.untyped_storage()
        if storage.nbytes():
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()
