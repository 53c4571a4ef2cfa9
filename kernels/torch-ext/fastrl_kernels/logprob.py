"""Log-probabilities and entropies of logits, and the KL divergence between two sets of logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import (
    check_device,
    check_float,
    check_label_range,
    check_labels_of,
    check_mask,
    check_same_shape,
    check_temperature,
    counts,
)
from .dispatch import choose
from .rows import as_rows_together

# Logits that the PyTorch path works on at a time: 4 MiB in fp32, to stay in a cache.
CHUNK_ELEMENTS = 1 << 20
# exp of it is 0. It stands in for -inf where its product with that 0 has to be 0.
FLOOR = -200.0


def _chunks(*tensors: Tensor, buffers: int) -> Iterator[tuple[slice, list[Tensor], Tensor]]:
    """Blocks of rows of [..., V] tensors: which rows, a view [r, V] of each tensor, and fp32
    working memory [buffers, r, V], the same for all blocks."""
    walks = as_rows_together(*tensors)
    outer, inner, vocabulary = walks[0].shape
    step = max(1, min(inner, CHUNK_ELEMENTS // vocabulary))
    device = tensors[0].device
    memory = torch.empty(buffers, step, vocabulary, dtype=torch.float32, device=device)
    for i in range(outer):
        for j in range(0, inner, step):
            stop = min(j + step, inner)
            rows = slice(i * inner + j, i * inner + stop)
            yield rows, [x[i, j:stop] for x in walks], memory[:, : stop - j]


class _Temperature:
    """One temperature for all rows, or one per row."""

    def __init__(self, number: float, tensor: Tensor | None) -> None:
        self.tensor = None if tensor is None else tensor.float().reshape(-1, 1)
        self.number = number

    def divide_(self, x: Tensor, rows: slice = slice(None)) -> Tensor:
        """x/T in place, x [r, ...] being rows ``rows`` of all."""
        if self.tensor is not None:
            return x.div_(self.tensor[rows])
        return x if self.number == 1.0 else x.div_(self.number)


def _wide(x: Tensor, out: Tensor) -> Tensor:
    """x itself if it is fp32, else converted in ``out``."""
    return x if x.dtype == torch.float32 else out.copy_(x)


def _zero_rows(x: Tensor, counted: Tensor) -> Tensor:
    """Zeroes the fp32 rows that do not count, by their bits: NaN times 0 is NaN."""
    x.view(torch.int32).bitwise_and_(-counted.int())
    return x


class _TokenLogprobs(torch.autograd.Function):
    """The arguments and results of `_triton.logprob.TokenLogprobs`, in PyTorch."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        temperature: Tensor | None,
        number: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        vocabulary = logits.shape[-1]
        flat = labels.reshape(-1, 1).long()
        columns = flat.clamp(0, vocabulary - 1)
        known = (flat >= 0) & (flat < vocabulary)
        divisor = _Temperature(number, temperature)
        row_max, row_sum, mean, at_label = logits.new_empty(4, len(flat), 1, dtype=torch.float32)
        for rows, (x,), memory in _chunks(logits, buffers=1 + entropy):
            x = _wide(x, memory[0])
            row_max[rows] = x.amax(-1, keepdim=True)
            d = divisor.divide_(torch.sub(x, row_max[rows], out=memory[0]), rows)
            at_label[rows] = d.gather(-1, columns[rows])
            if entropy:
                e = torch.exp(d.clamp_(min=FLOOR), out=memory[1])
                row_sum[rows] = e.sum(-1, keepdim=True)
                mean[rows] = e.mul_(d).sum(-1, keepdim=True) / row_sum[rows]
            else:
                row_sum[rows] = d.exp_().sum(-1, keepdim=True)

        log_sum = row_sum.log()
        counted = counts(labels, mask).reshape(-1, 1)
        if ctx.needs_input_grad[0]:
            statistics = (row_max, row_sum, mean if entropy else None)
            ctx.save_for_backward(logits, columns, known, counted, temperature, *statistics)
            ctx.number = number
            ctx.set_materialize_grads(False)
        logprobs = torch.where(known, at_label - log_sum, math.nan)
        logprobs = torch.where(counted, logprobs, 0.0).reshape(labels.shape)
        if not entropy:
            return logprobs, None
        return logprobs, torch.where(counted, log_sum - mean, 0.0).reshape(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, columns, known, counted, temperature, *statistics = ctx.saved_tensors
        row_max, row_sum, mean = statistics
        divisor = _Temperature(ctx.number, temperature)
        # dz = [g (1_y - p) - g_H p (z - E[z])]/T with p = e/s, as 1_y·g + e·(base + (z - m)·slope).
        g, g_entropy = (
            None if x is None else divisor.divide_(torch.where(counted, x.reshape(-1, 1), 0.0))
            for x in grads
        )
        g = torch.zeros_like(row_sum) if g is None else g
        base = -torch.where(known, g, math.nan) / row_sum
        if g_entropy is not None:
            slope = -g_entropy / row_sum
            base -= slope * mean
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        buffers = 2 if g_entropy is not None else 1
        for rows, (x, dx), memory in _chunks(logits, dlogits, buffers=buffers):
            d = torch.sub(_wide(x, memory[0]), row_max[rows], out=memory[0])
            d = divisor.divide_(d, rows)
            if g_entropy is not None:
                e = torch.exp(d.clamp_(min=FLOOR), out=memory[1])
                d.mul_(slope[rows]).add_(base[rows]).mul_(e)
            else:
                d.exp_().mul_(base[rows])
            d.scatter_add_(-1, columns[rows], g[rows])
            dx.copy_(_zero_rows(d, counted[rows]))
        return dlogits, None, None, None, None, None


class _FullKL(torch.autograd.Function):
    """The arguments and result of `_triton.full_kl.FullKL`, in PyTorch."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        mask: Tensor | None,
        temperature: Tensor | None,
        number: float,
    ) -> Tensor:
        shape = logits.shape[:-1]
        divisor = _Temperature(number, temperature)
        row_max, ref_max, row_sum, log_ratio, kl = logits.new_empty(
            5, shape.numel(), 1, dtype=torch.float32
        )
        for rows, (x, y), memory in _chunks(logits, ref_logits, buffers=3):
            y = _wide(y, memory[1])
            ref_max[rows] = y.amax(-1, keepdim=True)
            d_ref = divisor.divide_(torch.sub(y, ref_max[rows], out=memory[1]), rows)
            ref_sum = torch.exp(d_ref, out=memory[2]).sum(-1, keepdim=True)
            x = _wide(x, memory[0])
            row_max[rows] = x.amax(-1, keepdim=True)
            d = divisor.divide_(torch.sub(x, row_max[rows], out=memory[0]), rows)
            e = torch.exp(d, out=memory[2])
            row_sum[rows] = e.sum(-1, keepdim=True)
            log_ratio[rows] = (row_sum[rows] / ref_sum).log()
            e.mul_(_difference(d, d_ref, log_ratio[rows]))
            kl[rows] = e.sum(-1, keepdim=True) / row_sum[rows]
        if ctx.needs_input_grad[0]:
            statistics = (row_max, ref_max, row_sum, log_ratio, kl)
            ctx.save_for_backward(logits, ref_logits, mask, temperature, *statistics)
            ctx.number = number
        kl = kl.reshape(shape)
        return kl if mask is None else torch.where(mask, kl, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, ref_logits, mask, temperature, *statistics = ctx.saved_tensors
        row_max, ref_max, row_sum, log_ratio, kl = statistics
        divisor = _Temperature(ctx.number, temperature)
        counted = torch.ones_like(kl, dtype=torch.bool) if mask is None else mask.reshape(-1, 1)
        # dz = g p [log p - log q - KL]/T with p = e/s.
        slope = divisor.divide_(torch.where(counted, grads[0].reshape(-1, 1), 0.0)) / row_sum
        dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        for rows, (x, y, dx), memory in _chunks(logits, ref_logits, dlogits, buffers=3):
            d_ref = torch.sub(_wide(y, memory[1]), ref_max[rows], out=memory[1])
            d_ref = divisor.divide_(d_ref, rows)
            d = torch.sub(_wide(x, memory[0]), row_max[rows], out=memory[0])
            e = torch.exp(divisor.divide_(d, rows), out=memory[2])
            d = _difference(d, d_ref, log_ratio[rows]).sub_(kl[rows])
            d.mul_(slope[rows]).mul_(e)
            dx.copy_(_zero_rows(d, counted[rows]))
        return dlogits, None, None, None, None


def _difference(d: Tensor, d_ref: Tensor, log_ratio: Tensor) -> Tensor:
    """log p - log q in place of d; finite where d is -inf, for a token that weighs nothing."""
    return d.sub_(d_ref).nan_to_num_(nan=0.0, posinf=math.inf, neginf=0.0).sub_(log_ratio)


def _check_logits(name: str, logits: Tensor) -> None:
    check_float(name, logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        shape = tuple(logits.shape)
        raise ValueError(f"{name} has shape {shape}: it must be [..., V] with V > 0")


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    entropy: Literal[False] = False,
    check_labels: bool = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    entropy: Literal[True],
    check_labels: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    entropy: bool,
    check_labels: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    check_labels: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
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
    _check_logits("logits", logits)
    check_labels_of(labels, "logits", logits)
    tensor, number = check_temperature(temperature, "logits", logits)
    if mask is not None:
        check_mask(mask, "labels", labels)
        check_device("mask", mask, "logits", logits)
    chosen = choose(backend, logits)
    if check_labels or (chosen == "torch" and logits.device.type == "cpu"):
        check_label_range(labels, mask, logits.shape[-1])
    function: Any = _TokenLogprobs
    if chosen == "triton":
        from ._triton.logprob import TokenLogprobs

        function = TokenLogprobs
    logprobs, entropies = function.apply(logits, labels, mask, tensor, number, entropy)
    return (logprobs, entropies) if entropy else logprobs


def full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """KL(p || q) = Σ_v p_v (log p_v - log q_v) per token, p and q the softmax of each logits/T.

    One pass over both forward; backward reads both again and writes

        dz = g p [log p - log q - KL]/T.

    Args:
        logits: [..., V] the policy's, fp32, bf16 or fp16; arithmetic is fp32 from the first load.
            Never modified. Strides as for ``token_logprobs``. A logit of -inf adds nothing.
        ref_logits: [..., V] the reference's, which gets no gradient. Copied once where its rows
            are not aligned to 16 bytes as those of ``logits`` are.
        temperature: T > 0 for both, a number or [...], not differentiable.
        mask: [...] bool, True = counts; elsewhere results and gradients are 0.
        backend: "auto", "triton" or "torch"; see ``explain``.

    Returns:
        [...] fp32 in nats. Infinite where the policy allows a token that the reference masks out.

    Raises:
        TypeError: logits that are not fp32, bf16 or fp16; a mask that is not boolean.
        ValueError: shapes or devices that do not fit, V = 0, a temperature that is not positive and
            finite, a temperature or reference that requires grad.
    """
    _check_logits("logits", logits)
    _check_logits("ref_logits", ref_logits)
    check_same_shape("ref_logits", ref_logits, "logits", logits)
    check_device("ref_logits", ref_logits, "logits", logits)
    if ref_logits.requires_grad and torch.is_grad_enabled():
        raise ValueError("ref_logits requires grad, but gets no gradient: detach it")
    tensor, number = check_temperature(temperature, "logits", logits)
    if mask is not None:
        check_mask(mask, "logits[..., 0]", logits[..., 0])
        check_device("mask", mask, "logits", logits)
    function: Any = _FullKL
    if choose(backend, logits) == "triton":
        from ._triton.full_kl import FullKL

        function = FullKL
    return function.apply(logits, ref_logits, mask, tensor, number)
