"""Weights in bf16 or fp16 with float32 masters move as weights in float32 do."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fastrl.models import master_weights
from fastrl.models.master_weights import MASTER, MasterWeights, with_master_weights
from fastrl.models.optimizers import keep_state, make_optimizer

Make = Callable[[list[Any]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "adam": lambda w: torch.optim.Adam(w, lr=1e-6, fused=True),
    "adamw": lambda w: torch.optim.AdamW(w, lr=1e-6, weight_decay=0.1),
    "sgd": lambda w: torch.optim.SGD(w, lr=1e-5, momentum=0.9),
    "adafactor": lambda w: make_optimizer(nn.ParameterList(w), "adafactor", learning_rate=1e-6),
    "adagrad": lambda w: torch.optim.Adagrad(w, lr=1e-6),
}
SHAPES = ((40, 30), (30,), (7, 50))


def make_weights(dtype: torch.dtype, of: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """Weights that ``of`` has exactly, in another dtype."""
    torch.manual_seed(0)
    return [nn.Parameter((torch.randn(shape) * 0.02).to(of).to(dtype)) for shape in SHAPES]


def step(optimizer: Any, weights: list[Any], number: int, dtype: torch.dtype) -> None:
    """One step along a gradient that bf16 and fp16 have exactly, and which is the same for all."""
    torch.manual_seed(number + 1)
    for weight in weights:
        weight.grad = torch.randn(weight.shape).to(dtype).to(weight.dtype)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_are_what_float32_weights_would_be(kind: str, dtype: torch.dtype) -> None:
    exact, low = make_weights(torch.float32, dtype), make_weights(dtype, dtype)
    of_exact, of_low = KINDS[kind](exact), MasterWeights(KINDS[kind](low))
    for number in range(32):
        step(of_exact, exact, number, dtype)
        step(of_low, low, number, dtype)
    for weight, want in zip(low, exact, strict=True):
        assert torch.equal(of_low.state[weight][MASTER], want.detach())
        assert torch.equal(weight.detach(), want.detach().to(dtype))


def test_without_masters_most_small_steps_are_lost() -> None:
    moved = []
    start = make_weights(torch.bfloat16)
    for wrap in (lambda x: x, with_master_weights):
        weights = make_weights(torch.bfloat16)
        optimizer = wrap(KINDS["adam"](weights))
        for number in range(32):
            step(optimizer, weights, number, torch.bfloat16)
        moved.append(sum(int((a != b).sum()) for a, b in zip(weights, start, strict=True)))
    assert moved[0] < moved[1] / 3


def test_a_step_in_parts_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1 << 26, 40):
        monkeypatch.setattr(master_weights, "_PART", most)
        weights = make_weights(torch.bfloat16)
        weights.append(nn.Parameter(torch.ones(9)))  # float32: stepped itself
        weights.append(nn.Parameter(torch.ones(9, dtype=torch.bfloat16)))  # without a gradient
        optimizer = MasterWeights(KINDS["adam"](weights))
        for number in range(3):
            step(optimizer, weights[:-1], number, torch.bfloat16)
        found.append(weights)
        assert weights[-2] not in optimizer._masters
        assert torch.equal(weights[-1].detach(), torch.ones(9, dtype=torch.bfloat16))
        assert float(optimizer.state[weights[-2]]["step"]) == 3
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_saved_goes_on_bit_for_bit(on_host: bool) -> None:
    weights = make_weights(torch.bfloat16)
    optimizer = MasterWeights(KINDS["adam"](weights), on_host)
    for number in range(3):
        step(optimizer, weights, number, torch.bfloat16)
    saved = copy.deepcopy((optimizer.state_dict(), weights))
    others = saved[1]
    other = MasterWeights(KINDS["adam"](others), on_host)
    other.load_state_dict(saved[0])
    for number in range(3, 40):
        step(optimizer, weights, number, torch.bfloat16)
        step(other, others, number, torch.bfloat16)
    for one, two in zip(weights, others, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one][MASTER], other.state[two][MASTER])
        assert other.state[two]["exp_avg"].dtype == torch.float32


def test_a_state_without_masters_begins_them() -> None:
    weights = make_weights(torch.bfloat16)
    plain = KINDS["adam"](weights)
    step(plain, weights, 0, torch.bfloat16)
    optimizer = MasterWeights(KINDS["adam"](weights))
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    for weight in weights:
        kept = optimizer.state[weight]
        assert torch.equal(kept[MASTER], weight.detach().float())
        assert kept["exp_avg"].dtype == torch.float32
    step(optimizer, weights, 1, torch.bfloat16)
    # And one that has already stepped is taken over.
    step(plain := KINDS["adam"](weights), weights, 2, torch.bfloat16)
    step(MasterWeights(plain), weights, 3, torch.bfloat16)


@pytest.mark.parametrize("most", [1 << 26, 70])
def test_masters_follow_weights_that_were_written(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight that was written they keep what is below its precision where it is the same."""
    monkeypatch.setattr(master_weights, "_PART", most)
    weights = make_weights(torch.bfloat16)
    optimizer = MasterWeights(KINDS["adam"](weights))
    step(optimizer, weights, 0, torch.bfloat16)
    before = [optimizer.state[w][MASTER].clone() for w in weights]
    with torch.no_grad():
        weights[0][3] = 7.0
    saved = optimizer.state_dict()["state"]
    assert (saved[0][MASTER][3] == 7).all()
    same = torch.arange(40) != 3
    assert torch.equal(saved[0][MASTER][same], before[0][same])
    assert torch.equal(saved[1][MASTER], before[1])
    with torch.no_grad():
        weights[1].fill_(3.0)
    step(optimizer, weights, 1, torch.bfloat16)
    assert (weights[0][3] == 7).all()
    assert (weights[1] == 3).all()


