"""The Python of an op's call: how long it takes and how many functions it calls, without a GPU.

`python -m benchmarks.python_time` prints a table. All runs as on a GPU but the call into its
driver: CPU tensors stand for a GPU's, nothing is compiled, and nothing is launched. Calls are
counted, since their number does not depend on what else the machine does; times are for the report.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.environments import source_tree

# What would send the calls elsewhere.
_MISLEADING = ("TRITON_INTERPRET", "FASTRL_KERNELS_BACKEND")
_ROWS, _STEPS, _VOCABULARY = 8, 64, 512


@dataclasses.dataclass(frozen=True)
class PythonWork:
    """One call of an op, or its backward pass."""

    call: str
    launches: int
    functions: int  # Python's that were called
    builtins: int  # C's
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.launches:8} {self.functions:9} {self.builtins:8}"
        return f"{self.call:36} {counts} {self.seconds * 1e6:8.1f}"


HEADER = f"{'call':36} {'launches':>8} {'functions':>9} {'builtins':>8} {'µs':>8}"


def _calls() -> Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]]:
    """By name: a call, and its backward pass if it has one."""
    import fastrl_kernels as ops

    size = (_ROWS, _STEPS)
    logits = torch.zeros(_ROWS, _VOCABULARY, dtype=torch.bfloat16, requires_grad=True)
    ref_logits = logits.detach().clone()
    labels, counted = torch.zeros(_ROWS, dtype=torch.int64), torch.ones(_ROWS, dtype=torch.bool)
    mask = torch.ones(size, dtype=torch.bool)
    new, values = (torch.zeros(size, requires_grad=True) for _ in range(2))
    old, advantages, rewards, returns = (torch.zeros(size) for _ in range(4))
    one, per_row = torch.ones(()), torch.ones(_ROWS)
    value = ops.ValueTerm(values, old, returns)

    stream, weight = torch.zeros(_ROWS, 64), torch.ones(64)
    query, key = torch.zeros(_ROWS, 4, 16), torch.zeros(_ROWS, 2, 16)
    angles, cache = torch.zeros(_ROWS, 16), [torch.zeros(_ROWS, 600, 2, 16) for _ in range(2)]
    positions = torch.zeros(_ROWS, dtype=torch.int64)
    live = ops.LiveTokens(positions.int() + 1)
    keys = torch.zeros(_ROWS, dtype=torch.int64)
    drawn = logits.detach()
    *columns, found = torch.zeros(6, _ROWS, dtype=torch.int64)
    stored = torch.zeros(_ROWS, 9, dtype=torch.int64), torch.zeros(4, _ROWS, 9)
    slots = ops.SlotBuffers(*columns, *stored)
    draw = ops.SampledTokens(found, *torch.zeros(5, _ROWS))

    def by(leaf: Tensor | tuple[Tensor, ...], *upstream: Tensor) -> Callable[[Any], Any]:
        return lambda found: torch.autograd.grad(found, leaf, upstream, retain_graph=True)

    def loss(**options: Any) -> Tensor:
        return ops.ppo_loss(new, old, advantages, mask, **options)[0]

    def gae(**options: Any) -> Any:
        return ops.gae(rewards, old, mask, gamma=1.0, lam=0.95, **options)

    return {
        "token_logprobs": (lambda: ops.token_logprobs(logits, labels), by(logits, per_row)),
        "token_logprobs mask entropy": (
            lambda: ops.token_logprobs(logits, labels, mask=counted, entropy=True),
            by(logits, per_row, per_row),
        ),
        "ppo_loss": (loss, by(new, one)),
        "ppo_loss value": (lambda: loss(value=value), by((new, values), one)),
        "gae": (gae, None),
        "gae whiten": (lambda: gae(whiten=True), None),
        "rms_norm": (lambda: ops.rms_norm(stream, weight, residual=stream), None),
        "swiglu": (lambda: ops.swiglu(stream, stream), None),
        "rotate_and_store": (
            lambda: ops.rotate_and_store(query, key, key, angles, angles, *cache, positions),
            None,
        ),
        "decode_attention": (lambda: ops.decode_attention(query, *cache, live), None),
        "decode_attention one split": (
            lambda: ops.decode_attention(query, *cache, live, span=256),
            None,
        ),
        "sample_keys": (lambda: ops.sample_keys(0, keys, keys), None),
        "sample_tokens": (lambda: ops.sample_tokens(drawn, keys), None),
        "sample_tokens top_k": (lambda: ops.sample_tokens(drawn, keys, top_k=5), None),
        "advance_slots": (lambda: ops.advance_slots(slots, draw, keys[:1]), None),
        "kl_penalty": (lambda: ops.kl_penalty(new, old, "k3", mask=mask), by(new, advantages)),
        "kl_rewards": (
            lambda: ops.kl_rewards(new, old, per_row, mask, coef=0.1),
            by(new, rewards, rewards, per_row),
        ),
        "full_kl": (lambda: ops.full_kl(logits, ref_logits, mask=counted), by(logits, per_row)),
        "masked_whiten": (lambda: ops.masked_whiten(new, mask), by(new, advantages)),
    }


_METADATA = ("of a kernel",)


class Launched(NamedTuple):
    """What the driver would be told of a launch."""

    name: str
    key: str  # Triton's own, of what the call specialised on
    told: tuple[Any, ...]

    @property
    def hook(self) -> Any:
        """What is to be called before; None where nothing is, without a look at hooks."""
        # Behind both metadata, wherever this version of Triton has them.
        return self.told[self.told.index(_METADATA) + 2]


@contextmanager
def nothing_launched() -> Iterator[list[Launched]]:
    """Within, kernels on CPU tensors go the way of a GPU's up to its driver, which is not called;
    what it would be told is collected. For a process of its own: Triton is changed."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from fastrl_kernels import dispatch

    launched: list[Launched] = []

    class Driver:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    def without_compiling(self: Any, key: Any, *_: Any) -> CompiledKernel:
        kernel = CompiledKernel.__new__(CompiledKernel)
        kernel.module, kernel.function, kernel.packed_metadata = None, None, _METADATA
        kernel.name, kernel.src, kernel.hash = self.fn.__name__, None, key
        kernel._init_handles = lambda: None
        kernel._run = CudaLauncher.__new__(CudaLauncher)
        kernel._run.launch = lambda *told: launched.append(Launched(kernel.name, key, told))
        for name in ("gsan_enabled", "global_scratch_size", "profile_scratch_size"):
            setattr(kernel._run, name, 0)
        for name in ("global_scratch_align", "profile_scratch_align", "num_ctas"):
            setattr(kernel._run, name, 1)
        for name in ("launch_cooperative_grid", "launch_pdl", "arg_annotations"):
            setattr(kernel._run, name, False)
        kernel._run.kernel_signature = b""
        self.device_caches[0][0][key] = kernel
        return kernel

    before = dispatch.TRITON_DEVICES, JITFunction._do_compile
    driver.set_active(Driver())
    dispatch.TRITON_DEVICES = ("cuda", "cpu")
    JITFunction._do_compile = without_compiling
    from fastrl_kernels._triton import launch

    launch.first_device = -1  # that of CPU tensors
    try:
        yield launched
    finally:
        dispatch.TRITON_DEVICES, JITFunction._do_compile = before
        launch.first_device = 0


