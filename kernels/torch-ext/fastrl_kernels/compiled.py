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

from . import linear, linear_loss
from .checks import check_label_range
from .full_kl import full_kl_work
from .head import HeadInputs, Transform
from .head_rows import RowStatistics
from .logprob import token_logprobs_work
from .ppo_loss import Constants, LossStats, Settings

# The Kernel Hub imports the package under names of its own, perhaps beside an installed one.
NAMESPACE = re.sub(r"\W", "_", __package__ or "fastrl_kernels")


def _operator(function: Callable[..., Any]) -> Any:
    name = f"{NAMESPACE}::{function.__name__.strip('_')}"
    return torch.library.custom_op(name, function, mutates_args=())


def _dense(x: Tensor) -> Tensor:
    """Contiguous from its memory's start on, as a fake says. The Triton kernels lay a gradient out
    as its logits lie, which may be from an odd address on, or with padded rows."""
    return x if x.is_contiguous() and x.storage_offset() == 0 else x.contiguous().clone()


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _new(like: Tensor, *shape: Any, wanted: bool = True) -> Tensor:
    return like.new_empty(shape if wanted else (0,), dtype=torch.float32)


# --- labels --------------------------------------------------------------------------------------


@_operator
def checked_labels(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    check_label_range(labels, mask, vocabulary)
    return labels.clone()


@checked_labels.register_fake
def _(labels: Tensor, mask: Tensor | None, vocabulary: int) -> Tensor:
    return torch.empty_like(labels)


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
    """Log-probabilities, entropies, and what is saved of each row: max, sum and mean."""
    logprobs, entropies, saved = token_logprobs_work(backend).forward(
        logits, labels, mask, temperature, number, entropy=entropy, save=True
    )
    return logprobs, *(_or_empty(x, logprobs) for x in (entropies, *saved))


@_token_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
    entropy, n = others[3], labels.numel()
    return (
        _new(logits, *labels.shape),
        _new(logits, *labels.shape, wanted=entropy),
        _new(logits, n),
        _new(logits, n),
        _new(logits, n, wanted=entropy),
    )


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
    dlogits = token_logprobs_work(backend).backward(
        grad_logprobs, grad_entropies, logits, labels, mask, temperature, number,
        [row_max, row_sum, mean],
    )  # fmt: skip
    return _dense(dlogits)


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


# --- full_kl -------------------------------------------------------------------------------------


@_operator
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
    kl = _new(logits, *logits.shape[:-1])
    return kl, _new(logits, 5, kl.numel())


@_operator
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
    return _dense(
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


# --- the language-model head ---------------------------------------------------------------------


def _head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    workspace: int,
    backend: str,
) -> HeadInputs:
    """What an operator's first arguments stand for."""
    transform = Transform(softcap, logit_scale, temperature, temperatures)
    return HeadInputs(
        hidden, weight, bias, labels, counted, transform, labels.shape, backend, workspace
    )


def _flat(inputs: HeadInputs) -> tuple[Any, ...]:
    """The arguments of ``_head``."""
    softcap, logit_scale, temperature, temperatures = inputs.transform
    return (
        *(inputs.hidden, inputs.weight, inputs.bias, inputs.labels, inputs.counted, temperatures),
        *(temperature, softcap, logit_scale, inputs.workspace, inputs.backend),
    )


def _wanted(tensors: tuple[Tensor | None, ...]) -> tuple[bool, ...]:
    return tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors)


