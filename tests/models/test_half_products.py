"""Products of a model's parts in half precision on a CPU get no memory of others between rows."""

from types import SimpleNamespace

import pytest
import torch

from fastrl.models.attention import Variant
from fastrl.models.latents import Latents
from fastrl.models.packed_attention import Group, PackedAttention, PackedLayout
from tests.kernels.half_products import HalfOperands, among_nan


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def in_packed_rows(variant):
    layout = PackedLayout([Group(3), Group(5)], torch.device("cpu"))

    def run(place):
        torch.manual_seed(0)
        q, k, v = (place(drawn(1, heads, 8, 6)) for heads in (4, 2, 2))
        return [PackedAttention(layout).attend(q, k, v, variant)]

    return run


def over_latents(place):
    layer = torch.nn.Linear(8, 3 * (5 + 6), bias=False, dtype=torch.bfloat16)
    layer.weight.data = drawn(33, 8)
    module = SimpleNamespace(expand_kv=None, qk_nope_head_dim=5, v_head_dim=6, kv_b_proj=layer)
    latents = Latents(module)
    query, out = place(drawn(2, 3, 1, 9)), place(drawn(2, 1, 3, 8))
    return [latents.absorbed(query), latents.values(out)]


@pytest.mark.parametrize("run", [
    pytest.param(in_packed_rows(Variant(None, None, 2.0)), id="soft cap"),
    pytest.param(in_packed_rows(Variant(None, None, 2.0, sinks=drawn(4))), id="soft cap and sinks"),
    pytest.param(over_latents, id="latents"),
])  # fmt: skip
def test_nothing_beside_the_operands_is_read(run):
    with HalfOperands() as given:
        alone, among = run(torch.clone), run(among_nan)
    assert given.found
    assert not given.with_gaps
    for x, y in zip(alone, among, strict=True):
        assert x.isfinite().all()
        assert torch.equal(x, y)
