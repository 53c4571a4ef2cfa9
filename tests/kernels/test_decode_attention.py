"""decode_attention: every row against float64, what it may read, and its manners."""

import importlib
import inspect
import math

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fastrl_kernels import LiveTokens, decode_attention, reference
from fastrl_kernels.dispatch import interpreting
from fastrl_kernels.types import LOWEST
from tests.kernels.judge import DTYPES, assert_close_to_exact, names
from tests.kernels.launches import constants, floats_arrive_as_double, interpreted, watched
from tests.kernels.roundings import Rounded
from tests.together import together

BF16, FP32 = torch.bfloat16, torch.float32
SPLIT = 256
ON_AMD = torch.version.hip is not None  # where a second launch merges
BORDERS = (0, 1, 255, 256, 257, 513)
OPTIONS = {
    "plain": {}, "window": {"window": 100}, "window across a border": {"window": 258},
    "window of one": {"window": 1}, "wide window": {"window": 5000}, "chunk": {"chunk": 100},
    "chunk of a split": {"chunk": SPLIT}, "wide chunk": {"chunk": 5000},
    "softcap": {"softcap": 2.0}, "sinks": {"sinks": 3.0},
    "all": {"scale": 0.3, "softcap": 1.5, "window": 130, "chunk": 200, "sinks": 1.0},
}  # fmt: skip


def cache(
    lengths,
    dtype=FP32,
    device="cpu",
    *,
    tokens=520,
    heads=2,
    group=2,
    width=16,
    value_width=None,
    dead=7.5,
    seed=0,
):
    """Query, keys, values and lengths, with more slots than rows; dead tokens hold ``dead``."""
    generator = torch.Generator().manual_seed(seed)
    slots = len(lengths) + 1
    query = torch.randn(len(lengths), heads * group, width, generator=generator)
    keys = torch.randn(slots, tokens, heads, width, generator=generator)
    values = torch.randn(slots, tokens, heads, value_width or width, generator=generator)
    for slot, length in enumerate([*lengths, 0]):
        keys[slot, length:] = values[slot, length:] = dead
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return [x.to(device) for x in (query.to(dtype), keys.to(dtype), values.to(dtype), lengths)]


