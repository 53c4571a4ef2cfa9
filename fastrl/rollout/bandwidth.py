"""Bytes that decoding has to read, and the bandwidth of the device."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fastrl.rollout.kv_cache import KVCache, state_bytes

_COPIED = {"cuda": 1 << 28}  # bytes; more than fit in the device's caches
_COPIED_ELSEWHERE = 1 << 26
_TIMES = 3


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a decode step reads, without the few rows of embedding tables."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables -= {id(head.weight)}
    return sum(p.nbytes for p in model.parameters() if id(p) not in tables)


def kv_bytes(kv_cache: KVCache, samples: Iterable[tuple[int, int]]) -> int:
    """Bytes that decode steps of some samples read of keys and values, and read or write of states.

    Before its t-th token, t = 0, 1, …, a sample with a prompt of p tokens reads p + t tokens, or
    only those in the window where a layer has one.

    Args:
        samples: (tokens of the prompt, tokens of the response) of each.
    """
    contexts = torch.cat([torch.arange(p, p + n) for p, n in samples] or [torch.arange(0)])
    longest = kv_cache.length
    tokens = {w: int(contexts.clamp(max=w or longest).sum()) for w in set(kv_cache.windows)}
    each = kv_cache.keys[0].dtype.itemsize
    of_states = 2 * state_bytes(kv_cache.layers) * len(contexts)
    return of_states + sum(
        layer.numbers * each * tokens[window]
        for layer, window in zip(kv_cache.layers, kv_cache.windows, strict=True)
    )


def copied_bytes(kind: str) -> int:
    """The bytes that are copied on a kind of device, to measure its bandwidth."""
    return _COPIED.get(kind, _COPIED_ELSEWHERE)


@functools.cache
def bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes, measured once per device; best of a few."""
    size = copied_bytes(device.type)
    source = torch.ones(size // 4, device=device)
    target = torch.ones_like(source)
    return max(2 * size / _seconds(source, target) for _ in range(_TIMES))


def _seconds(source: Tensor, target: Tensor) -> float:
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    begin = time.perf_counter()
    target.copy_(source)
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    return time.perf_counter() - begin
