"""Activation offloading: what a backward pass needs of a forward waits in host memory."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fastrl.models.host_memory import in_host_memory, is_host

SMALLEST = 1024  # bytes: below it a copy costs more time than it saves memory

Offloading = Callable[[nn.Module], AbstractContextManager[Any]]


class Offloaded:
    """A copy of a tensor in host memory."""

    def __init__(self, tensor: Tensor, pin: bool):
        self.device = tensor.device
        with in_host_memory():
            self.on_host = torch.empty_like(
                tensor, device="cpu", pin_memory=pin, requires_grad=False
            )
        self.on_host.copy_(tensor, non_blocking=pin)
        self._source = StorageWeakRef(tensor.untyped_storage())

    @property
    def is_current(self) -> bool:
        """Whether the copied tensor is still there: another one may lie where it was."""
        return not self._source.expired()


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context of forward passes whose saved tensors are copied to host memory, and come back when
    the backward pass, within the context or behind it, asks for them.

    Copies are exact, and ordered with the computation by the device's own stream. What several
    operations save is copied once. Weights and buffers stay where they are, and so do their copies
    in autocast's dtype, small tensors, and tensors that are expanded from smaller ones.

    Args:
        model: the model; its weights must not be moved during the context.
        offloads: whether a tensor is to be copied; by default all that are not in host memory.
    """

    def __init__(self, model: nn.Module, offloads: Callable[[Tensor], bool] | None = None):
        super().__init__(self._pack, self._unpack)
        self._offloads = offloads or _on_device
        weights = [*model.parameters(), *model.buffers()]
        self._kept = {x.untyped_storage().data_ptr() for x in weights}
        # Autocast's copies of weights have their shapes, perhaps transposed.
        self._shapes = {(tuple(sorted(x.shape)), x.dtype) for x in weights if x.ndim > 1}
        self._dtypes = {x.dtype for x in weights}
        # Copies by key: a copy lives as long as a backward pass needs it.
        self._copies: weakref.WeakValueDictionary[Any, Offloaded] = weakref.WeakValueDictionary()
        self.bytes = 0  # bytes that were copied so far

    def __enter__(self) -> OffloadedActivations:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor | Offloaded:
        if not self._offloads(tensor) or not self._is_activation(tensor):
            return tensor
        storage = tensor.untyped_storage()
        key = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        copied = self._copies.get(key)
        if copied is not None and copied.is_current:
            return copied
        packed = Offloaded(tensor, pin=tensor.device.type == "cuda")
        self._copies[key] = packed
        self.bytes += packed.on_host.nbytes
        return packed

    def _unpack(self, packed: Tensor | Offloaded) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return packed.on_host.to(packed.device, non_blocking=True, copy=True)

    def _is_activation(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        if not SMALLEST <= tensor.nbytes <= storage.nbytes():
            return False
        if storage.data_ptr() in self._kept:
            return False
        shape = tuple(sorted(tensor.shape))
        others = self._dtypes - {tensor.dtype}
        return not any((shape, dtype) in self._shapes for dtype in others)


def activation_offloading(wanted: bool, device: torch.device, spread: bool = False) -> Offloading:
    """A function that makes, for a model, the context of forward passes that offloads activations.

    Args:
        wanted: the setting ``activation_offloading``; False: the context does nothing. Warns where
            ``device`` is a CPU, which has nothing to offload.
        spread: whether FSDP2 spreads the weights over processes.

    Raises:
        ValueError: wanted for spread weights, which, once gathered, are saved like activations.
    """
    if not wanted:
        return lambda model: contextlib.nullcontext()
    if spread:
        raise ValueError(
            "activation_offloading is not for weights that FSDP2 spreads, which it would copy, "
            "too: set gradient_checkpointing, or start with DDP"
        )
    if is_host(device):
        warnings.warn(
            "activation_offloading has no effect on a CPU, whose memory is the host's: leave it "
            "out; gradient_checkpointing saves memory there",
            stacklevel=3,
        )
        return lambda model: contextlib.nullcontext()
    return OffloadedActivations


def _on_device(tensor: Tensor) -> bool:
    return not tensor.is_meta and not is_host(tensor.device)
