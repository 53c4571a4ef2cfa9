"""The ops over the vocabulary as operators, which ``torch.compile`` does not look into.

A public op takes its operator while a graph is being traced, and only then. What runs is the code
of eager mode: its loops over chunks are not unrolled, and its workspaces are not part of a graph.

An operator takes tensors and plain values, and returns tensors of which none is a view of another;
one that is not wanted is empty. Each has a fake, which says what comes back, and where it has a
gradient an operator for backward, since backward is traced as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import check_label_range
from .full_kl import full_kl_work
from .keys import hashed
from .logprob import token_logprobs_work
from .sampling import Parameters, SampledTokens, sample

# The Kernel Hub imports the package under names of its own, perhaps beside an installed one.
NAMESPACE = re.sub(r"\W", "_", __package__ or "fastrl_kernels")


def operator(function: Callable[..., Any]) -> Any:
    """Registers a function under its name, as its annotations say."""
    name = f"{NAMESPACE}::{function.__name__.strip('_')}"
    return torch.library.custom_op(name, function, mutates_args=())


def dense(x: Tensor) -> Tensor:
    """Contiguous from its memory's start on, as a fake says. The Triton kernels lay a gradient out
    as its logits lie, which may be from an odd address on, or with padded rows."""
    if x.is_contiguous() and x.storage_offset() == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def new(like: Tensor, *shape: Any, wanted: bool = True) -> Tensor:
    return like.new_empty(shape if wanted else (0,), dtype=torch.float32)


@operator
def checked_labels(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    check_label_range(labels, mask, vocabulary)
    return labels.clone()


@checked_labels.register_fake
def _(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    return torch.empty_like(labels)


@operator
def _token_logprobs(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and what is saved of each row: max, sum and mean."""
    logprobs, entropies, saved = token_logprobs_work(backend).forward(
        logits, labels, mask, temperature, number, entropy=entropy, save=True
    )
    return logprobs, *(or_empty(x, logprobs) for x in (entropies, *saved))


@_token_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
    entropy, n = others[3], labels.numel()
    return (
        new(logits, *labels.shape),
        new(logits, *labels.shape, wanted=entropy),
        new(logits, n),
        new(logits, n),
        new(logits, n, wanted=entropy),
    )


@operator
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
    dlogits = token_logprobs_work(backend).backward(
        grad_logprobs, grad_entropies, logits, labels, mask, temperature, number,
        [row_max, row_sum, mean],
    )  # fmt: skip
    return dense(dlogits)


@_token_logprobs_backward.register_fake
def _(_: Any, __: Any, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save_token_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.number, ctx.entropy, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _token_logprobs_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, row_max, row_sum, mean = ctx.saved_tensors
    by_entropies, mean = (grads[1], mean) if ctx.entropy else (None, None)
    dlogits = _token_logprobs_backward(
        grads[0], by_entropies, *inputs, ctx.number, row_max, row_sum, mean, ctx.backend
    )
    return dlogits, *(None,) * 6


_token_logprobs.register_autograd(_token_logprobs_gradients, setup_context=_save_token_logprobs)


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    logprobs, entropies, *_ = _token_logprobs(
        logits, labels, mask, temperature, number, entropy, backend
    )
    return logprobs, entropies if entropy else None


@operator
def _full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The KL, and what is saved of the rows [5, N]."""
    return full_kl_work(backend).forward(logits, ref_logits, mask, temperature, number, save=True)


@_full_kl.register_fake
def _(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    kl = new(logits, *logits.shape[:-1])
    return kl, new(logits, 5, kl.numel())


@operator
def _full_kl_backward(
    grad: Tensor,
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    saved: Tensor,
    backend: str,
) -> Tensor:
    return dense(
        full_kl_work(backend).backward(grad, logits, ref_logits, mask, temperature, number, saved)
    )


@_full_kl_backward.register_fake
def _(_: Any, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save_full_kl(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.number, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])


def _full_kl_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    dlogits = _full_kl_backward(grads[0], *inputs, ctx.number, saved, ctx.backend)
    return dlogits, *(None,) * 5


_full_kl.register_autograd(_full_kl_gradients, setup_context=_save_full_kl)


def full_kl(*arguments: Any) -> Tensor:
    return _full_kl(*arguments)[0]


def _split(x: Any) -> tuple[Tensor | None, Any]:
    """A tensor or a number as an operator takes it: one of the two."""
    return (x, 0) if isinstance(x, Tensor) else (None, x)


def _joined(x: Tensor | None, number: Any) -> Any:
    return number if x is None else x


@operator
def _sample_keys(
    seed: Tensor | None,
    seed_number: int,
    sample_ids: Tensor,
    token_index: Tensor | None,
    token_index_number: int,
) -> Tensor:
    return hashed(_joined(seed, seed_number), sample_ids, _joined(token_index, token_index_number))


@_sample_keys.register_fake
def _(seed: Tensor | None, _: int, ids: Tensor, token_index: Tensor | None, __: int) -> Tensor:
    return hashed(_joined(seed, 0), ids, _joined(token_index, 0))


def sample_keys(seed: int | Tensor, sample_ids: Tensor, token_index: int | Tensor) -> Tensor:
    # An operator's integers are signed.
    seed, token_index = (
        x - (1 << 64) if not isinstance(x, Tensor) and x >= 1 << 63 else x
        for x in (seed, token_index)
    )
    return _sample_keys(*_split(seed), sample_ids, *_split(token_index))


@operator
def _sample_tokens(
    logits: Tensor,
    keys: Tensor,
    temperature: Tensor | None,
    temperature_number: float,
    top_k: Tensor | None,
    top_k_number: int,
    top_p: Tensor | None,
    top_p_number: float,
    min_p: Tensor | None,
    min_p_number: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    parameters = Parameters(
        _joined(temperature, temperature_number),
        _joined(top_k, top_k_number),
        _joined(top_p, top_p_number),
        _joined(min_p, min_p_number),
    )
    return tuple(sample(logits, keys, parameters, backend))  # type: ignore[return-value]


@_sample_tokens.register_fake
def _(logits: Tensor, keys: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(keys), *(new(logits, keys.shape[0]) for _ in range(5))


def sample_tokens(
    logits: Tensor, keys: Tensor, parameters: Parameters, backend: str
) -> SampledTokens:
    split = (part for x in parameters for part in _split(x))
    return SampledTokens(*_sample_tokens(logits, keys, *split, backend))
