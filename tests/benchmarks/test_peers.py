"""Peers: those that are here agree, those that are not say why."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from benchmarks.before import build, cases, peers
from benchmarks.before.attention import Attention
from benchmarks.before.cases import Case
from benchmarks.before.problem import errors, results, worst_relative

CPU = torch.device("cpu")
SHAPES = {
    "token_logprobs": {"vocabulary": 50, "entropy": "gradient", "active": 0.5},
    "linear_logprobs": {"vocabulary": 50, "hidden": 8, "entropy": "metric", "active": 0.5},
    "linear_ppo_loss": {"vocabulary": 50, "hidden": 8, "entropy": "metric", "active": 0.5},
    "gae": {"steps": 9, "active": 0.7},
    "decode_attention": {"steps": 9, "active": 0.5, "attention": Attention(6, 2, 8, window=5)},
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
def test_flash_attn_is_called_as_its_documentation_says(options, monkeypatch):
    case = Case(
        "decode_attention", 6, "bf16", steps=9, active=0.5, attention=Attention(6, 2, 8, **options)
    )
    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttn)
    monkeypatch.setattr(peers, "_needs_gpu", lambda device: None)
    problem = build.problem(case, CPU)
    found, _ = peers.peers_of(case, CPU)
    error = worst_relative(errors(problem, results(problem, found["flash-attn"].call)))
    assert error <= peers.TOLERANCES["bf16"]
    assert ("sdpa" in found) == ("softcap" not in options)
    _, absent = peers.peers_of(dataclasses.replace(case, dtype="fp32"), CPU)
    assert "half precision" in absent["flash-attn"]


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
