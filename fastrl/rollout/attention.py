"""Attention of a Hugging Face model over the rollout's KV cache, in prefill and decode steps."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

import fastrl_kernels
from fastrl.models.attention import Attention, Variant
from fastrl.models.flash_attention import flash_attn_with_kvcache
from fastrl.models.host_memory import to_device
from fastrl.models.latents import Latents
from fastrl.models.packed_attention import Group, PackedAttention, PackedLayout
from fastrl.rollout.kv_cache import CONVOLUTION, RECURRENT, KVCache
from fastrl_kernels import HeadNorms, LiveTokens
from fastrl_kernels._cpu.native.decode_layer import DecodeLayer
from fastrl_kernels.dispatch import BACKEND_VARIABLE


class CachedAttention(Attention, Protocol):
    """Attention over cached keys and values, or latents; and the states of other layers."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's keys and values [B, Hkv, T, D], or latents and rotated keys; returns
        what `attend` gets."""

    @property
    def any_layer(self) -> int | None:
        """The number of a layer that keeps a state; None where there is none."""

    def state(self, layer: int, kind: str, index: int) -> Tensor | None:
        """The state [B, ...] that a layer continues from; None where texts begin."""

    def write_inputs(self, layer: int, index: int, inputs: Tensor) -> None:
        """Stores the last of a convolution's inputs [B, C, T], as many as its state holds."""

    def write_state(self, layer: int, index: int, state: Tensor) -> None:
        """Stores the state [B, ...] of a recurrent layer."""

    def route(self, number: int, router: Any, args: tuple, out: tuple) -> None:
        """Stores a router's choices."""


class SlotCache(Cache):
    """The model's ``past_key_values``: hands what it gets to the current forward's attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layers: Any = _StatesOfLayers(self)
        self.attention: CachedAttention

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.attention.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # rows have lengths of their own: models get positions

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.attention.state(layer_idx, CONVOLUTION, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.attention.write_inputs(layer_idx, state_idx, conv_states)
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.attention.state(layer_idx, RECURRENT, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.attention.write_state(layer_idx, state_idx, recurrent_states)
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        layer_idx = self.attention.any_layer if layer_idx is None else layer_idx
        if layer_idx is None:
            return False
        return self.attention.state(layer_idx, CONVOLUTION, state_idx or 0) is not None

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return False


class _StatesOfLayers(list):
    """A :class:`SlotCache`'s layers, which transformers before 5.20 searches for states itself."""

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache = cache

    def __getitem__(self, index: Any) -> Any:
        return _StatesOfLayer(self.cache, index)


class _StatesOfLayer:
    record_past = False

    def __init__(self, cache: SlotCache, index: int):
        self.cache, self.index = cache, index

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        return {0: self.cache.get_conv_state(self.index)}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        return {0: self.cache.get_recurrent_state(self.index)}


# A kernel's arguments: queries [B, Hq, 1, D]; keys and values [S, M, Hkv, D], where row i attends
# slot i; the rows' live tokens, with int32 lengths; a span that no length exceeds; the variant. A
# kernel returns [B, 1, Hq, D].
DecodeKernel = Callable[[Tensor, Tensor, Tensor, LiveTokens, int, Variant], Tensor]


