"""One pass over a language-model head for losses that are fused with it.

The derivative of such a loss by a token's log-prob does not depend on other tokens: each chunk of
logits gives log-probs and gradients in forward, and backward returns these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._cpu.head_pieces import ChunkInPieces, PieceGradient, suits
from .first_order import first_order
from .gemm import library_for
from .lm_head import HeadBackend, HeadInputs
from .types import RowGradients, RowStatistics
from .vocab_parallel import Vocabulary
from .workspace import Workspace, result_like


class HeadGradients:
    """Sums of the wanted gradients over chunks of rows, and pieces of the vocabulary.

    Args:
        dtype: the dtype of the weight's gradient.
        in_pieces: whether gradients come by :meth:`add_piece`.
        vocabulary: sums the processes' parts of the hidden states' gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, ...],
        chunks: int,
        dtype: torch.dtype,
        in_pieces: bool,
        vocabulary: Vocabulary,
    ) -> None:
        self.wanted, self._vocabulary = any(wanted), vocabulary
        self.hidden, self.weight, self.bias, self.dtype = hidden, weight, bias, dtype
        self._library = library_for(weight)
        self.dhidden = self.dweight = self.dbias = None
        if wanted[0]:
            # Pieces are summed in fp32, and so are processes' parts.
            if in_pieces:
                self.dhidden = torch.zeros_like(hidden, dtype=torch.float32)
            else:
                summed = torch.float32 if vocabulary.shared else hidden.dtype
                self.dhidden = torch.empty_like(hidden, dtype=summed)
        if wanted[1]:
            # One chunk is rounded once as it is; several are summed in fp32.
            self.dweight = result_like(weight, dtype if chunks == 1 else torch.float32)
            if not chunks:
                self.dweight.zero_()  # no chunk writes it
        if bias is not None and wanted[2]:
            self.dbias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, x: Tensor, rows: slice) -> None:
        """Adds the gradients that follow from x [r, V], the gradients of some rows' products."""
        if self.dhidden is not None:
            out = self.dhidden[rows]
            # Sums over a vocabulary are long: a GPU's library may split them, see `product`.
            fp32 = out.dtype == torch.float32
            total = out if fp32 else torch.empty_like(out, dtype=torch.float32)
            self._library.product(total, x, self.weight)
            if not fp32:
                out.copy_(total)
        if self.dweight is not None and rows.start == 0:
            self._library.product(self.dweight, x.t(), self.hidden[rows])
        elif self.dweight is not None:
            self._library.add_product_(self.dweight, x.t(), self.hidden[rows])
        if self.dbias is not None:
            self.dbias += x.sum(0, dtype=torch.float32)

    def add_piece(self, gradient: PieceGradient, rows: slice, columns: slice) -> None:
        """Adds the gradients that follow from those of products with some rows of the weight."""
        probs, factors, labels, at_labels = gradient
        if self.dhidden is not None:
            weight, dhidden = self.weight[columns], self.dhidden[rows]
            dhidden.addcmul_(self._library.linear(probs, weight.t()), factors[:, None])
            picked = weight[labels.columns].float().mul_(at_labels[:, None])
            dhidden.index_add_(0, labels.rows, picked)
        if self.dweight is not None:
            out, hidden = self.dweight[columns], self.hidden[rows]
            total = out if out.dtype == torch.float32 else out.float()
            add = self._library.product if rows.start == 0 else self._library.add_product_
            add(total, probs.t(), (hidden * factors[:, None]).to(hidden.dtype))
            picked = hidden[labels.rows].float().mul_(at_labels[:, None])
            total.index_add_(0, labels.columns, picked)
            if total is not out:
                out.copy_(total)
        if self.dbias is not None:
            dbias = self.dbias[columns]
            dbias.addmv_(probs.float().t(), factors)
            dbias.index_add_(0, labels.columns, at_labels)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients by hidden states, weight and bias, in their dtypes."""
        by_hidden = self.dhidden
        if by_hidden is not None:
            by_hidden = self._vocabulary.sum_(by_hidden).to(self.hidden.dtype)
        return (
            by_hidden,
            None if self.dweight is None else self.dweight.to(self.dtype),
            None if self.dbias is None or self.bias is None else self.dbias.to(self.bias.dtype),
        )


class _WholeChunk:
    """A chunk of up to ``longest`` rows of all logits, computed by the op's backend."""

    def __init__(
        self,
        inputs: HeadInputs,
        statistics: RowStatistics,
        gradients: HeadGradients,
        longest: int,
        entropies_learn: bool,
    ) -> None:
        self.inputs, self.statistics, self.gradients = inputs, statistics, gradients
        self._once = gradients.wanted and not entropies_learn
        dtype = inputs.head.chunk_dtype(inputs.hidden)
        self._workspace = Workspace(inputs.hidden, longest, len(inputs.weight), dtype)
        self._logits: Tensor

    def score(self, rows: slice) -> None:
        self._logits = self._workspace.chunk(rows.stop - rows.start)
        self.inputs.fill(self._logits, rows)
        self.inputs.statistics(self._logits, rows, self.statistics, once=self._once)

    def backward(self, rows: slice, upstream: RowGradients) -> None:
        self.inputs.gradients_(self._logits, rows, 0, self.statistics, upstream, once=self._once)
        self.gradients.add(self._logits, rows)

    def release(self) -> None:
        self._workspace.release()


