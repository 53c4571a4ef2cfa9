"""The precision in which a run computes where none is chosen: bf16 autocast on CUDA."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

AUTOCAST = "bf16"
_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # set by accelerate launch, from its file or flags


def default_precision(
    device: str, supports_bf16: bool, weights: Collection[torch.dtype], chosen: str | None
) -> str | None:
    """The mixed precision of a run, by accelerate's name; None leaves it to accelerate.

    Args:
        device: the kind of the device, such as "cuda".
        supports_bf16: whether the device multiplies in bf16.
        weights: types of the model's floating-point weights; bf16 ones need no autocast.
        chosen: the precision by a setting, a launcher or an earlier Accelerator; it wins.
    """
    if chosen is not None or device != "cuda" or not supports_bf16:
        return None
    return AUTOCAST if set(weights) == {torch.float32} else None


def precision_for(model: nn.Module, device: str, chosen: str | None) -> str | None:
    """:func:`default_precision` on this machine.

    Args:
        chosen: the precision that the settings name.
    """
    weights = {p.dtype for p in model.parameters() if p.is_floating_point()}
    supports = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return default_precision(device, supports, weights, chosen or said_outside())


def said_outside() -> str | None:
    """The mixed precision that a launcher or an Accelerator of this process has chosen, or None."""
    return shared_precision() or os.environ.get(_VARIABLE)


def shared_precision() -> str | None:
    """The mixed precision of an earlier Accelerator, which all later ones get; None without one."""
    from accelerate.state import AcceleratorState, is_initialized

    return str(AcceleratorState().mixed_precision) if is_initialized() else None


def refuse_fp16_twice(model: nn.Module, mixed_precision: str) -> None:
    """Raises ValueError for trainable float16 weights, whose gradients fp16's scaler refuses."""
    low = any(p.requires_grad and p.dtype == torch.float16 for p in model.parameters())
    if low and mixed_precision == "fp16":
        raise ValueError(
            "fp16 mixed precision needs float32 weights, and the model's are float16: load it in "
            "float32 (dtype='float32'; commands: --dtype float32), or leave mixed precision out"
        )


def kind_of_device(settings: dict[str, Any]) -> str:
    """The kind of the device that an Accelerator with these settings takes."""
    wish = os.environ.get("ACCELERATE_USE_CPU", "").lower()
    wants_cpu = wish in ("1", "true", "yes", "y", "t", "on")
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or wants_cpu or settings.get("cpu") else accelerator.type
