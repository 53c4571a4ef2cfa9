"""Matrix products: which library computes them, and the rounding of their sums.

On GPUs all products are cuBLAS's or rocBLAS's, through ``torch.mm``. On a CPU torch has several
libraries in one wheel, of different speed: a fixed rule takes one by the processor, torch's
instruction set and the weight's shape, never by the number of rows and never by a clock, so that a
run's numbers are the same when it is repeated.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ._cpu.fp32_copies import in_fp32
from .dispatch import device_kind, kind_of_device
from .first_order import first_order

LIBRARY_VARIABLE = "FASTRL_KERNELS_PRODUCTS"
TABLE_VARIABLE = "FASTRL_KERNELS_PRODUCTS_TABLE"
_LONGEST_SUM = 8192  # terms: CPU libraries are slow beyond, and fp32 copies would be large
# Columns or terms of a CPU product at a time. Its memory of a few MiB is used again by the next
# one; that of larger products would be new each time, which costs as much as the work in it.
PIECE = 4096
_TALL = 1 << 20  # elements of a weight of many more rows than columns that counts as tall
_FEWEST = 1 << 16  # elements of a weight from which oneDNN's overhead of some 10 µs is worth it
# Elements of a GPU's product, up to which it comes out in fp32 and is rounded afterwards: 256 tiles
# of 128·256, two waves of 132 processors. For fewer tiles than processors libraries split sums, and
# add their parts in half precision where torch's global flags allow it.
_MAY_SPLIT = 1 << 23


class Library(Protocol):
    """A way to compute products; a and b are matrices of any strides."""

    rows_equal: ClassVar[bool]  # whether a row's bits are the same for any number of rows
    in_pieces: ClassVar[bool]  # whether it is as fast for a piece of a large weight

    @staticmethod
    def absent() -> str | None:
        """Why the library cannot be used here; None where it can."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x wᵀ + b [M, N] of x [M, K] and w [N, K], of one dtype."""

    @classmethod
    def multiply(cls, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """out = x wᵀ + b, rounded to the dtype of x before that of ``out``."""

    @classmethod
    def product(cls, out: Tensor, a: Tensor, b: Tensor) -> None:
        """out = a b, rounded once to its dtype where b is fp32; a is as wide as ``out`` or b.

        Into fp32 on a GPU it is as exact as fp32 sums are, whatever torch's flags allow for sums in
        half precision.
        """

    @classmethod
    def add_product_(cls, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a b, in fp32: sums over chunks that are rounded to bf16 lose digits."""


class Mm:
    """``torch.mm``: cuBLAS or rocBLAS on GPUs, and on a CPU the library that torch is built with,
    MKL in its wheels for x86. On a CPU it multiplies half precision by copies in fp32."""

    rows_equal: ClassVar[bool] = False  # MKL has other kernels for a few rows
    in_pieces: ClassVar[bool] = False

    @staticmethod
    def absent() -> str | None:
        return None

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(without_gaps(x), without_gaps(weight), bias)

    @classmethod
    def multiply(cls, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        x, weight = without_gaps(x), without_gaps(weight)
        if out.dtype != x.dtype or without_gaps(out) is not out:
            out.copy_(cls.linear(x, weight, bias))
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    @classmethod
    def product(cls, out: Tensor, a: Tensor, b: Tensor) -> None:
        if device_kind(out) != "cpu":
            cls._product_on_gpu(out, a.to(b.dtype), b)
            return
        in_pieces = a.shape[1] > _LONGEST_SUM or a.dtype != b.dtype
        a, b = without_gaps(a), without_gaps(b)
        if a.dtype == b.dtype == out.dtype and not in_pieces and without_gaps(out) is out:
            torch.mm(a, b, out=out)
        elif out.dtype == torch.float32:
            cls.add_product_(out.zero_(), a, b)
        elif in_pieces:
            total = torch.zeros_like(out, dtype=torch.float32)
            cls.add_product_(total, a, b)
            out.copy_(total)
        else:
            out.copy_(a.to(b.dtype) @ b)

    @classmethod
    def _product_on_gpu(cls, out: Tensor, a: Tensor, b: Tensor) -> None:
        may_split = out.numel() <= _MAY_SPLIT or not _adds_in_fp32(b)
        if out.dtype == b.dtype and (b.dtype == torch.float32 or not may_split):
            torch.mm(a, b, out=out)
            return
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        if b.dtype == torch.float32:
            torch.mm(a, b, out=total)
        elif _gives_fp32(b):
            torch.mm(a, b, out_dtype=torch.float32, out=total)
        else:
            cls.add_product_(total.zero_(), a, b)
        if total is not out:
            out.copy_(total)

    @classmethod
    def add_product_(cls, total: Tensor, a: Tensor, b: Tensor) -> None:
        if b.dtype == torch.float32 and device_kind(total) != "cpu":
            torch.addmm(total, a.float(), b, out=total)
        elif _gives_fp32(b):
            torch.addmm(total, a.to(b.dtype), b, out_dtype=torch.float32, out=total)
        else:
            for piece in pieces(a.shape[1], _LONGEST_SUM):
                total.addmm_(a[:, piece].float(), b[piece].float())


def _adds_in_fp32(x: Tensor) -> bool:
    """Whether half-precision products of x are summed in fp32, as they are unless the user allows
    fp16."""
    return x.dtype != torch.float16 or not torch.backends.cuda.matmul.allow_fp16_accumulation


def _gives_fp32(x: Tensor) -> bool:
    """Whether ``torch.mm`` of half-precision matrices like x may have a result in fp32."""
    if device_kind(x) != "cuda" or not _adds_in_fp32(x):
        return False
    if torch.version.hip is not None:  # rocBLAS and hipBLASLt do, Composable Kernel does not
        return torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Ck
    return x.dtype == torch.float16 or not x.is_cuda or _has_bf16(x.device)


@functools.cache
def _has_bf16(device: torch.device) -> bool:
    """Whether a GPU has instructions for bf16; other GPUs convert it to multiply."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def without_gaps(x: Tensor) -> Tensor:
    """Matrices [..., M, N] that a half-precision product of a CPU may take: on a CPU a copy, if
    there is memory of others between rows or columns.

    AMX multiplies whole tiles. It fills up the last one with what lies beside a slice, times zeros
    of the other operand, and a NaN there is a NaN in the result.
    """
    if device_kind(x) != "cpu" or x.dtype == torch.float32 or x.dim() < 2:
        return x
    return x if has_no_gaps(x) else x.clone(memory_format=torch.contiguous_format)


def has_no_gaps(x: Tensor) -> bool:
    """Whether rows, or columns, of matrices [..., M, N] lie one behind the other in memory. Unlike
    ``is_contiguous``, this asks for the stride of a single row as well: libraries read by it."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride()[-2:]
    by_rows = across == 1 and down == max(columns, 1)
    return by_rows or (down == 1 and across == max(rows, 1))


class _InPieces(abc.ABC):
    """Products of a library without results in given memory."""

    in_pieces: ClassVar[bool] = True

    @staticmethod
    @abc.abstractmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    @classmethod
    def multiply(cls, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        for columns in pieces(len(weight)):
            part = None if bias is None else bias[columns]
            out[:, columns].copy_(cls.linear(x, weight[columns], part))

    @classmethod
    def product(cls, out: Tensor, a: Tensor, b: Tensor) -> None:
        if not a.shape[1]:
            out.zero_()
        single = a.shape[1] <= PIECE
        total = out if single or out.dtype == torch.float32 else out.float()
        for rows in pieces(len(a)):
            for terms in pieces(a.shape[1]):
                part = cls._part(a[rows, terms], b[terms])
                total[rows].copy_(part) if terms.start == 0 else total[rows].add_(part)
        if total is not out:
            out.copy_(total)

    @classmethod
    def add_product_(cls, total: Tensor, a: Tensor, b: Tensor) -> None:
        for rows in pieces(len(a)):
            for terms in pieces(a.shape[1]):
                total[rows].add_(cls._part(a[rows, terms], b[terms]))

    @classmethod
    def _part(cls, a: Tensor, b: Tensor) -> Tensor:
        return cls.linear(a.to(b.dtype), b.t())


class OneDnn(_InPieces):
    """oneDNN in fp32: about twice as fast as MKL on AMD processors with AVX-512, where MKL uses
    AVX2."""

    rows_equal: ClassVar[bool] = torch.__version__ >= "2.13"  # not on every CPU before

    @staticmethod
    def absent() -> str | None:
        if not torch.backends.mkldnn.is_available():
            return "torch is built without oneDNN"
        if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return f"torch {torch.__version__} has no operator mkldnn::_linear_pointwise"
        return None

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not (x.numel() and weight.numel()):
            return torch.nn.functional.linear(x, weight, bias)
        # A single row would go to another kernel, which rounds otherwise.
        rows = x.expand(2, -1) if len(x) == 1 else x
        # oneDNN has only slow reference code for parts of rows or columns.
        if not (weight.is_contiguous() or weight.t().is_contiguous()):
            weight = weight.contiguous()
        return _by_onednn(rows, weight, bias)[: len(x)]


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x wᵀ + b; it reads the numbers of a bias one after the other, whatever its stride."""
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class Bf16(_InPieces):
    """bf16 products in bf16, with sums in fp32 that are rounded once a piece: for CPUs with
    instructions for them."""

    rows_equal: ClassVar[bool] = False  # AMX has other kernels, and splits sums, for a few rows

    @staticmethod
    def absent() -> str | None:
        if has_bf16():
            return None
        return "the CPU, or the instruction set that torch uses, has no AVX512-BF16 and no AMX"

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(without_gaps(x), without_gaps(weight), bias)


class Fp32(_InPieces):
    """bf16 products by the library for fp32, with copies of the weight that are kept while a
    context of :func:`._cpu.fp32_copies.keeping` lasts, else a piece at a time: for CPUs without
    instructions for bf16, on which libraries convert bf16 within their loops."""

    rows_equal: ClassVar[bool] = False

    @staticmethod
    def absent() -> str | None:
        return None

    @classmethod
    def linear(cls, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.new_empty(len(x), len(weight), dtype=weight.dtype)
        for columns in pieces(len(weight)):
            part = None if bias is None else bias[columns]
            out[:, columns].copy_(cls._of_piece(x, weight[columns], part))
        return out

    @classmethod
    def _part(cls, a: Tensor, b: Tensor) -> Tensor:
        return cls._of_piece(a, b.t())

    @staticmethod
    def _of_piece(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x wᵀ + b in fp32, for a piece of the weight: what memory allows decides no bit."""
        library = LIBRARIES["float32"][choices().get("float32", MM).library]
        total = None if bias is None else bias.float().expand(len(x), -1)
        with torch.autocast("cpu", enabled=False):
            for terms in pieces(x.shape[1], _LONGEST_SUM):
                part = library.linear(x[:, terms].float(), in_fp32(weight[:, terms]))
                total = part if total is None else part.add_(total)
        return x.new_zeros(len(x), len(weight)) if total is None else total


LIBRARIES: dict[str, dict[str, type[Library]]] = {
    "float32": {"mm": Mm, "onednn": OneDnn},
    "bfloat16": {"mm": Mm, "bf16": Bf16, "fp32": Fp32},
}


def pieces(length: int, most: int | None = None) -> list[slice]:
    """A length in pieces of at most ``most``, by default ``PIECE``."""
    most = most or PIECE
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]


class Choice(NamedTuple):
    """The library of a dtype's products with weights of at least ``fewest`` elements; those with
    smaller ones are ``torch.mm``'s."""

    library: str
    fewest: int = 0


Choices = Mapping[str, Choice]  # by dtype
MM = Choice("mm")


def processor() -> str:
    """The CPU, the instruction set that torch uses, torch's version and the number of threads: what
    measured choices hold for."""
    name = _capabilities().get("cpu_name", "unknown CPU")
    instructions = torch.backends.cpu.get_cpu_capability()
    if limit := _onednn_limit():
        instructions += f", oneDNN up to {limit}"
    return f"{name}, {instructions}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@functools.cache
def _capabilities() -> dict[str, Any]:
    find = getattr(torch.cpu, "get_capabilities", dict)
    return dict(find())


def _wide() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def has_bf16() -> bool:
    """Whether the CPU has instructions for bf16 products, and torch and oneDNN use them."""
    return _wide() and _onednn_has_bf16()


def _onednn_has_bf16() -> bool:
    """Whether oneDNN, which computes torch's bf16 products, finds instructions for bf16."""
    found = _capabilities()
    able = bool(found.get("avx512_bf16") or found.get("amx_bf16"))
    return able and _onednn_limit() not in _WITHOUT_BF16


# Instruction sets that oneDNN may be limited to.
_WITHOUT_BF16 = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"),
    *("AVX512_CORE", "AVX512_CORE_VNNI"),
)


def _onednn_limit() -> str:
    """The instructions that the environment allows oneDNN; "" for all."""
    variables = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    named = next(filter(None, map(os.environ.get, variables)), "").upper()
    return "" if named in ("ALL", "DEFAULT") else named


class Rule(NamedTuple):
    """A choice for a kind of processors, and on which it was measured."""

    choice: Choice
    measured_on: str


def rules() -> dict[str, Rule]:
    """What the fixed rule chooses on this CPU, by dtype."""
    cpu = _capabilities()
    amd = any(vendor in cpu.get("cpu_name", "") for vendor in ("AMD", "Hygon"))
    if amd and _wide() and OneDnn.absent() is None:
        fp32 = Rule(Choice("onednn", _FEWEST), "AMD EPYC with AVX-512: up to twice as fast as mm")
    elif _wide():
        fp32 = Rule(MM, "Intel Xeon with AVX-512: oneDNN is as fast")
    else:
        fp32 = Rule(MM, "no such processor: PyTorch's own")
    if has_bf16():
        bf16 = Rule(Choice("bf16", _FEWEST), "AMD EPYC with AVX512-BF16")
    elif cpu.get("architecture") == "x86_64" and not _onednn_has_bf16():
        where = "Intel Xeon, AMD EPYC held to AVX512_CORE: 2 to 5 times as fast as mm"
        bf16 = Rule(Choice("fp32", _FEWEST), where)
    else:
        bf16 = Rule(MM, "no such processor: PyTorch's own")
    return {"float32": fp32, "bfloat16": bf16}


def by_rule() -> dict[str, Choice]:
    """oneDNN for fp32 on AMD processors with AVX-512; bf16 in bf16 where the CPU can, and on other
    x86 processors in fp32, with copies."""
    return {dtype: rule.choice for dtype, rule in rules().items()}


def table_path() -> Path:
    """The file of measured choices, which come before the rule: ``FASTRL_KERNELS_PRODUCTS_TABLE``,
    by default ``fastrl/products.json`` in the user's cache folder."""
    if named := os.environ.get(TABLE_VARIABLE):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastrl" / "products.json"


def read_table(path: Path) -> dict[str, Any]:
    """Measured choices by :func:`processor`, as JSON; none where there is no file.

    Raises:
        ValueError: a file that holds something else.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): remove it, or measure again") from None
    if not isinstance(table, dict) or not all(map(_is_measured, table.values())):
        raise ValueError(
            f"{path} holds no table of measured libraries: remove it, or measure again"
        )
    return table


def _is_measured(choices: Any) -> bool:
    """Whether a table's entry is a library and a number of elements for each dtype."""
    return isinstance(choices, dict) and all(
        isinstance(choice, list)
        and len(choice) == 2
        and isinstance(choice[0], str)
        and isinstance(choice[1], int)
        for choice in choices.values()
    )


def _measured(path: Path, of: str) -> dict[str, Any]:
    """What the table has for a processor; a file that cannot be read is warned of, and so is one
    that is named and not there."""
    try:
        table = read_table(path)
    except ValueError as error:
        warnings.warn(f"{error}. Until then a fixed rule chooses the libraries", stacklevel=4)
        return {}
    if os.environ.get(TABLE_VARIABLE) and not path.exists():
        warnings.warn(
            f"{TABLE_VARIABLE}={path}: there is no such file, and a fixed rule chooses the "
            "libraries: measure (fastrl env --measure), or unset it",
            stacklevel=4,
        )
    return table.get(of, {})


def checked(written: Mapping[str, Any], where: str) -> dict[str, Choice]:
    """Choices from JSON, ``{"float32": ["onednn", 65536]}``. One that cannot be used here becomes
    "mm", with a warning.

    Args:
        where: what the choices come from, for messages.

    Raises:
        ValueError: an unknown dtype or library.
    """
    choices_by_dtype = {}
    for dtype, (library, fewest) in written.items():
        if library not in LIBRARIES.get(dtype, ()):
            known = "; ".join(f"{key}: {', '.join(names)}" for key, names in LIBRARIES.items())
            raise ValueError(f"{where}: unknown library {library!r} for {dtype}. Known are {known}")
        why = LIBRARIES[dtype][library].absent() or inexact(dtype, library)
        if why is not None:
            warnings.warn(
                f"{where}: {dtype} products go to torch.mm instead of {library}: {why}",
                stacklevel=2,
            )
        choices_by_dtype[dtype] = Choice(library, int(fewest)) if why is None else MM
    return choices_by_dtype


@functools.cache
def inexact(dtype: str, library: str) -> str | None:
    """Why a library's results cannot be trusted; None where its rms error against float64 is at
    most four times that of ``torch.mm``."""
    kind, of = getattr(torch, dtype), LIBRARIES[dtype]
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(33, 320, generator=generator).to(kind)
    b = torch.randn(320, 272, generator=generator).to(kind)
    exact = a.double() @ b.double()

    def error(name: str) -> float:
        out = torch.empty(33, 272, dtype=kind)
        of[name].product(out, a, b)
        forward = of[name].linear(a, b.t())
        return max(float((x.double() - exact).square().mean().sqrt()) for x in (out, forward))

    with using(by_rule()):  # products within the comparison must not choose libraries in turn
        found, allowed = error(library), 4 * error("mm")
    if found <= allowed:  # not where it is NaN
        return None
    return f"its rms error against float64 is {found:.3g}, more than {allowed:.3g}"


BY_RULE = "by a fixed rule"


def source() -> str:
    """What the default libraries are chosen by: a variable, a table or a rule, in words."""
    named, path = forced(), table_path()
    if named is not None:
        return f"{LIBRARY_VARIABLE}={named}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings come where the libraries are used
        measured = _measured(path, processor())
    return f"measured, in {path}" if measured else BY_RULE


def forced() -> str | None:
    """What ``FASTRL_KERNELS_PRODUCTS`` names; None where a table or the rule chooses."""
    named = os.environ.get(LIBRARY_VARIABLE, "")
    return None if named in ("", "auto") else named


def as_json(chosen: Choices) -> dict[str, list[Any]]:
    """Choices as :func:`checked` reads them."""
    return {dtype: list(choice) for dtype, choice in chosen.items()}


def _default() -> Choices:
    """Choices by ``FASTRL_KERNELS_PRODUCTS``, else by the measured table, else by the rule."""
    return _found(forced(), processor(), table_path())


@functools.lru_cache(maxsize=16)
def _found(named: str | None, of: str, table: Path) -> Choices:
    if named is None:
        return {**by_rule(), **checked(_measured(table, of), str(table))}
    known = sorted({name for names in LIBRARIES.values() for name in names})
    if named not in known:
        raise ValueError(f"{LIBRARY_VARIABLE}={named}: choose auto, {', '.join(known)}")
    asked = {dtype: (named, 0) for dtype, names in LIBRARIES.items() if named in names}
    return {**by_rule(), **checked(asked, f"{LIBRARY_VARIABLE}={named}")}


def read_anew() -> None:
    """Has the table read again that another part of this process has written."""
    _found.cache_clear()


_chosen: ContextVar[Choices | None] = ContextVar("fastrl_kernels_products", default=None)


def choices() -> Choices:
    """The libraries of CPU products in use, by dtype."""
    return _chosen.get() or _default()


@contextlib.contextmanager
def using(chosen: Choices) -> Iterator[None]:
    """Context in which CPU products are computed by these libraries."""
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def library_for(weight: Tensor) -> type[Library]:
    """The library for products with a weight [N, K], forward and backward."""
    return library_of(weight.dtype, weight.numel()) if device_kind(weight) == "cpu" else Mm


def library_of(dtype: torch.dtype, elements: int) -> type[Library]:
    """The library of products in a dtype with weights of so many elements on a CPU; where the CPU
    stands for a GPU, for which a plan is made, the library there."""
    if kind_of_device(torch.device("cpu")) != "cpu":
        return Mm
    name = str(dtype).removeprefix("torch.")
    choice = choices().get(name, MM)
    return Mm if elements < choice.fewest else LIBRARIES.get(name, {}).get(choice.library, Mm)


class Linear(torch.autograd.Function):
    """x wᵀ + b by a library, with its gradients by the same."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, library: type[Library]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.library, ctx.bias_dtype = library, None if bias is None else bias.dtype
        return library.linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, dx, dweight, dbias = grad.reshape(-1, grad.shape[-1]), None, None, None
        if ctx.needs_input_grad[0]:
            dx = ctx.library.linear(flat, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(ctx.library, flat, x.flatten(0, -2), weight)
        if ctx.needs_input_grad[2]:
            dbias = flat.sum(0)
        return dx, dweight, dbias, None


def _weight_gradient(library: type[Library], grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """gradᵀ x, laid out in memory as the weight is."""
    if weight.is_contiguous():
        out = torch.empty_like(weight)
        library.product(out, grad.t(), x)
        return out
    out = torch.empty_like(weight.t(), memory_format=torch.contiguous_format)
    library.product(out, x.t(), grad)
    return out.t()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x wᵀ + b as ``torch.nn.functional.linear``, on a CPU by the fastest library for the weight.

    torch.compile, subclasses of tensors and dtypes that differ are left to PyTorch, and so is
    autocast but to bf16 on a CPU without instructions for it.

    Args:
        x: [..., K].
        weight: [N, K] of any strides: a transposed view costs no copy, nor does its gradient.
        bias: [N].

    Returns:
        [..., N], once differentiable.
    """
    library = _library_of_layer(x, weight)
    if x.dtype in (torch.bfloat16, torch.float16) and device_kind(x) == "cpu":
        # The copies have gradients; the leading dimensions of x have no gaps, either.
        x, weight = without_gaps(x.contiguous()), without_gaps(weight)
    if library is Mm:
        return torch.nn.functional.linear(x, weight, bias)
    if library is Fp32:  # autocast casts to bf16, too
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        bias = None if bias is None else bias.to(torch.bfloat16)
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        return Linear.apply(x, weight, bias, library)
    return library.linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], len(weight))


_PLAIN = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16)


