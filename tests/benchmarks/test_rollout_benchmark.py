"""The rollout benchmark's gate, its arithmetic, its result file, and how they are reported."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import logging

from benchmarks.before import (
    record,
    report,
    rollout,
    rollout_gate,
    rollout_sides,
    rollout_tables,
)
from benchmarks.before.rollout_cases import (
    Case,
    Goal,
    Shape,
    Workload,
    build,
    cases,
    kv_bytes,
    workload,
)
from benchmarks.before.rollout_sides import CONTINUOUS, GENERATE, OURS, STATIC, Side
from fastrl import RolloutEngine
from fastrl.rollout import engine
from fastrl.rollout.floor import weight_bytes

CPU = torch.device("cpu")
TINY = Shape("tiny", "gpt2", 1, 16, 2, 2, 32, 101, 32, "fp32")
CASE = Case("ragged", TINY, 5, 2, (1, 4), 4, 6, sigma=1.0, main=True, goal=Goal(("cpu",), 1e-3))


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What a run sets for its process."""
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


@pytest.fixture
def tiny_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "cases", lambda device_type, slots=None: [CASE])
    monkeypatch.setattr(rollout.timing, "roofline", lambda *_: rollout.timing.Roofline(1e9, {}))


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    rollout.add_arguments(parser)
    common = ["--device", "cpu", "--threads", "1", "--rounds", "2"]
    return rollout.run(parser.parse_args([*common, *arguments]))


def an_entry(**changes: object) -> dict:
    engine = {
        "note": "also log-probs", "seconds": [1.0, 2.0], "prefill": [0.25, 0.25],
        "decode": [0.5, 1.0], "steps": 10, "utilisation": 0.9375, "graphs": None,
        "audit": {"mean": 1e-7, "largest": 2e-7, "tokens": 8, "wrong": None},
    }  # fmt: skip
    return {
        "label": CASE.label,
        "lengths": CASE.lengths,
        "case": {"main": True},
        "goal": dataclasses.asdict(Goal(("cpu",), speedup=2.0)),
        "useful": 100,
        "weight_bytes": 900,
        "kv_bytes": 1000,
        "copy": [1e5, 1e5],
        "sides": {OURS: engine, GENERATE: {"note": "padded", "seconds": [3.0, 4.0]}},
        "absent": {STATIC: "no accelerator"},
        "red": None,
    } | changes


def a_result(**changes: object) -> dict:
    return {
        "benchmark": "rollout",
        "date": "2025-01-02",
        "time": "10:00:00",
        "commit": "abc1234",
        "machine": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8},
        "versions": {"transformers": "5"},
        "threads": 2,
        "rollouts": [an_entry()],
    } | changes


@pytest.fixture
def checkout(tmp_path: Path) -> argparse.Namespace:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    return argparse.Namespace(results=tmp_path / "benchmarks" / "results", root=tmp_path)


def test_a_run_saves_what_every_side_took_and_the_report_shows_it(
    tiny_cases: None, checkout: argparse.Namespace, capsys: pytest.CaptureFixture
) -> None:
    assert run("--results", str(checkout.results)) == 0
    assert "goal ≥ 0.001× generate: reached" in capsys.readouterr().out
    (path,) = checkout.results.glob("cpu-*core/*-rollout.json")
    result = json.loads(path.read_text())
    assert result.keys() >= {"benchmark", "date", "commit", "machine", "versions", "threads"}
    (entry,) = result["rollouts"]
    assert entry.keys() == an_entry().keys()
    assert entry["useful"] == sum(workload(CASE).limits)
    assert set(entry["sides"]) == {OURS, GENERATE, CONTINUOUS}
    assert STATIC in entry["absent"]
    assert all(len(taken["seconds"]) == 2 for taken in entry["sides"].values())
    ours = entry["sides"][OURS]
    assert ours.keys() == an_entry()["sides"][OURS].keys()
    assert len(ours["prefill"]) == len(ours["decode"]) == len(entry["copy"]) == 2
    assert ours["audit"]["tokens"] > 0

    assert report.run(checkout) == 0
    brief = (checkout.root / "README.md").read_text()
    assert f"| {CASE.label} |" in brief
    assert CONTINUOUS in (checkout.root / "benchmarks/README.md").read_text()


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("sequences", lambda x: (x + 1) % TINY.vocabulary, "greedy tokens of prompt 0"),
        ("logprobs_t1", lambda x: x + 2e-5, "log-probs are off"),
        ("logprobs_t1", lambda x: x * torch.nan, "log-probs are off by nan"),
    ],
)
def test_a_red_gate_shows_no_figures(
    field, change, says, tiny_cases, checkout, monkeypatch, capsys
) -> None:
    honest = RolloutEngine.generate

    def generate(*arguments):
        output = honest(*arguments)
        setattr(output, field, [change(x) for x in getattr(output, field)])
        return output

    monkeypatch.setattr(RolloutEngine, "generate", generate)
    monkeypatch.setattr(engine, "check_numbers", lambda _: None)  # it would see that first
    monkeypatch.setattr(rollout, "_take_turns", lambda *_: pytest.fail("timed after a red gate"))
    assert run("--results", str(checkout.results), "--no-peers") == 1
    out = capsys.readouterr().out
    assert f"RED, no figures: {says}" in out.replace(f"{OURS}: ", "")
    assert "useful tokens/s" not in out

    assert report.run(checkout) == 0
    brief, details = (
        (checkout.root / p).read_text() for p in ("README.md", "benchmarks/README.md")
    )
    assert "useful tokens/s" not in brief + details
    assert f"No figures for {CASE.label}" in details


