"""Tensors move between the host's memory and a device's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from fastrl.run.contexts import variable_set
from fastrl_kernels.dispatch import kind_of_device

Listener = Callable[[], AbstractContextManager[None]]
_listener: ContextVar[Listener | None] = ContextVar("fastrl_host_memory", default=None)


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the host's, so that there is nothing to move."""
    return kind_of_device(device) == "cpu"


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copies a tensor to a device; returns x itself where it lies there already. A GPU fetches a
    host's tensor from pinned memory, in the order of its work, and the host does not wait."""
    device = torch.device(device)
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def to_host(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copies a tensor to the host's memory, by default in its dtype, and waits for it; on the host
    it may return x itself. From a GPU the copy goes to pinned memory, several times as fast as to
    other memory; torch keeps that memory for the next tensor."""
    if x.device.type != "cuda":
        return x.to("cpu", dtype or x.dtype)
    on_host = torch.empty(x.shape, dtype=dtype or x.dtype, pin_memory=True)
    return on_host.copy_(x)


def later_on_host(x: Tensor) -> Callable[[], Tensor]:
    """Begins to copy a tensor to the host's memory, behind a GPU's work so far; returns a function
    that waits for this copy, and not for later work, and returns it."""
    if x.device.type != "cuda":
        return lambda: x
    on_host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> Tensor:
        copied.synchronize()
        return on_host

    return read


def in_host_memory() -> AbstractContextManager[None]:
    """Context for code that makes tensors in host memory, which a listener may count."""
    listener = _listener.get()
    return nullcontext() if listener is None else listener()


def counted_by(listener: Listener) -> AbstractContextManager[None]:
    """Context in which each :func:`in_host_memory` also enters the listener's context."""
    return variable_set(_listener, listener)
