"""Libraries of CPU products: each computes the same, and a fixed rule chooses."""

import functools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fastrl_kernels import (
    TeacherHead,
    decode_attention,
    full_kl,
    gemm,
    linear_kl,
    linear_kl_loss,
    linear_logprobs,
    linear_nll_loss,
    linear_ppo_loss,
    linear_sample,
)
from fastrl_kernels.dispatch import BACKEND_VARIABLE
from tests.kernels.gpu_products import products_of_a_gpu
from tests.kernels.half_products import HalfOperands, among_nan
from tests.kernels.judge import judge, results
from tests.kernels.launches import allocations, watched
from tests.kernels.roundings import of_partial_sums

USABLE = [
    pytest.param(dtype, name, id=f"{dtype}-{name}")
    for dtype, libraries in gemm.LIBRARIES.items()
    for name, library in libraries.items()
    if library.absent() is None
]
# Those whose rows do not depend on their number, and that pack weights.
EQUAL_ROWS = [each for each in USABLE if gemm.LIBRARIES[each.values[0]][each.values[1]].rows_equal]
X86 = {"architecture": "x86_64"}
needs_onednn = pytest.mark.skipif(
    gemm.OneDnn.absent() is not None, reason="torch has no oneDNN operator here"
)


@pytest.fixture(autouse=True)
def no_choice_of_others(monkeypatch, tmp_path):
    """The rule, with an empty table and no variable of the machine that tests run on."""
    (tmp_path / "products.json").write_text("{}")
    monkeypatch.setenv(gemm.TABLE_VARIABLE, str(tmp_path / "products.json"))
    monkeypatch.delenv(gemm.LIBRARY_VARIABLE, raising=False)


def rms(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).square().mean().sqrt())


def operands(dtype: str, m: int = 45, k: int = 131, n: int = 83) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for shape in ((m, k), (n, k), (n,))
    )


@pytest.mark.parametrize(("dtype", "name"), USABLE)
@pytest.mark.parametrize("piece", [gemm.PIECE, 32], ids=["whole", "in pieces"])
def test_a_library_is_as_exact_as_torch(dtype, name, piece, monkeypatch):
    monkeypatch.setattr(gemm, "PIECE", piece)
    library = gemm.LIBRARIES[dtype][name]
    x, weight, bias = operands(dtype)
    out = torch.empty(len(x), len(weight))
    library.multiply(out, x, weight, bias)
    exact = x.double() @ weight.double().t() + bias.double()
    allowed = error_of_sums(exact, x, weight.t())
    assert rms(out, exact) <= allowed
    assert rms(library.linear(x, weight, bias), exact) <= allowed

    upstream = torch.randn(len(x), len(weight) + 5)[:, :-5]  # rows apart, as in a workspace
    for a, b in ((upstream, weight), (upstream.t(), x)):
        exact = a.double() @ b.double()
        allowed = error_of_sums(exact, a, b)
        found = torch.empty(exact.shape, dtype=b.dtype)
        library.product(found, a, b)
        assert rms(found, exact) <= allowed
        total = torch.ones(exact.shape)
        library.add_product_(total, a, b)
        assert rms(total - 1, exact) <= allowed + 1e-6


def error_of_sums(exact: Tensor, a: Tensor, b: Tensor) -> float:
    """Of products in any order: one rounding, and a second, of operands or of the result to b's
    dtype; and of every partial sum to fp32."""
    of_sums = of_partial_sums(exact, a.double(), b.double()).square().mean().sqrt()
    return 2 * rms(exact.to(b.dtype), exact) + float(of_sums)


@pytest.mark.parametrize(("dtype", "name"), USABLE)
def test_a_product_without_terms_is_zero(dtype, name):
    out = torch.full((3, 4), torch.nan, dtype=getattr(torch, dtype))
    gemm.LIBRARIES[dtype][name].product(out, torch.empty(3, 0), torch.empty(0, 4, dtype=out.dtype))
    assert not out.any()


