"""A language-model head in chunks: what the ops on hidden states share.

Logits exist a chunk at a time, in a workspace of bounded size. Products are library GEMMs.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .checks import (
    check_device,
    check_float,
    check_labels_of,
    check_mask,
    check_positive,
    check_temperature,
    checked_labels,
    counts,
)
from .dispatch import choose

# Bytes of logits that exist at a time. Less on a CPU, where a chunk should stay near a cache.
WORKSPACE_BYTES = {"cpu": 96 << 20}
DEFAULT_WORKSPACE_BYTES = 256 << 20
COLUMNS, FEWEST_COLUMNS = 8192, 1024  # of the vocabulary at a time, where logits are recomputed
_ROW_STEP = 16  # chunks hold a multiple of as many rows
_ALIGNED = 64  # elements: rows of a workspace begin at a multiple of it


class Transform(NamedTuple):
    """From a product x = h·w + b to a logit z = c·tanh(s·x/c)/T; without a cap z = s·x/T.

    The step before the last, tanh(s·x/c) or x itself, is called the signal here.
    """

    softcap: float | None
    logit_scale: float
    temperature: float
    temperatures: Tensor | None  # [N], in place of the number

    @property
    def inner(self) -> float:
        """s/c."""
        return 1.0 if self.softcap is None else self.logit_scale / self.softcap

    @property
    def outer(self) -> float:
        """What takes a signal to z·T."""
        return self.logit_scale if self.softcap is None else self.softcap

    def at(self, rows: slice) -> Transform:
        whole = self.temperatures
        return self if whole is None else self._replace(temperatures=whole[rows])

    def times_(self, x: Tensor, factor: float) -> Tensor:
        """x·factor/T in place, x [r] or [r, C]."""
        if factor != 1.0:
            x.mul_(factor)
        if self.temperatures is not None:
            return x.div_(self.temperatures if x.dim() == 1 else self.temperatures[:, None])
        return x if self.temperature == 1.0 else x.div_(self.temperature)


class HeadInputs(NamedTuple):
    """A checked call: N rows, and the shape that results have."""

    hidden: Tensor  # [N, H], 0 where a row does not count
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    labels: Tensor  # [N] int64, 0 where a row does not count
    counted: Tensor  # [N] bool
    transform: Transform
    shape: torch.Size
    backend: str
    workspace: int  # bytes

    @property
    def rows(self) -> Any:
        """The element-wise work: TorchRows or TritonRows."""
        return _row_work(self.backend)

    def with_tensors(
        self, hidden: Any, weight: Any, bias: Any, labels: Any, counted: Any, temperatures: Any
    ) -> HeadInputs:
        """The same call with other tensors, or None where autograd keeps them."""
        transform = self.transform._replace(temperatures=temperatures)
        return self._replace(
            hidden=hidden, weight=weight, bias=bias, labels=labels, counted=counted,
            transform=transform,
        )  # fmt: skip


def checked_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    logit_scale: float,
    mask: Tensor | None,
    workspace_bytes: int | None,
    check_labels: bool,
    backend: str,
) -> HeadInputs:
    """
    Raises:
        TypeError, ValueError: as the public ops say.
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is not None and type(x).__name__ == "DTensor":
            raise TypeError(
                f"{name} is a DTensor: pass {name}.full_tensor(), or call where the module that "
                "owns it has gathered it"
            )
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: it must be [V, H] with V > 0")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}: they must be "
            "[..., H] and [V, H]"
        )
    check_float("hidden", hidden)
    check_float("weight", weight)
    kind = hidden.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        hidden, weight = (x.to(torch.get_autocast_dtype(kind)) for x in (hidden, weight))
    if hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype}, weight {weight.dtype}: convert one of them")
    check_device("weight", weight, "hidden", hidden)
    if bias is not None:
        check_float("bias", bias)
        check_device("bias", bias, "hidden", hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be ({len(weight)},)")
        bias = bias.to(hidden.dtype)
    check_labels_of(labels, "hidden", hidden)
    tensor, number = check_temperature(temperature, "hidden", hidden)
    if mask is not None:
        check_mask(mask, "labels", labels)
        check_device("mask", mask, "hidden", hidden)
    if softcap is not None:
        softcap = check_positive("softcap", softcap)
    if workspace_bytes is None:
        workspace_bytes = WORKSPACE_BYTES.get(kind, DEFAULT_WORKSPACE_BYTES)
    elif workspace_bytes < 1:
        raise ValueError(f"workspace_bytes must be at least 1, got {workspace_bytes}")
    chosen = choose(backend, hidden, weight, labels)
    if check_labels or (chosen == "torch" and kind == "cpu"):
        labels = checked_labels(labels, mask, len(weight))

    if not torch.is_grad_enabled():  # which a Function's ``needs_input_grad`` does not say
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    counted = counts(labels, mask).reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    return HeadInputs(
        # What lies in rows that do not count may be anything, and 0·NaN would reach the weight.
        hidden=torch.where(counted[:, None], flat, 0.0),
        weight=weight,
        bias=bias,
        labels=torch.where(counted, labels.reshape(-1), 0).long(),
        counted=counted,
        transform=Transform(
            softcap,
            check_positive("logit_scale", logit_scale),
            number,
            None if tensor is None else torch.where(counted, tensor.reshape(-1).float(), 1.0),
        ),
        shape=labels.shape,
        backend=chosen,
        workspace=workspace_bytes,
    )


def _row_work(backend: str) -> Any:
    if backend == "triton":
        from ._triton.head_rows import TritonRows

        return TritonRows
    from .head_rows import TorchRows

    return TorchRows


def row_chunks(n: int, columns: int, itemsize: int, budget: int) -> list[slice]:
    """Rows in chunks whose [r, columns] fit the budget, of about the same length."""
    most = max(1, budget // max(1, columns * itemsize))
    if most > _ROW_STEP:
        most -= most % _ROW_STEP
    count = -(-n // most)
    length = -(-n // max(1, count))
    if length > _ROW_STEP:
        length = min(most, -(-length // _ROW_STEP) * _ROW_STEP)
    return [slice(start, min(start + length, n)) for start in range(0, n, max(1, length))]


def column_chunks(n: int, vocabulary: int, itemsize: int, budget: int) -> list[slice]:
    """Columns in chunks of 1k to 8k, as few as [n, C] fits the budget."""
    width = COLUMNS
    while width > FEWEST_COLUMNS and n * width * itemsize > budget:
        width //= 2
    return [slice(v, min(v + width, vocabulary)) for v in range(0, vocabulary, width)]


class Workspace:
    """Memory for one chunk of logits at a time, on the device of ``like``.

    On a CPU, where memory that is new costs as much as what is done in it, released memory is kept
    for the next call: at most one workspace of ``WORKSPACE_BYTES``, until :meth:`clear`.
    """

    _idle: ClassVar[list[Tensor]] = []

    def __init__(self, like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.columns, self.dtype = columns, dtype
        needed = rows * self._stride(columns) * dtype.itemsize
        memory = None
        if like.device.type == "cpu" and Workspace._idle:
            memory = Workspace._idle.pop()
        if memory is None or memory.numel() < needed:
            memory = torch.empty(needed, dtype=torch.uint8, device=like.device)
        self._memory: Tensor | None = memory

    @staticmethod
    def _stride(columns: int) -> int:
        return -(-columns // _ALIGNED) * _ALIGNED

    def chunk(self, rows: int, columns: int | None = None) -> Tensor:
        """[rows, columns] whose rows all begin at a 16-byte boundary, also where V is odd."""
        assert self._memory is not None
        stride = self._stride(self.columns)
        flat = self._memory[: rows * stride * self.dtype.itemsize].view(self.dtype)
        return flat.view(rows, stride)[:, : self.columns if columns is None else columns]

    def release(self) -> None:
        """Nothing looks at the chunks any more."""
        memory, self._memory = self._memory, None
        if memory is None or memory.device.type != "cpu":
            return
        if memory.numel() <= WORKSPACE_BYTES["cpu"] and not Workspace._idle:
            Workspace._idle.append(memory)

    @staticmethod
    def clear() -> None:
        """Frees what is kept for the next call."""
        Workspace._idle.clear()


def multiply(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out = h wᵀ + b."""
    if out.dtype != hidden.dtype:
        out.copy_(torch.nn.functional.linear(hidden, weight, bias))
    elif bias is None:
        torch.mm(hidden, weight.t(), out=out)
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, the sum in fp32: rounded to bf16 in between, chunk after chunk would lose."""
    if b.dtype == torch.float32 and total.device.type != "cpu":
        total.addmm_(a.float(), b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=torch.float32, out=total)
    else:
        # Piece by piece: copies in fp32 stay small, and CPU libraries are slow where sums are long.
        for start in range(0, a.shape[1], COLUMNS):
            piece = slice(start, start + COLUMNS)
            total.addmm_(a[:, piece].float(), b[piece].float())


def product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b, rounded once to its dtype."""
    in_pieces = out.device.type == "cpu" and (a.shape[1] > COLUMNS or a.dtype != b.dtype)
    if a.dtype == b.dtype == out.dtype and not in_pieces:
        torch.mm(a, b, out=out)
    elif out.dtype == torch.float32:
        add_product_(out.zero_(), a, b)
    elif in_pieces:
        total = torch.zeros_like(out, dtype=torch.float32)
        add_product_(total, a, b)
        out.copy_(total)
    else:
        out.copy_(a.to(b.dtype) @ b)
