"""Compiles the package's C for this processor, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

COMPILER_VARIABLE = "FASTRL_KERNELS_CC"
_SOURCES = Path(__file__).parent
# No -ffast-math: rows with NaN or inf are told from others.
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
# Where torch is held to fewer instructions than an x86 processor has (ATEN_CPU_CAPABILITY).
_FEWER = {"AVX2": ("-mno-avx512f",), "DEFAULT": ("-mno-avx",), "NO AVX": ("-mno-avx",)}
_PATIENCE = 120  # seconds


class Unavailable(RuntimeError):
    """There is no compiled code here; the message says why, and what would help."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled code, from the cache where it lies there.

    Raises:
        Unavailable: no compiler, a compiler's error, a folder that cannot be written to, or code
            whose threads are not PyTorch's.
    """
    path = _path()
    if not path.exists():
        _compile(path)
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded ({error}): remove it") from None
    if not _shares_threads(found):
        raise Unavailable("the compiler's OpenMP is not the one that this PyTorch has")
    return found


def _shares_threads(found: ctypes.CDLL) -> bool:
    """Whether code runs in PyTorch's threads: threads of two runtimes would wait for each other."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        return found.omp_get_max_threads() == before + 1
    finally:
        torch.set_num_threads(before)


@functools.cache
def why_not() -> str | None:
    """Why there is no compiled code here; None where there is."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


@functools.cache
def name() -> str:
    """The name of the build that :func:`library` takes: that of its source, compiler, processor and
    PyTorch."""
    return _path().stem


def folder() -> Path:
    """Where compiled code is kept: ``fastrl/native`` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastrl" / "native"


@functools.cache
def compiler() -> str:
    """The compiler's path: that of ``FASTRL_KERNELS_CC``, or GCC, whose OpenMP PyTorch has, too."""
    if sys.platform != "linux":
        raise Unavailable(f"compiled code is for Linux, not for {sys.platform}")
    named = os.environ.get(COMPILER_VARIABLE)
    found = shutil.which(named or "gcc")
    if found is None:
        raise Unavailable(
            f"{COMPILER_VARIABLE}={named}: there is no such program"
            if named
            else "there is no C compiler (apt install gcc)"
        )
    return found


def _path() -> Path:
    """The file of this source, compiler, processor and PyTorch."""
    parts = [*_texts(), *flags(), _said("--version"), _processor(), torch.__version__]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return folder() / f"{name}.so"


def flags() -> tuple[str, ...]:
    """The compiler's, with the instructions that PyTorch uses."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return _FLAGS
    return *_FLAGS, *_FEWER.get(torch.backends.cpu.get_cpu_capability(), ())


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.glob("*.[ch]"))]


def _said(*words: str) -> str:
    """What the compiler prints."""
    try:
        run = subprocess.run(
            [compiler(), *words], capture_output=True, text=True, timeout=_PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise Unavailable(f"{compiler()} failed ({said[-1][:200]})") from None
    return run.stdout


def _processor() -> str:
    """The processor and its instructions, for which code is compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return repr(torch.cpu.get_capabilities())
    kinds = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    found = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join(found[kind] for kind in kinds if kind in found)


def _compile(path: Path) -> None:
    """Writes the file whole or not at all: several processes may do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise Unavailable(f"nothing can be written to {path.parent} ({error.strerror})") from None
    written = Path(name)
    try:
        sources = map(str, sorted(_SOURCES.glob("*.c")))
        _said(*flags(), *sources, "-o", name, "-lm")
        written.chmod(0o700)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
