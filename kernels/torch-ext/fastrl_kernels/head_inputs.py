"""A checked call of an op on hidden states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import (
    check_device,
    check_float,
    check_labels_of,
    check_mask,
    check_positive,
    check_temperature,
    checked_labels,
    counts,
)
from .dispatch import choose
from .head import Transform
from .head_rows import TorchRows
from .scratch import KEPT_BYTES

# Of logits that exist at a time. Less on a CPU, where a chunk should stay near a cache, and where
# memory is kept for the next call.
WORKSPACE_BYTES = {"cpu": KEPT_BYTES}
DEFAULT_WORKSPACE_BYTES = 256 << 20


class HeadInputs(NamedTuple):
    """A checked call: N rows, and the shape that results have."""

    hidden: Tensor  # [N, H], 0 where a row does not count
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N] int64, 0 where a row does not count
    counted: Tensor  # [N] bool
    transform: Transform
    shape: torch.Size
    backend: str
    workspace: int  # bytes

    @property
    def rows(self) -> Any:
        """The element-wise work: TorchRows or TritonRows."""
        return _row_work(self.backend)

    def with_tensors(
        self, hidden: Any, weight: Any, bias: Any, labels: Any, counted: Any, temperatures: Any
    ) -> HeadInputs:
        """The same call with other tensors, or None where autograd keeps them."""
        transform = self.transform._replace(temperatures=temperatures)
        return self._replace(
            hidden=hidden, weight=weight, bias=bias, labels=labels, counted=counted,
            transform=transform,
        )  # fmt: skip


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    mask: Tensor | None,
    workspace_bytes: int | None,
    check_labels: bool,
    backend: str,
) -> HeadInputs:
    """
    Raises:
        TypeError, ValueError: as the public ops say.
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is not None and type(x).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor: pass {name}.full_tensor(), or call where the module that "
                "owns it has gathered it"
            )
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be [V, H] with V > 0")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}: they must be "
            "[..., H] and [V, H]"
        )
    check_float("hidden", hidden)
    check_float("weight", weight)
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype}, weight {weight.dtype}: convert one of them")
    check_device("weight", weight, "hidden", hidden)
    if bias is not None:
        check_float("bias", bias)
        check_device("bias", bias, "hidden", hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be ({len(weight)},)")
        bias = bias.to(hidden.dtype)
    check_labels_of(labels, "hidden", hidden)
    tensor, number = check_temperature(temperature, "hidden", hidden)
    if mask is not None:
        check_mask(mask, "labels", labels)
        check_device("mask", mask, "hidden", hidden)
    if softcap is not None:
        softcap = check_positive("softcap", softcap)
    if workspace_bytes is None:
        workspace_bytes = WORKSPACE_BYTES.get(kind, DEFAULT_WORKSPACE_BYTES)
    elif workspace_bytes < 1:
        raise ValueError(f"workspace_bytes must be at least 1, got {workspace_bytes}")
    chosen = choose(backend, hidden, weight, labels)
    if check_labels or (chosen == "torch" and kind == "cpu"):
        labels = checked_labels(labels, mask, len(weight))

    if not torch.is_grad_enabled():  # which a Function's ``needs_input_grad`` does not say
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    counted = counts(labels, mask).reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    return HeadInputs(
        # What lies in rows that do not count may be anything, and 0·NaN would reach the weight.
        hidden=torch.where(counted[:, None], flat, 0.0),
        weight=weight,
        bias=bias,
        labels=torch.where(counted, labels.reshape(-1), 0).long(),
        counted=counted,
        transform=Transform(
            softcap,
            check_positive("logit_scale", logit_scale),
            number,
            None if tensor is None else torch.where(counted, tensor.reshape(-1).float(), 1.0),
        ),
        shape=labels.shape,
        backend=chosen,
        workspace=workspace_bytes,
    )


def _row_work(backend: str) -> Any:
    if backend == "triton":
        from ._triton.head_rows import TritonRows

        return TritonRows
    return TorchRows