def _seconds(call: Callable[[], Any], rounds: int = 60, each: int = 50) -> float:
    """The least over rounds of a call's mean time: what other processes add is not the call's."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(each):
            call()
        found.append((time.perf_counter() - start) / each)
    return min(found)


def _counted(call: Callable[[], Any]) -> tuple[int, int]:
    """Functions of Python and of C that one call calls, on this thread."""
    counts = {"call": 0, "c_call": 0}

    def count(_: Any, event: str, __: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"] - 1  # which takes this function off


def work_here(timed: bool = True) -> list[PythonWork]:
    """Of every call, in this process."""
    found = []
    with nothing_launched() as launched:

        def add(name: str, call: Callable[[], Any]) -> None:
            for _ in range(3):
                call()
            launched.clear()
            call()
            launches = len(launched)
            functions, builtins = _counted(call)
            seconds = _seconds(call) if timed else 0.0
            # Each launch of the stub is two functions of Python's, and two of C's.
            functions, builtins = functions - 2 * launches, builtins - 2 * launches
            found.append(PythonWork(name, launches, functions, builtins, seconds))

        for name, (call, backward) in _calls().items():
            add(name, call)
            if backward is not None:
                results = call()
                add(f"{name}, backward", lambda: backward(results))  # noqa: B023
    return found


def python_work(timed: bool = True) -> list[PythonWork]:
    """Of every call, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k not in _MISLEADING}
    environment["PYTHONPATH"] = source_tree()
    command = [sys.executable, "-m", "benchmarks.python_time", "--json"]
    done = subprocess.run(
        command + ([] if timed else ["--counts"]),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [PythonWork(**fields) for fields in json.loads(done.stdout)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.python_time")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--counts", action="store_true", help="no times")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = work_here(timed=not args.counts)
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
    else:
        print(HEADER, *found, sep="\n")
