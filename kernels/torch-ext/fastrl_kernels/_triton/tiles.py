"""Tile shapes and accurate functions of the elementwise and the row kernels.

Kernels specialise on whether the element count or the row length is a multiple of 16, which wide
loads depend on, and on no other number: batches of any size use the same compiled kernel.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch.compiler import is_compiling
from triton.runtime import driver

from ..dispatch import interpreting

TILE = 1024  # elements that four warps hold at a time


def row_tile(length: int) -> tuple[int, int]:
    """(rows, steps) of one tile over rows of ``length``: by the length only, so that a row's bits
    do not depend on the batch. A tile is never smaller than the warps that share it."""
    steps = 16
    while steps < min(length, TILE):
        steps *= 2
    return TILE // steps, steps


def programs_for(n: int, each: int) -> int:
    """How many programs take ``n`` elements, ``each`` at a time. (Triton's own ``cdiv`` takes
    microseconds on the host.)"""
    return (n + each - 1) // each


def power_of_2(n: int) -> int:
    """The least power of 2 not below n ≥ 1. (Triton's own takes microseconds on the host.)"""
    return 1 << (n - 1).bit_length()


def target() -> tuple[str, int]:
    """What kernels are compiled for: "cuda", "hip" or "interpreter", and the threads of a warp."""
    if _INTERPRETED:
        return "interpreter", 32
    active = driver.active
    key = active, active.get_current_device()
    found = _targets.get(key)
    if found is None:
        known = active.get_current_target()
        found = _targets[key] = known.backend, known.warp_size
    return found


_INTERPRETED = interpreting()  # whether kernels were defined for the interpreter
_targets: dict[tuple[object, int], tuple[str, int]] = {}  # by driver and device


def packed(x: torch.Tensor) -> torch.Tensor:
    """x contiguous, from a 16-byte boundary on. Alignment decides how threads share a tile,
    hence the order of its sums, and a row's bits must not depend on its address.

    A graph that is compiled has no addresses: there, contiguous tensors stay as they are."""
    x = x.contiguous()
    return x if is_compiling() or x.data_ptr() % 16 == 0 else x.clone()


def device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'. Compiled code sees to
    that itself."""
    if is_compiling():
        return nullcontext()
    index = x.get_device()
    if index < 0 or index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(index)


_HERE = nullcontext()  # one context for all, as there is nothing to change


@triton.jit
def exact_exp(x):
    """exp(x) to about an ulp. tl.exp rounds x·log2(e) first, an error of |x| half-ulps."""
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts, the first so short that k times it is exact.
    r = (x - k * 0.693359375) + k * 2.12194440e-4
    return tl.where(tl.abs(x) < 80.0, tl.exp(r) * tl.exp2(k), tl.exp(x))


@triton.jit
def accurate_tanh(x):
    """tanh(x) to a few units in the last place, where 1 - e^(-2|x|) has cancelled as well."""
    y = tl.abs(x)
    e = tl.exp2(y * (1.4426950408889634 * -2.0))
    far = tl.div_rn(1.0 - e, 1.0 + e)
    z = y * y
    near = y * (1.0 + z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315 + z * (62.0 / 2835)))))
    y = tl.where(y < 0.25, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def dot(a, b, acc, WIDE: tl.constexpr):
    """acc + a·b; WIDE for Triton's interpreter, which would take bf16's bits for integers."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def load_counted(ptr, at, counted, inside):
    """Loads fp32, and 0 where not counted, so that NaN there has no effect. The load
    itself is masked by bounds only, so that it stays a vector."""
    return tl.where(counted, tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def load_mask(ptr, at, inside):
    """Which elements count; all of them where ``ptr`` is None."""
    counted = inside
    if ptr is not None:
        counted = tl.load(ptr + at, mask=inside, other=0) != 0
    return counted
