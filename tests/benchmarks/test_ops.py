"""The records of ops: least work, shapes, peers; checks in the interpreter, which can all fail."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import harness, ops, peers, test_ops
from benchmarks.harness import EAGER, OURS, Case, Measurement, Red, Run, error_ratio, errors
from benchmarks.ops import Attention, Shape
from tests.kernels.conftest import (  # noqa: F401 - fixtures
    _quiet_interpreter,
    interpreter_rounds_to_nearest,
    interpreter_scans_by_doubling,
)

CPU = torch.device("cpu")
OPS = ops.available()
TINY = {
    "token_logprobs": {"vocabulary": 50, "entropy": "gradient", "active": 0.5},
    "linear_logprobs": {"vocabulary": 50, "hidden": 8, "entropy": "gradient", "active": 0.5},
    "linear_ppo_loss": {"vocabulary": 50, "hidden": 8, "entropy": "metric", "active": 0.5},
    "full_kl": {"vocabulary": 50},
    "kl_rewards": {"steps": 9, "active": 0.7},
    "gae": {"steps": 9, "active": 0.7, "whiten": True},
    "ppo_loss": {"steps": 9, "active": 0.7},
    "whiten": {"steps": 9, "active": 0.7},
    "sample_tokens": {"vocabulary": 50},
    "decode_attention": {
        "steps": 9,
        "active": 0.5,
        "attention": Attention(6, 2, 8, window=5, softcap=2.0),
    },
}


def tiny(op: str) -> Shape:
    return Shape(op, 6, backward=op in ops.DIFFERENTIABLE, **TINY[op])


# --- the records ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
def test_main_cases_come_first_and_none_is_repeated(op: str, device: str) -> None:
    some, every = ops.cases(op, device), ops.cases(op, device, full=True)
    assert some == every[: len(some)]
    assert [case.main for case in every] == [True] * len(some) + [False] * (len(every) - len(some))
    labels = [case.label for case in every]
    assert len(labels) == len(set(labels))


def test_the_full_grid_holds_the_shapes_of_real_models() -> None:
    found = [case.of for case in ops.cases("linear_logprobs", "cuda", full=True)]
    assert set(ops.HEADS) <= {(shape.hidden, shape.vocabulary) for shape in found}
    for axis, values in (("rows", ops.ROWS), ("active", ops.ACTIVE), ("head", ("frozen",))):
        assert set(values) <= {getattr(shape, axis) for shape in found}
    decodes = [case.of for case in ops.cases("decode_attention", "cpu", full=True)]
    assert set(ops.DECODES) == {(s.attention, s.rows, s.steps) for s in decodes}


def test_a_shape_survives_json() -> None:
    for op in OPS:
        assert Shape.read(dataclasses.asdict(tiny(op))) == tiny(op)


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


@pytest.mark.parametrize("slots", [1, 2, 7, 256])
@pytest.mark.parametrize("active", [0.5, 0.75, 1.0])
def test_lengths_are_ragged_and_reach_both_ends(slots: int, active: float) -> None:
    lengths = ops.ragged_lengths(slots, 512, active)
    assert (len(lengths), max(lengths)) == (slots, 512)
    if slots > 1:
        assert min(lengths) == max(1, (2 * active - 1) * 512)
        assert sum(lengths) / slots == pytest.approx(active * 512, abs=1)
    if slots > 2 and active < 1:
        assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def test_what_is_live_is_what_counts_as_work() -> None:
    shape = dataclasses.replace(tiny("decode_attention"), rows=9, steps=40)
    shape = dataclasses.replace(shape, attention=Attention(4, 2, 8, window=11))
    inputs = ops.problem(shape, "cpu").inputs
    ends = inputs["lengths"].tolist()
    assert {1, 40} <= set(ends)
    for end, live in zip(ends, inputs["mask"], strict=True):
        assert live.nonzero().flatten().tolist() == list(range(max(0, end - 11), end))
    assert ops.work(shape).bytes == int(inputs["mask"].sum()) * 2 * 2 * 8 * 4


HEADS = [
    {},
    {"backward": False},
    {"head": "frozen"},
    {"op": "linear_ppo_loss", "active": 0.5},
    {"op": "linear_ppo_loss", "dtype": "bf16", "head": "frozen"},
]


@pytest.mark.parametrize("fields", HEADS, ids=str)
def test_the_limit_of_a_head_is_as_many_flops_as_stated(fields: dict) -> None:
    shape = dataclasses.replace(Shape("linear_logprobs", 20, hidden=8, vocabulary=50), **fields)
    run = ops.least(shape, CPU)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == ops.work(shape).flops


class Copied(TorchDispatchMode):
    """Bytes that copies read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.copy_.default
        self.bytes += args[0].nbytes + args[1].nbytes
        return function(*args, **(kwargs or {}))


