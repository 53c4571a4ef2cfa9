"""flash-attn's kernel in decode steps: when it is taken, and what it is asked for."""

import itertools
import sys
from types import ModuleType

import pytest
import torch

from fastrl import SamplingParams
from fastrl.models.attention import Variant
from fastrl.rollout import RolloutEngine, attention, choose_engine
from fastrl.rollout.attention import DecodeAttention, FlashDecode, choose_decode_kernel, decode
from fastrl.rollout.kv_cache import KVCache, LayerShape
from fastrl_kernels import reference
from tests import tiny_models
from tests.golden import tiny
from tests.kernels.judge import assert_close_to_exact
from tests.kernels.roundings import Rounded
from tests.rollout.test_decode_step import Watch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
UNSET = "FASTRL_TESTS_UNSET"
LENGTHS = (1, 9, 12, 4)
SPAN = 12


class FlashAttn(ModuleType):
    """What flash-attn documents of ``flash_attn_with_kvcache``, for a cache that is only read."""

    def __init__(self):
        super().__init__("flash_attn")
        self.calls = []

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        self.calls.append((q, cache_seqlens, window_size, softcap))
        batch, queries, heads, width = q.shape
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert q.dtype in (BF16, FP16)
        assert k_cache.shape == v_cache.shape == (batch, *k_cache.shape[1:3], width)
        assert heads % k_cache.shape[2] == 0
        assert width <= 256
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert (cache_seqlens.dtype, cache_seqlens.shape) == (torch.int32, (batch,))
        assert cache_seqlens.is_contiguous()
        assert causal
        scale = width**-0.5 if softmax_scale is None else softmax_scale
        left, right = window_size

        keys, values = (
            x.double().repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)
            for x in (k_cache, v_cache)
        )
        scores = q.double().transpose(1, 2) @ keys.mT * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
        # Aligned to the bottom right corner: what query i is next to, as a key.
        at = torch.arange(queries).view(1, 1, -1, 1) + cache_seqlens.view(-1, 1, 1, 1) - queries
        key = torch.arange(k_cache.shape[1])
        seen = key <= at
        if left >= 0:
            seen = seen & (key >= at - left)
        if right >= 0:
            seen = seen & (key <= at + right)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ values).transpose(1, 2).to(q.dtype)


@pytest.fixture
def flash(monkeypatch):
    """As if it were installed, and this were a GPU that it knows."""
    module = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(attention, "_runs_flash", lambda device: True)
    monkeypatch.setattr(attention, "BACKEND_VARIABLE", UNSET)  # tests on a CPU name a backend
    return module


def cache_of(widths, dtype=BF16, heads=2):
    return KVCache([LayerShape(heads, *widths)], 6, 16, dtype, CPU)


def step_of(cache, positions):
    """As it is when keys and values of the first layer have been written."""
    step = DecodeAttention(choose_decode_kernel(cache), cache, positions, SPAN)
    step.layer = 0
    return step


VARIANTS = list(itertools.product([None, 0.3], [None, 1, 3, 11, 12, 100], [None, 1.5]))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_it_attends_to_what_ours_does(flash, dtype, group, variant):
    """No worse than twice our own error against float64."""
    cache = cache_of((16, 16), dtype)
    generator = torch.Generator().manual_seed(0)
    for x in (*cache.keys, *cache.values):
        x.copy_(torch.randn(x.shape, generator=generator))
        for slot, length in enumerate(LENGTHS):
            x[slot, length:] = 7.5
    query = torch.randn(len(LENGTHS), 2 * group, 1, 16, generator=generator).to(dtype)
    lengths = torch.tensor(LENGTHS)
    stored = cache.keys[0], cache.values[0]
    step = step_of(cache, lengths - 1)
    out = step.attend(query, *stored, Variant(*variant))
    assert len(flash.calls) == 1

    rows, options = (
        query.squeeze(2),
        dict(zip(("scale", "window", "softcap"), variant, strict=True)),
    )

    def formula(as_dtype, **more):
        inputs = map(as_dtype, (rows, *stored))
        return reference.decode_attention(*inputs, lengths, **options, **more)

    runs = Rounded(lambda: formula(torch.Tensor.float, weights_dtype=dtype))
    assert (out.dtype, out.shape) == (dtype, (len(LENGTHS), 1, 2 * group, 16))
    assert_close_to_exact(out.squeeze(1), runs, formula(torch.Tensor.double), "out")


@pytest.mark.parametrize("window", [None, 12, 100])
def test_a_window_that_hides_nothing_is_none(flash, window):
    cache = cache_of((8, 8))
    step = step_of(cache, torch.tensor([3, 11]))
    query = torch.zeros(2, 2, 1, 8, dtype=BF16)
    step.attend(query, cache.keys[0], cache.values[0], Variant(None, window, None))
    assert flash.calls[0][2] == (-1, -1)


