"""A case from gate to figures, and the command around it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from benchmarks.before import __main__ as command
from benchmarks.before import build, cases, measure, memory, ops, problem, timing
from benchmarks.before.cases import Case, Goal
from benchmarks.before.measure import Effort
from benchmarks.before.peers import Peer
from benchmarks.before.problem import backward, forward

CPU = torch.device("cpu")
ROOF = timing.Roofline(1e10, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11})
EFFORT = Effort(rounds=3, seconds=5, memory=2**30)
CASE = Case("token_logprobs", 8, vocabulary=40, entropy="metric", main=True)


@pytest.fixture(autouse=True)
def peers(monkeypatch):
    """One that agrees and computes less, one that is off, one that fails, one that is not there."""

    def less(logits, labels):
        from benchmarks.before import eager

        return eager.token_logprobs(logits, labels)

    def off(logits, labels):
        return {"logprobs": less(logits, labels)["logprobs"] * 1.1}

    def fails(logits, labels):
        raise RuntimeError("no such shape\nand more")

    found = {"less": Peer(less, "no entropy"), "off": Peer(off), "fails": Peer(fails)}
    monkeypatch.setattr(measure, "peers_of", lambda case, device: (found, {"gone": "not here"}))


def test_an_entry_holds_all_that_a_claim_needs():
    entry = measure.measure(CASE, CPU, EFFORT)
    taken = entry["implementations"]
    assert set(taken) == {"fastrl", "eager", "less"}
    for one in taken.values():
        assert len(one["seconds"]) == len(one["call_seconds"]) == 3
        assert one["memory"]["peak"] > 0
        assert one["error"] <= 2.5
    assert taken["less"]["note"] == "no entropy"
    assert entry["absent"]["gone"] == "not here"
    assert "off, relative error" in entry["absent"]["off"]
    assert entry["absent"]["fails"] == "RuntimeError: no such shape"
    assert entry["work"]["bytes"] == 3 * 8 * 40 * 4
    assert len(entry["limit"]) == 3
    assert ops.as_case(json.loads(json.dumps(entry))) == CASE
    text = measure.render(entry, "cpu")
    assert all(word in text for word in ("fastrl", "eager", "less", "gone: not here"))


def test_memory_that_an_op_keeps_for_its_next_call_is_counted():
    case = Case("linear_logprobs", 64, hidden=4, vocabulary=800)
    entry = measure.measure(case, CPU, EFFORT)
    counted = entry["implementations"]["fastrl"]["memory"]["peak"]
    problem = build.problem(case, CPU)
    again = memory.footprint(
        lambda: forward(problem, problem.ours), lambda state: backward(state).values(), CPU
    )
    assert counted >= again.peak + 64 * 800 * 4, "a chunk of logits"


@pytest.mark.parametrize("factor", [1.00001, math.nan])
def test_a_red_gate_shows_no_figures(factor, monkeypatch):
    problem = build.problem(CASE, CPU)

    def wrong(**inputs):
        return {name: x * factor for name, x in problem.ours(**inputs).items()}

    monkeypatch.setattr(
        measure.build, "problem", lambda *a, **k: dataclasses.replace(problem, ours=wrong)
    )
    monkeypatch.setattr(timing, "interleaved", lambda *a, **k: pytest.fail("timed"))
    entry = measure.measure(CASE, CPU, EFFORT)
    assert not entry["implementations"]
    assert "times eager PyTorch's" in entry["red"]
    assert "RED, no figures" in measure.render(entry, "cpu")


def an_entry(
    ours=(1.0, 1.0), eager=(3.0, 1.0), peaks=(10, 100), goal=None, limit=(0.25, 0.25)
) -> dict:
    sides = zip(("fastrl", "eager"), (ours, eager), peaks, strict=True)
    return {
        "goal": vars(goal) if goal else None,
        "red": None,
        "limit": list(limit),
        "implementations": {
            name: {"seconds": list(taken), "memory": {"peak": peak}} for name, taken, peak in sides
        },
    }


def test_goals_are_judged_by_medians_of_paired_rounds():
    entry = an_entry(goal=Goal(speedup=2.0, memory_share=1 / 8, seconds=0.5, memory_bytes=9))
    assert [reached for _, reached in measure.verdicts(entry, "cpu")] == [False, False, True, True]
    assert measure.share_of_roofline(entry) == 0.25
    entry = an_entry(goal=Goal(speedup=2.1, memory_share=1 / 11))
    assert [reached for _, reached in measure.verdicts(entry, "cpu")] == [False, False]
    [(words, _)] = measure.verdicts(
        an_entry(eager=(3.0, 3.0), limit=(1.0, 1.5), goal=Goal(speedup=4.0)), "cpu"
    )
    assert words == "≥ 4× eager (at the limit: 2.50×)"
    elsewhere = an_entry(goal=Goal(seconds=1.0, device=cases.HOPPER))
    assert measure.verdicts(elsewhere, "cpu") == []
    assert measure.verdicts(elsewhere, "NVIDIA H100 80GB HBM3") == [("≤ 1 s", True)]


@pytest.mark.parametrize(("most", "reached"), [((1, 1), False), ((2, 1), True), ((2, 0), False)])
def test_launches_are_counted_forward_and_backward_apart(most, reached):
    entry = an_entry(goal=Goal(launches=most))
    assert measure.verdicts(entry, "cpu") == []  # nobody counted
    entry["implementations"]["fastrl"]["launches"] = {"forward": ["a", "b"], "backward": ["c"]}
    [(words, found)] = measure.verdicts(entry, "cpu")
    assert found is reached
    assert words == " + ".join(str(n) for n in most if n) + " launches"


def lucky(error: float) -> dict:
    return {"loss": problem.Error(error, 1.0)}


def a_draw(mine: float, eager: float) -> problem.Problem:
    """One whose exact result is 1, and ours and eager PyTorch's off by as much."""
    return problem.Problem(
        {},
        ours=lambda: {"loss": torch.tensor(1 + mine, dtype=torch.float64)},
        eager=lambda: {"loss": torch.tensor(1 + eager, dtype=torch.float64)},
        exact=lambda: {"loss": torch.tensor(1.0, dtype=torch.float64)},
    )