def test_a_peer_that_fails_or_stops_early_is_absent_and_says_why(tiny_cases, monkeypatch) -> None:
    closed = []

    def broken(work: Workload) -> list[torch.Tensor]:
        raise RuntimeError("no kernels")

    def short(work: Workload) -> list[torch.Tensor]:
        return [torch.zeros(n - 1) for n in work.limits]

    def importing(*_: object, **__: object) -> Side:
        raise ImportError("no such name")

    made = {
        "broken": lambda *_, **__: Side(broken, close=lambda: closed.append("broken")),
        "short": lambda *_, **__: Side(short),
        "old": importing,
    }
    monkeypatch.setattr(rollout_sides, "_PEERS", made)
    entry = rollout.measure(CASE, CPU, rounds=1)
    assert set(entry["sides"]) == {OURS}
    assert entry["absent"]["broken"] == "RuntimeError: no kernels"
    assert entry["absent"]["short"].startswith("sample 0 has ")
    assert "no such name" in entry["absent"]["old"]
    assert closed == ["broken"]


def test_every_side_makes_what_generate_makes_alone() -> None:
    model = build(TINY, CPU)
    work = rollout_gate.short_work(TINY.vocabulary)
    expected = rollout_gate.greedy_tokens(model, work)
    assert [len(x) for x in expected] == work.limits
    for make in (rollout_sides.dynamic, rollout_sides.continuous):
        side = make(model, 2, work, greedy=True)
        assert rollout_gate.differing(model, work, side.call(work), expected) is None
        side.close()
    wrong = [*expected[:2], expected[2].flip(0)]
    assert "prompt 2" in rollout_gate.differing(model, work, wrong, expected)


@pytest.mark.parametrize(("gap", "tied"), [(0.0, True), (1e-5, True), (1e-3, False)])
def test_what_follows_two_likeliest_tokens_is_not_compared(gap: float, tied: bool) -> None:
    class Model:
        device = CPU

        def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
            assert ids.tolist() == [[7, 1]], "the prompt, and what both have"
            return SimpleNamespace(logits=torch.tensor([[[0.0, 0.0, 3.0, 3.0 - gap]]]))

    work = Workload([torch.tensor([7])], [3])
    expected = [torch.tensor([1, 2, 0])]
    for found in ([1, 3, 1], [1, 3, 2]):
        wrong = rollout_gate.differing(Model(), work, [torch.tensor(found)], expected)
        assert (wrong is None) == tied
    assert rollout_gate.differing(Model(), work, [torch.tensor([1, 1, 0])], expected)
    assert rollout_gate.differing(Model(), work, [torch.tensor([1, 2])], expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_less_precise_model_is_audited_by_the_mean(dtype: str) -> None:
    shape = dataclasses.replace(TINY, family="qwen2", kv_heads=1, dtype=dtype)
    work = workload(dataclasses.replace(CASE, shape=shape))
    model = build(shape, CPU)
    engine = rollout_sides.Engine(model, slots=2)
    engine(work)
    as_it_is = rollout_gate.audit(model, work, engine.output)
    assert as_it_is.wrong is None
    assert as_it_is.tokens >= work.limits[0] + work.limits[-1]

    first = engine.output.logprobs_t1[0]
    first[0] += 0.02  # one of many
    one = rollout_gate.audit(model, work, engine.output)
    assert one.largest == pytest.approx(0.02, rel=0.05)
    assert (one.wrong is None) == (dtype == "bf16")
    first += 0.1
    assert rollout_gate.audit(model, work, engine.output).wrong is not None


def test_a_workload_is_the_same_every_time_and_within_its_bounds() -> None:
    case = dataclasses.replace(CASE, prompts=200)
    first, second = workload(case), workload(case)
    assert first.limits == second.limits
    assert all(torch.equal(a, b) for a, b in zip(first.prompts, second.prompts, strict=True))
    assert (min(first.limits), max(first.limits)) == (1, 6)
    assert {len(prompt) for prompt in first.prompts} == {1, 2, 3, 4}
    equal = workload(dataclasses.replace(case, sigma=0.0))
    assert set(equal.limits) == {4}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_all_cases_fit_their_model_and_have_labels_of_their_own(device_type) -> None:
    found = cases(device_type)
    assert len({case.label for case in found}) == len(found)
    for case in found:
        assert case.prompt[1] + max(workload(case).limits) <= case.shape.context
    assert {case.slots for case in cases(device_type, slots=3)} == {3}


def test_bytes_of_a_step_are_those_that_it_cannot_but_read() -> None:
    model = build(TINY, CPU)
    # 1 layer of width 16 with its 32 inside; three norms; the head, which is the input's table too
    layer = (16 * 48 + 48) + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16)
    assert weight_bytes(model) == 4 * (layer + 3 * 32 + 101 * 16)
    work = Workload([torch.zeros(3), torch.zeros(1)], [2, 1])
    # keys and values of 16 numbers in fp32: of 3 + 4 tokens, and of 1
    assert kv_bytes(CASE, work) == 2 * 16 * 4 * (3 + 4 + 1)
    grouped = dataclasses.replace(TINY, kv_heads=1, dtype="bf16", layers=2)
    assert kv_bytes(dataclasses.replace(CASE, shape=grouped), work) == 2 * 2 * 8 * 2 * (3 + 4 + 1)


