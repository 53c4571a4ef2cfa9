"""The records of ops: least work, shapes, gate, peers."""

import dataclasses
import math

import pytest
import torch

from benchmarks import gate, ops, peers, test_ops, timing
from benchmarks.cases import EAGER, OURS, Case
from benchmarks.gate import backward, error_ratio, errors
from benchmarks.harness import Measurement, Red, Run
from benchmarks.memory import footprint
from benchmarks.ops import Attention, Shape, inputs
from benchmarks.shapes import DIFFERENTIABLE

CPU = torch.device("cpu")
OPS = ops.available()
TINY = {
    "token_logprobs": {"vocabulary": 50, "entropy": "gradient", "active": 0.5},
    "linear_logprobs": {"vocabulary": 50, "hidden": 8, "entropy": "gradient", "active": 0.5},
    "linear_kl_loss": {"vocabulary": 50, "hidden": 8, "teacher": 12, "beta": 0.5, "active": 0.5},
    "linear_ppo_loss": {"vocabulary": 50, "hidden": 8, "entropy": "metric", "active": 0.5},
    "full_kl": {"vocabulary": 50},
    "kl_rewards": {"steps": 9, "active": 0.7},
    "gae": {"steps": 9, "active": 0.7, "whiten": True},
    "ppo_loss": {"steps": 9, "active": 0.7},
    "whiten": {"steps": 9, "active": 0.7},
    "linear_sample": {"hidden": 16, "vocabulary": 40},
    "sample_tokens": {"vocabulary": 50, "sampling": "top-k=50 top-p=0.9"},
    "rms_norm": {"steps": 9},
    "swiglu": {"steps": 9},
    "decode_attention": {
        "steps": 9,
        "active": 0.5,
        "attention": Attention(6, 2, 8, window=5, softcap=2.0),
    },
}


def tiny(op: str) -> Shape:
    return Shape(op, 6, backward=op in DIFFERENTIABLE, **TINY[op])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
def test_main_cases_come_first_and_none_is_repeated(op: str, device: str) -> None:
    some, every = ops.cases(op, device), ops.cases(op, device, full=True)
    assert some == every[: len(some)]
    assert [case.main for case in every] == [True] * len(some) + [False] * (len(every) - len(some))
    labels = [case.label for case in every]
    assert len(labels) == len(set(labels))
    if op == "linear_logprobs":
        assert set(inputs.HEADS) <= {(case.of.hidden, case.of.vocabulary) for case in every}


def test_least_work_by_hand() -> None:
    work = ops.work
    logits = Shape("token_logprobs", 10, "bf16", vocabulary=100, active=0.5)
    assert work(logits).bytes == 2 * 1000 + 2000  # half of them read twice, all written
    assert work(dataclasses.replace(logits, backward=False)).bytes == 1000
    assert work(Shape("full_kl", 10, "bf16", vocabulary=100)).bytes == 10 * 1000
    head = Shape("linear_logprobs", 10, hidden=7, vocabulary=100)
    assert work(head).flops == 8 * 7000
    assert work(dataclasses.replace(head, head="frozen")).flops == 6 * 7000
    assert work(dataclasses.replace(head, backward=False)).flops == 2 * 7000
    assert work(dataclasses.replace(head, op="linear_ppo_loss")).flops == 6 * 7000
    assert work(Shape("gae", 4, steps=5, whiten=True)).bytes == 21 * 20
    layer = Attention(6, 2, 8)
    decode = Shape("decode_attention", 4, "bf16", steps=10, active=0.5, attention=layer)
    assert work(decode).bytes == (1 + 4 + 7 + 10) * 32 * 2  # of live tokens alone
    narrow = dataclasses.replace(decode, attention=dataclasses.replace(layer, window=5))
    assert work(narrow).bytes == (1 + 4 + 5 + 5) * 32 * 2


def test_what_is_live_is_what_counts_as_work() -> None:
    shape = dataclasses.replace(tiny("decode_attention"), rows=9, steps=40)
    shape = dataclasses.replace(shape, attention=Attention(4, 2, 8, window=11))
    given = ops.problem(shape, "cpu").inputs
    ends = given["lengths"].tolist()
    assert {1, 40} <= set(ends)
    for end, live in zip(ends, given["mask"], strict=True):
        assert live.nonzero().flatten().tolist() == list(range(max(0, end - 11), end))
    assert ops.work(shape).bytes == int(given["mask"].sum()) * 2 * 2 * 8 * 4


HEADS = [
    {}, {"backward": False}, {"head": "frozen"}, {"op": "linear_ppo_loss", "active": 0.5},
    {"op": "linear_ppo_loss", "dtype": "bf16", "head": "frozen"},
]  # fmt: skip


@pytest.mark.parametrize("fields", HEADS, ids=str)
def test_the_limit_of_a_head_is_as_many_flops_as_stated(fields: dict) -> None:
    shape = dataclasses.replace(Shape("linear_logprobs", 20, hidden=8, vocabulary=50), **fields)
    found = ops.least_products(shape)
    assert sum(one.flops * one.count for one in found) == ops.work(shape).flops


