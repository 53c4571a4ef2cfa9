"""``fastrl env``: versions, devices, the backend of each kernel, the libraries of CPU products."""

from __future__ import annotations

import inspect
import platform
from dataclasses import dataclass

import torch

import fastrl_kernels
from fastrl.run.machine import versions, write_products
from fastrl.settings import setting
from fastrl.tools.commands import products_table
from fastrl_kernels import gemm, measure_products
from fastrl_kernels.dispatch import NATIVE

PACKAGES = (
    *("fastrl-lm", "torch", "triton", "transformers", "accelerate", "datasets"),
    *("peft", "bitsandbytes", "flash-attn", "kernels"),
)


def devices() -> dict[str, str]:
    """The devices that torch can use, and their descriptions."""
    descriptions = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        platform_name = "ROCm" if torch.version.hip else "CUDA"
        version = torch.version.hip or torch.version.cuda
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            descriptions[f"cuda:{index}"] = (
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, {platform_name} {version}"
            )
    return descriptions


def kernel_ops() -> list[str]:
    """The names of the public ops with several backends."""
    return [
        name
        for name in fastrl_kernels.__all__
        if inspect.isfunction(op := getattr(fastrl_kernels, name))
        and "backend" in inspect.signature(op).parameters
        and name != "explain"
    ]


def _backend_of(op: str, backend: str) -> str:
    """An op's backend where a device has this one: few have compiled code."""
    return "torch" if backend == "native" and op not in NATIVE else backend


def describe() -> str:
    """The report of ``fastrl env``, as text."""
    lines = ["versions"]
    lines += [f"  {name:<14}{version}" for name, version in versions(PACKAGES).items()]
    lines += ["devices"]
    lines += [f"  {name:<14}{what}" for name, what in devices().items()]
    lines += ["kernels"]
    for device in devices():
        backend, reason = fastrl_kernels.explain(device)
        lines += [f"  on {device}: {backend} ({reason})"]
        lines += [f"    {op:<20}{_backend_of(op, backend)}" for op in kernel_ops()]
    lines += [f"products on cpu ({gemm.source()})"]
    rules = gemm.rules() if gemm.source() == gemm.BY_RULE else {}
    for dtype, choice in gemm.choices().items():
        lines += [f"  {dtype:<14}{products_table.describe(choice)}"]
        if dtype in rules:
            lines += [f"  {'':<14}  measured on {rules[dtype].measured_on}"]
    return "\n".join(lines)


@dataclass
class EnvFlags:
    """Settings of ``fastrl env``."""

    measure: bool = setting(
        "Measure the libraries of matrix products on this CPU, a few seconds on a quiet machine, "
        "and write the fastest to a table that later runs read.",
        False,
    )


def run_env(flags: EnvFlags) -> None:
    """Prints the report; or measures libraries, prints their speeds and writes the choices."""
    if not flags.measure:
        print(describe())
        return
    measured = measure_products.measure()
    print(products_table.table(measured))
    path = write_products(gemm.as_json({each.dtype: each.choice for each in measured}))
    print(f"written to {path}; a run that is resumed keeps the libraries it began with")
