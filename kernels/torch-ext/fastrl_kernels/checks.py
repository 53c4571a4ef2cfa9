"""Argument checks that several ops share. Every message names the argument and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_float(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in FLOAT_DTYPES)
        raise TypeError(f"{name} must be {allowed}, got {tensor.dtype}: convert it first")


def check_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {like_name} {tuple(like.shape)}: "
            "they must be equal"
        )


def check_mask(mask: Tensor, like_name: str, like: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean (True = counts), got {mask.dtype}: pass mask.bool()")
    check_same_shape("mask", mask, like_name, like)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")
