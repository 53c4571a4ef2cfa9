"""Rollouts by compiled code for CPUs: the tokens and numbers of PyTorch's."""

from typing import Any

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl_kernels._cpu.native import calls
from fastrl_kernels._cpu.native.build import why_not
from tests import tiny_models
from tests.golden import tiny

pytestmark = pytest.mark.skipif(why_not() is not None, reason="no compiled code here")
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12], [1]] * 5


def generated(model: Any, monkeypatch: pytest.MonkeyPatch, backend: str, **given: Any) -> Any:
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", backend)
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=24)
    return engine.generate(PROMPTS, SamplingParams(max_new_tokens=6, n=2, seed=1, **given))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_rollouts_are_pytorchs(family, monkeypatch):
    names, function = set(), calls._function
    monkeypatch.setattr(calls, "_function", lambda name: names.add(name) or function(name))
    model = tiny_models.language_model(family)
    for given in ({}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_p": 0.8}):
        expected = generated(model, monkeypatch, "torch", **given)
        assert not names
        found = generated(model, monkeypatch, "native", **given)
        drawn = {"draw"} if given in ({}, {"temperature": 0.7}) else set()  # not cut, nor greedy
        assert names == {"decode_attention"} | drawn
        names.clear()
        for x, y in zip(found.sequences, expected.sequences, strict=True):
            assert torch.equal(x, y)
        for name in ("logprobs", "entropies"):
            for x, y in zip(getattr(found, name), getattr(expected, name), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)
