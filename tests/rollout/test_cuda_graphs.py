"""Captured decode steps: what is captured when, on a stand-in for CUDA that replays by calling."""

import contextlib
import itertools
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


class Device:
    """What torch knows of the device: the stream, and its allocator's pools."""

    def __init__(self):
        self.stream = "the default stream"
        self.pools = []  # of the captures so far
        self.filled = None  # the pool that takes what is allocated
        self.recording = None  # the graph


class Graph:
    """Replays the last step that was called while it was captured."""

    replay = None


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    device, handles = Device(), itertools.count()

    class Stream:
        def __init__(self, _device=None):
            pass

        def wait_stream(self, other):
            pass

    @contextlib.contextmanager
    def stream(new):
        old, device.stream = device.stream, new
        try:
            yield
        finally:
            device.stream = old

    @contextlib.contextmanager
    def graph(captured, pool, stream, capture_error_mode):
        assert type(stream) is Stream
        assert capture_error_mode == "thread_local", "other threads may go on with their work"
        assert device.filled is None, "captures_underway.empty()"
        device.stream, before = stream, device.stream
        device.pools.append(pool)
        device.filled, device.recording = pool, captured
        try:
            yield
        finally:
            device.recording = None
        # Behind an error, the end of the capture fails as well: neither is done.
        device.filled = None
        device.stream = before

    def end(_index, pool):
        if device.filled != pool:
            raise RuntimeError("not currently recording to mempool_id")
        device.filled = None

    for name, stand_in in {
        "Stream": Stream,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "stream": stream,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: next(handles),
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _index, _pool: None, raising=False)
    call = DecodeStep.__call__

    def recorded(self, *args):
        if device.recording is not None:
            device.recording.replay = lambda: call(self, *args)
        call(self, *args)

    monkeypatch.setattr(DecodeStep, "__call__", recorded)
    return device


def engines(model, slots=4):
    """One that captures, and one that does not."""
    both = [RolloutEngine(model, tiny.tokenizer(), slots) for _ in range(2)]
    both[0]._runner = GraphRunner(torch.device("cuda", 0))
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


@pytest.mark.parametrize("settings", [
    {"repetition_penalty": 1.3}, {"stop": [[5, 6]]}, {"suppress_tokens": [3, 4]},
], ids=str)  # fmt: skip
def test_rules_keep_their_addresses_from_call_to_call(settings):
    params = SamplingParams(**{**vars(PARAMS), **settings})
    captured, plain = engines(tiny_models.policy("gpt2"))
    assert captures(captured, params, plain) > 0
    assert captures(captured, SamplingParams(**{**vars(params), "seed": 1}), plain) == 0


def test_steps_are_captured_on_one_stream_for_good():
    """Libraries keep some 32 MiB for each stream that they have run on."""
    captured, _ = engines(tiny_models.policy("gpt2"))
    stream = captured._runner.stream
    captures(captured)
    captured.sleep()
    captures(captured)
    assert captured._runner.stream is stream
    assert captured._trial()._runner.stream is stream


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


def test_a_pool_whose_graphs_are_gone_is_not_taken_again(cuda):
    model = tiny_models.policy("gpt2")
    captured, _ = engines(model)
    captures(captured)
    before = set(cuda.pools)
    assert len(before) == 1, "one for all buckets"
    weight = model.pretrained_model.transformer.ln_f.weight
    weight.data = weight.data.clone()
    captures(captured)
    assert len(set(cuda.pools) - before) == 1


@pytest.mark.filterwarnings(tiny_models.PEFT_WARNING)
def test_steps_are_captured_anew_where_adapters_act_otherwise():
    from peft import get_peft_model

    model = get_peft_model(tiny_models.language_model("gpt2"), tiny_models.lora())
    model.add_adapter("other", tiny_models.lora())
    captured, _ = engines(model)
    assert captures(captured) == 4
    with model.disable_adapter():
        assert captures(captured) == 4
    model.set_adapter("other")
    assert captures(captured) == 4
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(2.0)
    assert captures(captured) == 4
    assert captures(captured) == 0


def test_a_step_that_cannot_be_captured_runs_as_it_is(cuda, monkeypatch):
    captured, plain = engines(tiny_models.policy("gpt2"))
    recorded = DecodeStep.__call__

    def refused(self, *args):
        if cuda.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        recorded(self, *args)

    monkeypatch.setattr(DecodeStep, "__call__", refused)
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
    assert cuda.stream == "the default stream"
    assert cuda.filled is None, "the allocator goes on as in a capture"
    monkeypatch.setattr(DecodeStep, "__call__", recorded)
    captured.sleep()
    assert captures(captured, plain=plain) == 4
