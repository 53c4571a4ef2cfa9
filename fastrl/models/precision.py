"""Whether a model's weights can take in the updates that they are given."""

from __future__ import annotations

import warnings

import torch
from torch import nn

_LOW = (torch.bfloat16, torch.float16)


def warn_of_lost_updates(model: nn.Module, remedy: str, stacklevel: int = 2) -> None:
    """One warning where trainable weights are bf16 or fp16: updates below half their spacing (2^-9
    and 2^-12 of a weight) are rounded away.

    Args:
        remedy: how the trainer computes in low precision over float32 weights.
    """
    low = {p.dtype for p in model.parameters() if p.requires_grad and p.dtype in _LOW}
    if not low:
        return
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in low))
    warnings.warn(
        f"trainable weights are {names}: updates below half their spacing are lost (in bfloat16 at "
        f"a learning rate of 1e-6 some 98% of the weights never change). Load the model in float32 "
        f"and {remedy}; or train a LoRA adapter, whose weights are float32",
        stacklevel=stacklevel + 1,
    )
