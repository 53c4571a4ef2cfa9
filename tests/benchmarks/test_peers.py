"""Peers: those that are here agree, those that are not say why."""

from __future__ import annotations

import pytest
import torch

from benchmarks import build, cases, peers
from benchmarks.cases import Case
from benchmarks.problem import errors, results, worst_relative

CPU = torch.device("cpu")
SHAPES = {
    "token_logprobs": {"vocabulary": 50, "entropy": "gradient", "active": 0.5},
    "linear_logprobs": {"vocabulary": 50, "hidden": 8, "entropy": "metric", "active": 0.5},
    "linear_ppo_loss": {"vocabulary": 50, "hidden": 8, "entropy": "metric", "active": 0.5},
    "gae": {"steps": 9, "active": 0.7},
}


@pytest.mark.parametrize("op", cases.EXPORTS)
def test_every_peer_is_either_found_or_absent_with_a_reason(op):
    case = Case(op, 6, **SHAPES.get(op, {"vocabulary": 50}))
    found, absent = peers.peers_of(case, CPU)
    assert found.keys() | absent.keys() == peers._PEERS[op].keys()
    assert not found.keys() & absent.keys()
    assert all(absent.values())


@pytest.mark.parametrize("op", [op for op in SHAPES if op in cases.available()])
def test_the_peers_that_are_here_compute_the_same(op):
    problem = build.problem(Case(op, 6, **SHAPES[op]), CPU)
    found, _ = peers.peers_of(Case(op, 6, **SHAPES[op]), CPU)
    for name, peer in found.items():
        if name == "torch.compile":  # takes a minute, and is eager's own formula
            continue
        error = worst_relative(errors(problem, results(problem, peer.call)))
        assert error <= peers.TOLERANCES["fp32"], name


def test_a_library_that_is_missing_or_broken_is_listed(monkeypatch):
    def missing(case, device):
        raise ModuleNotFoundError("No module named 'lib'")

    def broken(case, device):
        raise RuntimeError("cannot load\nmore lines")

    monkeypatch.setitem(peers._PEERS, "gae", {"missing": missing, "broken": broken})
    found, absent = peers.peers_of(Case("gae", 2, steps=3), CPU)
    assert not found
    assert absent == {
        "missing": "not installed (No module named 'lib')",
        "broken": "RuntimeError: cannot load",
    }
