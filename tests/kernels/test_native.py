"""Compiled code for CPUs: its products, and what is said where it cannot be had."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fastrl_kernels import (
    decode_attention,
    explain,
    rms_norm,
    rotate_and_store,
    sample_tokens,
    swiglu,
)
from fastrl_kernels._cpu.native import build, calls
from fastrl_kernels._cpu.native.calls import Panels, linear

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason="no compiled code here")
# Rows of one block and of several, of unequal ones, and of more than meet a panel at a time.
ROWS = (1, 2, 7, 13, 32, 97, 200)
SHAPES = ((1, 1), (33, 17), (64, 256), (70, 257), (130, 600))  # of weights: borders of panels


@pytest.fixture
def nothing_found():
    """Compiled code is looked for anew, within the test and behind it."""
    kept = build.library, build.compiler, build.why_not, build.name
    for found in kept:
        found.cache_clear()
    yield
    for found in kept:
        found.cache_clear()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_as_exact_as_pytorchs(rows, shape):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, shape[1], generator=generator)
    weight, bias = (torch.randn(n, generator=generator) for n in (shape, shape[:1]))
    exact = x.double() @ weight.double().t() + bias
    theirs = (torch.nn.functional.linear(x, weight, bias) - exact).square().mean().sqrt()
    ours = (Panels(weight).linear(x, bias) - exact).square().mean().sqrt()
    assert ours <= 3 * theirs + 1e-7  # MKL makes more sums of a single row


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_are_its_own(threads):
    x, weight = torch.randn(200, 600), torch.randn(130, 600)
    panels, before = Panels(weight), torch.get_num_threads()
    expected = panels.linear(x)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 11, 12, 13, 96, 97):
            assert torch.equal(panels.linear(x[40 : 40 + rows]), expected[40 : 40 + rows])
    finally:
        torch.set_num_threads(before)


def test_weights_and_rows_of_any_strides():
    x, weight = torch.randn(3, 2, 40)[:, 1], torch.randn(40, 50).t()
    assert torch.equal(Panels(weight).weight, Panels(weight.contiguous()).weight)
    assert torch.equal(Panels(weight).linear(x), Panels(weight).linear(x.contiguous()))
    assert Panels(weight).linear(x.view(3, 1, 40)).shape == (3, 1, 50)
    assert Panels(weight).linear(x[:0]).shape == (0, 50)


@pytest.fixture(params=[4, 8, 16])
def width(request, tmp_path, monkeypatch):
    """Code of another processor's vectors, which compilers make of this one's."""
    path = tmp_path / "code.so"
    sources = map(str, sorted(build._SOURCES.glob("*.c")))
    build._said(*build.flags(), f"-DWIDTH={request.param}", *sources, "-o", str(path), "-lm")
    monkeypatch.setattr(calls, "library", lambda: ctypes.CDLL(str(path)))
    calls.function.cache_clear()
    yield request.param
    calls.function.cache_clear()


def test_vectors_of_every_width_compute_the_same(width):
    assert calls.function("columns_of_a_panel")() == 2 * width
    for rows in (1, 5, 13, 100):
        check_ops(rows)


def check_ops(rows):
    """Each compiled op beside PyTorch's, on shapes that fill no vector."""
    x, weight, bias = torch.randn(rows, 70), torch.randn(45, 70), torch.randn(45)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(Panels(weight).linear(x, bias), expected)
    assert torch.equal(Panels(weight).linear(x, bias), linear(x, weight, bias))
    torch.testing.assert_close(
        rms_norm(x, weight[0], backend="native"), rms_norm(x, weight[0], backend="torch")
    )
    gated = swiglu(x, 2 * x, backend="native")
    torch.testing.assert_close(gated, swiglu(x, 2 * x, backend="torch"))
    queries, keys = torch.randn(rows, 4, 18), torch.randn(rows, 21, 2, 18)
    lengths = torch.randint(22, (rows,))
    found, right = (
        decode_attention(queries, keys, keys.flip(0), lengths, backend=x)
        for x in ("native", "torch")
    )
    torch.testing.assert_close(found, right)
    drawn = [sample_tokens(20 * x, torch.arange(rows), backend=y) for y in ("native", "torch")]
    assert torch.equal(drawn[0].tokens, drawn[1].tokens)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no limits of instructions")
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_instructions_are_those_that_pytorch_is_held_to(capability, tmp_path):
    program = (
        "import torch; from fastrl_kernels._cpu.native import build, calls\n"
        "print(build.name(), calls.function('columns_of_a_panel')())"
    )
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability, "XDG_CACHE_HOME": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert int(said.split()[1]) == {"default": 8, "avx2": 16}[capability]


