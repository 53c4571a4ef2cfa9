"""How a Hugging Face model attends while it is in a rollout: through its attention interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "fastrl_rollout"


class Variant(NamedTuple):
    """What a layer does to its scores q·k: ``scale`` None is D**-0.5; only the last ``window``
    tokens count; c·tanh(x/c) with c = ``softcap``."""

    scale: float | None
    window: int | None
    softcap: float | None


class Attention(Protocol):
    """What a forward pass does with a layer's queries, keys and values."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, Hkv, T, D] of a layer; returns what `attend` will be given."""
        ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        """[B, T, Hq, D] of queries [B, Hq, T, D]."""
        ...


_active: ContextVar[Attention] = ContextVar("fastrl_rollout_attention")


@contextlib.contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """While open, models that are :func:`attached` attend like this."""
    token = _active.set(attention)
    try:
        yield
    finally:
        _active.reset(token)


class Unsupported(NotImplementedError):
    """A layer attends in a way that the engine does not know."""


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    # Attention sinks, biases by position: whatever else would change the scores.
    for name in ("s_aux", "sinks", "position_bias", "head_mask", "alibi"):
        if others.get(name) is not None:
            raise Unsupported(f"{type(module).__name__} attends with {name}")
    if not getattr(module, "is_causal", True):
        raise Unsupported(f"{type(module).__name__} is not causal")
    variant = Variant(scaling, sliding_window, softcap)
    return _active.get().attend(query, key, value, variant), None


AttentionInterface.register(NAME, _attend)


@contextlib.contextmanager
def attached(model: nn.Module) -> Iterator[None]:
    """While open, the model attends through this module; its own setting is put back afterwards."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
