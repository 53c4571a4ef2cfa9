"""fp32 copies of bf16 weights, for the products of CPUs without instructions for bf16.

A bf16 number is an fp32 number: products of copies have the same terms. A copy takes twice the
weight's memory, and six bytes per element to make, about as much as a product with 40 rows.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

_SHARE = 0.5  # of the memory that is available, for copies
_CGROUP = Path("/sys/fs/cgroup")


class _Copy:
    """A weight and its copy, which is made when it is first asked for."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.start = weight, weight.data_ptr()
        self._made: Tensor | None = None
        self._of: tuple[int, ...] = ()

    def part(self, x: Tensor, steps: int, memory: FreeMemory) -> Tensor | None:
        """The copy of what x views; None where x is no view of the weight, or there is no room."""
        weight = self.weight
        first = (x.data_ptr() - self.start) // weight.element_size()
        last = first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        if weight.data_ptr() != self.start or last >= weight.numel():
            return None
        # Fused optimizers write to what they train without a new version.
        version = (weight._version, steps if weight.requires_grad else 0)
        if self._made is None:
            if not memory.take(weight.numel() * torch.float32.itemsize):
                return None
            self._made = torch.empty_like(weight, dtype=torch.float32, requires_grad=False)
        if self._of != version:
            self._made.copy_(weight.detach())
            self._of = version
        return self._made.as_strided(x.shape, x.stride(), first)


class FreeMemory:
    """Bytes that copies may take: at first a half of this machine's available memory, in
    equal parts for its processes."""

    def __init__(self) -> None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        self.left = int(_SHARE * available_bytes() / processes)

    def take(self, nbytes: int) -> bool:
        """Takes ``nbytes``, if they are free; returns whether they were."""
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True


class _Kept:
    """Copies by the addresses of their weights."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        copies = {x.data_ptr(): _Copy(x) for x in weights if _suits(x)}
        self._starts = sorted(copies)
        self._copies = [copies[start] for start in self._starts]
        self._memory = FreeMemory() if copies else None
        self.steps = 0

    def find(self, x: Tensor) -> Tensor | None:
        place = bisect.bisect_right(self._starts, x.data_ptr()) - 1
        if place < 0 or self._memory is None or not x.numel():
            return None
        return self._copies[place].part(x, self.steps, self._memory)

    def step(self, *_: object) -> None:
        self.steps += 1


_kept: list[_Kept] = []


@contextlib.contextmanager
def keeping(weights: Iterable[Tensor]) -> Iterator[None]:
    """Context in which :func:`in_fp32` keeps a copy for each version of these weights, while memory
    allows. An optimizer's step, and each write that torch counts, make a new version."""
    kept = _Kept(weights)
    _kept.append(kept)
    handle = register_optimizer_step_post_hook(kept.step)
    try:
        yield
    finally:
        handle.remove()
        _kept.remove(kept)


def in_fp32(x: Tensor) -> Tensor:
    """x in fp32: x itself, a part of a kept copy, or a new tensor."""
    if x.dtype == torch.float32:
        return x
    for kept in reversed(_kept):
        found = kept.find(x)
        if found is not None:
            return found
    return x.float()


def available_bytes() -> int:
    """Memory that may be taken without swapping, within this process's control group; 0 where
    nothing says."""
    try:
        lines = dict(x.split(":", 1) for x in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 0
    with contextlib.suppress(OSError, ValueError):  # "max" stands for no limit
        most = int((_CGROUP / "memory.max").read_text())
        pages = dict(x.split() for x in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(pages.get("inactive_file", 0))
        available = min(available, most - used)
    return max(available, 0)


def _suits(x: Tensor) -> bool:
    """Whether x is a plain matrix without gaps, whose writes are counted."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.dim() == 2
    if not plain or x.dtype != torch.bfloat16 or x.is_inference() or not x.numel():
        return False
    return x.is_contiguous() or x.t().is_contiguous()
