"""Matrix products by every library that torch reaches, and how fast each is on given shapes.

A machine's limit is what its fastest library computes: on CPUs torch's own product, `mm`, may go to
one that is slower than another in the same build.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.models import HYBRID, Model
from benchmarks.timing import DTYPES, copy_speed, now
from fastrl_kernels._cpu.native.build import why_not
from fastrl_kernels._cpu.native.calls import Panels, are_fp32

MM, ONEDNN, PACKED = "mm", "oneDNN", "oneDNN, prepacked"
PANELS = "fastrl's panels"

Call = Callable[[], object]


def without_bf16(device: torch.device) -> str | None:
    """Why bf16 is not measured on a device: a CPU that has no instructions for it is slower in it
    than in fp32. None where it is measured."""
    tests = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    if device.type != "cpu" or any(getattr(torch.cpu, name, bool)() for name in tests):
        return None
    return "this CPU has neither AVX512-BF16 nor AMX, which make bf16 worth measuring"


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


def of_model(model: Model, rows: int) -> list[Product]:
    """Those of a forward of some rows: of every layer's linear maps, and of the head."""
    width, keys, attended = model.width, model.kv_heads * model.head, model.heads * model.head
    down = [(model.intermediate, width)]
    if model.family == "gpt2":
        attention = [(width, 3 * width), (width, width)]
        feed = [(width, model.intermediate), *down]
    else:
        gated = 2 if model.family == HYBRID else 1
        attention = [(width, gated * attended), (width, keys), (width, keys), (attended, width)]
        feed = [*2 * [(width, model.intermediate)], *down]
    # Of queries, keys and values, a gate, two numbers for each head, and the way out.
    stateful = [(width, 3 * attended), (width, attended), *2 * [(width, 2 * model.heads)]]
    sizes = model.layers * feed + model.attending * attention
    sizes += (model.layers - model.attending) * [*stateful, (attended, width)]
    layers = [Product(rows, *size, count) for size, count in Counter(sizes).items()]
    return [*layers, Product(rows, width, model.vocabulary)]


def of_head(model: Model, rows: int) -> list[Product]:
    """The head's logits, and the gradients of its input and of its weight."""
    width, vocabulary = model.width, model.vocabulary
    return [
        Product(rows, width, vocabulary),
        Product(rows, vocabulary, width),
        Product(vocabulary, rows, width),
    ]


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


def panels(x: Tensor, weight: Tensor) -> Call:
    """fastrl's compiled code, on a copy of the weight in panels."""
    lacks = why_not() if are_fp32(x, weight) else "compiled code is for fp32"
    if lacks:
        raise RuntimeError(lacks)
    copy = Panels(weight)
    return lambda: copy.linear(x)


# (x [m, k], weight [n, k]) → the call of x·wᵀ
PROVIDERS = {MM: mm, ONEDNN: onednn, PACKED: packed, PANELS: panels}


def providers(
    dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Callable[..., Call]], dict[str, str]]:
    """Those that compute products of a dtype on a device; and of oneDNN's, which are for CPUs, why
    not."""
    found, absent = {MM: mm}, {}
    others = {name: make for name, make in PROVIDERS.items() if name != MM}
    for name, make in others.items() if device.type == "cpu" else ():
        if dtype == torch.float16:
            absent[name] = "few CPUs have its instructions"
            continue
        try:
            x = torch.ones(2, 16, dtype=dtype, device=device)
            make(x, x.repeat(8, 1))()
            found[name] = make
        except (RuntimeError, AttributeError) as error:  # another build of torch, or processor
            absent[name] = str(error).partition("\n")[0]
    return found, absent


def fastest(
    products: Iterable[Product], dtype: str, device: torch.device
) -> tuple[Call, list[dict[str, Any]]]:
    """A call that computes all products, each by the provider that is the fastest at its shape, and
    every provider's speed: [{"product", "dtype", "count", "flop/s": {provider: number}, "absent":
    {provider: why it has none}}].

    Operands lie as each provider wants them: what a copy costs that brings them there is not in it.
    """
    calls: list[tuple[Call, int]] = []
    roofs = []
    found, absent = providers(DTYPES[dtype], device)
    for product in products:
        x, weight = (
            torch.full((rows, product.k), 0.5, dtype=DTYPES[dtype], device=device)
            for rows in (product.m, product.n)
        )
        made = {name: make(x, weight) for name, make in found.items()}
        seconds = {name: best_of_few(call, device) for name, call in made.items()}
        calls.append((made[min(seconds, key=seconds.__getitem__)], product.count))
        speeds = {name: product.flops / taken for name, taken in seconds.items()}
        described = {"product": str(product), "dtype": dtype, "count": product.count}
        roofs.append({**described, "flop/s": speeds, "absent": absent})

    def run() -> None:
        for call, count in calls:
            for _ in range(count):
                call()

    return run, roofs


def roofs(products: Iterable[Product], dtype: str, device: torch.device) -> list[dict[str, Any]]:
    """Every provider's speed, as `fastest` gives it; none on GPUs, where there is one provider."""
    return fastest(products, dtype, device)[1] if device.type == "cpu" else []


def roofline(device: torch.device) -> dict[str, Any]:
    """{"copy": bytes per second, "gemm": {dtype: {provider: flops per second}}}, measured now."""
    gemm = {}
    for dtype in DTYPES:
        # CPUs without instructions for half precision take seconds for small products.
        n = 8192 if device.type == "cuda" else (1024 if dtype == "fp32" else 512)
        (found,) = fastest([Product(n, n, n)], dtype, device)[1]
        gemm[dtype] = found["flop/s"]
    return {"copy": copy_speed(device), "gemm": gemm}


def best_of_few(call: Call, device: torch.device, within: float = 0.5) -> float:
    """The seconds of the fastest of some calls, after one that is not counted."""
    found: list[float] = []
    while len(found) < 3 or (sum(found) < within and len(found) < 50):
        began = now(device)
        call()
        found.append(now(device) - began)
    return min(found[1:])
