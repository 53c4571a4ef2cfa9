"""The hardware's limit of a case: its least work by torch's own copy or matrix product, no more.

It takes turns with the implementations. The speed of a machine changes while it is measured, and a
share of a limit from another minute says little.
"""

from __future__ import annotations

import torch

from benchmarks.before.cases import Case, work
from benchmarks.before.timing import DTYPES, Call


def limit(case: Case, device: torch.device) -> Call:
    """The products of a head on the rows that count, else a copy of as many bytes."""
    least = work(case)
    return _products(case, device) if least.flops else _copy(least.bytes, device)


def _products(case: Case, device: torch.device) -> Call:
    rows = max(1, round(case.active * case.rows))
    count = round(
        work(case).flops / (2.0 * case.active * case.rows * case.vocabulary * case.hidden)
    )

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.5, dtype=DTYPES[case.dtype], device=device)

    hidden, weight = full(rows, case.hidden), full(case.vocabulary, case.hidden)
    logits = full(rows, case.vocabulary)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)
    trained = case.backward and case.head == "trained"
    products = [
        (logits, hidden, weight.t()),
        (dhidden, logits, weight),
        *([(dweight, logits.t(), hidden)] if trained else []),
    ]
    # The forward product is the one that comes again.
    order = [*products, *products[:1] * (count - len(products))] if case.backward else products[:1]
    assert len(order) == count

    def run() -> None:
        for out, a, b in order:
            torch.mm(a, b, out=out)

    return run


def _copy(nbytes: float, device: torch.device) -> Call:
    source = torch.ones(max(1, round(nbytes / 2)), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
