"""Log-probabilities and entropies from hidden states: the language-model head fused in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ._cpu.head_pieces import ChunkInPieces, suits
from .argument_types import explains_types
from .first_order import first_order
from .gemm import library_for
from .lm_head import (
    HEAD_ARGUMENTS,
    HEAD_SCHEMA,
    HEAD_TENSORS,
    HeadInputs,
    checked_head,
    column_chunks,
    fake_gradients,
    flat_head,
    row_chunks,
    split_head,
    tiles,
)
from .operators import operator, or_empty
from .token_sets import TokenSets
from .types import Extras, RowGradients, RowStatistics
from .vocab_parallel import VocabParallel, Vocabulary
from .workspace import Workspace, result_like

# So many workspaces, a pair's two, keep logits for backward; other graphs compute theirs again.
_KEPT_WORKSPACES = 2


class Kept(NamedTuple):
    """The last chunk's logits, and the workspace that holds them."""

    rows: slice
    x: Tensor
    workspace: Workspace


class _Walk(Protocol):
    """Chunks [r, C] of logits, forward and backward."""

    def score(self, statistics: RowStatistics, keep: bool) -> Kept | None:
        """Fills ``statistics``, and with ``keep`` gives the last chunk's logits for backward,
        which releases their workspace; nothing where live graphs have kept enough."""

    def gradients(
        self, saved: RowStatistics, upstream: RowGradients, kept: Kept | None
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        """Gradients of products [r, C] with their rows and columns, all rows of some columns after
        another. The logits of ``kept`` need not be computed again."""


class _ByColumns:
    """Chunks of columns both ways, of all rows while they are wide (``tiles``). Backward begins
    with the last, which is kept."""

    def __init__(self, inputs: HeadInputs) -> None:
        self.inputs, self.dtype = inputs, inputs.head.chunk_dtype(inputs.hidden)
        n, vocabulary = len(inputs.hidden), len(inputs.weight)
        self.rows, self.columns = tiles(n, vocabulary, self.dtype.itemsize, inputs.workspace)

    def _workspace(self) -> Workspace:
        longest = self.rows[0].stop if self.rows else 0
        return Workspace(self.inputs.hidden, longest, self.columns[0].stop, self.dtype)

    def score(self, statistics: RowStatistics, keep: bool) -> Kept | None:
        inputs, memory = self.inputs, self._workspace()
        for columns in self.columns:
            for rows in self.rows:
                x = memory.chunk(rows.stop - rows.start, columns.stop - columns.start)
                inputs.fill(x, rows, columns)
                inputs.statistics(x, rows, statistics, first=columns.start)
        if keep and self.rows and memory.pin(_KEPT_WORKSPACES * inputs.workspace):
            return Kept(rows, x, memory)
        memory.release()
        return None

    def gradients(
        self, saved: RowStatistics, upstream: RowGradients, kept: Kept | None
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        inputs = self.inputs
        memory = self._workspace() if kept is None else kept.workspace
        there = kept is not None
        for columns in reversed(self.columns):
            for rows in reversed(self.rows):
                x = memory.chunk(rows.stop - rows.start, columns.stop - columns.start)
                if not there:
                    inputs.fill(x, rows, columns)
                there = False
                inputs.gradients_(x, rows, columns.start, saved, upstream.at(rows))
                yield x, rows, columns
        memory.release()


class _ByRows:
    """Chunks of whole rows forward, and of columns backward."""

    def __init__(self, inputs: HeadInputs, in_pieces: bool) -> None:
        self.inputs, self.dtype = inputs, inputs.head.chunk_dtype(inputs.hidden)
        self.in_pieces = in_pieces
        self.rows = inputs.row_chunks(self.dtype.itemsize)

    def score(self, statistics: RowStatistics, keep: bool) -> Kept | None:
        inputs = self.inputs
        longest = max((rows.stop - rows.start for rows in self.rows), default=0)
        if self.in_pieces:
            chunk = ChunkInPieces(inputs, statistics, None, longest, "logits" if keep else None)
            for rows in self.rows:
                chunk.score(rows)
                x = chunk.kept
            workspace = chunk.workspace
        else:
            workspace = Workspace(inputs.hidden, longest, len(inputs.weight), self.dtype)
            for rows in self.rows:
                x = workspace.chunk(rows.stop - rows.start)
                inputs.fill(x, rows)
                inputs.statistics(x, rows, statistics)
        if keep and self.rows and workspace.pin(_KEPT_WORKSPACES * inputs.workspace):
            return Kept(rows, x, workspace)
        workspace.release()
        return None

    def gradients(
        self, saved: RowStatistics, upstream: RowGradients, kept: Kept | None
    ) -> Iterator[tuple[Tensor, slice, slice]]:
        inputs = self.inputs
        last = slice(len(inputs.hidden), None) if kept is None else kept.rows
        again = last.start
        if kept is not None:
            inputs.gradients_(kept.x, last, 0, saved, upstream.at(last))
            if again == 0:
                yield kept.x, last, slice(0, len(inputs.weight))
                kept.workspace.release()
                return
        itemsize = self.dtype.itemsize
        column_walk = column_chunks(again, len(inputs.weight), itemsize, inputs.workspace)
        widest = column_walk[0].stop
        row_walk = row_chunks(again, widest, itemsize, inputs.workspace)
        longest = row_walk[0].stop if row_walk else 0
        memory = Workspace(inputs.hidden, longest, widest, self.dtype)
        for columns in column_walk:
            for rows in row_walk:
                x = memory.chunk(rows.stop - rows.start, columns.stop - columns.start)
                inputs.fill(x, rows, columns)
                inputs.gradients_(x, rows, columns.start, saved, upstream.at(rows))
                yield x, rows, columns
            if kept is not None:
                yield kept.x[:, columns], last, columns
        memory.release()
        if kept is not None:
            kept.workspace.release()


def _walk(inputs: HeadInputs, extras: bool = False) -> _Walk:
    if inputs.head.by_columns:
        return _ByColumns(inputs)
    return _ByRows(inputs, in_pieces=suits(inputs) and not extras)


class _Gradients:
    """Sums of the wanted gradients over chunks, all rows of some columns after another."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        dtype: torch.dtype,
        vocabulary: Vocabulary,
    ) -> None:
        self.hidden, self.weight, self._library = hidden, weight, library_for(weight)
        self._vocabulary = vocabulary
        self.dhidden = torch.empty_like(hidden, dtype=torch.float32) if wanted[0] else None
        self.dweight = result_like(weight, dtype) if wanted[1] else None
        if self.dweight is not None and not len(hidden):
            self.dweight.zero_()  # no chunk writes it
        self.dbias = (
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        )
        self._bias_dtype = None if bias is None else bias.dtype
        self._begun: slice | None = None  # the first chunk's columns
        self._rows = 0  # of the columns at hand, that have been added
        self._sum: Tensor | None = None  # of a chunk of dweight, over chunks of rows

    def add(self, x: Tensor, rows: slice, columns: slice) -> None:
        """Adds the gradients that follow from x [r, C], the gradients of some products."""
        self._begun = self._begun or columns
        if self.dhidden is not None:
            library, out = self._library, self.dhidden[rows]
            add = library.product if columns == self._begun else library.add_product_
            add(out, x, self.weight[columns])
        if self.dbias is not None:
            self.dbias[columns] += x.sum(0, dtype=torch.float32)
        if self.dweight is not None:
            self._add_to_weight(x, rows, columns)

    def _add_to_weight(self, x: Tensor, rows: slice, columns: slice) -> None:
        assert self.dweight is not None
        out, first = self.dweight[columns], self._rows == 0
        self._rows += len(x)
        last = self._rows == len(self.hidden)
        if last:
            self._rows = 0
        if first and last:
            self._library.product(out, x.t(), self.hidden)
            return
        if first:
            self._sum = (
                out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
            )
            self._library.product(self._sum, x.t(), self.hidden[rows])
            return
        assert self._sum is not None
        self._library.add_product_(self._sum, x.t(), self.hidden[rows])
        if last and self._sum is not out:
            out.copy_(self._sum)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients by hidden states, weight and bias, in their dtypes."""
        by_hidden = self.dhidden
        if by_hidden is not None:
            by_hidden = self._vocabulary.sum_(by_hidden).to(self.hidden.dtype)
        return (
            by_hidden,
            self.dweight,
            None if self.dbias is None else self.dbias.to(self._bias_dtype),
        )


def _forward(
    inputs: HeadInputs, entropy: bool, extras: tuple[str, ...], keep: bool
) -> tuple[list[Tensor | None], RowStatistics, Kept | None]:
    """The results (the last five of ``RowStatistics``, 0 where a row does not count), all
    statistics, and with ``keep`` the last chunk's logits for backward."""
    statistics = RowStatistics.empty(inputs.hidden, len(inputs.hidden), entropy, extras)
    kept = _walk(inputs, bool(extras)).score(statistics, keep)
    inputs.join_(slice(0, None), statistics)
    results = [None if x is None else x.masked_fill(~inputs.counted, 0) for x in statistics[3:]]
    return results, statistics, kept


def _backward(
    grads: tuple[Tensor | None, ...],
    inputs: HeadInputs,
    saved: RowStatistics,
    wanted: tuple[bool, ...],
    kept: Kept | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients by hidden states, weight and bias, where wanted; ``kept`` is overwritten."""
    upstream = _upstream(grads, inputs)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        dtype = inputs.weight_leaf.dtype
        gradients = _Gradients(
            inputs.hidden, inputs.weight, inputs.bias, wanted, dtype, inputs.vocabulary
        )
        for x, rows, columns in _walk(inputs).gradients(saved, upstream, kept):
            gradients.add(x, rows, columns)
    return gradients.results()


def _upstream(grads: tuple[Tensor | None, ...], inputs: HeadInputs) -> RowGradients:
    """Upstream gradients as the element-wise work takes them."""
    counted = inputs.counted
    flat = [
        None if g is None else torch.where(counted, g.reshape(-1).float(), 0.0) for g in grads[:2]
    ]
    by_logprobs = torch.zeros_like(counted, dtype=torch.float32) if flat[0] is None else flat[0]
    return RowGradients(by_logprobs.masked_fill(inputs.outside, math.nan), flat[1])


class _LinearLogprobs(torch.autograd.Function):
    """Logits of the last chunk stay in the workspace for backward, which computes the others once
    more."""

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
        wanted = any(ctx.needs_input_grad)
        results, statistics, kept = _forward(inputs, entropy, extras, keep=wanted)
        if wanted:
            saved = (hidden, inputs.weight, bias, *inputs.tensors()[3:])
            ctx.save_for_backward(*saved, *statistics[:3])
            ctx.inputs, ctx.kept = inputs.with_tensors(*(None,) * HEAD_TENSORS), kept
            ctx.set_materialize_grads(False)
        results = [None if x is None else x.view(inputs.shape) for x in results]
        ctx.mark_non_differentiable(*(x for x in results[2:] if x is not None))
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = ctx.inputs.with_tensors(*ctx.saved_tensors[:HEAD_TENSORS])
        saved = RowStatistics(*ctx.saved_tensors[HEAD_TENSORS:], *[None] * 5)
        kept, ctx.kept = ctx.kept, None  # overwritten: another backward computes all rows again
        return *_backward(grads, inputs, saved, ctx.needs_input_grad[:3], kept), None, None, None


@operator(
    f"({HEAD_SCHEMA}, bool entropy, str extras) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _linear_logprobs(*arguments: Any) -> tuple[Tensor, ...]:
    """The fields of ``RowStatistics``; logits are not kept."""
    inputs, (entropy, extras) = split_head(arguments)
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        results, statistics, _ = _forward(inputs, entropy, tuple(extras.split()), keep=False)
    return tuple(or_empty(x, statistics.exp_sum) for x in (*statistics[:3], *results))


@_linear_logprobs.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, entropy, extras = others
    empty = RowStatistics.empty(hidden, hidden.shape[0], entropy, tuple(extras.split()))
    return tuple(or_empty(x, empty.exp_sum) for x in empty)


@operator(
    f"({HEAD_SCHEMA}, Tensor? grad_logprobs, Tensor? grad_entropies, Tensor unscaled_max, "
    "Tensor exp_sum, Tensor? mean, bool[] wanted) -> (Tensor, Tensor, Tensor)"
)
def _linear_logprobs_backward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, (grad_logprobs, grad_entropies, *saved, wanted) = split_head(arguments)
    statistics = RowStatistics(*saved, *[None] * 5)
    gradients = _backward((grad_logprobs, grad_entropies), inputs, statistics, tuple(wanted), None)
    return tuple(or_empty(x, inputs.hidden) for x in gradients)


@_linear_logprobs_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    return fake_gradients(arguments[:3], arguments[-1])


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *head, ctx.entropy, _ = inputs
    ctx.numbers = head[HEAD_TENSORS:]
    ctx.save_for_backward(*head[:HEAD_TENSORS], *output[:3])
    ctx.set_materialize_grads(False)


@first_order
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, unscaled_max, exp_sum, mean = ctx.saved_tensors
    by_entropies, mean = (grads[4], mean) if ctx.entropy else (None, None)
    wanted = list(ctx.needs_input_grad[:3])
    gradients = _linear_logprobs_backward(
        *tensors, *ctx.numbers, grads[3], by_entropies, unscaled_max, exp_sum, mean, wanted
    )
    kept = (x if want else None for x, want in zip(gradients, wanted, strict=True))
    return *kept, *(None,) * (HEAD_ARGUMENTS + 2 - 3)


_linear_logprobs.register_autograd(_gradients, setup_context=_save_for_gradients)


def _compiled(
    inputs: HeadInputs, entropy: bool, extras: tuple[str, ...]
) -> tuple[Tensor | None, ...]:
    results = _linear_logprobs(*flat_head(inputs), entropy, " ".join(extras))[3:]
    asked = (True, entropy, *(name in extras for name in Extras._fields))
    logprobs, entropies, *others = (
        x.view(inputs.shape) if want else None for x, want in zip(results, asked, strict=True)
    )
    return logprobs, entropies, *(None if x is None else x.detach() for x in others)


@explains_types
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
    shift: bool | int = False,
    support: TokenSets | None = None,
    vocab_parallel: VocabParallel | None = None,
    workspace_bytes: int | None = None,
    check_labels: bool = False,
    backend: str = "auto",
) -> Any:
    """log softmax(z)[y] per token, z = c·tanh(s·(W h + b)/c)/T, and the entropy -Σ_v p_v log p_v.

    The logits [N, V] never exist: forward computes them in chunks, backward once more but for the
    last chunk, which takes 8·N·V·H flops in all. Products are library GEMMs, rounded to the head's
    dtype as a model rounds its own logits; everything after them is fp32, and gradients are summed
    in fp32 and rounded once. Run twice, it gives the same bits.

    On a GPU chunks are columns of the vocabulary, forward as in an online softmax: each has its
    rows of the weight's gradient in one product. On a CPU they are whole rows forward.

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
        shift: n < T, or True for 1: hidden states and labels are of the same T positions, and
            position t scores the label of t + n. Results and whatever else there is per token,
            ``mask`` and ``temperature``, are then [..., T - n], at t: a mask of labels is to be
            ``mask[..., n:]``. Nothing is copied for it in forward; the gradient of the last n
            hidden states is 0. The first n labels are not read.
        support: the tokens that each result's softmax is over, as :class:`TokenSets` of the results
            in their order: what a sampler that cuts its distribution has drawn from. Others have a
            probability of 0, and get no gradient. "mean_logit" does not go with it.
        vocab_parallel: where processes share the vocabulary, a :class:`VocabParallel`: weight and
            bias are the rows that this one has, labels, results and the hidden states' gradient
            are of the whole vocabulary, on every process.
        workspace_bytes: of logits that exist at a time; by default 256 MiB, 96 MiB on a CPU. As
            many stay for backward, twice as many for all live graphs together.
        check_labels: on a GPU, wait for it and raise where a label is out of range, or not in its
            set; without it such a token's log-probability and gradient are NaN, and -inf where it
            is not in its set. CPU tensors are always checked.
        backend: "auto", "triton" or "torch", for the work on logits; see ``explain``.

    Returns:
        Log-probabilities [...] fp32 in nats; with ``entropy`` also entropies [...] fp32; with
        ``extras`` also an :class:`Extras`. A tuple where it is more than one.

    Raises:
        TypeError: tensors that are not fp32, bf16 or fp16, or of two dtypes; labels that are not
            integers; a mask that is not boolean; a weight that is sharded (a DTensor); a shift
            that is not an integer.
        ValueError: shapes or devices that do not fit, V = 0, a temperature, soft cap or scale that
            is not positive and finite, a temperature that requires grad, unknown extras, a shift
            outside [0, T), sets of another number of rows or of another vocabulary; where checked,
            a label outside [0, V) other than -100, or one that is not in its set.

    Source: chunked heads are due to Hsu et al., 2024 (arXiv:2410.10989) and Wijmans et al., 2024
    (arXiv:2411.09009).
    """
    if isinstance(extras, str):
        raise TypeError(f"extras must be a tuple of names, got a string: pass ({extras!r},)")
    unknown = [name for name in extras if name not in Extras._fields]
    if unknown:
        raise ValueError(f"unknown extras {unknown}: choose from {', '.join(Extras._fields)}")
    if support is not None and "mean_logit" in extras:
        raise ValueError("mean_logit is of all tokens, and support leaves some out: ask for one")
    inputs = checked_head(
        hidden, weight, labels, bias, temperature, softcap, logit_scale, mask, shift,
        vocab_parallel, workspace_bytes, check_labels, backend, support,
    )  # fmt: skip
    with torch.autocast(inputs.hidden.device.type, enabled=False):
        if torch.compiler.is_compiling():
            logprobs, entropies, *others = _compiled(inputs, entropy, tuple(extras))
        else:
            logprobs, entropies, *others = _LinearLogprobs.apply(
                inputs.hidden, inputs.weight_leaf, inputs.bias, inputs, entropy, tuple(extras)
            )
    results: list[Any] = [logprobs]
    if entropy:
        results.append(entropies)
    if extras:
        results.append(Extras(*others))
    return results[0] if len(results) == 1 else tuple(results)
