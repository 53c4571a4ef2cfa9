"""The memory that a call or a process takes, and the kernels that a call launches."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

Forward = Callable[[], Any]
Backward = Callable[[Any], Iterable[Tensor]]


def footprint(forward: Forward, backward: Backward, device: torch.device) -> int:
    """The most bytes live at a time during `backward(forward())`, beyond what lived before and the
    tensors that `backward` returns.

    On CPUs every allocation and release of PyTorch's allocator is followed, those inside kernels
    too (a copy that makes an argument contiguous, say), but not what libraries allocate themselves,
    such as a GEMM's packed panels. On GPUs the caching allocator's peak is read, of forward and
    backward separately.
    """
    if device.type == "cuda":
        return _on_cuda(forward, backward, device)
    # Otherwise the profiler logs its start and stop to stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with profiler:
        returned = tuple(backward(forward()))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in returned}
    return replay(_allocations(profiler), addresses)


def replay(events: Iterable[tuple[int, int]], returned: set[int]) -> int:
    """The peak of allocations `(address, bytes)` in their order; releases are negative.

    Addresses are used again: only the last allocation at a returned address is the result.
    """
    events = list(events)
    last_made = {address: i for i, (address, nbytes) in enumerate(events) if nbytes > 0}
    kept = {last_made[address] for address in returned & last_made.keys()}
    live: dict[int, int] = {}
    total = peak = 0
    for i, (address, nbytes) in enumerate(events):
        if nbytes < 0:
            total -= live.pop(address, 0)  # 0: made before the call, or returned
        elif i not in kept:
            live[address] = nbytes
            total += nbytes
            peak = max(peak, total)
    return peak


def peak_of_events(profiler: torch.profiler.profile) -> int:
    """The most bytes that torch's allocator had given out while a profiler of memory was on."""
    return replay(_allocations(profiler), set())


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


def _on_cuda(forward: Forward, backward: Backward, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    state = forward()
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    kept = storage_bytes(backward(state))
    torch.cuda.synchronize(device)
    return max(peak, torch.cuda.max_memory_allocated(device) - before - kept, 0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages below tensors, each counted once."""
    storages = [x.untyped_storage() for x in tensors]
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def launches(forward: Forward, backward: Backward, device: torch.device) -> dict[str, float]:
    """How many kernels, copies and fills each half of `backward(forward())` starts on a GPU; it is
    called twice, the first time to compile. Empty on CPUs, and where the profiler fails."""
    if device.type != "cuda":
        return {}
    backward(forward())
    try:
        state, before = _recorded(forward, device)
        _, after = _recorded(lambda: backward(state), device)
    except (RuntimeError, AssertionError) as error:  # the profiler's: the call itself just worked
        print(f"no launches counted: {error}", file=sys.stderr)
        return {}
    found = {"forward launches": before, "backward launches": after}
    return found if before or after else {}


def _recorded(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = call()
        torch.cuda.synchronize(device)
    return result, sum(event.device_type == DeviceType.CUDA for event in profiler.events())


def reset_peak(device: torch.device) -> None:
    """Counts `peak_of_process` from now on, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_of_process(device: torch.device) -> int | None:
    """The most bytes that this process has held so far: on a GPU by the caching allocator; else in
    memory, by the kernel's count, those of the processes that it started and that still run too.
    None where there is no such count.

    (`getrusage` would count a parent's memory, which a process has for a moment when it starts.)
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statuses = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            found = dict(re.findall(r"^(\w+):\s+(\d+)", path.read_text(), re.M))
        except OSError:  # it has ended
            continue
        statuses[int(found["Pid"])] = int(found["PPid"]), int(found.get("VmHWM", 0))
    mine = {os.getpid()}
    for _ in range(8):  # generations
        mine |= {pid for pid, (parent, _) in statuses.items() if parent in mine}
    return 1024 * sum(statuses[pid][1] for pid in mine & statuses.keys()) or None


def free(device: torch.device) -> None:
    """Gives a case's memory back before the next one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def all_memory(device: torch.device) -> int:
    """Bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
