"""What a decode step attends with: flash-attn's kernel where it is installed and fits, or ours."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import fastrl_kernels
from fastrl.rollout.attention import Variant
from fastrl_kernels.dispatch import BACKEND_VARIABLE

# [B, 1, Hq, D] of queries [B, Hq, 1, D]; keys and values [S, M, Hkv, D], row i attending slot i;
# lengths [B] int32; a span that no length exceeds.
Decode = Callable[[Tensor, Tensor, Tensor, Tensor, int, Variant], Tensor]

_WIDEST = 256  # of a head, in flash-attn 2
_ARGUMENTS = ("cache_seqlens", "softmax_scale", "causal", "window_size", "softcap")


def choose_decode(
    widths: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> Decode:
    """Chosen once for an arena: how its decode steps attend.

    flash-attn's ``flash_attn_with_kvcache`` is hand-written for tensor cores and takes an arena as
    it is, so that it is used where it can be: on NVIDIA GPUs from Ampere on, in fp16 and bf16, with
    keys as wide as values, by multiples of 8 up to 256 (it would copy the arena to pad others). It
    may split a row's tokens by how many rows there are, so that a row's last bits depend on that;
    those of ``fastrl_kernels.decode_attention`` do not. A backend that ``FASTRL_KERNELS_BACKEND``
    names is one of the latter.

    Args:
        widths: of keys and values, layer by layer.
    """
    fits = (
        _runs_flash(device)
        and dtype in (torch.float16, torch.bfloat16)
        and all(k == v and k % 8 == 0 and k <= _WIDEST for k, v in widths)
        and os.environ.get(BACKEND_VARIABLE, "auto") == "auto"
    )
    kernel = _flash_attn() if fits else None
    return decode if kernel is None else FlashDecode(kernel)


def decode(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, span: int, variant: Variant
) -> Tensor:
    """By ``fastrl_kernels.decode_attention``."""
    out = fastrl_kernels.decode_attention(
        query.squeeze(2), keys, values, lengths, span=span, **variant._asdict()
    )
    return out.unsqueeze(1)


class FlashDecode:
    """By ``flash_attn_with_kvcache`` (flash-attn from 2.6 on)."""

    def __init__(self, kernel: Callable[..., Any]):
        self.kernel = kernel

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        span: int,
        variant: Variant,
    ) -> Tensor:
        rows, before = len(query), -1  # all tokens before the query's own
        # A window that hides nothing would keep heads that share keys from being taken together.
        if variant.window is not None and variant.window < span:
            before = variant.window - 1
        return self.kernel(
            query.transpose(1, 2),
            keys[:rows, :span],
            values[:rows, :span],
            cache_seqlens=lengths,
            softmax_scale=variant.scale,
            causal=True,
            window_size=(before, min(before, 0)),
            softcap=variant.softcap or 0.0,
        )


def _runs_flash(device: torch.device) -> bool:
    """Whether flash-attn 2 has kernels for the device; ROCm has others, which nobody tried."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _flash_attn() -> Callable[..., Any] | None:
    """The function, where it can be imported and knows the arguments."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:  # not there, or built for another torch
        return None
    known = inspect.signature(flash_attn_with_kvcache).parameters
    return flash_attn_with_kvcache if known.keys() >= set(_ARGUMENTS) else None
