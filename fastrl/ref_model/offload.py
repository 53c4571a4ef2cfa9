"""A frozen copy in host memory as reference model: the device holds one layer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.trunk import layer_stack
from fastrl.models.value_head import PreTrainedModelWrapper
from fastrl.ref_model.copy import SecondModel


class Unit:
    """Weights that come to the device together, and go together."""

    def __init__(self, weights: list[Tensor]):
        self.weights = weights
        pin = torch.cuda.is_available()
        self.on_host = [x.data.pin_memory() if pin else x.data for x in weights]
        self.take_away()

    def bring(self, device: torch.device) -> None:
        for weight, on_host in zip(self.weights, self.on_host, strict=True):
            weight.data = on_host.to(device, non_blocking=True)

    def take_away(self) -> None:
        for weight, on_host in zip(self.weights, self.on_host, strict=True):
            weight.data = on_host


class OffloadRefModel(SecondModel):
    """A copy whose layers are brought over one by one as it runs; embeddings and head stay on the
    device from the beginning of a forward to its end."""

    mode = "offload"

    def __init__(
        self,
        model: PreTrainedModelWrapper,
        policy: nn.Module | None = None,
        why: str = "",
    ):
        super().__init__(model.cpu(), policy, why)
        self.device = torch.device("cpu")
        layers = list(layer_stack(model.pretrained_model))
        inside = {id(x) for layer in layers for x in _tensors(layer)}
        rest = [x for x in _tensors(model) if id(x) not in inside]
        self.units = [Unit(rest), *(Unit(_tensors(layer)) for layer in layers)]
        self._all_here = False
        for module, unit in zip([model, *layers], self.units, strict=True):
            module.register_forward_pre_hook(lambda _m, _args, unit=unit: self._bring(unit))
            # also after an error, so that nothing stays behind
            module.register_forward_hook(
                lambda _m, _args, _out, unit=unit: self._take_away(unit), always_call=True
            )

    def place(self, policy: nn.Module, accelerator: Any) -> None:
        self.device = accelerator.device

    @contextlib.contextmanager
    def as_policy(self) -> Iterator[nn.Module]:
        """The whole reference is on the device meanwhile: every token needs every layer."""
        for unit in self.units:
            unit.bring(self.device)
        self._all_here = True
        try:
            yield self.model
        finally:
            self._all_here = False
            for unit in self.units:
                unit.take_away()

    def _bring(self, unit: Unit) -> None:
        if not self._all_here:
            unit.bring(self.device)

    def _take_away(self, unit: Unit) -> None:
        if not self._all_here:
            unit.take_away()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
