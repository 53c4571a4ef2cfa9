"""A model's linear layers on a CPU, computed by the library that is fastest for each weight, and
activations in one pass over memory."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from fastrl.run.contexts import attributes_set
from fastrl.run.machine import measure_products_once
from fastrl.run.processes import OneProcess, Processes
from fastrl_kernels import explain, gemm
from fastrl_kernels._cpu.fp32_copies import FreeMemory, keeping
from fastrl_kernels._cpu.native import calls as native
from fastrl_kernels.dispatch import device_kind
from fastrl_kernels.workspace import keep_all_freed_memory


class Products:
    """The libraries that compute a run's matrix products on CPUs: the same from its beginning to
    its end, in every process, and after it is resumed.

    Args:
        processes: the run's processes; the main one's libraries hold for all.

    Attributes:
        choices: the library of each dtype, see :mod:`fastrl_kernels.gemm`.
    """

    def __init__(self, processes: Processes | None = None) -> None:
        processes = processes or OneProcess()
        if processes.is_main and not torch.cuda.is_available():
            measure_products_once()
        chosen = processes.from_main(gemm.as_json(gemm.choices()))
        self.choices = gemm.checked(chosen, "the main process")

    @contextlib.contextmanager
    def on(self, *models: nn.Module | None) -> Iterator[None]:
        """Context in which these libraries compute the products of fused heads and of the models'
        linear layers, forward and backward.

        Each nn.Linear and Conv1D has another ``forward`` for that time, so that its hooks still
        run. Layers with a forward or a parametrization of their own are left as they are, and so
        are models on a GPU.
        """
        present = [model for model in models if model is not None]
        layers = [layer for model in present for layer in _layers(model)]
        if layers:
            keep_all_freed_memory()
        forwards = [(layer, "forward", _Forward(layer)) for layer in layers]
        gelus = [gelu for model in present for gelu in _gelus(model)]
        with (
            gemm.using(self.choices),
            keeping(x.weight for x in layers),
            attributes_set(*forwards, *gelus),
        ):
            yield

    def adopt(self, machine: Mapping[str, Any]) -> None:
        """Takes over the libraries of a run that goes on here, from what it recorded of its machine
        (:func:`fastrl.run.machine.machine`), for an :meth:`on` that has begun, too. A library that
        cannot be used here is replaced, with a warning."""
        before = dict(self.choices)
        self.choices.update(gemm.checked(machine.get("products", {}), "the run so far"))
        named = gemm.forced()
        if named is not None and self.choices != before:
            warnings.warn(
                f"{gemm.LIBRARY_VARIABLE}={named} is not used: the run keeps the libraries that it "
                "began with",
                stacklevel=3,
            )


class PackedProducts:
    """Linear layers with packed weights, for rollouts, which run them on a few rows many times.

    Weights are packed once per rollout; those that are not trained, once for all, as long as
    nothing is written to them. fp32 copies of bf16 weights are freed after each rollout: updates
    have such copies, too. Where there is compiled code, fp32 weights meet few rows in panels, which
    are packed when they first do.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[Any, ...], _Forward]] = {}  # by the layer's id

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model's linear layers use their present weights, packed, without
        gradients. Under autocast they are in its dtype."""
        forwards = ((layer, "forward", forward) for layer, forward in self._forwards(model))
        with gemm.using(gemm.choices()), attributes_set(*forwards, *_gelus(model)):
            yield

    def stored(self) -> list[Tensor]:
        """The packed weights that stay between rollouts."""
        return [copy for _, forward in self._kept.values() for copy in forward.copies()]

    def free(self) -> None:
        self._kept.clear()

    def _forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, _Forward]]:
        before, self._kept, memory = self._kept, {}, FreeMemory()
        layers = list(_layers(model))  # those on a CPU
        compiled = bool(layers) and explain("cpu").backend == "native"
        for layer in layers:
            weight, dtype = layer.weight, layer.weight.dtype
            if dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
                dtype = torch.get_autocast_dtype("cpu")
            library = gemm.library_of(dtype, weight.numel())
            wide = library is gemm.Fp32
            fits = not wide or memory.take(weight.numel() * torch.float32.itemsize)
            tensors = [x for x in (weight, layer.bias) if x is not None]
            content = (dtype, library, fits, *((x.data_ptr(), x._version) for x in tensors))
            kept = before.get(id(layer))
            # Fused optimizers write to weights without a new version.
            if not weight.requires_grad and kept is not None and kept[0] == content:
                forward = kept[1]
            elif compiled and dtype == torch.float32 and native.are_fp32(weight, layer.bias):
                forward = CompiledForward(layer, memory)
            elif gemm.Packed.suits(weight, library) and fits:
                forward = _PackedForward(layer, gemm.Packed(_rows(layer).to(dtype), wide))
            elif dtype == weight.dtype and gemm.Packed.suits_few(_rows(layer)):
                forward = _TallForward(layer)
            elif dtype == torch.float32 and library is gemm.Mm:
                forward = _PlainForward(layer)
            else:
                forward = _Forward(layer)
            if not (weight.requires_grad or wide):
                self._kept[id(layer)] = content, forward
            yield layer, forward


class _Forward:
    packed: gemm.Packed | None = None

    def __init__(self, layer: Any):
        self.layer = layer

    def copies(self) -> list[Tensor]:
        """The copies of the weight that stay as long as this does."""
        return [] if self.packed is None else [self.packed.weight]

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = _rows(self.layer), self.layer.bias
        if not x.numel():  # a fused head computes instead: do not have autocast cast the weight
            with torch.autocast("cpu", enabled=False):
                return nn.functional.linear(x.to(weight.dtype), weight, bias)
        return gemm.linear(x, weight, bias)


class _PlainForward(_Forward):
    """Multiplies by PyTorch's own library, which needs no choice at each call."""

    def __init__(self, layer: Any):
        super().__init__(layer)
        self.weight, self.bias = _rows(layer), layer.bias

    def __call__(self, x: Tensor) -> Tensor:
        if not x.numel():
            return super().__call__(x)
        return nn.functional.linear(x, self.weight, self.bias)