def judge(query, keys, values, lengths, backend, **options):
    """Against float64, by the formula in fp32 with weights of the values' dtype.

    Args:
        sinks: the highest of them, or None.
    """
    if options.get("sinks") is not None:
        heads = query.shape[1]
        options["sinks"] = torch.linspace(-4, options["sinks"], heads).to(query)
    out = decode_attention(query, keys, values, lengths, backend=backend, **options)
    options.pop("span", None)

    lengths = lengths.lengths if isinstance(lengths, LiveTokens) else lengths

    def formula(dtype, weights_dtype=None):
        inputs = (x.to(dtype) for x in (query, keys, values))
        return reference.decode_attention(*inputs, lengths, **options, weights_dtype=weights_dtype)

    assert (out.dtype, out.device) == (query.dtype, query.device)
    assert out.is_contiguous()
    runs = Rounded(lambda: formula(FP32, values.dtype))
    assert_close_to_exact(out, runs, formula(torch.float64), "out")
    assert (out[lengths == 0] == 0).all()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_match_the_formula(backend, device, dtype, options):
    judge(*cache(BORDERS, dtype, device, heads=1), backend, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize("group", [1, 4, 8, 35])
def test_heads_that_share_keys(backend, device, dtype, group):
    judge(*cache((3, 70), dtype, device, tokens=70, group=group), backend)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize(
    ("width", "value_width"),
    [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (72, 40), (288, 256), (320, 300)],
)
def test_widths_of_heads(backend, device, dtype, width, value_width):
    inputs = cache((5, 270), dtype, device, tokens=270, width=width, value_width=value_width)
    judge(*inputs, backend)


def test_lengths_of_many_splits(backend, device):
    """More than are merged at a time; a window then begins in the middle."""
    lengths = (SPLIT * 17 + 9, SPLIT * 16, SPLIT * 16 + 1)
    inputs = cache(lengths, device=device, tokens=SPLIT * 18, heads=1)
    inputs[1][0, SPLIT * 16 + 3] *= 4.0  # the highest score is among the last
    judge(*inputs, backend)
    judge(*inputs, backend, window=SPLIT * 9)


def test_scores_far_apart(backend, device):
    """The heaviest token in any split, and scores whose exponentials overflow."""
    query, keys, values, lengths = cache((520,) * 4, device=device)
    query[:] = 5.0
    keys[0, 3], keys[1, 300], keys[2, 519] = 3.0, 3.0, 3.0
    keys[3] *= 30
    judge(query, keys, values, lengths, backend)
    judge(query, keys - 20, values, lengths, backend)
    judge(query, keys - 20, values, lengths, backend, sinks=50.0)


def test_a_sink_that_takes_all_and_one_that_takes_nothing(backend, device):
    inputs = cache(BORDERS, device=device, heads=1)
    expected = decode_attention(*inputs, backend=backend)
    sinks = torch.tensor([-math.inf, 1e5], device=device)
    out = decode_attention(*inputs, sinks=sinks, backend=backend)
    torch.testing.assert_close(out[:, 0], expected[:, 0])
    assert (out[:, 1] == 0).all()


def test_values_within_keys(backend, device):
    """Latents: one head of keys, whose first numbers are the values."""
    query, latents, _, lengths = cache(BORDERS, BF16, device, heads=1, group=20, width=40)
    judge(query, latents, latents[..., :24], lengths, backend, scale=0.1)


SLOW = [HealthCheck.too_slow]  # as machines may be


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(data=st.data())
def test_any_shape_matches_the_formula(data):
    draw = data.draw
    tokens = draw(st.integers(1, 400))
    lengths = draw(st.lists(st.integers(0, tokens), min_size=1, max_size=3))
    inputs = cache(
        lengths, draw(st.sampled_from(DTYPES)), "cuda" if torch.cuda.is_available() else "cpu",
        tokens=tokens, heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 5)),
        width=draw(st.integers(1, 40)), value_width=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    options = {
        "window": draw(st.none() | st.integers(1, 450)),
        "chunk": draw(st.none() | st.integers(1, 450)),
        "sinks": draw(st.none() | st.floats(-5, 5)),
        "softcap": draw(st.none() | st.floats(0.5, 50)),
        "span": draw(st.integers(max(1, *lengths), tokens)),
    }
    for backend in ("torch", "triton"):
        judge(*inputs, backend, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_dead_tokens_are_not_read(device, dtype):
    inputs = cache(BORDERS, dtype, device, dead=math.nan)
    judge(*inputs, "triton")
    # Nor what a window has left behind.
    keys, values = inputs[1:3]
    for slot, length in enumerate(BORDERS):
        keys[slot, : max(0, length - 70)] = values[slot, : max(0, length - 70)] = math.nan
    judge(*inputs, "triton", window=70)
    judge(*inputs, "triton", window=70, softcap=2.0, span=514)
    # Nor what is in another chunk.
    for slot, length in enumerate(BORDERS):
        begin = max(0, length - 1) // 60 * 60
        keys[slot, begin:length] = values[slot, begin:length] = 0.5
    judge(*inputs, "triton", chunk=60, sinks=1.0)


def test_what_dead_tokens_hold_does_not_matter(backend, device):
    results = [
        decode_attention(*cache(BORDERS, device=device, dead=dead), backend=backend)
        for dead in (0.0, 1e4)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("span", [None, 100])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 9}, {"chunk": 9}], ids=str)
def test_rows_beyond_the_span_are_nan(backend, device, span, options):
    query, keys, values, lengths = cache((7, 50, 0, 90), device=device, tokens=300)
    expected = decode_attention(query, keys, values, lengths, backend=backend, **options)
    for dtype, beyond in ((torch.int32, 2**31 - 1), (torch.int64, 2**33 + 7)):
        lengths = lengths.to(dtype)
        lengths[1] = beyond if span is None else span + 1
        given = (query, keys, values, lengths)
        out = decode_attention(*given, span=span, backend=backend, **options)
        assert out[1].isnan().all()
        torch.testing.assert_close(out[[0, 2, 3]], expected[[0, 2, 3]], rtol=1e-6, atol=1e-6)


