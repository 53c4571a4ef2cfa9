"""Captured decode steps: what is captured when, on a stand-in for CUDA that replays by calling."""

import contextlib
import warnings

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout.cuda_graphs import GraphRunner
from fastrl.rollout.decode_step import DecodeStep
from tests import tiny_models
from tests.golden import tiny

LENGTHS = (5, 1, 9, 3, 7, 2)
PARAMS = SamplingParams(max_new_tokens=[9, 2, 5, 7, 3, 6], seed=0, suppress_tokens=[tiny.EOS])


class Graph:
    """Replays the last step that was called while it was captured."""

    recording = None

    def __init__(self):
        self.replay = None


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    @contextlib.contextmanager
    def graph(captured, pool, stream):
        assert (pool, type(stream)) == ("pool", Stream)
        Graph.recording = captured
        yield
        Graph.recording = None

    class Stream:
        def wait_stream(self, other):
            pass

    for name, stand_in in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": contextlib.nullcontext,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    call = DecodeStep.__call__

    def recorded(self, *args):
        if Graph.recording is not None:
            Graph.recording.replay = lambda: call(self, *args)
        call(self, *args)

    monkeypatch.setattr(DecodeStep, "__call__", recorded)


def engines(model, slots=4):
    """One that captures, and one that does not."""
    both = [RolloutEngine(model, tiny.tokenizer(), slots) for _ in range(2)]
    both[0]._runner = GraphRunner()
    return both


def captures(engine, params=PARAMS, plain=None):
    """How many steps a rollout captures; its samples are those of ``plain``."""
    prompts = tiny_models.prompts(*LENGTHS)
    out = engine.generate(prompts, params)
    assert out.stats["perf/graph_replays"] == out.stats["perf/decode_steps"]
    if plain is not None:
        expected = plain.generate(prompts, params)
        for a, b in zip(out.sequences, expected.sequences, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(out.logprobs, expected.logprobs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    return out.stats["perf/graph_captures"]


def test_every_bucket_is_captured_once():
    captured, plain = engines(tiny_models.policy("gpt2"))
    assert captures(captured, plain=plain) == 4, "4, 3, 2 and 1 rows"
    assert captures(captured, plain=plain) == 0


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.3}, {"stop": [[5, 6]]}, {"suppress_tokens": [3, 4]}],
    ids=str,
)
def test_rules_keep_their_addresses_from_call_to_call(settings):
    params = SamplingParams(**{**vars(PARAMS), **settings})
    captured, plain = engines(tiny_models.policy("gpt2"))
    assert captures(captured, params, plain) > 0
    assert captures(captured, SamplingParams(**{**vars(params), "seed": 1}), plain) == 0


def test_new_weights_in_old_places_need_no_other_graph():
    model = tiny_models.policy("gpt2")
    captured, plain = engines(model)
    captures(captured)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert captures(captured, plain=plain) == 0


@pytest.mark.parametrize("change", ["weights", "temperature", "memory"])
def test_what_a_graph_holds_is_captured_anew_where_it_changes(change):
    model = tiny_models.policy("gpt2")
    captured, plain = engines(model)
    captures(captured)
    params = PARAMS
    if change == "weights":
        weight = model.pretrained_model.transformer.ln_f.weight
        weight.data = weight.data.clone() * 1.5
    elif change == "temperature":
        params = SamplingParams(**{**vars(PARAMS), "temperature": 0.7})
    else:
        captured.sleep()
    assert captures(captured, params, plain) == 4


def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch):
    captured, plain = engines(tiny_models.policy("gpt2"))

    @contextlib.contextmanager
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    prompts = tiny_models.prompts(*LENGTHS)
    with pytest.warns(UserWarning, match=r"cannot be captured \(operation not permitted"):
        out = captured.generate(prompts, PARAMS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = captured.generate(prompts, PARAMS)
    expected = plain.generate(prompts, PARAMS)
    for figures in (out, again):
        assert all(map(torch.equal, figures.sequences, expected.sequences))
    assert again.stats["perf/graph_replays"] == 0
