"""Log-probabilities and entropies from hidden states: the language-model head fused in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head import (
    HeadInputs,
    Transform,
    Workspace,
    add_product_,
    checked_head,
    column_chunks,
    product,
    row_chunks,
)
from .head_rows import RowStatistics, Slopes

EXTRAS = ("log_sum_sq_probs", "mean_logit", "is_top1")


class Extras(NamedTuple):
    """Further statistics of each token's distribution, [...], without gradients; None if not asked
    for."""

    log_sum_sq_probs: Tensor | None  # log Σ_v p_v², fp32
    mean_logit: Tensor | None  # mean_v z_v, fp32
    is_top1: Tensor | None  # bool: the label is the largest logit, the first of several


class _LinearLogprobs(torch.autograd.Function):
    """Logits of the last chunk of rows stay in the workspace for backward, which computes those of
    the other rows once more, in chunks of columns."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: HeadInputs,
        entropy: bool,
        extras: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        n, vocabulary = len(hidden), len(weight)
        transform = inputs.transform
        statistics = RowStatistics.empty(hidden, n, entropy, extras)
        dtype = inputs.rows.chunk_dtype(hidden)
        chunks = row_chunks(n, vocabulary, dtype.itemsize, inputs.workspace)
        longest = max((rows.stop - rows.start for rows in chunks), default=0)
        workspace = Workspace(hidden, longest, vocabulary, dtype)
        for rows in chunks:
            x = workspace.chunk(rows.stop - rows.start)
            at = transform.at(rows)
            inputs.rows.signals(x, hidden[rows], weight, bias, at)
            inputs.rows.statistics(x, inputs.labels[rows], at, statistics.at(rows))

        if any(ctx.needs_input_grad):
            ctx.save_for_backward(
                hidden, weight, bias, inputs.labels, inputs.counted, transform.temperatures,
                statistics.signal_max, statistics.exp_sum, statistics.mean,
            )  # fmt: skip
            ctx.transform, ctx.rows = transform._replace(temperatures=None), inputs.rows
            ctx.workspace = inputs.workspace
            ctx.kept = (chunks[-1], x, workspace) if chunks else None
            ctx.set_materialize_grads(False)
        else:
            workspace.release()
        results = [
            None if x is None else x.masked_fill(~inputs.counted, 0).view(inputs.shape)
            for x in statistics[3:]
        ]
        ctx.mark_non_differentiable(*(x for x in results[2:] if x is not None))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, counted, temperatures, *kept = ctx.saved_tensors
        saved = RowStatistics(*kept, *[None] * 5)
        slopes = _slopes(grads, labels, counted, len(weight))
        transform = ctx.transform._replace(temperatures=temperatures)
        kept, ctx.kept = ctx.kept, None  # overwritten: another backward computes all rows again
        walk = _Walk(
            ctx.rows, hidden, weight, bias, labels, transform, saved, slopes, ctx.workspace
        )
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
            for x, rows, columns in walk(kept and kept[:2]):
                gradients.add(x, rows, columns)
            if kept is not None:
                kept[2].release()
            return *gradients.results(), None, None, None


class _Walk(NamedTuple):
    """Goes over all logits, column by column of chunks, and makes them gradients."""

    work: Any  # TorchRows or TritonRows
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    transform: Transform
    saved: RowStatistics
    slopes: Slopes
    workspace: int

    def __call__(self, kept: tuple[slice, Tensor] | None) -> Iterator[tuple[Tensor, slice, slice]]:
        """Gradients of products [r, C] with their rows and columns. ``kept``: the last rows, and
        their logits, which need not be computed again."""
        last, x_kept = kept if kept is not None else (slice(len(self.hidden), None), None)
        dtype, again = self.work.chunk_dtype(self.hidden), last.start
        if x_kept is not None:
            self._gradients_(x_kept, last, 0)
            if again == 0:
                yield x_kept, last, slice(0, len(self.weight))
                return
        column_walk = column_chunks(again, len(self.weight), dtype.itemsize, self.workspace)
        widest = column_walk[0].stop
        row_walk = row_chunks(again, widest, dtype.itemsize, self.workspace)
        longest = row_walk[0].stop if row_walk else 0
        memory = Workspace(self.hidden, longest, widest, dtype)
        for columns in column_walk:
            for rows in row_walk:
                x = memory.chunk(rows.stop - rows.start, columns.stop - columns.start)
                w, b = self.weight[columns], None if self.bias is None else self.bias[columns]
                self.work.signals(x, self.hidden[rows], w, b, self.transform.at(rows))
                self._gradients_(x, rows, columns.start)
                yield x, rows, columns
            if x_kept is not None:
                yield x_kept[:, columns], last, columns
        memory.release()

    def _gradients_(self, x: Tensor, rows: slice, first: int) -> None:
        self.work.gradients_(
            x, first, self.labels[rows], self.transform.at(rows), self.saved.at(rows),
            self.slopes.at(rows),
        )  # fmt: skip


