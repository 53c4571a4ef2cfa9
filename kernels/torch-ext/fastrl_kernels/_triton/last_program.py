"""Which program of a launch ends last: that program can go on with what all of them have written,
so that no second launch is needed."""

import torch
import triton
import triton.language as tl
from torch.compiler import is_compiling
from triton.runtime import driver

# Counters by device and stream: calls on one stream follow one another, those on two may overlap.
_kept: dict[tuple[int, int], torch.Tensor] = {}


def arrival_counters(like: torch.Tensor, count: int = 1) -> torch.Tensor:
    """At least ``count`` int32 zeros on the device of ``like``, which has to be the current one,
    for a kernel that is launched next on its current stream and leaves zeros.

    They are kept for the stream's next call. What is recorded in a CUDA graph or traced gets zeros
    of its own, for a graph may be replayed on any stream.
    """
    if is_compiling():
        return torch.zeros(count, dtype=torch.int32, device=like.device)
    device, stream = like.get_device(), 0
    if device >= 0:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=like.device)
        stream = driver.active.get_current_stream(device)
    key = device, stream
    kept = _kept.get(key)
    if kept is None or kept.numel() < count:
        kept = _kept[key] = torch.zeros(count, dtype=torch.int32, device=like.device)
    return kept


@triton.jit
def arrives_last(arrived_ptr, programs):
    """Whether all ``programs`` that count on ``arrived_ptr`` have come to this line, and so what
    they stored before it can be read, with ``cache_modifier=".cg"``. The counter is 0 again then.

    By PTX's memory model: each thread's stores come before the barrier, and that before the
    arrival, a release by one of the threads. The last arrival reads what those before it made of
    the counter, and so synchronises with each of them, as an acquire. It comes before its program's
    next barrier, and that before the loads of all its threads. Causality order is transitive over
    both, at the scope of the GPU.

    On AMD's GPUs it holds for what a program's first warp stored alone, as it does of a tensor of
    at most 32 elements: their barrier waits for no store (LLVM found so for gfx10 and later, where
    barriers now do that for it; the code for gfx942 has no such wait). There it is the release in
    front of the atomic that waits, for its own warp, the first, and that writes back what caches of
    the chip's parts hold, as the acquire behind it invalidates them. A single program needs that,
    too, for its other warps to see the stores.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived_ptr, 0)
    return last