def test_other_limits_move_as_many_bytes_as_stated() -> None:
    assert ops.least(tiny("gae"), CPU) is None
    run = harness.copying(1114, CPU)
    with Copied() as copied:
        run()
    assert copied.bytes == 1114


@pytest.mark.parametrize("op", OPS)
def test_ours_eager_and_exact_are_of_the_same_thing(op: str) -> None:
    problem = ops.problem(tiny(op), "cpu")
    found = {OURS: problem.results(problem.ours), EAGER: problem.results(problem.eager)}
    judged = errors(problem, found)
    assert judged[OURS].keys() == found[OURS].keys() - set(problem.given)
    assert error_ratio(judged[OURS], judged[EAGER]) <= harness.FACTOR
    in_blocks = errors(problem, found, block_bytes=2 * problem.row_bytes)
    for name, error in judged[OURS].items():
        again = in_blocks[OURS][name]
        assert again.error == pytest.approx(error.error, rel=1e-6, abs=1e-12)
        assert again.norm == pytest.approx(error.norm, rel=1e-9)


@pytest.mark.parametrize("op", OPS)
def test_what_is_wrong_is_red(op: str) -> None:
    problem = ops.problem(tiny(op), "cpu")
    eager = errors(problem, {EAGER: problem.results(problem.eager)})[EAGER]
    found = problem.results(problem.ours)
    for name in found.keys() - set(problem.given):
        for wrong in (found[name] * 1.001 + 1e-4, torch.full_like(found[name], torch.nan)):
            mine = errors(problem, {OURS: found | {name: wrong}})[OURS]
            assert not error_ratio(mine, eager) <= harness.FACTOR, f"{name} may be wrong"


# --- from gate to figures ------------------------------------------------------------------------

SMALL = Shape("token_logprobs", 8, vocabulary=40, entropy="metric")