def test_views_of_an_arena(backend, device):
    """Layers and both halves in one block, tokens outermost, a query among keys and values."""
    lengths = torch.tensor([300, 17, 299], device=device)
    generator = torch.Generator().manual_seed(0)
    arena = torch.randn(300, 4, 5, 2, 2, 16, generator=generator).to(device, BF16)
    fused = torch.randn(3, 9, 16, generator=generator).to(device, BF16)
    keys, values = arena[:, :, 3].permute(2, 1, 0, 3, 4)
    query = fused[:, 2:6]
    expected = judge(query, keys, values, lengths, backend)
    across = query.mT.contiguous().mT  # a query may lie any way
    packed = [x.contiguous() for x in (query, keys, values)]
    for same in ((across, keys, values), packed):
        out = decode_attention(*same, lengths, backend=backend)
        if backend == "triton":
            assert torch.equal(out, expected)
    judge(query[..., 1:12], keys[..., 1:12], values[..., 3:], lengths, backend)


@pytest.mark.parametrize("far", ["slots", "tokens", "heads"])
def test_offsets_have_64_bits(device, far):
    """2³¹ elements from the first slot, token or head to the third. The pages are never touched."""
    stride = 2**30 + 16
    arena = torch.tensor([], dtype=BF16, device=device)
    arena.set_(torch.UntypedStorage(2 * (2 * stride + 2**13), device=device), 0, (2 * stride,))
    strides = [1024, 64, 16]
    strides[("slots", "tokens", "heads").index(far)] = stride
    spread = arena.as_strided((3, 3, 3, 16), (*strides, 1))
    query, keys, _, lengths = cache((3, 2, 3), BF16, device, tokens=3, heads=3)
    keys = spread.copy_(keys[:3]).contiguous()
    for inputs in ((query, spread, keys), (query, keys, spread)):
        expected = decode_attention(query, keys, keys, lengths, backend="triton")
        assert torch.equal(decode_attention(*inputs, lengths, backend="triton"), expected)


@pytest.mark.parametrize(("dtype", "window"), [(FP32, 257), (BF16, None)], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_64(device, dtype, window):
    lengths = [1, 255, 256, 257, 513, 0] + [7] * 58
    query, keys, values, lengths = cache(lengths, dtype, device, heads=1)
    options = {"window": window, "backend": "triton"}
    together = decode_attention(query, keys, values, lengths, **options)
    for i in (*range(6), 63):
        row, length = slice(i, i + 1), max(1, int(lengths[i]))
        for span in (length, 520):
            given = (query[row], keys[row], values[row], lengths[row])
            alone = decode_attention(*given, span=span, **options)
            assert torch.equal(alone[0], together[i]), (i, span)


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"window": 9}, {"chunk": 9, "sinks": 2.0}], ids=str
)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_slots_in_one_batch(seed, group, options):
    """fp32 on a CPU, keys and values in memory as [S, Hkv, M, D]."""
    lengths = [1, 60, 0, 17, 33, 64, 8, 5]
    query, keys, values, lengths = cache(lengths, tokens=70, group=group, seed=seed)
    keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    options = {**options, "backend": "torch"}
    live = LiveTokens(lengths)  # for every layer
    for _ in range(2):
        together = judge(query, keys, values, live, **options)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-4, options["sinks"], 2 * group)
    for i in range(len(lengths)):
        row = slice(i, i + 1)
        given = query[row], keys[row], values[row], lengths[row]
        assert torch.equal(decode_attention(*given, **options)[0], together[i])
        if 0 < lengths[i] < 60:
            short = decode_attention(*given, span=int(lengths[i]), **options)[0]
            torch.testing.assert_close(short, together[i], rtol=1e-5, atol=1e-6)
    beyond = decode_attention(query, keys, values, live, span=40, **options)
    assert beyond.isnan().any(-1).any(-1).tolist() == (lengths > 40).tolist()


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 9}], ids=str)
def test_nothing_waits_for_the_device(backend, device, options):
    *inputs, lengths = cache((5, 513), device=device, heads=1)
    live = LiveTokens(lengths)  # of a step, whose first layer makes what the others find
    decode_attention(*inputs, live, backend=backend, **options)
    for span, launches in ((SPLIT, 1), (SPLIT + 1, 1 + ON_AMD), (520, 1 + ON_AMD)):
        with watched() as calls:
            decode_attention(*inputs, live, span=span, backend=backend, **options)
        if backend == "triton":
            assert len(calls) == launches, calls


SMALL = 64  # tokens of a split, so that many splits are few tokens
LENGTHS = (SMALL * 17 + 9, SMALL * 2, 0, 5, SMALL + 1, SMALL * 18 + 1)


