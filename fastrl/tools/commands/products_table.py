"""Speeds of the libraries of matrix products, and choices among them, as text."""

from __future__ import annotations

import math

from fastrl_kernels import gemm
from fastrl_kernels.measure_products import Measured


def table(measured: list[Measured]) -> str:
    """The speeds as text."""
    lines = [f"products on {gemm.processor()}, GFLOP/s forward and backward"]
    for dtype, speeds, choice in measured:
        names = list(next(iter(speeds.values())))
        lines.append(f"  {dtype:<10}{'weight':>12}" + "".join(f"{name:>10}" for name in names))
        lines += [
            f"  {'':<10}{f'{width}×{width}':>12}"
            + "".join(f"{_rounded(speed[name]):>10}" for name in names)
            for width, speed in speeds.items()
        ]
        lines.append(f"    {describe(choice)}")
    return "\n".join(lines)


def describe(choice: gemm.Choice) -> str:
    """A choice in words."""
    if choice.library == "fp32":
        copies = "fp32, with copies of the weights while a half of the memory has room for them"
        return f"{copies}; mm below {choice.fewest} elements" if choice.fewest else copies
    if not choice.fewest or choice.library == "mm":
        return choice.library
    return f"{choice.library}; mm for weights below {choice.fewest} elements"


def _rounded(x: float) -> str:
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"
