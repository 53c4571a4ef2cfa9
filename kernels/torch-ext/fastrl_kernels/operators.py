"""Registration of ops as ``torch.library`` operators, which ``torch.compile`` does not look into.

A public op over the vocabulary calls its operator only while a graph is traced. The operator runs
the code of eager mode: its loops over chunks are not unrolled, and its workspaces are not part of
the graph.

An operator takes tensors and plain values, and returns tensors of which none is a view of another;
an unwanted one is empty. Each has a fake, which gives the shapes of its results, and where it has a
gradient an operator for backward, since backward is traced as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


def _claimed(package: str) -> Library:
    """The namespace of this copy of the package, which no other copy registers in: the Kernel Hub
    imports it under names of its own, perhaps beside an installed one, and the same name may be
    imported again. An operator registered twice frees the first, and graphs traced by functions
    of the earlier copy would still call it."""
    name = re.sub(r"\W", "_", package)
    for free in (name, *(f"{name}_{copy}" for copy in range(2, 1000))):
        with suppress(RuntimeError):  # another copy's
            return Library(free, "DEF")  # what custom_op makes are fragments of it
    raise RuntimeError(f"the operators' namespace {name} and 998 more are taken")


_LIBRARY = _claimed(__package__ or "fastrl_kernels")
NAMESPACE = _LIBRARY.ns


def operator(schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Registers a function under its name, with the schema of its annotations or a given one."""

    def register(function: Callable[..., Any]) -> Any:
        name = f"{NAMESPACE}::{function.__name__.strip('_')}"
        return torch.library.custom_op(name, function, mutates_args=(), schema=schema)

    return register


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, in eager mode without the search of the arguments for what
    torch.func left behind."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def dense(x: Tensor) -> Tensor:
    """x, copied unless it is contiguous from its memory's start on, as fakes promise. Triton
    kernels give a gradient the layout of its logits, which may start at an odd address or have
    padded rows."""
    if x.is_contiguous() and x.storage_offset() == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def new(like: Tensor, *shape: Any, wanted: bool = True) -> Tensor:
    """An fp32 tensor of a fake's result."""
    return like.new_empty(shape if wanted else (0,), dtype=torch.float32)


def split(x: Any) -> tuple[Tensor | None, Any]:
    """A tensor or a number as an operator takes it: one of the two."""
    return (x, 0) if isinstance(x, Tensor) else (None, x)


def joined(x: Tensor | None, number: Any) -> Any:
    """The inverse of ``split``."""
    return number if x is None else x
