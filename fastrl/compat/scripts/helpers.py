"""Small functions of TRL's insides, which programs and subclasses of TRL's trainers call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.utils import without_dropout
from fastrl_kernels import token_logprobs


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """log softmax(logits / T)[index], fp32 and differentiable, of the shape of ``index``.

    Args:
        logits: [..., V].
        index: [...], or [..., K] for several tokens of each position.
        temperature: T > 0.
        row_mask: a mask of the shape of ``index``; 0 where the result is to be 0.
    """
    mask = torch.ones_like(index, dtype=torch.bool) if row_mask is None else row_mask.bool()
    if index.dim() < logits.dim():
        return token_logprobs(logits, index, temperature=temperature, mask=mask)
    pairs = zip(index.unbind(-1), mask.unbind(-1), strict=True)
    return torch.stack(
        [token_logprobs(logits, y, temperature=temperature, mask=m) for y, m in pairs], -1
    )


def pad(
    tensors: Sequence[Tensor],
    padding_value: float = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> Tensor:
    """Tensors [T_i, ...] as one, [B, T, ...], filled up to the largest of each dimension.

    Args:
        padding_side: "left" or "right", of T; other dimensions are filled on the right.
        pad_to_multiple_of: a number that T is to be a multiple of.

    Raises:
        ValueError: another side.
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
    length, *rest = (max(sizes) for sizes in zip(*(x.shape for x in tensors), strict=True))
    length = -(-length // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
    padded = tensors[0].new_full((len(tensors), length, *rest), padding_value)
    for row, x in zip(padded, tensors, strict=True):
        begin = length - len(x) if padding_side == "left" else 0
        row[(slice(begin, begin + len(x)), *map(slice, x.shape[1:]))] = x
    return padded


def listify_batch(tensor: Tensor) -> list[Tensor]:
    """The rows of a tensor [B, ...], each [1, ...]."""
    return list(tensor.split(1))


def disable_dropout_in_model(model: nn.Module) -> None:
    """Sets all dropout of a model to 0."""
    without_dropout(model)


@contextmanager
def unwrap_model_for_generation(
    model: nn.Module, accelerator: Any, gather_deepspeed3_params: bool = True
) -> Iterator[Any]:
    """Context of the unwrapped model, with whole weights where they are spread over processes.

    Args:
        model: as ``accelerator`` has prepared it.
        gather_deepspeed3_params: TRL's argument for ZeRO-3, which fastrl refuses; not read.
    """
    from fastrl.models.sharding import whole_weights

    with whole_weights(model):
        yield accelerator.unwrap_model(model)


def profiling_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which torch's profiler then records by its name."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(function.__qualname__):
            return function(*args, **kwargs)

    return named


def profiling_context(trainer: Any, name: str) -> Any:
    """A context that torch's profiler records by the trainer's class and ``name``."""
    return torch.profiler.record_function(f"{type(trainer).__name__}.{name}")