class DecodeAttention:
    """Attention of one new token in each of the first slots, at positions [b].

    Args:
        kernel: the kernel from :func:`choose_decode_kernel`.
        span: a number of tokens that no slot exceeds, its new token included.
    """

    def __init__(self, kernel: DecodeKernel, kv_cache: KVCache, positions: Tensor, span: int):
        self.kernel, self.kv_cache, self.at, self.span = kernel, kv_cache, positions, span
        # One tensor for all layers; int32, which all kernels take.
        lengths = torch.empty(len(positions), dtype=torch.int32, device=positions.device)
        self.live = LiveTokens(torch.add(positions, 1, out=lengths))
        self.layer = 0  # the number of the layer that runs

    @property
    def positions(self) -> Tensor:
        """The new tokens' positions, [b, 1]."""
        return self.at.unsqueeze(1)

    @functools.cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """The places of the rows' new tokens in the cache: slots [b], and positions there [b]."""
        return torch.arange(len(self.at), device=self.at.device), self.at

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.layer = layer
        stored = self.kv_cache.stored(layer)
        for whole, new in zip(stored, (keys, values), strict=True):
            whole.index_put_(self.places, new.squeeze(2).to(whole.dtype))
        return stored

    @property
    def any_layer(self) -> int | None:
        return next((layer for layer, *_ in self.kv_cache.states), None)

    def state(self, layer: int, kind: str, index: int) -> Tensor:
        """A view of a layer's states, which the model's convolutions change in place."""
        return self.kv_cache.states[layer, kind, index][: len(self.at)]

    def write_inputs(self, layer: int, index: int, inputs: Tensor) -> None:
        raise NotImplementedError("a convolution does not change its state in place")

    def write_state(self, layer: int, index: int, state: Tensor) -> None:
        kept = self.state(layer, RECURRENT, index)
        if state.data_ptr() != kept.data_ptr():  # else the model changed it in place
            kept.copy_(state)

    def route(self, number: int, _router: Any, _args: tuple, out: tuple) -> None:
        """Stores a router's choices, see :class:`fastrl.models.routing.Routes`."""
        kept = self.kv_cache.experts
        if kept:
            kept[number].index_put_(self.places, out[2].to(kept[number].dtype))

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        norms: HeadNorms | None,
    ) -> Tensor:
        """Stores a layer's rotated keys and its values [b, Hkv, D]; returns rotated queries."""
        self.layer = layer
        stored = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        return fastrl_kernels.rotate_and_store(
            query, key, value, cos, sin, *stored, self.at, norms=norms
        )

    def run_layer(
        self,
        layer: int,
        run: DecodeLayer,
        x: Tensor,
        stream: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        variant: Variant,
    ) -> tuple[Tensor, Tensor]:
        """Runs a whole layer by compiled code, in one call: its last product and the stream, see
        :class:`fastrl_kernels._cpu.native.decode_layer.DecodeLayer`."""
        self.layer = layer
        self.kv_cache.windows[layer] = variant.window or variant.chunk
        cache = self.kv_cache.keys[layer], self.kv_cache.values[layer]
        return run(x, stream, rotation, cache, self.at, self.live.lengths, self.span)

    def attend_written(self, query: Tensor, variant: Variant) -> Tensor:
        """Attends with queries [b, Hq, D] to the cache of the layer that was written last."""
        stored = self.kv_cache.keys[self.layer], self.kv_cache.values[self.layer]
        return self.attend(query.unsqueeze(2), *stored, variant)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        self.kv_cache.windows[self.layer] = variant.window or variant.chunk
        if variant.latents is not None:
            return self._attend_latents(query, keys, values, variant, variant.latents)
        return self.kernel(query.to(keys.dtype), keys, values, self.live, self.span, variant)

    def _attend_latents(
        self, query: Tensor, latents: Tensor, rotated: Tensor, variant: Variant, layer: Latents
    ) -> Tensor:
        if variant.scale is None:
            variant = variant._replace(scale=query.shape[-1] ** -0.5)
        if layer.are_absorbed():
            keys, values = self.kv_cache.keys[self.layer], self.kv_cache.values[self.layer]
            query = layer.absorbed(query).to(keys.dtype)
            out = self.kernel(query, keys, values, self.live, self.span, variant)
            return layer.values(out)
        rows = slice(len(query)), slice(self.span)
        keys, values = layer.expanded(*(x[rows].transpose(1, 2) for x in (latents, rotated)))
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return self.kernel(query.to(keys.dtype), keys, values, self.live, self.span, variant)


class PrefillDone(Exception):
    """Ends a prefill's forward once all keys, values and states are stored: no output is needed."""


class PrefillAttention:
    """Attention of prompts packed in one row [1, T], each attending to itself alone.

    Args:
        lengths: the prompts' lengths, whose sum is T.
        slots: the slots of each prompt, in each of which its keys and values are stored.
    """

    def __init__(self, kv_cache: KVCache, lengths: list[int], slots: list[list[int]]):
        self.kv_cache = kv_cache
        # The number of writes by the model's layers that are still to come.
        self.writes_left = sum(bool(x.heads) + len(x.states) for x in kv_cache.layers)
        device = kv_cache.keys[0].device
        self.layout = PackedLayout([Group(length) for length in lengths], device)
        self.packed = PackedAttention(self.layout)
        sources, where, positions = [], [], []
        start = 0
        for length, targets in zip(lengths, slots, strict=True):
            tokens = torch.arange(length)
            sources.append((start + tokens).repeat(len(targets)))
            where.append(torch.tensor(targets).repeat_interleave(length))
            positions.append(tokens.repeat(len(targets)))
            start += length
        stored = torch.stack([torch.cat(x) for x in (sources, where, positions)])
        self.sources, *places = to_device(stored, device)
        self.places = tuple(places)
        pairs = [(slot, i) for i, targets in enumerate(slots) for slot in targets]
        self.prompt_of_slot = tuple(to_device(torch.tensor(pairs).t().contiguous(), device))

    @property
    def positions(self) -> Tensor:
        """The tokens' positions, [1, T]."""
        return self.packed.positions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = self.kv_cache.stored(layer)
        for whole, new in zip(stored, (keys, values), strict=True):
            tokens = new[0].transpose(0, 1)[self.sources]
            whole.index_put_(self.places, tokens.to(whole.dtype))
        self._written()
        return keys, values

    any_layer = None  # a prefill begins texts: no layer has a state yet

    def state(self, layer: int, kind: str, index: int) -> None:
        return None

    def write_inputs(self, layer: int, index: int, inputs: Tensor) -> None:
        key = layer, CONVOLUTION, index
        last = self.layout.by_parts.last(self.kv_cache.states[key].shape[-1])
        longer = F.pad(inputs[0], (0, 1))  # [C, T + 1]
        self._begin(key, longer[:, last].transpose(0, 1))  # [P, C, K]

    def write_state(self, layer: int, index: int, state: Tensor) -> None:
        self._begin((layer, RECURRENT, index), state)

    def _begin(self, key: tuple[int, str, int], of_prompts: Tensor) -> None:
        slots, prompts = self.prompt_of_slot
        self.kv_cache.begin_states(key, slots, of_prompts[prompts])
        self._written()

    def _written(self) -> None:
        self.writes_left -= 1
        if self.writes_left == 0:
            raise PrefillDone

    def route(self, number: int, _router: Any, _args: tuple, out: tuple) -> None:
        """Stores a router's choices, see :meth:`DecodeAttention.route`. The last layer's router
        does not run in a prefill, and its choices are not needed."""
        kept = self.kv_cache.experts
        if kept:
            kept[number].index_put_(self.places, out[2].to(kept[number].dtype)[self.sources])

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        if variant.latents is not None:
            keys, values = variant.latents.expanded(keys, values)
        return self.packed.attend(query, keys, values, variant)