@_operator
def _linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    workspace: int,
    backend: str,
    entropy: bool,
    extras: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``RowStatistics``; logits are not kept."""
    inputs = _head(
        hidden, weight, bias, labels, counted, temperatures, temperature, softcap, logit_scale,
        workspace, backend,
    )  # fmt: skip
    with torch.autocast(hidden.device.type, enabled=False):
        results, statistics, kept = linear.forward(inputs, entropy, tuple(extras.split()))
    if kept is not None:
        kept.workspace.release()
    return tuple(_or_empty(x, statistics.exp_sum) for x in (*statistics[:3], *results))  # type: ignore[return-value]


@_linear_logprobs.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, entropy, extras = others
    empty = RowStatistics.empty(hidden, hidden.shape[0], entropy, tuple(extras.split()))
    return tuple(_or_empty(x, empty.exp_sum) for x in empty)


@_operator
def _linear_logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    workspace: int,
    backend: str,
    signal_max: Tensor,
    exp_sum: Tensor,
    mean: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _head(
        hidden, weight, bias, labels, counted, temperatures, temperature, softcap, logit_scale,
        workspace, backend,
    )  # fmt: skip
    saved = RowStatistics(signal_max, exp_sum, mean, exp_sum, *(None,) * 4)
    grads = grad_logprobs, grad_entropies
    gradients = linear.backward(grads, inputs, saved, tuple(wanted), None)
    return tuple(_or_empty(x, hidden) for x in gradients)  # type: ignore[return-value]


def _fake_gradients(like: tuple[Tensor | None, ...], wanted: Any) -> tuple[Tensor, ...]:
    assert like[0] is not None
    return tuple(
        torch.empty_like(x) if x is not None and want else like[0].new_empty(0)
        for x, want in zip(like, wanted, strict=True)
    )


@_linear_logprobs_backward.register_fake
def _(_: Any, __: Any, *others: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(others[:3], others[-1])


def _save_linear_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors_and_numbers, ctx.entropy, _ = inputs
    ctx.numbers = tensors_and_numbers[6:]
    ctx.save_for_backward(*tensors_and_numbers[:6], *output[:3])
    ctx.mark_non_differentiable(output[7])
    ctx.set_materialize_grads(False)


def _linear_logprobs_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, signal_max, exp_sum, mean = ctx.saved_tensors
    by_entropies, mean = (grads[4], mean) if ctx.entropy else (None, None)
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _linear_logprobs_backward(
        grads[3], by_entropies, *tensors, *ctx.numbers, signal_max, exp_sum, mean, wanted
    )
    kept = (x if want else None for x, want in zip(gradients, wanted, strict=True))
    return *kept, *(None,) * 10


_linear_logprobs.register_autograd(_linear_logprobs_gradients, setup_context=_save_linear_logprobs)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: HeadInputs,
    entropy: bool,
    extras: tuple[str, ...],
) -> tuple[Tensor | None, ...]:
    results = _linear_logprobs(*_flat(inputs), entropy, " ".join(extras))[3:]
    asked = (True, entropy, *(name in extras for name in linear.EXTRAS))
    logprobs, entropies, *others = (
        x.view(inputs.shape) if want else None for x, want in zip(results, asked, strict=True)
    )
    return logprobs, entropies, *(None if x is None else x.detach() for x in others)


@_operator
def _linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    counted: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    softcap: float | None,
    logit_scale: float,
    workspace: int,
    backend: str,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    ref_logprobs: Tensor | None,
    denominator: Tensor | None,
    low: float,
    high: float,
    dual_clip: float | None,
    aggregate: str,
    denominator_number: float | None,
    kl_coef: float,
    kl_kind: str,
    entropy: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results, and the gradients that are wanted of the loss by the first three."""
    inputs = _head(
        hidden, weight, bias, labels, counted, temperatures, temperature, softcap, logit_scale,
        workspace, backend,
    )._replace(shape=mask.shape)  # fmt: skip
    constants = Constants(
        old_logprobs, advantages, mask, weights, None, None, ref_logprobs, denominator
    )
    settings = Settings(
        low, high, dual_clip, aggregate, denominator_number, 0.0, 0.0, kl_coef, kl_kind
    )
    objective = linear_loss.Objective(constants, settings, backend)
    with torch.autocast(hidden.device.type, enabled=False):
        *results, entropies, gradients = linear_loss.forward(
            inputs, objective, entropy, tuple(wanted)
        )
    return *results, *(_or_empty(x, hidden) for x in (entropies, *gradients))  # type: ignore[return-value]


@_linear_ppo_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    mask, (entropy, wanted) = others[10], others[-2:]
    return (
        _new(hidden),
        _new(hidden, len(LossStats.NAMES)),
        _new(hidden, *mask.shape),
        _new(hidden, *mask.shape, wanted=entropy),
        *_fake_gradients((hidden, weight, bias), wanted),
    )


def _save_linear_ppo_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[4:])
    ctx.set_materialize_grads(False)


def _linear_ppo_loss_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    gradients = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scaled = ((x * grad).to(x.dtype) if want else None for x, want in gradients)
    return *scaled, *(None,) * (ctx.arguments - 3)


_linear_ppo_loss.register_autograd(_linear_ppo_loss_gradients, setup_context=_save_linear_ppo_loss)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: HeadInputs,
    objective: linear_loss.Objective,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    old_logprobs, advantages, mask, weights, _, _, ref_logprobs, denominator = objective.constants
    low, high, dual_clip, aggregate, number, _, _, kl_coef, kl_kind = objective.settings
    loss, numbers, logprobs, entropies, *_ = _linear_ppo_loss(
        *_flat(inputs), old_logprobs, advantages, mask, weights, ref_logprobs, denominator,
        low, high, dual_clip, aggregate, number, kl_coef, kl_kind, entropy,
        list(_wanted((hidden, weight, bias))),
    )  # fmt: skip
    return loss, numbers.detach(), logprobs.detach(), entropies.detach() if entropy else None