@pytest.fixture
def small_splits(monkeypatch):
    from fastrl_kernels._triton import decode_attention as module

    monkeypatch.setattr(module, "SPLIT", SMALL)
    return module


def of_many_splits(dtype, device, lengths=LENGTHS, **options):
    """Rows of 18, 2, no, 1, 2 and 19 live splits."""
    options = {"heads": 2, "group": 3, "tokens": SMALL * 18 + 1, "dead": math.nan, **options}
    return cache(lengths, dtype, device, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
@pytest.mark.parametrize("options", [
    {}, {"window": SMALL * 16 + 3, "softcap": 2.0}, {"chunk": SMALL * 9, "sinks": torch.ones(6)},
], ids=["{}", "window", "chunk"])  # fmt: skip
def test_one_launch_and_two_give_the_same(device, dtype, options, small_splits, monkeypatch):
    """To the bit in the interpreter. They are compiled for warps of other numbers of heads: sums
    have other orders, and multiply-adds other pairs."""
    inputs = of_many_splits(dtype, device)
    options = {**options, "span": SMALL * 18, "backend": "triton"}
    if "sinks" in options:
        options["sinks"] = options["sinks"].to(inputs[0])
    found = []
    for itself in (True, False):
        monkeypatch.setattr(small_splits, "_merges_itself", lambda itself=itself: itself)
        found.append(decode_attention(*inputs, **options))
    close = 0.0 if interpreting() else 2.0**-19 if dtype == FP32 else 2.0**-7
    torch.testing.assert_close(found[0][:-1], found[1][:-1], rtol=close, atol=close)
    assert (found[0][2] == 0).all()
    for out in found:
        assert out[-1].isnan().all()  # longer than the span


@interpreted
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_splits_are_merged_in_their_order(device, dtype, small_splits, monkeypatch):
    """In NumPy, as in the interpreter, bit by bit."""
    scale, group, width, splits = 0.3, 3, 16, 19
    *inputs, lengths = of_many_splits(dtype, device, (SMALL * 17 + 9,), heads=1)
    inputs[1][0, SMALL * 16 + 3, 0] = inputs[0][0, 0] * 2  # a highest score among the last
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1])
    out = decode_attention(*inputs, lengths, scale=scale, backend="triton")
    sizes = [group * splits * n for n in (width, 1, 1)]
    found = made[1].split(sizes)  # behind the result's memory, what the splits found
    sums, highest, weights = (x.view(group, splits, -1)[:, :18].numpy() for x in found)
    sums, highest, weights = sums, highest[..., 0], weights[..., 0]

    factor = numpy.float32(scale) * numpy.float32(1.4426950408889634)
    peak, exp_sum = numpy.full(group, LOWEST, numpy.float32), numpy.zeros(group, numpy.float32)
    acc = numpy.zeros((group, width), numpy.float32)
    for some in (slice(0, 16), slice(16, 18)):
        higher = numpy.maximum(peak, highest[:, some].max(1))
        rescale = numpy.exp2((peak - higher) * factor)
        scaled = numpy.exp2((highest[:, some] - higher[:, None]) * factor)
        sixteen = numpy.zeros((group, 16), numpy.float32)
        sixteen[:, : scaled.shape[1]] = scaled * weights[:, some]
        exp_sum = exp_sum * rescale + sixteen.sum(1)
        part = numpy.zeros_like(acc)
        for i in range(scaled.shape[1]):
            part += scaled[:, i, None] * sums[:, some][:, i]
        acc, peak = acc * rescale[:, None] + part, higher
    expected = torch.from_numpy(acc / exp_sum[:, None]).to(dtype)
    assert torch.equal(out[0], expected)


def test_counters_are_zero_after_every_call(device, small_splits):
    *inputs, lengths = of_many_splits(BF16, device)
    for options in ({}, {"window": SMALL * 3}, {"span": SMALL * 18}):
        live = LiveTokens(lengths)
        first = decode_attention(*inputs, live, backend="triton", **options)
        made = list(live._made.values())
        again = decode_attention(*inputs, live, backend="triton", **options)
        assert torch.equal(first.nan_to_num(), again.nan_to_num())
        assert len(live._made) == len(made)  # layers share them
        assert ON_AMD or [len(x) for x in made] == [len(lengths) * 2]
        assert not any(x.any() for x in made)


