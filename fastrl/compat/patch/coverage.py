"""Which calls of TRL's functions fastrl_kernels' ops cover, and the dtype of TRL's results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastrl_kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


def is_plain(x: Any) -> bool:
    """Whether x is a tensor that the ops take, neither a DTensor nor a ZeRO-3 shard."""
    sharded = type(x).__name__ == "DTensor" or hasattr(x, "ds_id")
    return isinstance(x, Tensor) and x.dtype in _DTYPES and not sharded


def has_rows(logits: Tensor, *_: Any, **__: Any) -> bool:
    """Whether ``logits`` is a tensor [..., V] that the ops take."""
    return is_plain(logits) and logits.dim() > 0 and logits.shape[-1] > 0


def has_one_index(logits: Tensor, index: Any) -> bool:
    """Whether the arguments are logits [..., V] and one index for each row [...]."""
    return (
        has_rows(logits)
        and isinstance(index, Tensor)
        and index.dtype in _INTEGERS
        and index.shape == logits.shape[:-1]
    )


def softmax_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of log_softmax(logits): that of the logits, or fp32 under autocast on a GPU."""
    if logits.dtype == torch.float32:
        return torch.float32
    return F.log_softmax(logits.detach().new_empty(0, 1), dim=-1).dtype


def entropies(logits: Tensor) -> Tensor:
    """The entropy of each row of logits [..., V], fp32 [...]."""
    index = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return fastrl_kernels.token_logprobs(logits, index, entropy=True)[1]
