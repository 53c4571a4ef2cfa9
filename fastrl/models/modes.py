"""Small facts about a model, and its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def context_length(model: Any) -> int | None:
    """Positions that the model has; None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def hidden_width(config: Any) -> int:
    """Of the last hidden state.

    Raises:
        ValueError: the configuration does not say.
    """
    # OPT projects its last hidden state down to the width of its word embeddings.
    for name in ("word_embed_proj_dim", "hidden_size"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    text = config.get_text_config()
    if text is not config:
        return hidden_width(text)
    raise ValueError(f"{type(config).__name__} states no hidden_size: the value head needs one")


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off while open; every module's mode is put back afterwards, after an error too."""
    # A new adapter is in training mode on a base that is not: the model has no single mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
