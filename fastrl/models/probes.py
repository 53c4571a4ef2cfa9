"""Windows and lengths for self-checks, whose texts must be longer than what a token sees."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from fastrl.models.utils import context_length, text_config
from fastrl.run.contexts import attributes_set

# Attributes of configurations and layers that say how far attention looks back, and the number that
# they are set to in a check, so that even short texts are longer.
_WINDOWS, _NARROW = ("sliding_window", "attention_window_size", "attention_chunk_size"), 4
# What else reads tokens by blocks: convolutions, chunks of recurrent layers, compressed blocks.
_BLOCKS, _MOST = re.compile("conv|chunk|window|kernel|compress"), 64


def narrowed(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which every window and chunk of attention has at most four tokens, so that a
    comparison on short texts shows whether a window is kept."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        for owner in (module, vars(module).get("config")):
            if owner is not None:
                owners[id(owner)] = owner
                text = vars(owner).get("text_config")
                owners[id(text)] = text
    changed: list[tuple[Any, str, int]] = []
    for owner in owners.values():
        for name in _WINDOWS:
            value = None if owner is None else vars(owner).get(name)
            if isinstance(value, int) and value > _NARROW:
                changed.append((owner, name, _NARROW))
    return attributes_set(*changed)


def reach(model: Any, used: int = 0) -> int:
    """The number of tokens to add to a check's text, so that it is longer than the widest block in
    which the model reads tokens, other than the windows of :func:`narrowed`; at most 64 tokens.

    Args:
        used: tokens that the text already has; the context has to hold all of its tokens.
    """
    sizes = [0]
    for name, value in vars(text_config(model)).items():
        if _BLOCKS.search(name) and name not in _WINDOWS:
            values = value.values() if isinstance(value, dict) else [value]
            sizes += [x for x in values if isinstance(x, int) and not isinstance(x, bool)]
    context = context_length(model)
    room = _MOST if context is None else max(0, context - used)
    return min(max(sizes), _MOST, room)
