"""Activations of layers that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class _Checkpointed:
    """A layer's forward that keeps its inputs alone."""

    def __init__(self, forward: Callable[..., Any]):
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # Dropout is off: there is no random state to bring back.
        return checkpoint(
            self.forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
        )


@contextmanager
def checkpointed(layers: nn.ModuleList) -> Iterator[None]:
    """While open, each of the layers is a checkpoint.

    transformers' own switch acts in training mode alone, where dropout is on too.
    """
    own = [(layer, vars(layer).get("forward")) for layer in layers]
    try:
        for layer in layers:
            vars(layer)["forward"] = _Checkpointed(layer.forward)
        yield
    finally:
        for layer, forward in own:
            if forward is None:
                del vars(layer)["forward"]
            else:
                vars(layer)["forward"] = forward
