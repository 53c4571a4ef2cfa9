"""Measures the libraries of matrix products on the CPU, for a table that later processes read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from . import gemm
from ._cpu.fp32_copies import keeping

_WIDTHS = (32, 64, 128, 256, 512, 1024, 2048)  # weights are squares of these
_ROWS = (16, 256)  # rows of a decode step, and of a mini-batch
_FASTER = 1.1  # than the rule's, which is kept otherwise
_SECONDS = 0.05  # for each library, width and number of rows


class Measured(NamedTuple):
    """A dtype's speeds, GFLOP/s by width and library, and the choice that follows from them."""

    dtype: str
    speeds: dict[int, dict[str, float]]
    choice: gemm.Choice


def measure(dtypes: Iterable[str] = tuple(gemm.LIBRARIES)) -> list[Measured]:
    """Measures forward and backward products of every library that can be used, in turns."""
    measured, rule = [], gemm.by_rule()
    for dtype in dtypes:
        usable = {
            name: library
            for name, library in gemm.LIBRARIES[dtype].items()
            if library.absent() is None and gemm.inexact(dtype, name) is None
        }
        speeds = {width: _speeds(dtype, width, usable) for width in _WIDTHS}
        measured.append(Measured(dtype, speeds, chosen(speeds, rule[dtype])))
    return measured


def chosen(speeds: dict[int, dict[str, float]], rule: gemm.Choice) -> gemm.Choice:
    """The fastest library for the largest weights, and from how many elements on it is fastest; the
    rule's, whose bits more machines have, where none is faster by a tenth."""
    widths = sorted(speeds)
    largest = speeds[widths[-1]]
    best = max(largest, key=largest.__getitem__)
    if largest[best] < _FASTER * largest.get(rule.library, 0.0):
        return rule
    smallest = widths[-1]
    for width in reversed(widths):
        if speeds[width][best] < max(speeds[width].values()):
            break
        smallest = width
    return gemm.MM if best == "mm" else gemm.Choice(best, smallest**2)


def _speeds(dtype: str, width: int, libraries: dict[str, type[gemm.Library]]) -> dict[str, float]:
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)  # not the run's
    weight = torch.randn(width, width, generator=generator).to(kind)
    seconds: dict[str, float] = dict.fromkeys(libraries, 0.0)
    for rows in _ROWS:
        x = torch.randn(rows, width, generator=generator).to(kind)
        works = {name: _products(library, x, weight) for name, library in libraries.items()}
        for name, shortest in _shortest(works).items():
            seconds[name] += shortest / rows
    flops = 3 * 2 * width**2 * len(_ROWS)
    return {name: flops / each / 1e9 for name, each in seconds.items()}


def _products(library: type[gemm.Library], x: Tensor, weight: Tensor) -> Callable[[], None]:
    """A function that computes a fused head's products: logits, gradients of weight and input."""
    logits = torch.empty(len(x), len(weight))
    by_weight, by_input = torch.empty_like(weight), torch.zeros(x.shape)

    def work() -> None:
        with keeping([weight]):  # copies of the weight live for a step, here of one mini-batch
            library.multiply(logits, x, weight, None)
            library.product(by_weight, logits.t(), x)
            library.add_product_(by_input, logits, weight)

    return work


def _shortest(works: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Each function's shortest time in seconds, which other load on the machine lengthens least."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in _for_seconds(_SECONDS * len(works)):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - begin)
    return {name: min(each) for name, each in times.items()}


def _for_seconds(seconds: float) -> Iterator[None]:
    end = time.perf_counter() + seconds
    yield
    while time.perf_counter() < end:
        yield