def a_measurement(shape: Shape, peers: bool = False) -> Measurement:
    run = Run(CPU, rounds=1, peers=peers)
    return Measurement(run, Case("ops", shape.op, shape.label, of=shape))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that agrees and computes less, one that is off, one that fails, one that is absent."""

    def less(logits, labels):
        return peers.token_logprobs(logits, labels)

    def off(logits, labels):
        return {"logprobs": less(logits, labels)["logprobs"] * 1.1}

    def fails(logits, labels):
        raise RuntimeError("no such shape\nand more")

    found = {"less": peers.Peer(less, "no entropy"), "off": peers.Peer(off)}
    found["fails"] = peers.Peer(fails)
    monkeypatch.setattr(peers, "peers_of", lambda shape, device: (found, {"gone": "not here"}))


def test_sides_hold_all_that_a_claim_needs(others: None) -> None:
    measurement = a_measurement(SMALL, peers=True)
    sides = test_ops.sides_of(measurement, SMALL)
    assert set(sides) == {OURS, EAGER, "less"}
    assert all(side.memory["peak"] > 0 and side.facts["error"] <= 2.5 for side in sides.values())
    assert sides["less"].note == "no entropy"
    absent = measurement.entry["absent"]
    assert absent["gone"] == "not here"
    assert "off, relative error" in absent["off"]
    assert absent["fails"] == "RuntimeError: no such shape"
    assert measurement.entry["work"]["bytes"] == 3 * 8 * 40 * 4


def test_memory_that_an_op_keeps_for_its_next_call_is_counted() -> None:
    shape = Shape("linear_logprobs", 64, hidden=4, vocabulary=800)
    counted = test_ops.sides_of(a_measurement(shape), shape)[OURS].memory["peak"]
    problem = ops.problem(shape, CPU)
    problem.results(problem.ours)
    again = harness.footprint(
        lambda: problem.forward(problem.ours), lambda s: harness.backward(s).values(), CPU
    )
    assert counted >= again.peak + 64 * 800 * 4, "a chunk of logits"


@pytest.mark.parametrize("factor", [1.00001, math.nan])
def test_an_op_that_is_off_has_no_figures(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ops.problem(SMALL, CPU)

    def wrong(**inputs):
        return {name: x * factor for name, x in problem.ours(**inputs).items()}

    changed = dataclasses.replace(problem, ours=wrong)
    monkeypatch.setattr(ops, "problem", lambda *_, **__: changed)
    monkeypatch.setattr(harness, "timed", lambda *_: pytest.fail("timed"))
    with pytest.raises(Red, match="times eager PyTorch's"):
        test_ops.sides_of(a_measurement(SMALL), SMALL)


# --- peers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_every_peer_is_found_or_absent_with_a_reason_and_computes_the_same(op: str) -> None:
    shape = dataclasses.replace(tiny(op), entropy="metric" if "entropy" in TINY[op] else "off")
    if shape.attention:
        shape = dataclasses.replace(shape, attention=Attention(6, 2, 8, window=5))
    found, absent = peers.peers_of(shape, CPU)
    assert found.keys() | absent.keys() == peers._PEERS[op].keys()
    assert not found.keys() & absent.keys()
    assert all(absent.values())
    problem = ops.problem(shape, CPU)
    for name, peer in found.items():
        if name != "torch.compile":  # takes a minute, and is eager's own formula
            judged = errors(problem, {name: problem.results(peer.call)})[name]
            assert harness.worst_relative(judged) <= peers.TOLERANCES["fp32"], name


class FlashAttn:
    """Stands in for the library of that name: its documented call, in plain PyTorch."""

    __name__ = "flash_attn"

    @staticmethod
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, window_size=(-1, -1), softcap=0.0
    ):
        assert q.shape[1] == 1
        assert cache_seqlens.dtype == torch.int32
        left, right = window_size
        out = torch.empty_like(q)
        for row, length in enumerate(cache_seqlens.tolist()):
            first = 0 if left < 0 else max(0, length - 1 - left)
            assert right <= 0
            keys, values = (
                x[row, first:length].repeat_interleave(q.shape[2] // x.shape[2], dim=1).float()
                for x in (k_cache, v_cache)
            )
            scores = torch.einsum("hd,thd->ht", q[row, 0].float(), keys) * q.shape[-1] ** -0.5
            scores = scores if softcap == 0 else softcap * torch.tanh(scores / softcap)
            out[row, 0] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        return out


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0, "window": 5}], ids=str)
def test_flash_attn_is_called_as_its_documentation_says(options, monkeypatch) -> None:
    layer = Attention(6, 2, 8, **options)
    shape = Shape("decode_attention", 6, "bf16", steps=9, active=0.5, attention=layer)
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttn)
    monkeypatch.setattr(peers, "_needs_gpu", lambda device: None)
    problem = ops.problem(shape, CPU)
    found, _ = peers.peers_of(shape, CPU)
    judged = errors(problem, {"": problem.results(found["flash-attn"].call)})[""]
    assert harness.worst_relative(judged) <= peers.TOLERANCES["bf16"]
    assert ("sdpa" in found) == ("softcap" not in options)
    _, absent = peers.peers_of(dataclasses.replace(shape, dtype="fp32"), CPU)
    assert "half precision" in absent["flash-attn"]


def test_a_library_that_is_missing_or_broken_is_listed(monkeypatch) -> None:
    def missing(shape, device):
        raise ModuleNotFoundError("No module named 'lib'")

    def broken(shape, device):
        raise RuntimeError("cannot load\nmore lines")

    monkeypatch.setitem(peers._PEERS, "gae", {"missing": missing, "broken": broken})
    found, absent = peers.peers_of(Shape("gae", 2, steps=3), CPU)
    assert not found
    assert absent == {
        "missing": "not installed (No module named 'lib')",
        "broken": "RuntimeError: cannot load",
    }


# --- checks of the kernels -----------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_the_checks_are_green(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTRL_KERNELS_BACKEND", raising=False)
    names = []
    for check in test_ops.checks(op, CPU, "triton", test_ops.TOY):
        assert check.run() is None, check.name
        names.append(check.name.split(":")[0])
    masked = "dead is unread" if op == "decode_attention" else "zero where masked"
    wanted = {"exact", "strided", masked, "same bits twice"}
    assert set(names) == wanted | ({"same bits alone"} if ops.OPS[op].row_bits else set())


def changed(shape: Shape, change) -> harness.Problem:
    """A problem whose op's results are changed by `change(results, inputs)`."""
    problem = ops.problem(shape, CPU, backend="torch")
    ours = problem.ours
    return dataclasses.replace(problem, ours=lambda **x: change(ours(**x), x))


