"""Forwards of a causal language model in rollouts, prefill and decode steps, and a cache of its
weights under autocast."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fastrl.models import quantised
from fastrl.models.attention import Variant, attached, attending
from fastrl.models.flash_attention import asks_for_flash_attention
from fastrl.models.latents import latent_layers, latents_kept
from fastrl.models.lm_head import in_front_of_head
from fastrl.models.products import PackedProducts, is_packed
from fastrl.models.routing import routed
from fastrl.models.utils import cache_argument, cache_of, evaluating
from fastrl.models.value_head import PreTrainedModelWrapper
from fastrl.rollout.attention import (
    CachedAttention,
    DecodeAttention,
    PrefillDone,
    SlotCache,
    choose_decode_kernel,
)
from fastrl.rollout.fused_draw import FusedDraw
from fastrl.rollout.fused_layers import FusedLayers, VariantsOf
from fastrl.rollout.kv_cache import CONVOLUTION, RECURRENT, KVCache, LayerShape, StateShape
from fastrl_kernels import explain
from fastrl_kernels.dispatch import BACKEND_VARIABLE, WITHOUT_COMPILED_CODE, kind_of_device

Autocast = Callable[[], contextlib.AbstractContextManager]


class ModelRunner:
    """Runs a model's forward on prompts and on single tokens, with the engine's attention.

    Args:
        model: a causal LM, or a fastrl model around one.
        autocast: makes the context in which the model runs.
    """

    def __init__(self, model: Any, autocast: Autocast = contextlib.nullcontext):
        self.model = model
        self.v_head = getattr(model, "v_head", None)
        wrapped = isinstance(model, PreTrainedModelWrapper)
        quantised.settle(model)
        self.language_model: Any = model.pretrained_model if wrapped else model
        self.autocast = autocast
        self.attends_by_flash = asks_for_flash_attention(self.language_model)
        self._cache = SlotCache()
        self._cache_argument = cache_argument(self.language_model)
        self._hidden: Tensor | None = None
        self._one = torch.ones(1, 1, dtype=torch.long)
        self.fused_layers = FusedLayers(self.language_model)
        self.fused_draw = FusedDraw(self.language_model)
        self.autocast_weights = AutocastWeightCache()
        self.packed_products = PackedProducts()

    @property
    def device(self) -> torch.device:
        return self.language_model.device

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context of a rollout: no dropout, no gradients, the engine's attention, and the model's
        device as torch's current one, whose streams and events are used."""
        self.fused_draw.look()
        try:
            with (
                current(self.device),
                torch.no_grad(),
                evaluating(self.model),
                attached(self.language_model),
                latents_kept(self.language_model),
                in_front_of_head(self.language_model, self._before_head),
                self.autocast(),
                self.packed_products.in_place(self.language_model),
                self.autocast_weights.in_place(self.language_model, self.fused_layers.together()),
                self.fused_layers.in_place(),
            ):
                yield
        finally:
            self._cache = SlotCache()  # the old one's attention holds the KV cache

    def copies(self) -> list[Tensor]:
        """The casts of weights for autocast, which stay between rollouts."""
        return self.autocast_weights.stored()

    def stored(self) -> list[Tensor]:
        """All copies of weights that stay between rollouts."""
        kept = self.packed_products.stored() + self.fused_layers.stored()
        return self.copies() + kept

    def free(self) -> None:
        """Frees the copies of weights, and what fused layers keep."""
        for kept in (self.autocast_weights, self.packed_products, self.fused_layers):
            kept.free()

    def autocast_dtype(self) -> torch.dtype | None:
        """Dtype of matrix products under autocast, the caller's included; None where it is off."""
        with self.autocast():
            kind = self.device.type
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def prefill(self, tokens: Tensor, positions: Tensor, attention: CachedAttention) -> None:
        """Computes keys and values of tokens [T] at positions [T], up to the last layer's."""
        self._hidden = None
        with contextlib.suppress(PrefillDone):
            self._run(tokens.unsqueeze(0), positions.unsqueeze(0), attention, head=False)

    def decode(
        self, tokens: Tensor, positions: Tensor, attention: CachedAttention
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [b, V] after tokens [b] at positions [b]; values [b] too, with a value head."""
        logits = self._run(tokens.unsqueeze(1), positions.unsqueeze(1), attention, head=True)
        hidden, self._hidden = self._hidden, None
        return logits.squeeze(1), self._values(hidden)

    def decode_hidden(
        self, tokens: Tensor, positions: Tensor, attention: CachedAttention
    ) -> tuple[Tensor, Tensor | None]:
        """What :meth:`decode` returns, with the LM head's inputs [b, H] in place of logits."""
        self._run(tokens.unsqueeze(1), positions.unsqueeze(1), attention, head=False)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden.squeeze(1), self._values(hidden)

    def _values(self, hidden: Tensor | None) -> Tensor | None:
        if self.v_head is None:
            return None
        assert hidden is not None
        return self.v_head(hidden).flatten()

    def _run(
        self, tokens: Tensor, positions: Tensor, attention: CachedAttention, head: bool
    ) -> Any:
        self._with_head = head
        if self._one.device != tokens.device:
            self._one = torch.ones(1, 1, dtype=torch.long, device=tokens.device)
        self._cache.attention = attention
        with attending(attention), routed(attention):
            return self.language_model(
                input_ids=tokens,
                position_ids=positions,
                # Without a mask some models search the tokens for padding.
                attention_mask=self._one.expand(tokens.shape),
                use_cache=True,
                **{self._cache_argument: self._cache},
            ).logits

    def _before_head(self, _head: Any, hidden: Tensor) -> Tensor:
        self._hidden = hidden
        return hidden if self._with_head else hidden[:, :0]

    def fuse_layers(self, layers: list[LayerShape]) -> None:
        """Has decode steps run the layers with few launches, where Triton or compiled code runs and
        layers fuse.

        Args:
            layers: see :meth:`layer_shapes`.
        """
        backend, reason = explain(self.device)
        plain = self.dtype == torch.float32 and self.autocast_dtype() is None
        if plain and reason.startswith(WITHOUT_COMPILED_CODE):
            warnings.warn(
                f"rollouts run PyTorch's operations one by one, which is slower: {reason}. "
                f"{BACKEND_VARIABLE}=torch is for those who mean it",
                stacklevel=3,
            )
        if backend != "triton" and not (backend == "native" and plain):
            return

        def decode() -> tuple[Tensor, list[Variant]]:
            self.autocast_weights.free()  # fused layers need copies at other addresses
            rows, steps = 2, 3
            kv_cache = KVCache(layers, rows, 2 * steps, self.dtype, self.device)
            kernel = choose_decode_kernel(kv_cache, self.attends_by_flash)
            with self.opened():
                for i in range(steps):
                    positions = torch.tensor([i, i + 2], device=self.device)
                    attention = VariantsOf(kernel, kv_cache, positions, 2 * steps)
                    logits, _ = self.decode(positions + 1, positions, attention)
            return logits, attention.variants

        self.fused_layers.activate(decode)

    def fuse_draw(self, layers: list[LayerShape]) -> None:
        """Has decode steps draw by :class:`FusedDraw` where their number of rows lets it pay, if
        it agrees with the model's logits; only on NVIDIA GPUs, for which it is known when it pays.

        Args:
            layers: see :meth:`layer_shapes`.
        """
        if explain(self.device).backend != "triton" or torch.version.hip is not None:
            return
        rows = 2
        with self.opened():
            if not self.fused_draw.ever_pays():
                return
            kv_cache = KVCache(layers, rows, rows, self.dtype, self.device)
            positions = torch.zeros(rows, dtype=torch.long, device=self.device)
            attention = DecodeAttention(choose_decode_kernel(kv_cache), kv_cache, positions, rows)
            tokens = torch.arange(rows, device=self.device)
            hidden, _ = self.decode_hidden(tokens, positions, attention)
            logits, _ = self.decode(tokens, positions, attention)
            self.fused_draw.activate(hidden, logits)

    @torch.no_grad()
    def layer_shapes(self) -> list[LayerShape]:
        """Shapes of one token's keys and values, and of states, from a forward with the model's own
        cache. Also sets ``dtype``, in which keys and values are kept: on a GPU autocast's, which
        would else cast them for every product of attention."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with evaluating(self.model), self.autocast():
            cache = cache_of(
                self.language_model(
                    input_ids=token, attention_mask=torch.ones_like(token), use_cache=True
                )
            )
        layers, latent = [], latent_layers(self.language_model)
        self.dtype = next(x.keys.dtype for x in cache.layers if _attends(x))
        for i, layer in enumerate(cache.layers):
            heads = key_width = value_width = 0
            if _attends(layer):
                _, heads, _, key_width = layer.keys.shape
                value_width = layer.values.shape[3]
            if i in latent:  # a latent, and a rotated key behind it
                key_width, value_width = key_width + value_width, key_width
            shape = heads, key_width, value_width
            layers.append(LayerShape(*shape, tuple(_states(layer)), latent=i in latent))
        autocast = self.autocast_dtype()
        if autocast is not None and kind_of_device(self.device) != "cpu":
            self.dtype = autocast
        return layers


def _attends(layer: Any) -> bool:
    return getattr(layer, "keys", None) is not None


def _states(layer: Any) -> Iterator[StateShape]:
    for kind, states in (
        (CONVOLUTION, getattr(layer, "conv_states", {})),
        (RECURRENT, getattr(layer, "recurrent_states", {})),
    ):
        for index, state in states.items():
            if state is not None:
                yield StateShape(kind, index, tuple(state.shape[1:]), state.dtype)


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Context in which a GPU is torch's current one."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


_PRODUCTS = (nn.Linear, Conv1D)


class AutocastWeightCache:
    """Casts of the fp32 weights and biases of a model's matrix products, at fixed addresses, made
    once per rollout instead of once per decode step.

    Autocast would cast them for every product, or cache them where a captured decode step must not
    read them. Other weights, such as an embedding that is tied to the head, stay as they are:
    results are those of autocast, bit by bit.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], Any] = {}

    @contextlib.contextmanager
    def in_place(self, model: nn.Module, together: Sequence[Sequence[Any]] = ()) -> Iterator[None]:
        """Context in which products use casts of the present weights, if autocast is on.

        Args:
            together: lists of layers whose casts lie one behind the other; no layer is in two.
        """
        kind = next(model.parameters()).device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        dtype = torch.get_autocast_dtype(kind)
        caching = torch.is_autocast_cache_enabled()
        places = list(_places(model))
        copies = self._written([x for _, _, x in places], dtype, together)
        try:
            torch.set_autocast_cache_enabled(False)
            for (module, name, _), copy in zip(places, copies, strict=True):
                module._parameters[name] = copy
            yield
        finally:
            for module, name, weight in places:
                module._parameters[name] = weight
            torch.set_autocast_cache_enabled(caching)

    def stored(self) -> list[Tensor]:
        return list(self._copies.values())

    def free(self) -> None:
        self._copies.clear()

    @torch.no_grad()
    def _written(
        self, weights: list[nn.Parameter], dtype: torch.dtype, together: Sequence[Sequence[Any]]
    ) -> list[nn.Parameter]:
        before, self._copies = self._copies, {}
        for group in (*_tensors_of(together, weights), *([weight] for weight in weights)):
            if any((id(weight), dtype) in self._copies for weight in group):
                continue
            copies: list[Any] = [before.get((id(weight), dtype)) for weight in group]
            if not all(map(_fits, copies, group)):
                copies = _side_by_side(group, dtype)
            for weight, copy in zip(group, copies, strict=True):
                self._copies[id(weight), dtype] = copy
        written = [self._copies[id(weight), dtype] for weight in weights]
        targets: list[Tensor] = [copy.data for copy in written]
        if targets:
            torch._foreach_copy_(targets, [weight.data for weight in weights])
        return written


