"""Launches of compiled kernels with little Python.

At each launch Triton describes every argument, makes a text of all options to look the kernel up
by, compares every constant of the kernel's module with what it was, and prepares what hooks would
be told that nobody has set: 8 µs, where an op may take 18. Here each kernel has a function of its
own arguments that looks up what Triton's launch compiled before, by all that Triton specialises on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling  # noqa: F401  # _SOURCE uses it, and driver
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver  # noqa: F401
from triton.runtime.jit import JITFunction

# Launches on GPU 0 and above are direct; on those of CPU tensors too where this is -1. Where it is
# a high number every launch is Triton's own, which is where it can be watched.
first_device = 0

_Kept = tuple[Any, Any, Any]  # a compiled kernel's launcher, function and metadata

_SOURCE = """
def of(kernel, kept):
    def launch(programs_, {parameters}, num_warps=4):
        if is_compiling() or {first}.get_device() < first_device or ({addresses}) & 15:
            kernel[(programs_,)]({named}, num_warps=num_warps)
            return
        active_ = driver.active
        device_ = active_.get_current_device()
        key_ = ({key}, num_warps)
        found_ = kept[device_].get(key_)
        if found_ is None or hooked():
            compiled_ = kernel[(programs_,)]({named}, num_warps=num_warps)
            if found_ is None and may_keep(kernel, compiled_, device_, ({parameters})):
                kept[device_][key_] = compiled_.run, compiled_.function, compiled_.packed_metadata
            return
        run_, function_, metadata_ = found_
        stream_ = active_.get_current_stream(device_)
        run_(programs_, 1, 1, stream_, function_, metadata_, None, None, None, {parameters})
    return launch
"""


def launcher(kernel: Any) -> Callable[..., None]:
    """The function ``launch(programs, *arguments, num_warps=4)`` that does what
    ``kernel[(programs,)](*arguments, num_warps=num_warps)`` does, on the current device, which has
    to be that of the tensors. Arguments are positional or named, as the kernel's.

    Parameters whose names end in ``_ptr`` take tensors or None, the first of them a tensor; others
    that are not constants take numbers or None. It is Triton's own launch where a tensor does not
    begin at a multiple of 16 bytes, where torch.compile traces, in the interpreter, with a driver
    that only compiles, and while hooks on launches are set, as profilers do.
    """
    if not isinstance(kernel, JITFunction):  # interpreted
        return lambda programs, *arguments, **named: kernel[(programs,)](*arguments, **named)
    names = kernel.arg_names
    pointers = [name for name in names if name.endswith("_ptr")]
    source = _SOURCE.format(
        parameters=", ".join(names),
        named=", ".join(f"{name}={name}" for name in names),
        first=pointers[0],
        addresses=" | ".join(f"(0 if {p} is None else {p}.data_ptr())" for p in pointers),
        key=", ".join(map(_key_of, kernel.params)),
    )
    scope: dict[str, Any] = {}
    exec(source, globals(), scope)
    kept: dict[int, dict[Any, _Kept]] = defaultdict(dict)
    return scope["of"](kernel, kept)


_WIDE = "not -2147483649 < {0} < 2147483648"


def _key_of(parameter: Any) -> str:
    """An expression for what a kernel specialises on in one of its parameters; the alignment of
    tensors is known."""
    name = parameter.name
    if parameter.is_constexpr:
        return name
    if name.endswith("_ptr"):
        return f"None if {name} is None else {name}.dtype"
    if parameter.do_not_specialize:  # a whole number
        return _WIDE.format(name)
    whole = f"({name} % 16 == 0) + 2 * ({name} == 1) + 4 * ({_WIDE.format(name)})"
    return f"{name}.__class__ if {name}.__class__ is not int else {whole}"


def hooked() -> bool:
    """Whether anybody wants to be told of launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def may_keep(kernel: Any, compiled: Any, device: int, arguments: tuple[Any, ...]) -> bool:
    """Whether a key tells all that this call specialised on, which for tensors is dtype and
    alignment.

    On ROCm, for one, Triton also asks whether a tensor's memory is below 2 GiB.
    """
    caches = kernel.device_caches[device]
    if not isinstance(compiled, CompiledKernel) or len(caches) != 5 or not callable(caches[-1]):
        return False
    _, specialisation, _ = caches[-1](*arguments)
    for name, argument, found in zip(kernel.arg_names, arguments, specialisation, strict=True):
        if name.endswith("_ptr"):
            if argument is not None and tuple(found)[1:] != ("D",):
                return False
        elif isinstance(argument, Tensor):
            return False
    return True