class _PackedForward(_Forward):
    packed: gemm.Packed

    def __init__(self, layer: Any, packed: gemm.Packed):
        super().__init__(layer)
        self.packed = packed
        self.bias = None if layer.bias is None else layer.bias.detach().to(packed.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed.linear(x, self.bias)


class CompiledProduct:
    """The product of a few rows of fp32 x [..., K] with the weights of several layers, [..., ΣN],
    by compiled code: with panels of the weights, as long as there is memory for the copy. Bits
    depend neither on that nor on the number of rows.

    Args:
        layers: linear layers of one input, whose weights are not written to meanwhile.
        memory: what copies may take.
        parts: the products of the single layers.
    """

    _MOST = 128  # rows: for more, PyTorch's libraries are as fast

    def __init__(
        self,
        layers: Sequence[Any],
        memory: FreeMemory,
        parts: Sequence[CompiledProduct] = (),
    ):
        self.memory, self.parts, self.sizes = memory, parts, [len(_rows(x)) for x in layers]
        self.weights = [_rows(x).detach() for x in layers]
        biases = [x.bias.detach() for x in layers if x.bias is not None]
        # The bias itself, which may be trained where the weight is not; a copy of joined ones.
        self.bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
        self.panels: native.Panels | None = None
        self.may_copy = True

    @classmethod
    def takes(cls, x: Tensor) -> bool:
        return 0 < x.numel() <= cls._MOST * x.shape[-1] and native.are_fp32(x)

    def packed(self) -> native.Panels | None:
        """The weights in panels; None where memory is short."""
        if self.panels is None and self.may_copy:  # a layer of joined ones never multiplies alone
            self.may_copy = self.memory.take(sum(x.nbytes for x in self.weights))
            self.panels = native.Panels(*self.weights) if self.may_copy else None
        return self.panels

    def __call__(self, x: Tensor) -> Tensor:
        panels = self.packed()
        if panels is not None:
            return panels.linear(x, self.bias)
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        return torch.cat(list(map(partial(native.linear, x), self.weights, biases)), -1)

    def copies(self) -> list[Tensor]:
        return [] if self.panels is None else [self.panels.weight]


class CompiledForward(_Forward):
    """Multiplies few rows by a :class:`CompiledProduct`."""

    def __init__(self, layer: Any, memory: FreeMemory):
        super().__init__(layer)
        self.product = CompiledProduct([layer], memory)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x) if self.product.takes(x) else super().__call__(x)

    def copies(self) -> list[Tensor]:
        return self.product.copies()