class HeadPass:
    """One pass over N rows, a chunk of logits at a time.

    ``for rows in head_pass`` computes a chunk's logits and statistics; in the loop :meth:`backward`
    takes the loss's derivatives by its log-probs.

    Args:
        entropy: also compute entropies.
        wanted: which gradients, by hidden states, weight and bias.
        entropies_learn: the loss has a derivative by entropies, too.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        entropy: bool,
        wanted: tuple[bool, ...],
        entropies_learn: bool = False,
    ) -> None:
        self.inputs, self._entropies_learn = inputs, entropies_learn
        self.statistics = RowStatistics.empty(inputs.hidden, len(inputs.hidden), entropy, ())
        self._in_pieces = suits(inputs) and not entropies_learn
        dtype = inputs.weight.dtype if self._in_pieces else inputs.head.chunk_dtype(inputs.hidden)
        self._chunks = inputs.row_chunks(dtype.itemsize, _bytes_of_sum(inputs, wanted))
        self._gradients = HeadGradients(
            inputs.hidden,
            inputs.weight,
            inputs.bias,
            wanted,
            len(self._chunks),
            inputs.weight_leaf.dtype,
            self._in_pieces,
            inputs.vocabulary,
        )
        self._chunk: Any = None

    @property
    def wanted(self) -> bool:
        """Whether any gradient is wanted."""
        return self._gradients.wanted

    @property
    def chunks(self) -> int:
        """The number of chunks of rows."""
        return len(self._chunks)

    def __iter__(self) -> Iterator[slice]:
        longest = max((rows.stop - rows.start for rows in self._chunks), default=0)
        of_chunk = self.inputs, self.statistics, self._gradients, longest
        if self._in_pieces:
            self._chunk = ChunkInPieces(*of_chunk)
        else:
            self._chunk = _WholeChunk(*of_chunk, self._entropies_learn)
        for rows in self._chunks:
            self._chunk.score(rows)
            self.inputs.join_(rows, self.statistics)
            yield rows
        self._chunk.release()
        self._chunk = None

    def backward(self, rows: slice, slopes: Tensor, of_entropies: Tensor | None = None) -> None:
        """Adds the rows' part to the gradients.

        Args:
            slopes: [r] d loss/d log π, NaN where the log-prob is.
            of_entropies: [r] d loss/d H, with ``entropies_learn``.
        """
        self._chunk.backward(rows, RowGradients(slopes, of_entropies))

    def per_token(self, x: Tensor) -> Tensor:
        """x [N] in the labels' shape, with 0 where a token does not count."""
        return x.masked_fill(~self.inputs.counted, 0).view(self.inputs.shape)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self._gradients.results()


def _bytes_of_sum(inputs: HeadInputs, wanted: tuple[bool, ...]) -> int:
    """The bytes of the fp32 sum that several chunks need for the weight's gradient, beside a
    gradient in another dtype."""
    beside = wanted[1] and inputs.weight_leaf.dtype != torch.float32
    elements = inputs.vocabulary.widest * inputs.weight.shape[1]
    return elements * torch.float32.itemsize if beside else 0


class HandOut(torch.autograd.Function):
    """Gives a loss gradients by hidden states, weight and bias that have been computed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: Tensor,
        gradients: tuple[Tensor | None, ...],
        head: type[HeadBackend],
        op: str,
    ) -> Tensor:
        ctx.gradients, ctx.head, ctx.op = gradients, head, op
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(loss)  # the result is this tensor, neither a copy nor a view
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                f"{ctx.op} hands its gradients out once: call it again, or make the loss of "
                "linear_logprobs where a graph is retained"
            )
        for x in gradients:
            if x is not None:
                ctx.head.scale_(x, grad)
        return *gradients, None, None, None, None


def wanted_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    return tuple(x is not None and x.requires_grad and torch.is_grad_enabled() for x in tensors)


# For operators whose last three results are the gradients, and whose last argument is which of them
# are wanted.
def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted, ctx.arguments = inputs[-1], len(inputs)
    ctx.save_for_backward(*output[-3:])
    ctx.set_materialize_grads(False)


@first_order
def scaled_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * ctx.arguments
    gradients = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scaled = ((x * grad).to(x.dtype) if want else None for x, want in gradients)
    return *scaled, *(None,) * (ctx.arguments - 3)
