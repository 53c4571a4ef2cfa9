"""The gradient of an embedding that is tied to the LM head, without a second dense [V, H] tensor.

The weight's gradient is the sum of the head's, which is dense, and the embedding's, which has a few
rows. As a dense tensor the second would be as large as the weight and nearly all zeros, to be
allocated, cleared and added. Autograd joins the two in place if the sparse one comes first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastrl_kernels.dispatch import device_kind


class _SparseEmbedding(torch.autograd.Function):
    """weight[ids]; its gradient with respect to the weight is sparse."""

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


class _Identity(torch.autograd.Function):
    """A view of x. Autograd runs the backward of this older node after those of younger ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@contextlib.contextmanager
def sparse_embedding_gradient(model: Any) -> Iterator[Tensor | None]:
    """Context in which an input embedding that is tied to the head has a sparse gradient.

    Yields the weight to compute the head with: a view that is older than the embedding's output, so
    that autograd adds the head's gradient last. Yields None where nothing is tied, the embedding is
    frozen or has hooks or options, or gradients are off; and on GPUs: clearing is cheap there, and
    adding sparse rows is not deterministic.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = (
        type(embedding) is nn.Embedding
        and embedding.weight is head.weight
        and device_kind(embedding.weight) == "cpu"
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
        and not embedding._forward_hooks  # such as NEFTune's noise, which would be lost
    )
    if not plain or not torch.is_grad_enabled() or not embedding.weight.requires_grad:
        yield None
        return

    def embed(module: nn.Embedding, args: tuple[Tensor, ...], _out: Tensor) -> Tensor:
        return _SparseEmbedding.apply(module.weight, args[0], module.padding_idx)

    weight = _Identity.apply(head.weight)
    with embedding.register_forward_hook(embed):
        yield weight
