"""A device that is not there: the CPU's memory and arithmetic behind torch's CUDA key.

On a build of torch without CUDA no kernel is registered under that key. Here all operators are: a
tensor on "cuda" is one of the CPU's whose memory is handed over through DLPack under another name,
and an operator runs on the CPU with the names changed back. What is made so is no subclass and no
mode: views, ``.data``, autograd, ``Module.to`` and ``is_cuda`` work as on a GPU, and code takes the
branches that it takes there.

What the device does not forgive is an error here:

- an operator on tensors of both devices, but for those that torch lets pass;
- a copy that is not to block from or to memory that is not pinned;
- a read by the host, or a copy from or to it, while a graph is captured.

What makes the host wait is counted: reads (:data:`READS`, masks as indices, blocking copies to the
host), uploads (blocking copies to the device, lists and host tensors as indices), and waits
(``synchronize``). What a copy that does not block brings to the host is poison until an event that
was recorded behind it is waited for. A captured graph is replayed: its operators run again on the
same memory, and nothing else does.

There is no time and no other stream here, and no kernel that is written for GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from fastrl.models.packed_attention import Attended, CPUKernel, Operands, Runs
from fastrl.rollout import bandwidth

DEVICE = torch.device("cuda", 0)
# Operators whose result the host needs, or whose result's shape depends on numbers.
READS = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "histc"),
        *("_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    )
}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_DLPACK_CPU, _DLPACK_CUDA = 1, 2
_ROOT = Path(__file__).resolve().parent.parent.parent
_PARTS = tuple(str(_ROOT / part) + os.sep for part in ("fastrl", "kernels", "benchmarks"))

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Event(NamedTuple):
    """Something that makes the host wait for the device."""

    kind: str  # "read", "upload" or "wait"
    what: str  # the operator
    place: str  # the innermost line of the project that asked for it


def _renamed(x: Tensor, kind: int) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = to_dlpack(x)
    address: Any = _pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value = kind
    return torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]


def on_host(x: Any) -> Any:
    """Arguments of an operator, as they are for the CPU."""
    if isinstance(x, Tensor):
        return _renamed(x, _DLPACK_CPU) if x.is_cuda else x
    if isinstance(x, torch.device):
        return torch.device("cpu") if x.type == "cuda" else x
    if isinstance(x, (list, tuple)):
        return type(x)(map(on_host, x))
    return x


def on_device(x: Any) -> Any:
    """Results of an operator, as they are for the device."""
    if isinstance(x, Tensor):
        return x if x.is_cuda else _renamed(x, _DLPACK_CUDA)
    if isinstance(x, (list, tuple)):
        return type(x)(map(on_device, x))
    return x


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from _tensors(each)


class Graph:
    """Operators on fixed memory."""

    def __init__(self) -> None:
        self.operators: list[tuple[Callable[..., Any], tuple, dict, Any]] = []

    def replay(self) -> None:
        for operator, args, kwargs, results in self.operators:
            again = operator(*args, **kwargs)
            for old, new in zip(_tensors(results), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.operators.clear()


class PretendedDevice:
    """The device while it is there; :func:`pretended_device` makes one.

    Attributes:
        events: what has made the host wait.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.strict = True
        self.graph: Graph | None = None  # that is captured
        self._coming: list[tuple[Tensor, Tensor]] = []  # to the host, and what
        self._arrived = 0  # of these, over all time

    def count(self, kind: str | None = None) -> int:
        return sum(kind in (None, event.kind) for event in self.events)

    def table(self) -> str:
        """How often the host waited where, for messages."""
        counts = Counter(self.events).most_common()
        return "\n".join(f"{n:4} {e.kind:7} {e.what:32} {e.place}" for e, n in counts)

    @contextlib.contextmanager
    def watched(self) -> Iterator[PretendedDevice]:
        """Context in which ``events`` are those since its beginning."""
        before, self.events = self.events, []
        try:
            yield self
        finally:
            self.events = before + self.events

    @contextlib.contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        assert self.graph is None, "a graph is captured already"
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None

    def add(self, kind: str, what: str) -> None:
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {kind}, {what}")
        if kind != "upload":
            self.arrive(self.queued)
        self.events.append(Event(kind, what.removeprefix("aten::"), _place()))

    @property
    def queued(self) -> int:
        """Copies to the host that do not block, so far."""
        return self._arrived + len(self._coming)

    def arrive(self, until: int) -> None:
        """Brings copies to the host, the first ``until`` of all."""
        count = max(until - self._arrived, 0)
        for target, numbers in self._coming[:count]:
            target.copy_(numbers)
        del self._coming[:count]
        self._arrived += count

    def run(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """An operator on the device."""
        known = _known(operator)
        if known.is_view:
            return operator.redispatch(_CPU, *args, **kwargs)  # of the same storage
        self._check(known.name, args, kwargs)
        of_host = [on_host(x) for x in args], {name: on_host(x) for name, x in kwargs.items()}
        _wrap_numbers(known, of_host[0])
        of_host[1].pop("generator", None)
        of_host[1].pop("pin_memory", None)
        empty = [name for name in known.outs if not kwargs[name].numel()]
        for name in empty:  # which the operator gives a size
            of_host[1][name] = torch.empty(0, dtype=kwargs[name].dtype)
        results = known.on_host(*of_host[0], **of_host[1])
        for name in empty:
            kwargs[name].data = on_device(of_host[1][name])
        if self.graph is not None:
            self.graph.operators.append((known.on_host, *of_host, results))
        found = [
            on_device(x) if place is None else args[place] if place < len(args) else kwargs[name]
            for x, (place, name) in zip(
                (results,) if known.single else results or (), known.returned, strict=True
            )
        ]
        return found[0] if known.single else tuple(found) or None

    def _check(self, name: str, args: tuple, kwargs: dict) -> None:
        if name in READS or (name == "aten::repeat_interleave" and not kwargs.get("output_size")):
            self.add("read", name)
        if name in _INDEXED:
            self._check_indices(name, args)
            args = args[:1] + args[2:]
        for x in _tensors([*args, *kwargs.values()]):
            if not x.is_cuda and x.dim():
                raise RuntimeError(
                    f"Expected all tensors to be on the same device: {name} has one of shape "
                    f"{tuple(x.shape)} on {x.device}"
                )

    def _check_indices(self, name: str, args: tuple) -> None:
        indices = [x for x in args[1] if x is not None]
        if any(not x.is_cuda for x in indices):
            self.add("upload", f"{name} by a host tensor or list")
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        value = args[2] if len(args) > 2 else None
        filled = len(indices) == 1 and isinstance(value, Tensor) and value.numel() == 1
        if masks and not (filled and not value.is_cuda):  # type: ignore[union-attr]
            self.add("read", f"{name} by a mask")

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not source.numel():
            return target
        if target.is_cuda and source.is_cuda:
            of_host = on_host(target), on_host(source)
            of_host[0].copy_(of_host[1])
            if self.graph is not None:
                copy = torch.ops.aten.copy_.default
                self.graph.operators.append((copy, of_host, {}, of_host[0]))
            return target
        host, kind = (source, "upload") if target.is_cuda else (target, "read")
        if not non_blocking or self.graph is not None:
            self.add(kind, f"copy {'to the device' if target.is_cuda else 'to the host'}")
        elif not host.is_pinned() and not self.strict:
            self.add("pageable", "copy to the device" if target.is_cuda else "copy to the host")
        elif not host.is_pinned():
            raise RuntimeError(
                f"a copy of shape {tuple(host.shape)} between the device and memory that is not "
                "pinned is not to block, but does, or is read before it is there"
            )
        if non_blocking and not target.is_cuda:
            self._coming.append((target, on_host(source).clone()))
            target.fill_(torch.nan if target.is_floating_point() else torch.iinfo(target.dtype).min)
        else:
            self.arrive(self.queued)  # the device does one thing after the other
            on_host(target).copy_(on_host(source))
        return target


class _Known(NamedTuple):
    """An operator, by its schema."""

    name: str
    on_host: Callable[..., Any]
    is_view: bool
    tensors: tuple[int, ...]  # the places of arguments that are a tensor each
    outs: tuple[str, ...]  # arguments that it may give a size
    single: bool  # result
    returned: tuple[tuple[int | None, str], ...]  # for each result, which argument it is


@functools.cache
def _known(operator: Any) -> _Known:
    schema = operator._schema
    written = {
        frozenset(a.alias_info.before_set): (place, a.name)
        for place, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    }
    aliases = [None if r.alias_info is None else r.alias_info for r in schema.returns]
    return _Known(
        schema.name,
        _FOR_GPUS.get(f"{schema.name}.{schema.overload_name}", operator),
        any(alias is not None and not alias.is_write for alias in aliases),
        tuple(i for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor"),
        tuple(a.name for a in schema.arguments if a.is_out),
        len(schema.returns) == 1,
        tuple(
            (None, "") if alias is None else written.get(frozenset(alias.before_set), (None, ""))
            for alias in aliases
        ),
    )


def _wrap_numbers(known: _Known, args: list[Any]) -> None:
    """Makes tensors of the numbers that torch had made tensors of, and that lost it on the way
    here; they do not decide the dtype of the result."""
    for place in known.tensors:
        if place < len(args) and not isinstance(args[place], Tensor):
            x = args[place]
            dtype = next((y.dtype for y in args if isinstance(y, Tensor)), None)
            fits = dtype is not None and torch.result_type(torch.zeros(1, dtype=dtype), x) == dtype
            args[place] = torch.tensor(x, dtype=dtype if fits else None)


def _place() -> str:
    """The innermost line of the project's own code, and the one that called its function."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if name.startswith(_PARTS):
            found.append(f"{name.removeprefix(str(_ROOT) + os.sep)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "elsewhere"


def _runs(cumulative: Tensor) -> list[int]:
    return cumulative.diff().tolist()


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    """``_flash_attention_forward`` of packed rows, which torch has for GPUs alone."""
    runs = Runs(_runs(of_q), _runs(of_k), causal=rest[3])
    out, lse = CPUKernel().forward(Operands(q, k, v, scale), runs)
    none = torch.zeros((), dtype=torch.long)
    return out, lse.t().contiguous(), none, none.clone(), torch.zeros(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of_q: Tensor,
    of_k: Tensor, *rest: Any, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    runs = Runs(_runs(of_q), _runs(of_k), causal=rest[3])
    attended = Attended(out, lse.t().contiguous())
    return CPUKernel().backward(grad, Operands(q, k, v, scale), attended, runs)


def _mm(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    """``mm`` with sums in another dtype than the factors'."""
    found = a.to(out_dtype) @ b.to(out_dtype)
    return found if out is None else out.copy_(found)


def _addmm(
    total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1,
    alpha: float = 1, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    found = beta * total.to(out_dtype) + alpha * _mm(a, b, out_dtype)
    return found if out is None else out.copy_(found)


# Operators that torch has for GPUs alone.
_FOR_GPUS: dict[str, Callable[..., Any]] = {
    "aten::_flash_attention_forward.": _flash_forward,
    "aten::_flash_attention_backward.": _flash_backward,
    "aten::mm.dtype": _mm, "aten::mm.dtype_out": _mm, "aten::addmm.dtype": _addmm,
    "aten::addmm.dtype_out": _addmm,
}  # fmt: skip


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` by its formula: the choice of a kernel asks for the kernels
    of a device by its kind, and there are none."""
    if query.is_cuda:
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            none = torch.zeros((), dtype=query.dtype, device=query.device)
            attn_mask = torch.where(attn_mask, none, -torch.inf)
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return _plain_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_plain_attention = torch.nn.functional.scaled_dot_product_attention


def _stand_ins(device: PretendedDevice) -> dict[str, Any]:
    """What ``torch.cuda`` has where there is a GPU."""

    class Event_:
        def __init__(self, *_: Any, **__: Any) -> None:
            self._behind = 0

        def record(self, *_: Any) -> None:
            self._behind = device.queued

        def synchronize(self) -> None:
            assert device.graph is None, "waits while a graph is captured"
            device.arrive(self._behind)

        def elapsed_time(self, _end: Any) -> float:
            return 1.0

        def query(self) -> bool:
            self.synchronize()
            return True

        wait = record

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.device, self.cuda_stream = DEVICE, 0

        def wait_stream(self, _other: Any) -> None:
            pass

        def wait_event(self, _event: Any) -> None:
            pass

        def record_event(self, event: Any = None) -> Any:
            event = event or Event_()
            event.record()
            return event

        def synchronize(self) -> None:
            device.add("wait", "Stream.synchronize")

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    state = torch.zeros(16, dtype=torch.uint8)
    properties = SimpleNamespace(
        name="pretended", total_memory=80 << 30, major=8, minor=0, multi_processor_count=100,
        L2_cache_size=50 << 20, warp_size=32, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda *_, **__: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_capability": lambda *_: (8, 0),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "is_bf16_supported": lambda *_, **__: True,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": lambda *_: (60 << 30, 80 << 30),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_stats": lambda *_: {},
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "get_rng_state": lambda *_: state.clone(),
        "set_rng_state": lambda *_: None,
        "get_rng_state_all": lambda: [state.clone()],
        "set_rng_state_all": lambda _: None,
        "synchronize": lambda *_: device.add("wait", "synchronize"),
        "Event": Event_,
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "default_stream": lambda *_: Stream(),
        "stream": contextlib.nullcontext,
        "CUDAGraph": Graph,
        "graph": lambda graph, *_, **__: device.capture(graph),
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: device.graph is not None,
    }


@functools.cache
def _core() -> ctypes.CDLL:
    """What torch's core asks of a device, compiled once per version of torch and user."""
    import torch.utils.cpp_extension as extension

    source = Path(__file__).parent / "device.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fastrl-pretended-device-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"device-{digest}.so"
    if not library.exists():
        made = folder / f"{library.name}.{os.getpid()}"
        include = [f"-I{path}" for path in extension.include_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        command = [extension.get_cxx_compiler(), "-std=c++20", "-shared", "-fPIC", "-w", abi]
        command += [*include, str(source), "-o", str(made), f"-L{extension.TORCH_LIB_PATH}"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        made.rename(library)  # another worker may have made it, too
    return ctypes.CDLL(str(library))


def absent() -> str | None:
    """Why there can be no such device here; None where there can."""
    if torch.cuda.is_available():
        return "there is a real one"
    if torch.version.cuda or torch.version.hip:
        return "torch is built with kernels of its own for devices"
    return None


@contextlib.contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Context in which torch has one CUDA device, and libraries find it.

    Environment variables that it changes: ops of ours take their PyTorch path, and nobody computes
    in bf16 unless asked to.
    """
    import pytest

    with contextlib.suppress(ImportError):
        import peft  # noqa: F401 - what it imports asks torch for more than there is here
    assert absent() is None, absent()
    device = PretendedDevice()
    library = torch.library.Library("_", "IMPL")
    aten = torch.library.Library("aten", "IMPL")
    core = _core()
    functional = torch.nn.functional
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in _stand_ins(device).items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(bandwidth, "_COPIED", {"cuda": 1 << 12})  # there is none to measure
        patch.setattr(functional, "scaled_dot_product_attention", _attention)
        patch.setenv("FASTRL_KERNELS_BACKEND", "torch")
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        library.fallback(device.run, "CUDA")
        aten.impl("copy_", device.copy_, "CUDA")
        core.pretended_on()
        _forget()
        try:
            # Its threads are those of devices that the build knows.
            with torch.autograd.set_multithreading_enabled(False):
                yield device
        finally:
            aten._destroy()
            library._destroy()
            core.pretended_off()
            _forget()


def _forget() -> None:
    """What libraries have found out about devices."""
    import accelerate.utils.imports
    import transformers.utils.import_utils
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()
    for module in (accelerate.utils.imports, transformers.utils.import_utils):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
    bandwidth.bandwidth.cache_clear()
