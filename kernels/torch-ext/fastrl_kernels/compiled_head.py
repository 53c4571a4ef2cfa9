"""The ops on hidden states as operators; see ``compiled``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import linear, linear_loss
from .compiled import new, operator, or_empty
from .head import Transform
from .head_inputs import HeadInputs
from .head_rows import RowStatistics
from .linear_nll import NLL
from .ppo_loss import Constants, LossStats, Settings


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


@operator
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
    return tuple(or_empty(x, statistics.exp_sum) for x in (*statistics[:3], *results))  # type: ignore[return-value]


@_linear_logprobs.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, entropy, extras = others
    empty = RowStatistics.empty(hidden, hidden.shape[0], entropy, tuple(extras.split()))
    return tuple(or_empty(x, empty.exp_sum) for x in empty)


@operator
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
    return tuple(or_empty(x, hidden) for x in gradients)  # type: ignore[return-value]


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


@operator
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
    token_weights: Tensor | None,
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
        old_logprobs, advantages, mask, weights, None, None, ref_logprobs, denominator,
        token_weights,
    )  # fmt: skip
    settings = Settings(
        low, high, dual_clip, aggregate, denominator_number, 0.0, 0.0, kl_coef, kl_kind
    )
    objective = linear_loss.Objective(constants, settings, backend)
    with torch.autocast(hidden.device.type, enabled=False):
        *results, entropies, gradients = linear_loss.forward(
            inputs, objective, entropy, tuple(wanted)
        )
    results.append(or_empty(entropies, results[0]))
    return *results, *(or_empty(x, hidden) for x in gradients)  # type: ignore[return-value]


@_linear_ppo_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    mask, (entropy, wanted) = others[10], others[-2:]
    return (
        new(hidden),
        new(hidden, len(LossStats.NAMES)),
        new(hidden, *mask.shape),
        new(hidden, *mask.shape, wanted=entropy),
        *_fake_gradients((hidden, weight, bias), wanted),
    )


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.set_materialize_grads(False)


def _scaled_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    gradients = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scaled = ((x * grad).to(x.dtype) if want else None for x, want in gradients)
    return *scaled, *(None,) * (ctx.arguments - 3)


_linear_ppo_loss.register_autograd(_scaled_gradients, setup_context=_save_gradients)


def linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: HeadInputs,
    objective: linear_loss.Objective,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    c = objective.constants
    low, high, dual_clip, aggregate, number, _, _, kl_coef, kl_kind = objective.settings
    loss, numbers, logprobs, entropies, *_ = _linear_ppo_loss(
        *_flat(inputs), c.old_logprobs, c.advantages, c.mask, c.weights, c.ref_logprobs,
        c.denominator, c.token_weights, low, high, dual_clip, aggregate, number, kl_coef, kl_kind,
        entropy, list(_wanted((hidden, weight, bias))),
    )  # fmt: skip
    return loss, numbers.detach(), logprobs.detach(), entropies.detach() if entropy else None


@operator
def _linear_nll_loss(
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
    weights: Tensor,
    denominator: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss and log-probs, and the gradients that are wanted of the loss by the first three."""
    inputs = _head(
        hidden, weight, bias, labels, counted, temperatures, temperature, softcap, logit_scale,
        workspace, backend,
    )  # fmt: skip
    with torch.autocast(hidden.device.type, enabled=False):
        loss, _, logprobs, _, gradients = linear_loss.forward(
            inputs, NLL(weights, denominator), False, tuple(wanted)
        )
    return loss, logprobs, *(or_empty(x, hidden) for x in gradients)  # type: ignore[return-value]


@_linear_nll_loss.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    gradients = _fake_gradients((hidden, weight, bias), others[-1])
    return new(hidden), new(hidden, hidden.shape[0]), *gradients


_linear_nll_loss.register_autograd(_scaled_gradients, setup_context=_save_gradients)


def linear_nll_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: HeadInputs,
    objective: NLL,
    _entropy: bool,
) -> tuple[Tensor, None, Tensor, None]:
    loss, logprobs, *_ = _linear_nll_loss(
        *_flat(inputs), *objective, list(_wanted((hidden, weight, bias)))
    )
    return loss, None, logprobs.detach().view(inputs.shape), None
