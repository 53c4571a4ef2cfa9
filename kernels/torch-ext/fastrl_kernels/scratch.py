"""Working memory that CPU calls leave to the next one.

There, memory that is new costs as much as the work that is done in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEPT_BYTES = 96 << 20  # at most, and one piece of it
_idle: list[Tensor] = []


def borrow(like: Tensor, nbytes: int) -> Tensor:
    """At least ``nbytes`` of any content, uint8, on the device of ``like``."""
    if like.device.type == "cpu":
        try:
            memory = _idle.pop()
        except IndexError:
            pass
        else:
            if memory.numel() >= nbytes:
                return memory
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def give_back(memory: Tensor) -> None:
    """Nothing looks at what was borrowed any more."""
    if memory.device.type == "cpu" and memory.numel() <= KEPT_BYTES and not _idle:
        _idle.append(memory)


def clear() -> None:
    """Frees what is kept."""
    _idle.clear()