def test_streams_and_captures_do_not_share_counters(monkeypatch):
    module = importlib.import_module("fastrl_kernels.decode_attention")
    live = LiveTokens(torch.ones(2, dtype=torch.int32))
    one = live.arrivals(4, 0)
    assert live.arrivals(4, 0) is one
    assert live.arrivals(4, 1) is not one
    # What was made before a capture is not the graph's; nor, after it, the graph's anyone else's.
    for captured in (True, False):
        monkeypatch.setattr(module, "_capturing", lambda x, captured=captured: captured)
        step = LiveTokens(live.lengths)
        assert step.arrivals(4, 0) is step.arrivals(4, 0)
        monkeypatch.setattr(module, "_capturing", lambda x, captured=captured: not captured)
        assert step.arrivals(4, 0) is not step.arrivals(4, 0)


@interpreted
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=names([FP32, BF16]))
def test_the_order_of_arrival_does_not_matter(device, dtype, small_splits, monkeypatch):
    """The interpreter runs programs one by one: here backwards, and in an order that mixes rows,
    heads and splits."""
    from triton.runtime.interpreter import InterpreterBuilder

    inputs = of_many_splits(dtype, device, LENGTHS[:4], heads=1, group=33 if dtype == BF16 else 3)
    expected = decode_attention(*inputs, backend="triton")
    set_grid_idx = InterpreterBuilder.set_grid_idx
    for step in (-1, 7):

        def elsewhere(self, x, y, z, step=step):
            programs = self.grid_dim[0]
            assert math.gcd(programs, step) == 1
            set_grid_idx(self, x * step % programs, y, z)

        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", elsewhere)
        out = decode_attention(*inputs, backend="triton")
        assert torch.equal(out, expected)


@interpreted
def test_programs_do_not_outnumber_what_a_window_can_touch(device, monkeypatch):
    from triton.runtime.interpreter import GridExecutor

    grids, launch = [], GridExecutor.__call__

    def launching(self, *args, **kwargs):
        grids.append((self.fn.__name__, self.grid))
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launching)
    inputs = cache((5,), BF16, device, heads=2, group=33, tokens=SPLIT * 4)
    for window, splits in ((None, 4), (1, 1), (2, 2), (SPLIT + 1, 2), (SPLIT + 2, 3)):
        grids.clear()
        decode_attention(*inputs, window=window, backend="triton")
        assert grids == [("_decode_attention_fwd_kernel", (splits * 2 * 2,))]


@interpreted
def test_numbers_from_compiled_code(device):
    inputs = cache((300, 5), device=device, heads=1)
    options = {"scale": 0.3, "softcap": 1.7, "backend": "triton"}
    expected = decode_attention(*inputs, **options)
    with floats_arrive_as_double():
        assert torch.equal(decode_attention(*inputs, **options), expected)


def test_only_the_model_is_compiled_in():
    """What changes from call to call is an argument: a constexpr would recompile each time."""
    from fastrl_kernels._triton import decode_attention as module

    shapes = {"D", "DV", "GROUP", "HEADS", "WIDTH", "VALUE_WIDTH", "SPLIT", "TILE", "MERGED"}
    assert constants(module) == shapes | {"REST", "PARTS", "LOADED", "DOT", "WIDE"}
    for kernel in (module._decode_attention_fwd_kernel, module._decode_attention_merge_kernel):
        found = inspect.signature(kernel.fn).parameters
        assert {"splits", "span", "window"} <= set(module._ARGUMENTS) & set(found)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 9}], ids=str)
def test_fake_tensors_tell_the_shape(backend, device, options):
    with FakeTensorMode():
        inputs = {name: x.to(device) for name, x in cache_of_zeros().items()}
        out = decode_attention(**inputs, backend=backend, **options)
    assert (out.shape, out.dtype) == ((3, 4, 8), BF16)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"window": 9}], ids=str)
def test_the_pytorch_path_on_another_device_waits_for_nothing(options):
    """Meta tensors hold no data: reading any, or a shape that depends on it, would raise."""
    inputs = {name: x.to("meta") for name, x in cache_of_zeros().items()}
    assert decode_attention(**inputs, backend="torch", **options).shape == (3, 4, 8)


