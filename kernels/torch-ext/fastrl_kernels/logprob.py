"""Log-probabilities and entropies of logits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._cpu.row_chunks import FLOOR, chunks, wide, zero_rows
from .argument_types import explains_types
from .checks import (
    check_device,
    check_labels_of,
    check_logits,
    check_mask,
    check_temperature,
    checked_labels,
    counts,
)
from .dispatch import Backend, choose
from .first_order import first_order
from .operators import applied, dense, new, operator, or_empty
from .types import Temperature


def _torch_forward(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    *,
    entropy: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probabilities, entropies, and of each row max x, Σ exp((x - max)/T) and, with entropies,
    (E[x] - max)/T, [2 or 3, N], also without ``save``."""
    flat, columns, known, counted = _columns(labels, mask, logits.shape[-1])
    divisor = Temperature(number, temperature)
    saved = torch.empty(
        2 + entropy, len(flat), 1, dtype=torch.float32, device=logits.device
    )  # fmt: skip
    row_max, row_sum, mean = saved[0], saved[1], saved[-1]
    at_label = torch.empty_like(row_max)
    for rows, (x,), memory in chunks(logits, buffers=1 + entropy):
        x = wide(x, memory[0])
        row_max[rows] = x.amax(-1, keepdim=True)
        d = divisor.at(rows).divide_(torch.sub(x, row_max[rows], out=memory[0]))
        at_label[rows] = d.gather(-1, columns[rows])
        if entropy:
            e = torch.exp(d.clamp_(min=FLOOR), out=memory[1])
            row_sum[rows] = e.sum(-1, keepdim=True)
            mean[rows] = e.mul_(d).sum(-1, keepdim=True) / row_sum[rows]
        else:
            row_sum[rows] = d.exp_().sum(-1, keepdim=True)

    log_sum = row_sum.log()
    logprobs = torch.where(known, at_label - log_sum, math.nan)
    logprobs = torch.where(counted, logprobs, 0.0).view(labels.shape)
    if not entropy:
        return logprobs, None, saved.squeeze(-1)
    entropies = torch.where(counted, log_sum - mean, 0.0).view(labels.shape)
    return logprobs, entropies, saved.squeeze(-1)


def _columns(labels: Tensor, mask: Tensor | None, vocabulary: int) -> tuple[Tensor, ...]:
    """Per row [N, 1]: the label, a column that can be read, whether it is the label's, and whether
    the row counts."""
    flat = labels.reshape(-1, 1).long()
    known = (flat >= 0) & (flat < vocabulary)
    return flat, flat.clamp(0, vocabulary - 1), known, counts(labels, mask).reshape(-1, 1)


def _torch_backward(
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    saved: Tensor,
) -> Tensor:
    columns_of = saved.unsqueeze(-1)
    row_max, row_sum, mean = columns_of[0], columns_of[1], columns_of[-1]
    _, columns, known, counted = _columns(labels, mask, logits.shape[-1])
    divisor = Temperature(number, temperature)
    # dz = [g (1_y - p) - g_H p (z - E[z])]/T with p = e/s, as 1_y·g + e·(base + (z - m)·slope).
    g, g_entropy = (
        None if x is None else divisor.divide_(torch.where(counted, x.reshape(-1, 1), 0.0))
        for x in (grad_logprobs, grad_entropies)
    )
    g = torch.zeros_like(row_sum) if g is None else g
    base = -torch.where(known, g, math.nan) / row_sum
    if g_entropy is not None:
        slope = -g_entropy / row_sum
        base -= slope * mean
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    buffers = 2 if g_entropy is not None else 1
    for rows, (x, dx), memory in chunks(logits, dlogits, buffers=buffers):
        d = torch.sub(wide(x, memory[0]), row_max[rows], out=memory[0])
        d = divisor.at(rows).divide_(d)
        if g_entropy is not None:
            e = torch.exp(d.clamp_(min=FLOOR), out=memory[1])
            d.mul_(slope[rows]).add_(base[rows]).mul_(e)
        else:
            d.exp_().mul_(base[rows])
        d.scatter_add_(-1, columns[rows], g[rows])
        dx.copy_(zero_rows(d, counted[rows]))
    return dlogits


def _backend(name: str) -> Backend:
    if name == "triton":
        from ._triton.logprob import PASSES

        return PASSES
    return _TORCH_PASSES


