"""Matrix products by every provider: what they compute, which is taken, what a machine lacks."""

import pytest
import torch

from benchmarks import models, products, terminal
from benchmarks.products import MM, ONEDNN, PACKED, Product

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(products.PROVIDERS))
def test_every_provider_computes_the_same_product(name: str, dtype: torch.dtype) -> None:
    providers, absent = products.providers(dtype, CPU)
    if name in absent:
        pytest.skip(absent[name])
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(25, 40).to(dtype)
    found = providers[name](x, weight)()
    expected = x.double() @ weight.double().T
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


def test_each_product_is_computed_by_the_provider_that_is_the_fastest_there(monkeypatch) -> None:
    called = []
    providers = {
        name: lambda x, w, name=name: lambda: called.append((name, len(x))) for name in (MM, ONEDNN)
    }
    monkeypatch.setattr(products, "providers", lambda dtype, device: (providers, {PACKED: "none"}))

    def seconds(call, device) -> float:
        called.clear()
        call()
        ((name, rows),) = called
        return {(MM, 2): 1.0, (ONEDNN, 2): 2.0, (MM, 4): 4.0, (ONEDNN, 4): 2.0}[name, rows]

    monkeypatch.setattr(products, "best_of_few", seconds)
    run, roofs = products.fastest([Product(2, 3, 5, 2), Product(4, 3, 5)], "fp32", CPU)
    called.clear()
    run()
    assert called == [(MM, 2), (MM, 2), (ONEDNN, 4)]
    assert roofs[0] == {
        "product": "2×3 · 3×5", "dtype": "fp32", "count": 2, "flop/s": {MM: 60.0, ONEDNN: 30.0},
        "absent": {PACKED: "none"},
    }  # fmt: skip


def test_a_build_without_an_operator_is_measured_without_it_and_says_so(monkeypatch) -> None:
    def lacking(x: torch.Tensor, weight: torch.Tensor):
        raise NotImplementedError("no such operator\nat line 7")

    monkeypatch.setitem(products.PROVIDERS, PACKED, lacking)
    monkeypatch.setattr(products, "best_of_few", lambda call, device: 1.0)
    _, (roof,) = products.fastest([Product(2, 3, 5)], "fp32", CPU)
    assert MM in roof["flop/s"]
    assert roof["absent"][PACKED] == "no such operator"
    assert f"(no {PACKED}: no such operator)" in terminal.speeds(roof)


def test_the_products_of_a_model_are_those_of_its_linear_layers() -> None:
    for model in (models.TOY, models.TOY_QWEN, models.TOY_QWEN35):
        built = models.build(model, CPU)
        sizes = []
        for module in built.modules():
            if isinstance(module, torch.nn.Linear):
                sizes.append((module.in_features, module.out_features))
            elif type(module).__name__ == "Conv1D":
                sizes.append(tuple(module.weight.shape))
        found = products.of_model(model, 7)
        assert sorted(sizes) == sorted((p.k, p.n) for p in found for _ in range(p.count))
        assert {p.m for p in found} == {7}


@pytest.mark.parametrize(("avx", "amx"), [(True, False), (False, True), (False, False)])
def test_bf16_is_for_cpus_that_have_instructions_for_it(monkeypatch, avx, amx) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    assert (products.without_bf16(CPU) is None) == (avx or amx)
    assert products.without_bf16(torch.device("cuda")) is None
