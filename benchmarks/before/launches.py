"""What a call makes a GPU do, one by one, as PyTorch's profiler names it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType

# What each half of a call launches: kernels, and copies and fills of memory.
Launches = dict[str, list[str]]


def launches(
    forward: Callable[[], Any], backward: Callable[[Any], object], device: torch.device
) -> Launches | None:
    """{"forward": names, "backward": names} of `backward(forward())`, which is called twice, the
    first time to compile; None on CPUs, or where the profiler cannot look: that costs no times."""
    if device.type != "cuda":
        return None
    backward(forward())
    try:
        state, before = _recorded(forward, device)
        _, after = _recorded(lambda: backward(state), device)
    except (RuntimeError, AssertionError) as error:  # of the profiler: the call has just gone well
        print(f"no launches counted: {error}", file=sys.stderr)
        return None
    return {"forward": before, "backward": after} if before or after else None


def _recorded(call: Callable[[], Any], device: torch.device) -> tuple[Any, list[str]]:
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = call()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    return result, [event.name for event in sorted(events, key=lambda e: e.time_range.start)]


def in_words(found: Launches) -> str:
    """`2 + 1`: forward's and backward's; `2` where there is no backward."""
    forward, backward = len(found["forward"]), len(found["backward"])
    return f"{forward} + {backward}" if backward else f"{forward}"
