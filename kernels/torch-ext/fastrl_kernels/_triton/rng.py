"""Keys of random draws, and the hash that they are made with: a program holds a piece of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..splitmix import GAMMA
from .launch import launcher
from .tiles import device_of, programs_for

GAMMA_BITS = tl.constexpr(GAMMA % 2**64)
_TILE = 128


@triton.jit
def mixed(x):
    """``splitmix.mixed`` of uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _bits(ptr, number, stride, at, inside):
    """The bits of a tensor's integers, or of a number where there is no tensor."""
    x = tl.zeros(at.shape, tl.int64) + number
    if ptr is not None:
        x = tl.load(ptr + at * stride, mask=inside, other=0)
    return x.to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["seed", "seed_stride", "index", "index_stride", "n"])
def _sample_keys_kernel(
    ids_ptr,  # [N] int64: sample ids, or their hashes
    seed_ptr,  # [N] or [1] int64, or None: the number
    seed,
    seed_stride,  # 0 for [1]
    index_ptr,  # [N] or [1] int64, or None: the number
    index,
    index_stride,
    out_ptr,  # [N] int64
    n,
    HASHED: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < n
    state = tl.load(ids_ptr + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
    if not HASHED:
        first = mixed(_bits(seed_ptr, seed, seed_stride, at, inside) + GAMMA_BITS)
        state = mixed((first ^ state) + GAMMA_BITS)
    key = mixed((state ^ _bits(index_ptr, index, index_stride, at, inside)) + GAMMA_BITS)
    tl.store(out_ptr + at, key.to(tl.int64, bitcast=True), mask=inside)


_launch = launcher(_sample_keys_kernel)


def _given(x: int | Tensor, ids: Tensor) -> tuple[Tensor | None, int, int]:
    """The kernel's arguments for a number, or for integers that broadcast to [N]."""
    if not isinstance(x, Tensor):
        return None, x - (1 << 64) if x >= 1 << 63 else x, 0
    x = x.view(torch.int64) if x.dtype == torch.uint64 else x.long()
    return (x.reshape(1), 0, 0) if x.numel() == 1 else (x.expand_as(ids).contiguous(), 0, 1)


def keys(seed: int | Tensor | None, ids: Tensor, index: int | Tensor) -> Tensor:
    """``sample_keys`` of checked arguments; without a seed, ids are ``rng.sample_states``."""
    ids = (ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.long()).contiguous()
    out = torch.empty_like(ids)
    if ids.numel():
        with device_of(ids):
            _launch(
                programs_for(ids.numel(), _TILE),
                ids, *_given(0 if seed is None else seed, ids), *_given(index, ids), out,
                ids.numel(), HASHED=seed is None, TILE=_TILE,
            )  # fmt: skip
    return out
