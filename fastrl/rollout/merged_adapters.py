"""LoRA adapters added to bf16 copies of the weights, for rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class MergedAdapters:
    """W + Σ s·B·A of the layers with LoRA adapters, computed in fp32, rounded to bf16, and written
    once per rollout to fixed addresses: a decode step runs one product where it would run three,
    and a sum.

    The model's own weights are read, never written. Rounding takes away what is smaller than half
    a bf16 step of W; whoever samples so compares log-probs with the model's own.

    Args:
        enabled: else nothing is merged.
    """

    def __init__(self, enabled: bool = False):
        self.enabled = enabled
        self._copies: dict[int, Tensor] = {}  # by the layer's id

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Context in which layers that compute in bf16 use their merged weights."""
        layers = list(_adapted(model)) if self.enabled else []
        before, self._copies = self._copies, {}
        for layer in layers:
            self._copies[id(layer)] = _write(layer, before.get(id(layer)))
        try:
            for layer in layers:
                # Not by setattr, which would look for parameters in each.
                vars(layer)["forward"] = _MergedForward(layer, self._copies[id(layer)])
            yield
        finally:
            for layer in layers:
                vars(layer).pop("forward", None)

    def stored(self) -> list[Tensor]:
        """The copies."""
        return list(self._copies.values())

    def free(self) -> None:
        self._copies.clear()


class _MergedForward:
    """The forward of a layer whose adapters are in its weight [N, K]."""

    def __init__(self, layer: Any, weight: Tensor):
        self.base, self.weight = layer.get_base_layer(), weight

    def __call__(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        bias = self.base.bias
        bias = None if bias is None else bias.to(self.weight.dtype)
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, bias)


def has_mergeable(model: nn.Module) -> bool:
    """Whether a model has a LoRA layer whose adapters can be merged, in bf16."""
    return any(map(_is_mergeable, model.modules()))


def _adapted(model: nn.Module) -> Iterator[Any]:
    """Layers that compute in bf16, and whose adapters are on."""
    for layer in model.modules():
        if _is_mergeable(layer) and not layer.disable_adapters and not layer.merged:  # type: ignore[truthy-function]
            weight = layer.get_base_layer().weight  # type: ignore[operator]
            kind = weight.device.type
            rounded = weight.dtype == torch.float32 and torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if rounded else weight.dtype
            if dtype == torch.bfloat16 and "forward" not in vars(layer):
                yield layer


def _is_mergeable(layer: Any) -> bool:
    """Plain LoRA on a plain product: no DoRA or other variant, no bias of its own, no quantised
    weight."""
    return (
        type(layer).__module__ == "peft.tuners.lora.layer"
        and type(layer).__name__ == "Linear"
        and type(layer.get_base_layer()) in (nn.Linear, Conv1D)
        and not any(getattr(layer, "lora_variant", {}).values())
        and not any(getattr(layer, "use_dora", {}).values())
        and not any(getattr(layer, "lora_bias", {}).values())
        and not layer.get_base_layer()._forward_hooks
    )


@torch.no_grad()
def _write(layer: Any, there: Tensor | None) -> Tensor:
    """The merged weight [N, K], in the memory that is there, if it fits."""
    base = layer.get_base_layer()
    weight = base.weight.t() if isinstance(base, Conv1D) else base.weight
    merged = weight.float()
    for name in layer.active_adapters:
        if name in layer.lora_A:
            down, up = layer.lora_A[name].weight.float(), layer.lora_B[name].weight.float()
            merged = torch.addmm(merged, up, down, alpha=layer.scaling[name])
    if there is None or there.shape != merged.shape or there.device != merged.device:
        there = torch.empty(merged.shape, dtype=torch.bfloat16, device=merged.device)
    return there.copy_(merged)