class _TallForward(_Forward):
    """Packs a weight, such as a head's, once it meets as many rows as are faster with it."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] not in gemm.Packed.FEW:
            return super().__call__(x)
        if self.packed is None:
            self.packed = gemm.Packed(_rows(self.layer))
        return self.packed.linear(x, self.layer.bias)


class _Gelu:
    """GELU by tanh in one pass, and one to keep for backward, where transformers' formula has eight
    and five. Half precision is left to the formula, which rounds each of its terms."""

    def __init__(self, activation: nn.Module):
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return type(self.activation).forward(self.activation, x)
        return nn.functional.gelu(x, approximate="tanh")


def _gelus(model: nn.Module) -> Iterator[tuple[nn.Module, str, _Gelu]]:
    """Forwards in place of the tanh formulas of a model on a CPU."""
    parameter = next(model.parameters(), None)
    if parameter is None or device_kind(parameter) != "cpu":
        return
    for module in model.modules():
        if type(module) in (NewGELUActivation, FastGELUActivation) and "forward" not in vars(
            module
        ):
            yield module, "forward", _Gelu(module)


def compiled_product(layer: Any) -> CompiledProduct | None:
    """A plain layer's product by compiled code, if it is computed so."""
    forward = vars(layer).get("forward")
    return forward.product if isinstance(forward, CompiledForward) and is_plain(layer) else None


def joined(layers: Sequence[Any], before: CompiledProduct | None) -> CompiledProduct | None:
    """The product with the weights of several layers, where each multiplies by compiled code, and
    all have a bias or none; the one before where the layers' copies are still those."""
    forwards = [vars(layer).get("forward") for layer in layers]
    parts = [x.product for x in forwards if isinstance(x, CompiledForward)]
    if len(parts) < len(layers) or len({x.bias is None for x in parts}) > 1:
        return None
    if before is not None and all(map(operator.is_, before.parts, parts)):
        return before
    return CompiledProduct(layers, parts[0].memory, parts)


def _rows(layer: Any) -> Tensor:
    """The weight as [outputs, inputs]."""
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a layer's ``forward`` was replaced by other code than this file's."""
    return "forward" in vars(layer) and not isinstance(vars(layer)["forward"], _Forward)


def is_packed(layer: nn.Module) -> bool:
    return isinstance(vars(layer).get("forward"), _PackedForward)


def is_plain(layer: Any) -> bool:
    """Whether a layer is an nn.Linear without hooks that multiplies by its weight as it is. A
    parametrized layer has a class of its own."""
    changed = has_own_forward(layer) or is_packed(layer)
    return type(layer) is nn.Linear and not (
        changed or layer._forward_hooks or layer._forward_pre_hooks
    )


def _layers(model: nn.Module) -> Iterator[Any]:
    """The linear layers on a CPU whose ``forward`` nobody else has replaced."""
    for layer in model.modules():
        if (
            type(layer) in (nn.Linear, Conv1D)
            and isinstance(getattr(layer, "weight", None), Tensor)  # compressed-tensors has none
            and layer.weight.device.type == "cpu"
            and not has_own_forward(layer)
        ):
            yield layer
