"""The ops over the vocabulary as operators, which ``torch.compile`` does not look into.

A public op takes its operator while a graph is being traced, and only then. What runs is the code
of eager mode: its loops over chunks are not unrolled, and its workspaces are not part of a graph.
An operator takes and returns tensors and plain values, none of the tensors being a view of another;
what is not wanted comes back as an empty tensor. Backward is an operator of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import check_label_range
from .full_kl import full_kl_work
from .logprob import token_logprobs_work

# The Kernel Hub imports the package under names of its own, beside an installed one if there is.
NAMESPACE = re.sub(r"\W", "_", __package__ or "fastrl_kernels")


def _operator(function: Callable[..., Any]) -> Any:
    """Registers ``function`` under its name."""
    name = f"{NAMESPACE}::{function.__name__.strip('_')}"
    return torch.library.custom_op(name, function, mutates_args=())


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _plain(x: Tensor) -> Tensor:
    """Contiguous from its memory's start on, as compiled code takes results to be. Triton kernels
    lay a gradient out as its logits are, whose rows may be padded."""
    return x if x.is_contiguous() and x.storage_offset() == 0 else x.clone().contiguous()


# --- labels --------------------------------------------------------------------------------------


@_operator
def _checked_labels(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    check_label_range(labels, mask, vocabulary)
    return labels.clone()


@_checked_labels.register_fake
def _(labels, mask, vocabulary):
    return torch.empty_like(labels)


checked_labels = _checked_labels


# --- token_logprobs ------------------------------------------------------------------------------


@_operator
def _token_logprobs(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logprobs, entropies, saved = token_logprobs_work(backend).forward(
        logits, labels, mask, temperature, number, entropy=entropy, save=True
    )
    return logprobs, *(_or_empty(x, logprobs) for x in (entropies, *saved))


@_token_logprobs.register_fake
def _(logits, labels, mask, temperature, number, entropy, backend):
    logprobs = logits.new_empty(labels.shape, dtype=torch.float32)
    row, none = logprobs.new_empty(labels.numel()), logprobs.new_empty(0)
    entropies, mean = (torch.empty_like(logprobs), torch.empty_like(row)) if entropy else (none, torch.empty_like(none))
    return logprobs, entropies, row, torch.empty_like(row), mean


@_operator
def _token_logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    row_max: Tensor,
    row_sum: Tensor,
    mean: Tensor | None,
    backend: str,
) -> Tensor:
    saved = [row_max, row_sum, mean]
    return _plain(token_logprobs_work(backend).backward(
        grad_logprobs, grad_entropies, logits, labels, mask, temperature, number, saved
    ))


@_token_logprobs_backward.register_fake
def _(grad_logprobs, grad_entropies, logits, *others):
    return logits.new_empty(logits.shape)


def _keep(ctx, inputs, output):
    logits, labels, mask, temperature, ctx.number, ctx.entropy, ctx.backend = inputs
    ctx.save_for_backward(logits, labels, mask, temperature, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_logprobs, grad_entropies, *_):
    *inputs, row_max, row_sum, mean = ctx.saved_tensors
    if not ctx.entropy:
        mean = grad_entropies = None
    dlogits = _token_logprobs_backward(
        grad_logprobs, grad_entropies, *inputs, ctx.number, row_max, row_sum, mean, ctx.backend
    )
    return dlogits, *(None,) * 6


_token_logprobs.register_autograd(_differentiate, setup_context=_keep)


def token_logprobs(logits, labels, mask, temperature, number, entropy, backend):
    logprobs, entropies, *_ = _token_logprobs(
        logits, labels, mask, temperature, number, entropy, backend
    )
    return logprobs, entropies if entropy else None
