"""The attention that a Hugging Face model calls in place of its own: one object per forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fastrl.models.latents import Latents
from fastrl.models.layer_functions import replacements
from fastrl.models.layer_kinds import unknown_layer
from fastrl.models.packed_parts import PackedParts
from fastrl.models.routing import current_routes, routed
from fastrl.run.contexts import attributes_set, variable_set

NAME = "fastrl"


class Variant(NamedTuple):
    """How a layer attends by its scores q·k."""

    scale: float | None  # factor of the scores; None: D**-0.5
    window: int | None  # only the last so many tokens count
    softcap: float | None  # c, of c·tanh(score/c)
    dropout: float = 0.0  # share of probabilities that are dropped
    sinks: Tensor | None = None  # [Hq], logits beside the scores, which have no values
    chunk: int | None = None  # only tokens count whose position // chunk is the query's
    latents: Latents | None = None  # set where a layer's cache holds latents


class Attention(Protocol):
    """Attention of one forward pass, layer by layer."""

    @property
    def positions(self) -> Tensor:
        """The positions of the queries' tokens, [B, T]."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        """The layer's result [B, T, Hq, D] of queries [B, Hq, T, D] and keys, values [B, Hkv, T,
        D]."""


_active: ContextVar[Attention] = ContextVar("fastrl_attention")


def attending(attention: Attention) -> AbstractContextManager[None]:
    """Context in which models that are :func:`attached` use this attention."""
    return variable_set(_active, attention)


def current_attention() -> Attention | None:
    """The attention of the forward that is going on; None outside of :func:`attending`."""
    return _active.get(None)


# Arguments that change the scores, or choose the tokens that count, in a way not supported here.
_UNKNOWN = ("position_bias", "head_mask", "alibi", "indices", "block_indices")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    for name in _UNKNOWN:
        if others.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} attends with {name}")
    sinks = others.get("sinks") if s_aux is None else s_aux
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise NotImplementedError(f"{type(module).__name__} attends with sinks of each token")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} is not causal")
    attention = _active.get()
    latents = vars(module).get("expand_kv")
    variant = Variant(
        scaling,
        sliding_window,
        softcap,
        dropout,
        sinks,
        _chunk(module),
        latents if isinstance(latents, Latents) else None,
    )
    query = _tempered(module, query, attention.positions)
    return attention.attend(query, key, value, variant), None


def _chunk(module: Any) -> int | None:
    """The number of tokens in a chunk of a layer that attends in chunks; None in other layers."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


_TEMPERED = "attn_temperature_tuning"  # Llama 4's, of layers without RoPE


def _tempered(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Queries [B, H, T, D] times 1 + s·log(1 + ⌊(position + 1)/f⌋), with a layer's ``attn_scale`` s
    and ``floor_scale`` f, if it is tuned so. Its own tuning, which :func:`attached` switches off,
    counts positions from the row's beginning."""
    config = getattr(module, "config", None)
    if not getattr(config, _TEMPERED, False) or getattr(module, "use_rope", True):
        return query
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None, :, None]).to(query.dtype)


AttentionInterface.register(NAME, _attend)


def _parts_of_row() -> PackedParts | None:
    """The parts of the packed row that the current forward runs; None where it runs none."""
    layout = getattr(current_attention(), "layout", None)
    return None if layout is None else layout.by_parts


def attached(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which a model's layers call the attention of :func:`attending`, and recurrent
    layers our functions for packed rows and for decode steps of slots."""
    swaps: list[tuple[Any, str, Any]] = []
    configs: dict[int, Any] = {}
    homes = set()
    for module in model.modules():  # one walk: beside a tiny model's forward a walk is slow
        attributes = vars(module)
        homes.add(type(module).__module__)
        if attributes.get(_TEMPERED):
            swaps.append((module, _TEMPERED, False))
        config = attributes.get("config")
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    swaps += ((config, "_attn_implementation_internal", NAME) for config in configs.values())
    swaps += replacements(model, homes, lambda: current_attention() is not None, _parts_of_row)
    return attributes_set(*swaps)


@contextlib.contextmanager
def replaced(model: nn.Module, attention: Attention | None) -> Iterator[None]:
    """Context in which the model uses ``attention``, or its own where that is None. So do layers
    that run again in a backward pass behind the context, under :func:`kept_for_recomputation` or
    transformers' activation checkpointing."""
    if attention is None and current_routes() is None:
        yield
        return
    name = "_gradient_checkpointing_func"
    checkpointing = [
        (module, name, _keeping(module, module._gradient_checkpointing_func))  # type: ignore
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, name)
    ]
    with attributes_set(*checkpointing), _attended(model, attention):
        yield


@contextlib.contextmanager
def _attended(model: nn.Module, attention: Attention | None) -> Iterator[None]:
    if attention is None:
        yield
        return
    with attached(model), attending(attention):
        yield


def kept_for_recomputation(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``forward``, the forward of ``module``, with the attention and the
    experts of this moment."""
    attention, routes = current_attention(), current_routes()
    if attention is None and routes is None:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _attended(module, attention), routed(routes):
            return forward(*args, **kwargs)

    return run


def _keeping(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' function ``checkpoint(module's call, inputs)``, made to keep the attention."""

    def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kept_for_recomputation(module, call), *args, **kwargs)

    return run


def why_not_replaceable(model: Any) -> str | None:
    """Why a model's attention cannot be replaced, by its configuration, modules and adapters; None
    if it may be."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder–decoder"
    unknown = unknown_layer(model)
    if unknown is not None:
        return unknown
    config = model.config.get_text_config()
    rope = _dynamic_rope(config)
    if rope is not None:
        return f"its RoPE ({rope}) depends on the length of the longest sequence"
    if any(name.rpartition(".")[2] == "indexer" for name, _ in model.named_modules()):
        return "its layers choose the tokens that they attend to (sparse attention by an indexer)"
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "alora_invocation_tokens", None):
            return "its adapter begins where it finds tokens in each row (activated LoRA)"
    if any(type(module).__name__ == "CheckpointWrapper" for module in model.modules()):
        return (
            "torch's checkpoint wrapper runs its layers again (fsdp_activation_checkpointing: use "
            "gradient_checkpointing instead)"
        )
    return None


def hidden_window(model: Any, windows: Iterable[int | None]) -> str | None:
    """Why a model's window cannot be kept, where its configuration names one and no layer has
    attended with it: such a model applies it by its mask alone. None if it is kept."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in kinds
    if not window or not used or any(windows):
        return None
    return f"it applies its window of {window} tokens by a mask alone"


def implementations(model: nn.Module) -> list[tuple[Any, str | None]]:
    """The configurations of a model and its parts, each once, with the attention that it names."""
    by_config: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            by_config[id(config)] = config, config._attn_implementation_internal
    return list(by_config.values())


def _dynamic_rope(config: Any) -> str | None:
    """The kind of a RoPE whose frequencies depend on the positions of each step; else None."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None) or {}
        # The settings are one dict for all layers, or hold one for each kind of layer.
        for each in (settings, *settings.values()):
            kind = each.get("rope_type", each.get("type")) if isinstance(each, dict) else None
            if kind in ("dynamic", "longrope"):
                return kind
    return None