def _tensors_of(
    together: Sequence[Sequence[Any]], weights: list[nn.Parameter]
) -> Iterator[list[nn.Parameter]]:
    """The weights, and the biases, of each list of layers, where all are cast."""
    cast = {id(weight) for weight in weights}
    for layers in together:
        for name in ("weight", "bias"):
            group: list[Any] = [getattr(layer, name, None) for layer in layers]
            if all(id(x) in cast and x.shape[1:] == group[0].shape[1:] for x in group):
                yield group


def _fits(copy: nn.Parameter | None, weight: nn.Parameter) -> bool:
    return copy is not None and (copy.shape, copy.device) == (weight.shape, weight.device)


def _side_by_side(weights: list[nn.Parameter], dtype: torch.dtype) -> list[Any]:
    """Memory for casts of weights, one piece for all."""
    rows = list(map(len, weights))
    shape = sum(rows), *weights[0].shape[1:]
    whole = torch.empty(shape, dtype=dtype, device=weights[0].device)
    return [nn.Parameter(x, requires_grad=False) for x in whole.split(rows)]


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """The fp32 weights and biases of plain products: their modules, names and parameters."""
    for module in model.modules():
        if type(module) in _PRODUCTS and not is_packed(module):
            for name, weight in module.named_parameters(recurse=False):
                if weight.dtype == torch.float32:
                    yield module, name, weight
