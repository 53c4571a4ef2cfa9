"""Choice of an op's backend, with its reason."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

BACKENDS = ("auto", "triton", "torch", "native")
BACKEND_VARIABLE = "FASTRL_KERNELS_BACKEND"
# Ops that have compiled code for CPUs.
NATIVE = ("decode_attention", "rms_norm", "rotate_and_store", "sample_tokens", "swiglu")
WITHOUT_COMPILED_CODE = "there is no compiled code for this CPU"
TRITON_DEVICES = ("cuda",)  # ROCm devices call themselves "cuda" in torch


class Backend(NamedTuple):
    """An op's two passes on one backend; the last result of ``forward`` is saved for backward."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class Choice(NamedTuple):
    """A backend and the reason why it was picked."""

    backend: str
    reason: str


# Found once: torch 2.11 cannot trace how it is found.
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_stands_for: str | None = None  # not a ContextVar, which torch.compile cannot trace


def device_kind(x: torch.Tensor) -> str:
    """ "cpu", "cuda" …: where x is, see :func:`kind_of_device`."""
    return kind_of_device(x.device)


def kind_of_device(device: torch.device) -> str:
    """ "cpu", "cuda" …: a device's kind. While a plan is made for another device
    (:func:`standing_for`), that one's."""
    return _stands_for or device.type


@contextmanager
def standing_for(kind: str) -> Iterator[None]:
    """Context in which tensors without memory take up what they would on another kind of device:
    which library computes a product, what is kept, the size of workspaces."""
    global _stands_for
    before, _stands_for = _stands_for, kind
    try:
        yield
    finally:
        _stands_for = before


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def triton_installed() -> bool:
    return _TRITON_INSTALLED


def explain(device: torch.device | str, backend: str = "auto") -> Choice:
    """Which backend an op takes for tensors on ``device``, and why.

    ``backend="auto"`` is Triton on CUDA and ROCm devices and under ``TRITON_INTERPRET=1``, compiled
    code on a CPU where there is a compiler, PyTorch elsewhere; the environment variable
    ``FASTRL_KERNELS_BACKEND`` replaces "auto" by a name. A name forces that backend. "native" is
    the compiled code for fp32 tensors of a CPU, which ops of decode steps have; what it does not
    cover is PyTorch's.

    Raises:
        TypeError: a device that is none.
        ValueError: an unknown backend, or "triton" or "native" where it cannot run.
    """
    if not isinstance(device, torch.device | str):
        raise TypeError(
            f"device must be a torch.device or a string, got {type(device).__name__}: pass x.device"
        )
    device = torch.device(device)
    asked_by = f"backend={backend!r}"
    if backend == "auto" and os.environ.get(BACKEND_VARIABLE, "auto") != "auto":
        backend = os.environ[BACKEND_VARIABLE]
        asked_by = f"{BACKEND_VARIABLE}={backend}"
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend in {asked_by}: choose one of {', '.join(BACKENDS)}")
    if backend == "torch":
        return Choice("torch", f"{asked_by} asks for it")
    if backend == "native" and kind_of_device(device) != device.type:
        return Choice("torch", "the CPU stands for another device")
    if backend == "native" and torch.compiler.is_compiling():
        return Choice("torch", "torch.compile traces PyTorch's path")
    if backend == "native":
        if lacks := _native_obstacle(device):
            raise ValueError(f"{asked_by} cannot be honoured: {lacks}")
        return Choice("native", f"{asked_by} asks for it")

    obstacle = _triton_obstacle(device)
    if backend == "triton":
        if obstacle:
            raise ValueError(f"{asked_by} cannot be honoured: {obstacle}")
        return Choice("triton", f"{asked_by} asks for it")
    if obstacle:
        return _without_triton(device, obstacle)
    if device.type in TRITON_DEVICES:
        return Choice("triton", f"tensors are on {device.type}")
    if interpreting():
        return Choice("triton", "TRITON_INTERPRET=1")
    return Choice("torch", f"tensors are on {device.type}")


