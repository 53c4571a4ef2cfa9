"""Moments and whitening: partials of fixed slices, merged in a fixed order by all who need them.

Moments are numbers: a [1, 1] or [rows, 1] in their place would be computed once for each element
that a thread holds of a tile, by Triton up to 3.8.
"""

import torch
import triton
import triton.language as tl

from ..dispatch import Backend
from ..types import WHITEN_EPS, SplitMoments
from .launch import launcher
from .tiles import TILE, device_of, load_counted, load_mask, programs_for

MAX_PARTIALS = 1024
_EPS = tl.constexpr(WHITEN_EPS)


@triton.jit
def moments_of(x, counted):
    """Count, mean, what rounding the mean lost, and Σ(x - mean)² of a tile of any shape."""
    count = tl.sum(counted.to(tl.float32))
    some = tl.maximum(count, 1.0)
    mean = tl.sum(tl.where(counted, x, 0.0)) / some
    deviations = tl.where(counted, x - mean, 0.0)
    low = tl.sum(deviations) / some
    return count, mean, low, tl.sum(deviations * deviations) - count * low * low


@triton.jit
def merge_two(count1, mean1, low1, m2_1, count2, mean2, low2, m2_2):
    """Chan's update of two sets of moments."""
    count = count1 + count2
    share = count2 / tl.maximum(count, 1.0)
    offset = (mean2 - mean1) + (low2 - low1)
    step = offset * share
    mean = mean1 + step
    lost = mean - mean1  # two-sum: what mean1 + step lost goes to the low part
    low = low1 + ((mean1 - (mean - lost)) + (step - lost))
    m2 = m2_1 + m2_2 + offset * offset * (count1 * share)
    # If the first set is empty, the offset is the whole mean and would swallow low2.
    first = count1 == 0.0
    return count, tl.where(first, mean2, mean), tl.where(first, low2, low), m2


@triton.jit
def merge_tile(count, mean, low, m2):
    """Chan's formula for a tile of moments at once."""
    total = tl.sum(count)
    some = tl.maximum(total, 1.0)
    pivot = tl.sum(count * mean) / some
    offsets = (mean - pivot) + low
    merged_low = tl.sum(count * offsets) / some
    apart = offsets - merged_low
    return total, pivot, merged_low, tl.sum(m2 + count * apart * apart)


@triton.jit
def merge_partials(partials_ptr, partials, CHUNK: tl.constexpr):
    """The moments of all [4, partials]; every program that calls it gets these bits."""
    count, mean, low, m2 = 0.0, 0.0, 0.0, 0.0
    for start in range(0, partials, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < partials
        c, m, s, q = merge_tile(
            tl.load(partials_ptr + at, mask=inside, other=0.0),
            tl.load(partials_ptr + partials + at, mask=inside, other=0.0),
            tl.load(partials_ptr + 2 * partials + at, mask=inside, other=0.0),
            tl.load(partials_ptr + 3 * partials + at, mask=inside, other=0.0),
        )
        count, mean, low, m2 = merge_two(count, mean, low, m2, c, m, s, q)
    return count, mean, low, m2


@triton.jit
def store_moments(partials_ptr, partials, which, count, mean, low, m2):
    """Writes moments as column ``which`` of [4, partials]."""
    at = partials_ptr + which
    tl.store(at, count)
    tl.store(at + partials, mean)
    tl.store(at + 2 * partials, low)
    tl.store(at + 3 * partials, m2)


@triton.jit
def inverse_deviation(count, m2):
    variance = tl.div_rn(m2, tl.maximum(count - 1.0, 1.0))
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + _EPS))
    return tl.where(count > 1.0, rstd, 0.0)


@triton.jit
def whitened_adjoint(grad, whitened, rstd, count, grad_sum, along_sum):
    """d/dx of whitening before the mean returns: s·(g - Σg/n - y·Σ(g·y)/(n - 1))."""
    mean = grad_sum / tl.maximum(count, 1.0)
    along = along_sum / tl.maximum(count - 1.0, 1.0)
    return (grad - mean - whitened * along) * rstd


