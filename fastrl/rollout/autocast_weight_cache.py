"""Weights in the precision of autocast, written once per rollout in place of a cast per step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_PRODUCTS = (nn.Linear, Conv1D)


class Shadow:
    """Copies of the fp32 weights and biases of a model's matrix products, at fixed addresses.

    Autocast would make them anew for every product, or keep them where a captured step must not
    look for them. Everything else, an embedding that shares its table with the head among it, stays
    as it is: results are those of autocast, bit by bit.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], nn.Parameter] = {}

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """While open, the products use copies of the weights as they are now, if autocast is on."""
        kind = next(model.parameters()).device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        dtype = torch.get_autocast_dtype(kind)
        caching = torch.is_autocast_cache_enabled()
        places = list(_places(model))
        copies = self._written([x for _, _, x in places], dtype)
        try:
            torch.set_autocast_cache_enabled(False)
            for (module, name, _), copy in zip(places, copies, strict=True):
                module._parameters[name] = copy
            yield
        finally:
            for module, name, weight in places:
                module._parameters[name] = weight
            torch.set_autocast_cache_enabled(caching)

    def free(self) -> None:
        self._copies.clear()

    @torch.no_grad()
    def _written(self, weights: list[nn.Parameter], dtype: torch.dtype) -> list[nn.Parameter]:
        before, self._copies = self._copies, {}
        for weight in weights:
            copy = before.get((id(weight), dtype))
            if copy is None or copy.shape != weight.shape or copy.device != weight.device:
                empty = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
                copy = nn.Parameter(empty, requires_grad=False)
            self._copies[id(weight), dtype] = copy
        copies = [self._copies[id(weight), dtype] for weight in weights]
        targets: list[Tensor] = [copy.data for copy in copies]
        torch._foreach_copy_(targets, [weight.data for weight in weights])
        return copies


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Where fp32 weights and biases of plain products are kept."""
    for module in model.modules():
        if type(module) in _PRODUCTS and not nn.utils.parametrize.is_parametrized(module):
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype == torch.float32:
                    yield module, name, weight