GAE = Shape("gae", 5, steps=16, active=0.7)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (harness.wrong_numbers, lambda found, x: found | {"returns": found["returns"] * 1.001}),
        (test_ops.zero_where_masked, lambda found, x: found | {"returns": found["returns"] + 1e-9}),
        (test_ops.zero_where_masked, lambda found, x: found | {"returns": x["values"] * 0}),
        (test_ops.same_twice, lambda found, x: found | {"returns": torch.rand(5, 16)}),
        (
            test_ops.same_alone,
            lambda found, x: found | {"returns": found["returns"] + len(x["mask"])},
        ),
    ],
    ids=["exact", "not zero", "nan", "twice", "alone"],
)
def test_each_check_can_be_red(check, change) -> None:
    assert check(changed(GAE, lambda found, x: found)) is None
    assert check(changed(GAE, change))


def test_reading_dead_tokens_is_red() -> None:
    layer = Attention(4, 2, 8, window=5)
    shape = Shape("decode_attention", 5, steps=16, active=0.5, backward=False, attention=layer)

    def live_alone(found, x):
        return {"out": x["values"].where(x["mask"][:, :, None, None], 0.0).sum(1)}

    assert test_ops.dead_is_unread(changed(shape, live_alone)) is None
    for end in (0, -1):  # what a window has left behind, and what is not written yet
        wrong = changed(shape, lambda found, x, end=end: {"out": x["keys"][:, end]})
        assert "out differs" in test_ops.dead_is_unread(wrong)


def test_a_check_that_fails_or_raises_keeps_an_op_from_being_timed(monkeypatch) -> None:
    def fails() -> None:
        raise RuntimeError("illegal memory access")

    def fake(op, device):
        return [test_ops.Check("a", lambda: "it differs"), test_ops.Check("b", fails)]

    monkeypatch.setattr(test_ops, "checks", fake)
    run = Run(CPU)
    with pytest.raises(AssertionError, match="b: RuntimeError: illegal memory access"):
        test_ops.test_kernels("gae", run)
    assert run.red_ops == {"gae"}
    assert [gate["wrong"] is None for gate in run.results["ops"]["gates"]] == [False, False]
