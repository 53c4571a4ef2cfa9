"""Matrix products by every library that torch reaches, and how fast each is on given shapes.

A machine's limit is what its fastest library computes: on CPUs torch's own product, `mm`, may go to
one that is slower than another in the same build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import DTYPES, now

MM, ONEDNN, PACKED = "mm", "oneDNN", "oneDNN, prepacked"

Call = Callable[[], object]


class Product(NamedTuple):
    """Some products [m, k] · [k, n], equal in size."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Of one of them."""
        return 2.0 * self.m * self.k * self.n

    def __str__(self) -> str:
        """`192×256 · 256×50257`."""
        return f"{self.m}×{self.k} · {self.k}×{self.n}"


def mm(x: Tensor, weight: Tensor) -> Call:
    """torch's own; in fp32 on x86 MKL's."""
    out = x.new_empty(len(x), len(weight))
    return lambda: torch.mm(x, weight.t(), out=out)


def onednn(x: Tensor, weight: Tensor) -> Call:
    """oneDNN's; the weight lies as `nn.Linear` has it."""
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda: linear(x, weight, None, "none", [], "")


def packed(x: Tensor, weight: Tensor) -> Call:
    """oneDNN's, on a weight that lies as oneDNN wants it for this many rows."""
    return onednn(x, torch.ops.mkldnn._reorder_linear_weight(weight, len(x)))


PROVIDERS = {MM: mm, ONEDNN: onednn, PACKED: packed}  # (x [m, k], weight [n, k]) → the call of x·wᵀ


def providers(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[..., Call]]:
    """Those that compute products of a dtype on a device."""
    found = {}
    for name, make in PROVIDERS.items():
        if device.type != "cpu" and make is not mm:
            continue
        if dtype == torch.float16 and make is not mm:  # few CPUs have its instructions
            continue
        try:
            x = torch.ones(2, 16, dtype=dtype, device=device)
            make(x, x.repeat(8, 1))()
        except (RuntimeError, NotImplementedError, AttributeError):
            continue  # another build of torch
        found[name] = make
    return found


def fastest(
    products: Iterable[Product], dtype: str, device: torch.device
) -> tuple[Call, list[dict[str, Any]]]:
    """A call that computes all products, each by the provider that is the fastest at its shape, and
    every provider's speed: [{"product", "dtype", "count", "flop/s": {provider: number}}].

    Operands lie as each provider wants them: what a copy costs that brings them there is not in it.
    """
    calls: list[tuple[Call, int]] = []
    roofs = []
    for product in products:
        x, weight = (
            torch.full((rows, product.k), 0.5, dtype=DTYPES[dtype], device=device)
            for rows in (product.m, product.n)
        )
        made = {name: make(x, weight) for name, make in providers(x.dtype, device).items()}
        seconds = {name: best_of_few(call, device) for name, call in made.items()}
        calls.append((made[min(seconds, key=seconds.__getitem__)], product.count))
        speeds = {name: product.flops / taken for name, taken in seconds.items()}
        described = {"product": str(product), "dtype": dtype, "count": product.count}
        roofs.append({**described, "flop/s": speeds})

    def run() -> None:
        for call, count in calls:
            for _ in range(count):
                call()

    return run, roofs


def best_of_few(call: Call, device: torch.device, within: float = 0.5) -> float:
    """The seconds of the fastest of some calls, after one that is not counted."""
    found: list[float] = []
    while len(found) < 3 or (sum(found) < within and len(found) < 50):
        began = now(device)
        call()
        found.append(now(device) - began)
    return min(found[1:])