def test_figures_are_of_useful_tokens_and_of_pairs() -> None:
    entry = an_entry()
    assert rollout_tables.tokens_per_second(entry, OURS) == [100.0, 50.0]
    assert rollout_tables.speedups(entry, GENERATE) == [3.0, 2.0]
    assert rollout_tables.step_seconds(entry, OURS) == [0.05, 0.1]
    # 10 steps of 900 bytes and 1000 of keys and values: 0.1 s at 1e5 bytes per second
    assert rollout_tables.floor_shares(entry, OURS) == pytest.approx([0.2, 0.1])


def test_a_goal_holds_on_its_device_alone() -> None:
    parts = {"speedup": 2.6, "step_seconds": 0.08, "floor_share": 0.14, "utilisation": 0.95}
    goal = dataclasses.asdict(Goal(("cpu",), **parts))
    reached = [ok for _, ok in rollout_tables.verdicts(an_entry(goal=goal), "cpu: Some")]
    assert reached == [False, True, True, False]
    assert rollout_tables.verdicts(an_entry(goal=goal), "NVIDIA H100") == []
    assert rollout_tables.verdicts(an_entry(goal=None), "cpu") == []


def test_the_report_has_rows_floor_graphs_and_a_plot(checkout: argparse.Namespace) -> None:
    with_graphs = an_entry(label="on graphs: tiny", case={"main": False})
    graphs = {"captures": 3.0, "capture_seconds": 0.5, "replays": 40.0}
    with_graphs["sides"] = copy.deepcopy(with_graphs["sides"])
    with_graphs["sides"][OURS]["graphs"] = {"first": graphs, "later": graphs | {"captures": 0.0}}
    result = a_result(rollouts=[an_entry(), with_graphs])
    record.save(result, checkout.results / record.place(result))
    assert report.run(checkout) == 0
    brief, details = (
        (checkout.root / p).read_text() for p in ("README.md", "benchmarks/README.md")
    )
    row = f"| {CASE.label} | 75 | 29 | 2.50 (2.00–3.00) | 93.8% | ≥ 2× generate: reached |"
    assert row in brief
    assert "on graphs" not in brief
    assert "15% of the floor" in details
    assert "1000 B per step (900 B of weights, 100 B of live keys and values)" in details
    assert "3 captures in the uncounted first rollout took 500 ms; 0 in the counted" in details
    assert f"absent, {STATIC}: no accelerator." in details
    assert "ppo" in details.split("Not measured yet on cpu-2core: ")[1].splitlines()[0]
    plot = (checkout.root / "benchmarks/plots/cpu-2core/rollout.svg").read_text()
    assert "2.5" in plot
    assert GENERATE in plot


def test_what_cannot_be_measured_is_refused(tiny_cases, capsys) -> None:
    assert run("--case", "no such thing", "--no-save") == 2
    assert CASE.label in capsys.readouterr().err
    assert run("--rounds", "0", "--no-save") == 2
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run("--device", "cuda", "--no-save") == 2