def test_a_lucky_hit_of_pytorchs_is_not_the_measure():
    asked = []

    def others(mine, eager):
        for n in range(3):
            asked.append(n)
            yield a_draw(mine, eager)

    assert problem.settled(lucky(1e-6), lucky(0.0), others(1e-6, 1e-6)) <= problem.FACTOR
    assert asked == [0]
    assert problem.settled(lucky(1e-6), lucky(0.0), others(3e-6, 1e-6)) > problem.FACTOR
    assert asked == [0, 0, 1, 2]
    assert problem.settled(lucky(1e-6), lucky(1e-6), others(1.0, 0.0)) == pytest.approx(
        0.95, abs=0.1
    )
    assert asked == [0, 0, 1, 2]
    assert math.isnan(problem.settled(lucky(math.nan), lucky(1e-6), others(1e-6, 1e-6)))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], ("ops", [])),
        (["gae", "whiten", "--main"], ("ops", ["gae", "whiten", "--main"])),
        (["ops", "gae"], ("ops", ["gae"])),
        (["report", "--results", "x"], ("report", ["--results", "x"])),
    ],
    ids=str,
)
def test_an_op_stands_for_the_command_that_measures_it(arguments, wanted, monkeypatch):
    asked = []

    class Module:
        def __init__(self, name):
            self.name = name

        def add_arguments(self, parser):
            parser.add_argument("all", nargs="*")
            parser.add_argument("--main", action="store_true")
            parser.add_argument("--results")

        def run(self, args):
            asked.append((self.name.removeprefix("benchmarks.before."), args.all))
            return 7

    monkeypatch.setattr(command.importlib, "import_module", Module)
    assert command.main(arguments) == 7
    name, rest = wanted
    assert asked == [(name, [x for x in rest if not x.startswith("-") and x != "x"])]


def test_help_explains_commands_and_ops(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in (*command.COMMANDS, *command.OPS))


def test_the_command_measures_saves_and_skips(tmp_path, monkeypatch, capsys):
    large = Case("gae", 2**20, steps=2**20)
    monkeypatch.setattr(cases, "grid", lambda *a: [Case("gae", 4, steps=9, active=0.7), large])
    monkeypatch.setattr(timing, "roofline", lambda device: ROOF)
    threads = torch.get_num_threads()
    arguments = ["gae", "--rounds", "2", "--results", str(tmp_path), "--threads", str(threads)]
    assert command.main(arguments) == 0
    (path,) = tmp_path.glob("*/*-gae.json")
    result = json.loads(path.read_text())
    assert [entry["label"] for entry in result["cases"]] == ["[4, 9] fp32 active=0.7"]
    assert [case["label"] for case in result["skipped"]] == [large.label]
    assert result["roofline"]["copy"] == 1e10
    assert "skipped" in capsys.readouterr().out


def test_an_unknown_op_is_refused(capsys):
    assert command.main(["ops", "gea"]) == 2
    assert "no op gea: choose of token_logprobs" in capsys.readouterr().out
