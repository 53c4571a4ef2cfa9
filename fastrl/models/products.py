"""A model's linear layers on a CPU, computed by the library that is fastest for each weight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastrl_kernels import gemm


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return gemm.linear(x, layer.weight, layer.bias)


def _conv1d(layer: Conv1D, x: Tensor) -> Tensor:
    return gemm.linear(x, layer.weight.t(), layer.bias)


_FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _linear,
    Conv1D: _conv1d,
}


class Products:
    """The libraries of a run's CPU products: the same from its beginning to its end, on resume and
    in every process.

    Attributes:
        choices: the library of each dtype, see :mod:`fastrl_kernels.gemm`.
    """

    def __init__(self) -> None:
        self.choices = gemm.choices()

    @contextlib.contextmanager
    def on(self, *models: nn.Module | None) -> Iterator[None]:
        """Context in which these libraries compute the products of fused heads and of the models'
        linear layers, forward and backward.

        Each nn.Linear and Conv1D has another ``forward`` for that time, so that its hooks still
        run. Layers with a forward or a parametrization of their own are left as they are, and so
        are models on a GPU.
        """
        layers = [layer for model in models if model is not None for layer in _layers(model)]
        forwards = {layer: MethodType(_FORWARDS[type(layer)], layer) for layer in layers}
        with gemm.using(self.choices), _replaced(forwards):
            yield


def _layers(model: nn.Module) -> Iterator[Any]:
    """The plain linear layers on a CPU."""
    for layer in model.modules():
        if (
            type(layer) in _FORWARDS
            and layer.weight.device.type == "cpu"
            and "forward" not in vars(layer)
            and not nn.utils.parametrize.is_parametrized(layer)
        ):
            yield layer


@contextlib.contextmanager
def _replaced(forwards: dict[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    # Not by setattr, which would look for parameters in each.
    for layer, forward in forwards.items():
        vars(layer)["forward"] = forward
    try:
        yield
    finally:
        for layer in forwards:
            vars(layer).pop("forward", None)


class PackedProducts:
    """Linear layers with packed weights, for rollouts, which run them on a few rows many times.

    Weights are packed once per rollout; those that are not trained, once for all, as long as
    nothing is written to them.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[Any, ...], gemm.Packed]] = {}  # by the weight's id

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model's linear layers use their present weights, packed, without
        gradients. Under autocast they are in its dtype."""
        with gemm.using(gemm.choices()), _replaced(dict(self._forwards(model))):
            yield

    def _forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
        before, self._kept = self._kept, {}
        for layer in _layers(model):
            weight = layer.weight
            dtype = weight.dtype
            if dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cpu")
            if not gemm.Packed.suits(weight, dtype):
                continue
            content = (dtype, weight.data_ptr(), weight._version)
            found = before.get(id(weight))
            if weight.requires_grad or found is None or found[0] != content:
                rows = weight if isinstance(layer, nn.Linear) else weight.t()
                found = content, gemm.Packed(rows.to(dtype))
            if not weight.requires_grad:
                self._kept[id(weight)] = found
            yield layer, _PackedForward(found[1], layer.bias)

    def free(self) -> None:
        self._kept.clear()


class _PackedForward:
    def __init__(self, packed: gemm.Packed, bias: Tensor | None):
        self.packed = packed
        self.bias = None if bias is None else bias.to(packed.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed.linear(x, self.bias)
