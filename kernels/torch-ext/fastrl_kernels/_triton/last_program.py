"""Which program of a launch ends last: it can go on with what all of them have written, where
otherwise a second launch would have to."""

import torch
import triton
import triton.language as tl
from torch.compiler import is_compiling
from triton.runtime import driver

# By device and stream: calls on one stream follow one another, those on two may overlap.
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

    The barrier orders the stores of a program's threads before its atomic, of which one thread
    takes care; the atomic's release makes them visible to all that read the counter later, and its
    acquire what the others released. In PTX causality order is transitive over barriers and
    synchronising atomics of one scope; on AMD the release writes back, and the acquire invalidates,
    what caches of the chip's parts hold.
    """
    tl.debug_barrier()
    last = programs == 1
    if programs > 1:
        before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
        last = before == programs - 1
        if last:
            tl.debug_barrier()
            tl.store(arrived_ptr, 0)
    return last
