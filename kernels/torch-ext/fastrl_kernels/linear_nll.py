"""The negative log-likelihood from hidden states: the language-model head and the loss in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .argument_types import explains_types
from .head_pass import (
    HandOut,
    HeadPass,
    save_gradients,
    scaled_gradients,
    wanted_gradients,
    weights_and_total,
)
from .lm_head import (
    HEAD_SCHEMA,
    HeadInputs,
    checked_head,
    fake_gradients,
    flat_head,
    split_head,
)
from .operators import new, operator, or_empty
from .ppo_loss import inverse_of
from .vocab_parallel import VocabParallel


@torch.no_grad()
def _forward(
    inputs: HeadInputs, weights: Tensor, denominator: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor, Tensor, tuple[Tensor | None, ...]]:
    """The loss of N tokens, their log-probs, and the wanted gradients by hidden states, weight and
    bias."""
    weights = weights * inverse_of(denominator)
    head = HeadPass(inputs, False, wanted)
    for rows in head:
        if head.wanted:
            logprobs = head.statistics.logprobs[rows]
            head.backward(rows, torch.where(logprobs.isnan(), logprobs, -weights[rows]))
    logprobs = head.per_token(head.statistics.logprobs)
    return -(logprobs.reshape(-1) * weights).sum(), logprobs, head.gradients()


@operator(
    f"({HEAD_SCHEMA}, Tensor weights, Tensor denominator, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _linear_nll_loss(*arguments: Any) -> tuple[Tensor, ...]:
    """Loss and log-probs, and the wanted gradients of the loss by the first three arguments."""
    inputs, (weights, denominator, wanted) = split_head(arguments)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, logprobs, gradients = _forward(inputs, weights, denominator, tuple(wanted))
    return loss, logprobs, *(or_empty(x, inputs.hidden) for x in gradients)


@_linear_nll_loss.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    gradients = fake_gradients((hidden, *others[:2]), others[-1])
    return new(hidden), new(hidden, hidden.shape[0]), *gradients


_linear_nll_loss.register_autograd(scaled_gradients, setup_context=save_gradients)


@explains_types
def linear_nll_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    denominator: float | Tensor | None = None,
    shift: bool | int = False,
    vocab_parallel: VocabParallel | None = None,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """-Σ w·``linear_logprobs(hidden, weight, labels)`` / denominator.

    As in ``linear_ppo_loss`` a chunk of logits gives log-probs and gradients while it is there:
    6·N·V·H flops, and no logits are kept for backward, which multiplies gradients with its own,
    once. The same goes for their rounding: under a GradScaler, use ``linear_logprobs``.

    Args:
        hidden, weight, labels, bias, softcap, logit_scale, mask: as for ``linear_logprobs``, and so
            is the rounding. With several chunks of rows the weight's gradient is summed in fp32,
            V·H·4 bytes; a GPU has one chunk where its logits fit into ``workspace_bytes`` and
            these.
        weights: [...] of the tokens, 1 where None; not differentiable.
        denominator: a number or a 0-d tensor; the number of tokens that count where None. Where it
            is 0, so is the loss.
        shift: as for ``linear_logprobs``; ``weights`` are [..., T - n] then, as ``mask`` is.
        vocab_parallel: as for ``linear_logprobs``. Each chunk of rows is one exchange, and the
            hidden states' gradient another, at the end of forward.
        workspace_bytes, check_labels, backend: as for ``linear_logprobs``.

    Returns:
        The loss, 0-d fp32, differentiable with respect to ``hidden``, ``weight`` and ``bias``; and
        the log-probs [...] fp32, detached, 0 where masked.

    Raises:
        TypeError, ValueError: as ``linear_logprobs``; weights of another shape or that require a
            gradient.
        RuntimeError: a second backward through the same call, unless it is compiled.
    """
    inputs = checked_head(
        hidden, weight, labels, bias, 1.0, softcap, logit_scale, mask, shift, vocab_parallel,
        workspace_bytes, check_labels, backend,
    )  # fmt: skip
    token_weights, total = weights_and_total(inputs, weights, denominator, shift)
    wanted = wanted_gradients(inputs.hidden, inputs.weight_leaf, inputs.bias)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if torch.compiler.is_compiling():
            loss, logprobs, *_ = _linear_nll_loss(*flat_head(inputs), token_weights, total, wanted)
            return loss, logprobs.detach().view(inputs.shape)
        loss, logprobs, gradients = _forward(inputs, token_weights, total, wanted)
        loss = HandOut.apply(
            inputs.hidden, inputs.weight_leaf, inputs.bias, loss, gradients, inputs.head,
            "linear_nll_loss",
        )  # fmt: skip
    return loss, logprobs
