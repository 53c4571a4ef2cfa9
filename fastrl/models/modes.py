"""Small facts about a model, and its modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def context_length(model: Any) -> int | None:
    """Positions that the model has; None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off while open; the model's mode is put back afterwards, after an error too."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
