"""Versions and hardware on which the bits of a computation depend."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastrl.run.files import write_file

# torch's names of instruction sets, in ascending order, and their names in ATEN_CPU_CAPABILITY.
_CAPABILITIES = {"NO AVX": "default", "DEFAULT": "default", "AVX2": "avx2", "AVX512": "avx512"}
# Environment variables that change the bits that libraries of matrix products compute.
_OF_PRODUCTS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
_PACKAGES = ("fastrl-lm", "torch", "triton", "transformers", "accelerate", "peft")


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """The versions of Python, of packages ("not installed" without one), and of the algorithm that
    draws a key's tokens, as "draws"."""
    from fastrl_kernels.race import DRAWS

    by_package = {"python": platform.python_version(), "draws": str(DRAWS)}
    for package in packages:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package


def machine() -> dict[str, Any]:
    """CPU, its instruction set, threads, GPUs, kernels, libraries of matrix products and their
    variables."""
    import torch

    from fastrl_kernels import gemm

    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "kernels": _kernels(),
        "products": gemm.as_json(gemm.choices()),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        **{name: os.environ[name] for name in _OF_PRODUCTS if os.environ.get(name)},
    }


def _kernels() -> str:
    """The backend of kernels where models run; of compiled code, the build, too."""
    import torch

    from fastrl_kernels import explain
    from fastrl_kernels._cpu.native import build
    from fastrl_kernels.dispatch import BACKEND_VARIABLE

    named = os.environ.get(BACKEND_VARIABLE, "auto")
    device = "cuda" if torch.cuda.is_available() and named != "native" else "cpu"
    try:
        backend = explain(device).backend
    except ValueError:  # the ops themselves say that it cannot run
        return named
    return f"{backend} {build.name()}" if backend == "native" else backend


def other_draws(before: dict[str, str]) -> str:
    """A note, after a semicolon, that the :func:`versions` ``before`` drew other tokens; or ""."""
    from fastrl_kernels.race import DRAWS

    if before.get("draws", "1") == str(DRAWS):
        return ""
    return (
        "; tokens are drawn in another way since then: those of one key have the same "
        "probabilities, but are others (install the versions of the run to draw the run's)"
    )


def write_products(measured: Mapping[str, Any]) -> Path:
    """Writes ``measured``, this processor's libraries of matrix products by dtype, to a table that
    later processes read, and returns its path; other processors' entries stay."""
    from fastrl_kernels import gemm

    path = gemm.table_path()
    try:
        others = gemm.read_table(path)
    except ValueError:  # nobody can read it
        others = {}
    table = {**others, gemm.processor(): dict(measured)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(table, indent=2, sort_keys=True) + "\n")
    return path


def measure_products_once() -> None:
    """Measures the libraries of fp32 products at their first use on this processor, some seconds,
    unless variables name a library or a table, or a plan is made without memory. Where no
    table can be kept, the fixed rule is."""
    from fastrl_kernels import gemm, measure_products
    from fastrl_kernels.dispatch import watched

    path = gemm.table_path()
    if gemm.forced() is not None or os.environ.get(gemm.TABLE_VARIABLE) or watched():
        return
    try:
        known = gemm.processor() in gemm.read_table(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError):  # a table that nobody can read is warned of where it is read
        return
    if known or not os.access(path.parent, os.W_OK):
        return
    said = f"measuring matrix products on this CPU, once: {path} keeps what is fastest"
    print(said, file=sys.stderr, flush=True)
    measured = measure_products.measure(["float32"])
    write_products(gemm.as_json({each.dtype: each.choice for each in measured}))
    gemm.read_anew()


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two machines, or their versions, as "name: before → now"."""
    names = dict.fromkeys([*before, *now])
    return [
        f"{name}: {before.get(name)} → {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def remedies(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Environment variables that restore what they can of :func:`machine`: "NAME=value", or ""."""
    variables = []
    if before.get("threads") != now.get("threads") and before.get("threads"):
        variables.append(f"OMP_NUM_THREADS={before['threads']}")
    earlier, current = (x.get("cpu_capability") for x in (before, now))
    # torch must not be made to use instructions that this processor may lack.
    if earlier in _CAPABILITIES and current in _CAPABILITIES:
        names = list(_CAPABILITIES)
        if names.index(earlier) < names.index(current):
            variables.append(f"ATEN_CPU_CAPABILITY={_CAPABILITIES[earlier]}")
    kernels, _, _ = now.get("kernels", "").partition(" ")
    # Before this was recorded, CPUs had PyTorch's alone.
    earlier, _, _ = before.get("kernels", "torch" if kernels == "native" else kernels).partition(
        " "
    )
    if earlier != kernels:
        variables.append(f"FASTRL_KERNELS_BACKEND={earlier}")
    variables += [
        f"{name}={before.get(name, '')}"
        for name in _OF_PRODUCTS
        if before.get(name) != now.get(name)
    ]
    return " ".join(variables)


def _cpu_name() -> str:
    """The CPU's name from Linux; on other systems from Python's platform module."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
