"""The KL divergence between two sets of logits, over the vocabulary."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._cpu.row_chunks import chunks, wide, zero_rows
from .argument_types import explains_types
from .checks import (
    check_constant,
    check_device,
    check_logits,
    check_mask,
    check_same_shape,
    check_temperature,
)
from .dispatch import Backend, Passes, choose
from .first_order import first_order
from .operators import applied, dense, new, operator
from .types import Temperature


def _torch_forward(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    *,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """The KL per token, and statistics of the rows [5, N], also without ``save``: both maxima, the
    policy's Σ exp, the difference of both log Σ exp, and the KL."""
    shape = logits.shape[:-1]
    divisor = Temperature(number, temperature)
    saved = torch.empty(5, shape.numel(), dtype=torch.float32, device=logits.device)
    row_max, ref_max, row_sum, log_ratio, kl = saved.unsqueeze(-1)
    for rows, (x, y), memory in chunks(logits, ref_logits, buffers=3):
        y = wide(y, memory[1])
        ref_max[rows] = y.amax(-1, keepdim=True)
        d_ref = divisor.at(rows).divide_(torch.sub(y, ref_max[rows], out=memory[1]))
        ref_sum = torch.exp(d_ref, out=memory[2]).sum(-1, keepdim=True)
        x = wide(x, memory[0])
        row_max[rows] = x.amax(-1, keepdim=True)
        d = divisor.at(rows).divide_(torch.sub(x, row_max[rows], out=memory[0]))
        e = torch.exp(d, out=memory[2])
        row_sum[rows] = e.sum(-1, keepdim=True)
        log_ratio[rows] = (row_sum[rows] / ref_sum).log()
        e.mul_(_difference(d, d_ref, log_ratio[rows]))
        kl[rows] = e.sum(-1, keepdim=True) / row_sum[rows]
    kl = kl.view(shape)
    return kl.clone() if mask is None else torch.where(mask, kl, 0.0), saved


def _torch_backward(
    grad: Tensor,
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    saved: Tensor,
) -> Tensor:
    row_max, ref_max, row_sum, log_ratio, kl = saved.unsqueeze(-1)
    divisor = Temperature(number, temperature)
    counted = torch.ones_like(kl, dtype=torch.bool) if mask is None else mask.reshape(-1, 1)
    # dz = g p [log p - log q - KL]/T with p = e/s.
    slope = divisor.divide_(torch.where(counted, grad.reshape(-1, 1), 0.0)) / row_sum
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    for rows, (x, y, dx), memory in chunks(logits, ref_logits, dlogits, buffers=3):
        d_ref = torch.sub(wide(y, memory[1]), ref_max[rows], out=memory[1])
        d_ref = divisor.at(rows).divide_(d_ref)
        d = torch.sub(wide(x, memory[0]), row_max[rows], out=memory[0])
        e = torch.exp(divisor.at(rows).divide_(d), out=memory[2])
        d = _difference(d, d_ref, log_ratio[rows]).sub_(kl[rows])
        d.mul_(slope[rows]).mul_(e)
        dx.copy_(zero_rows(d, counted[rows]))
    return dlogits


def _difference(d: Tensor, d_ref: Tensor, log_ratio: Tensor) -> Tensor:
    """log p - log q in place of d; finite where d is -inf, which is a token of probability 0."""
    return d.sub_(d_ref).nan_to_num_(nan=0.0, posinf=math.inf, neginf=0.0).sub_(log_ratio)


def _import_triton() -> Backend:
    from ._triton.full_kl import PASSES

    return PASSES


_PASSES = Passes(Backend(_torch_forward, _torch_backward), _import_triton)


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        mask: Tensor | None,
        temperature: Tensor | None,
        number: float,
        backend: str,
    ) -> Tensor:
        save, passes = ctx.needs_input_grad[0], _PASSES.of(backend)
        kl, saved = passes.forward(logits, ref_logits, mask, temperature, number, save=save)
        if save:
            ctx.save_for_backward(logits, ref_logits, mask, temperature, saved)
            ctx.number, ctx.backward_of = number, passes.backward
        return kl

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, saved = ctx.saved_tensors
        return ctx.backward_of(*grads, *inputs, ctx.number, saved), *(None,) * 5


@operator()
def _full_kl(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    temperature: Tensor | None,
    number: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """The KL, and the rows' statistics for backward, [5, N]."""
    return _PASSES.of(backend).forward(logits, ref_logits, mask, temperature, number, save=True)


@_full_kl.register_fake
def _(logits: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    kl = new(logits, *logits.shape[:-1])
    return kl, new(logits, 5, kl.numel())


@operator()
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
        _PASSES.of(backend).backward(grad, logits, ref_logits, mask, temperature, number, saved)
    )


@_full_kl_backward.register_fake
def _(_: Any, logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _save_full_kl(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.number, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])


@first_order
def _full_kl_gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    *inputs, saved = ctx.saved_tensors
    dlogits = _full_kl_backward(grads[0], *inputs, ctx.number, saved, ctx.backend)
    return dlogits, *(None,) * 5


_full_kl.register_autograd(_full_kl_gradients, setup_context=_save_full_kl)


@explains_types
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
    check_logits("logits", logits)
    check_logits("ref_logits", ref_logits)
    check_same_shape("ref_logits", ref_logits, "logits", logits)
    check_device("ref_logits", ref_logits, "logits", logits)
    check_constant("ref_logits", ref_logits)
    number, temperatures = check_temperature(temperature, "logits", logits)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != logits.shape[:-1]:
            check_mask(mask, "logits[..., 0]", logits[..., 0])
        check_device("mask", mask, "logits", logits)
    arguments = (logits, ref_logits, mask, temperatures, number, choose(backend, logits))
    if torch.compiler.is_compiling():
        return _full_kl(*arguments)[0]
    return applied(_FullKL, *arguments)
