"""A reference model that is a frozen copy in host memory: the device holds one layer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.learn.ref_model.copy import SecondModel
from fastrl.models.trunk import layer_stack
from fastrl.models.value_head import PreTrainedModelWrapper


class OffloadedWeights:
    """Weights that are loaded to the device, and unloaded, together."""

    def __init__(self, weights: list[Tensor]):
        self.weights = weights
        pin = torch.cuda.is_available()
        self.on_host = [x.data.pin_memory() if pin else x.data for x in weights]
        self.unload()

    def load(self, device: torch.device) -> None:
        for weight, on_host in zip(self.weights, self.on_host, strict=True):
            weight.data = on_host.to(device, non_blocking=True)

    def unload(self) -> None:
        for weight, on_host in zip(self.weights, self.on_host, strict=True):
            weight.data = on_host


class OffloadRefModel(SecondModel):
    """A reference in host memory whose layers are loaded one by one as it runs; embeddings and head
    stay on the device during a whole forward pass."""

    mode = "offload"

    def __init__(self, model: PreTrainedModelWrapper, policy: nn.Module | None = None):
        super().__init__(model.cpu(), policy)
        self.device = torch.device("cpu")
        layers = list(layer_stack(model.pretrained_model))
        in_layers = {id(x) for layer in layers for x in _tensors(layer)}
        rest = [x for x in _tensors(model) if id(x) not in in_layers]
        self.units = [OffloadedWeights(x) for x in (rest, *map(_tensors, layers))]
        self._all_loaded = False
        for module, unit in zip([model, *layers], self.units, strict=True):
            module.register_forward_pre_hook(lambda _m, _args, unit=unit: self._load(unit))
            # The hook unloads weights after an error, too.
            module.register_forward_hook(
                lambda _m, _args, _out, unit=unit: self._unload(unit), always_call=True
            )

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.device = accelerator.device

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        """Keeps the whole reference on the device: each token generated needs all layers."""
        for unit in self.units:
            unit.load(self.device)
        self._all_loaded = True
        try:
            yield self.model
        finally:
            self._all_loaded = False
            for unit in self.units:
                unit.unload()

    def _load(self, unit: OffloadedWeights) -> None:
        if not self._all_loaded:
            unit.load(self.device)

    def _unload(self, unit: OffloadedWeights) -> None:
        if not self._all_loaded:
            unit.unload()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
