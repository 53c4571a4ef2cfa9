"""Affine recurrences x_t = a_t·x_{t-1} + b_t over rows of time steps, as a CPU does them fast."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import workspace

# Elements of rows that are processed together: their working memory fits in the cache.
_TOGETHER = 1 << 16
_BLOCK = 16
_PLANES = 5  # of float64


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """x_t = a_t·x_{t-1} + b_t along the first dimension of [T, N], x_{-1} = 0. Overwrites a and b.

    Blocks of 16 steps advance together, step by step, as if x were 0 where they begin; then a block
    is one step of a shorter scan, which gives the values that blocks begin with.
    """
    steps, rows = a.shape
    blocks = -(-steps // _BLOCK)
    if blocks * _BLOCK > steps:
        padding = (0, 0, 0, blocks * _BLOCK - steps)
        a, b = F.pad(a, padding, value=1.0), F.pad(b, padding)
    a, b = a.view(blocks, _BLOCK, rows), b.view(blocks, _BLOCK, rows)
    maps = list(zip(a.unbind(1), b.unbind(1), strict=True))
    for (a_before, b_before), (a_here, b_here) in pairwise(maps):
        b_here.addcmul_(a_here, b_before)
        a_here.mul_(a_before)
    if blocks > 1:
        passed_on = _scan(*(x.clone() for x in maps[-1]))
        b[1:].addcmul_(a[1:], passed_on[:-1].unsqueeze(1))
    return b.view(blocks * _BLOCK, rows)[:steps]


def _smooth_scan(a: Tensor, b: Tensor) -> Tensor:
    """x_t = a_t·x_{t-1} + b_t along the last dimension, for slopes whose product p stays above 0:
    x_t = p_t·Σ_{s≤t} b_s / p_s. The latest terms are the largest, so that none is lost."""
    product = a.cumprod_(-1)
    return b.div_(product).cumsum_(-1).mul_(product)


class Steps:
    """Which steps of some rows [rows, T] count, and which of those end an episode.

    ``planes``: [5, rows, T] of working memory, float64, so that long sums keep their digits.
    """

    def __init__(
        self,
        mask: Tensor | None,
        terminated: Tensor | None,
        truncated: Tensor | None,
        planes: Tensor,
    ) -> None:
        self._planes = iter(planes)
        self.bits = None
        if mask is not None:  # ones in all bits of the steps that count
            integers = torch.int32 if planes.dtype == torch.float32 else torch.int64
            self.bits = self.plane().view(integers).copy_(mask.view(torch.int8).neg())
        self.ends, self.bootstrapped = terminated, truncated
        if truncated is not None and terminated is not None:
            self.ends, self.bootstrapped = truncated | terminated, truncated & ~terminated
        elif truncated is not None:
            self.ends = truncated
        if mask is not None and self.ends is not None:
            self.ends = self.ends & mask
        if mask is not None and self.bootstrapped is not None:
            self.bootstrapped = self.bootstrapped & mask

    def counted(self, x: Tensor) -> Tensor:
        """Overwrites x with 0 where it does not count, by bits, since `where` takes ten times as
        long on a CPU."""
        if self.bits is not None:
            x.view(self.bits.dtype).bitwise_and_(self.bits)
        return x

    def plane(self) -> Tensor:
        """An unused plane."""
        return next(self._planes)

    def copied(self, x: Tensor) -> Tensor:
        return self.plane().copy_(x)

    def scan(self, passed: Tensor, decay: float) -> Tensor:
        """x_t = a_t·x_{t-1} + passed_t, with a_t = γλ, 0 where an episode ends, 1 where a step does
        not count. Overwrites ``passed``."""
        slopes = self.plane()
        if self.bits is None:
            slopes.fill_(decay)
        else:
            decimal, integer = "dq" if passed.dtype == torch.float64 else "fi"
            yes, no = (struct.unpack(integer, struct.pack(decimal, x))[0] for x in (decay, 1.0))
            bits = slopes.view(self.bits.dtype)
            torch.bitwise_and(self.bits, yes ^ no, out=bits).bitwise_xor_(no)
        if self.ends is not None:
            slopes.masked_fill_(self.ends, 0.0)
        if self.ends is None and decay ** passed.shape[-1] > torch.finfo(passed.dtype).tiny ** 0.8:
            return _smooth_scan(slopes, passed)
        return _scan(slopes.t().contiguous(), passed.t().contiguous()).t()


class Job(NamedTuple):
    """``work`` on rows [n, T], and the dtypes of its results; None where one is not wanted."""

    work: Callable[..., tuple[Tensor | None, ...]]
    flags: tuple[Tensor | None, ...]
    inputs: tuple[Tensor | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    coefficients: tuple[float, float]
    from_end: bool  # whether ``work`` gets the last step first

    def at(self, rows: slice) -> Job:
        flags, inputs = (
            tuple(None if x is None else x[rows] for x in xs) for xs in (self.flags, self.inputs)
        )
        return self._replace(flags=flags, inputs=inputs)

    def run(self, planes: Tensor) -> list[Tensor | None]:
        def turned(x: Tensor | None) -> Tensor | None:
            return x.flip(-1) if self.from_end and x is not None else x

        mask, terminated, truncated = map(turned, self.flags)
        steps = Steps(mask, terminated, truncated, planes)
        results = self.work(steps, *map(turned, self.inputs), *self.coefficients)
        return [
            None if x is None or dtype is None else turned(x.to(dtype, copy=True))
            for x, dtype in zip(results, self.dtypes, strict=False)
        ]


def few_rows_at_a_time(job: Job) -> list[Tensor | None]:
    like = job.inputs[0]
    assert like is not None
    rows, length = like.shape
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        wide = torch.float32 if like.device.type == "mps" else torch.float64  # mps has no float64
        return job.run(like.new_empty(_PLANES, rows, length, dtype=wide))
    few = max(1, min(rows, _TOGETHER // length))
    nbytes = _PLANES * few * length * torch.float64.itemsize
    memory = workspace.borrow(like, nbytes)
    planes = memory[:nbytes].view(torch.float64).view(_PLANES, few, length)
    if few >= rows:
        results = job.run(planes[:, :rows])
    else:
        parts = [
            job.at(slice(start, start + few)).run(planes[:, : rows - start])
            for start in range(0, rows, few)
        ]
        results = [
            None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True)
        ]
    workspace.give_back(memory)
    return results
