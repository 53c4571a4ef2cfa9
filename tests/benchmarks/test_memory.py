"""What a call's footprint counts, by hand and on real calls."""

from __future__ import annotations

import pytest
import torch

from benchmarks.before.memory import Footprint, footprint, replay

CPU = torch.device("cpu")
A, B, C = 1000, 2000, 3000


@pytest.mark.parametrize(
    ("events", "returned", "expected"),
    [
        ([(A, 8), (A, -8), (B, 6), (B, -6)], set(), Footprint(8, 14, 8)),
        ([(A, 8), (B, 6), (A, -8), (B, -6)], set(), Footprint(14, 14, 8)),
        # What is returned is not held against the call, wherever in it it was made ...
        ([(A, 8), (B, 6), (B, -6)], {A}, Footprint(6, 14, 8)),
        # ... but what lay at its address before is.
        ([(A, 8), (A, -8), (A, 6)], {A}, Footprint(8, 14, 8)),
        # Released, though made before the call: not this call's.
        ([(C, -100), (A, 8), (A, -8)], set(), Footprint(8, 8, 8)),
    ],
    ids=["in turns", "at a time", "returned", "address used again", "made before"],
)
def test_allocations_are_replayed(events, returned, expected):
    assert replay(events, returned) == expected


def test_a_chain_of_operations_is_counted_to_the_byte():
    x = torch.ones(1000)  # 4000 bytes, not counted

    def forward():
        return (x + x).exp()  # both live when exp is worked out

    assert footprint(forward, lambda y: [y], CPU) == Footprint(4000, 8000, 4000)


def test_a_copy_that_an_operator_makes_inside_is_seen():
    x = torch.ones(50, 40)

    def forward():
        return torch.log_softmax(x.t(), -1)

    inside = footprint(forward, lambda y: [y], CPU)
    assert inside.largest == x.nbytes
    assert inside.peak >= x.nbytes, "the contiguous copy of x"


def test_gradients_that_are_returned_are_not_counted():
    w = torch.ones(1000, requires_grad=True)
    room = footprint(lambda: (w * 2).sum(), lambda loss: torch.autograd.grad(loss, w), CPU)
    assert room.allocated >= 8000
    assert room.peak < 8000 + 100
