"""Which calls of TRL's functions the ops cover, and the dtype that TRL gives their results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


def is_plain(x: Any) -> bool:
    """A tensor in a dtype that the ops take, whole on this device: no DTensor, no ZeRO-3 shard."""
    sharded = type(x).__name__ == "DTensor" or hasattr(x, "ds_id")
    return isinstance(x, Tensor) and x.dtype in _DTYPES and not sharded


def has_one_index(logits: Tensor, index: Any) -> bool:
    """Logits [..., V] with one index for each row [...]."""
    return (
        is_plain(logits)
        and logits.dim() > 0
        and logits.shape[-1] > 0
        and isinstance(index, Tensor)
        and index.dtype in _INTEGERS
        and index.shape == logits.shape[:-1]
    )


def softmax_dtype(logits: Tensor) -> torch.dtype:
    """The dtype of log_softmax(logits): that of the logits, or fp32 where autocast says so."""
    if logits.dtype == torch.float32:
        return torch.float32
    return F.log_softmax(logits.detach().new_empty(0, 1), dim=-1).dtype
