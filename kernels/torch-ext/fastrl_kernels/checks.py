"""Argument checks that several ops share. Every message names the argument and what to do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reference import IGNORE_LABEL

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


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(
            f"{name} is on {tensor.device}, {like_name} on {like.device}: move it there"
        )


def check_per_token(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """One value for each vector of ``like`` [..., V]."""
    shape, expected = tuple(tensor.shape), tuple(like.shape[:-1])
    if shape != expected:
        raise ValueError(
            f"{name} has shape {shape}, but {like_name} are {tuple(like.shape)}: "
            f"{name} must be {expected}, one per token"
        )
    check_device(name, tensor, like_name, like)


def check_positive(name: str, number: float) -> float:
    if not 0 < number < math.inf:  # as a compiler's symbol can be compared
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return float(number)


def check_temperature(
    temperature: float | Tensor, like_name: str, like: Tensor
) -> tuple[Tensor | None, float]:
    """The tensor or None, and the number that holds where it is None."""
    if not isinstance(temperature, Tensor):
        return None, check_positive("temperature", temperature)
    check_per_token("temperature", temperature, like_name, like)
    if temperature.requires_grad:
        raise ValueError("temperature requires grad, but has no gradient here: detach it")
    return temperature, 1.0


def check_labels_of(labels: Tensor, like_name: str, like: Tensor) -> None:
    """Token ids, one for each vector of ``like``; their range is for ``check_label_range``."""
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    check_per_token("labels", labels, like_name, like)


def counts(labels: Tensor, mask: Tensor | None) -> Tensor:
    return labels != IGNORE_LABEL if mask is None else (labels != IGNORE_LABEL) & mask


def check_label_range(labels: Tensor, mask: Tensor | None, vocabulary: int) -> None:
    outside = counts(labels, mask) & ((labels < 0) | (labels >= vocabulary))
    if outside.any():
        position = outside.nonzero()[0].tolist()
        raise ValueError(
            f"labels{position} is {labels[tuple(position)].item()}, outside [0, {vocabulary}): "
            f"use {IGNORE_LABEL} or the mask for tokens that do not count"
        )


def checked_labels(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    """``labels`` after ``check_label_range``; where a graph is compiled, a step in it."""
    if torch.compiler.is_compiling():
        from .compiled import checked_labels as run

        return run(labels, mask, vocabulary)
    check_label_range(labels, mask, vocabulary)
    return labels


def check_logits(name: str, logits: Tensor) -> None:
    check_float(name, logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"{name} has shape {shape}: it must be [..., V] with V > 0")