_TORCH_PASSES = Backend(_torch_forward, _torch_backward)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        temperature: Tensor | None,
        number: float,
        entropy: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor | None]:
        save, passes = ctx.needs_input_grad[0], _backend(backend)
        logprobs, entropies, saved = passes.forward(
            logits, labels, mask, temperature, number, entropy=entropy, save=save
        )
        if save:
            ctx.save_for_backward(logits, labels, mask, temperature, saved)
            ctx.set_materialize_grads(False)
            ctx.number, ctx.backward_of = number, passes.backward
        return logprobs, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, saved = ctx.saved_tensors
        dlogits = ctx.backward_of(*grads, *inputs, ctx.number, saved)
        return dlogits, *(None,) * 6


@operator()
def _token_logprobs(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies, and what backward needs of the rows, [2 or 3, N]."""
    logprobs, entropies, saved = _backend(backend).forward(
        logits, labels, mask, temperature, number, entropy=entropy, save=True
    )
    return logprobs, or_empty(entropies, logprobs), saved


@_token_logprobs.register_fake
def _(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, ...]:
    entropy, n = others[3], labels.numel()
    return (
        new(logits, *labels.shape),
        new(logits, *labels.shape, wanted=entropy),
        new(logits, 2 + entropy, n),
    )


@operator()
def _token_logprobs_backward(
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    saved: Tensor,
    backend: str,
) -> Tensor:
    dlogits = _backend(backend).backward(
        grad_logprobs, grad_entropies, logits, labels, mask, temperature, number, saved
    )
    return dense(dlogits)


@_token_logprobs_backward.register_fake
def _(_: Any, __: Any, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save_token_logprobs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.number, ctx.entropy, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)


@first_order
def _token_logprobs_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    by_entropies = grads[1] if ctx.entropy else None
    dlogits = _token_logprobs_backward(
        grads[0], by_entropies, *inputs, ctx.number, saved, ctx.backend
    )
    return dlogits, *(None,) * 6


_token_logprobs.register_autograd(_token_logprobs_gradients, setup_context=_save_token_logprobs)


def figures_of(
    logits: Tensor, tokens: Tensor, temperature: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of rows [N, V] without checks or gradients; nothing is waited for."""
    forward = _backend(backend).forward
    logprobs, entropies, _ = forward(
        logits, tokens, None, None, temperature, entropy=True, save=False
    )
    assert entropies is not None
    return logprobs, entropies


@explains_types
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    check_labels: bool = False,
    backend: str = "auto",
) -> Any:
    """log softmax(z)[y] per token with z = logits/T, and the entropy H = -Σ_v p_v log p_v.

    One pass over the logits forward; backward reads them again and writes their gradient

        dz = [g (1_y - p) - g_H p (log p + H)]/T,

    and nothing else of their size exists. Logits of -inf are tokens masked out of the vocabulary:
    p = 0, with no part in H and no gradient.

    Args:
        logits: [..., V] fp32, bf16 or fp16; arithmetic is fp32 from the first load. Never
            modified. Any row strides that a slice of a contiguous tensor has, such as
            ``logits[:, :-1]``; copied once where the last dimension is not contiguous, or the
            leading ones need more than two strides.
        labels: [...] integer token ids; -100 marks a token that does not count.
        temperature: T > 0, a number or [...], not differentiable.
        mask: [...] bool, True = counts. Where it or the label says no, results and gradients are 0.
        entropy: also return entropies, in nats.
        check_labels: on a GPU, wait for it and raise where a label is out of range; without it
            such a token's log-probability and gradient are NaN. CPU tensors are always checked.
        backend: "auto", "triton" or "torch"; see ``explain``.

    Returns:
        Log-probabilities [...] fp32 in nats; with ``entropy``, also entropies [...] fp32.

    Raises:
        TypeError: logits that are not fp32, bf16 or fp16; labels that are not integers; a mask that
            is not boolean.
        ValueError: shapes or devices that do not fit, V = 0, a temperature that is not positive and
            finite or requires grad, a label outside [0, V) other than -100 where checked.

    Source: the online softmax is Milakov and Gimelshein, 2018 (arXiv:1805.02867).
    """
    check_logits("logits", logits)
    check_labels_of(labels, "logits", logits)
    number, temperatures = check_temperature(temperature, "logits", logits)
    if mask is not None:
        check_mask(mask, "labels", labels)
        check_device("mask", mask, "logits", logits)
    chosen = choose(backend, logits)
    if check_labels or (chosen == "torch" and logits.device.type == "cpu"):
        labels = checked_labels(labels, mask, logits.shape[-1])
    arguments = (logits, labels, mask, temperatures, number, entropy, chosen)
    if torch.compiler.is_compiling():
        logprobs, entropies, _ = _token_logprobs(*arguments)
    else:
        logprobs, entropies = applied(_TokenLogprobs, *arguments)
    return (logprobs, entropies) if entropy else logprobs
