"""A trainer's state as bytes, to be compared bit for bit."""

from typing import Any

import numpy as np
import torch


def bits(trainer: Any) -> dict[str, bytes | str]:
    """Everything that a later step depends on, as bytes."""
    found: dict[str, bytes | str] = {}

    def collect(name: str, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            found[name] = x.detach().cpu().view(-1).contiguous().view(torch.uint8).numpy().tobytes()
        elif isinstance(x, np.ndarray):
            found[name] = x.tobytes()
        elif isinstance(x, dict):
            for key, value in x.items():
                collect(f"{name}/{key}", value)
        elif isinstance(x, (list, tuple)):
            for i, value in enumerate(x):
                collect(f"{name}/{i}", value)
        else:
            found[name] = repr(x)

    collect("", trainer.state_dict())
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same in both."""
    return [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