def test_no_rows(backend, device):
    query, keys, values, lengths = cache((3, 4), BF16, device)
    out = decode_attention(query[:0], keys, values, lengths[:0], backend=backend)
    assert (out.shape, out.dtype) == ((0, 4, 16), BF16)


def test_no_gradient_is_recorded(backend, device):
    query, keys, values, lengths = cache((3, 4), device=device)
    tensors = (x.requires_grad_() for x in (query, keys, values))
    assert not decode_attention(*tensors, lengths, backend=backend).requires_grad


def cache_of_zeros():
    return {
        "query": torch.zeros(3, 4, 16, dtype=BF16),
        "keys": torch.zeros(5, 300, 2, 16, dtype=BF16),
        "values": torch.zeros(5, 300, 2, 8, dtype=BF16),
        "lengths": torch.zeros(3, dtype=torch.int32),
    }


def zeros(*shape, dtype=BF16, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


@together(("change", "error", "message"), [
    ({"query": zeros(3, 4, 16, dtype=torch.int64)}, TypeError, "query must be float32"),
    ({"query": zeros(3, 64)}, ValueError, r"query .* must be \[B, Hq, D\]"),
    ({"query": zeros(3, 0, 16)}, ValueError, r"query .* must be \[B, Hq, D\]"),
    ({"query": zeros(3, 4, 16, dtype=FP32)}, TypeError, "keys are torch.bfloat16, query"),
    ({"values": zeros(5, 300, 2, 8, dtype=FP32)}, TypeError, "values are torch.float32"),
    ({"keys": zeros(300, 2, 16)}, ValueError, r"keys .* must be \[S, M, Hkv, D\]"),
    ({"keys": zeros(5, 0, 2, 16)}, ValueError, r"keys .* must be \[S, M, Hkv, D\]"),
    ({"keys": zeros(5, 300, 16, 2).mT}, ValueError, "keys have strides .* the last must be 1"),
    ({"values": zeros(5, 300, 8, 2).mT}, ValueError, "values have strides"),
    ({"keys": zeros(5, 300, 2, 16, device="meta")}, ValueError, "keys is on meta"),
    ({"values": zeros(5, 300, 2, 8, device="meta")}, ValueError, "values is on meta"),
    ({"values": zeros(5, 301, 2, 8)}, ValueError, "all but the last"),
    ({"values": zeros(5, 300, 1, 8)}, ValueError, "all but the last"),
    ({"query": zeros(3, 4, 17)}, ValueError, "keys are 16 wide, query is 17"),
    ({"query": zeros(3, 5, 16)}, ValueError, "query has 5 heads, keys have 2"),
    ({"query": zeros(3, 1, 16)}, ValueError, "query has 1 heads, keys have 2"),
    ({"query": zeros(6, 4, 16)}, ValueError, "5 slots, query has 6 rows"),
    ({"lengths": zeros(3)}, TypeError, "lengths must be int32 or int64"),
    ({"lengths": zeros(4, dtype=torch.int32)}, ValueError, r"must be \(3,\), one per row"),
    ({"lengths": zeros(3, 1, dtype=torch.int32)}, ValueError, r"must be \(3,\), one per row"),
    ({"lengths": zeros(3, dtype=torch.int32, device="meta")}, ValueError, "lengths is on meta"),
    ({"scale": 0.0}, ValueError, "scale must be positive"),
    ({"scale": math.nan}, ValueError, "scale must be positive"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ({"softcap": math.inf}, ValueError, "softcap must be positive"),
    ({"window": 0}, ValueError, "window must be positive"),
    ({"chunk": 0}, ValueError, "chunk must be positive"),
    ({"sinks": zeros(3)}, ValueError, r"sinks .* must be \(4,\), one per head"),
    ({"sinks": zeros(4, dtype=torch.int64)}, TypeError, "sinks must be float32"),
    ({"sinks": zeros(4, device="meta")}, ValueError, "sinks is on meta"),
    ({"span": 0}, ValueError, r"span must be in \[1, 300\]"),
    ({"span": 301}, ValueError, r"span must be in \[1, 300\]"),
    ({"backend": "cuda"}, ValueError, "unknown backend"),
])  # fmt: skip
def test_what_is_refused_and_why(change, error, message):
    with pytest.raises(error, match=message):
        decode_attention(**{**cache_of_zeros(), "backend": "torch", **change})
