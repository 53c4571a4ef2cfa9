"""Memory of the host, into which some of a device's is moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from fastrl_kernels.dispatch import kind_of_device

Listener = Callable[[], AbstractContextManager[None]]
_listener: ContextVar[Listener | None] = ContextVar("fastrl_host_memory", default=None)


def is_host(device: torch.device) -> bool:
    """Whether a device's memory is the host's, so that there is nothing to move."""
    return kind_of_device(device) == "cpu"


def in_host_memory() -> AbstractContextManager[None]:
    """Context in which tensors are made for the host's memory."""
    listener = _listener.get()
    return nullcontext() if listener is None else listener()


@contextmanager
def counted_by(listener: Listener) -> Iterator[None]:
    """Context in which tensors for the host's memory are made in the listener's context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
