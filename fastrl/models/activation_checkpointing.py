"""Activation checkpointing: in the backward pass layers run again, from their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastrl.models.attention import kept_for_recomputation
from fastrl.models.trunk import layer_stack
from fastrl.run.contexts import attributes_set


def _recomputed(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward that runs again in a backward pass, by the same attention and experts."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Dropout is off: there is no random state to restore.
        kept = kept_for_recomputation(layer, forward)
        return checkpoint(kept, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def all_layers(model: Any) -> list[nn.Module]:
    """A model's layers, an encoder–decoder's from both stacks.

    Raises:
        LookupError: it is not clear which modules are the layers.
    """
    if not getattr(model.config, "is_encoder_decoder", False):
        return list(layer_stack(model))
    layers: list[nn.Module] = []
    for part in (model.get_encoder(), model.get_decoder()):
        stacks = [m for m in part.children() if isinstance(m, nn.ModuleList)]
        if len(stacks) != 1:
            raise LookupError(
                f"{type(part).__name__} has {len(stacks)} lists of modules: which are its layers "
                "is not clear"
            )
        layers += stacks[0]
    return layers


def checkpointed(layers: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Context in which each layer keeps only its inputs, and runs again in the backward pass.

    transformers' own switch acts only in training mode, which also turns on dropout.
    """
    return attributes_set(*((x, "forward", _recomputed(x, x.forward)) for x in layers))