def _without_triton(device: torch.device, obstacle: str) -> Choice:
    if device.type != "cpu" or kind_of_device(device) != "cpu" or torch.compiler.is_compiling():
        return Choice("torch", obstacle)
    if lacks := _native_obstacle(device):
        return Choice("torch", f"{WITHOUT_COMPILED_CODE}: {lacks}")
    return Choice("native", "code compiled for this processor")


def choose(backend: str, *tensors: torch.Tensor | None) -> str:
    """The backend's name for an op on ``tensors``; all of them must be on one device.

    Raises:
        ValueError: tensors on different devices, or a backend that cannot run there.
    """
    device = None
    for tensor in tensors:
        if tensor is not None:
            if device is None:
                device = tensor.device
            elif tensor.device != device:
                raise _apart(tensors)
    if device is None:
        raise _apart(tensors)
    if torch.compiler.is_compiling():
        return explain(device, backend).backend
    # os.environ is looked up anew: datasets replaces it by a copy, where it maps in several
    # processes.
    environment: Any = getattr(os.environ, "_data", os.environ)
    asked: tuple[Any, ...] = device, backend, environment.get(_VARIABLE)
    if device.type not in TRITON_DEVICES:
        asked = *asked, environment.get(_INTERPRETER), _active_driver(), _stands_for
    found = _chosen.get(asked)
    if found is None:
        found = _chosen[asked] = explain(device, backend).backend
    return "torch" if found == "native" and watched() else found


def watched() -> bool:
    """Whether a mode sees PyTorch's operations, such as that of tensors without memory or a counter
    of operations: it would not see compiled code's."""
    return torch._C._len_torch_dispatch_stack() > 0


def _apart(tensors: tuple[torch.Tensor | None, ...]) -> ValueError:
    names = ", ".join(sorted({str(tensor.device) for tensor in tensors if tensor is not None}))
    return ValueError(f"all tensors must be on one device, got {names}: move them to one")


# Choices by all that they depend on.
_chosen: dict[tuple[Any, ...], str] = {}
# The names as os.environ keeps them: looking by os.environ itself takes half a microsecond.
_VARIABLE: Any = BACKEND_VARIABLE
_INTERPRETER: Any = "TRITON_INTERPRET"
if hasattr(os.environ, "_data"):
    _VARIABLE, _INTERPRETER = map(os.environ.encodekey, (_VARIABLE, _INTERPRETER))


class Passes:
    """An op's passes by the backend's name. Triton's passes are imported when they are first asked
    for, since triton need not be installed."""

    def __init__(self, in_torch: Backend, import_triton: Callable[[], Backend]) -> None:
        self._in_torch, self._import_triton = in_torch, import_triton
        self._in_triton: Backend | None = None

    def of(self, backend: str) -> Backend:
        if backend != "triton":
            return self._in_torch
        if self._in_triton is None:
            self._in_triton = self._import_triton()
        return self._in_triton


def _triton_obstacle(device: torch.device) -> str | None:
    """Why Triton kernels cannot take tensors on ``device``; None where they can."""
    if not triton_installed():
        return "triton is not installed (pip install triton)"
    if device.type in TRITON_DEVICES or interpreting():
        return None
    if device.type == "cpu" and _compile_only_driver_active():
        return None
    return (
        f"Triton kernels do not run on {device.type} tensors: move the tensors to a GPU, "
        "set TRITON_INTERPRET=1 before the first call, or use backend='torch'"
    )


def _native_obstacle(device: torch.device) -> str | None:
    """Why compiled code cannot take tensors on ``device``; None where it can."""
    if device.type != "cpu":
        return f"compiled code is for CPUs, not for {device.type} tensors"
    from ._cpu.native.build import why_not

    return why_not()


def _compile_only_driver_active() -> bool:
    """Whether a driver that takes CPU tensors is set, as ahead-of-time compilers do."""
    active = _active_driver()
    return active is not None and active.get_active_torch_device().type == "cpu"


def _active_driver() -> Any:
    """Triton's driver; None as long as nothing has made or set one."""
    runtime = sys.modules.get("triton.runtime")
    return getattr(getattr(runtime, "driver", None), "_active", None)
