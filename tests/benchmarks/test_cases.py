"""The table of cases: its ops, labels, least work, grids and budgets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.before import __main__ as command
from benchmarks.before import build, cases, timing
from benchmarks.before.attention import Attention, ragged_lengths
from benchmarks.before.cases import Case, grid, work
from benchmarks.before.measure import Effort, too_much
from benchmarks.before.problem import FACTOR, errors, ratio, results


def test_every_op_has_all_that_it_needs():
    assert tuple(cases.EXPORTS) == tuple(cases._WORK)
    assert set(command.OPS) == set(cases.EXPORTS) == set(build._BUILDERS) == set(cases._GRIDS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", command.OPS)
def test_a_grid_begins_with_the_main_case_and_repeats_none(op, device):
    some, every = grid(op, device), grid(op, device, full=True)
    assert some[0].main
    assert not any(case.main for case in some[1:])
    labels = [case.label for case in every]
    assert len(labels) == len(set(labels))
    assert some[0] == every[0]


def test_the_grid_holds_the_shapes_of_real_models():
    shapes = {(c.hidden, c.vocabulary) for c in grid("linear_logprobs", "cuda", full=True)}
    assert set(cases.HEADS) <= shapes
    for axis, values in (("rows", cases.ROWS), ("active", cases.ACTIVE), ("head", ("frozen",))):
        assert set(values) <= {getattr(c, axis) for c in grid("linear_logprobs", "cuda")}
    assert (512, 4096) in {(c.rows, c.steps) for c in grid("gae", "cpu")}
    for device in ("cpu", "cuda"):
        decodes = {(c.attention, c.rows, c.steps) for c in grid("decode_attention", device)}
        assert set(cases.DECODES) == decodes


def test_least_work_by_hand():
    logits = Case("token_logprobs", 10, "bf16", vocabulary=100, active=0.5)
    assert work(logits).bytes == 2 * 1000 + 2000  # half of them read twice, all written
    assert work(dataclasses.replace(logits, backward=False)).bytes == 1000
    assert work(Case("full_kl", 10, "bf16", vocabulary=100)).bytes == 10 * 1000
    head = Case("linear_logprobs", 10, hidden=7, vocabulary=100)
    assert work(head).flops == 8 * 7000
    assert work(dataclasses.replace(head, head="frozen")).flops == 6 * 7000
    assert work(dataclasses.replace(head, backward=False)).flops == 2 * 7000
    assert work(dataclasses.replace(head, op="linear_ppo_loss")).flops == 6 * 7000
    assert work(Case("gae", 4, steps=5, whiten=True)).bytes == 21 * 20
    layer = Attention(6, 2, 8)
    decode = Case("decode_attention", 4, "bf16", steps=10, active=0.5, attention=layer)
    assert work(decode).bytes == (1 + 4 + 7 + 10) * 32 * 2  # of live tokens alone
    narrow = dataclasses.replace(decode, attention=dataclasses.replace(layer, window=5))
    assert work(narrow).bytes == (1 + 4 + 5 + 5) * 32 * 2


@pytest.mark.parametrize("slots", [1, 2, 7, 256])
@pytest.mark.parametrize("active", [0.5, 0.75, 1.0])
def test_lengths_are_ragged_and_reach_both_ends(slots, active):
    lengths = ragged_lengths(slots, 512, active)
    assert len(lengths) == slots
    assert max(lengths) == 512
    if slots > 1:
        assert min(lengths) == max(1, (2 * active - 1) * 512)
        assert sum(lengths) / slots == pytest.approx(active * 512, abs=1)
    if slots > 2 and active < 1:
        assert len(set(lengths)) == slots
        assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def test_what_is_live_is_what_counts_as_work():
    case = dataclasses.replace(grid("decode_attention", "cpu")[0], rows=9, steps=40)
    case = dataclasses.replace(case, attention=Attention(4, 2, 8, window=11))
    inputs = build.problem(case, "cpu").inputs
    ends = inputs["lengths"].tolist()
    assert {1, 40} <= set(ends)
    for end, live in zip(ends, inputs["mask"], strict=True):
        assert live.nonzero().flatten().tolist() == list(range(max(0, end - 11), end))
    assert work(case).bytes == int(inputs["mask"].sum()) * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("rows", "reason"), [(10, None), (10_000, "GiB, 1 are"), (1000, "s, 60 are allowed")]
)
def test_cases_beyond_the_budget_say_why(rows, reason):
    roof = timing.Roofline(copy=1e10, gemm={"fp32": 1e10})
    effort = Effort(rounds=9, seconds=60, memory=2**30)
    case = Case("linear_logprobs", rows, hidden=768, vocabulary=5000)
    found = too_much(case, effort, roof, torch.device("cpu"))
    assert found is None if reason is None else reason in found
    main = dataclasses.replace(case, main=True)
    wanted = reason is not None and "GiB" in reason
    assert bool(too_much(main, effort, roof, torch.device("cpu"))) == wanted


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


@pytest.mark.parametrize("op", cases.available())
def test_ours_eager_and_exact_are_of_the_same_thing(op):
    problem = build.problem(Case(op, 6, backward=op in cases.DIFFERENTIABLE, **TINY[op]), "cpu")
    ours, eager = (results(problem, call) for call in (problem.ours, problem.eager))
    judged = errors(problem, ours)
    assert judged.keys() == ours.keys() - set(problem.given)
    assert ratio(judged, errors(problem, eager)) <= FACTOR
    in_blocks = errors(problem, ours, block_bytes=2 * problem.row_bytes)
    for name, error in judged.items():
        assert in_blocks[name].error == pytest.approx(error.error, rel=1e-6, abs=1e-12)
        assert in_blocks[name].norm == pytest.approx(error.norm, rel=1e-9)


@pytest.mark.parametrize("op", cases.available())
def test_what_is_wrong_is_red(op):
    problem = build.problem(Case(op, 6, backward=op in cases.DIFFERENTIABLE, **TINY[op]), "cpu")
    eager = errors(problem, results(problem, problem.eager))
    found = results(problem, problem.ours)
    for name in found.keys() - set(problem.given):
        for wrong in (found[name] * 1.001 + 1e-4, torch.full_like(found[name], torch.nan)):
            error = ratio(errors(problem, found | {name: wrong}), eager)
            assert not error <= FACTOR, f"{name} may be wrong"