@pytest.mark.parametrize("op", OPS)
def test_ours_eager_and_exact_are_of_the_same_thing_and_what_is_wrong_fails(op: str) -> None:
    problem = ops.problem(tiny(op), "cpu")
    found = {OURS: problem.results(problem.ours), EAGER: problem.results(problem.eager)}
    judged = errors(problem, found)
    assert judged[OURS].keys() == found[OURS].keys() - set(problem.given)
    assert error_ratio(judged[OURS], judged[EAGER]) <= gate.FACTOR
    in_blocks = errors(problem, found, block_bytes=2 * problem.row_bytes)
    for name, error in judged[OURS].items():
        again = in_blocks[OURS][name]
        assert again.error == pytest.approx(error.error, rel=1e-6, abs=1e-12)
        assert again.norm == pytest.approx(error.norm, rel=1e-9)
        result = found[OURS][name]
        for wrong in (result * 1.001 + 1e-4, torch.full_like(result, torch.nan)):
            mine = errors(problem, {OURS: found[OURS] | {name: wrong}})[OURS]
            assert not error_ratio(mine, judged[EAGER]) <= gate.FACTOR, f"{name} may be wrong"


SMALL = Shape("token_logprobs", 8, vocabulary=40, entropy="metric")


def a_measurement(shape: Shape, peers: bool = False) -> Measurement:
    run = Run(CPU, rounds=1, peers=peers)
    return Measurement(run, Case("ops", shape.op, shape.label, of=shape))


def test_sides_hold_all_that_a_claim_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that agree and compute less, that are off, that fail, that are absent or broken."""

    def less(logits, labels):
        return ops.logits.eager.token_logprobs(logits, labels)

    def off(logits, labels):
        return {"logprobs": less(logits, labels)["logprobs"] * 1.1}

    def fails(logits, labels):
        raise RuntimeError("no such shape\nand more")

    def missing(shape, device):
        raise ModuleNotFoundError("No module named 'lib'")

    makers = {name: lambda *_, call=call: peers.Peer(call, "no entropy")
              for name, call in {"less": less, "off": off, "fails": fails}.items()}  # fmt: skip
    makers |= {"missing": missing, "broken": fails}
    record = dataclasses.replace(ops.OPS[SMALL.op], peers=makers, torch_compile=False)
    monkeypatch.setitem(ops.OPS, SMALL.op, record)
    measurement = a_measurement(SMALL, peers=True)
    sides = test_ops.sides_of(measurement, SMALL)
    assert set(sides) == {OURS, EAGER, "less"}
    assert all(side.memory["peak"] > 0 and side.facts["error"] <= 2.5 for side in sides.values())
    assert sides["less"].note == "no entropy"
    absent = measurement.entry["absent"]
    assert absent.pop("off").startswith("its results are off, relative error")
    assert absent == {
        "fails": "RuntimeError: no such shape",
        "broken": "RuntimeError: no such shape",
        "missing": "not installed (No module named 'lib')",
    }
    assert measurement.entry["work"]["bytes"] == 3 * 8 * 40 * 4


def test_memory_that_an_op_keeps_for_its_next_call_is_counted() -> None:
    shape = Shape("linear_logprobs", 64, hidden=4, vocabulary=800)
    counted = test_ops.sides_of(a_measurement(shape), shape)[OURS].memory["peak"]
    problem = ops.problem(shape, CPU)
    problem.results(problem.ours)
    again = footprint(lambda: problem.forward(problem.ours), lambda s: backward(s).values(), CPU)
    assert counted >= again + 64 * 800 * 4, "a chunk of logits"


@pytest.mark.parametrize("factor", [1.00001, math.nan])
def test_an_op_that_is_off_has_no_figures(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ops.problem(SMALL, CPU)

    def wrong(**inputs):
        return {name: x * factor for name, x in problem.ours(**inputs).items()}

    changed = dataclasses.replace(problem, ours=wrong)
    monkeypatch.setattr(ops, "problem", lambda *_, **__: changed)
    monkeypatch.setattr(timing, "timed", lambda *_: pytest.fail("timed"))
    with pytest.raises(Red, match="times eager PyTorch's"):
        test_ops.sides_of(a_measurement(SMALL), SMALL)
    assert "times eager PyTorch's" in test_ops.exact(SMALL, CPU)


@pytest.mark.parametrize("op", OPS)
def test_every_peer_is_found_or_absent_with_a_reason_and_computes_the_same(op: str) -> None:
    shape = dataclasses.replace(tiny(op), entropy="metric" if "entropy" in TINY[op] else "off")
    if shape.attention:
        shape = dataclasses.replace(shape, attention=Attention(6, 2, 8, window=5))
    makers = ops.OPS[op].peers
    found, absent = peers.peers_of(makers, shape, CPU)
    assert sorted([*found, *absent]) == sorted(makers)
    assert all(absent.values())
    problem = ops.problem(shape, CPU)
    for name, peer in found.items():
        judged = errors(problem, {name: problem.results(peer.call)})[name]
        assert gate.worst_relative(judged) <= peers.TOLERANCES["fp32"], name


def test_a_check_that_fails_or_raises_keeps_an_op_from_being_timed(monkeypatch) -> None:
    def fails(shape, device) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(test_ops, "exact", lambda shape, device: "it is off")
    monkeypatch.setattr(test_ops, "waits_for_nothing", fails)
    run = Run(CPU)
    with pytest.raises(AssertionError, match="RuntimeError: illegal memory access"):
        test_ops.test_kernels("gae", run)
    assert {gate["wrong"] is None for gate in run.results["ops"]["gates"]} == {False}
    assert run.obstacle(Case("ops", "gae", "small")) == "a check of the op is red"
    assert run.obstacle(Case("ops", "whiten", "small")) is None
