"""Libraries of products are measured once on a machine, and the rule's are kept where that says
little."""

import json
import os

import pytest
import torch

from fastrl.models.products import Products
from fastrl.run import machine
from fastrl.trainers.plan.rehearsal import rehearsal
from fastrl_kernels import gemm, measure_products

FAST = {"float32": {width: {"mm": 1.0, "onednn": 1.5} for width in (64, 128)}}


@pytest.fixture
def first_use(monkeypatch, tmp_path):
    """A machine without a table, whose measurements are FAST's; what they were asked for."""
    asked = []

    def measure(dtypes):
        asked.extend(dtypes)
        rule = gemm.MM
        return [
            measure_products.Measured(x, FAST[x], measure_products.chosen(FAST[x], rule))
            for x in dtypes
        ]

    monkeypatch.setattr(measure_products, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(gemm.TABLE_VARIABLE, raising=False)
    monkeypatch.delenv(gemm.LIBRARY_VARIABLE, raising=False)
    gemm.read_anew()
    yield asked
    gemm.read_anew()


@pytest.mark.skipif(gemm.OneDnn.absent() is not None, reason="this torch has no oneDNN")
def test_the_first_run_measures_and_later_ones_read(first_use, tmp_path, capsys):
    assert Products().choices["float32"] == gemm.Choice("onednn", 64**2)
    assert "measuring matrix products on this CPU, once" in capsys.readouterr().err
    table = json.loads((tmp_path / "fastrl" / "products.json").read_text())
    assert table == {gemm.processor(): {"float32": ["onednn", 4096]}}
    assert Products().choices["float32"].library == "onednn"
    assert first_use == ["float32"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("variable", [gemm.TABLE_VARIABLE, gemm.LIBRARY_VARIABLE])
def test_what_is_named_is_not_measured(first_use, monkeypatch, tmp_path, variable):
    empty = tmp_path / "table.json"
    empty.write_text("{}")
    monkeypatch.setenv(variable, str(empty) if variable == gemm.TABLE_VARIABLE else "mm")
    Products()
    assert not first_use


def test_plans_measure_nothing(first_use, tmp_path):
    with rehearsal():  # in which products take no time
        Products()
    assert not first_use
    assert not list(tmp_path.rglob("products.json"))


def test_measuring_draws_none_of_the_runs_numbers(monkeypatch):
    monkeypatch.setattr(measure_products, "_WIDTHS", (32, 64))
    before = torch.random.get_rng_state()
    measure_products.measure(["float32"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_tables_that_cannot_be_kept_are_not_measured(first_use, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert Products().choices == gemm.by_rule()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.delenv(gemm.TABLE_VARIABLE, raising=False)
    machine.measure_products_once()
    assert not first_use


@pytest.mark.parametrize(("speeds", "rule", "expected"), [
    ({"mm": 1.0, "onednn": 1.09}, gemm.MM, gemm.MM),
    ({"mm": 1.0, "onednn": 1.11}, gemm.MM, gemm.Choice("onednn", 64)),
    ({"mm": 1.0, "onednn": 0.95}, gemm.Choice("onednn", 9), gemm.Choice("onednn", 9)),
    ({"mm": 1.0, "onednn": 0.9}, gemm.Choice("onednn", 9), gemm.MM),
    ({"mm": 1.0}, gemm.Choice("onednn", 9), gemm.MM),
])  # fmt: skip
def test_the_rule_gives_way_to_a_tenth(speeds, rule, expected):
    assert measure_products.chosen({8: speeds}, rule) == expected
