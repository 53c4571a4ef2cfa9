"""The bytes that decoding cannot do without, and the share of the device's bandwidth."""

import pytest
import torch

from fastrl import RolloutEngine, SamplingParams
from fastrl.rollout import bandwidth
from fastrl.rollout.kv_cache import KVCache, LayerShape
from tests import tiny_models
from tests.golden import tiny


def test_keys_and_values_of_live_tokens_are_counted_and_no_others():
    kv_cache = KVCache(
        [LayerShape(2, 4, 6), LayerShape(1, 8, 8)], 3, 64, torch.float32, torch.device("cpu")
    )
    kv_cache.windows = [None, 5]
    samples = [(3, 7), (1, 1), (6, 2)]
    expected = 0
    for prompt, made in samples:
        for context in range(prompt, prompt + made):
            expected += 4 * 2 * (4 + 6) * context + 4 * (8 + 8) * min(context, 5)
    assert bandwidth.kv_bytes(kv_cache, samples) == expected
    assert bandwidth.kv_bytes(kv_cache, []) == 0


@pytest.mark.parametrize(
    ("family", "tied"), [("gpt2", True), ("llama", False)], ids=["tied", "untied"]
)
def test_a_table_that_is_looked_up_is_not_read_whole(family, tied):
    model = tiny_models.policy(family).pretrained_model
    table = model.get_input_embeddings().weight.nbytes
    whole = sum(p.nbytes for p in model.parameters())
    positions = model.transformer.wpe.weight.nbytes if tied else 0
    assert bandwidth.weight_bytes(model) == whole - positions - (0 if tied else table)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mistral"])
def test_windows_are_those_of_the_layers(family):
    model = tiny_models.policy(family)
    engine = RolloutEngine(model, tiny.tokenizer())
    engine.generate(tiny_models.prompts(3), SamplingParams(max_new_tokens=2))
    config = model.config
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    expected = [window] * config.num_hidden_layers
    if kinds:
        expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert engine._kv_cache.windows == expected


def test_the_share_is_what_was_read_over_what_could_have_been(monkeypatch):
    monkeypatch.setattr(bandwidth, "bandwidth", lambda _: 1e9)
    model = tiny_models.policy("llama")
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=2)
    params = SamplingParams(max_new_tokens=5, n=2, suppress_tokens=[tiny.EOS])
    out = engine.generate(tiny_models.prompts(3, 6), params)
    weights = out.stats["perf/decode_steps"] * bandwidth.weight_bytes(model.pretrained_model)
    keys_and_values = bandwidth.kv_bytes(engine._kv_cache, [(3, 5), (3, 5), (6, 5), (6, 5)])
    seconds = out.stats["time/rollout/decode"]
    share = out.stats["perf/bandwidth_share"]
    assert share == pytest.approx((weights + keys_and_values) / seconds / 1e9)


def test_bandwidth_is_a_rate_of_bytes(monkeypatch):
    monkeypatch.setattr(bandwidth, "_seconds", lambda source, target: 2 * source.nbytes / 3e9)
    bandwidth.bandwidth.cache_clear()
    assert bandwidth.bandwidth(torch.device("cpu")) == pytest.approx(3e9)
    bandwidth.bandwidth.cache_clear()
