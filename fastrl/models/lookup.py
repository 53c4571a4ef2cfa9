"""Gradients of a tied embedding's lookups, without a second gradient of the vocabulary's size.

Where the LM head's weight is the embedding's, its gradient is the sum of two: the head's, which is
dense, and that of the lookups, a few rows. As a dense tensor the second would be as large as the
weight, nearly all zeros, to be allocated, cleared and added. Autograd adds in place instead if it
is sparse and comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class _Lookup(torch.autograd.Function):
    """weight[ids], whose gradient by the weight is sparse."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        grad = grads[0]
        if ctx.padding_idx is not None:
            grad = grad.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0.0)
        values = grad.reshape(-1, ctx.shape[1])
        return (
            torch.sparse_coo_tensor(ids.reshape(1, -1), values, ctx.shape, check_invariants=False),
            None,
            None,
        )


class _PassedOn(torch.autograd.Function):
    """The same tensor; its gradient waits for what is younger in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@contextlib.contextmanager
def sparse_lookups(model: Any) -> Iterator[Tensor | None]:
    """While open, lookups in an embedding that is tied to the head have sparse gradients.

    Yields the weight that the head has to be computed with: a view, whose gradient autograd passes
    on last, since it is older than the lookups. None where nothing is tied, and on GPUs: clearing
    is cheap there, and adding sparse rows is not deterministic.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = (
        type(embedding) is nn.Embedding
        and embedding.weight is head.weight
        and embedding.weight.device.type == "cpu"
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
        and not embedding._forward_hooks  # NEFTune's noise, say, which a lookup would undo
    )
    if not plain or not torch.is_grad_enabled() or not embedding.weight.requires_grad:
        yield None
        return

    def look_up(module: nn.Embedding, args: tuple[Tensor, ...], _out: Tensor) -> Tensor:
        return _Lookup.apply(module.weight, args[0], module.padding_idx)

    weight = _PassedOn.apply(head.weight)
    handle = embedding.register_forward_hook(look_up)
    try:
        yield weight
    finally:
        handle.remove()
