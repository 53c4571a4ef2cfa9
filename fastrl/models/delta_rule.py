"""The gated delta rule of texts in one row, in torch: chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastrl.models.packed_parts import Chunks

CHUNK = 32  # tokens; longer chunks waste products where texts are short


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunks: Chunks,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule of texts one after the other. With decays exp g and strengths β, a head
    has

        S_t = exp(g_t)·(1 - β_t·k_t·k_tᵀ)·S_{t-1} + β_t·k_t·v_tᵀ,   out_t = S_tᵀ·q_t.

    Within a chunk the delta rule is a triangular system. With c the running sum of g in a chunk,
    D_ij = exp(c_i - c_j) for i ≥ j, and M = (1 + tril(β·k·kᵀ ∘ D, -1))⁻¹,

        v' = M·(β·v) - M·(β·exp(c)·k)·S,   out = exp(c)·q·S + tril(q·kᵀ ∘ D)·v',
        S ← exp(c_C)·S + (exp(c_C - c)·k)ᵀ·v'.

    Args:
        query, key: [T, heads, K] fp32 or fp64, as they meet the state: normalised and scaled.
        value: [T, heads, V].
        g, beta: [T, heads].
        chunks: the texts' chunks.
        initial: [texts, heads, K, V], the states that they begin with; None: zeros.

    Returns:
        out [T, heads, V], and the texts' last states [texts, heads, K, V].

    Source: Yang, Kautz and Hatamizadeh, 2024, "Gated Delta Networks" (arXiv:2412.06464).
    """
    row, size = chunks.row, chunks.size

    def cut(x: Tensor) -> Tensor:
        """x [T, heads, ...] in chunks, [chunks, heads, size, ...]."""
        return row.spread(x).unflatten(0, (-1, size)).transpose(1, 2).contiguous()

    q, k, v, g, beta = map(cut, (query, key, value, g, beta))
    c = g.cumsum(-1)
    below = torch.ones(size, size, dtype=torch.bool, device=c.device).tril()
    pairs = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(~below, -torch.inf).exp()
    of_start, of_end = c.exp().unsqueeze(-1), (c[..., -1:] - c).exp().unsqueeze(-1)
    written = k * beta.unsqueeze(-1)
    inverse = _Inverse.apply(written @ k.mT * pairs)
    new, read = inverse @ (v * beta.unsqueeze(-1)), inverse @ (written * of_start)
    attended, q, k = q @ k.mT * pairs, q * of_start, k * of_end
    decay = c[..., -1].exp()[..., None, None]

    if initial is None:
        states = v.new_zeros(max(chunks.counts), *k.shape[1:2], k.shape[-1], v.shape[-1])
    else:
        states = initial.index_select(0, chunks.order)
    outs = []
    # Split at once: the gradients of single slices would each fill all chunks.
    steps = (x.split(chunks.counts) for x in (new, read, attended, q, k, decay))
    for of_chunk, read_, attended_, q_, k_, decay_ in zip(*steps, strict=True):
        before, waiting = states.split([len(q_), len(states) - len(q_)])
        of_chunk = of_chunk - read_ @ before
        outs.append(q_ @ before + attended_ @ of_chunk)
        after = before * decay_ + k_.mT @ of_chunk
        states = torch.cat([after, waiting]) if len(waiting) else after
    out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    return row.gathered(out), states.index_select(0, chunks.place)


class _Inverse(torch.autograd.Function):
    """(1 + tril(x, -1))⁻¹ of [..., n, n], n a power of two: by halves, whose products are batches;
    torch solves such systems one after the other on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        size = x.shape[-1]
        inverse = torch.eye(size, dtype=x.dtype, device=x.device).expand_as(x).contiguous()
        half = 1
        while half < size:
            # The quarter (down, across) of each block on y's diagonal, [..., blocks, half, half].
            def blocks(y: Tensor, down: int, across: int, half: int = half) -> Tensor:
                y = y.unflatten(-2, (-1, 2, half)).unflatten(-1, (-1, 2, half))
                y = y.diagonal(dim1=-6, dim2=-3)  # [..., 2, half, 2, half, blocks]
                return y[..., down, :, across, :, :].movedim(-1, -3)

            lower = blocks(x, 1, 0)
            blocks(inverse, 1, 0).copy_(-blocks(inverse, 1, 1) @ lower @ blocks(inverse, 0, 0))
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)