@triton.jit(do_not_specialize=["blocks"])
def _moments_fwd_kernel(
    x_ptr,  # [n]
    mask_ptr,  # [n] bool
    partials_ptr,  # [4, partials]: count, mean, low, m2
    n,
    blocks,  # per program
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    start = program.to(tl.int64) * blocks * BLOCK
    count, mean, low, m2 = 0.0, 0.0, 0.0, 0.0
    for block in range(blocks):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        counted = load_mask(mask_ptr, at, inside)
        x = load_counted(x_ptr, at, counted, inside)
        c, m, s, q = moments_of(x, counted)
        count, mean, low, m2 = merge_two(count, mean, low, m2, c, m, s, q)
    store_moments(partials_ptr, tl.num_programs(0), program, count, mean, low, m2)


_launch_moments = launcher(_moments_fwd_kernel)


@triton.jit(do_not_specialize=["partials"])
def _moments_merge_kernel(
    partials_ptr,  # [4, partials]
    merged_ptr,  # [4, 1]
    partials,
    CHUNK: tl.constexpr,
):
    count, mean, low, m2 = merge_partials(partials_ptr, partials, CHUNK)
    store_moments(merged_ptr, 1, 0, count, mean, low, m2)


_launch_merge = launcher(_moments_merge_kernel)


def _slices(n: int) -> tuple[int, int]:
    """(programs, blocks per program): at most MAX_PARTIALS programs, by the size only."""
    blocks = programs_for(n, TILE)
    each = max(1, programs_for(blocks, MAX_PARTIALS))
    return programs_for(blocks, each), each


def _partial_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    programs, blocks = _slices(x.numel())
    partials = torch.empty(4, programs, dtype=torch.float32, device=x.device)
    if programs:
        _launch_moments(programs, x, mask, partials, x.numel(), blocks, BLOCK=TILE)
    return partials


def merged_partials(partials: torch.Tensor) -> torch.Tensor:
    """Merges moments [4, partials] to [4, 1] in one launch."""
    merged = torch.empty(4, 1, dtype=torch.float32, device=partials.device)
    _launch_merge(1, partials, merged, partials.shape[1], CHUNK=TILE)
    return merged


def measure(values: torch.Tensor, mask: torch.Tensor) -> SplitMoments:
    """The moments of counted values, by two launches: partials, and their merge."""
    with device_of(values):
        merged = merged_partials(_partial_moments(values.contiguous(), mask.contiguous()))
    return SplitMoments(*merged.view(4).unbind())


@triton.jit(do_not_specialize=["partials"])
def _whiten_fwd_kernel(
    x_ptr,  # [n]
    mask_ptr,  # [n] bool, or None: all count
    partials_ptr,  # [4, partials]
    out_ptr,  # [n], may be x_ptr
    moments_ptr,  # [4]: count, mean, low, m2 for the backward pass
    n,
    partials,
    SHIFT_MEAN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    count, mean, low, m2 = merge_partials(partials_ptr, partials, CHUNK)
    if program == 0:
        store_moments(moments_ptr, 1, 0, count, mean, low, m2)
    rstd = inverse_deviation(count, m2)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    counted = load_mask(mask_ptr, at, inside)
    x = load_counted(x_ptr, at, counted, inside)
    whitened = ((x - mean) - low) * rstd
    if not SHIFT_MEAN:
        whitened += mean + low
    tl.store(out_ptr + at, tl.where(counted, whitened, 0.0), mask=inside)


_launch_whiten_fwd = launcher(_whiten_fwd_kernel)


def launch_whiten(
    x: torch.Tensor,
    mask: torch.Tensor | None,
    partials: torch.Tensor,
    out: torch.Tensor,
    shift_mean: bool = True,
) -> torch.Tensor:
    """Whitens by the merged ``partials`` into ``out``; returns the moments, [4]."""
    if partials.shape[1] > MAX_PARTIALS:  # too many for each program to merge by itself
        partials = merged_partials(partials)
    moments = torch.empty(4, dtype=torch.float32, device=x.device)
    _launch_whiten_fwd(
        max(1, programs_for(x.numel(), TILE)), x, mask, partials, out, moments,
        x.numel(), partials.shape[1], SHIFT_MEAN=shift_mean, CHUNK=TILE, BLOCK=TILE,
    )  # fmt: skip
    return moments


@triton.jit(do_not_specialize=["blocks"])
def _whiten_sums_kernel(
    grad_ptr,  # [n]
    x_ptr,  # [n]: the input, or the whitened output where WHITENED
    mask_ptr,  # [n] bool, or None: all count
    moments_ptr,  # [4]
    sums_ptr,  # [2, partials]: Σg and Σg·y
    n,
    blocks,  # per program
    WHITENED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    start = program.to(tl.int64) * blocks * BLOCK
    grad_sum = tl.zeros([BLOCK], tl.float32)
    along_sum = tl.zeros([BLOCK], tl.float32)
    mean, low = tl.load(moments_ptr + 1), tl.load(moments_ptr + 2)
    rstd = inverse_deviation(tl.load(moments_ptr), tl.load(moments_ptr + 3))
    for block in range(blocks):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        counted = load_mask(mask_ptr, at, inside)
        y = load_counted(x_ptr, at, counted, inside)
        if not WHITENED:
            y = ((y - mean) - low) * rstd
        grad = load_counted(grad_ptr, at, counted, inside)
        grad_sum += grad
        along_sum += grad * y
    tl.store(sums_ptr + program, tl.sum(grad_sum))
    tl.store(sums_ptr + tl.num_programs(0) + program, tl.sum(along_sum))


_launch_sums = launcher(_whiten_sums_kernel)


@triton.jit
def merge_sums(sums_ptr, partials, CHUNK: tl.constexpr):
    """Σg and Σg·y over all [2, partials]."""
    first = tl.zeros([CHUNK], tl.float32)
    second = tl.zeros([CHUNK], tl.float32)
    for start in range(0, partials, CHUNK):
        at = start + tl.arange(0, CHUNK)
        first += tl.load(sums_ptr + at, mask=at < partials, other=0.0)
        second += tl.load(sums_ptr + partials + at, mask=at < partials, other=0.0)
    return tl.sum(first), tl.sum(second)


def launch_whiten_sums(
    grad: torch.Tensor,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    moments: torch.Tensor,
    whitened: bool,
) -> torch.Tensor:
    """The partial sums of whitening's backward pass, [2, partials], at most MAX_PARTIALS
    columns."""
    programs, blocks = _slices(x.numel())
    sums = torch.empty(2, programs, dtype=torch.float32, device=x.device)
    if programs:
        _launch_sums(
            programs, grad, x, mask, moments, sums, x.numel(), blocks, WHITENED=whitened, BLOCK=TILE
        )
    return sums


@triton.jit(do_not_specialize=["partials"])
def _whiten_bwd_kernel(
    grad_ptr,  # [n]
    x_ptr,  # [n]
    mask_ptr,  # [n] bool
    moments_ptr,  # [4]
    sums_ptr,  # [2, partials], or None: mean and deviation are constants
    dx_ptr,  # [n]
    n,
    partials,
    SHIFT_MEAN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    count = tl.load(moments_ptr)
    mean, low = tl.load(moments_ptr + 1), tl.load(moments_ptr + 2)
    rstd = inverse_deviation(count, tl.load(moments_ptr + 3))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    counted = load_mask(mask_ptr, at, inside)
    grad = load_counted(grad_ptr, at, counted, inside)
    dx = grad * rstd
    if sums_ptr is not None:
        x = load_counted(x_ptr, at, counted, inside)
        grad_sum, along_sum = merge_sums(sums_ptr, partials, CHUNK)
        whitened = ((x - mean) - low) * rstd
        dx = whitened_adjoint(grad, whitened, rstd, count, grad_sum, along_sum)
        if not SHIFT_MEAN:
            dx += grad_sum / tl.maximum(count, 1.0)
    tl.store(dx_ptr + at, tl.where(counted, dx, 0.0), mask=inside)


_launch_whiten_bwd = launcher(_whiten_bwd_kernel)


def whiten_forward(values, mask, shift_mean: bool, given: SplitMoments | None):
    """Whitened values, and the tensors that backward takes."""
    x, mask = values.contiguous(), mask.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    with device_of(x):
        partials = _partial_moments(x, mask) if given is None else torch.stack(given)[:, None]
        moments = launch_whiten(x, mask, partials, out, shift_mean)
    return out, (x, mask, moments)


def whiten_backward(grad, saved, shift_mean: bool, constants: bool):
    x, mask, moments = saved
    grad = grad.contiguous()
    dx = torch.empty_like(x)
    with device_of(x):
        sums = None
        if not constants:
            sums = launch_whiten_sums(grad, x, mask, moments, whitened=False)
        if x.numel():
            _launch_whiten_bwd(
                programs_for(x.numel(), TILE), grad, x, mask, moments, sums, dx, x.numel(),
                0 if sums is None else sums.shape[1],
                SHIFT_MEAN=shift_mean, CHUNK=TILE, BLOCK=TILE,
            )  # fmt: skip
    return dx


WHITENING = Backend(whiten_forward, whiten_backward)
