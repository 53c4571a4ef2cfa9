"""Fixtures that every kernel test shares."""

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

from fastrl_kernels import dispatch, workspace
from fastrl_kernels._cpu.native.build import why_not


@pytest.fixture(scope="session")
def device() -> str:
    """Compiled kernels where there is a GPU, the interpreter on CPU tensors elsewhere."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# Tests of ops that have compiled code for CPUs, too.
_NATIVE = ("test_decode_attention", "test_decode_layers", "test_sampling", "test_low_logits")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if "backend" in metafunc.fixturenames and not any("backend" in mark.args[0] for mark in marks):
        compiled = metafunc.module.__name__.rpartition(".")[2].startswith(_NATIVE)
        backends = ["torch", "triton", *["native"] * (compiled and _on_cpu())]
        metafunc.parametrize("backend", backends, indirect=True)


def _on_cpu() -> bool:
    return not torch.cuda.is_available()


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and (lacks := why_not()):
        pytest.skip(lacks)
    return request.param


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> Iterator[None]:
    """inf - inf is silent on a GPU; the interpreter's numpy would warn about it."""
    with numpy.errstate(all="ignore"):
        yield


def _poison(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        return x.fill_(float("nan"))
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


@pytest.fixture(autouse=True)
def no_idle_workspace() -> None:
    """An earlier test's logits are no poison."""
    workspace.clear()


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote reads as NaN (or the largest integer), so that using it shows."""

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            with torch.no_grad():
                x = _poison(allocate(*args, **{**kwargs, "requires_grad": False}))
            return x.requires_grad_(kwargs.get("requires_grad", False))

        return poisoned

    def poisoning_method(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            with torch.no_grad():
                return _poison(allocate(*args, **kwargs))

        return poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoning_method(getattr(torch.Tensor, name)))


@pytest.fixture(autouse=True)
def interpreter_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds fp32 to the nearest bf16; Triton's interpreter cuts off, twice the error."""
    if not dispatch.triton_installed() or not dispatch.interpreting():
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, source, dtype)
        nearest = torch.as_tensor(source.data).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(nearest.numpy().view("uint16"), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding)


@pytest.fixture(autouse=True)
def interpreter_scans_by_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    """log2(n) combinations of whole tiles, as a GPU scans, where the interpreter takes n of one
    element each: a hundred times faster."""
    if not dispatch.triton_installed() or not dispatch.interpreting():
        return
    from triton.runtime.interpreter import ScanOps

    def scan(self: Any, inputs: Any) -> Any:
        dtypes = [x.dtype for x in inputs]
        tiles = [x.handle.data.swapaxes(0, self.axis) for x in inputs]
        step = 1
        while step < len(tiles[0]):
            earlier = [numpy.roll(x, step, axis=0) for x in tiles]
            both = [self.to_tensor(x, d) for x, d in zip(earlier + tiles, dtypes * 2, strict=True)]
            combined = self.combine_fn.fn(*both)
            combined = combined if isinstance(combined, tuple) else (combined,)
            tiles = [
                numpy.concatenate([x[:step], y.handle.data[step:]])
                for x, y in zip(tiles, combined, strict=True)
            ]
            step *= 2
        tiles = [numpy.ascontiguousarray(x.swapaxes(0, self.axis)) for x in tiles]
        return [self.to_tensor(x, d) for x, d in zip(tiles, dtypes, strict=True)]

    monkeypatch.setattr(ScanOps, "generic_scan", scan)


@pytest.fixture(autouse=True)
def interpreter_knows_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a table of all dtypes whenever it wants one's counterpart in numpy."""
    if not dispatch.triton_installed() or not dispatch.interpreting():
        return
    from triton.runtime import interpreter

    look_up = interpreter._get_np_dtype

    def known(dtype: Any) -> Any:
        name = dtype.scalar.name  # pointers have names of their own
        if name not in _NUMPY_DTYPES:
            _NUMPY_DTYPES[name] = look_up(dtype)
        return _NUMPY_DTYPES[name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", known)


_NUMPY_DTYPES: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def interpreter_knows_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks the shape of each result anew, and wraps its sizes; to compare types it unwraps
    them: a third of its time."""
    if not dispatch.triton_installed() or not dispatch.interpreting():
        return
    from triton.language import core

    check, wrap, equals = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([x.value if type(x) is core.constexpr else x for x in shape])
        known = _BLOCKS.get((element_ty.name, sizes))
        if known is None:
            check(self, element_ty, shape)
            known = _BLOCKS[element_ty.name, sizes] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = _SHAPES.get(type.name)
        if known is None:
            wrap(self, handle, type)
            known = _SHAPES[type.name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else equals(self, other)

    monkeypatch.setattr(core.block_type, "__init__", block)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(core.dtype, "__eq__", equal)


# By the names of types, which tell their sizes.
_BLOCKS: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}
_SHAPES: dict[str, tuple[Any, Any]] = {}


@pytest.fixture(autouse=True)
def interpreter_prepares_once_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces the functions of triton.language at each call of a helper, which
    takes longer than the helper: once per launch is enough."""
    if not dispatch.triton_installed() or not dispatch.interpreting():
        return
    import triton.language as tl
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    launch, call = GridExecutor.__call__, InterpretedFunction.__call__
    names = (tl.__name__, tl.core.__name__)
    replaced: set[frozenset[str]] = set()

    @cache
    def seen_by(function: Callable[..., Any]) -> frozenset[str]:
        found = (x.__name__ for x in function.__globals__.values() if isinstance(x, ModuleType))
        return frozenset(name for name in found if name in names)

    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = seen_by(self.fn)
        if modules in replaced:
            return self.rewrite()(*args, **kwargs)
        replaced.add(modules)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launching)
    monkeypatch.setattr(InterpretedFunction, "__call__", calling)
