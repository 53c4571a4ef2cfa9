"""rms_norm, swiglu and rotate_and_store: what a decode step's layers do between their products, as
transformers' models do it, and against float64."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fastrl_kernels import HeadNorms, reference, rms_norm, rotate_and_store, swiglu
from tests.kernels.judge import DTYPES, assert_close_to_exact, names
from tests.kernels.launches import interpreted, watched
from tests.kernels.roundings import Rounded

BF16, FP32 = torch.bfloat16, torch.float32
# (x's dtype, that of the weights, or of the stream that x is added to): fp32 masters under autocast
# meet bf16 products.
MIXED = [(FP32, FP32), (BF16, BF16), (torch.float16, torch.float16), (BF16, FP32)]
IDS = [f"{a}-{b}".replace("torch.", "") for a, b in MIXED]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def as_module(kind: type, weight: torch.Tensor, eps: float) -> nn.Module:
    module = kind(len(weight), eps=eps)
    module.weight = nn.Parameter(weight)
    return module


@pytest.mark.parametrize(("dtype", "wide"), MIXED, ids=IDS)
@pytest.mark.parametrize("width", [7, 96, 2048])
@pytest.mark.parametrize("unit_offset", [False, True], ids=["llama", "gemma"])
@torch.no_grad()
def test_rms_norm_is_that_of_models(backend, device, dtype, wide, width, unit_offset):
    x = 5 * normal(3, 2, width, dtype=dtype, device=device)
    residual = normal(3, 2, width, seed=1, dtype=wide, device=device)
    weight = normal(width, seed=2, dtype=wide, device=device)
    module = as_module(GemmaRMSNorm if unit_offset else LlamaRMSNorm, weight, 1e-5)
    given = {"eps": 1e-5, "unit_offset": unit_offset}

    out, total = rms_norm(x, weight, residual=residual, **given, backend=backend)
    assert torch.equal(total, residual + x)
    exact, _ = reference.rms_norm(x.double(), weight.double(), residual=residual.double(), **given)
    runs = Rounded(lambda: module(residual + x))
    assert (out.dtype, total.dtype) == (module(residual + x).dtype, (residual + x).dtype)
    assert_close_to_exact(out, runs, exact, "out")

    out = rms_norm(x, weight, **given, backend=backend)
    exact = reference.rms_norm(x.double(), weight.double(), **given)
    runs = Rounded(lambda: module(x))
    assert_close_to_exact(out, runs, exact, "out without a residual")
    half = rms_norm(x, weight, **given, dtype=BF16, backend=backend)
    assert half.dtype == BF16
    assert_close_to_exact(half, runs, exact, "out in bf16")


def test_rows_of_rms_norm_do_not_depend_on_others(device):
    x, weight = normal(64, 96, device=device), normal(96, seed=1, device=device)
    alone = rms_norm(x[5:6].clone(), weight, backend="triton")
    assert torch.equal(rms_norm(x, weight, backend="triton")[5:6], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=names(DTYPES))
def test_swiglu_is_that_of_models(backend, device, dtype):
    gate = 20 * normal(5, 1003, dtype=dtype, device=device)
    gate[0, :2] = torch.tensor([200.0, -200.0])
    up = normal(5, 1003, seed=1, dtype=dtype, device=device)
    out = swiglu(gate, up, backend=backend)
    exact = reference.swiglu(gate.double(), up.double())
    assert out.dtype == dtype
    assert_close_to_exact(out, Rounded(lambda: nn.SiLU()(gate) * up), exact, "out")


def slots_of(dtype: torch.dtype, device: str, widths: tuple[int, int], heads: int = 2) -> Any:
    """Keys and values [5, 9, heads, width] as an engine keeps them."""
    made = (torch.zeros(5, heads, 9, width, dtype=dtype, device=device) for width in widths)
    return [x.transpose(1, 2) for x in made]


@pytest.mark.parametrize(("dtype", "wide"), MIXED, ids=IDS)
@pytest.mark.parametrize("turned", [8, 16, 4])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@torch.no_grad()
def test_keys_are_rotated_and_stored_as_models_do(backend, device, dtype, wide, turned, normed):
    rows, width, value_width = 3, 16, 12
    query = normal(rows, 4, width, dtype=dtype, device=device)
    key, value = (
        normal(rows, 2, w, seed=i, dtype=dtype, device=device)
        for i, w in ((1, width), (2, value_width))
    )
    half = 3 * normal(rows, turned // 2, seed=3, device=device)
    angles = torch.cat([half, half], -1)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    positions = torch.tensor([8, 0, 4], device=device)
    norms, exactly = None, [query.double(), key.double()]
    if normed:
        weights = [normal(width, seed=i, dtype=wide, device=device) for i in (4, 5)]
        norms = HeadNorms(*weights, 1e-6)
        modules = [as_module(LlamaRMSNorm, w, 1e-6) for w in weights]
        exactly = [reference.rms_norm(x, w.double()) for x, w in zip(exactly, weights, strict=True)]
    kept = BF16 if dtype == BF16 else dtype
    keys, values = slots_of(kept, device, (width, value_width))
    out = rotate_and_store(
        query, key, value, cos, sin, keys, values, positions, norms=norms, backend=backend
    )

    def of_models():
        inputs = [query, key]
        if normed:
            inputs = [module(x) for module, x in zip(modules, inputs, strict=True)]
        front = apply_rotary_pos_emb(*(x[..., :turned] for x in inputs), cos, sin)
        return [
            torch.cat([x, y[..., turned:].to(x.dtype)], -1).to(kept)
            for x, y in zip(front, inputs, strict=True)
        ]

    runs = Rounded(of_models)
    exact = [reference.rotate(x, cos.double(), sin.double()) for x in exactly]
    assert out.dtype == kept
    assert_close_to_exact(out, runs[0], exact[0], "queries")
    at = torch.arange(rows, device=device), positions
    assert_close_to_exact(keys[at], runs[1], exact[1], "keys")
    assert torch.equal(values[at], value.to(kept))
    for stored in (keys, values):
        others = stored.clone()
        others[at] = 0
        assert not others.any()


def test_parts_of_one_products_rows_are_not_copied(device):
    joined = normal(3, 1, (4 + 2 + 2) * 16, device=device)
    parts = [x.view(3, -1, 16) for x in joined.split([64, 32, 32], -1)]
    angles = normal(3, 16, seed=1, device=device)
    positions = torch.tensor([1, 2, 3], device=device)
    found = []
    for heads in (parts, [x.clone() for x in parts]):
        cache = slots_of(FP32, device, (16, 16))
        with watched() as calls:
            out = rotate_and_store(*heads, angles, angles, *cache, positions, backend="triton")
        assert calls == ["_rotate_and_store_kernel"]
        found.append((out, *cache))
    assert all(map(torch.equal, *found))
    gate, up = joined.chunk(2, -1)
    with watched() as calls:
        out = swiglu(gate, up, backend="triton")
    assert calls == ["_swiglu_kernel"]
    assert torch.equal(out, swiglu(gate.clone(), up.clone(), backend="triton"))


def test_a_position_outside_of_its_slot_is_not_stored(device):
    keys, values = slots_of(FP32, device, (16, 16))
    given = [normal(3, h, 16, seed=h, device=device) for h in (4, 2, 2)]
    angles = torch.ones(3, 16, device=device)
    positions = torch.tensor([9, -1, 2], device=device)
    rotate_and_store(*given, angles, angles, keys, values, positions, backend="triton")
    for stored in (keys, values):
        assert stored[2, 2].all()
        stored[2, 2] = 0
        assert not stored.any()


@interpreted
def test_each_is_one_launch(device):
    x, weight = normal(3, 16), normal(16)
    keys, values = slots_of(FP32, device, (16, 16))
    heads, angles = normal(3, 2, 16), torch.ones(3, 16)
    positions = torch.zeros(3, dtype=torch.long)
    with watched() as calls:
        rms_norm(x, weight, residual=x, backend="triton")
        swiglu(x, x, backend="triton")
        rotate_and_store(
            heads, heads, heads, angles, angles, keys, values, positions, backend="triton"
        )
    assert calls == ["_rms_norm_kernel", "_swiglu_kernel", "_rotate_and_store_kernel"]


def test_nothing_is_done_for_no_rows(backend, device):
    x, weight = normal(0, 16, device=device), normal(16, device=device)
    assert rms_norm(x, weight, backend=backend).shape == (0, 16)
    assert swiglu(x, x, backend=backend).shape == (0, 16)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda x, w: rms_norm(x.long(), w), TypeError, "x must be torch.float32|x must be float"),
    (lambda x, w: rms_norm(x, w[:3]), ValueError, r"x has shape \(2, 16\), weight \(3,\)"),
    (lambda x, w: rms_norm(x, w, eps=0.0), ValueError, "eps must be positive"),
    (lambda x, w: rms_norm(x, w, residual=x[:1]), ValueError, "residual has shape"),
    (lambda x, w: swiglu(x, x.bfloat16()), TypeError, "up is torch.bfloat16, gate"),
    (lambda x, w: swiglu(x, x[:1]), ValueError, "up has shape"),
])  # fmt: skip
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(normal(2, 16), normal(16))


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"key": normal(3, 2, 8)}, ValueError, r"keys have shape"),
    ({"key": normal(3, 2, 16, dtype=BF16)}, TypeError, "key is torch.bfloat16, query"),
    ({"cos": torch.ones(3, 15)}, ValueError, "cos and sin have shapes"),
    ({"cos": torch.ones(3, 18), "sin": torch.ones(3, 18)}, ValueError, "of at most 16"),
    ({"sin": torch.ones(3, 16, dtype=BF16)}, TypeError, "sin is torch.bfloat16, cos"),
    ({"positions": torch.zeros(3, dtype=torch.int32)}, ValueError, "positions are torch.int32"),
    ({"values": torch.zeros(2, 9, 2, 16)}, ValueError, "values have shape"),
    ({"norms": HeadNorms(normal(8), normal(8), 1e-6)}, ValueError, "norms have shapes"),
    ({"norms": HeadNorms(normal(16), normal(16), 0.0)}, ValueError, "norms.eps must be posit"),
])  # fmt: skip
def test_bad_input_to_the_cache_is_named(changes, error, message):
    keys, values = slots_of(FP32, "cpu", (16, 16))
    given = {
        "query": normal(3, 4, 16), "key": normal(3, 2, 16), "value": normal(3, 2, 16),
        "cos": torch.ones(3, 16), "sin": torch.ones(3, 16), "keys": keys, "values": values,
        "positions": torch.zeros(3, dtype=torch.long),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        rotate_and_store(**{**given, **changes})
    assert not keys.any()