_WIDEST = 256  # the largest width of a head in flash-attn 2
_ARGUMENTS = ("cache_seqlens", "softmax_scale", "causal", "window_size", "softcap")


def choose_decode_kernel(kv_cache: KVCache, from_hub: bool = False) -> DecodeKernel:
    """flash-attn's kernel where it is installed and fits, else ours.

    Args:
        from_hub: where flash-attn is not installed, take its build from the Hub, or raise
            ImportError.

    ``flash_attn_with_kvcache`` is written for tensor cores and takes the KV cache as it is. It is
    used on NVIDIA GPUs from Ampere on, in fp16 and bf16, for keys as wide as values, a multiple of
    8 up to 256 (it would copy the cache to pad others), unless ``FASTRL_KERNELS_BACKEND`` names a
    backend of ours. It may split a row's tokens by the number of rows, so that a row's last bits
    depend on that; those of ``fastrl_kernels.decode_attention`` do not.
    """
    stored = kv_cache.keys[0]
    widths = [(layer.key_width, layer.value_width) for layer in kv_cache.layers]
    fits = (
        _runs_flash(stored.device)
        and stored.dtype in (torch.float16, torch.bfloat16)
        and all(k == v and k % 8 == 0 and k <= _WIDEST for k, v in widths)
        and os.environ.get(BACKEND_VARIABLE, "auto") == "auto"
    )
    kernel = _flash_attn(from_hub) if fits else None
    return decode if kernel is None else FlashDecode(kernel)


def decode(
    query: Tensor, keys: Tensor, values: Tensor, live: LiveTokens, span: int, variant: Variant
) -> Tensor:
    """Decode attention by ``fastrl_kernels.decode_attention``."""
    out = fastrl_kernels.decode_attention(
        query.squeeze(2),
        keys,
        values,
        live,
        span=span,
        scale=variant.scale,
        window=variant.window,
        chunk=variant.chunk,
        softcap=variant.softcap,
        sinks=variant.sinks,
    )
    return out.unsqueeze(1)


class FlashDecode:
    """Decode attention by ``flash_attn_with_kvcache`` (flash-attn from 2.6 on), but for layers with
    sinks or chunks, which it does not have."""

    def __init__(self, kernel: Callable[..., Any]):
        self.kernel = kernel

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        live: LiveTokens,
        span: int,
        variant: Variant,
    ) -> Tensor:
        if variant.sinks is not None or variant.chunk is not None:
            return decode(query, keys, values, live, span, variant)
        rows, before = len(query), -1  # all tokens before the query's own
        # With a window, even a long one, flash-attn does not pack heads that share keys.
        if variant.window is not None and variant.window < span:
            before = variant.window - 1
        return self.kernel(
            query.transpose(1, 2),
            keys[:rows, :span],
            values[:rows, :span],
            cache_seqlens=live.lengths,
            softmax_scale=variant.scale,
            causal=True,
            window_size=(before, min(before, 0)),
            softcap=variant.softcap or 0.0,
        )


def _runs_flash(device: torch.device) -> bool:
    """Whether flash-attn 2 has kernels for the device; those for ROCm are untested here."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_attn(from_hub: bool) -> Callable[..., Any] | None:
    """``flash_attn_with_kvcache`` where it is installed and has the arguments, else None."""
    kernel = flash_attn_with_kvcache(from_hub)
    if kernel is None or not inspect.signature(kernel).parameters.keys() >= set(_ARGUMENTS):
        return None
    return kernel