@needs_onednn
def test_onednn_gets_weights_and_biases_without_gaps():
    """It computes weights with gaps by a reference, hundreds of times as slow, and none that
    overlap; of a bias with gaps it adds other numbers."""
    own = torch.ops.mkldnn._linear_pointwise
    table, x, bias = torch.randn(60, 60), torch.randn(5, 30), torch.randn(80)[::2]
    parts = [table[:40, :30], table[:30, :40].t(), table.as_strided((40, 30), (1, 1))]
    for weight in (*parts, torch.randn(40, 30), torch.randn(30, 40).t()):
        with mock.patch.object(torch.ops.mkldnn, "_linear_pointwise", side_effect=own) as called:
            found = gemm.OneDnn.linear(x, weight, bias)
        given = called.call_args.args[1]
        assert given.is_contiguous() or given.t().is_contiguous()
        torch.testing.assert_close(found, x @ weight.t() + bias)
        packed = gemm.Packed(weight).linear(x, bias)
        torch.testing.assert_close(packed, found)


LIBRARIES_OF_BF16 = pytest.mark.parametrize("name", gemm.LIBRARIES["bfloat16"])


@pytest.mark.parametrize("product", [
    lambda a, b: torch.mm(a, b.t()),
    lambda a, b: torch.mm(b, a.t()),
    lambda a, b: torch.addmm(torch.zeros(5).bfloat16(), b, a.t()),
    lambda a, b: torch.bmm(b[None], a.t()[None]),
    lambda a, b: torch.baddbmm(torch.zeros(7, 5).bfloat16(), b[None], a.t()[None]),
    lambda a, b: torch.nn.functional.linear(a[:1], b),
    lambda a, b: torch.nn.functional.linear(b, a, a[:, 0].clone()),
    lambda a, b: torch.einsum("ik,jk->ij", a, b),
    lambda a,
     b: torch.nn.functional.scaled_dot_product_attention(*(x[None, None] for x in (a, b, b))),
])  # fmt: skip
def test_a_slice_in_half_precision_is_seen(product):
    """What the tests below rely on."""
    a, b = (torch.randn(n, 64).bfloat16() for n in (5, 7))
    for sliced in (False, True):
        with HalfOperands() as given:
            product(among_nan(a) if sliced else a, b)
        assert given.found >= 2
        assert bool(given.with_gaps) == sliced


@pytest.mark.parametrize("rows", [1, 45])
@LIBRARIES_OF_BF16
def test_no_product_of_a_cpu_gets_a_slice_in_half_precision(name, rows):
    """Whatever lies beside it: AMX multiplies that, too, and a NaN there is a NaN in the result."""
    library = gemm.LIBRARIES["bfloat16"][name]
    x, weight, _ = operands("bfloat16", m=rows, k=64)
    sliced = [among_nan(t) for t in (x, weight)]
    out = torch.empty(len(x), len(weight) + 3, dtype=x.dtype)
    results = []
    with HalfOperands() as given:
        for a, b in ((x, weight), sliced):
            c, d = torch.empty(len(a), len(b), dtype=a.dtype), torch.zeros(len(a), len(b))
            library.multiply(out[:, :-3], a, b, None)
            library.product(c, a, b.t())
            library.add_product_(d, a, b.t())
            with gemm.using({"bfloat16": gemm.Choice(name)}):
                layer = gemm.linear(a, b)
            results.append([out[:, :-3].clone(), c, d, layer])
            if library.absent() is None and name != "mm":
                results[-1].append(gemm.Packed(b, wide=name == "fp32").linear(a))
    assert not given.with_gaps
    for plain, beside in zip(*results, strict=True):
        assert torch.equal(plain, beside)


