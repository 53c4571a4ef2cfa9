"""The negative log-likelihood from hidden states: the language-model head and the loss in one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import check_device, check_float, check_same_shape
from .head_inputs import checked_head
from .linear_loss import LinearLoss


class NLL(NamedTuple):
    """-Σ w·log π / denominator over N tokens."""

    weights: Tensor  # [N] fp32, 0 where a token does not count
    denominator: Tensor  # 0-d fp32

    @property
    def op(self) -> str:
        return "linear_nll_loss"

    def token_weights(self) -> Tensor:
        return self.weights * torch.where(self.denominator == 0, 0.0, 1.0 / self.denominator)

    def flat(self) -> NLL:
        return self

    def slopes(self, logprobs: Tensor, rows: slice, weights: Tensor) -> Tensor:
        """NaN where the log-prob is: where a label is out of range."""
        return torch.where(logprobs.isnan(), logprobs, -weights[rows])

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and no statistics."""
        return -(logprobs.reshape(-1) * self.token_weights()).sum(), logprobs.new_empty(0)


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
            V·H·4 bytes.
        weights: [...] of the tokens, 1 where None; not differentiable.
        denominator: a number or a 0-d tensor; the number of tokens that count where None. Where it
            is 0, so is the loss.
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
        hidden, weight, labels, bias, 1.0, softcap, logit_scale, mask, workspace_bytes,
        check_labels, backend,
    )  # fmt: skip
    counts = inputs.counted.float()
    if weights is not None:
        check_float("weights", weights)
        check_same_shape("weights", weights, "labels", labels)
        check_device("weights", weights, "hidden", hidden)
        if weights.requires_grad:
            raise ValueError("weights requires a gradient, which it does not get: detach it")
        counts = torch.where(inputs.counted, weights.reshape(-1).float(), 0.0)
    if denominator is None:
        total = inputs.counted.sum().float()
    elif isinstance(denominator, Tensor):
        if denominator.dim() or denominator.requires_grad:
            raise ValueError("denominator must be a number or a 0-d tensor without a gradient")
        total = denominator.to(counts)
    else:
        total = torch.full((), float(denominator), device=hidden.device)
    run: Any = LinearLoss.apply
    if torch.compiler.is_compiling():
        from .compiled_head import linear_nll_loss as run
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        loss, _, logprobs, _ = run(
            inputs.hidden, inputs.weight, inputs.bias, inputs, NLL(counts, total), False
        )
    return loss, logprobs