def _slopes(
    grads: tuple[Tensor | None, ...], labels: Tensor, counted: Tensor, vocabulary: int
) -> Slopes:
    """Upstream gradients as the element-wise work takes them."""
    flat = [
        None if g is None else torch.where(counted, g.reshape(-1).float(), 0.0) for g in grads[:2]
    ]
    by_logprobs = torch.zeros_like(labels, dtype=torch.float32) if flat[0] is None else flat[0]
    outside = counted & ((labels < 0) | (labels >= vocabulary))
    return Slopes(by_logprobs.masked_fill(outside, math.nan), flat[1])


class _Gradients:
    """Sums up the gradients that are wanted, chunk of columns by chunk of columns."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self.hidden, self.weight = hidden, weight
        self.dhidden = torch.zeros_like(hidden, dtype=torch.float32) if wanted[0] else None
        new = torch.empty_like if len(hidden) else torch.zeros_like  # nobody writes it then
        self.dweight = new(weight) if wanted[1] else None
        self.dbias = (
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        )
        self._bias_dtype = None if bias is None else bias.dtype
        self._sum: Tensor | None = None  # of a chunk of dweight, over chunks of rows

    def add(self, x: Tensor, rows: slice, columns: slice) -> None:
        """x [r, C], gradients of products; rows in order for each chunk of columns."""
        if self.dhidden is not None:
            add_product_(self.dhidden[rows], x, self.weight[columns])
        if self.dbias is not None:
            self.dbias[columns] += x.sum(0, dtype=torch.float32)
        if self.dweight is None:
            return
        out, first, last = self.dweight[columns], rows.start == 0, rows.stop == len(self.hidden)
        if first and last:
            product(out, x.t(), self.hidden)
            return
        if first:
            self._sum = (
                out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
            )
            product(self._sum, x.t(), self.hidden[rows])
            return
        assert self._sum is not None
        add_product_(self._sum, x.t(), self.hidden[rows])
        if last and self._sum is not out:
            out.copy_(self._sum)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden states, weight and bias, in their dtypes."""
        return (
            None if self.dhidden is None else self.dhidden.to(self.hidden.dtype),
            self.dweight,
            None if self.dbias is None else self.dbias.to(self._bias_dtype),
        )


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    mask: Tensor | None = None,
    entropy: bool = False,
    extras: tuple[str, ...] = (),
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> Any:
    """log softmax(z)[y] per token, z = c·tanh(s·(W h + b)/c)/T, and the entropy -Σ_v p_v log p_v.

    The logits [N, V] never exist: forward computes them in chunks of rows, backward once more in
    chunks of columns, which takes 8·N·V·H flops in all. Products are library GEMMs, rounded to the
    head's dtype as a model rounds its own logits; everything after them is fp32, and gradients are
    summed in fp32 and rounded once. Run twice, it gives the same bits.

    Args:
        hidden: [..., H] fp32, bf16 or fp16: the rows that are wanted (a mask only zeroes). Under
            autocast, hidden states and weight are cast as ``nn.Linear`` would.
        weight: [V, H], the head's, in the same dtype. Frozen weights cost no gradient GEMM.
        labels: [...] integer token ids; -100 marks a token that does not count.
        bias: [V], added to the product.
        temperature: T > 0, a number or [...], not differentiable.
        softcap: c > 0, as Gemma 2 has it; None for no cap.
        logit_scale: s > 0, as Cohere and Granite have it.
        mask: [...] bool, True = counts. Where it or the label says no, results and gradients are 0.
        entropy: also return entropies, in nats, with their gradient.
        extras: names out of "log_sum_sq_probs", "mean_logit", "is_top1".
        workspace_bytes: of logits that exist at a time; by default 256 MiB, 96 MiB on a CPU.
        check_labels: on a GPU, wait for it and raise where a label is out of range; without it
            such a token's log-probability and gradient are NaN. CPU tensors are always checked.
        backend: "auto", "triton" or "torch", for the work on logits; see ``explain``.

    Returns:
        Log-probabilities [...] fp32 in nats; with ``entropy`` also entropies [...] fp32; with
        ``extras`` also an :class:`Extras`. A tuple where it is more than one.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16, or of two dtypes; labels that are not
            integers; a mask that is not boolean; a weight that is sharded (a DTensor).
        ValueError: shapes or devices that do not fit, V = 0, a temperature, soft cap or scale that
            is not positive and finite, a temperature that requires grad, unknown extras, a label
            outside [0, V) other than -100 where checked.

    Source: chunked heads are due to Hsu et al., 2024 (arXiv:2410.10989) and Wijmans et al., 2024
    (arXiv:2411.09009).
    """
    unknown = [name for name in extras if name not in EXTRAS]
    if unknown:
        raise ValueError(f"unknown extras {unknown}: choose from {', '.join(EXTRAS)}")
    inputs = checked_head(
        hidden, weight, labels, bias, temperature, softcap, logit_scale, mask, workspace_bytes,
        check_labels, backend,
    )  # fmt: skip
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        logprobs, entropies, *others = _LinearLogprobs.apply(
            inputs.hidden, inputs.weight, inputs.bias, inputs, entropy, tuple(extras)
        )
    results = [logprobs]
    if entropy:
        results.append(entropies)
    if extras:
        results.append(Extras(*others))
    return results[0] if len(results) == 1 else tuple(results)