@pytest.mark.parametrize("on_host", [False, True])
def test_masters_follow_weights_that_were_written_through_data(on_host: bool) -> None:
    weights = make_weights(torch.bfloat16)
    optimizer = MasterWeights(KINDS["adam"](weights), on_host)
    step(optimizer, weights, 0, torch.bfloat16)
    weights[0].data.fill_(7.0)
    weights[1].data = torch.full_like(weights[1].data, 5.0)
    before = optimizer.state[weights[2]][MASTER].clone()
    state = optimizer.state_dict()["state"]
    assert torch.equal(state[2][MASTER], before)
    step(optimizer, weights, 1, torch.bfloat16)
    assert (weights[0] == 7).all()
    assert (weights[1] == 5).all()


def test_a_copy_goes_on_by_itself_and_leaves_others_alone() -> None:
    weights = make_weights(torch.bfloat16)
    optimizer = MasterWeights(KINDS["adam"](weights))
    step(optimizer, weights, 0, torch.bfloat16)
    others, other = copy.deepcopy((weights, optimizer))
    for number in range(1, 30):
        step(optimizer, weights, number, torch.bfloat16)
        step(other, others, number, torch.bfloat16)
    for one, two in zip(weights, others, strict=True):
        assert one is not two
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one][MASTER], other.state[two][MASTER])


def test_hooks_of_states_are_the_inner_optimizers() -> None:
    weights = make_weights(torch.bfloat16)
    optimizer = MasterWeights(KINDS["adam"](weights))
    step(optimizer, weights, 0, torch.bfloat16)
    called = []
    for name in (
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    ):
        register = getattr(optimizer, f"register_{name}_hook")
        register(lambda *_, name=name: called.append(name))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == [
        "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"
    ]  # fmt: skip


def test_schedules_and_hooks_reach_the_inner_optimizer() -> None:
    for wrapped in (False, True):
        weights = make_weights(torch.bfloat16)
        inner = KINDS["adam"](weights)
        optimizer = MasterWeights(inner)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer if wrapped else inner, lambda n: n)
        steps: list[int] = []
        optimizer.register_step_pre_hook(lambda *_, to=steps: to.append(1))
        step(optimizer, weights, 0, torch.bfloat16)  # with a learning rate of 0
        start = make_weights(torch.bfloat16)
        assert all(map(torch.equal, weights, start))
        schedule.step()
        step(optimizer, weights, 1, torch.bfloat16)
        moved = [
            optimizer.state[w][MASTER] - s.float() for w, s in zip(weights, start, strict=True)
        ]
        assert all(x.abs().max() > 5e-7 for x in moved)
        assert len(steps) == 2


def test_masters_in_host_memory_are_those_of_all_weights() -> None:
    exact = make_weights(torch.float32)
    low = copy.deepcopy(exact)
    of_exact, of_low = KINDS["adamw"](exact), MasterWeights(KINDS["adamw"](low), on_host=True)
    for number in range(3):
        step(of_exact, exact, number, torch.bfloat16)
        step(of_low, low, number, torch.bfloat16)
    assert all(map(torch.equal, exact, low))
    assert {of_low.state[w][MASTER].device.type for w in low} == {"cpu"}
    assert all(of_low.state[w][MASTER].data_ptr() != w.data_ptr() for w in low)


def test_what_handles_its_rounding_is_left_alone() -> None:
    weights = make_weights(torch.bfloat16)
    own = KINDS["sgd"](weights)
    own.bf16_stochastic_round = True  # type: ignore[attr-defined]
    assert with_master_weights(own) is own
    float32 = KINDS["sgd"](make_weights(torch.float32))
    assert with_master_weights(float32) is float32
    wrapped = with_master_weights(KINDS["sgd"](weights))
    assert isinstance(wrapped, MasterWeights)
    assert with_master_weights(wrapped) is wrapped
    plain = KINDS["sgd"](weights)
    cpu = torch.device("cpu")
    assert keep_state(plain, master_weights=False, on_host=False, device=cpu) is plain
