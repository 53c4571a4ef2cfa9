"""The limit does the stated work: no more, no less."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.before.cases import Case, available, grid, work
from benchmarks.before.limit import limit

CPU = torch.device("cpu")
HEADS = [
    Case("linear_logprobs", 20, hidden=8, vocabulary=50),
    Case("linear_logprobs", 20, hidden=8, vocabulary=50, backward=False),
    Case("linear_logprobs", 20, hidden=8, vocabulary=50, head="frozen"),
    Case("linear_ppo_loss", 20, hidden=8, vocabulary=50),
    Case("linear_ppo_loss", 20, hidden=8, vocabulary=50, active=0.5),
    Case("linear_ppo_loss", 20, "bf16", hidden=8, vocabulary=50, head="frozen"),
]


@pytest.mark.parametrize("case", HEADS, ids=lambda case: f"{case.op} {case.label}")
def test_the_products_of_a_head_are_as_many_flops_as_stated(case):
    run = limit(case, CPU)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == work(case).flops


class Copied(TorchDispatchMode):
    """Bytes that copies read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.copy_.default
        self.bytes += args[0].nbytes + args[1].nbytes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", [op for op in available() if not op.startswith("linear")])
def test_other_ops_move_as_many_bytes_as_stated(op):
    case = grid(op, "cpu")[0]
    case = dataclasses.replace(case, rows=6, steps=min(case.steps, 10), active=1.0)
    run = limit(case, CPU)
    with Copied() as copied:
        run()
    assert abs(copied.bytes - work(case).bytes) <= 1
