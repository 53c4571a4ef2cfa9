"""The kernels' knobs: turned and turned back, measured in turns, told beside their predictions."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from benchmarks.before import __main__ as command
from benchmarks.before import knobs, timing, tune, tune_tables
from benchmarks.before.cases import Case
from benchmarks.before.knobs import KNOBS, Knob
from benchmarks.before.planner import carry_out

CPU = torch.device("cpu")
ROOF = timing.Roofline(1e10, {"fp32": 1e11, "bf16": 1e11, "fp16": 1e11})
COLUMNS = Knob(
    "columns",
    "at a time",
    (("fastrl_kernels.head", "COLUMNS"),),
    (1024, 8192),
    ("linear_logprobs",),
    "nothing much",
)
CASE = Case("linear_logprobs", 8, hidden=16, vocabulary=3000)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(knobs, "TELLING", (CASE,))


def session(tmp_path) -> tune.Session:
    return tune.Session(CPU, ROOF, tmp_path, backend="torch", rounds=3)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_a_knob_is_a_number_that_the_kernels_have(knob, monkeypatch):
    monkeypatch.undo()
    assert knob.cases, "no case shows what it does"
    assert knobs.present(knob) in knob.values
    assert len(set(knob.values)) == len(knob.values) > 1
    for module, attribute in knob.places:  # copies of one number
        found = getattr(importlib.import_module(module), attribute)
        assert (found if knob.key is None else found[knob.key]) == knobs.present(knob)


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_what_is_turned_is_turned_back(knob):
    now = knobs.present(knob)
    other = next(value for value in knob.values if value != now)

    def fail() -> None:
        with knobs.turned(knob, other):
            raise KeyError(knobs.present(knob))

    with pytest.raises(KeyError, match=str(other)):
        fail()
    assert knobs.present(knob) == now


def test_values_take_turns_and_are_saved(tmp_path, capsys):
    run = session(tmp_path)
    outcome = carry_out(run.steps([COLUMNS]), 1e9, save=run.save)
    assert outcome.done == [f"columns: linear_logprobs {CASE.label}"]
    (found,) = json.loads(run.path.read_text())["knobs"]
    assert found["predicted"] == "nothing much"
    (entry,) = found["cases"]
    assert entry["now"] == "8192"
    assert list(entry["values"]) == ["1024", "8192"]
    assert all(len(value["seconds"]) == 3 for value in entry["values"].values())
    assert "8192 (now)" in capsys.readouterr().out


def test_a_value_with_other_results_has_no_time(tmp_path, monkeypatch):
    seen = []

    def exact(problem):
        seen.append(knobs.present(COLUMNS))
        return "it is off" if seen[-1] == 1024 else None

    monkeypatch.setattr(tune.gates, "exact", exact)
    run = session(tmp_path)
    run.measure(COLUMNS, CASE)
    assert seen == [1024, 8192]
    values = run.result["knobs"][0]["cases"][0]["values"]
    assert values["1024"] == {"absent": "it is off"}
    assert "seconds" in values["8192"]


def test_a_value_that_fails_is_told(tmp_path, monkeypatch):
    def exact(problem):
        if knobs.present(COLUMNS) == 8192:
            raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(tune.gates, "exact", exact)
    run = session(tmp_path)
    run.measure(COLUMNS, CASE)
    text = tune_tables.render(COLUMNS, run.result["knobs"][0]["cases"][0], "a GPU")
    assert "out of resource" in text
    assert "speed now" not in text


def test_notes_tell_predictions_and_what_came_of_them(monkeypatch):
    monkeypatch.setattr(tune_tables, "KNOBS", (COLUMNS,))
    assert "Predicted: nothing much\n\nMeasured: not yet." in tune_tables.notes({})
    values = {
        "1024": {"seconds": [2.0, 4.0]},
        "8192": {"seconds": [1.0, 3.0]},
        "9": {"absent": "it is off"},
    }
    entry = {"op": "gae", "label": "x", "now": "8192", "limit": [0.5, 0.5], "values": values}
    result = {"knobs": [{"name": "columns", "predicted": "", "cases": [entry]}]}
    text = tune_tables.notes({"nvidia": result})
    assert "| 8192, now | 2 s (1–3) | 1 |" in text
    assert "| 1024 | 3 s (2–4) | 0.625 (0.500–0.750) |" in text
    assert "| 9 | – | it is off |" in text
    assert "not yet" not in text


def test_requests_that_cannot_be_met(capsys, monkeypatch):
    assert command.main(["tune"]) == 2
    assert "no GPU here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["tune", "nonsense"]) == 2
    assert "no knob nonsense: choose of workspace, columns" in capsys.readouterr().err