def test_an_engine_decodes_through_it(flash):
    """Its numbers are near plain forwards', the host reads nothing, and lengths are converted once
    per step."""
    model = tiny_models.language_model("gemma2", head_dim=8, sliding_window=4).to(BF16)
    engine = choose_engine(model, tiny.tokenizer(), max_slots=3)  # else a warning, an error here
    assert isinstance(engine, RolloutEngine)
    flash.calls.clear()
    prompts = tiny_models.prompts(3, 6, 1)
    params = SamplingParams(max_new_tokens=5, min_new_tokens=5, seed=0)
    assert [len(s) for s in engine.generate(prompts, params).sequences] == [5, 5, 5]
    layers = model.config.num_hidden_layers
    assert len(flash.calls) == 5 * layers
    for step in (flash.calls[i : i + layers] for i in range(0, len(flash.calls), layers)):
        assert len({id(lengths) for _, lengths, _, _ in step}) == 1
        assert {window for _, _, window, _ in step} == {(3, 0), (-1, -1)}
        assert {softcap for _, _, _, softcap in step} == {model.config.attn_logit_softcapping}


@pytest.mark.parametrize("more", [{"sinks": torch.tensor([-1.0, 2.0])}, {"chunk": 4}], ids=str)
def test_ours_is_taken_for_layers_with_sinks_or_chunks(flash, more):
    cache, positions = cache_of((8, 8)), torch.tensor([3, 11])
    for x in (*cache.keys, *cache.values):
        x.normal_(generator=torch.Generator().manual_seed(0))
    query = torch.randn(2, 2, 1, 8, generator=torch.Generator().manual_seed(1)).to(BF16)
    stored, step = (cache.keys[0], cache.values[0]), step_of(cache, positions)
    out = step.attend(query, *stored, Variant(None, None, None, **more))
    assert not flash.calls
    exact = [x.double() for x in (query.squeeze(2), *stored)]
    expected = reference.decode_attention(*exact, positions + 1, **more)
    torch.testing.assert_close(out.squeeze(1).double(), expected, rtol=1e-2, atol=1e-2)
    assert isinstance(step.kernel, FlashDecode), "of the model's other layers"


def test_the_host_reads_nothing_for_it(flash):
    cache = cache_of((8, 8))
    positions, query = torch.tensor([3, 11]), torch.zeros(2, 2, 1, 8, dtype=BF16)
    with Watch(forbid_reads=True) as watch:
        step = step_of(cache, positions)
        step.attend(query, cache.keys[0], cache.values[0], Variant(None, 4, 2.0))
    assert watch.operators > 5, "the watch saw nothing"
    assert len(flash.calls) == 1


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("width", [8, 64, 80, 256])
def test_it_is_taken_where_it_fits(flash, width, dtype):
    assert isinstance(choose_decode_kernel(cache_of((width, width), dtype)), FlashDecode)


@pytest.mark.parametrize("widths", [(264, 264), (512, 512), (16, 8), (8, 16), (4, 4), (12, 12)])
def test_ours_is_taken_for_other_widths(flash, widths):
    assert choose_decode_kernel(cache_of(widths)) is decode


def test_one_layer_of_another_width_is_enough(flash):
    layers = [LayerShape(2, 8, 8), LayerShape(2, 8, 16)]
    assert choose_decode_kernel(KVCache(layers, 1, 4, BF16, CPU)) is decode


def test_ours_is_taken_in_fp32(flash):
    assert choose_decode_kernel(cache_of((8, 8), FP32)) is decode


def test_ours_is_taken_where_flash_attn_cannot_be_imported(flash, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # import raises ImportError
    assert choose_decode_kernel(cache_of((8, 8))) is decode
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # without the function
    assert choose_decode_kernel(cache_of((8, 8))) is decode


def test_ours_is_taken_where_flash_attn_is_too_old(flash, monkeypatch):
    def without_softcap(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None,
                        softmax_scale=None, causal=False, window_size=(-1, -1)):  # fmt: skip
        raise AssertionError

    monkeypatch.setattr(flash, "flash_attn_with_kvcache", without_softcap)
    assert choose_decode_kernel(cache_of((8, 8))) is decode


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_backend_that_the_environment_names_is_ours(flash, backend, monkeypatch):
    monkeypatch.setattr(attention, "BACKEND_VARIABLE", "FASTRL_KERNELS_BACKEND")
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", backend)
    assert choose_decode_kernel(cache_of((8, 8))) is decode
    monkeypatch.setenv("FASTRL_KERNELS_BACKEND", "auto")
    assert isinstance(choose_decode_kernel(cache_of((8, 8))), FlashDecode)


@pytest.mark.parametrize(("device", "hip", "capability", "runs"), [
    ("cuda", None, (8, 0), True),
    ("cuda", None, (9, 0), True),
    ("cuda", None, (7, 5), False),
    ("cuda", "6.4", (9, 4), False),
    ("cpu", None, (9, 0), False),
])  # fmt: skip
def test_devices_that_it_runs_on(device, hip, capability, runs, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert attention._runs_flash(torch.device(device)) == runs
