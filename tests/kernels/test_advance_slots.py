"""advance_slots: what a decode step makes of its draws, against a loop over the rows."""

from typing import Any

import pytest
import torch

from fastrl_kernels import SampledTokens, SlotBuffers, advance_slots
from fastrl_kernels.types import EOS, IDLE, LENGTH, NAN, RUNNING, STOP
from tests.kernels.launches import interpreted, watched

SLOTS, ROWS, COLUMNS = 45, 41, 7  # more rows than a program holds
ENDS = [5, 9]


def case(device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """Slots, a draw and values: rows that run, end in each way, have ended, and are idle."""
    generator = torch.Generator().manual_seed(0)

    def integers(high: int) -> torch.Tensor:
        return torch.randint(high, (ROWS,), generator=generator)

    reasons = torch.tensor([RUNNING, RUNNING, RUNNING, EOS, LENGTH, STOP, NAN, IDLE])
    count = integers(COLUMNS - 2)
    state = [
        integers(12), integers(99), count, count + 1 + integers(2), reasons[torch.arange(ROWS) % 8],
    ]  # fmt: skip
    tokens = torch.randint(99, (SLOTS, COLUMNS), generator=generator)
    numbers = torch.randn(4, SLOTS, COLUMNS, generator=generator)
    drawn = integers(12) - (integers(6) == 0) * 12
    draw = SampledTokens(drawn, *torch.randn(5, ROWS, generator=generator))
    slots = SlotBuffers(*(x.to(device) for x in (*state, tokens, numbers)))
    values = torch.randn(ROWS, generator=generator).to(device, dtype)
    return slots, SampledTokens(*(x.to(device) for x in draw)), values


def by_rows(slots: SlotBuffers, draw: SampledTokens, ends: list[int], values: Any) -> SlotBuffers:
    """The definition."""
    slots = SlotBuffers(*(x.clone() for x in slots))
    for i, reason in enumerate(slots.reason.tolist()):
        at, y = int(slots.num_generated[i]), int(draw.tokens[i])
        goes_on = reason == RUNNING and y >= 0
        if goes_on:
            slots.token[i] = y
        slots.tokens[i, at] = slots.token[i]
        fields = [draw.logprobs, draw.logprobs_t1, draw.entropies]
        for n, x in enumerate(fields + ([] if values is None else [values])):
            slots.per_token[n, i, at] = x[i]
        slots.num_generated[i] += goes_on
        slots.position[i] += goes_on
        if reason == RUNNING:
            full = int(slots.num_generated[i]) >= int(slots.limit[i])
            now = EOS if y in ends else LENGTH if full else RUNNING
            slots.reason[i] = now if goes_on else NAN
    return slots


@pytest.mark.parametrize("ends", [[], ENDS, [*ENDS, 0]], ids="{}".format)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_slots_are_those_of_a_loop_over_rows(backend, device, dtype, ends):
    slots, draw, values = case(device, dtype or torch.float32)
    values = None if dtype is None else values
    expected = by_rows(slots, draw, ends, values)
    reasons = set(expected.reason.tolist())
    assert reasons >= {RUNNING, EOS, LENGTH, STOP, NAN, IDLE}
    advance_slots(
        slots, draw, torch.tensor(ends, dtype=torch.long, device=device), values=values,
        backend=backend,
    )  # fmt: skip
    for name, found, right in zip(slots._fields, slots, expected, strict=True):
        assert torch.equal(found, right), name


@interpreted
def test_it_is_one_launch(device):
    (slots, draw, values), ends = case(device), torch.tensor(ENDS)
    with watched() as calls:
        advance_slots(slots, draw, ends, values=values, backend="triton")
    assert calls == ["_advance_slots_kernel"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"reason": torch.zeros(3, dtype=torch.long)}, "slots.reason is torch.int64"),
    ({"token": torch.zeros(ROWS)}, "slots.token is torch.float32"),
    ({"tokens": torch.zeros(2, 9, dtype=torch.long)}, "slots.tokens are torch.int64"),
    ({"per_token": torch.zeros(3, SLOTS, COLUMNS)}, r"they must be float32 \(4, 45, 7\)"),
])  # fmt: skip
def test_slots_of_another_shape_are_refused(changes, message):
    slots, draw, _ = case("cpu")
    with pytest.raises(ValueError, match=message):
        advance_slots(slots._replace(**changes), draw, torch.tensor(ENDS))


def test_draws_and_ends_of_another_shape_are_refused():
    slots, draw, values = case("cpu")
    for given, message in (
        ((draw._replace(tokens=draw.tokens[:3]), torch.tensor(ENDS)), "draw.tokens is torch.int64"),
        ((draw, torch.tensor(ENDS).float()), "ends are torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            advance_slots(slots, *given)
    with pytest.raises(TypeError, match="values must be"):
        advance_slots(slots, draw, torch.tensor(ENDS), values=values.long())