def _library_of_layer(x: Tensor, weight: Tensor) -> type[Library]:
    plain = (
        x.device.type == "cpu"
        and x.dtype in _FLOATS
        and weight.dtype in _FLOATS
        and type(x) in _PLAIN
        and type(weight) in _PLAIN
        and not torch.compiler.is_compiling()
        and x.numel() > 0
    )
    if not plain:
        return Mm
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    else:
        dtype = weight.dtype if x.dtype == weight.dtype else torch.float16
    if dtype == torch.float32:
        return library_for(weight) if x.dtype == weight.dtype == dtype else Mm
    # Other libraries for bf16 multiply as PyTorch itself does.
    wide = dtype == torch.bfloat16 and library_of(dtype, weight.numel()) is Fp32
    return Fp32 if wide else Mm


class Packed:
    """A weight [N, K] in the layout of its library, for products without gradients. It is a copy:
    later changes of the weight do not reach it.

    Products with it are faster for a few rows. In fp32 they are those of oneDNN with the plain
    weight to the bit, in bf16 they are as exact, as CPUs with AMX may split sums otherwise.

    Args:
        wide: a bf16 weight is kept in fp32, in the layout of that library; results are bf16.
    """

    FEW: ClassVar[range] = range(5, 33)  # rows at which oneDNN is the faster for a tall weight

    def __init__(self, weight: Tensor, wide: bool = False) -> None:
        self.dtype, self.wide, self._rows = weight.dtype, wide, len(weight)
        weight = weight.detach().float() if wide else weight.detach()
        self._plain = wide and library_for(weight) is Mm
        if not self._plain:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.weight = weight

    @staticmethod
    def suits(weight: Tensor, library: type[Library]) -> bool:
        """Whether products with a weight are a library's that packs weights, or copies them."""
        cpu = device_kind(weight) == "cpu" and type(weight) in _PLAIN and weight.numel() > 0
        packs = library in (OneDnn, Bf16) and OneDnn.absent() is None
        return cpu and (packs or library is Fp32)

    @staticmethod
    def suits_few(weight: Tensor) -> bool:
        """Whether ``FEW`` rows are multiplied faster with a tall fp32 weight that is packed, though
        its library does not pack: MKL is as fast for w·xᵀ, but that has to be transposed."""
        cpu = device_kind(weight) == "cpu" and type(weight) in _PLAIN
        tall = weight.numel() >= _TALL and len(weight) >= 8 * weight.shape[1]
        by_mkl = library_for(weight) is Mm and torch.backends.mkl.is_available()
        free = forced() is None and OneDnn.absent() is None
        return cpu and weight.dtype == torch.float32 and tall and by_mkl and free

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x wᵀ + b [..., N] of x [..., K], which is cast to the weight's dtype."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self._rows, dtype=self.dtype)
        x = x.to(self.dtype)
        x = without_gaps(x.contiguous())
        bias = None if bias is None else bias.to(self.dtype)
        if self.wide:
            x, bias = x.float(), None if bias is None else bias.float()
        if self._plain:
            out = torch.nn.functional.linear(x, self.weight, bias)
        else:
            out = _by_onednn(x, self.weight, bias)
        return out.to(self.dtype)
