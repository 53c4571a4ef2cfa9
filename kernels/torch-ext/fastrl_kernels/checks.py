"""Argument checks that several ops share. Every message names the argument and what to do."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .operators import operator
from .types import IGNORE_LABEL, Temperature


class Passed:
    """What an op's checks have made of arguments, by all that they look at: the same arguments,
    layer after layer and step after step, are checked once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        return self._known.get(key)

    def keep(self, key: Any, found: Any) -> None:
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[key] = found


_KEPT = 4096


def layout(x: Tensor) -> tuple[Any, ...]:
    """What checks look at in a tensor."""
    return x.shape, x.stride(), x.dtype, x.device


def is_plain(x: Tensor) -> bool:
    """Whether x has memory and its sizes are numbers, so that :func:`layout` can be a key."""
    return not torch.compiler.is_compiling() and x.__class__ in _PLAIN


_PLAIN = (Tensor, torch.nn.Parameter)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOATS = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)


def check_float(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be {_FLOATS}, got {tensor.dtype}: convert it first")


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Checks that the dtype of a result is one of the ops' floating-point dtypes."""
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be {_FLOATS}, got {dtype}: convert the result instead")


def check_same_shape(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, {like_name} {tuple(like.shape)}: "
            "they must be equal"
        )


def check_like(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Checks a floating-point tensor of another's shape."""
    check_float(name, tensor)
    check_same_shape(name, tensor, like_name, like)


def check_mask(mask: Tensor, like_name: str, like: Tensor, name: str = "mask") -> None:
    if mask.dtype != torch.bool:
        counts = " (True = counts)" if name == "mask" else ""
        raise TypeError(f"{name} must be boolean{counts}, got {mask.dtype}: pass {name}.bool()")
    check_same_shape(name, mask, like_name, like)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(
            f"{name} is on {tensor.device}, {like_name} on {like.device}: move it there"
        )


def check_per_token(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Checks a tensor of one value for each vector of ``like`` [..., V]."""
    expected = like.shape[:-1]
    if tensor.shape != expected:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but {like_name} are {tuple(like.shape)}: "
            f"{name} must be {tuple(expected)}, one per token"
        )
    check_device(name, tensor, like_name, like)


def check_positive(name: str, number: float, *, or_zero: bool = False) -> float:
    if isinstance(number, Tensor):
        raise TypeError(f"{name} must be a Python number: reading a tensor would wait for it")
    # Comparisons only, which a compiler's symbol allows.
    if not (0 < number < math.inf or (or_zero and number == 0)):
        wanted = "at least 0" if or_zero else "positive"
        raise ValueError(f"{name} must be {wanted} and finite, got {number}")
    return float(number)


def check_count(name: str, number: int, *, least: int = 0) -> int:
    """Checks an integer that must be at least ``least``."""
    if isinstance(number, bool) or not isinstance(number, int | torch.SymInt):
        raise TypeError(f"{name} must be an integer, got {type(number).__name__}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def check_constant(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, but is a constant: pass {name}.detach()")


_UNCHANGED = Temperature(1.0, None)


def check_temperature(temperature: float | Tensor, like_name: str, like: Tensor) -> Temperature:
    """Checks a temperature for all vectors of ``like``, or one for each."""
    if not isinstance(temperature, Tensor):
        if temperature == 1:
            return _UNCHANGED
        return Temperature(check_positive("temperature", temperature), None)
    check_per_token("temperature", temperature, like_name, like)
    check_constant("temperature", temperature)
    return Temperature(1.0, temperature.reshape(-1).float())


def check_labels_of(labels: Tensor, like_name: str, like: Tensor) -> None:
    """Checks token ids, one for each vector of ``like``; ``check_label_range`` checks their
    range."""
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


@operator()
def _checked_labels(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    check_label_range(labels, mask, vocabulary)
    return labels.clone()


@_checked_labels.register_fake
def _(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    return torch.empty_like(labels)


def checked_labels(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    """``labels`` after ``check_label_range``, which in a compiled graph is an operator."""
    if torch.compiler.is_compiling():
        return _checked_labels(labels, mask, vocabulary)
    check_label_range(labels, mask, vocabulary)
    return labels


def check_logits(name: str, logits: Tensor) -> None:
    check_float(name, logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"{name} has shape {shape}: it must be [..., V] with V > 0")
