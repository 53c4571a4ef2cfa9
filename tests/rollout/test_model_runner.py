"""Rollouts under autocast: the weights of products are cast once per rollout, to fixed places."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastrl import RolloutEngine, SamplingParams
from fastrl.models.utils import cache_argument
from fastrl.rollout.decode_step import DecodeStep
from fastrl.rollout.model_runner import AutocastWeightCache
from fastrl_kernels import gemm
from tests import tiny_models
from tests.golden import tiny

PROMPTS = tiny_models.prompts(3, 5, 1, 4)
PARAMS = SamplingParams(max_new_tokens=6, seed=0, suppress_tokens=[tiny.EOS])


@pytest.fixture(autouse=True)
def products_by_torch():
    """Fp32 copies, where those were forced, stand in for the cast ones."""
    with gemm.using({"float32": gemm.MM, "bfloat16": gemm.MM}):
        yield


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def engine_of(model):
    return RolloutEngine(model, tiny.tokenizer(), max_slots=3, autocast=autocast)


def assert_same(out, expected):
    for a, b in zip(out.sequences, expected.sequences, strict=True):
        assert torch.equal(a, b)
    for field in ("logprobs", "entropies", "values"):
        for a, b in zip(getattr(out, field), getattr(expected, field), strict=True):
            # The same products of bf16 numbers: only sums in fp32 may be rounded otherwise.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=field)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "qwen2"])
def test_results_are_autocasts(family, monkeypatch):
    model = tiny_models.policy(family)
    cached = engine_of(model).generate(PROMPTS, PARAMS)
    monkeypatch.setattr(AutocastWeightCache, "in_place", lambda *_: contextlib.nullcontext())
    assert_same(cached, engine_of(model).generate(PROMPTS, PARAMS))


def test_a_cache_goes_to_a_model_by_the_name_of_its_argument():
    """``cache`` from transformers 5.24 on."""
    model = tiny_models.policy("llama")
    expected = engine_of(model).generate(PROMPTS, PARAMS)
    inner = model.pretrained_model
    now = cache_argument(inner)

    class Newer(type(inner)):
        def forward(self, input_ids, cache=None, **given):
            assert "past_key_values" not in given
            return super().forward(input_ids, **{now: cache}, **given)

    inner.__class__ = Newer
    assert_same(engine_of(model).generate(PROMPTS, PARAMS), expected)
    *_, past = model(input_ids=torch.tensor([PROMPTS[0].tolist()]), return_past_key_values=True)
    assert model(input_ids=torch.tensor([[5]]), past_key_values=past)[0].shape[1] == 1


def test_copies_are_written_anew_in_their_places_after_an_update():
    model = tiny_models.policy("gpt2")
    engine = engine_of(model)
    before = engine.generate(PROMPTS, PARAMS)
    places = [copy.data_ptr() for copy in engine.model_runner.autocast_weights._copies.values()]
    assert len(places) == len(set(places)) > 8
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    after = engine.generate(PROMPTS, PARAMS)
    assert [
        copy.data_ptr() for copy in engine.model_runner.autocast_weights._copies.values()
    ] == places
    assert_same(after, engine_of(model).generate(PROMPTS, PARAMS))
    assert not torch.equal(after.logprobs[0], before.logprobs[0])


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_weights_themselves_are_back_afterwards(error, monkeypatch):
    model = tiny_models.policy("gpt2")  # its head shares the embedding's table
    before = dict(model.named_parameters(remove_duplicate=False))
    engine = engine_of(model)
    if error:

        def fail(*_):
            head = model.pretrained_model.lm_head.weight
            assert head.dtype == torch.bfloat16
            assert model.pretrained_model.transformer.wte.weight.dtype == torch.float32
            raise error

        monkeypatch.setattr(DecodeStep, "__call__", fail)
        with pytest.raises(error):
            engine.generate(PROMPTS, PARAMS)
    else:
        engine.generate(PROMPTS, PARAMS)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_a_callers_own_autocast_serves_and_keeps_its_setting():
    model = tiny_models.policy("gpt2")
    with autocast():
        out = RolloutEngine(model, tiny.tokenizer(), max_slots=3).generate(PROMPTS, PARAMS)
        assert torch.is_autocast_cache_enabled()
    assert_same(out, engine_of(model).generate(PROMPTS, PARAMS))


class Casts(TorchDispatchMode):
    """Counts casts of tensors with these addresses."""

    def __init__(self, addresses):
        super().__init__()
        self.addresses, self.count = addresses, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ == "_to_copy":
            self.count += args[0].data_ptr() in self.addresses
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cached", [True, False])
def test_a_step_casts_no_weight(cached, monkeypatch):
    model = tiny_models.policy("gpt2")
    engine = engine_of(model)
    if not cached:  # so that it is seen that there were some
        monkeypatch.setattr(AutocastWeightCache, "in_place", lambda *_: contextlib.nullcontext())
    addresses = {p.data_ptr() for p in model.pretrained_model.parameters()}
    counts, call = [], DecodeStep.__call__

    def watched(self, *args):
        torch.clear_autocast_cache()
        with Casts(addresses) as casts:
            call(self, *args)
        counts.append(casts.count)

    monkeypatch.setattr(DecodeStep, "__call__", watched)
    engine.generate(PROMPTS, PARAMS)
    assert (max(counts) == 0) is cached


def test_autocast_may_come_and_go_between_calls():
    model = tiny_models.policy("gpt2")
    engine = RolloutEngine(model, tiny.tokenizer(), max_slots=3)
    plain = engine.generate(PROMPTS, PARAMS)
    with autocast():
        assert_same(engine.generate(PROMPTS, PARAMS), engine_of(model).generate(PROMPTS, PARAMS))
    assert_same(engine.generate(PROMPTS, PARAMS), plain)


def test_without_autocast_nothing_is_copied():
    engine = RolloutEngine(tiny_models.policy("gpt2"), tiny.tokenizer())
    engine.generate(PROMPTS, PARAMS)
    assert not engine.model_runner.autocast_weights._copies


def test_sleep_frees_the_copies():
    engine = engine_of(tiny_models.policy("gpt2"))
    engine.generate(PROMPTS, PARAMS)
    engine.sleep()
    assert not engine.model_runner.autocast_weights._copies
