"""How much memory a call needs beyond what goes in and what comes out.

On CPUs every allocation and release that PyTorch's allocator makes is followed, one by one, also
those inside its own kernels (a copy that makes an argument contiguous, say), which a look at the
operators' results would miss. So `largest` and `peak` prove that no tensor of a given size ever
existed. What libraries allocate by themselves (a GEMM's packed panels) is not PyTorch's and is not
seen. On GPUs the caching allocator's own peak is read, forward and backward apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Footprint(NamedTuple):
    """Bytes: the most that was live at a time, the sum and the largest of all allocations.

    `peak` leaves out what lived before the call and what the call returned. On GPUs only the peak
    is known.
    """

    peak: int
    allocated: int | None = None
    largest: int | None = None


def footprint(
    forward: Callable[[], Any], backward: Callable[[Any], Iterable[Tensor]], device: torch.device
) -> Footprint:
    """Of `backward(forward())`; the tensors that `backward` returns count as returned."""
    if device.type == "cuda":
        return _on_cuda(forward, backward, device)
    # The profiler writes its comings and goings to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with profiler:
        returned = tuple(backward(forward()))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in returned}
    return replay(_allocations(profiler), addresses)


def replay(events: Iterable[tuple[int, int]], returned: set[int]) -> Footprint:
    """The footprint of allocations `(address, bytes)` in their order, releases being negative.

    An address is used again and again: what lies there when all is done is what was returned.
    """
    events = list(events)
    last_made = {address: i for i, (address, size) in enumerate(events) if size > 0}
    kept = {last_made[address] for address in returned & last_made.keys()}
    live, peak, allocated, largest = {}, 0, 0, 0
    total = 0
    for i, (address, size) in enumerate(events):
        if size < 0:
            total -= live.pop(address, 0)  # 0: it was made before, or is returned
            continue
        allocated += size
        largest = max(largest, size)
        if i not in kept:
            live[address] = size
            total += size
            peak = max(peak, total)
    return Footprint(peak, allocated, largest)


def _allocations(profiler: torch.profiler.profile) -> Iterator[tuple[int, int]]:
    from torch._C._profiler import _EventType

    def walk(events: Iterable[Any]) -> Iterator[Any]:
        for event in events:
            yield event
            yield from walk(event.children)

    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found = [event for event in walk(tree) if event.tag == _EventType.Allocation]
    for event in sorted(found, key=lambda event: event.start_time_ns):
        fields = event.extra_fields
        if fields.device.type == "cpu":
            yield fields.ptr, fields.alloc_size


def _on_cuda(
    forward: Callable[[], Any], backward: Callable[[Any], Iterable[Tensor]], device: torch.device
) -> Footprint:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    state = forward()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    returned = tuple(backward(state))
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in returned}
    torch.cuda.synchronize(device)
    later = torch.cuda.max_memory_allocated(device) - before - sum(sizes.values())
    return Footprint(max(peak, later, 0))
