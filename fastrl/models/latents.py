"""Multi-head latent attention (MLA): a cache keeps a latent of each token, which is expanded to
all heads' keys and values, or attended itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fastrl.models.products import has_own_forward
from fastrl.run.contexts import attributes_set
from fastrl_kernels.gemm import without_gaps


class Latents:
    """Replaces a layer's ``expand_kv``, and leaves latents as they are, for an attention that
    reads latents.

    A token has a latent c [R] and a rotated key r [D'] for all heads. With a head's rows U [N, R]
    and W [V, R] of ``kv_b_proj``, its key is (U·c, r) and its value W·c. So a query (a, b) has the
    score aᵀ(U·c) + bᵀr = (Uᵀa, b)ᵀ(c, r), and Σ p·(W·c) = W·(Σ p·c): attention may read latents
    as the keys of one head, and as its values.

    Source: DeepSeek-V2 (arXiv:2405.04434), 2.1.
    """

    def __init__(self, module: Any):
        self.module, self.expanded = module, module.expand_kv

    def __call__(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return latents, rotated

    def are_absorbed(self) -> bool:
        """Whether ``kv_b_proj`` is a plain product, which queries and results can take over."""
        layer = self.module.kv_b_proj
        return (
            type(layer) is nn.Linear
            and layer.bias is None
            and type(layer.weight) is nn.Parameter
            and not has_own_forward(layer)
            and not (layer._forward_hooks or layer._forward_pre_hooks)
        )

    def absorbed(self, query: Tensor) -> Tensor:
        """Queries (Uᵀa, b), [B, H, 1, R + D'], of queries (a, b) [B, H, 1, N + D']."""
        up, _ = self._rows()
        a, b = query.split([up.shape[1], query.shape[-1] - up.shape[1]], dim=-1)
        a = torch.matmul(without_gaps(a.permute(2, 1, 0, 3)), up).permute(2, 1, 0, 3)
        return torch.cat([a, b], dim=-1)

    def values(self, out: Tensor) -> Tensor:
        """W·x, [B, 1, H, V], of sums x of latents [B, 1, H, R]."""
        _, down = self._rows()
        return torch.matmul(without_gaps(out.permute(1, 2, 0, 3)), down.mT).permute(2, 0, 1, 3)

    def _rows(self) -> tuple[Tensor, Tensor]:
        """U [H, N, R] and W [H, V, R] of all heads."""
        module = self.module
        sizes = [module.qk_nope_head_dim, module.v_head_dim]
        weight = module.kv_b_proj.weight
        up, down = weight.view(-1, sum(sizes), weight.shape[-1]).split(sizes, dim=1)
        return up, down


def latent_layers(model: nn.Module) -> dict[int, Any]:
    """The layers that cache latents, by their number in the cache."""
    modules: Iterator[Any] = model.modules()
    return {x.layer_idx: x for x in modules if hasattr(x, "expand_kv") and hasattr(x, "layer_idx")}


def latents_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which the model's attention gets latents, and its layer's :class:`Latents`."""
    layers = latent_layers(model).values()
    return attributes_set(*((module, "expand_kv", Latents(module)) for module in layers))