@pytest.mark.parametrize("processor", ["x86-64-v2", "sapphirerapids"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another compiler")
def test_it_compiles_for_other_processors(processor, tmp_path):
    flags = [flag for flag in build.flags() if not flag.startswith(("-march", "-mno"))]
    sources = map(str, sorted(build._SOURCES.glob("*.c")))
    build._said(*flags, "-Werror", f"-march={processor}", *sources, "-o", str(tmp_path / "x.so"))


def test_joined_weights_and_plain_ones_have_the_bits_of_single_panels():
    x, bias = torch.randn(40, 130), torch.randn(75)
    weights = [torch.randn(n, 130) for n in (5, 18, 1, 51)]
    expected = torch.cat([Panels(w).linear(x) for w in weights], -1) + bias
    torch.testing.assert_close(Panels(*weights).linear(x, bias), expected)
    assert torch.equal(Panels(*weights).linear(x), torch.cat([linear(x, w) for w in weights], -1))
    whole = torch.cat(weights)
    assert torch.equal(Panels(*weights).linear(x, bias), linear(x, whole, bias))
    assert torch.equal(linear(x, whole), linear(x, whole.t().contiguous().t()))


def test_products_that_are_watched_are_pytorchs_own():
    x, weight, bias = torch.randn(7, 40), torch.randn(50, 40), torch.randn(50)
    panels, expected = Panels(weight), F.linear(x, weight, bias)
    with FlopCounterMode(display=False) as counter:
        watched = Panels(weight)
        for out in (panels.linear(x, bias), watched.linear(x, bias), linear(x, weight, bias)):
            torch.testing.assert_close(out, expected)
    assert counter.get_total_flops() >= 3 * 2 * x.numel() * len(weight)
    assert torch.equal(panels.weight, watched.weight)
    with FakeTensorMode():
        made = rms_norm(torch.randn(3, 8), torch.randn(8), backend="native")
    assert isinstance(made, FakeTensor)


def test_cpus_have_it_by_default(nothing_found, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.delenv("FASTRL_KERNELS_BACKEND", raising=False)
    assert explain("cpu").backend == "native"
    monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
    build.why_not.cache_clear()
    build.library.cache_clear()
    build.compiler.cache_clear()
    backend, reason = explain("cpu")
    assert backend == "torch"
    assert "no compiled code for this CPU: FASTRL_KERNELS_CC=no-such-compiler" in reason


@pytest.mark.parametrize(
    ("variable", "value", "cause"),
    [
        (build.COMPILER_VARIABLE, "no-such-compiler", "there is no such program"),
        (build.COMPILER_VARIABLE, "false", "failed"),
        ("PATH", "", "no C compiler"),
        ("XDG_CACHE_HOME", "/proc/nowhere", "nothing can be written to"),
    ],
)
def test_what_lacks_is_said(nothing_found, monkeypatch, variable, value, cause):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=cause):
        explain("cpu", "native")


def test_it_is_for_cpus_alone():
    with pytest.raises(ValueError, match="for CPUs"):
        explain("cuda", "native")


def test_other_sources_processors_and_versions_have_other_files(nothing_found, monkeypatch):
    first = build._path()
    monkeypatch.setattr(build, "_processor", lambda: "another")
    second = build._path()
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert len({first, second, build._path()}) == 3


def test_processes_that_build_at_once_leave_one_file(tmp_path):
    program = "from fastrl_kernels._cpu.native.build import library; library()"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list(tmp_path.rglob("*"))) == 3  # two folders, one file


def test_positions_outside_of_a_slot_are_refused():
    heads, angles = torch.randn(2, 1, 4), torch.randn(2, 4)
    cache = torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 4)
    for positions in ((0, 3), (-1, 0)):
        with pytest.raises(IndexError, match="outside of a slot's 3 tokens"):
            rotate_and_store(
                *(heads, heads, heads, angles, angles, *cache, torch.tensor(positions)),
                backend="native",
            )
    assert not any(x.any() for x in cache), "nothing is stored"


def test_compiled_programs_trace_pytorchs_path():
    x, weight = torch.randn(3, 8), torch.randn(8)
    traced = torch.compile(
        lambda x: rms_norm(x, weight, backend="native"), backend="eager", fullgraph=True
    )
    assert torch.equal(traced(x), rms_norm(x, weight, backend="torch"))


def test_gates_far_below_zero_are_shut():
    gate = -torch.logspace(1.9, 38, 5000)  # exponentials beyond the largest number
    out = swiglu(gate, torch.ones_like(gate), backend="native")
    assert out.abs().max() < 1e-30


def test_what_it_has_no_code_for_is_pytorchs():
    x, weight = torch.randn(3, 8).bfloat16(), torch.randn(8)
    expected = rms_norm(x, weight, backend="torch")
    assert torch.equal(rms_norm(x, weight, backend="native"), expected)