def _head(op: Callable[..., Any], **options: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """The first result of an op on hidden states and a head."""

    def run(x: dict[str, Tensor]) -> Tensor:
        found = op(x["hidden"], x["weight"], x["labels"], **options, bias=x["bias"])
        return found[0] + (found[1] if options.get("entropy") else 0.0)

    return run


def _ppo_loss(x: dict[str, Tensor]) -> Tensor:
    ones = torch.ones(x["labels"].shape)
    return linear_ppo_loss(
        x["hidden"], x["weight"], x["labels"], -5 * ones, ones, ones > 0, bias=x["bias"]
    )[0]


def _with_a_teacher(op: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """A head's own distribution moved by its bias."""

    def run(x: dict[str, Tensor]) -> Tensor:
        hidden, weight = (x[key].detach() for key in ("hidden", "weight"))
        teacher = TeacherHead(hidden, weight, logit_scale=0.5)
        given = x["hidden"], x["weight"], x["labels"], teacher
        return op(*given, bias=x["bias"], beta=0.3, **options)[0]

    return run


def _attention(x: dict[str, Tensor], **options: Any) -> Tensor:
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    return decode_attention(x["query"], x["keys"], x["values"], lengths, span=5, **options)


_OPS: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "linear_logprobs": _head(lambda *x, **o: [linear_logprobs(*x, **o)]),
    "entropies": _head(linear_logprobs, entropy=True),
    "soft cap": _head(lambda *x, **o: [linear_logprobs(*x, **o)], softcap=3.0),
    "interpreted": _head(lambda *x, **o: [linear_logprobs(*x, **o)], backend="triton"),
    "linear_kl": _with_a_teacher(linear_kl),
    "linear_kl_loss": _with_a_teacher(linear_kl_loss, softcap=3.0),
    "linear_nll_loss": _head(linear_nll_loss),
    "linear_ppo_loss": _ppo_loss,
    "linear_sample": lambda x: (
        linear_sample(x["hidden"].detach(), x["weight"], x["labels"], bias=x["bias"]).logprobs
    ),
    "full_kl": lambda x: full_kl(x["hidden"], x["hidden"].detach().flip(0)),
    "decode_attention": _attention,
    "capped attention": functools.partial(_attention, softcap=2.0),
}


@pytest.mark.parametrize("op", _OPS)
@LIBRARIES_OF_BF16
def test_ops_read_nothing_beside_their_operands(op, name, monkeypatch):
    if op == "interpreted" and torch.cuda.is_available():
        pytest.skip("compiled kernels take no tensors of a CPU")
    if op != "interpreted":
        monkeypatch.setenv(BACKEND_VARIABLE, "torch")
    monkeypatch.setattr(gemm, "PIECE", 32)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    plain = {"hidden": drawn(20, 24), "weight": drawn(75, 24), "bias": drawn(75)}
    plain |= {"query": drawn(2, 4, 24), "keys": drawn(3, 7, 2, 24), "values": drawn(3, 7, 2, 24)}
    labels = torch.randint(75, (20,), generator=generator)
    found = []
    with gemm.using({"bfloat16": gemm.Choice(name)}), HalfOperands() as given:
        for place in (torch.Tensor.clone, among_nan):
            x = {key: (place if t.dim() > 1 else torch.clone)(t) for key, t in plain.items()}
            x = {key: t.requires_grad_() for key, t in x.items()}
            out = _OPS[op](x | {"labels": labels})
            gradients = []
            if out.requires_grad:
                wrt = [x[key] for key in ("hidden", "weight", "bias")]
                gradients = torch.autograd.grad(out.sum(), wrt, allow_unused=True)
            found.append([out, *(g for g in gradients if g is not None)])
    assert not given.with_gaps
    for alone, among in zip(*found, strict=True):
        assert alone.isfinite().all()
        assert torch.equal(alone, among)


@pytest.mark.parametrize(("dtype", "name"), EQUAL_ROWS)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("laid_out", ["rows", "columns"])
def test_a_row_has_the_same_bits_in_any_number_of_rows(dtype, name, packed, laid_out):
    library = gemm.LIBRARIES[dtype][name]
    x, weight, bias = operands(dtype, m=300, k=96, n=352)
    if laid_out == "columns":
        weight = weight.t().contiguous().t()
    linear = gemm.Packed(weight).linear if packed else lambda x, b: library.linear(x, weight, b)
    whole = linear(x, bias)
    for m in (1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 257):
        assert torch.equal(linear(x[:m].clone(), bias), whole[:m]), m
        assert torch.equal(linear(x[-m:].clone(), bias), whole[-m:]), m


@pytest.mark.parametrize(("dtype", "name"), [x for x in USABLE if x.values[1] != "mm"])
def test_packed_weights_are_as_exact_and_give_the_same_bits_in_fp32(dtype, name):
    """In bf16 a CPU with AMX may have another kernel for a packed weight, which splits sums
    otherwise, and copies in fp32 are multiplied in pieces where they are not packed."""
    library = gemm.LIBRARIES[dtype][name]
    x, weight, bias = operands(dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    for w in (weight, weight.t().contiguous().t()):
        packed = gemm.Packed(w, wide=name == "fp32").linear(x, bias)
        assert packed.dtype == weight.dtype
        assert rms(packed, exact) <= error_of_sums(exact, x, weight.t())
        if library.rows_equal:
            assert torch.equal(packed, library.linear(x, w, bias))


@needs_onednn
@pytest.mark.parametrize("laid_out", ["rows", "columns"])
@pytest.mark.parametrize("shape", [(7, 45), (1, 1), (45,)], ids=str)
def test_a_layers_gradients_are_as_exact_as_torchs(laid_out, shape):
    _, weight, bias = operands("float32")
    if laid_out == "columns":
        weight = weight.t().contiguous().t()
    x = torch.randn(*shape, 131, generator=torch.Generator().manual_seed(1))

    inputs = {"x": x, "weight": weight, "bias": bias}
    plain = torch.nn.functional.linear
    with gemm.using({"float32": gemm.Choice("onednn")}):
        found = judge(
            lambda x, weight, bias: gemm.linear(x, weight, bias),
            lambda x, weight, bias: plain(x, weight, bias),
            inputs,
            wrt=list(inputs),
        )
    strides = results(lambda x, weight, bias: plain(x, weight, bias), inputs, ["weight"])[
        "dweight"
    ].stride()
    assert found["dweight"].stride() == strides  # no copy for the optimizer


@needs_onednn
def test_a_layer_leaves_to_torch_what_it_does_not_know():
    x, weight, bias = operands("float32")
    plain = torch.nn.functional.linear
    with gemm.using({"float32": gemm.Choice("onednn")}):
        assert torch.equal(gemm.linear(x[:0], weight, bias), plain(x[:0], weight, bias))
        assert torch.equal(
            gemm.linear(x.double(), weight.double()), plain(x.double(), weight.double())
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert gemm.linear(x, weight, bias).dtype == torch.bfloat16
    with gemm.using({"float32": gemm.Choice("onednn", weight.numel() + 1)}):
        assert torch.equal(gemm.linear(x, weight, bias), plain(x, weight, bias))


def test_an_unknown_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(gemm.LIBRARY_VARIABLE, "blis")
    with pytest.raises(ValueError, match="FASTRL_KERNELS_PRODUCTS=blis: choose auto"):
        gemm.choices()
    with pytest.raises(ValueError, match=r"unknown library 'blis' for float32.*Known are"):
        gemm.checked({"float32": ["blis", 0]}, "a table")
    with pytest.raises(ValueError, match="for float16"):
        gemm.checked({"float16": ["mm", 0]}, "a table")
    monkeypatch.delenv(gemm.LIBRARY_VARIABLE)
    for wrong in ('{"a": null}', '{"a": {"float32": ["onednn", "x"]}}', '{"a": {"float32": "mm"}}'):
        gemm.table_path().write_text(wrong)
        with pytest.raises(ValueError, match=r"holds no table .*: remove it, or measure again"):
            gemm.read_table(gemm.table_path())
    gemm.table_path().write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        gemm.read_table(gemm.table_path())


# Noise of 1e-3 in one of 33 rows is 1.7e-4 on average. Sums of 320 terms one after the other are
# off by 5.8e-6, those of some libraries by less: four times that is allowed.
@pytest.mark.parametrize("spoil", [torch.nan, 1e-3], ids=["NaN", "noise"])
@needs_onednn
def test_a_library_that_is_wrong_is_not_used(spoil, monkeypatch):
    right = gemm.OneDnn.linear
    monkeypatch.setattr(
        gemm.OneDnn,
        "linear",
        staticmethod(
            lambda *a: right(*a).index_add_(0, torch.tensor([0]), torch.full((1, len(a[1])), spoil))
        ),
    )
    gemm.inexact.cache_clear()
    try:
        with pytest.warns(UserWarning, match="go to torch.mm instead of onednn: its rms error"):
            assert gemm.checked({"float32": ["onednn", 0]}, "a table") == {"float32": gemm.MM}
    finally:
        gemm.inexact.cache_clear()


@pytest.mark.parametrize(("dtype", "name"), USABLE)
@pytest.mark.parametrize("measured", [False, True], ids=["forced", "measured"])
def test_each_library_may_be_asked_for(dtype, name, measured, monkeypatch):
    if measured:
        table = {gemm.processor(): {dtype: [name, 0]}}
        gemm.table_path().write_text(json.dumps(table))
    else:
        monkeypatch.setenv(gemm.LIBRARY_VARIABLE, name)
    gemm.inexact.cache_clear()
    gemm._found.cache_clear()
    assert gemm.choices()[dtype] == gemm.Choice(name, 0)


def test_a_library_that_is_missing_is_replaced(monkeypatch):
    monkeypatch.setattr(gemm.OneDnn, "absent", staticmethod(lambda: "torch has no oneDNN"))
    monkeypatch.setattr(gemm.Bf16, "absent", staticmethod(lambda: "no AVX512-BF16"))
    given = {"float32": ["onednn", 0], "bfloat16": ["bf16", 0]}
    with pytest.warns(UserWarning, match="go to torch.mm instead") as told:
        assert set(gemm.checked(given, "the run so far").values()) == {gemm.MM}
    assert ["torch has no oneDNN" in str(w.message) for w in told] == [True, False]
    assert gemm.by_rule()["float32"] == gemm.MM


@pytest.mark.parametrize(("cpu", "instructions", "expected"), [
    ({"cpu_name": "AMD EPYC 9755", "avx512_bf16": True}, "AVX512", ("onednn", "bf16")),
    ({"cpu_name": "AMD EPYC 9755", "avx512_bf16": True}, "AVX2", ("mm", "mm")),
    ({"cpu_name": "AMD EPYC 7763"} | X86, "AVX2", ("mm", "fp32")),
    ({"cpu_name": "Intel(R) Xeon(R) 8488C", "amx_bf16": True}, "AVX512", ("mm", "bf16")),
    ({"cpu_name": "Intel(R) Xeon(R) Gold"} | X86, "AVX512", ("mm", "fp32")),
    ({"cpu_name": "Neoverse-V2", "architecture": "aarch64"}, "DEFAULT", ("mm", "mm")),
    ({}, "DEFAULT", ("mm", "mm")),
])  # fmt: skip
@needs_onednn
def test_the_rule_reads_processor_and_instructions(cpu, instructions, expected, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(gemm, "_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    found = gemm.by_rule()
    assert (found["float32"].library, found["bfloat16"].library) == expected
    assert all(rule.measured_on for rule in gemm.rules().values())


@needs_onednn
def test_instructions_that_onednn_may_not_use_are_not_counted_on(monkeypatch):
    cpu = {"cpu_name": "AMD EPYC 9755", "avx512_bf16": True} | X86
    monkeypatch.setattr(gemm, "_capabilities", lambda: cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for limit, library in (("avx512_core", "fp32"), ("AVX512_CORE_BF16", "bf16"), ("ALL", "bf16")):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert gemm.by_rule()["bfloat16"].library == library
        assert ("AVX512_CORE" in gemm.processor()) == (limit != "ALL")


@needs_onednn
def test_a_table_comes_before_the_rule_on_its_own_processor_alone():
    path = gemm.table_path()
    other = {"another CPU": {"float32": ["blis", 0]}}
    path.write_text(json.dumps({**other, gemm.processor(): {"float32": ["onednn", 4096]}}))
    gemm._found.cache_clear()
    assert gemm.choices()["float32"] == gemm.Choice("onednn", 4096)
    assert gemm.choices()["bfloat16"] == gemm.by_rule()["bfloat16"]
    path.write_text(json.dumps(other))
    gemm._found.cache_clear()
    assert gemm.choices() == gemm.by_rule()


def test_a_table_that_cannot_be_read_is_warned_of_and_the_rule_chooses(monkeypatch):
    gemm.table_path().write_text("{")
    gemm._found.cache_clear()
    with pytest.warns(UserWarning, match=r"is not JSON .* a fixed rule chooses"):
        assert gemm.choices() == gemm.by_rule()
    assert gemm.source() == "by a fixed rule"
    gemm.table_path().unlink()
    gemm._found.cache_clear()
    with pytest.warns(UserWarning, match="there is no such file"):
        assert gemm.choices() == gemm.by_rule()
    monkeypatch.setenv(gemm.LIBRARY_VARIABLE, "")
    assert gemm.forced() is None
    gemm._found.cache_clear()


def half(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_split_sum_on_a_gpu_is_added_in_fp32(dtype):
    """Whatever torch's flags allow, which stay as they are."""
    a, b = half(9, 600, dtype=dtype), half(600, 7, dtype=dtype, seed=1)
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_accumulation
    exact = a.double() @ b.double()
    out, total = torch.empty(9, 7, dtype=dtype), torch.empty(9, 7)
    with products_of_a_gpu() as products:
        gemm.Mm.product(out, a, b)
        gemm.Mm.product(total, a, b)
        assert [x.out for x in products] == [torch.float32] * 2
        assert {x.operands for x in products} == {dtype}
    assert torch.equal(out, exact.float().to(dtype))
    assert rms(total, exact) < 1e-5
    now = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_accumulation
    assert now == before


def test_a_large_product_on_a_gpu_needs_no_memory_in_fp32(monkeypatch):
    monkeypatch.setattr(gemm, "_MAY_SPLIT", 62)
    out = torch.empty(9, 7, dtype=torch.bfloat16)
    with products_of_a_gpu() as products, allocations(out) as found:
        gemm.Mm.product(out, half(9, 20), half(20, 7))
    assert [x.out for x in products] == [torch.bfloat16]
    assert not [what for _, what in found if what.startswith("empty")]


def test_sums_on_a_gpu_begin_without_zeros():
    a, b, total = half(9, 20), half(20, 7), torch.empty(9, 7)
    with products_of_a_gpu() as products, watched() as calls:
        gemm.Mm.product(total, a, b)
        gemm.Mm.add_product_(total, a, b)
    assert [x.adds for x in products] == [False, True]
    assert "zero_" not in calls
    exact = 2 * (a.double() @ b.double())
    assert rms(total, exact) < 1e-5


def of_rocm(monkeypatch, library: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    chosen = getattr(torch._C._BlasBackend, library)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: chosen)


@pytest.mark.parametrize("library", ["Default", "Cublas", "Cublaslt"])
def test_products_of_rocm_are_in_half_precision(monkeypatch, library):
    of_rocm(monkeypatch, library)
    a, b, total = half(9, 20), half(20, 7), torch.zeros(9, 7)
    with products_of_a_gpu() as products:
        gemm.Mm.add_product_(total, a, b)
        gemm.Mm.product(total, a, b)
    assert {(x.operands, x.out) for x in products} == {(torch.bfloat16, torch.float32)}


@pytest.mark.parametrize("why", ["Composable Kernel", "fp16 accumulation"])
def test_products_that_cannot_come_out_in_fp32_have_fp32_copies(monkeypatch, why):
    """torch refuses them then."""
    dtype = torch.bfloat16
    if why == "Composable Kernel":
        of_rocm(monkeypatch, "Ck")
    else:
        dtype = torch.float16
        allowed = mock.PropertyMock(return_value=True)
        monkeypatch.setattr(
            type(torch.backends.cuda.matmul), "allow_fp16_accumulation", allowed, raising=False
        )
        monkeypatch.setattr(gemm, "_MAY_SPLIT", 0)
    a, b = half(9, 600, dtype=dtype), half(600, 7, dtype=dtype, seed=1)
    exact = a.double() @ b.double()
    total, out = torch.ones(9, 7), torch.empty(9, 7, dtype=dtype)
    with products_of_a_gpu() as products:
        gemm.Mm.add_product_(total, a, b)
        gemm.Mm.product(out, a, b)
    assert not products  # of torch.mm and torch.addmm with half-precision operands
    assert rms(total - 1, exact) < 1e-4
    assert rms(out, exact) <= 1.01 * rms(exact.to(dtype), exact)
