"""The attention that a Hugging Face model calls in place of its own: one object per forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from fastrl.models.routing import current_routes, routed

NAME = "fastrl"
_KINDS = {"full_attention", "sliding_attention", "attention"}  # of layers


class Variant(NamedTuple):
    """Scale, sliding window, soft cap and dropout of a layer's scores q·k: ``scale`` None is
    D**-0.5; only the last ``window`` tokens count; c·tanh(x/c) with c = ``softcap``; probabilities
    are dropped with ``dropout``."""

    scale: float | None
    window: int | None
    softcap: float | None
    dropout: float = 0.0


class Attention(Protocol):
    """Attention of one forward pass, layer by layer."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        """[B, T, Hq, D] of queries [B, Hq, T, D], keys and values [B, Hkv, T, D]."""


_active: ContextVar[Attention] = ContextVar("fastrl_attention")


@contextlib.contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """Context in which models that are :func:`attached` use this attention."""
    token = _active.set(attention)
    try:
        yield
    finally:
        _active.reset(token)


def current_attention() -> Attention | None:
    """That of the forward that is going on."""
    return _active.get(None)


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
    **others: Any,
) -> tuple[Tensor, None]:
    # Attention sinks, position biases: other arguments that change the scores.
    for name in ("s_aux", "sinks", "position_bias", "head_mask", "alibi"):
        if others.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} attends with {name}")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{type(module).__name__} is not causal")
    variant = Variant(scaling, sliding_window, softcap, dropout)
    return _active.get().attend(query, key, value, variant), None


AttentionInterface.register(NAME, _attend)


@contextlib.contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """Context in which the model calls the attention of this module."""
    before = implementations(model)
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


@contextlib.contextmanager
def replaced(model: nn.Module, attention: Attention | None) -> Iterator[None]:
    """Context in which the model uses this attention, or its own where that is None; its layers do
    so, too, where they run again in a backward pass behind the context, under
    :func:`kept_for_recomputation` or transformers' own activation checkpointing."""
    if attention is None and current_routes() is None:
        yield
        return
    own: list[tuple[Any, Callable[..., Any]]] = [
        (module, module._gradient_checkpointing_func)  # type: ignore[misc]
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
        and hasattr(module, "_gradient_checkpointing_func")
    ]
    try:
        for module, run in own:
            module._gradient_checkpointing_func = _keeping(module, run)
        with _attended(model, attention):
            yield
    finally:
        for module, run in own:
            module._gradient_checkpointing_func = run


@contextlib.contextmanager
def _attended(model: nn.Module, attention: Attention | None) -> Iterator[None]:
    if attention is None:
        yield
        return
    with attached(model), attending(attention):
        yield


def kept_for_recomputation(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``forward`` with the attention and the experts of now, whenever it is
    called.

    Args:
        module: whose forward it is.
    """
    attention, routes = current_attention(), current_routes()
    if attention is None and routes is None:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with _attended(module, attention), routed(routes):
            return forward(*args, **kwargs)

    return run


def _keeping(module: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' checkpoint(call of the module, inputs), in which it keeps its attention."""

    def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return checkpoint(kept_for_recomputation(module, call), *args, **kwargs)

    return run


def why_not_replaceable(model: Any) -> str | None:
    """Why a model's attention cannot be replaced, by its configuration; None if it may be."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder–decoder"
    if not getattr(model, "_supports_attention_backend", False):
        return "it does not support transformers' attention interface"
    config = model.config.get_text_config()
    rope = _dynamic_rope(config)
    if rope is not None:
        return f"its RoPE ({rope}) depends on the length of the longest sequence"
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds:
        return f"some of its layers are of another kind ({', '.join(sorted(map(str, kinds)))})"
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
    """The configurations of a model and its parts, each once, and the attention that it names."""
    found: dict[int, tuple[Any, str | None]] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config, config._attn_implementation_internal
    return list(found.values())


def _dynamic_rope(config: Any) -> str | None:
    """The kind of a RoPE whose frequencies depend on the positions of each step; else None."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None) or {}
        # One for all layers, or one for each kind of layer.
        for each in (settings, *settings.values()):
            kind = each.get("rope_type", each.get("type")) if isinstance(each, dict) else None
            if kind in ("dynamic", "longrope"):
                return kind
    return None
